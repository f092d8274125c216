"""Arrays of fixed size that a scene is copied into, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.geometry.scene import put_scene
from sparseconv.nn.capturing.answer import CannotCapture, Given
from sparseconv.nn.capturing.region import Limits, Scene, Shape, kind_of

#: steps of rows to an octave
FINE, COARSE = 16, 4


@dataclass(frozen=True)
class Sizes:
    """What a recording has places for."""

    rows: int
    room: float  # rows of coarser grids, and edges, over those of the example
    extent: IndexRange
    shape: tuple[int, ...] | None  # the spatial shape; a scene's own may be smaller where ``loose``
    loose: bool = False

    @staticmethod
    def of(scenes: Sequence[Scene], room: float, *, is_first: bool = True) -> Sizes:
        """Places for scenes like these, with ``room`` for more: in larger steps where scenes outgrew a first guess."""
        rows = _stepped(room * max(len(s.coords) for s in scenes), FINE if is_first else COARSE)
        shapes = [s.shape for s in scenes if s.shape is not None]
        if not shapes:
            return Sizes(rows, room, _grown([_extent(s.coords) for s in scenes]), None)
        loose = len(set(shapes)) > 1
        shape = tuple(map(max, zip(*shapes)))
        if loose:
            shape = tuple(-(-(5 * n) // 256) * 64 for n in shape)  # a quarter more, in multiples of 64
        return Sizes(rows, room, IndexRange.of_shape(shape), shape, loose)

    def lack(self, scene: Scene) -> str | None:
        """Why the host sees that a scene has no place here; None where it may."""
        if len(scene.coords) > self.rows:
            return f"{len(scene.coords)} voxels, and places for {self.rows}"
        larger = any(n > m for n, m in zip(scene.shape or (), self.shape or ()))
        if larger or (scene.shape != self.shape and not self.loose):
            return f"spatial shape {scene.shape}, captured with {self.shape}"
        return None


class SceneArrays:
    """What the graphs of a recording read of a scene.

    Args:
        given: the arguments of the call at hand; ``path``: where its sparse tensor is, None where the call makes it.
        example: a scene by which coarser grids and numbers of edges are foreseen.
    """

    def __init__(self, given: Given, path: tuple[Any, ...] | None, example: Scene, sizes: Sizes) -> None:
        features, device = example.features, example.features.device
        rank = example.coords.shape[1] - 1
        self.sizes = sizes
        self.like = VoxelGrid(example.coords, example.batch_size, example.voxel_size, example.origin)
        self.coords = torch.full((sizes.rows, rank + 1), -1, dtype=torch.int32, device=device)
        self.features = features.new_zeros((sizes.rows, features.shape[1]), requires_grad=False)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        #: the number of the scene at hand, by which the host knows its report; and on the host
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self.tickets = 0
        self.limits = Limits(device, rank)
        #: rows of the scene at hand
        self.filled = 0
        self._extras = self._make_extras(given, path)

    def _make_extras(
        self, given: Given, path: tuple[Any, ...] | None
    ) -> dict[tuple[Any, ...], tuple[torch.Tensor, bool]]:
        """Arrays for other tensors among the arguments, and whether they have a row for each voxel.

        Where the call makes its sparse tensor itself, what comes before that reads the arguments as they are.
        """
        found: dict[tuple[Any, ...], tuple[torch.Tensor, bool]] = {}
        if path is None:
            return found
        kind = kind_of(given.at(path))
        assert kind is not None
        voxels = len(kind.read(given.at(path)).coords)
        for where, leaf in given.leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device == self.coords.device:
                if leaf.requires_grad:
                    raise CannotCapture(f"the argument {where} wants a gradient; only the scene's features may")
                by_row = leaf.ndim > 0 and len(leaf) == voxels
                shape = (self.sizes.rows, *leaf.shape[1:]) if by_row else leaf.shape
                found[where] = leaf.new_zeros(shape), by_row
        return found

    def slots(self) -> dict[tuple[Any, ...], torch.Tensor]:
        """The arrays of other arguments, by where these are."""
        return {where: slot for where, (slot, _) in self._extras.items()}

    @torch.no_grad()
    def load(self, scene: Scene, given: Given) -> None:
        """Copy a scene into the arrays, and the other tensors among the arguments."""
        voxels = len(scene.coords)
        for where, (slot, by_row) in self._extras.items():
            value = given.at(where)
            if by_row:
                slot[:voxels].copy_(value)
                slot[voxels : self.filled].zero_()
            else:
                slot.copy_(value)
        put_scene(scene.coords, self.coords, self.count, self.filled)
        self.features[:voxels].copy_(scene.features)
        if voxels < self.filled:
            self.features[voxels : self.filled].zero_()
        self.filled = voxels
        self.tickets = self.tickets % (2**31 - 2) + 1
        self.ticket.fill_(self.tickets)
        if self.sizes.loose and scene.shape is not None:
            self.limits.load(scene.shape)

    def grid(self) -> FixedGrid:
        """The grid of the scene at hand."""
        return FixedGrid(self.coords, self.count, self.like, extent=self.sizes.extent, room=self.sizes.room)

    def shape(self) -> Sequence[int] | None:
        """Its spatial shape; one that differs from scene to scene knows its steps."""
        shape = self.sizes.shape
        if shape is None or not self.sizes.loose:
            return None if shape is None else list(shape)
        return Shape(shape, lambda root: root, self.limits)


def _stepped(rows: float, steps: int) -> int:
    """Rows rounded up to a part of an octave, and to 256."""
    step = max(256, 2 ** (math.ceil(math.log2(max(1.0, rows))) - 1) // steps)
    return -(-math.ceil(rows) // step) * step


def _extent(coords: torch.Tensor) -> IndexRange:
    low, high = torch.stack(torch.aminmax(coords[:, 1:], dim=0)).tolist()
    return IndexRange(tuple(low), tuple(v + 1 for v in high))


def _grown(extents: Sequence[IndexRange]) -> IndexRange:
    """The box around all of them, grown by half of its longest side to each side: rotations stay within."""
    low = [min(e.start[a] for e in extents) for a in range(extents[0].rank)]
    high = [max(e.end[a] for e in extents) for a in range(extents[0].rank)]
    more = [max(16, (h - lo) // 2) for lo, h in zip(low, high)]
    return IndexRange(tuple(lo - m for lo, m in zip(low, more)), tuple(h + m for h, m in zip(high, more)))
