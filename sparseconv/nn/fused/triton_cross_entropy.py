"""Kernels of a cross-entropy over rows: a pass over the logits each way, and sums of the parts in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.gpu.launcher import INTERPRETED, Launcher, ceil_div, pointer, power_of_2

#: logits of a tile, and programs of a launch at most
TILE, MOST_PARTS = 2048, 1024


def forward(logits: torch.Tensor, target: torch.Tensor, ignored: int, mean: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss () of logits (N, C) fp32 and targets (N,) int64; what its gradient is divided by (1,): rows, or 1."""
    rows, classes, device = *logits.shape, logits.device
    block_n, block_c = _blocks(classes)
    parts = 1 if INTERPRETED else min(MOST_PARTS, ceil_div(rows, block_n))
    sums = torch.empty(2, parts, dtype=torch.float32, device=device)
    result = torch.empty(2, dtype=torch.float32, device=device)
    args = (pointer(logits), pointer(target), pointer(sums), rows, classes, ignored)
    _LOSSES(device, (parts,), args, (block_n, block_c))
    _MEAN(device, (1,), (pointer(sums), pointer(result), parts, int(mean)), (MOST_PARTS,))
    return result[0], result[1:]


def backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, ignored: int
) -> torch.Tensor:
    """The logits' gradient (N, C) from that of the loss ()."""
    count, classes = logits.shape
    block_n, block_c = _blocks(classes)
    out, grad = torch.empty_like(logits), grad / rows  # a new array: aligned
    args = (*map(pointer, (grad, logits, target, out)), count, classes, ignored)
    _GRADIENT(logits.device, (ceil_div(count, block_n),), args, (block_n, block_c))
    return out


def _blocks(classes: int) -> tuple[int, int]:
    block_c = power_of_2(classes)
    return TILE // block_c, block_c


# ---- kernels


@triton.jit
def exponents(logits_ptr, row, rows, classes, BLOCK_C: tl.constexpr):
    """Logits less the largest of their row, -inf past the last class; their exponents, and the sums of these."""
    column = tl.arange(0, BLOCK_C)
    there = (row < rows)[:, None] & (column < classes)[None, :]
    x = tl.load(logits_ptr + row[:, None] * classes + column[None, :], mask=there, other=0.0)
    x = tl.where((column < classes)[None, :], x, float("-inf"))
    x -= tl.max(x, 1)[:, None]
    e = tl.exp(x)
    return x, e, tl.sum(e, 1)


@triton.jit
def losses_kernel(
    logits_ptr, target_ptr, sums_ptr, rows, classes, ignored, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """sums (2, parts): of the losses of every parts-th tile of rows, and how many rows have one."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK_C)
    lane = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    count = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(part, tl.cdiv(rows, BLOCK_N), parts):
        row = tile * BLOCK_N + lane
        target = tl.load(target_ptr + row, mask=row < rows, other=0)
        counts = (row < rows) & (target != ignored)
        x, _e, sums = exponents(logits_ptr, row, rows, classes, BLOCK_C)
        mine = tl.sum(tl.where(column[None, :] == target[:, None], x, 0.0), 1)
        loss = tl.where((target >= 0) & (target < classes), tl.log(sums) - mine, float("nan"))
        total += tl.where(counts, loss, 0.0)
        count += counts.to(tl.float32)
    tl.store(sums_ptr + part, tl.sum(total, 0))
    tl.store(sums_ptr + parts + part, tl.sum(count, 0))


@triton.jit
def mean_kernel(sums_ptr, result_ptr, parts, mean, PARTS: tl.constexpr):
    """result: the loss, and what it was divided by."""
    part = tl.arange(0, PARTS)
    total = tl.sum(tl.load(sums_ptr + part, mask=part < parts, other=0.0), 0)
    count = tl.sum(tl.load(sums_ptr + parts + part, mask=part < parts, other=0.0), 0)
    rows = tl.where(mean != 0, tl.maximum(count, 1.0), 1.0)
    tl.store(result_ptr, tl.where((mean != 0) & (count == 0), float("nan"), total / rows))
    tl.store(result_ptr + 1, rows)


@triton.jit
def gradient_kernel(
    grad_ptr, logits_ptr, target_ptr, out_ptr, rows, classes, ignored, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """out = grad * (softmax - 1 at the target), 0 for rows without a loss."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_C)
    target = tl.load(target_ptr + row, mask=row < rows, other=0)
    _x, e, sums = exponents(logits_ptr, row, rows, classes, BLOCK_C)
    grad = e / sums[:, None] - (column[None, :] == target[:, None]).to(tl.float32)
    grad = tl.where((target != ignored)[:, None], grad * tl.load(grad_ptr), 0.0)
    there = (row < rows)[:, None] & (column < classes)[None, :]
    tl.store(out_ptr + row[:, None] * classes + column[None, :], grad, mask=there)


_F32, _I64 = torch.float32, torch.int64
_LOSSES = Launcher(losses_kernel, (_F32, _I64, _F32, int, int, int))
_MEAN = Launcher(mean_kernel, (_F32, _F32, int, int))
_GRADIENT = Launcher(gradient_kernel, (_F32, _F32, _I64, _F32, int, int, int))
