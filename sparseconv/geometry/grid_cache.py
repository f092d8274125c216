"""The grid of a tensor of coordinates, for whoever is given the tensor alone."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sparseconv.geometry.grid import VoxelGrid

_grids: Any = WeakTensorKeyDictionary()


def remember(coords: torch.Tensor, grid: VoxelGrid) -> None:
    """Let `known` find the grid by this very tensor, (N, 1+D) int32, while both are there."""
    _grids[coords] = coords._version, weakref.ref(grid)


def known(coords: torch.Tensor) -> tuple[int, VoxelGrid] | None:
    """The tensor's version when it was remembered, and its grid; None where there is none any more.

    >>> coords = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    >>> grid = VoxelGrid(coords)
    >>> remember(coords, grid)
    >>> known(coords)[1] is grid, known(coords.clone())
    (True, None)
    """
    version, grid = _grids.get(coords, (0, None))
    voxels = None if grid is None else grid()
    return None if voxels is None else (version, voxels)
