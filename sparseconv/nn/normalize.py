"""act(norm(z) + residual) over the rows of a batch in training, on a GPU, in two launches each way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

#: dtypes of features that the kernels serve; sums are fp32
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: programs on each multiprocessor, as many as its registers hold: of the statistics, of a gradient's sums, of a pass
#: that writes
CREWS = (4, 2, 2)
#: elements of a tile
TILE = 4096


class Norm(NamedTuple):
    """What of a batch norm is no tensor with a gradient: its numbers and its running statistics.

    ``slope`` is the activation's below zero: 0 for relu, 1 for none. ``running`` are mean, variance and the count of
    batches, moved in place, or None.
    """

    eps: float
    momentum: float
    slope: float
    running: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class Tiles:
    """How features (rows, C) are cut: constants of the kernels, and programs of each pass."""

    units: int
    constants: tuple[int, int, int]  # UNIT, BLOCK_N, BLOCK_C
    statistics: tuple[int, int]  # (parts, blocks of channels)
    reduce: tuple[int, int]
    write: tuple[int, int]

    @staticmethod
    @lru_cache(256)
    def of(rows: int, channels: int, processors: int) -> Tiles:
        unit = 8 if channels % 8 == 0 else 1
        block_c = 32 if channels > 16 else 16
        block_n = TILE // block_c
        tiles, columns = -(-rows // block_n), -(-channels // block_c)
        grids = []
        for crew in CREWS:
            rounds = -(-tiles // max(1, crew * processors // columns))
            grids.append((-(-tiles // rounds), columns))
        return Tiles(channels // unit, (unit, block_n, block_c), *grids)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = act((x - mean) / sqrt(var + eps) * weight + bias + residual), and what a gradient needs besides x.

    Args:
        x: (N, C), N >= 2, contiguous and aligned (`ready`). weight, bias: (C,) or None, both or neither.
        residual: (N, C) like x, or None.

    Returns:
        y (N, C), and mean and 1 / sqrt(var + eps) as (2, C) fp32. Running statistics follow as torch's do.
    """
    tiles, run = Tiles.of(x.shape[0], x.shape[1], _processors(x.device)), _kernels(x.dtype, weight, norm)
    parts = tiles.statistics[0]
    y = torch.empty_like(x)
    kept = torch.empty((2, x.shape[1]), dtype=torch.float32, device=x.device)
    sums = torch.empty((2, parts, x.shape[1]), dtype=torch.float32, device=x.device)
    with run.on(x.device):
        run.statistics(x.device, tiles.statistics, (run.at(x), run.at(sums), x.shape[0], tiles.units), tiles.constants)
        _normalize(run, tiles, x, weight, bias, residual, norm, sums, parts, kept, y)
    if norm.running is not None:
        torch.autograd.graph.increment_version(norm.running)
    return y, kept


def again(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, kept: torch.Tensor, norm: Norm
) -> torch.Tensor:
    """The same bits of y (N, C) from x and what `forward` kept, where there was no residual."""
    tiles, run = Tiles.of(x.shape[0], x.shape[1], _processors(x.device)), _kernels(x.dtype, weight, norm)
    y = torch.empty_like(x)
    with run.on(x.device):
        _normalize(run, tiles, x, weight, bias, None, norm, kept, 0, kept, y)
    return y


