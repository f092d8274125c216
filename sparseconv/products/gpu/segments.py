"""Many terms, small batch: a program sums one piece of a segment, a tile of terms at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.products.schedule import WorkItems
from sparseconv.products.terms import Terms


def sum_rows(
    kind: str,
    x: torch.Tensor,
    y: torch.Tensor | None,
    terms: Terms,
    out: torch.Tensor,
    batch: int,
    batch_sum: bool,
    work: WorkItems | None,
    positions: int,
) -> None:
    """Writes the elementwise (``"vector"``) or inner (``"inner"``) products of rows to out, (N or NP, rows, C or none).

    x and y are (n, rows, C) or, a scalar a row, (n, rows); y None leaves it out. With ``batch_sum`` the batch is summed
    in out.shape[0] parts. ``work`` None: no sum, a row for each position.
    """
    inner = kind == "inner"
    channels = max(x.shape[2] if x.dim() == 3 else 1, y.shape[2] if y is not None and y.dim() == 3 else 1)
    group, block_t, block_c, warps = _tile(channels, work is not None)
    programs = out.shape[0] if batch_sum else min(batch, 65535)
    count = triton.cdiv(positions, block_t) if work is None else triton.cdiv(work.items.shape[0], group)
    if count == 0 or programs == 0 or channels == 0:
        return
    # several pieces of one segment meet here before the second pass adds them
    width = 1 if inner else channels
    partial = out.new_empty((out.shape[0], work.slots if work else 0, width), dtype=sum_dtype(x, y))
    items = terms.index_out if work is None else work.items
    args = (x, y, out, partial, terms.scale, terms.index1, terms.index2, terms.gather_index, items)
    _vector_kernel[(count, 1 if inner else triton.cdiv(channels, block_c), programs)](
        *(x if tensor is None else tensor for tensor in args),
        positions if work is None else work.items.shape[0],
        batch,
        channels,
        *row_strides(x, 3),
        *row_strides(y, 3),
        *row_strides(out, 3),
        partial.stride(0),
        partial.stride(1),
        HAS_Y=y is not None,
        X_VECTOR=x.dim() == 3,
        Y_VECTOR=y is not None and y.dim() == 3,
        **flags(terms),
        HAS_ITEMS=items is not None,
        SUMMED=work is not None,
        INNER=inner,
        BATCH_SUM=batch_sum,
        GROUP=group,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        ACC=tl.float64 if partial.dtype == torch.float64 else tl.float32,
        num_warps=warps,
        enable_fp_fusion=True,
    )
    join_pieces(partial, out if out.dim() == 3 else out[..., None], work)


def _tile(channels: int, summed: bool) -> tuple[int, int, int, int]:
    """Segments, terms of each and channels of a tile, and its warps: several rows in flight for each thread."""
    block_c = min(triton.next_power_of_2(max(channels, 1)), 128)
    if not summed:
        return 1, max(8, 1024 // block_c), block_c, 1
    # a program for each segment would be more programs than the GPU can start in time where rows are short
    return (1 if block_c == 128 else min(8, 256 // block_c)), 4, block_c, 1


def join_pieces(partial: torch.Tensor, out: torch.Tensor, work: WorkItems | None) -> None:
    """The second pass: adds the slots of each long segment, in their order, and writes its row."""
    if work is None or work.joins is None:
        return
    none = Terms(None, None, None, None, None, None, 0)
    second = WorkItems(work.joins, None, 0)
    sum_rows("vector", partial, None, none, out, out.shape[0], False, second, work.slots)


def sum_dtype(x: torch.Tensor, y: torch.Tensor | None) -> torch.dtype:
    double = x.dtype == torch.float64 or (y is not None and y.dtype == torch.float64)
    return torch.float64 if double else torch.float32


def flags(terms: Terms) -> dict[str, bool]:
    """Which columns a kernel has to read for each term."""
    return {
        "HAS_SCALE": terms.scale is not None,
        "HAS_INDEX1": terms.index1 is not None,
        "HAS_INDEX2": terms.index2 is not None,
        "HAS_GATHER": terms.gather_index is not None,
    }


def row_strides(tensor: torch.Tensor | None, rank: int) -> tuple[int, ...]:
    """Strides over (batch, row, dense...): 0 for a batch of one, which all share, and for axes that are not there."""
    if tensor is None:
        return (0,) * rank
    strides = [0 if tensor.shape[0] == 1 else tensor.stride(0), *tensor.stride()[1:]]
    return (*strides, *[0] * (rank - len(strides)))


@triton.jit
def term_rows(
    k, live, index1_ptr, index2_ptr, gather_ptr,
    HAS_INDEX1: tl.constexpr, HAS_INDEX2: tl.constexpr, HAS_GATHER: tl.constexpr,
):  # fmt: skip
    """The terms at positions k, and the rows of the inputs that meet in them; ``live``: which there are, None: all."""
    t = k
    if HAS_GATHER:
        t = _index(gather_ptr + k, live)
    row1 = t
    if HAS_INDEX1:
        row1 = _index(index1_ptr + t, live)
    row2 = t
    if HAS_INDEX2:
        row2 = _index(index2_ptr + t, live)
    return t, row1, row2


@triton.jit
def _index(at, live):
    if live is None:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=live, other=0)
    return found.to(tl.int64)


@triton.jit
def _vector_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    partial_ptr,
    scale_ptr,
    index1_ptr,
    index2_ptr,
    gather_ptr,
    items_ptr,
    count,
    batch,
    channels,
    stride_x_n,
    stride_x_m,
    stride_x_c,
    stride_y_n,
    stride_y_m,
    stride_y_c,
    stride_out_n,
    stride_out_m,
    stride_out_c,
    stride_partial_n,
    stride_partial_s,
    HAS_Y: tl.constexpr,
    X_VECTOR: tl.constexpr,
    Y_VECTOR: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_INDEX1: tl.constexpr,
    HAS_INDEX2: tl.constexpr,
    HAS_GATHER: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    SUMMED: tl.constexpr,
    INNER: tl.constexpr,
    BATCH_SUM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
):
    work = tl.program_id(0).to(tl.int64)
    tile_c = tl.program_id(1)
    part = tl.program_id(2)
    lanes = tl.arange(0, BLOCK_T)
    if SUMMED:
        item = work * GROUP + tl.arange(0, GROUP)
        there = item < count
        begin = tl.load(items_ptr + item * 3, mask=there, other=0)
        end = tl.load(items_ptr + item * 3 + 1, mask=there, other=0)
        row = tl.load(items_ptr + item * 3 + 2, mask=there, other=-1)
        longest = tl.max(end - begin, 0)
    else:
        begin = work * BLOCK_T + tl.arange(0, 1)
        end = tl.minimum(begin + BLOCK_T, count)
        row = begin
        longest = BLOCK_T
    tiles = 1
    if INNER:
        tiles = tl.cdiv(channels, BLOCK_C)
    acc = tl.zeros([GROUP * BLOCK_T, BLOCK_C], dtype=ACC)
    for n in range(part, batch, tl.num_programs(2)):
        n64 = tl.cast(n, tl.int64)
        if not BATCH_SUM:
            acc = tl.zeros([GROUP * BLOCK_T, BLOCK_C], dtype=ACC)
        for k in range(0, longest, BLOCK_T):
            ahead = begin[:, None] + k + lanes[None, :]
            at = tl.reshape(ahead, [GROUP * BLOCK_T])
            live = tl.reshape(ahead < end[:, None], [GROUP * BLOCK_T])
            t, row1, row2 = term_rows(at, live, index1_ptr, index2_ptr, gather_ptr, HAS_INDEX1, HAS_INDEX2, HAS_GATHER)
            if HAS_SCALE:
                factor = tl.load(scale_ptr + t, mask=live, other=0.0).to(ACC)
            for tile in range(tile_c, tile_c + tiles):
                c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
                mask = live[:, None] & (c < channels)[None, :]
                if X_VECTOR:
                    x_at = x_ptr + n64 * stride_x_n + row1[:, None] * stride_x_m + c[None, :] * stride_x_c
                    value = tl.load(x_at, mask=mask, other=0.0).to(ACC)
                else:
                    x_at = x_ptr + n64 * stride_x_n + row1 * stride_x_m
                    value = tl.load(x_at, mask=live, other=0.0).to(ACC)[:, None]
                if HAS_Y:
                    if Y_VECTOR:
                        y_at = y_ptr + n64 * stride_y_n + row2[:, None] * stride_y_m + c[None, :] * stride_y_c
                        value = value * tl.load(y_at, mask=mask, other=0.0).to(ACC)
                    else:
                        y_at = y_ptr + n64 * stride_y_n + row2 * stride_y_m
                        value = value * tl.load(y_at, mask=live, other=0.0).to(ACC)[:, None]
                if HAS_SCALE:
                    value = value * factor[:, None]
                acc += value
        if not BATCH_SUM:
            _store_rows(
                acc, out_ptr, partial_ptr, items_ptr, row, work, count, n64, tile_c, channels, stride_out_n,
                stride_out_m, stride_out_c, stride_partial_n, stride_partial_s, SUMMED, INNER, HAS_ITEMS, GROUP,
                BLOCK_T, BLOCK_C,
            )  # fmt: skip
    if BATCH_SUM:
        _store_rows(
            acc, out_ptr, partial_ptr, items_ptr, row, work, count, part.to(tl.int64), tile_c, channels, stride_out_n,
            stride_out_m, stride_out_c, stride_partial_n, stride_partial_s, SUMMED, INNER, HAS_ITEMS, GROUP, BLOCK_T,
            BLOCK_C,
        )  # fmt: skip


@triton.jit
def _store_rows(
    acc,
    out_ptr,
    partial_ptr,
    items_ptr,
    row,
    work,
    count,
    n,
    tile_c,
    channels,
    stride_out_n,
    stride_out_m,
    stride_out_c,
    stride_partial_n,
    stride_partial_s,
    SUMMED: tl.constexpr,
    INNER: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    out_n = out_ptr + n * stride_out_n
    if SUMMED:
        whole, piece = row >= 0, row < -1
        slot = partial_ptr + n * stride_partial_n + (-2 - row) * stride_partial_s
        if INNER:
            total = tl.sum(tl.reshape(tl.sum(acc, 1), [GROUP, BLOCK_T]), 1)
            tl.store(out_n + row * stride_out_m, total.to(out_ptr.dtype.element_ty), mask=whole)
            tl.store(slot, total, mask=piece)
        else:
            total = tl.sum(tl.reshape(acc, [GROUP, BLOCK_T, BLOCK_C]), 1)
            in_c = (c < channels)[None, :]
            out_at = out_n + row[:, None] * stride_out_m + c[None, :] * stride_out_c
            tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=whole[:, None] & in_c)
            tl.store(slot[:, None] + c[None, :], total, mask=piece[:, None] & in_c)
    else:
        at = work * BLOCK_T + tl.arange(0, BLOCK_T)
        live = at < count
        rows = at
        if HAS_ITEMS:
            rows = tl.load(items_ptr + at, mask=live, other=0).to(tl.int64)
        if INNER:
            tl.store(out_n + rows * stride_out_m, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=live)
        else:
            out_at = out_n + rows[:, None] * stride_out_m + c[None, :] * stride_out_c
            tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (c < channels)[None, :])
