"""A scene in the arrays of a grid of fixed size, and what of it did not fit."""

from __future__ import annotations

import torch

#: bits of the fault flag, and what they say
FAULTS = {
    1: "a voxel lies outside of the extent or the batch, occurs twice, or the dead rows do not follow the real ones",
    2: "a derived grid has more voxels than its rows hold: give more room",
    4: "a map has more edges than there is room for: give more room, or an example with as many neighbors per voxel",
    8: "a voxel lies behind the end of its scene's own spatial shape",
    16: "a point is not finite, or is of a batch item that the grid lacks",
}
#: the bit of points
POINTS = 16


def fault_of(value: int) -> str | None:
    """What a fault flag that was read says, as a sentence; None for 0."""
    return "; ".join(text for bit, text in FAULTS.items() if value & bit) or None


@torch.no_grad()
def note_fault(fault: torch.Tensor, is_bad: torch.Tensor, bit: int) -> None:
    """Set a bit of a fault flag (1,) int32 where ``is_bad``, a boolean () on its device, holds; nothing waits.

    >>> fault = torch.tensor([2], dtype=torch.int32)
    >>> note_fault(fault, torch.tensor(True), POINTS)
    >>> fault.tolist()
    [18]
    """
    if fault.is_cuda:
        from sparseconv.geometry.gpu.fixed_grid_io import note_fault_on_gpu  # Triton is loaded where it is used

        note_fault_on_gpu(fault, is_bad, bit)
        return
    fault |= bit * is_bad


@torch.no_grad()
def put_scene(coords: torch.Tensor, into: torch.Tensor, count: torch.Tensor, filled: int) -> None:
    """Put a scene's rows into the arrays of a `FixedGrid`: dead ones behind them, and their number.

    Args:
        coords: (N, 1+D) integers, N <= C, on any device.
        into: (C, 1+D) int32, the rows of the grid.
        count: (1,) int32, the number of real ones.
        filled: how many were real before; those behind are dead.

    >>> rows, count = torch.tensor([[0, 7], [0, 8], [0, 9], [-1, -1]], dtype=torch.int32), torch.tensor([3]).int()
    >>> put_scene(torch.tensor([[0, 4]]), rows, count, 3)
    >>> rows.tolist(), count.tolist()
    ([[0, 4], [-1, -1], [-1, -1], [-1, -1]], [1])
    """
    voxels = len(coords)
    plain = coords.dtype == torch.int32 and coords.is_contiguous() and coords.data_ptr() % 16 == 0
    if into.is_cuda and plain and coords.device == into.device and into.data_ptr() % 16 == 0 and into.numel() < 2**31:
        from sparseconv.geometry.gpu.fixed_grid_io import put_scene_on_gpu  # Triton is loaded where it is used

        put_scene_on_gpu(coords, into, count, filled)
        return
    into[:voxels].copy_(coords)
    into[voxels : max(voxels, filled)].fill_(-1)
    count.fill_(voxels)
