"""From a layer of torchsparse's kind to a plan."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

from sparseconv.checks import check_choice, row, warn
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.interop.arguments import scaled_coords
from sparseconv.interop.torchsparse.conventions import (
    DOWNSAMPLE_MODES,
    KMAP_MODES,
    Version,
    get_allow_negative_coordinates,
    get_downsample_mode,
    get_kmap_mode,
    get_version,
)
from sparseconv.interop.torchsparse.tensor import Ints
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.within import dense_shape
from sparseconv.transforms import tracing


def window(kernel: Ints, padding: Ints, dilation: Ints) -> dict[str, Any]:
    """What a plan over grids with the axes backwards is given for a kernel.

    Taps are numbered with the first axis fastest where their number is odd, and with the last one where it is even;
    while torch traces weights are `boxed`.
    """
    back = {"dilation": dilation[::-1], "padding": tuple([p * d for p, d in zip(padding, dilation)])[::-1]}
    if math.prod(kernel) % 2 or tracing():
        return {"kernel_size": kernel[::-1], **back}
    return {"taps": tuple(tap[::-1] for tap in _taps(kernel)), **back}


def _taps(kernel: Ints) -> itertools.product[Ints]:
    """The taps of an even number of them in the order of a layer's weight, the last axis fastest."""
    return itertools.product(*map(range, kernel))


class Modes(NamedTuple):
    """How layers of torchsparse 2.1 place windows and outputs, see `set_kmap_mode` and `set_downsample_mode`."""

    kmap: str
    downsample: str

    @classmethod
    def of(cls, config: Any = None) -> Modes:
        """Those of a layer's own settings, and the global ones where it has none."""
        given = {} if config is None or get_version() is Version.LAST else config
        kmap = given.get("kmap_mode", get_kmap_mode())
        downsample = given.get("downsample_mode", get_downsample_mode())
        check_choice("kmap_mode", kmap, KMAP_MODES)
        check_choice("downsample_mode", downsample, DOWNSAMPLE_MODES)
        return cls(kmap, downsample)

    @property
    def centred(self) -> bool:
        return get_version() is Version.LAST or self.kmap == "hashmap"


