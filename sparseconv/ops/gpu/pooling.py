"""Maxima over the edges of a map, and sums over all edges or those that won; a launch each."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.table import aligned
from sparseconv.gpu.launcher import Launcher, ceil_div, pointer
from sparseconv.gpu.program import power_of_2

#: numbers of a tile, and its channels at most
TILE, MOST_CHANNELS = 1024, 64
#: dtypes of winners that kernels read
INDICES = (torch.int16, torch.int32, torch.int64)


def largest(x: torch.Tensor, neighbors: torch.Tensor, index: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest rows of x (N_in, C) for each output of neighbors (K, N_out), and the taps that they came through.

    Of equal ones the first tap wins, and NaN wins over all; 0 and -1 where there is no edge. ``index``: of the taps.
    """
    (taps, rows), channels = neighbors.shape, x.shape[1]
    values = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    winners = torch.empty(rows, channels, dtype=index, device=x.device)
    if rows and channels:
        grid, units, blocks = _cut(rows, channels)
        tensors = (aligned(x), aligned(neighbors), values, winners)
        args = (*map(pointer, tensors), rows, units, taps)
        _largest(x.dtype, index)(x.device, grid, args, (x.dtype == torch.float64, *blocks))
    return values, winners


def chosen_sum(x: torch.Tensor, winners: torch.Tensor | None, neighbors: torch.Tensor, at_target: bool) -> torch.Tensor:
    """y[o] = sum over the taps k of neighbors (K, N_out) of x[i], channel by channel, where ``winners`` names k.

    Winners (N_out, C) name a tap of output o ``at_target``, else winners (N_in, C) one of input i; None: all count.
    Summed tap by tap.
    """
    (taps, rows), channels = neighbors.shape, x.shape[1]
    y = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    if rows and channels:
        all_count, winners = winners is None, neighbors if winners is None else winners
        winners = winners if winners.dtype in INDICES else winners.int()
        tensors = (aligned(x), aligned(winners), aligned(neighbors), y)
        grid, units, blocks = _cut(rows, channels)
        args = (*map(pointer, tensors), rows, units, taps)
        _chosen(x.dtype, winners.dtype)(x.device, grid, args, (all_count, at_target, x.dtype == torch.float64, *blocks))
    return y


def _cut(rows: int, channels: int) -> tuple[tuple[int, int], int, tuple[int, int, int]]:
    """The grid of a launch, the channels in units, and the constants UNIT, BLOCK_N and BLOCK_C."""
    unit = 8 if channels % 8 == 0 else 1  # then a thread reads 16 bytes at once
    block_c = min(MOST_CHANNELS, power_of_2(channels))
    block_n = TILE // block_c
    return (ceil_div(rows, block_n), ceil_div(channels, block_c)), channels // unit, (unit, block_n, block_c)


@cache
def _largest(x: torch.dtype, index: torch.dtype) -> Launcher:
    return Launcher(largest_kernel, (x, torch.int32, x, index, int, int, int))


@cache
def _chosen(x: torch.dtype, index: torch.dtype) -> Launcher:
    return Launcher(chosen_kernel, (x, index, torch.int32, x, int, int, int))


# ---- kernels


@triton.jit
def tile(rows, channels, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """The rows, channels and places of a program's tile of (rows, channels), and which of them there are."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = (n < rows)[:, None] & (c < channels)[None, :]
    return n, c[None, :], n.to(tl.int64)[:, None] * channels + c[None, :], there


@triton.jit
def largest_kernel(
    x_ptr, neighbors_ptr, values_ptr, winners_ptr, rows, units, taps,
    IS_WIDE: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """values[o, c] = max over taps of x[neighbors[tap, o], c], and the winning tap."""
    channels = units * UNIT
    n, c, places, there = tile(rows, channels, BLOCK_N, BLOCK_C)
    best = tl.zeros((BLOCK_N, BLOCK_C), tl.float64 if IS_WIDE else tl.float32)
    winner = tl.full((BLOCK_N, BLOCK_C), -1, tl.int32)
    for tap in range(taps):
        row = tl.load(neighbors_ptr + n, mask=n < rows, other=-1)[:, None]
        real = there & (row >= 0)
        new = tl.load(x_ptr + row.to(tl.int64) * channels + c, mask=real, other=0.0).to(best.dtype)
        better = real & ((winner < 0) | (new > best) | (new != new))
        best = tl.where(better, new, best)
        winner = tl.where(better, tap, winner)
        neighbors_ptr += rows
    tl.store(values_ptr + places, best.to(values_ptr.dtype.element_ty), mask=there)
    tl.store(winners_ptr + places, winner.to(winners_ptr.dtype.element_ty), mask=there)


@triton.jit
def chosen_kernel(
    x_ptr, winners_ptr, neighbors_ptr, y_ptr, rows, units, taps,
    ALL_COUNT: tl.constexpr, AT_TARGET: tl.constexpr, IS_WIDE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y[o, c] = sum over taps of x[neighbors[tap, o], c] where the winner there, or at o, is the tap."""
    channels = units * UNIT
    n, c, places, there = tile(rows, channels, BLOCK_N, BLOCK_C)
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float64 if IS_WIDE else tl.float32)
    winner = tl.zeros((BLOCK_N, BLOCK_C), winners_ptr.dtype.element_ty)
    if AT_TARGET and not ALL_COUNT:
        winner = tl.load(winners_ptr + places, mask=there, other=0)
    for tap in range(taps):
        row = tl.load(neighbors_ptr + n, mask=n < rows, other=-1)[:, None]
        real = there & (row >= 0)
        source = row.to(tl.int64) * channels + c
        if not ALL_COUNT:
            if not AT_TARGET:
                winner = tl.load(winners_ptr + source, mask=real, other=0)
            real = real & (winner == tap)
        total += tl.load(x_ptr + source, mask=real, other=0.0).to(total.dtype)
        neighbors_ptr += rows
    tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), mask=there)
