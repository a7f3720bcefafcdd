"""The operators, on the CPU: they change their first argument, under torch.compile too, and reach the right module."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from manylora.engine import lora_ops  # noqa: E402


class Scribe:
    """A path that adds the module's number to y, and remembers the shapes that it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[int, ...], tuple[int, ...]]] = []

    def add_linear(self, y: torch.Tensor, x: torch.Tensor, number: int) -> None:
        self.calls.append(("linear", number, tuple(y.shape), tuple(x.shape)))
        y.add_(number)

    def add_embedding(self, y: torch.Tensor, ids: torch.Tensor, number: int) -> None:
        self.calls.append(("embedding", number, tuple(y.shape), tuple(ids.shape)))
        y.add_(10 * number)


@pytest.fixture
def scribe() -> Scribe:
    return Scribe()


@pytest.fixture
def path(scribe: Scribe) -> int:
    return lora_ops.register_path(scribe)


def test_each_changes_y_in_place(scribe: Scribe, path: int) -> None:
    y = torch.zeros(3, 4)
    assert lora_ops.add_lora(y, torch.ones(3, 5), lora_ops.marker(7), path) is None
    assert torch.equal(y, torch.full((3, 4), 7.0))
    assert lora_ops.add_lora_embedding(y, torch.arange(3), lora_ops.marker(2), path) is None
    assert torch.equal(y, torch.full((3, 4), 27.0))
    assert scribe.calls == [("linear", 7, (3, 4), (3, 5)), ("embedding", 2, (3, 4), (3,))]


def test_leading_dimensions_are_tokens(scribe: Scribe, path: int) -> None:
    y = torch.zeros(2, 3, 4)
    lora_ops.add_lora(y, torch.ones(2, 3, 5), lora_ops.marker(1), path)
    lora_ops.add_lora_embedding(y, torch.zeros(2, 3, dtype=torch.int64), lora_ops.marker(1), path)
    assert torch.equal(y, torch.full((2, 3, 4), 11.0))
    assert [call[2:] for call in scribe.calls] == [((6, 4), (6, 5)), ((6, 4), (6,))]


def test_paths_are_kept_apart(path: int) -> None:
    other = Scribe()
    number = lora_ops.register_path(other)
    assert number != path
    lora_ops.add_lora(torch.zeros(1, 1), torch.zeros(1, 1), lora_ops.marker(5), number)
    assert [call[1] for call in other.calls] == [5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_stand_in_a_whole_graph_that_equal_layers_share(scribe: Scribe, path: int) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def layer(x: torch.Tensor, ids: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
        y = x @ torch.ones(5, 4)
        lora_ops.add_lora(y, x, marker, path)
        lora_ops.add_lora_embedding(y, ids, marker, path)
        return 2 * y

    x, ids = torch.ones(3, 5), torch.arange(3)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for number in (3, 4):
        marker = lora_ops.marker(number)
        assert torch.equal(compiled(x, ids, marker), torch.full((3, 4), 2 * (5.0 + 11 * number)))
    assert len(graphs) == 1
    eager = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(eager(x, ids, lora_ops.marker(1)), layer(x, ids, lora_ops.marker(1)))
    assert [call[:2] for call in scribe.calls[:4]] == [("linear", 3), ("embedding", 3), ("linear", 4), ("embedding", 4)]


def test_the_declared_mutation_is_the_only_one(path: int) -> None:
    for operator in (lora_ops.add_lora, lora_ops.add_lora_embedding):
        arguments = operator.default._schema.arguments
        assert [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write] == ["y"]
    x = torch.ones(2, 3)
    torch.library.opcheck(
        lora_ops.add_lora.default,
        (torch.zeros(2, 4), x, lora_ops.marker(1), path),
        test_utils=("test_schema", "test_faketensor"),
    )
