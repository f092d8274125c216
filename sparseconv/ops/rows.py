"""Rows of features: what every operation asks of them, and how some of their entries are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparseconv.checks import check_tensor, described
from sparseconv.geometry.grid import VoxelGrid, in_trace, left_trace
from sparseconv.gpu.cuda_capability import has_kernels
from sparseconv.torch_private import dispatch_modes, functional
from sparseconv.transforms import check_not_recorded, tracing

if TYPE_CHECKING:
    from sparseconv.plan.convolution import ConvolutionPlan


def check_rows(
    name: str, x: torch.Tensor, rows: int, each: str, device: torch.device, holder: str, ranks: tuple[int, ...] = (2,)
) -> None:
    """x is (rows, C), or (rows, H, C) where ``ranks`` allow it; else an error that names x and its holder."""
    check_not_recorded()
    check_tensor(name, x)
    if x.ndim not in ranks or x.shape[0] != rows:
        shapes = " or ".join(f"({', '.join([str(rows), 'H', 'C'][:: 2 if rank == 2 else 1])})" for rank in ranks)
        raise ValueError(f"{name} must be {shapes}, one row per {each}; got {tuple(x.shape)}")
    if not x.is_floating_point() or x.element_size() < 2:
        raise TypeError(f"{name} must be floating point, of 16 bits or more; got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{holder} is on {device} but {name} is on {x.device}: move it, {name}.to({str(device)!r})")


def check_plan(plan: ConvolutionPlan) -> None:
    """Raise TypeError unless this is a plan: of one process, or of a scene that many share."""
    if not hasattr(plan, "localize"):
        raise TypeError(f"plan must be a ConvolutionPlan, but it is {described(plan)}: ConvolutionPlan(grid, 3) is one")


def check_grid(grid: VoxelGrid) -> None:
    """Raise TypeError unless this is a grid."""
    if not hasattr(grid, "coords") or not hasattr(grid, "batch_size"):
        raise TypeError(f"grid must be a VoxelGrid, but it is {described(grid)}: pass x.grid of a SparseTensor")


def kept(terms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Terms where the mask holds and 0 elsewhere, whatever they are.

    On the CPU by their bits: torch.where is a branch an element there, ten times slower, and a product would turn an
    infinite term into NaN.
    """
    if terms.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.where(mask, terms, 0)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[terms.element_size()]
    return (terms.view(bits) & mask.to(bits).neg_()).view(terms.dtype)


def recorder(place: Any) -> Any:
    """A grid or plan of a trace, which records poolings as operators of its own; None of others."""
    if tracing() and isinstance(place, VoxelGrid):
        place = in_trace(place)
    return place if hasattr(place, "pooled") and not left_trace(place) else None


def on_kernels(x: torch.Tensor) -> bool:
    """Whether kernels can read a tensor: it is on a GPU that they serve, and nobody looks between operations."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and not dispatch_modes()
        and not functional()
        and has_kernels(x.device)
    )


def wide(x: torch.Tensor) -> torch.dtype:
    """The dtype that sums of x are kept in: fp32 of halves."""
    return torch.promote_types(x.dtype, torch.float32)
