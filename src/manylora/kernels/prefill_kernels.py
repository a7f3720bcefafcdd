"""The kernels of `paged_lora` for adapters with many tokens in a step (Triton): tiles of tokens on tensor cores.

Where an adapter reads a prompt, its weights are few beside the tokens: what counts is to read x and y as seldom as
possible. A tile of tokens takes all ranks of a slice at once, and the sums over x stay in one program.
"""

# Triton reads annotations as instructions: what is not a constant has none.

from __future__ import annotations

import triton
import triton.language as tl

from manylora.kernels.paged_kernels import tile_place


@triton.jit
def _rows_times_x(
    rows, live, out, first_row, rows_of_slice, entry, pages, in_features, slices, max_rank,
    in_pages: tl.constexpr, columns: tl.constexpr, height: tl.constexpr, step: tl.constexpr,
    ranks: tl.constexpr, stages: tl.constexpr, blocks_apart,
):  # fmt: skip
    """`ranks` rows of A, of one slice after another, times x: `rows`, `live` and `out` are [height]."""
    column = tl.arange(0, step)
    row = first_row + tl.arange(0, ranks)
    slice_ = row // rows_of_slice
    rank = row % rows_of_slice
    there = slice_ < slices
    entry += slice_ * blocks_apart + (rank // 8) * in_pages
    result = tl.zeros([height, ranks], tl.float32)
    for page_of_x in range(in_pages):
        page = tl.load(entry + page_of_x, mask=there, other=0).to(tl.int64)
        weight_rows = pages + page * (8 * columns) + (rank % 8) * columns
        for start in tl.range(0, columns, step, num_stages=stages):
            k = page_of_x * columns + start + column
            weights = tl.load(weight_rows[None, :] + (start + column)[:, None])
            values = tl.load(rows[:, None] + k[None, :], mask=live[:, None] & (k < in_features)[None, :], other=0.0)
            result = tl.dot(values, weights, result, input_precision="ieee")
    at = out[:, None] + (slice_ * max_rank + rank)[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None] & there[None, :])


