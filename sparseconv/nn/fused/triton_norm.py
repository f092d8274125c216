"""Kernels of a norm over rows with its residual and activation: two launches forward, two backward, no atomics.

    forward:   statistics_kernel  mean and squared deviations of each part of the rows (Welford)
               normalize_kernel   parts merged (Chan), y = act((x - mean) * rstd * weight + bias + residual)
    backward:  reduce_kernel      of each part: sum dz and sum dz * (x - mean); dz = grad * act'
               input_grad_kernel  parts added, dx = weight * rstd * (dz - mean(dz) - xhat * mean(dz * xhat))
    inference: fold_kernel        the weight and bias of the convolution before it, with the norm in them
               normalize_kernel   by running statistics, where no convolution comes before it
    sums:      zero_kernel        zero in dead rows, for torch's sums over all rows

A part is every ``parts``-th tile of rows. Parts are merged by every program that needs them, in one order: the same
bits in every run, and nothing to reset between launches. act(z) = z for z > 0, slope * z elsewhere.

Where ``counted``, only the first ``count`` rows are alive, a number that the device alone knows: dead rows are not
read, and what is written there is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offsets(tile, stride, row, channel, BLOCK_N: tl.constexpr):
    """Where a tile's elements lie: row tile * BLOCK_N + row, rows ``stride`` elements apart."""
    return tl.cast(tile, tl.int64) * BLOCK_N * stride + (row[:, None] * stride + channel[None, :])


@triton.jit
def _activated(z, slope):
    """A NaN stays one, an infinity below zero becomes zero: as torch's relu."""
    return tl.where(z <= 0, tl.where(slope == 0, 0.0, z * slope), z)


@triton.jit
def _gated(grad, z, slope):
    return tl.where(z <= 0, tl.where(slope == 0, 0.0, grad * slope), grad)


