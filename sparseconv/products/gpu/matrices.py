"""Products with a matrix in them: rows by matrices, and outer products, on the matrix units where they fit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.products.gpu.segments import flags, join_pieces, row_strides, sum_dtype, term_rows
from sparseconv.products.schedule import WorkItems
from sparseconv.products.terms import Terms


def sum_matrices(
    kind: str,
    x: torch.Tensor,
    y: torch.Tensor,
    terms: Terms,
    out: torch.Tensor,
    batch: int,
    batch_sum: bool,
    work: WorkItems,
    precision: str,
) -> None:
    """Writes the products ``"vecmat"`` or ``"outer"`` to out, (N or NP, rows, B) or (N or NP, rows, A, B)."""
    outer = kind == "outer"
    size_a = x.shape[2]
    size_b = y.shape[2] if outer else y.shape[3]
    dtype = sum_dtype(x, y)
    dot = outer and dtype == torch.float32 and min(size_a, size_b) >= 8
    over_batch = dot and batch_sum and batch >= 16
    block_a = max(16 if dot else 1, min(triton.next_power_of_2(size_a or 1), 64 if dot else 32))
    block_b = max(16 if dot else 1, min(triton.next_power_of_2(size_b or 1), 64))
    programs = out.shape[0] if batch_sum else min(batch, 65535)
    tiles_b = triton.cdiv(size_b, block_b)
    tiles = tiles_b * (triton.cdiv(size_a, block_a) if outer else 1)
    count = work.items.shape[0]
    if count == 0 or programs == 0 or tiles == 0:
        return
    partial = out.new_empty((out.shape[0], work.slots, size_a * size_b if outer else size_b), dtype=dtype)
    args = (x, y, out, partial, terms.scale, terms.index1, terms.index2, terms.gather_index, work.items)
    # factors that stand inside a half-precision product would be rounded: take that product in fp32
    exact = dot and terms.scale is not None and not over_batch
    _matrix_kernel[(count, tiles, programs)](
        *(x if tensor is None else tensor for tensor in args),
        batch,
        size_a,
        size_b,
        tiles_b,
        *row_strides(x, 3),
        *row_strides(y, 4),
        *row_strides(out, 4),
        partial.stride(0),
        partial.stride(1),
        **flags(terms),
        OUTER=outer,
        DOT=dot,
        OVER_BATCH=over_batch,
        UPCAST=exact or x.dtype != y.dtype,
        PRECISION=precision,
        BATCH_SUM=batch_sum,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        BLOCK_K=32,
        ACC=tl.float64 if dtype == torch.float64 else tl.float32,
        num_warps=4 if block_a * block_b >= 1024 else 1,
        enable_fp_fusion=True,
    )
    join_pieces(partial, out.flatten(2) if outer else out, work)


@triton.jit
def _matrix_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    partial_ptr,
    scale_ptr,
    index1_ptr,
    index2_ptr,
    gather_ptr,
    items_ptr,
    batch,
    size_a,
    size_b,
    tiles_b,
    stride_x_n,
    stride_x_m,
    stride_x_a,
    stride_y_n,
    stride_y_m,
    stride_y_0,
    stride_y_1,
    stride_out_n,
    stride_out_m,
    stride_out_0,
    stride_out_1,
    stride_partial_n,
    stride_partial_s,
    HAS_SCALE: tl.constexpr,
    HAS_INDEX1: tl.constexpr,
    HAS_INDEX2: tl.constexpr,
    HAS_GATHER: tl.constexpr,
    OUTER: tl.constexpr,
    DOT: tl.constexpr,
    OVER_BATCH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BATCH_SUM: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC: tl.constexpr,
):
    work = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    begin = tl.load(items_ptr + work * 3)
    end = tl.load(items_ptr + work * 3 + 1)
    row = tl.load(items_ptr + work * 3 + 2)
    tile_a = tile // tiles_b
    a = tile_a * BLOCK_A + tl.arange(0, BLOCK_A)
    b = (tile % tiles_b) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_a, in_b = a < size_a, b < size_b
    lanes = tl.arange(0, BLOCK_K)
    if row != -1:
        acc = tl.zeros([BLOCK_A, BLOCK_B], dtype=ACC)
        if OVER_BATCH:
            # the batch is the axis that the product sums: a strip of it for each part
            for k in range(begin, end):
                t, row1, row2 = term_rows(
                    k, None, index1_ptr, index2_ptr, gather_ptr, HAS_INDEX1, HAS_INDEX2, HAS_GATHER
                )
                total = tl.zeros([BLOCK_A, BLOCK_B], dtype=ACC)
                for first in range(part * BLOCK_K, batch, parts * BLOCK_K):
                    n = (first + lanes).to(tl.int64)
                    live = n < batch
                    x_at = x_ptr + n[None, :] * stride_x_n + row1 * stride_x_m + a[:, None] * stride_x_a
                    y_at = y_ptr + n[:, None] * stride_y_n + row2 * stride_y_m + b[None, :] * stride_y_0
                    x = tl.load(x_at, mask=in_a[:, None] & live[None, :], other=0.0)
                    y = tl.load(y_at, mask=live[:, None] & in_b[None, :], other=0.0)
                    if UPCAST:
                        x, y = x.to(ACC), y.to(ACC)
                    total = tl.dot(x, y, total, input_precision=PRECISION)
                if HAS_SCALE:
                    total = total * tl.load(scale_ptr + t).to(ACC)
                acc += total
        else:
            for n in range(part, batch, parts):
                x_n = x_ptr + tl.cast(n, tl.int64) * stride_x_n
                y_n = y_ptr + tl.cast(n, tl.int64) * stride_y_n
                if not BATCH_SUM:
                    acc = tl.zeros([BLOCK_A, BLOCK_B], dtype=ACC)
                if DOT:
                    for k in range(begin, end, BLOCK_K):
                        at = k + lanes
                        live = at < end
                        t, row1, row2 = term_rows(
                            at, live, index1_ptr, index2_ptr, gather_ptr, HAS_INDEX1, HAS_INDEX2, HAS_GATHER
                        )
                        x_at = x_n + row1[None, :] * stride_x_m + a[:, None] * stride_x_a
                        y_at = y_n + row2[:, None] * stride_y_m + b[None, :] * stride_y_0
                        x = tl.load(x_at, mask=in_a[:, None] & live[None, :], other=0.0)
                        y = tl.load(y_at, mask=live[:, None] & in_b[None, :], other=0.0)
                        if UPCAST:
                            x, y = x.to(ACC), y.to(ACC)
                        if HAS_SCALE:
                            y = y * tl.load(scale_ptr + t, mask=live, other=0.0).to(ACC)[:, None]
                        acc = tl.dot(x, y, acc, input_precision=PRECISION)
                else:
                    for k in range(begin, end):
                        t, row1, row2 = term_rows(
                            k, None, index1_ptr, index2_ptr, gather_ptr, HAS_INDEX1, HAS_INDEX2, HAS_GATHER
                        )
                        x_row = x_n + row1 * stride_x_m
                        y_row = y_n + row2 * stride_y_m
                        if OUTER:
                            x = tl.load(x_row + a * stride_x_a, mask=in_a, other=0.0).to(ACC)
                            y = tl.load(y_row + b * stride_y_0, mask=in_b, other=0.0).to(ACC)
                            if HAS_SCALE:
                                y = y * tl.load(scale_ptr + t).to(ACC)
                            acc += x[:, None] * y[None, :]
                        else:
                            factor = 1.0
                            if HAS_SCALE:
                                factor = tl.load(scale_ptr + t).to(ACC)
                            for first in range(0, size_a, BLOCK_A):
                                summed = first + tl.arange(0, BLOCK_A)
                                live = summed < size_a
                                x = tl.load(x_row + summed * stride_x_a, mask=live, other=0.0).to(ACC) * factor
                                y_at = y_row + summed[:, None] * stride_y_0 + b[None, :] * stride_y_1
                                y = tl.load(y_at, mask=live[:, None] & in_b[None, :], other=0.0).to(ACC)
                                acc += x[:, None] * y
                if not BATCH_SUM:
                    _store_matrix(
                        acc, out_ptr, partial_ptr, row, tl.cast(n, tl.int64), tile_a, b, size_a, size_b, stride_out_n,
                        stride_out_m, stride_out_0, stride_out_1, stride_partial_n, stride_partial_s, OUTER, BLOCK_A,
                    )  # fmt: skip
        if BATCH_SUM:
            _store_matrix(
                acc, out_ptr, partial_ptr, row, part.to(tl.int64), tile_a, b, size_a, size_b, stride_out_n,
                stride_out_m, stride_out_0, stride_out_1, stride_partial_n, stride_partial_s, OUTER, BLOCK_A,
            )  # fmt: skip


@triton.jit
def _store_matrix(
    acc,
    out_ptr,
    partial_ptr,
    row,
    n,
    tile_a,
    b,
    size_a,
    size_b,
    stride_out_n,
    stride_out_m,
    stride_out_0,
    stride_out_1,
    stride_partial_n,
    stride_partial_s,
    OUTER: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    out_n = out_ptr + n * stride_out_n
    slot = partial_ptr + n * stride_partial_n + (-2 - row) * stride_partial_s
    if OUTER:
        a = tile_a * BLOCK_A + tl.arange(0, BLOCK_A)
        mask = (a < size_a)[:, None] & (b < size_b)[None, :]
        if row >= 0:
            out_at = out_n + row * stride_out_m + a[:, None] * stride_out_0 + b[None, :] * stride_out_1
            tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(slot + a[:, None] * size_b + b[None, :], acc, mask=mask)
    else:
        total = tl.sum(acc, 0)
        if row >= 0:
            out_at = out_n + row * stride_out_m + b * stride_out_0
            tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=b < size_b)
        else:
            tl.store(slot + b, total, mask=b < size_b)