def centre(kernel: Ints, centred: bool) -> Ints:
    """How far a window begins before its voxel: (k - 1) // 2 on every axis, or 0 where the number of taps is even.

    The latter holds for torchsparse 2.1's default way to build maps alone.
    """
    if centred or math.prod(kernel) % 2:
        return tuple([(k - 1) // 2 for k in kernel])
    return (0,) * len(kernel)


def boxed(taps: torch.Tensor, kernel: Ints) -> torch.Tensor:
    """A weight (V, C_in, C_out) in the order of a box with the axes backwards, which traced plans have."""
    if math.prod(kernel) % 2:
        return taps
    return taps.unflatten(0, kernel).permute(2, 1, 0, 3, 4).reshape(taps.shape)


def plan_type(grid: VoxelGrid) -> Any:
    """The class of the plans of a grid."""
    return grid.plan_type or ConvolutionPlan


def submanifold(grid: VoxelGrid, kernel: Ints, dilation: Ints, modes: Modes) -> ConvolutionPlan:
    """The plan of a layer at stride 1."""
    return plan_type(grid)(grid, **window(kernel, centre(kernel, modes.centred), dilation))


def strided(
    grid: VoxelGrid, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, spatial_range: Ints | None, modes: Modes
) -> tuple[ConvolutionPlan, Ints | None] | None:
    """The plan of a strided layer, and the spatial range of its outputs; None where torch traces and outputs follow
    from voxels that nobody knows.

    Outputs are floor(c / stride) where windows are centered and either tile the axes or follow MinkowskiEngine. Else
    they are all that the window reaches within [0, n), n being the cells of a dense layer's output: of the spatial
    range, or of the voxels' own extent. In versions 1.4 and 2.0 they are all from the voxels' least coordinates on.
    """
    steps, shift = stride[::-1], centre(kernel, modes.centred)
    if modes.centred and (tiles(kernel, stride) or modes.downsample == "minkowski"):
        coarse = plan_type(grid)(grid, steps, stride=steps, padding=0).target
        return plan_type(grid)(grid, stride=steps, target=coarse, **window(kernel, shift, dilation)), spatial_range
    ends: Any = None if spatial_range is None else spatial_range[1:]
    if tracing():
        if modes.centred or get_allow_negative_coordinates():
            return None
        shape = () if ends is None else dense_shape(ends, kernel, stride, padding, dilation)
        box = {"stride": steps, "padding": padding[::-1], "dilation": dilation[::-1]}
        plan = plan_type(grid).within(grid, shape[::-1], kernel[::-1], False, **box)
        return plan, None if spatial_range is None else (spatial_range[0], *shape)
    if grid.batch_size > 1 and (spatial_range is None or get_version() is Version.LAST):
        _warn_of_mates()
    if get_version() is Version.LAST:
        centred = window(kernel, shift, dilation)
        plan = ConvolutionPlan(grid, stride=steps, target="full", **centred)
        low = tuple(-(-start // step) for start, step in zip(grid.extent.start, steps))
        target = _within(plan.target, low, plan.target.extent.end)
        if target is not plan.target:
            plan = ConvolutionPlan(grid, stride=steps, target=target, **centred)
        return plan, spatial_range
    shape = dense_shape(grid.extent.end[::-1] if ends is None else ends, kernel, stride, padding, dilation)
    dense = window(kernel, (0,) * 3, dilation) | {"padding": padding[::-1]}
    plan = ConvolutionPlan(grid, stride=steps, target="full", **dense)
    low = plan.target.extent.start if get_allow_negative_coordinates() else (0,) * grid.rank
    target = _within(plan.target, low, shape[::-1])
    if target is not plan.target or modes.centred:
        placed = window(kernel, shift, dilation) if modes.centred else dense
        plan = ConvolutionPlan(grid, stride=steps, target=target, **placed)
    return plan, None if spatial_range is None else (spatial_range[0], *shape)


#: versions whose bound a process was warned of
_WARNED: set[Version] = set()


def _warn_of_mates() -> None:
    """Warn, once, that outputs of one batch item depend on the others."""
    version = get_version()
    if version in _WARNED:
        return
    _WARNED.add(version)
    if version is Version.LAST:
        where, advice = "begin at the least coordinates", "a kernel size that is the stride has no such bound"
    else:
        where, advice = "end at the extent", "give the SparseTensor a spatial_range, (batch items, cells of the axes)"
    warn(
        f"as in torchsparse, the outputs of a strided layer {where} of the whole batch, so that those of one item "
        f"depend on the others: {advice}"
    )


def tiles(kernel: Ints, stride: Ints) -> bool:
    """Whether windows lie side by side on every axis that a layer strides."""
    return all(s in (1, k) for s, k in zip(stride, kernel))


def _within(grid: VoxelGrid, low: Ints, ends: Ints) -> VoxelGrid:
    """The voxels from ``low`` on, and below ``ends``."""
    if IndexRange(low, tuple(max(lo, n) for lo, n in zip(low, ends))).encloses(grid.extent):
        return grid
    voxels = grid.coords[:, 1:]
    return grid.subset(((voxels >= row(low, voxels)) & (voxels < row(ends, voxels))).all(1))


def generated(
    grid: VoxelGrid, kernel: Ints, stride: Ints, dilation: Ints, spatial_range: Ints | None
) -> ConvolutionPlan:
    """The plan of a generative layer: a convolution over the voxels stride * c, onto all that its window reaches.

    An axis of an even kernel reaches what the strided layer of that kernel saw: 2 * c and 2 * c + 1 for two taps at
    stride 2, the first tap the former. On odd axes taps go the other way, as torchsparse's do.

    Outputs outside of the spatial range are moved to its border, where they are one voxel with those that are there.
    """
    finer = VoxelGrid(scaled_coords(grid, stride[::-1]), grid.batch_size)
    shift = tuple((k - 1) // 2 for k in kernel)
    found = window(kernel, shift, dilation)
    if "taps" in found:  # input = output + dilation * tap
        even = [k % 2 == 0 for k in kernel]
        taps = (tuple(s - t if e else t - s for t, s, e in zip(tap, shift, even)) for tap in _taps(kernel))
        found = {"taps": tuple(tap[::-1] for tap in taps), "dilation": dilation[::-1], "padding": 0}
    reached = ConvolutionPlan(finer, target="full", **found)
    if spatial_range is None:
        return reached
    ends = row([n - 1 for n in spatial_range[:0:-1]], reached.target.coords)
    voxels = torch.minimum(reached.target.coords[:, 1:].clamp_min(0).long(), ends).int()
    target = VoxelGrid(torch.cat([reached.target.coords[:, :1], voxels], 1), grid.batch_size, duplicates="first")
    return ConvolutionPlan(finer, target=target, **found)
