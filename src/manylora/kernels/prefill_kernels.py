"""The kernels of `paged_lora` for adapters with many tokens in a step (Triton): tiles of tokens on tensor cores.

Where an adapter reads a prompt, its weights are few beside the tokens: what counts is to read x and y as seldom as
possible. A tile of tokens takes all ranks of a slice at once, and the sums over x stay in one program.
"""

# Triton reads annotations as instructions: what is not a constant has none.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["place"])
def shrink_tiles(
    x, x_stride, order, counts, tiles, table, pages, sums, place,
    in_features: tl.constexpr, in_pages: tl.constexpr, slices: tl.constexpr, columns: tl.constexpr,
    max_rank: tl.constexpr, height: tl.constexpr, step: tl.constexpr, ranks: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """sums[token, slice, rank] = x[token] · A[rank], for `ranks` ranks of one slice and `height` tokens at a time."""
    chunks: tl.constexpr = (max_rank + ranks - 1) // ranks
    nth = tl.arange(0, height)
    column = tl.arange(0, step)
    total = tl.load(counts + 2) * (slices * chunks)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = tiles + (work // (slices * chunks)) * 4
        slice_ = (work // chunks) % slices
        rank = (work % chunks) * ranks + tl.arange(0, ranks)
        blocks = tl.load(tile + 1)
        live = nth < tl.load(tile + 3)
        token = tl.load(order + tl.load(tile + 2) + nth, mask=live, other=0)
        there = rank // 8 < blocks
        if (work % chunks) * ranks < blocks * 8:
            entry = table + tl.load(tile) + blocks * (place + slice_ * in_pages) + (rank // 8) * in_pages
            rows = x + token.to(tl.int64)[:, None] * x_stride
            result = tl.zeros([height, ranks], tl.float32)
            for page_of_x in range(in_pages):
                page = tl.load(entry + page_of_x, mask=there, other=0).to(tl.int64)
                weight_rows = pages + page * (8 * columns) + (rank % 8) * columns
                for start in tl.range(0, columns, step, num_stages=stages):
                    k = page_of_x * columns + start + column
                    weights = tl.load(weight_rows[None, :] + (start + column)[:, None])
                    values = tl.load(rows + k[None, :], mask=live[:, None] & (k < in_features)[None, :], other=0.0)
                    result = tl.dot(values, weights, result, input_precision="ieee")
            out = sums + (token[:, None] * slices + slice_) * max_rank + rank[None, :]
            tl.store(out, result, mask=live[:, None] & there[None, :])


@triton.jit(do_not_specialize=["place"])
def expand_tiles(
    y, y_stride, order, counts, tiles, table, pages, sums, place,
    in_pages: tl.constexpr, slices: tl.constexpr,
    width_0: tl.constexpr, width_1: tl.constexpr, width_2: tl.constexpr,
    columns: tl.constexpr, max_rank: tl.constexpr, height: tl.constexpr,
    span: tl.constexpr, ranks: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """y[token, column] += Σ over rank of sums[token, slice, rank] · B[rank, column], `span` columns at a time.

    `even`: every width is a multiple of `span`.
    """
    spans_0: tl.constexpr = (width_0 + span - 1) // span
    spans_1: tl.constexpr = (width_1 + span - 1) // span
    spans: tl.constexpr = spans_0 + spans_1 + (width_2 + span - 1) // span
    pages_0: tl.constexpr = (width_0 + columns - 1) // columns
    pages_1: tl.constexpr = (width_1 + columns - 1) // columns
    pages_2: tl.constexpr = (width_2 + columns - 1) // columns
    nth = tl.arange(0, height)
    total = tl.load(counts + 2) * spans
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = tiles + (work // spans) * 4
        nth_span = work % spans
        slice_ = (nth_span >= spans_0).to(tl.int32) + (nth_span >= spans_0 + spans_1).to(tl.int32)
        spans_before = tl.where(slice_ == 0, 0, tl.where(slice_ == 1, spans_0, spans_0 + spans_1))
        width_before = tl.where(slice_ == 0, 0, tl.where(slice_ == 1, width_0, width_0 + width_1))
        pages_before = tl.where(slice_ == 0, 0, tl.where(slice_ == 1, pages_0, pages_0 + pages_1))
        out_pages = tl.where(slice_ == 0, pages_0, tl.where(slice_ == 1, pages_1, pages_2))
        width = tl.where(slice_ == 0, width_0, tl.where(slice_ == 1, width_1, width_2))
        start = (nth_span - spans_before) * span
        column = start % columns + tl.arange(0, span)
        blocks = tl.load(tile + 1)
        live = nth < tl.load(tile + 3)
        token = tl.load(order + tl.load(tile + 2) + nth, mask=live, other=0)
        out = y + token.to(tl.int64)[:, None] * y_stride + (width_before + start + tl.arange(0, span))[None, :]
        there_y = live[:, None]
        if not even:
            there_y = there_y & (start + tl.arange(0, span) < width)[None, :]
        before = tl.load(out, mask=there_y, other=0.0)
        entry = table + tl.load(tile) + blocks * (place + slices * in_pages + pages_before) + start // columns
        change = tl.zeros([height, span], tl.float32)
        for first_rank in range(0, blocks * 8, ranks):
            rank = first_rank + tl.arange(0, ranks)
            there = rank // 8 < blocks
            # Ranks that the adapter does not have are those of page 0; columns past the end are not stored.
            page = tl.load(entry + (rank // 8) * out_pages, mask=there, other=0).to(tl.int64)
            at = pages + page[:, None] * (8 * columns) + (rank % 8)[:, None] * columns + column[None, :]
            weights = tl.load(at)
            of_token = sums + (token[:, None] * slices + slice_) * max_rank + rank[None, :]
            hidden = tl.load(of_token, mask=live[:, None] & there[None, :], other=0.0)
            change = tl.dot(hidden.to(weights.dtype), weights, change, input_precision="ieee")
        tl.store(out, (before.to(tl.float32) + change).to(out.dtype.element_ty), mask=there_y)
