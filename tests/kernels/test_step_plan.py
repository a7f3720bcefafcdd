"""The plan of a step: every token of every adapter once, in groups of one adapter."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from manylora.kernels.step_plan import capacity, plan_step  # noqa: E402

TABLES = np.array([100, 200, 300, 400], np.int32)
BLOCKS = np.array([1, 8, 2, 64], np.int32)


@given(st.lists(st.integers(-1, 3), max_size=60), st.sampled_from([1, 2, 16]))
def test_every_token_is_in_one_group_of_its_adapter(of_token: list[int], group_tokens: int) -> None:
    plan = plan_step(np.array(of_token, np.int32), TABLES, BLOCKS, group_tokens)
    seen = []
    for table, blocks, first, count in plan.groups.tolist():
        assert 1 <= count <= group_tokens
        rows = plan.order[first : first + count].tolist()
        seen += rows
        for row in rows:
            assert (table, blocks) == (TABLES[of_token[row]], BLOCKS[of_token[row]])
    assert sorted(seen) == [row for row, adapter in enumerate(of_token) if adapter >= 0]
    assert plan.counts.tolist() == [
        len(plan.items),
        len(plan.groups),
        len(plan.tiles),
        np.count_nonzero(plan.items[:, 4] == 1),
        np.count_nonzero(plan.groups[:, 3] == 1),
    ]
    for groups in (plan.groups[plan.groups[:, 3] == 1], plan.groups[plan.groups[:, 3] > 1]):
        blocks_of = groups[:, 1].tolist()
        assert blocks_of == sorted(blocks_of, reverse=True)
    of_one = (plan.groups[:, 3] == 1).tolist()
    assert of_one == sorted(of_one, reverse=True)
    expected = [[*group[:2], block, *group[2:]] for group in plan.groups.tolist() for block in range(group[1])]
    assert plan.items[:, :5].tolist() == expected
    most_groups, most_items = capacity(len(of_token), group_tokens, 4, 512)
    assert len(plan.groups) <= most_groups
    assert len(plan.items) <= most_items
