"""The window of a plan, and whether two grids lie in one lattice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparseconv.geometry.ranges import Ints
from sparseconv.interop.fvdb.enums import ConvolutionPhasePolicy
from sparseconv.interop.fvdb.grid_batch import GridBatch

#: how far voxel sizes and origins may differ, relative and in voxels
TOLERANCE = 1e-6


@dataclass(frozen=True)
class ConvolutionTransformCompatibility:
    """Whether a fine grid and a coarse one lie in one lattice: coarse voxels ``stride`` as large, at one origin."""

    fine_grid_count: int
    coarse_grid_count: int
    same_batch_size: bool
    same_device: bool
    scale_compatible: bool
    registration_integer: bool
    registration_zero: bool
    compatible: bool
    registration_offset: torch.Tensor | None


class ConvolutionGeometry:
    """The window of a plan."""

    semantics_version = 1
    phase_policy = ConvolutionPhasePolicy.TORCH_SAME_PHASE.value

    def __init__(self, kernel_size: Ints, stride: Ints) -> None:
        self.kernel_size, self.stride = list(kernel_size), list(stride)
        self.padding_before = [(k - 1) // 2 for k in kernel_size]
        self.padding_after = [k - 1 - p for k, p in zip(kernel_size, self.padding_before)]
        self.dilation, self.registration_offset = [1, 1, 1], [0, 0, 0]
        self.kernel_volume = math.prod(kernel_size)


def compatibility(
    fine: GridBatch, coarse: GridBatch, geometry: ConvolutionGeometry
) -> ConvolutionTransformCompatibility:
    """What is known about two grids in one lattice; ValueError for grids that are not."""
    counts = fine.grid_count, coarse.grid_count
    advice = "the target needs voxels of stride times the size, and the same origins; coarsened_grid moves origins"
    if counts[0] != counts[1]:
        raise ValueError(f"fine and coarse grids must have the same batch size; got {counts[0]} and {counts[1]}")
    if fine.device != coarse.device:
        raise ValueError(
            f"fine and coarse grids must be on the same device; got {fine.device} and {coarse.device}: move one"
        )
    wanted = fine._sizes * torch.tensor(geometry.stride, dtype=torch.float64)
    if not torch.allclose(coarse._sizes, wanted, atol=TOLERANCE, rtol=TOLERANCE):
        raise ValueError(
            f"voxel size mismatch: coarse ones are {coarse._sizes.tolist()}, not {wanted.tolist()}: {advice}"
        )
    offset = (coarse._origins - fine._origins) / fine._sizes
    if not torch.allclose(offset, offset.round(), atol=TOLERANCE, rtol=TOLERANCE):
        raise ValueError(f"the grids are a fractional number of voxels apart, and only a=0 is supported: {advice}")
    if not torch.allclose(offset, torch.zeros_like(offset), atol=TOLERANCE, rtol=TOLERANCE):
        raise ValueError(f"the grids are a nonzero integer number of voxels apart, and only a=0 is supported: {advice}")
    return ConvolutionTransformCompatibility(*counts, True, True, True, True, True, True, offset)
