"""Batch norms on a GPU: act(norm(z) + residual) of a batch in two launches each way; in inference in one, or folded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from sparseconv.gpu.cuda_capability import has_kernels

#: dtypes of features that the kernels serve; sums are fp32
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: programs on each multiprocessor: of the statistics, of a gradient's sums, of a pass that writes; more of them leave
#: more parts, which every program of the next pass merges
CREWS = (2, 2, 2)
#: elements of a tile; of one of a weight that a norm is folded into
TILE, FOLDED_TILE = 4096, 2048


def on_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels serve features of this kind where they are."""
    return x.is_cuda and x.dtype in DTYPES and has_kernels(x.device)


class Norm(NamedTuple):
    """What of a batch norm is no tensor with a gradient: its numbers and its running statistics.

    ``slope`` is the activation's below zero: 0 for relu, 1 for none. ``running`` are mean, variance and the count of
    batches, or None; they follow each batch in place, or else the next mean and variance are written ``onto`` others.
    ``alive`` (1,) int32 says how many rows are, the others following them; or None.
    """

    eps: float
    momentum: float
    slope: float
    running: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    alive: torch.Tensor | None = None
    onto: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class Kernels:
    """The four launches for features (rows, C) of one dtype on one device, and how they are cut into tiles.

    The workspace of a norm is one array. It begins with mean and rstd (2, C), which the gradient needs. From ``start``
    on it holds the parts' sums, first of the forward pass, then of the backward pass.
    """

    statistics: Any
    normalize: Any
    reduce: Any
    input_grad: Any
    at: Callable[[torch.Tensor], Any]  # what a launch takes for a tensor
    units: int
    constants: tuple[int, int, int]  # UNIT, BLOCK_N, BLOCK_C
    grids: tuple[tuple[int, int], ...]  # (parts, blocks of channels) of statistics, reduce, and of passes that write
    start: int
    size: int

    def beyond(self, kept: torch.Tensor) -> Any:
        """What a launch takes for the sums of the parts."""
        at = self.at(kept)
        return at + 4 * self.start if isinstance(at, int) else kept[self.start :]