def _normalize(
    run: _Kernels,
    tiles: Tiles,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: Norm,
    sums: torch.Tensor,
    parts: int,
    kept: torch.Tensor,
    y: torch.Tensor,
) -> None:
    at, none = run.at, run.at(x)
    pointers = (
        none,
        none if residual is None else at(residual),
        *((none, none) if weight is None or bias is None else (at(weight), at(bias))),
        at(sums),
        at(kept),
        *((none, none, none) if norm.running is None else map(at, norm.running)),
        at(y),
    )
    flags = (residual is not None, weight is not None, parts > 0 and norm.running is not None)
    numbers = (x.shape[0], tiles.units, parts, *map(int, flags), norm.eps, norm.momentum, norm.slope)
    run.normalize(x.device, tiles.write, (*pointers, *numbers), tiles.constants)


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kept: torch.Tensor,
    norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Gradients of x, weight, bias and residual from that of y.

    Args:
        grad: (N, C), rows may be apart. x, weight, bias: those of `forward`; kept: its second result.
        y: the result, where a residual was added before an activation; else None.
    """
    rows, channels = x.shape
    tiles, run = Tiles.of(rows, channels, _processors(x.device)), _kernels(x.dtype, weight, norm)
    unit, parts = tiles.constants[0], tiles.reduce[0]
    if grad.stride(1) != 1 or grad.stride(0) % unit or not ready(grad, grad.stride(0)):
        grad = grad.clone(memory_format=torch.contiguous_format)
    at, none = run.at, run.at(x)
    dx = torch.empty_like(x)
    dz = grad if y is None else torch.empty_like(x)
    sums = torch.empty((2, parts, channels), dtype=torch.float32, device=x.device)
    affine = (none, none) if weight is None or bias is None else (at(weight), at(bias))
    weight_grad = bias_grad = None
    affine_grad = (none, none)
    if weight is not None and bias is not None:
        weight_grad, bias_grad = torch.empty_like(weight), torch.empty_like(bias)
        affine_grad = at(weight_grad), at(bias_grad)
    shape, has_affine = (rows, tiles.units), int(weight is not None)
    with run.on(x.device):
        run.reduce(
            x.device,
            tiles.reduce,
            (
                *(at(grad), none, none if y is None else at(y), *affine, at(kept), at(sums), at(dz)),
                *(*shape, grad.stride(0) // unit, int(y is not None), has_affine, norm.slope),
            ),
            tiles.constants,
        )
        run.input_grad(
            x.device,
            tiles.write,
            (
                *(at(dz), none, *affine, at(kept), at(sums), *affine_grad, at(dx)),
                *(*shape, dz.stride(0) // unit, parts, has_affine, norm.slope if y is None else 1.0),
            ),
            tiles.constants,
        )
    return dx, weight_grad, bias_grad, dz


def ready(x: torch.Tensor, row: int) -> bool:
    """Whether kernels can take rows (N, C) that lie ``row`` elements apart: aligned to 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) == row and x.data_ptr() % 16 == 0


@dataclass(frozen=True)
class _Kernels:
    """Launchers for one set of dtypes, and how they take tensors."""

    statistics: Any
    normalize: Any
    reduce: Any
    input_grad: Any
    at: Any
    on: Any


def _kernels(dtype: torch.dtype, weight: torch.Tensor | None, norm: Norm) -> _Kernels:
    return _launchers(
        dtype, None if weight is None else weight.dtype, None if norm.running is None else norm.running[0].dtype
    )


@cache
def _launchers(x: torch.dtype, weight: torch.dtype | None, running: torch.dtype | None) -> _Kernels:
    from sparseconv.geometry.triton_launch import Launcher, on_device, pointer
    from sparseconv.nn import triton_norm

    w, r, sums, tracked = weight or x, running or x, torch.float32, x if running is None else torch.int64
    number = 0.5  # any: they are fp32
    return _Kernels(
        Launcher(triton_norm.statistics_kernel, (x, sums, int, int), 8),
        Launcher(
            triton_norm.normalize_kernel,
            (x, x, w, w, sums, sums, r, r, tracked, x, *(int,) * 6, number, number, number),
            8,
        ),
        Launcher(triton_norm.reduce_kernel, (x, x, x, w, w, sums, sums, x, *(int,) * 5, number), 8),
        Launcher(triton_norm.input_grad_kernel, (x, x, w, w, sums, sums, w, w, x, *(int,) * 5, number), 8),
        pointer,
        on_device,
    )


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors; one where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
