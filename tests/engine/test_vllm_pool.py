"""What of an adapter's weights reaches the store: each slice's factors, cut to this rank's shard."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from manylora.errors import InvalidAdapter, Unavailable  # noqa: E402
from manylora.kernels.pages import Module  # noqa: E402


@pytest.fixture(scope="module")
def pool() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from manylora.engine import vllm_pool
    return vllm_pool


def linear(pool: Any, *widths: int, in_features: int = 6, tp_size: int = 1) -> Any:
    """A linear layer with `widths` slices, as vLLM makes it for zero slots."""

    class Layer(pool.BaseLinearLayerWithLoRA):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def slice_lora_a(self, a: Any) -> Any:
            return a

        def slice_lora_b(self, b: Any) -> Any:
            return [each if each is None else each[: each.shape[0] // tp_size] for each in b]

        def expand_packed_lora(self, a: Any, b: Any) -> Any:
            return [a[0], a[0], a[1]], [*torch.split(b[0], widths[:2]), b[1]]

    layer = Layer()
    layer.n_slices, layer.tp_size = len(widths), tp_size
    layer.lora_a_stacked = tuple(torch.zeros(0, 1, 8, in_features) for _ in widths)
    layer.lora_b_stacked = tuple(torch.zeros(0, 1, width, 8) for width in widths)
    layer.base_layer = torch.nn.Module()
    layer.base_layer.output_sizes = list(widths)
    return layer


def a(lora_rank: int = 2) -> torch.Tensor:
    return torch.randn(lora_rank, 6)


def test_geometry_is_that_of_layers_without_slots(pool: Any) -> None:
    assert pool._geometry("qkv", linear(pool, 4, 2, 2)) == Module("qkv", 6, (4, 2, 2))
    with pytest.raises(Unavailable, match="not supported by the adapter pool"):
        pool._geometry("experts", SimpleNamespace(lora_a_stacked=(), lora_b_stacked=()))


def test_one_slice_is_taken_as_it_is(pool: Any) -> None:
    first, second = a(), torch.randn(4, 2)
    [(got_a, got_b)] = pool._factors("o", linear(pool, 4), first, second)
    assert got_a is first
    assert got_b is second


def test_slices_keep_their_places_and_gaps(pool: Any) -> None:
    parts = [a(), None, a(3)], [torch.randn(4, 2), None, torch.randn(2, 3)]
    found = pool._factors("qkv", linear(pool, 4, 2, 2), *parts)
    assert found[0] == (parts[0][0], parts[1][0])
    assert found[1] is None
    assert found[2] == (parts[0][2], parts[1][2])


def test_one_tensor_for_a_layer_in_slices_is_split_and_shares_its_a(pool: Any) -> None:
    whole_a, whole_b = a(), torch.randn(8, 2)
    found = pool._factors("qkv", linear(pool, 4, 2, 2), whole_a, whole_b)
    assert all(factors[0] is whole_a for factors in found)
    assert torch.equal(torch.cat([factors[1] for factors in found]), whole_b)
    assert [factors[1].shape[0] for factors in found] == [4, 2, 2]


def test_packed_slices_are_expanded(pool: Any) -> None:
    packed_a, packed_b = [a(), a()], [torch.randn(6, 2), torch.randn(2, 2)]
    found = pool._factors("qkvz", linear(pool, 4, 2, 2), packed_a, packed_b)
    assert [factors[1].shape[0] for factors in found] == [4, 2, 2]
    assert found[1][0] is packed_a[0]
    assert found[2][0] is packed_a[1]


def test_a_rank_takes_its_shard(pool: Any) -> None:
    found = pool._factors("gate_up", linear(pool, 4, 4, tp_size=2), [a(), None], [torch.randn(8, 2), None])
    assert found[0][1].shape == (4, 2)
    assert found[1] is None


def test_half_a_pair_is_refused(pool: Any) -> None:
    with pytest.raises(InvalidAdapter, match="qkv has only one of lora_A and lora_B"):
        pool._factors("qkv", linear(pool, 4, 2), [a(), a()], [torch.randn(4, 2), None])


def test_layers_are_made_for_zero_slots_only_meanwhile(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, asked = pool.model_manager, []

    def from_layer(layer: str, max_loras: int, *rest: Any) -> None:
        asked.append((layer, max_loras, *rest))

    def from_logits(layer: str, lm_head: str, max_loras: int, *rest: Any) -> None:
        asked.append((layer, lm_head, max_loras, *rest))

    monkeypatch.setattr(manager, "from_layer", from_layer)
    monkeypatch.setattr(manager, "from_layer_logits_processor", from_logits)
    with pytest.raises(RuntimeError), pool._layers_without_weights():
        manager.from_layer("o", 1024, "config", "packed")
        manager.from_layer_logits_processor("logits", "head", 1024, "config")
        raise RuntimeError
    assert asked == [("o", 0, "config", "packed"), ("logits", "head", 0, "config")]
    assert manager.from_layer is from_layer
    assert manager.from_layer_logits_processor is from_logits