@triton.jit(do_not_specialize=["place"])
def shrink_tiles(
    x, x_stride, order, counts, tiles, table, pages, sums, place,
    in_features: tl.constexpr, in_pages: tl.constexpr, slices: tl.constexpr, columns: tl.constexpr,
    max_rank: tl.constexpr, height: tl.constexpr, step: tl.constexpr, ranks: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """sums[token, slice, rank] = x[token] · A[rank], for `height` tokens and `ranks` rows at a time.

    The rows of all slices count as one matrix, so that x is read once for as many of them as possible.
    """
    chunks: tl.constexpr = (slices * max_rank + ranks - 1) // ranks
    nth = tl.arange(0, height)
    total = tl.load(counts + 2) * chunks
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = tiles + (work // chunks) * 4
        first_row = (work % chunks) * ranks
        blocks = tl.load(tile + 1)
        left = slices * blocks * 8 - first_row
        if left > 0:
            live = nth < tl.load(tile + 3)
            token = tl.load(order + tl.load(tile + 2) + nth, mask=live, other=0)
            entry = table + tl.load(tile) + blocks * place
            rows = x + token.to(tl.int64) * x_stride
            out = sums + token * (slices * max_rank)
            # A product as narrow as the adapter's rank allows.
            if left <= ranks // 4:
                _rows_times_x(
                    rows, live, out, first_row, blocks * 8, entry, pages, in_features, slices, max_rank,
                    in_pages, columns, height, step, ranks // 4, stages, blocks * in_pages,
                )  # fmt: skip
            elif left <= ranks // 2:
                _rows_times_x(
                    rows, live, out, first_row, blocks * 8, entry, pages, in_features, slices, max_rank,
                    in_pages, columns, height, step, ranks // 2, stages, blocks * in_pages,
                )  # fmt: skip
            else:
                _rows_times_x(
                    rows, live, out, first_row, blocks * 8, entry, pages, in_features, slices, max_rank,
                    in_pages, columns, height, step, ranks, stages, blocks * in_pages,
                )  # fmt: skip


@triton.jit
def _add_columns(
    out, live, left, hiddens, entry, pages, out_pages, blocks, first_column,
    columns: tl.constexpr, reach: tl.constexpr, span: tl.constexpr, ranks: tl.constexpr, even: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """`reach` columns of y for a tile, whose sums, of up to `ranks` ranks, are read once."""
    rank = tl.arange(0, ranks)
    there = rank // 8 < blocks
    hidden = tl.load(hiddens[:, None] + rank[None, :], mask=live[:, None] & there[None, :], other=0.0)
    page = tl.load(entry + (rank // 8) * out_pages, mask=there, other=0).to(tl.int64)
    rows = pages + page * (8 * columns) + (rank % 8) * columns + first_column
    nth = tl.arange(0, span)
    for start in tl.range(0, tl.minimum(reach, left), span, num_stages=stages):
        # Ranks that the adapter does not have are those of page 0; columns past the end are not stored.
        weights = tl.load(rows[:, None] + (start + nth)[None, :])
        there_y = live[:, None]
        if not even:
            there_y = there_y & (start + nth < left)[None, :]
        at = out[:, None] + (start + nth)[None, :]
        before = tl.load(at, mask=there_y, other=0.0)
        after = tl.dot(hidden.to(weights.dtype), weights, before.to(tl.float32), input_precision="ieee")
        tl.store(at, after.to(out.dtype.element_ty), mask=there_y)


@triton.jit
def _add_columns_of_high_rank(
    out, live, left, hiddens, entry, pages, out_pages, blocks, first_column,
    columns: tl.constexpr, reach: tl.constexpr, span: tl.constexpr, ranks: tl.constexpr, even: tl.constexpr,
    height: tl.constexpr,
):  # fmt: skip
    """The same for any rank, `ranks` at a time."""
    nth = tl.arange(0, span)
    for start in range(0, tl.minimum(reach, left), span):
        there_y = live[:, None]
        if not even:
            there_y = there_y & (start + nth < left)[None, :]
        at = out[:, None] + (start + nth)[None, :]
        change = tl.load(at, mask=there_y, other=0.0).to(tl.float32)
        for first_rank in range(0, blocks * 8, ranks):
            rank = first_rank + tl.arange(0, ranks)
            there = rank // 8 < blocks
            page = tl.load(entry + (rank // 8) * out_pages, mask=there, other=0).to(tl.int64)
            rows = pages + page * (8 * columns) + (rank % 8) * columns + first_column
            weights = tl.load(rows[:, None] + (start + nth)[None, :])
            hidden = tl.load(hiddens[:, None] + rank[None, :], mask=live[:, None] & there[None, :], other=0.0)
            change = tl.dot(hidden.to(weights.dtype), weights, change, input_precision="ieee")
        tl.store(at, change.to(out.dtype.element_ty), mask=there_y)


@triton.jit(do_not_specialize=["place"])
def expand_tiles(
    y, y_stride, order, counts, tiles, table, pages, sums, place,
    in_pages: tl.constexpr, slices: tl.constexpr,
    width_0: tl.constexpr, width_1: tl.constexpr, width_2: tl.constexpr,
    columns: tl.constexpr, max_rank: tl.constexpr, height: tl.constexpr,
    reach: tl.constexpr, span: tl.constexpr, even: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """y[token, column] += Σ over rank of sums[token, slice, rank] · B[rank, column], `reach` columns at a time.

    `even`: every width is a multiple of `span`.
    """
    parts: tl.constexpr = (
        (width_0 + reach - 1) // reach + (width_1 + reach - 1) // reach + (width_2 + reach - 1) // reach
    )
    nth = tl.arange(0, height)
    total = tl.load(counts + 2) * parts
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = tiles + (work // parts) * 4
        slice_, start, width_before, width, pages_before, out_pages = tile_place(
            work % parts, width_0, width_1, width_2, columns, reach
        )
        blocks = tl.load(tile + 1)
        live = nth < tl.load(tile + 3)
        token = tl.load(order + tl.load(tile + 2) + nth, mask=live, other=0)
        out = y + token.to(tl.int64) * y_stride + width_before + start
        hiddens = sums + (token * slices + slice_) * max_rank
        entry = table + tl.load(tile) + blocks * (place + slices * in_pages + pages_before) + start // columns
        first = start % columns
        left = width - start
        if blocks <= 2:
            _add_columns(
                out, live, left, hiddens, entry, pages, out_pages, blocks, first,
                columns, reach, span, 16, even, stages,
            )  # fmt: skip
        elif blocks <= 4:
            _add_columns(
                out, live, left, hiddens, entry, pages, out_pages, blocks, first,
                columns, reach, span, 32, even, stages,
            )  # fmt: skip
        elif blocks <= 8:
            _add_columns(
                out, live, left, hiddens, entry, pages, out_pages, blocks, first,
                columns, reach, span, 64, even, stages,
            )  # fmt: skip
        else:
            _add_columns_of_high_rank(
                out, live, left, hiddens, entry, pages, out_pages, blocks, first,
                columns, reach, span, 32, even, height,
            )  # fmt: skip
