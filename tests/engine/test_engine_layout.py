"""What a worker writes down of its layers, on vLLM's own layer classes with hand-made geometry."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from manylora.kernels.pages import Module  # noqa: E402
from manylora.staging.layout import NameMap, Part  # noqa: E402


@pytest.fixture(scope="module")
def layouts() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from manylora.engine import engine_layout
    return engine_layout


@pytest.fixture(scope="module")
def columns() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.lora.layers import column_parallel_linear
    return column_parallel_linear


def layer(kind: Any, *, tp: tuple[int, int], n_slices: int, **attributes: Any) -> Any:
    """A layer of vLLM's class `kind`, with what its shards depend on and nothing else."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.tp_size, made.tp_rank, made.n_slices = tp[1], tp[0], n_slices
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def test_a_layer_in_slices_names_its_parts(layouts: Any) -> None:
    module = Module("l.qkv_proj", 6, (4, 2, 2))
    assert layouts.parts_of(module, ["l.q_proj", "l.k_proj", "l.v_proj"]) == (
        Part("l.q_proj", 0, 1),
        Part("l.k_proj", 1, 1),
        Part("l.v_proj", 2, 1),
    )


def test_fewer_parts_than_slices_leave_the_first_several(layouts: Any) -> None:
    module = Module("l.in_proj_qkvz", 6, (4, 2, 2, 4))
    assert layouts.parts_of(module, ["l.qkv", "l.z"]) == (Part("l.qkv", 0, 3), Part("l.z", 3, 1))


@pytest.mark.parametrize("packed", [(), ("a", "b")])
def test_a_layer_without_parts_is_one(layouts: Any, packed: tuple[str, ...]) -> None:
    assert layouts.parts_of(Module("l.o_proj", 6, (4,)), packed) == (Part("l.o_proj", 0, 1),)


def test_one_rank_takes_all(layouts: Any, columns: Any) -> None:
    made = layer(columns.MergedColumnParallelLinearWithLoRA, tp=(0, 1), n_slices=2)
    found = layouts.module_layout(Module("l.gate_up_proj", 6, (4, 4)), made, ["l.gate_proj", "l.up_proj"])
    assert (found.full_in_features, found.full_widths) == (6, (4, 4))
    assert found.a_columns is None
    assert found.b_rows is None


def test_tables_and_heads_may_be_longer_than_an_adapters(layouts: Any) -> None:
    found = layouts.module_layout(Module("lm_head", 6, (128,)), SimpleNamespace(), [])
    assert (found.full_in_features, found.full_widths) == (0, (0,))


def test_a_merged_layer_is_cut_slice_by_slice(layouts: Any, columns: Any) -> None:
    made = layer(
        columns.MergedColumnParallelLinearWithLoRA,
        tp=(1, 2),
        n_slices=2,
        output_ids=(1, 1),
        output_slices=(4, 4),
        base_layer=SimpleNamespace(input_size=6, output_sizes=[8, 8]),
    )
    found = layouts.module_layout(Module("l.gate_up_proj", 6, (4, 4)), made, ["l.gate_proj", "l.up_proj"])
    assert found.full_widths == (8, 8)
    assert found.a_columns is None
    assert found.b_rows == (((4, 8),), ((4, 8),))


def test_key_and_value_heads_may_be_replicated(layouts: Any, columns: Any) -> None:
    """Four ranks share two key heads: ranks 2 and 3 hold the second."""
    base = SimpleNamespace(input_size=6, total_num_heads=8, total_num_kv_heads=2, head_size=2, output_sizes=[16, 8, 8])
    made = layer(
        columns.MergedQKVParallelLinearWithLoRA,
        tp=(3, 4),
        n_slices=3,
        output_ids=(3, 1, 1),
        output_slices=(4, 2, 2),
        base_layer=base,
    )
    found = layouts.module_layout(Module("l.qkv_proj", 6, (4, 2, 2)), made, ["q", "k", "v"])
    assert found.full_widths == (16, 4, 4)
    assert found.b_rows == (((12, 16),), ((2, 4),), ((2, 4),))


def test_one_tensor_for_queries_keys_and_values_is_cut_in_three_places(layouts: Any, columns: Any) -> None:
    base = SimpleNamespace(
        input_size=6, total_num_heads=4, total_num_kv_heads=2, head_size=2, num_kv_head_replicas=1, output_size=16
    )
    made = layer(
        columns.QKVParallelLinearWithLoRA,
        tp=(1, 2),
        n_slices=1,
        base_layer=base,
        q_proj_total_size=8,
        q_proj_shard_size=4,
        kv_proj_shard_size=2,
        kv_proj_total_size=4,
    )
    found = layouts.module_layout(Module("l.qkv", 6, (8,)), made, [])
    assert found.full_widths == (16,)
    assert found.b_rows == (((4, 8), (10, 12), (14, 16)),)


def test_a_row_parallel_layer_cuts_its_input(layouts: Any) -> None:
    from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA

    base = SimpleNamespace(input_size=12, output_size=6)
    made = layer(RowParallelLinearWithLoRA, tp=(1, 2), n_slices=1, input_size=6, base_layer=base)
    found = layouts.module_layout(Module("l.down_proj", 6, (6,)), made, [])
    assert (found.full_in_features, found.full_widths) == (12, (6,))
    assert found.a_columns == ((6, 12),)
    assert found.b_rows is None


def mapper(**tables: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.model_executor.models.utils import WeightsMapper
    return WeightsMapper(**tables)


NAMES = tuple(
    f"{name}.lora_A.weight"
    for name in ("model.layers.0.q_proj", "language_model.layers.1.up", "lm_head", "visual.x.y.old.z", "MODEL.H.3")
)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"orig_to_new_prefix": {"model.": "language_model.model.", "lm_head": "language_model.lm_head", "v": None}},
        {"orig_to_new_substr": {".old.": ".new.", "layers": "blocks"}, "orig_to_new_suffix": {"proj": "projection"}},
        {"orig_to_new_regex": {re.compile(r"layers\.(\d+)"): r"h.\1"}, "orig_to_new_prefix": {"model.": ""}},
        {"orig_to_new_regex": {re.compile(r"model\.h", re.IGNORECASE): "x"}},
    ],
)
def test_names_are_mapped_as_vllm_maps_them(layouts: Any, tables: dict[str, Any]) -> None:
    mine, rename = layouts.name_map(SimpleNamespace(hf_to_vllm_mapper=mapper(**tables)))
    assert rename is None
    kept = {
        kind: {old: new for old, new in table.items() if new is not None} for kind, table in tables.items()
    }  # what is not loaded at all has no adapters either
    theirs = mapper(**kept)
    assert [mine(name) for name in NAMES] == [theirs._map_name(name) for name in NAMES]


def test_a_model_without_other_names(layouts: Any) -> None:
    assert layouts.name_map(SimpleNamespace()) == (NameMap(), None)


def test_what_a_map_cannot_say_is_left_to_vllm(layouts: Any) -> None:
    class Renaming:
        def rename_source_key(self, key: str) -> tuple[str, None]:
            return key.upper(), None

    _, rename = layouts.name_map(SimpleNamespace(hf_to_vllm_mapper=mapper(orig_to_new_renaming=[Renaming()])))
    assert rename("a.b") == "A.B"


def test_what_vllm_drops_keeps_its_name_and_so_is_unknown(layouts: Any) -> None:
    class Dropping:
        orig_to_new_renaming = (1,)

        def _map_name(self, name: str) -> None:
            return None

    _, rename = layouts.name_map(SimpleNamespace(hf_to_vllm_mapper=Dropping()))
    assert rename("a.b") == "a.b"
