"""The CPU's wrapper over a store, told a step's mapping as vLLM tells it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from manylora.engine import lora_ops  # noqa: E402
from manylora.kernels.exact import pack_exact  # noqa: E402
from manylora.kernels.packing import Factors  # noqa: E402
from manylora.kernels.pages import Module  # noqa: E402
from manylora.kernels.stores import ExactStore  # noqa: E402

MODULES = (Module("qkv", 6, (4, 2, 2)), Module("embed", 9, (6,), is_lookup=True), Module("lm_head", 6, (9,)))
QKV, EMBED, HEAD = range(len(MODULES))
Weights = dict[int, list[Factors]]


def weights() -> Weights:
    return {
        number: [(torch.randn(3, module.in_features), torch.randn(width, 3)) for width in module.widths]
        for number, module in enumerate(MODULES)
    }


def mapping(tokens: list[int], sampled: list[int]) -> Any:
    return SimpleNamespace(index_mapping=tuple(tokens), prompt_mapping=tuple(sampled))


class World:
    """A wrapper over two adapters, 5 and 9."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from manylora.engine.cpu_path import GroupedWrapper
        torch.manual_seed(0)
        self.store, self.weights = ExactStore(MODULES, 1 << 20), {5: weights(), 9: weights()}
        for lora_id, each in self.weights.items():
            self.store.place(lora_id, pack_exact(self.store.modules, each))
        self.wrapper = GroupedWrapper(16, 4, torch.device("cpu"), lora_config=None)
        self.wrapper.attach(self.store)

    def step(self, tokens: list[int], sampled: list[int]) -> None:
        self.wrapper.update_metadata(mapping(tokens, sampled), [], 3, 9)

    def linear(self, y: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> None:
        marks = (lora_ops.marker(QKV),)
        self.wrapper.add_lora_linear(y, x, marks, marks, scale, MODULES[QKV].widths)

    def delta(self, lora_id: int, number: int, x: torch.Tensor) -> torch.Tensor:
        """What an adapter adds for one row, slice by slice; of an embedding `x` is an id."""
        parts = self.weights[lora_id][number]
        lookup = MODULES[number].is_lookup
        return torch.cat([b @ (a[:, int(x)] if lookup else a @ x) for a, b in parts])


@pytest.fixture
def world() -> World:
    return World()


def test_each_token_gets_its_adapter_and_the_base_model_none(world: World) -> None:
    tokens = [5, 0, 9, 5, -1]
    world.step(tokens, [5])
    x, y = torch.randn(5, 6), torch.randn(5, 8)
    before = y.clone()
    world.linear(y, x)
    for row, lora_id in enumerate(tokens):
        if lora_id > 0:
            torch.testing.assert_close(y[row], before[row] + world.delta(lora_id, QKV, x[row]))
        else:
            assert torch.equal(y[row], before[row])


def test_an_embedding_adds_for_ids(world: World) -> None:
    world.step([9, 0, 5], [])
    ids, y = torch.tensor([8, 1, 0]), torch.zeros(3, 6)
    world.wrapper.add_lora_embedding(y, ids, lora_ops.marker(EMBED))
    torch.testing.assert_close(y[0], world.delta(9, EMBED, ids[0]))
    assert torch.equal(y[1], torch.zeros(6))
    torch.testing.assert_close(y[2], world.delta(5, EMBED, ids[2]))


def test_logits_go_by_sampled_rows_not_by_tokens(world: World) -> None:
    world.step([5, 5, 5, 9, 0], [5, 9, 0])
    x, y = torch.randn(3, 6), torch.zeros(3, 9)
    world.wrapper.add_lora_logits(y, x, lora_ops.marker(HEAD), lora_ops.marker(HEAD), 1.0)
    torch.testing.assert_close(y[0], world.delta(5, HEAD, x[0]))
    torch.testing.assert_close(y[1], world.delta(9, HEAD, x[1]))
    assert torch.equal(y[2], torch.zeros(9))


def test_a_step_without_adapters_changes_nothing(world: World) -> None:
    world.step([5, 9], [5, 9])
    world.step([0, 0], [0, 0])
    y = torch.randn(2, 8)
    before = y.clone()
    world.linear(y, torch.randn(2, 6))
    assert torch.equal(y, before)


def test_a_step_that_needs_what_is_gone_fails_rather_than_answers(world: World) -> None:
    world.store.remove(9)
    with pytest.raises(KeyError):
        world.step([5, 9], [])


def test_two_wrappers_are_two_paths(world: World) -> None:
    other = World()
    other.step([0], [])
    world.step([5], [])
    x, y, z = torch.randn(1, 6), torch.zeros(1, 8), torch.zeros(1, 8)
    world.linear(y, x)
    other.linear(z, x)
    torch.testing.assert_close(y[0], world.delta(5, QKV, x[0]))
    assert torch.equal(z, torch.zeros(1, 8))


def test_what_a_layer_may_not_do_by_itself_is_an_error(world: World) -> None:
    with pytest.raises(NotImplementedError):
        world.wrapper.add_shrink()
    with pytest.raises(NotImplementedError):
        world.wrapper.add_expand()