@triton.jit
def _affine(weight_ptr, bias_ptr, channel, channels):
    """Weight and bias; 1 and 0 where there are none, which ``channels`` = 0 says."""
    weight = tl.load(weight_ptr + channel, channel < channels, other=1.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, channel < channels, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def _joined(count, mean, spread, slot, rows):
    """Mean and sum of squared deviations of all slots (S, C); distances from the first, so that nothing cancels."""
    first = tl.sum(tl.where((slot == 0)[:, None], mean, 0.0), 0)
    centre = first + tl.sum((mean - first[None, :]) * count[:, None], 0) / rows
    apart = mean - centre[None, :]
    return centre, tl.sum(spread + count[:, None] * apart * apart, 0)


@triton.jit
def _alive(count_ptr, counted, rows):
    """How many rows are alive."""
    return tl.where(counted != 0, tl.load(count_ptr, counted != 0, other=0).to(tl.int32), rows)


@triton.jit
def statistics_kernel(
    x_ptr,  # (rows, C)
    parts_ptr,  # (2, parts, C) fp32: means, sums of squared deviations
    count_ptr,  # (1,) int32, read where ``counted``
    rows,
    units,  # C = units * UNIT
    counted,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    part, parts = tl.program_id(0), tl.num_programs(0)
    channels = units * UNIT
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    rows = _alive(count_ptr, counted, rows)
    row = tl.arange(0, BLOCK_N)
    count = tl.zeros((BLOCK_N,), tl.float32)
    mean = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    spread = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    seen = 0.0
    for tile in range(part, tl.cdiv(rows, BLOCK_N), parts):
        there = row < rows - tile * BLOCK_N
        mask = there[:, None] & inside[None, :]
        x = tl.load(x_ptr + _offsets(tile, channels, row, channel, BLOCK_N), mask, other=0.0).to(tl.float32)
        seen += 1.0
        count += there.to(tl.float32)
        delta = tl.where(mask, x - mean, 0.0)
        mean += delta * (1.0 / seen)
        spread += delta * (x - mean)
    centre, total = _joined(count, mean, spread, row, tl.maximum(tl.sum(count, 0), 1.0))
    at = parts_ptr + part * channels + channel
    tl.store(at, centre, inside)
    tl.store(at + parts * channels, total, inside)


@triton.jit
def _merged(parts_ptr, parts, rows, channels, channel, inside, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Mean and sum of squared deviations of all rows from those of the parts."""
    MANY: tl.constexpr = 4096 // BLOCK_C
    slot = tl.arange(0, MANY)
    count = tl.zeros((MANY,), tl.float32)
    mean = tl.zeros((MANY, BLOCK_C), tl.float32)
    spread = tl.zeros((MANY, BLOCK_C), tl.float32)
    tiles = tl.cdiv(rows, BLOCK_N)
    for first in range(0, parts, MANY):
        part = first + slot
        # the last tile may be short
        size = tl.cdiv(tiles - part, parts) * BLOCK_N
        size -= tl.where(part == (tiles - 1) % parts, tiles * BLOCK_N - rows, 0)
        size = tl.where(part < parts, size, 0).to(tl.float32)
        mask = (part < parts)[:, None] & inside[None, :]
        at = parts_ptr + part[:, None] * channels + channel[None, :]
        delta = tl.load(at, mask, other=0.0) - mean
        total = count + size
        share = size / tl.maximum(total, 1.0)
        mean += delta * share[:, None]
        spread += tl.load(at + parts * channels, mask, other=0.0) + delta * delta * (count * share)[:, None]
        count = total
    return _joined(count, mean, spread, slot, tl.maximum(rows, 1))


@triton.jit
def normalize_kernel(
    x_ptr,  # (rows, C)
    residual_ptr,  # (rows, C), read where ``adds``
    weight_ptr,
    bias_ptr,  # (C,), read where ``affine``
    parts_ptr,  # (2, parts, C); not read where parts is 0
    kept_ptr,  # (2, C) fp32: mean, rstd; written, or read where parts is 0
    running_mean_ptr,
    running_var_ptr,  # (C,), read where ``follows``; where parts is 0, in place of ``kept``
    next_mean_ptr,
    next_var_ptr,  # (C,), those after this batch: written where ``follows``, unless parts is 0; they may be the same
    tracked_ptr,  # int64, one more where ``follows``
    y_ptr,  # (rows, C), its rows y_units * UNIT apart
    count_ptr,  # (1,) int32, read where ``counted``
    rows,
    units,
    y_units,
    parts,
    adds,
    affine,
    follows,
    counted,
    eps,
    momentum,
    slope,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    first = tl.program_id(0)
    channels = units * UNIT
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    alive = _alive(count_ptr, counted, rows)
    if parts > 0:
        mean, spread = _merged(parts_ptr, parts, alive, channels, channel, inside, BLOCK_N, BLOCK_C)
        rstd = tl.rsqrt(spread / tl.maximum(alive, 1) + eps)
        if first == 0:
            tl.store(kept_ptr + channel, mean, inside)
            tl.store(kept_ptr + channels + channel, rstd, inside)
            if follows != 0:  # a single row has no variance: they stay
                old = tl.load(running_mean_ptr + channel, inside, other=0.0).to(tl.float32)
                new = tl.where(alive > 1, old * (1 - momentum) + mean * momentum, old)
                tl.store(next_mean_ptr + channel, new.to(next_mean_ptr.dtype.element_ty), inside)
                old = tl.load(running_var_ptr + channel, inside, other=0.0).to(tl.float32)
                new = tl.where(alive > 1, old * (1 - momentum) + spread / tl.maximum(alive - 1, 1) * momentum, old)
                tl.store(next_var_ptr + channel, new.to(next_var_ptr.dtype.element_ty), inside)
                if (tl.program_id(1) == 0) & (alive > 1):
                    tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)
    elif follows != 0:
        mean = tl.load(running_mean_ptr + channel, inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.load(running_var_ptr + channel, inside, other=1.0).to(tl.float32) + eps)
    else:
        mean = tl.load(kept_ptr + channel, inside, other=0.0)
        rstd = tl.load(kept_ptr + channels + channel, inside, other=0.0)
    weight, bias = _affine(weight_ptr, bias_ptr, channel, channels * affine)
    scale = weight * rstd
    row = tl.arange(0, BLOCK_N)
    tiles = tl.cdiv(rows, BLOCK_N)
    for turn in range(first, tiles, tl.num_programs(0)):
        tile = tiles - 1 - turn  # what the statistics read last is still in the GPU's cache
        left = alive - tile * BLOCK_N
        live = (row < left)[:, None] & inside[None, :]
        at = _offsets(tile, channels, row, channel, BLOCK_N)
        x = tl.load(x_ptr + at, live, other=0.0).to(tl.float32)
        added = (row < left * adds)[:, None] & inside[None, :]
        residual = tl.load(residual_ptr + at, added, other=0.0).to(tl.float32)
        z = tl.fma(x - mean[None, :], scale[None, :], bias[None, :]) + residual
        y = tl.where(live, _activated(z, slope), 0.0)
        mask = (row < rows - tile * BLOCK_N)[:, None] & inside[None, :]
        y_at = _offsets(tile, y_units * UNIT, row, channel, BLOCK_N)
        tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def reduce_kernel(
    grad_ptr,  # (rows, C), its rows grad_units * UNIT apart
    x_ptr,
    y_ptr,  # the result, read where ``joined``
    weight_ptr,
    bias_ptr,
    kept_ptr,
    parts_ptr,  # (2, parts, C) fp32: sums of dz and of dz * (x - mean)
    dz_ptr,  # (rows, C), written where ``joined``: the residual's gradient
    count_ptr,  # (1,) int32, read where ``counted``
    rows,
    units,
    grad_units,
    joined,
    affine,
    counted,
    slope,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    part, parts = tl.program_id(0), tl.num_programs(0)
    channels = units * UNIT
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    mean = tl.load(kept_ptr + channel, inside, other=0.0)
    weight, bias = _affine(weight_ptr, bias_ptr, channel, channels * affine)
    scale = weight * tl.load(kept_ptr + channels + channel, inside, other=0.0)
    alive = _alive(count_ptr, counted, rows)
    row = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for tile in range(part, tl.cdiv(rows, BLOCK_N), parts):
        left = alive - tile * BLOCK_N
        live = (row < left)[:, None] & inside[None, :]
        live_joined = (row < left * joined)[:, None] & inside[None, :]
        at = _offsets(tile, channels, row, channel, BLOCK_N)
        grad_at = _offsets(tile, grad_units * UNIT, row, channel, BLOCK_N)
        grad = tl.load(grad_ptr + grad_at, live, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, live, other=0.0).to(tl.float32) - mean[None, :]
        y = tl.load(y_ptr + at, live_joined, other=0.0)
        # the sign as the forward pass stored it
        z = tl.fma(x, scale[None, :], bias[None, :]).to(y_ptr.dtype.element_ty)
        dz = _gated(grad, tl.where(joined != 0, y, z).to(tl.float32), slope)
        mask_joined = (row < (rows - tile * BLOCK_N) * joined)[:, None] & inside[None, :]
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask_joined)
        total += dz
        product += dz * x
    at = parts_ptr + part * channels + channel
    tl.store(at, tl.sum(total, 0), inside)
    tl.store(at + parts * channels, tl.sum(product, 0), inside)


@triton.jit
def _added(parts_ptr, parts, channels, channel, inside, BLOCK_C: tl.constexpr):
    MANY: tl.constexpr = 4096 // BLOCK_C
    slot = tl.arange(0, MANY)
    total = tl.zeros((MANY, BLOCK_C), tl.float32)
    for first in range(0, parts, MANY):
        part = first + slot
        mask = (part < parts)[:, None] & inside[None, :]
        total += tl.load(parts_ptr + part[:, None] * channels + channel[None, :], mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def input_grad_kernel(
    grad_ptr,  # (rows, C), its rows grad_units * UNIT apart
    x_ptr,
    weight_ptr,
    bias_ptr,
    kept_ptr,
    parts_ptr,
    weight_grad_ptr,
    bias_grad_ptr,  # (C,), written where ``affine``
    dx_ptr,
    count_ptr,  # (1,) int32, read where ``counted``
    rows,
    units,
    grad_units,
    parts,
    affine,
    counted,
    slope,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    first = tl.program_id(0)
    channels = units * UNIT
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    mean = tl.load(kept_ptr + channel, inside, other=0.0)
    rstd = tl.load(kept_ptr + channels + channel, inside, other=0.0)
    weight, bias = _affine(weight_ptr, bias_ptr, channel, channels * affine)
    total = _added(parts_ptr, parts, channels, channel, inside, BLOCK_C)
    product = _added(parts_ptr + parts * channels, parts, channels, channel, inside, BLOCK_C) * rstd
    if (first == 0) & (affine != 0):
        tl.store(weight_grad_ptr + channel, product.to(weight_grad_ptr.dtype.element_ty), inside)
        tl.store(bias_grad_ptr + channel, total.to(bias_grad_ptr.dtype.element_ty), inside)
    scale = weight * rstd
    alive = _alive(count_ptr, counted, rows)
    shift = total / tl.maximum(alive, 1)
    slant = product * rstd / tl.maximum(alive, 1)
    row = tl.arange(0, BLOCK_N)
    tiles = tl.cdiv(rows, BLOCK_N)
    for turn in range(first, tiles, tl.num_programs(0)):
        tile = tiles - 1 - turn  # what the sums read last is still in the GPU's cache
        live = (row < alive - tile * BLOCK_N)[:, None] & inside[None, :]
        at = _offsets(tile, channels, row, channel, BLOCK_N)
        grad_at = _offsets(tile, grad_units * UNIT, row, channel, BLOCK_N)
        grad = tl.load(grad_ptr + grad_at, live, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, live, other=0.0).to(tl.float32) - mean[None, :]
        z = tl.fma(x, scale[None, :], bias[None, :]).to(dx_ptr.dtype.element_ty)
        dz = _gated(grad, z.to(tl.float32), slope)
        dx = tl.where(live, scale[None, :] * (dz - shift[None, :] - x * slant[None, :]), 0.0)
        mask = (row < rows - tile * BLOCK_N)[:, None] & inside[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask)


@triton.jit
def fold_kernel(
    taps_ptr,  # (rows, C): a convolution's weight, rows = K * C_in/G; (C, rows) where OUT_FIRST
    start_ptr,  # (C,): its bias, read where ``biased``
    weight_ptr,
    bias_ptr,  # (C,): those of the norm, read where ``affine``
    running_mean_ptr,
    running_var_ptr,  # (C,)
    folded_ptr,  # (rows, C)
    shift_ptr,  # (C,)
    rows,
    units,
    biased,
    affine,
    eps,
    OUT_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tile = tl.program_id(0)
    channels = units * UNIT
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    few = tl.where(tile == 0, channels, 0)
    row = tl.arange(0, BLOCK_N)
    mask = (row < rows - tile * BLOCK_N)[:, None] & inside[None, :]
    at = _offsets(tile, channels, row, channel, BLOCK_N)
    if OUT_FIRST:  # read along the rows, which lie side by side
        source = channel.to(tl.int64)[:, None] * rows + tile * BLOCK_N + row[None, :]
        inner = inside[:, None] & (row < rows - tile * BLOCK_N)[None, :]
        taps = tl.trans(tl.load(taps_ptr + source, inner, other=0.0))
    else:
        taps = tl.load(taps_ptr + at, mask, other=0.0)
    tl.debug_barrier()  # else the compiler loads taps once it has waited for what scales them
    weight, bias = _affine(weight_ptr, bias_ptr, channel, channels * affine)
    var = tl.load(running_var_ptr + channel, inside, other=1.0).to(tl.float32)
    mean = tl.load(running_mean_ptr + channel, channel < few, other=0.0).to(tl.float32)
    start = tl.load(start_ptr + channel, channel < few * biased, other=0.0).to(tl.float32)
    scale = tl.rsqrt(var + eps) * weight
    folded = taps.to(tl.float32) * scale[None, :]
    tl.store(folded_ptr + at, folded.to(folded_ptr.dtype.element_ty), mask)
    shift = (start - mean) * scale + bias
    tl.store(shift_ptr + channel, shift.to(shift_ptr.dtype.element_ty), channel < few)


@triton.jit
def zero_kernel(
    x_ptr,  # (rows, columns)
    count_ptr,  # (1,) int32
    rows,
    columns,
    row_stride,
    column_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    dead = (row >= tl.load(count_ptr)) & (row < rows)
    at = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    zeros = tl.zeros((BLOCK_N, BLOCK_C), x_ptr.dtype.element_ty)
    tl.store(x_ptr + at, zeros, mask=dead[:, None] & (column < columns)[None, :])