@lru_cache(512)
def kernels(
    rows: int,
    channels: int,
    device: torch.device,
    x: torch.dtype,
    weight: torch.dtype | None,
    running: torch.dtype | None,
) -> Kernels:
    """The launches for features (rows, channels) of dtype ``x`` with weight and running statistics of theirs."""
    constants = unit, block_n, block_c = constants_of(channels)
    tiles, columns, start = -(-rows // block_n), -(-channels // block_c), (2 * channels + 31) & -32
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    rounds = [-(-tiles // max(1, resident * processors // columns)) for resident in CREWS]
    grids = tuple((-(-tiles // count), columns) for count in rounds)
    size = start + 2 * grids[0][0] * channels
    return Kernels(*_launchers(x, weight, running), channels // unit, constants, grids, start, size)


def constants_of(channels: int) -> tuple[int, int, int]:
    """UNIT, BLOCK_N and BLOCK_C of the kernels for so many channels."""
    block_c = 32 if channels > 16 else 16
    return 8 if channels % 8 == 0 else 1, TILE // block_c, block_c


@cache
def _launchers(
    x: torch.dtype, weight: torch.dtype | None, running: torch.dtype | None
) -> tuple[Any, Any, Any, Any, Any]:
    from sparseconv.gpu.launcher import INTERPRETED, Launcher, pointer
    from sparseconv.nn.fused import triton_norm

    w, r, sums, tracked = weight or x, running or x, torch.float32, x if running is None else torch.int64
    number = 0.5  # any: they are fp32
    count = torch.int32
    normalize = (x, x, w, w, sums, sums, r, r, r, r, tracked, x, count, *(int,) * 8, number, number, number)
    return (
        Launcher(triton_norm.statistics_kernel, (x, sums, count, *(int,) * 3), 8),
        Launcher(triton_norm.normalize_kernel, normalize, 8),
        Launcher(triton_norm.reduce_kernel, (x, x, x, w, w, sums, sums, x, count, *(int,) * 6, number), 8),
        Launcher(triton_norm.input_grad_kernel, (x, x, w, w, sums, sums, w, w, x, count, *(int,) * 6, number), 8),
        pointer if INTERPRETED else torch.Tensor.data_ptr,
    )


def _kernels_of(x: torch.Tensor, weight: torch.Tensor | None, norm: Norm) -> Kernels:
    rows, channels = x.shape
    running = norm.running
    return kernels(
        *(rows, channels, x.device, x.dtype),
        None if weight is None else weight.dtype,
        None if running is None else running[0].dtype,
    )


def _count_of(run: Kernels, x: torch.Tensor, norm: Norm) -> tuple[Any, int]:
    """What a launch takes for the number of rows that are alive, and whether there is one."""
    return (run.at(x), 0) if norm.alive is None else (run.at(norm.alive), 1)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = act((x - mean) / sqrt(var + eps) * weight + bias + residual), and what a gradient needs besides x.

    Args:
        x: (N, C), N >= 2, contiguous, aligned to 16 bytes. weight, bias: (C,) or None, both or neither.
        residual: (N, C) like x, or None.

    Returns:
        y (N, C), and the workspace fp32 that starts with mean and 1 / sqrt(var + eps) (2, C). Running statistics follow
        as torch's do. Where ``norm.alive`` is given, dead rows are not read and those of y are zero.
    """
    run = _kernels_of(x, weight, norm)
    device = x.device
    y = torch.empty_like(x)
    kept = torch.empty(run.size, dtype=torch.float32, device=device)
    count, counted = _count_of(run, x, norm)
    run.statistics(
        *(device, run.grids[0]),
        (run.at(x), run.beyond(kept), count, x.shape[0], run.units, counted),
        run.constants,
    )
    _normalize(run, x, weight, bias, residual, norm, run.grids[0][0], kept, y)
    if norm.running is not None and norm.onto is None:
        torch.autograd.graph.increment_version(norm.running)
    return y, kept


def again(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kept: torch.Tensor,
    norm: Norm,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same bits of y (N, C) from x and what `forward` kept, where there was no residual; ``onto`` rows of any
    stride where they are given."""
    run = _kernels_of(x, weight, norm)
    apart = onto is not None and (onto.stride(0) % run.constants[0] or onto.data_ptr() % 16)
    y = torch.empty_like(x) if onto is None or apart else onto
    _normalize(run, x, weight, bias, None, norm, 0, kept, y)
    return onto.copy_(y) if onto is not None and apart else y


def settled(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
    slope: float,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """y = act((x - mean) / sqrt(var + eps) * weight + bias + residual) by running statistics, which stay: one launch.

    Args:
        x: (N, C), N >= 1, contiguous, aligned to 16 bytes. residual: like x, or None.
        weight, bias: (C,) or None, both or neither. mean, var: (C,). slope: as in `Norm`.
    """
    norm = Norm(eps, 0.0, slope, (mean, var, mean))  # batches are not counted
    y = torch.empty_like(x)
    _normalize(_kernels_of(x, weight, norm), x, weight, bias, residual, norm, 0, None, y)
    return y


def _normalize(
    run: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: Norm,
    parts: int,
    kept: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Fill y; without ``parts`` by what was ``kept``, or else by running statistics."""
    at, running = run.at, norm.running
    none = at(x)
    count, counted = _count_of(run, x, norm)
    follows = running is not None and (parts > 0 or kept is None)
    pointers = (
        none,
        none if residual is None else at(residual),
        *((none, none) if weight is None or bias is None else (at(weight), at(bias))),
        *((none, none) if kept is None else (run.beyond(kept), at(kept))),
        *((none,) * 5 if running is None else map(at, (*running[:2], *(norm.onto or running[:2]), running[2]))),
        at(y),
        count,
    )
    flags = (int(residual is not None), int(weight is not None), int(follows), counted)
    numbers = (
        x.shape[0],
        run.units,
        y.stride(0) // run.constants[0],
        parts,
        *flags,
        norm.eps,
        norm.momentum,
        norm.slope,
    )
    run.normalize(x.device, run.grids[2], (*pointers, *numbers), run.constants)


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kept: torch.Tensor,
    norm: Norm,
    overwrite: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Gradients of x, weight, bias and residual from that of y.

    They are zero in dead rows, where the gradient of y is not read. A residual without an activation gets ``grad``.

    Args:
        grad: (N, C), rows may be apart. x, weight, bias: those of `forward`; kept: its second result.
        y: the result, where a residual was added before an activation; else None.
        overwrite: x is read for the last time: its gradient is written over it.
    """
    run = _kernels_of(x, weight, norm)
    at, device, rows, unit = run.at, x.device, x.shape[0], run.constants[0]
    row, column = grad.stride()
    if column != 1 or row % unit or grad.data_ptr() % 16:
        grad, row = grad.clone(memory_format=torch.contiguous_format), x.shape[1]
    none = at(x)
    dx = x if overwrite else torch.empty_like(x)
    weight_grad = bias_grad = None
    affine = affine_grad = (none, none)
    if weight is not None and bias is not None:
        weight_grad, bias_grad = torch.empty_like(weight), torch.empty_like(bias)
        affine, affine_grad = (at(weight), at(bias)), (at(weight_grad), at(bias_grad))
    has_affine, sums, statistics, grad_row = int(weight is not None), run.beyond(kept), at(kept), row // unit
    count, counted = _count_of(run, x, norm)
    if y is None:
        dz, dz_row, slope, y_at = grad, grad_row, norm.slope, none
    else:
        dz, dz_row, slope, y_at = torch.empty_like(x), run.units, 1.0, at(y)
    dz_at = at(dz)
    run.reduce(
        *(device, run.grids[1]),
        (
            *(at(grad), none, y_at, *affine, statistics, sums, dz_at, count),
            *(rows, run.units, grad_row, int(y is not None), has_affine, counted, norm.slope),
        ),
        run.constants,
    )
    run.input_grad(
        *(device, run.grids[2]),
        (
            *(dz_at, none, *affine, statistics, sums, *affine_grad, at(dx), count),
            *(rows, run.units, dz_row, run.grids[1][0], has_affine, counted, slope),
        ),
        run.constants,
    )
    return dx, weight_grad, bias_grad, dz


def folded(
    taps: torch.Tensor,
    start: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution's weight and bias with the scale and shift of its norm in them, in one launch.

        folded = taps * s,  shift = (start - mean) * s + bias        (s = weight / sqrt(var + eps))

    Args:
        taps: (K, C_in/G, C), contiguous, or a view of (C, K, C_in/G) that is. start: (C,) or None, the convolution's
            bias.
        weight, bias: (C,) or None, both or neither. mean, var: (C,).
        dtype: of the results, which are contiguous.

    Vectors are contiguous. All are aligned to 16 bytes and of `DTYPES`.
    """
    dtypes = [None if t is None else t.dtype for t in (start, weight, bias)]
    launch, at = _folds(dtype, taps.dtype, *dtypes, mean.dtype, var.dtype)
    channels = taps.shape[2]
    rows = taps.shape[0] * taps.shape[1]
    unit, block_c = 8 if channels % 8 == 0 else 1, 32 if channels > 16 else 16
    block_n = FOLDED_TILE // block_c
    result, shift = taps.new_empty(taps.shape, dtype=dtype), taps.new_empty(channels, dtype=dtype)
    out_first = not taps.is_contiguous()
    given = (taps, start, weight, bias, mean, var, result, shift)
    pointers = [at(taps if t is None else t) for t in given]
    flags = (int(start is not None), int(weight is not None))
    grid = (-(-rows // block_n), -(-channels // block_c))
    launch(taps.device, grid, (*pointers, rows, channels // unit, *flags, eps), (out_first, unit, block_n, block_c))
    return result, shift


@cache
def _folds(result: torch.dtype, taps: torch.dtype, *others: torch.dtype | None) -> tuple[Any, Any]:
    from sparseconv.gpu.launcher import INTERPRETED, Launcher, pointer
    from sparseconv.nn.fused import triton_norm

    types = (taps, *(dtype or taps for dtype in others), result, result, *(int,) * 4, 0.5)
    return Launcher(triton_norm.fold_kernel, types), pointer if INTERPRETED else torch.Tensor.data_ptr


def zero_dead_rows(x: torch.Tensor, count: torch.Tensor, axis: int) -> bool:
    """Write zero to the rows of x behind the first ``count`` (1,) int32, in place; False where that cannot be.

    x is a matrix, aligned to 16 bytes, its rows along ``axis``; elements that share memory cannot be written.
    """
    if x.ndim != 2 or 0 in x.stride() or x.data_ptr() % 16:
        return False
    (rows, columns), (row_stride, column_stride) = ((t if axis == 0 else t[::-1]) for t in (x.shape, x.stride()))
    block_c = 32 if columns > 16 else 16
    blocks = TILE // block_c, block_c
    launch, at = _zeros(x.dtype)
    numbers = rows, columns, row_stride, column_stride
    launch(x.device, (-(-rows // blocks[0]), -(-columns // block_c)), (at(x), at(count), *numbers), blocks)
    return True


@cache
def _zeros(dtype: torch.dtype) -> tuple[Any, Any]:
    from sparseconv.gpu.launcher import Launcher, pointer
    from sparseconv.nn.fused import triton_norm

    return Launcher(triton_norm.zero_kernel, (dtype, torch.int32, *(int,) * 4), 8), pointer
