"""Plans whose outputs stay within a box, as on a dense array of given shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sparseconv.geometry.edges import coarse_grid
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary, IndexRange, Ints, per_axis
from sparseconv.geometry.window import Window
from sparseconv.plan.convolution import ConvolutionPlan

if TYPE_CHECKING:
    from jaxtyping import Int32


def dense_shape(
    shape: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Ints
) -> Ints:
    """The shape of torch's dense convolution: floor((n + 2 p - d (k - 1) - 1) / s) + 1 an axis."""
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(shape, kernel_size, stride, padding, dilation)
    )


def plan_within(
    grid: VoxelGrid,
    shape: Sequence[int],
    kernel_size: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    generative: bool = False,
    ends: Int32[torch.Tensor, " D"] | None = None,
) -> ConvolutionPlan:
    """The plan onto every voxel of [0, shape) that a window reaches, built on first use and kept with the grid.

    Args:
        grid: where the inputs are.
        shape: cells of the output along each axis; see `dense_shape`.
        kernel_size, stride, padding, dilation: of the window, one integer or one per axis.
        generative: from coarse voxels to fine ones.
        ends: (D,) int32 on the device, where the output of the scene in a `FixedGrid` ends, within ``shape``; not for
            a generative plan.

    Raises:
        ValueError: a shape without a cell.

    >>> grid = VoxelGrid(torch.tensor([[0, 7]]))
    >>> [plan_within(grid, (n,), 3, stride=2, padding=1).target.coords[:, 1].tolist() for n in (5, 4)]
    [[3, 4], [3]]
    """
    size = {
        "kernel_size": per_axis(kernel_size, grid.rank, "kernel_size", 1),
        "stride": per_axis(stride, grid.rank, "stride", 1),
        "padding": per_axis(padding, grid.rank, "padding"),
        "dilation": per_axis(dilation, grid.rank, "dilation", 1),
    }
    box = IndexRange.of_shape(per_axis(shape, grid.rank, "shape"))
    if box.size == 0:
        raise ValueError(f"a window of {size} leaves no cell of the output: its shape would be {tuple(shape)}")
    key = ("within", box.shape, generative, *size.values(), *(() if ends is None else (ends.data_ptr(),)))
    plan = grid.derived.get(key)
    if plan is None:
        kernel, step, pad, gap = size.values()
        recorded = getattr(grid.plan_type, "within", None)  # where torch.export traces
        if recorded is not None:
            plan = recorded(grid, box.shape, kernel, generative, stride=step, padding=pad, dilation=gap)
        elif generative:
            boundary = Boundary.forbid(box)
            plan = ConvolutionPlan.transposed(grid, kernel, stride=step, padding=pad, dilation=gap, boundary=boundary)
        else:
            boundary = Boundary.absent()
            window = Window.of(grid.rank, size["kernel_size"], size["stride"], size["dilation"], size["padding"])
            plan = ConvolutionPlan.between(grid, coarse_grid(grid, window, boundary, box, ends), window, boundary)
        plan = grid.derived.setdefault(key, plan.weak_copy(grid))
    return plan
