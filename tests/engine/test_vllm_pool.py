"""Layers of vLLM over the store: their geometry, and none of their weights."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from manylora.errors import Unavailable  # noqa: E402
from manylora.kernels.pages import Module  # noqa: E402


@pytest.fixture(scope="module")
def pool() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from manylora.engine import vllm_pool
    return vllm_pool


def linear(pool: Any, *widths: int, in_features: int = 6) -> Any:
    """A linear layer with `widths` slices, as vLLM makes it for zero slots."""

    class Layer(pool.BaseLinearLayerWithLoRA):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    layer = Layer()
    layer.n_slices, layer.tp_size = len(widths), 1
    layer.lora_a_stacked = tuple(torch.zeros(0, 1, 8, in_features) for _ in widths)
    layer.lora_b_stacked = tuple(torch.zeros(0, 1, width, 8) for width in widths)
    layer.base_layer = torch.nn.Module()
    layer.base_layer.output_sizes = list(widths)
    return layer


def test_geometry_is_that_of_layers_without_slots(pool: Any) -> None:
    assert pool._geometry("qkv", linear(pool, 4, 2, 2)) == Module("qkv", 6, (4, 2, 2))
    with pytest.raises(Unavailable, match="not supported by the adapter pool"):
        pool._geometry("experts", SimpleNamespace(lora_a_stacked=(), lora_b_stacked=()))


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
