"""The scene that is streamed: coordinates and features in host memory or in mapped files."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sparseconv.checks import INTEGERS, check_count, check_indices, check_tensor, described
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange
from sparseconv.tensor import SparseTensor


@dataclass(frozen=True)
class Scene:
    """Coords (N, 1+D) integers and features (N, C), and a grid of one voxel that has the scene's scale and batch."""

    coords: torch.Tensor
    features: torch.Tensor
    like: VoxelGrid
    sparse: SparseTensor | None
    extent: IndexRange  # of all voxels, the batch first

    @classmethod
    def of(cls, x: Any, batch_size: int | None, piece: int) -> Scene:
        """From a `SparseTensor`, or a pair of tensors or arrays, which may be mapped files.

        Raises TypeError and ValueError for anything else.
        """
        if isinstance(x, SparseTensor):
            if batch_size is not None and batch_size != x.grid.batch_size:
                raise ValueError(f"batch_size is {batch_size}, but that of x is {x.grid.batch_size}: leave it out")
            grid = x.grid
            if grid.is_shared or grid.count is not None:
                raise ValueError(f"x must hold a whole scene of its own, but its grid is {grid}")
            space = grid.extent
            extent = IndexRange((0, *space.start), (grid.batch_size, *space.end))
            return cls(grid.coords, x.features, grid._like(grid.coords[:0]), x, extent)
        if not isinstance(x, (tuple, list)) or len(x) != 2:
            raise TypeError(
                f"x must be a SparseTensor or a pair (coords, features), but it is {described(x)}: numpy.load(name, "
                "mmap_mode='r') maps a file"
            )
        coords, features = (as_rows(name, value) for name, value in zip(("coords", "features"), x))
        if coords.ndim != 2 or not 2 <= coords.shape[1] <= 5:
            raise ValueError(f"coords must be (N, 1+D), D from 1 to 4; got {tuple(coords.shape)}")
        if coords.dtype not in INTEGERS:
            raise TypeError(f"coords must be integers; got {coords.dtype}")
        if features.ndim != 2 or features.shape[0] != coords.shape[0]:
            raise ValueError(f"features must be ({coords.shape[0]}, C), one row per voxel; got {tuple(features.shape)}")
        start: list[int] = []
        end: list[int] = []
        for first in range(0, len(coords), piece):
            low, high = (edge.tolist() for edge in torch.aminmax(coords[first : first + piece], dim=0))
            check_indices(low, high)
            if low[0] < 0:
                raise ValueError(f"batch items (column 0 of coords) start at 0; got {low[0]}")
            start = [min(a, b) for a, b in zip(start or low, low)]
            end = [max(a, b + 1) for a, b in zip(end or [h + 1 for h in high], high)]
        most = end[0] - 1 if end else -1
        if batch_size is None:
            batch_size = max(1, most + 1)
        check_count("batch_size", batch_size, 1)
        if most >= batch_size:
            raise ValueError(f"coords name batch item {most}, but batch_size is {batch_size}")
        like = VoxelGrid(torch.zeros(0, coords.shape[1], dtype=torch.int32), batch_size)
        none = [0] * coords.shape[1]
        return cls(coords, features, like, None, IndexRange(tuple(start or none), tuple(end or none)))

    def __len__(self) -> int:
        return len(self.coords)

    def held_on(self, device: torch.device, most_bytes: int, piece: int, with_features: bool) -> Held:
        """What of the scene lies on a GPU, if it takes at most so many bytes there: coordinates, and their order in
        blocks; then features.

        Each block looks for its surroundings, which takes longer in host memory than a block's compute.
        """
        kind = torch.int16 if min(self.extent.start) >= -(2**15) and max(self.extent.end) <= 2**15 else torch.int32
        size = len(self) * (self.coords.shape[1] * kind.itemsize + (4 if len(self) < 2**31 else 8))
        if device.type != "cuda" or self.coords.is_cuda or size > most_bytes:
            return Held(self, None, 0)
        held = replace(self, coords=_copied(self.coords, kind, device, piece))
        if with_features and not self.features.is_cuda and size + self.features.nbytes <= most_bytes:
            size += self.features.nbytes
            held = replace(held, features=_copied(self.features, self.features.dtype, device, piece))
        return Held(held, held.coords.device, size)


class Held(NamedTuple):
    """A scene with what of it lies on a GPU, where the order of its rows is kept (None: on the CPU), and the bytes
    that both take."""

    scene: Scene
    order_on: torch.device | None
    num_bytes: int


def _copied(source: torch.Tensor, kind: torch.dtype, device: torch.device, piece: int) -> torch.Tensor:
    """Rows on a GPU by pinned memory, piece by piece."""
    made = torch.empty(source.shape, dtype=kind, device=device)
    for rows, into in zip(source.split(piece), made.split(piece)):
        into.copy_(torch.empty(rows.shape, dtype=kind, pin_memory=True).copy_(rows), non_blocking=True)
    return made


def as_rows(name: str, value: Any) -> torch.Tensor:
    """A tensor over the memory of a tensor or an array, which may be a mapped file that is only read."""
    if isinstance(value, np.ndarray):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of an array that cannot be written; nobody writes here
            if any(step < 0 for step in value.strides):
                raise ValueError(f"{name} is an array with negative strides: numpy.ascontiguousarray({name}) copies it")
            try:
                value = torch.from_numpy(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name} must be an array of numbers that torch knows; got {value.dtype}") from error
    check_tensor(name, value)
    return value


def lexicographic(coords: torch.Tensor) -> torch.Tensor:
    """Rows in lexicographic order."""
    if not len(coords):
        return torch.zeros(0, dtype=torch.int64)
    low, high = torch.aminmax(coords, dim=0)
    space = KeySpace(IndexRange(tuple(low.tolist()), tuple(h + 1 for h in high.tolist())))
    return space.keys(coords).argsort()
