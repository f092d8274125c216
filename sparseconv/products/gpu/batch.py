"""Few terms, large batch: a program owns a block of the batch and walks over all segments, its inputs staying near."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.products.gpu.segments import flags, row_strides, sum_dtype, term_rows
from sparseconv.products.terms import Terms


def batch_vectors(
    kind: str,
    x: torch.Tensor,
    y: torch.Tensor | None,
    terms: Terms,
    out: torch.Tensor,
    batch: int,
    batch_sum: bool,
    block_n: int,
) -> None:
    """Writes the elementwise (``"vector"``) or inner (``"inner"``) products to out.

    out is (N, rows, C or none); with ``batch_sum`` it is (ceil(N / block_n), rows, C or none), a part for each block.
    """
    inner = kind == "inner"
    channels = max(x.shape[2] if x.dim() == 3 else 1, y.shape[2] if y is not None and y.dim() == 3 else 1)
    block_c = min(triton.next_power_of_2(max(channels, 1)), 64)
    tiles_c = 1 if inner else triton.cdiv(channels, block_c)
    blocks = triton.cdiv(batch, block_n)
    segments = terms.num_segments
    if blocks == 0 or tiles_c == 0 or channels == 0 or segments == 0:
        return
    # where the batch alone does not fill the GPU, several programs share the segments of a block
    group = max(1, min(segments, segments * blocks * tiles_c // 4096 + 1))
    args = (x, y, out, terms.scale, terms.index1, terms.index2, terms.seg_out, terms.gather_index, terms.index_out)
    _batch_kernel[(blocks * tiles_c * triton.cdiv(segments, group),)](
        *(x if tensor is None else tensor for tensor in args),
        batch,
        channels,
        segments,
        group,
        tiles_c,
        blocks,
        *row_strides(x, 3),
        *row_strides(y, 3),
        *row_strides(out, 3),
        HAS_Y=y is not None,
        X_VECTOR=x.dim() == 3,
        Y_VECTOR=y is not None and y.dim() == 3,
        **flags(terms),
        HAS_SEGMENTS=terms.seg_out is not None,
        HAS_INDEX_OUT=terms.index_out is not None,
        INNER=inner,
        BATCH_SUM=batch_sum,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        ACC=tl.float64 if sum_dtype(x, y) == torch.float64 else tl.float32,
        num_warps=max(1, min(4, block_n * block_c // 256)),
        enable_fp_fusion=True,
    )


def batch_vecmat(x: torch.Tensor, y: torch.Tensor, terms: Terms, out: torch.Tensor, batch: int, precision: str) -> None:
    """Writes rows by matrices to out (N, rows, B): x (N, M1, A), and y (1, M2, A, B) that the batch shares."""
    size_a, size_b = y.shape[2], y.shape[3]
    block_n = 64
    block_a = max(16, min(triton.next_power_of_2(size_a or 1), 64))
    block_b = max(16, min(triton.next_power_of_2(size_b or 1), 128))
    tiles_b, segments = triton.cdiv(size_b, block_b), terms.num_segments
    if segments == 0 or tiles_b == 0:
        return
    args = (x, y, out, terms.scale, terms.index1, terms.index2, terms.seg_out, terms.gather_index, terms.index_out)
    _vecmat_kernel[(segments * tiles_b * triton.cdiv(batch, block_n),)](
        *(x if tensor is None else tensor for tensor in args),
        batch,
        size_a,
        size_b,
        segments,
        tiles_b,
        *row_strides(x, 3),
        *row_strides(y, 4)[1:],
        *row_strides(out, 3),
        **flags(terms),
        HAS_SEGMENTS=terms.seg_out is not None,
        HAS_INDEX_OUT=terms.index_out is not None,
        UPCAST=x.dtype != y.dtype,
        PRECISION=precision,
        BLOCK_N=block_n,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _segment_span(segment, seg_ptr, index_out_ptr, HAS_SEGMENTS: tl.constexpr, HAS_INDEX_OUT: tl.constexpr):
    """Begin, end and output row of a segment."""
    begin = tl.cast(segment, tl.int64)
    end = begin + 1
    row = begin
    if HAS_INDEX_OUT:
        row = tl.load(index_out_ptr + segment).to(tl.int64)
    if HAS_SEGMENTS:
        begin = tl.load(seg_ptr + segment).to(tl.int64)
        end = tl.load(seg_ptr + segment + 1).to(tl.int64)
    return begin, end, row


@triton.jit
def _batch_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    scale_ptr,
    index1_ptr,
    index2_ptr,
    seg_ptr,
    gather_ptr,
    index_out_ptr,
    batch,
    channels,
    segments,
    group,
    tiles_c,
    blocks,
    stride_x_n,
    stride_x_m,
    stride_x_c,
    stride_y_n,
    stride_y_m,
    stride_y_c,
    stride_out_n,
    stride_out_m,
    stride_out_c,
    HAS_Y: tl.constexpr,
    X_VECTOR: tl.constexpr,
    Y_VECTOR: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_INDEX1: tl.constexpr,
    HAS_INDEX2: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_GATHER: tl.constexpr,
    HAS_INDEX_OUT: tl.constexpr,
    INNER: tl.constexpr,
    BATCH_SUM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
):
    program = tl.program_id(0)
    tile_c = program % tiles_c
    block = (program // tiles_c) % blocks
    first = (program // tiles_c // blocks) * group
    n = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < batch
    x_n = x_ptr + n * stride_x_n
    y_n = y_ptr + n * stride_y_n
    tiles = 1
    if INNER:
        tiles = tl.cdiv(channels, BLOCK_C)
    for segment in range(first, tl.minimum(first + group, segments)):
        begin, end, row = _segment_span(segment, seg_ptr, index_out_ptr, HAS_SEGMENTS, HAS_INDEX_OUT)
        acc = tl.zeros([BLOCK_N, BLOCK_C], dtype=ACC)
        for k in range(begin, end):
            t, row1, row2 = term_rows(k, None, index1_ptr, index2_ptr, gather_ptr, HAS_INDEX1, HAS_INDEX2, HAS_GATHER)
            factor = 1.0
            if HAS_SCALE:
                factor = tl.load(scale_ptr + t).to(ACC)
            for tile in range(tile_c, tile_c + tiles):
                c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
                mask = in_n[:, None] & (c < channels)[None, :]
                if X_VECTOR:
                    x_at = x_n[:, None] + row1 * stride_x_m + c[None, :] * stride_x_c
                    value = tl.load(x_at, mask=mask, other=0.0).to(ACC) * factor
                else:
                    value = (tl.load(x_n + row1 * stride_x_m, mask=in_n, other=0.0).to(ACC) * factor)[:, None]
                if HAS_Y:
                    if Y_VECTOR:
                        y_at = y_n[:, None] + row2 * stride_y_m + c[None, :] * stride_y_c
                        value = value * tl.load(y_at, mask=mask, other=0.0).to(ACC)
                    else:
                        value = value * tl.load(y_n + row2 * stride_y_m, mask=in_n, other=0.0).to(ACC)[:, None]
                acc += value
        if BATCH_SUM:
            out_at = out_ptr + block.to(tl.int64) * stride_out_n + row * stride_out_m
            if INNER:
                tl.store(out_at, tl.sum(tl.sum(acc, 1), 0).to(out_ptr.dtype.element_ty))
            else:
                c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
                tl.store(out_at + c * stride_out_c, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=c < channels)
        else:
            out_n = out_ptr + n * stride_out_n + row * stride_out_m
            if INNER:
                tl.store(out_n, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=in_n)
            else:
                c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
                mask = in_n[:, None] & (c < channels)[None, :]
                tl.store(out_n[:, None] + c[None, :] * stride_out_c, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _vecmat_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    scale_ptr,
    index1_ptr,
    index2_ptr,
    seg_ptr,
    gather_ptr,
    index_out_ptr,
    batch,
    size_a,
    size_b,
    segments,
    tiles_b,
    stride_x_n,
    stride_x_m,
    stride_x_a,
    stride_y_m,
    stride_y_a,
    stride_y_b,
    stride_out_n,
    stride_out_m,
    stride_out_b,
    HAS_SCALE: tl.constexpr,
    HAS_INDEX1: tl.constexpr,
    HAS_INDEX2: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_GATHER: tl.constexpr,
    HAS_INDEX_OUT: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    program = tl.program_id(0)
    segment = program % segments
    b = ((program // segments) % tiles_b) * BLOCK_B + tl.arange(0, BLOCK_B)
    n = (program // segments // tiles_b).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n, in_b = n < batch, b < size_b
    begin, end, row = _segment_span(segment, seg_ptr, index_out_ptr, HAS_SEGMENTS, HAS_INDEX_OUT)
    acc = tl.zeros([BLOCK_N, BLOCK_B], dtype=tl.float32)
    for k in range(begin, end):
        t, row1, row2 = term_rows(k, None, index1_ptr, index2_ptr, gather_ptr, HAS_INDEX1, HAS_INDEX2, HAS_GATHER)
        total = tl.zeros([BLOCK_N, BLOCK_B], dtype=tl.float32)
        for first in range(0, size_a, BLOCK_A):
            a = first + tl.arange(0, BLOCK_A)
            in_a = a < size_a
            x_at = x_ptr + n[:, None] * stride_x_n + row1 * stride_x_m + a[None, :] * stride_x_a
            y_at = y_ptr + row2 * stride_y_m + a[:, None] * stride_y_a + b[None, :] * stride_y_b
            x = tl.load(x_at, mask=in_n[:, None] & in_a[None, :], other=0.0)
            y = tl.load(y_at, mask=in_a[:, None] & in_b[None, :], other=0.0)
            if UPCAST:
                x, y = x.to(tl.float32), y.to(tl.float32)
            total = tl.dot(x, y, total, input_precision=PRECISION)
        if HAS_SCALE:
            total = total * tl.load(scale_ptr + t).to(tl.float32)
        acc += total
    out_at = out_ptr + n[:, None] * stride_out_n + row * stride_out_m + b[None, :] * stride_out_b
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=in_n[:, None] & in_b[None, :])
