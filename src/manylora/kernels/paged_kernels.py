"""The kernels of `paged_lora` (Triton), which says what they do and launches them.

A tensor's name is its pointer; sizes that are constant for a module are compile-time constants. The two kernels read
`StepPlan`'s arrays; the rest of the functions are their parts.
"""

# Triton reads annotations as instructions: what is not a constant has none.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _shrink_one(x, page, out, k_first, in_features, columns: tl.constexpr, dependent: tl.constexpr):
    """One token with one page: every load in flight at once, plain arithmetic."""
    rows = tl.arange(0, 8)
    column = tl.arange(0, columns)
    weights = tl.load(page + rows[:, None] * columns + column[None, :]).to(tl.float32)
    if dependent:
        gdc_wait()
    k = k_first + column
    values = tl.load(x + k, mask=k < in_features, other=0.0).to(tl.float32)
    tl.store(out + rows, tl.sum(weights * values[None, :], 1))


@triton.jit
def _shrink_many(
    x, x_stride, token, live, page, out, k_first, in_features,
    columns: tl.constexpr, width: tl.constexpr, step: tl.constexpr, stages: tl.constexpr, height: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    """The tokens of a group with `width` columns of a page, on tensor cores; `token`, `live` and `out` are [height]."""
    rows = tl.arange(0, 8)
    column = tl.arange(0, step)
    if dependent:
        gdc_wait()
    result = tl.zeros([height, 8], tl.float32)
    for start in tl.range(0, width, step, num_stages=stages):
        weights = tl.load(page + rows[None, :] * columns + (start + column)[:, None])
        k = k_first + start + column
        at = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
        values = tl.load(at, mask=live[:, None] & (k < in_features)[None, :], other=0.0)
        result = tl.dot(values, weights, result, input_precision="ieee")
    tl.store(out[:, None] + rows[None, :], result, mask=live[:, None])


@triton.jit(do_not_specialize=["place", "tokens"])
def shrink(
    x, x_stride, order, counts, items, table, pages, sums, place, tokens,
    in_features: tl.constexpr, in_pages: tl.constexpr, slices: tl.constexpr, columns: tl.constexpr,
    max_rank: tl.constexpr, group_tokens: tl.constexpr, width: tl.constexpr, step: tl.constexpr,
    stages: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """sums[part of x, token, slice, rank] = x[token, part] · A[rank, part].

    Items of several tokens have parts of `width` columns. Those of one token, which come first, take a page at once,
    and use only the first of its parts in `sums`.
    """
    if dependent:
        gdc_launch_dependents()
    per_page: tl.constexpr = columns // width
    parts: tl.constexpr = in_pages * per_page
    nth = tl.arange(0, group_tokens)
    singles = tl.load(counts + 3)
    of_singles = singles * (in_pages * slices)
    total = of_singles + (tl.load(counts) - singles) * (parts * slices)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        single = work < of_singles
        rest = work - of_singles
        item = items + tl.where(single, work // (in_pages * slices), singles + rest // (parts * slices)) * 8
        part_of_x = tl.where(single, (work % in_pages) * per_page, rest % parts)
        page_of_x = part_of_x // per_page
        slice_ = tl.where(single, work // in_pages, rest // parts) % slices
        blocks = tl.load(item + 1)
        block = tl.load(item + 2)
        first = tl.load(item + 3)
        count = tl.load(item + 4)
        entry = tl.load(item) + blocks * (place + slice_ * in_pages) + block * in_pages + page_of_x
        k_first = part_of_x * width
        page = pages + tl.load(table + entry).to(tl.int64) * (8 * columns) + (part_of_x % per_page) * width
        part = sums + (part_of_x * tokens * slices + slice_) * max_rank + block * 8
        if count == 1:
            one = tl.load(order + first)
            row = x + one.to(tl.int64) * x_stride
            _shrink_one(row, page, part + one * (slices * max_rank), k_first, in_features, columns, dependent)
        else:
            live = nth < count
            many = tl.load(order + first + nth, mask=live, other=0)
            outs = part + many * (slices * max_rank)
            _shrink_many(
                x,
                x_stride,
                many,
                live,
                page,
                outs,
                k_first,
                in_features,
                columns,
                width,
                step,
                stages,
                group_tokens,
                dependent,
            )


@triton.jit(do_not_specialize=["place"])
def gather(
    ids, order, count, groups, table, pages, sums, place,
    in_features: tl.constexpr, in_pages: tl.constexpr, columns: tl.constexpr, max_rank: tl.constexpr,
    height: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """sums[token, rank] = A[rank, ids[token]]: an embedding's shrink, whose x is one-hot; for groups or tiles."""
    if dependent:
        gdc_launch_dependents()
        gdc_wait()
    nth = tl.arange(0, height)
    rows = tl.arange(0, 8)
    total = tl.load(count)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        group = groups + work * 4
        blocks = tl.load(group + 1)
        live = nth < tl.load(group + 3)
        token = tl.load(order + tl.load(group + 2) + nth, mask=live, other=0)
        column = tl.load(ids + token, mask=live, other=0).to(tl.int32)
        there = live & (column >= 0) & (column < in_features)
        first = table + tl.load(group) + blocks * place + column // columns
        for block in range(blocks):
            page = tl.load(first + block * in_pages, mask=there, other=0).to(tl.int64)
            at = pages + page[:, None] * (8 * columns) + rows[None, :] * columns + (column % columns)[:, None]
            values = tl.load(at, mask=there[:, None], other=0.0).to(tl.float32)
            out = sums + token[:, None] * max_rank + block * 8 + rows[None, :]
            tl.store(out, values, mask=live[:, None])


@triton.jit
def _block_weights(
    entry, pages, out_pages, blocks, first_rank, column, inside, columns: tl.constexpr, ranks: tl.constexpr
):
    """Rows `first_rank` … of B at `column`: [ranks, columns of a tile], zero where the adapter or the slice ends."""
    rank = first_rank + tl.arange(0, ranks)
    live = rank // 8 < blocks
    page = tl.load(entry + (rank // 8) * out_pages, mask=live, other=0).to(tl.int64)
    at = pages + page[:, None] * (8 * columns) + (rank % 8)[:, None] * columns + column[None, :]
    return tl.load(at, mask=live[:, None] & inside[None, :], other=0.0)


@triton.jit
def _hidden_one(sums, first_rank, blocks, stride, parts: tl.constexpr, ranks: tl.constexpr):
    """The partial sums of one token, which lie `stride` apart, added up: [ranks]."""
    rank = first_rank + tl.arange(0, ranks)
    hidden = tl.zeros([ranks], tl.float32)
    for part in tl.static_range(parts):
        hidden += tl.load(sums + part * stride + rank, mask=rank // 8 < blocks, other=0.0)
    return hidden


@triton.jit
def _hidden_many(
    sums, first_rank, blocks, stride, live, parts: tl.constexpr, height: tl.constexpr, ranks: tl.constexpr
):
    """The partial sums of several tokens, added up: [height, ranks]; `sums` and `live` are [height]."""
    rank = first_rank + tl.arange(0, ranks)
    there = live[:, None] & (rank // 8 < blocks)[None, :]
    hidden = tl.zeros([height, ranks], tl.float32)
    for part in tl.range(0, parts, loop_unroll_factor=4, num_stages=1):
        hidden += tl.load(sums[:, None] + part * stride + rank[None, :], mask=there, other=0.0)
    return hidden


@triton.jit
def _expand_one(
    out, inside, sums, stride, weights, entry, pages, out_pages, blocks, column,
    columns: tl.constexpr, parts: tl.constexpr, ranks: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """One token: `weights` are the first `ranks` rows of B, read already; `out` is [tile]."""
    first_weights = weights.to(tl.float32)
    if dependent:
        gdc_wait()
    before = tl.load(out, mask=inside, other=0.0).to(tl.float32)
    change = tl.sum(first_weights * _hidden_one(sums, 0, blocks, stride, parts, ranks)[:, None], 0)
    for rank in range(ranks, blocks * 8, ranks):
        more = _block_weights(entry, pages, out_pages, blocks, rank, column, inside, columns, ranks).to(tl.float32)
        change += tl.sum(more * _hidden_one(sums, rank, blocks, stride, parts, ranks)[:, None], 0)
    tl.store(out, (before + change).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expand_many(
    out, live, inside, sums, stride, weights, entry, pages, out_pages, blocks, column,
    columns: tl.constexpr, parts: tl.constexpr, height: tl.constexpr, ranks: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """The tokens of a group: `out` is [height, tile], `sums` and `live` are [height]."""
    if dependent:
        gdc_wait()
    there = live[:, None] & inside[None, :]
    before = tl.load(out, mask=there, other=0.0).to(tl.float32)
    hidden = _hidden_many(sums, 0, blocks, stride, live, parts, height, ranks)
    change = tl.dot(hidden.to(weights.dtype), weights, input_precision="ieee")
    for rank in range(ranks, blocks * 8, ranks):
        more = _block_weights(entry, pages, out_pages, blocks, rank, column, inside, columns, ranks)
        hidden_more = _hidden_many(sums, rank, blocks, stride, live, parts, height, ranks)
        change = tl.dot(hidden_more.to(more.dtype), more, change, input_precision="ieee")
    tl.store(out, (before + change).to(out.dtype.element_ty), mask=there)


@triton.jit
def tile_place(
    nth, width_0: tl.constexpr, width_1: tl.constexpr, width_2: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr
):
    """The slice of a module's `nth` tile, where it begins in the slice, the slice's first column and its width, the
    pages of the slices before it and its own."""
    tiles_0: tl.constexpr = (width_0 + tile - 1) // tile
    tiles_1: tl.constexpr = (width_1 + tile - 1) // tile
    pages_0: tl.constexpr = (width_0 + columns - 1) // columns
    pages_1: tl.constexpr = (width_1 + columns - 1) // columns
    pages_2: tl.constexpr = (width_2 + columns - 1) // columns
    slice_ = tl.where(nth >= tiles_0, 1, 0) + tl.where(nth >= tiles_0 + tiles_1, 1, 0)
    tiles_before = tl.where(slice_ == 0, 0, tl.where(slice_ == 1, tiles_0, tiles_0 + tiles_1))
    width_before = tl.where(slice_ == 0, 0, tl.where(slice_ == 1, width_0, width_0 + width_1))
    pages_before = tl.where(slice_ == 0, 0, tl.where(slice_ == 1, pages_0, pages_0 + pages_1))
    out_pages = tl.where(slice_ == 0, pages_0, tl.where(slice_ == 1, pages_1, pages_2))
    width = tl.where(slice_ == 0, width_0, tl.where(slice_ == 1, width_1, width_2))
    return slice_, (nth - tiles_before) * tile, width_before, width, pages_before, out_pages


@triton.jit(do_not_specialize=["place", "tokens"])
def expand(
    y, y_stride, order, counts, groups, table, pages, sums, place, tokens,
    in_pages: tl.constexpr, parts: tl.constexpr, pages_of_x: tl.constexpr, slices: tl.constexpr,
    width_0: tl.constexpr, width_1: tl.constexpr, width_2: tl.constexpr,
    columns: tl.constexpr, max_rank: tl.constexpr, group_tokens: tl.constexpr,
    tile: tl.constexpr, many_tile: tl.constexpr, ranks: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """y[token, column] += Σ over rank of (Σ over `parts` of sums)[token, slice, rank] · B[rank, column].

    Groups of one token, which come first, have `pages_of_x` parts, as many apart as there are parts in a page.
    """
    if dependent:
        gdc_launch_dependents()
    stride = tokens * slices * max_rank
    nth = tl.arange(0, group_tokens)
    singles = tl.load(counts + 4)
    tiles: tl.constexpr = (width_0 + tile - 1) // tile + (width_1 + tile - 1) // tile + (width_2 + tile - 1) // tile
    for work in range(tl.program_id(0), singles * tiles, tl.num_programs(0)):
        group = groups + (work // tiles) * 4
        slice_, start, width_before, width, pages_before, out_pages = tile_place(
            work % tiles, width_0, width_1, width_2, columns, tile
        )
        blocks = tl.load(group + 1)
        entry = table + tl.load(group) + blocks * (place + slices * in_pages + pages_before) + start // columns
        column = start % columns + tl.arange(0, tile)
        inside = start + tl.arange(0, tile) < width
        weights = _block_weights(entry, pages, out_pages, blocks, 0, column, inside, columns, ranks)
        one = tl.load(order + tl.load(group + 2))
        out = y + one.to(tl.int64) * y_stride + width_before + start + tl.arange(0, tile)
        hidden = sums + (one * slices + slice_) * max_rank
        _expand_one(
            out, inside, hidden, stride * (parts // pages_of_x), weights, entry, pages, out_pages, blocks, column,
            columns, pages_of_x, ranks, dependent,
        )  # fmt: skip
    many_tiles: tl.constexpr = (
        (width_0 + many_tile - 1) // many_tile
        + (width_1 + many_tile - 1) // many_tile
        + (width_2 + many_tile - 1) // many_tile
    )
    for work in range(tl.program_id(0), (tl.load(counts + 1) - singles) * many_tiles, tl.num_programs(0)):
        group = groups + (singles + work // many_tiles) * 4
        slice_, start, width_before, width, pages_before, out_pages = tile_place(
            work % many_tiles, width_0, width_1, width_2, columns, many_tile
        )
        blocks = tl.load(group + 1)
        first = tl.load(group + 2)
        live = nth < tl.load(group + 3)
        entry = table + tl.load(group) + blocks * (place + slices * in_pages + pages_before) + start // columns
        column = start % columns + tl.arange(0, many_tile)
        inside = start + tl.arange(0, many_tile) < width
        weights = _block_weights(entry, pages, out_pages, blocks, 0, column, inside, columns, ranks)
        many = tl.load(order + first + nth, mask=live, other=0)
        outs = y + many.to(tl.int64)[:, None] * y_stride + (width_before + start + tl.arange(0, many_tile))[None, :]
        hiddens = sums + (many * slices + slice_) * max_rank
        _expand_many(
            outs, live, inside, hiddens, stride, weights, entry, pages, out_pages, blocks, column,
            columns, parts, group_tokens, ranks, dependent,
        )  # fmt: skip
