"""What plans are given, checked before anything is built or launched."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.backends.registry import check_backend
from sparseconv.geometry.arguments import check_box, no_batch, no_grid, rows_of_points
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.geometry.ranges import Boundary
from sparseconv.geometry.window import Window
from sparseconv.kinds import check_count, check_kind, check_tensor
from sparseconv.plan.casting import packed_as
from sparseconv.torch_private import tracing

if TYPE_CHECKING:
    from sparseconv.pointwise import Epilogue, PointwiseDynamicFunction

Axes = int | Sequence[int]


class Weakly:
    """A grid that keeps a plan, as that plan holds it. Of an object of this class, a compiler can tell the type."""

    def __init__(self, grid: VoxelGrid) -> None:
        self.grid = weakref.ref(grid)


#: a grid, as a plan holds it
Held = VoxelGrid | Weakly
#: the tensors that `ConvolutionPlan.execute` takes
OPERANDS = ("x", "weight", "bias", "residual")


def checked_window(
    source: VoxelGrid,
    kernel_size: Axes | None,
    stride: Axes,
    dilation: Axes,
    padding: Axes | None,
    taps: torch.Tensor | Sequence[Sequence[int]] | None,
    boundary: Boundary | str,
    groups: int,
    backend: str,
    deterministic: bool | None = None,
) -> tuple[Window, Boundary]:
    """What both constructors take, checked: the window and the boundary."""
    check_kind("source", source, VoxelGrid, no_grid(source))
    if type(kernel_size) is not int and isinstance(kernel_size, Sequence) and len(kernel_size) == source.rank + 1:
        raise ValueError(f"kernel_size {kernel_size} has an axis more than {source}: {no_batch(source.rank)}")
    check_count("groups", groups, 1)
    check_backend(backend)
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True, False or None; got {deterministic!r}")
    window = Window.of(source.rank, kernel_size, stride, dilation, padding, taps)
    return window, checked_boundary(boundary, source.rank)


def checked_boundary(boundary: Boundary | str, rank: int) -> Boundary:
    """A boundary whose extent, where it has one, is a box of that rank within 32 bits."""
    if isinstance(boundary, str):
        return _plain_boundary(boundary)
    if not isinstance(boundary, Boundary):
        raise TypeError(f"boundary must be 'absent', 'forbid' or a Boundary; got {boundary!r}")
    extent = boundary.extent
    if extent is not None:
        if extent.rank != rank:
            raise ValueError(f"the boundary's extent must have {rank} axes, as the grid has; got {extent}")
        check_box(extent, "the boundary's extent")
        if boundary.kind == "absent":
            raise ValueError(
                f"under 'absent' the space has no end, but the boundary has the extent {extent}: drop it, or take the "
                "grid's subset of voxels within"
            )
    return boundary


@cache
def _plain_boundary(kind: Any) -> Boundary:
    return Boundary(kind)


def check_places(
    device: torch.device,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    """Raise for operands of `ConvolutionPlan.execute` that are no plain tensors, or not on the plan's device."""
    given: tuple[Any, ...] = (x, weight, bias, residual)
    fit = x is not None and weight is not None
    for t in given:  # names come later: each call runs this
        fit &= t is None or (
            isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested and t.device == device
        )
    if fit:
        return
    for name, tensor in zip(OPERANDS, given):
        if tensor is None and name in ("bias", "residual"):
            continue
        check_tensor(name, tensor)
        if tensor.device != device:
            there = str(tensor.device)
            advice = f"move it, or the plan, plan.to({there!r})"
            if name in ("weight", "bias"):
                advice = (
                    f"move it, a network by net.to({str(device)!r}), or the scene before a plan is made of its grid"
                )
            raise ValueError(f"the plan is on {device} but {name} is on {there}: {advice}")


def check_operands(
    kernel_map: KernelMap,
    groups: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    """Raise for operands of `ConvolutionPlan.execute` that do not fit; ``taps`` is the weight by tap."""
    rows = kernel_map.num_in
    shape, (_, group_in, c_out), dtype = x.shape, taps.shape, x.dtype
    if len(shape) != 2 or shape[0] != rows:
        raise ValueError(
            f"x must be ({rows}, C_in), one row a voxel of the source grid; got {tuple(shape)}{rows_of_points(shape)}"
        )
    if not dtype.is_floating_point:
        raise TypeError(f"x must be floating point; got {dtype}")
    if group_in * groups != shape[1]:
        raise ValueError(
            f"x has {shape[1]} channels, but the weight {tuple(weight.shape)} takes {group_in * groups} "
            f"(C_in/G = {group_in} in {groups} groups)"
        )
    if c_out % groups:
        raise ValueError(f"C_out = {c_out} must be a multiple of groups = {groups}")
    if bias is not None and bias.shape != (c_out,):
        raise ValueError(f"bias must be ({c_out},); got {tuple(bias.shape)}")
    if residual is not None and residual.shape != (kernel_map.num_out, c_out):
        raise ValueError(f"residual must be ({kernel_map.num_out}, {c_out}); got {tuple(residual.shape)}")
    for tensor in (taps, bias, residual):
        if tensor is not None and tensor.dtype != dtype:
            name = "weight" if tensor is taps else "bias" if tensor is bias else "residual"
            raise TypeError(f"x is {dtype} but the {name} is {tensor.dtype}: cast one, or use torch.autocast")


def autocast(x: torch.Tensor, taps: torch.Tensor, *others: torch.Tensor | None) -> Any:
    """The tensors in the dtype that an enclosing autocast asks for; fp64 is left alone, as torch does.

    Taps (K, C_in/G, C_out) that are cast are contiguous: one copy does both.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, taps, *others
    dtype = torch.get_autocast_dtype(kind)
    cast = [t if t is None or t.dtype == dtype else t.to(dtype) for t in (x, *others)]
    return cast[0], packed_as(taps, dtype), *cast[1:]


def as_epilogue(given: Epilogue | PointwiseDynamicFunction | None) -> Epilogue | None:
    """What `ConvolutionPlan.execute` was given as epilogue, its numbers bound; None for none."""
    if given is None:
        return None
    from sparseconv.pointwise import Epilogue, PointwiseDynamicFunction  # loaded where they are used

    if isinstance(given, Epilogue):
        return given
    if isinstance(given, PointwiseDynamicFunction):
        return Epilogue(given)
    raise TypeError(
        f"epilogue must be a function made with pointwise_dynamic, or an Epilogue of one; got {type(given).__name__}: "
        "sparseconv.pointwise has relu, silu, gelu and others"
    )


def recorder(source: Any) -> Any:
    """The class of plans on a grid of a trace, by torch.export or for streaming; None of any other grid."""
    traced = isinstance(source, VoxelGrid) and (tracing() or source.is_watched)
    return source.plan_type if traced else None


def held(grid: Held) -> VoxelGrid:
    """The grid, which a plan kept with it holds weakly."""
    if not isinstance(grid, Weakly):
        return grid
    alive = grid.grid()
    if alive is None:
        raise RuntimeError("the grid that kept this plan is gone: hold the grid as long as you ask the plan for it")
    return alive
