"""Arrays of fixed size that a scene is copied into, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.geometry.fixed_grid_io import put_scene
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.nn.capturing.region import Limits, Scene, Shape, kind_of
from sparseconv.nn.capturing.values.given import CannotCapture, Given, has_own_rows, is_there
from sparseconv.nn.results import put_rows

#: steps of rows to an octave
FINE, COARSE = 16, 4
#: about how much more memory a row takes where gradients are wanted
TRAINING = 3


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

    def places(self, trains: bool) -> int:
        """About how much memory graphs take, in rows without gradients."""
        return self.rows * (TRAINING if trains else 1)

    def lack(self, scene: Scene) -> str | None:
        """Why the host sees that a scene has no place here; None where it may."""
        if len(scene.coords) > self.rows:
            return f"{len(scene.coords)} voxels, and places for {self.rows}"
        larger = any(n > m for n, m in zip(scene.shape or (), self.shape or ()))
        if larger or (scene.shape != self.shape and not self.loose):
            return f"spatial shape {scene.shape}, captured with {self.shape}"
        return None


@dataclass(frozen=True)
class Lengths:
    """Rows of the tensors among the arguments that have none a voxel, such as points, over the calls so far."""

    most: tuple[int, ...] = ()
    varies: tuple[bool, ...] = ()
    groups: tuple[int, ...] = ()  # those of one group had as many rows as one another in every call

    def of_call(self, scene: Scene, given: Given, path: tuple[Any, ...] | None) -> Lengths:
        """With one more call; one that makes its own scene reads such tensors outside of graphs."""
        now = () if path is None else given.lengths(len(scene.coords), scene.features.device)
        before = self.most or now
        numbers: dict[Any, int] = {}
        groups = [numbers.setdefault(key, len(numbers)) for key in zip(self.groups or (0,) * len(now), now)]
        varies = (v or n != m for v, n, m in zip(self.varies or (False,) * len(now), now, before))
        return Lengths(tuple(map(max, before, now)), tuple(varies), tuple(groups))


class _Slot(NamedTuple):
    """An argument's array; ``group``: of the arguments with as many rows, WHOLE where that is the same in all calls."""

    array: torch.Tensor
    group: int


#: the scene's own voxels, and no group
VOXELS, WHOLE = -1, -2


class SceneArrays:
    """What the graphs of a recording read of a scene.

    Args:
        given: the arguments of the call at hand; ``path``: where its sparse tensor is, None where the call makes it.
        example: a scene by which coarser grids and numbers of edges are foreseen.
        lengths: rows of other arguments.
    """

    def __init__(
        self, given: Given, path: tuple[Any, ...] | None, example: Scene, sizes: Sizes, lengths: Lengths
    ) -> None:
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
        #: of each group of other arguments: places for rows, their number on the device, and on the host
        self._places: dict[int, int] = {}
        self._counts: dict[int, torch.Tensor] = {}
        self._filled = {VOXELS: 0}
        self._extras = self._make_extras(given, path, lengths)

    @property
    def filled(self) -> int:
        """Rows of the scene at hand."""
        return self._filled[VOXELS]

    def _make_extras(
        self, given: Given, path: tuple[Any, ...] | None, lengths: Lengths
    ) -> dict[tuple[Any, ...], _Slot]:
        """Arrays for other tensors among the arguments.

        Where the call makes its sparse tensor itself, what comes before that reads the arguments as they are.
        """
        found: dict[tuple[Any, ...], _Slot] = {}
        if path is None:
            return found
        kind, device = kind_of(given.at(path)), self.coords.device
        assert kind is not None
        voxels = len(kind.read(given.at(path)).coords)
        number = 0
        for where, leaf in given.leaves:
            if is_there(leaf, device):
                if leaf.requires_grad:
                    raise CannotCapture(f"the argument {where} wants a gradient; only the scene's features may")
                group, rows = (VOXELS, self.sizes.rows) if leaf.ndim else (WHOLE, 0)
                if has_own_rows(leaf, voxels):
                    group = lengths.groups[number] if lengths.varies[number] else WHOLE
                    rows = self._places_of(group, lengths.most[number])
                    number += 1
                found[where] = _Slot(leaf.new_zeros((rows, *leaf.shape[1:]) if leaf.ndim else ()), group)
        return found

    def _places_of(self, group: int, most: int) -> int:
        """Places for so many rows of a group; no two have as many, so rows tell whose they are."""
        if group == WHOLE:
            return most
        if group not in self._places:
            rows = _stepped(self.sizes.room * most, COARSE)
            while rows == self.sizes.rows or rows in self._places.values() or rows & (rows - 1) == 0:
                rows += 256  # not a power of two, which numbers of channels are
            self._places[group], self._filled[group] = rows, 0
            self._counts[group] = torch.zeros(1, dtype=torch.int32, device=self.coords.device)
        return self._places[group]

    def slots(self) -> dict[tuple[Any, ...], torch.Tensor]:
        """The arrays of other arguments, by where these are."""
        return {where: slot.array for where, slot in self._extras.items()}

    def given(self) -> list[torch.Tensor]:
        """All arrays that stand for arguments."""
        return [self.coords, self.features, *self.slots().values()]

    def lack(self, given: Given) -> str | None:
        """Why other arguments have no place here; None where they have."""
        rows: dict[int, int] = {}
        for where, (array, group) in self._extras.items():
            if group == VOXELS or not array.ndim:
                continue
            n, places = len(given.at(where)), len(array)
            if group == WHOLE and n != places:
                return f"an argument of {n} rows, captured with {places}"
            if group != WHOLE and (n > places or rows.setdefault(group, n) != n):
                return f"arguments of {rows.get(group, n)} and {n} rows, and {places} places for both"
        return None

    @torch.no_grad()
    def load(self, scene: Scene, given: Given) -> None:
        """Copy a scene into the arrays, and the other tensors among the arguments."""
        now = {**self._filled, VOXELS: len(scene.coords)}
        for where, (array, group) in self._extras.items():
            value = given.at(where)
            if group == WHOLE:
                array.copy_(value)
                continue
            put_rows(value, array, self._filled[group])
            now[group] = len(value)
        for group, count in self._counts.items():
            if now[group] != self._filled[group]:
                count.fill_(now[group])
        put_scene(scene.coords, self.coords, self.count, self.filled)
        put_rows(scene.features, self.features, self.filled)
        self._filled = now
        self.tickets = self.tickets % (2**31 - 2) + 1
        self.ticket.fill_(self.tickets)
        if self.sizes.loose and scene.shape is not None:
            self.limits.load(scene.shape)

    def grid(self) -> FixedGrid:
        """The grid of the scene at hand; its family knows the rows of other arguments, too."""
        grid = FixedGrid(self.coords, self.count, self.like, extent=self.sizes.extent, room=self.sizes.room)
        grid.family.update((self._places[group], count) for group, count in self._counts.items())
        return grid

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
