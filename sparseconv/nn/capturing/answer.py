"""What a call returns, with places for the tensors that a replay writes.

A call returns a tree: sparse tensors, tensors and plain values in tuples, lists, dicts and objects of clients' own
classes. Some of it may be what the caller gave. A client may also fill in the dicts and objects that it was given, as
detectors do with their batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.nn.capturing.region import Kind, Shape, kind_of
from sparseconv.nn.capturing.values.containers import fields_of, is_container, items_of, rebuilt
from sparseconv.nn.capturing.values.given import CannotCapture, Given
from sparseconv.nn.capturing.values.telling import PLAIN


class _Place(NamedTuple):
    """A tensor that the graph writes."""

    number: int


class _FromCaller(NamedTuple):
    path: tuple[Any, ...]


class _Constant(NamedTuple):
    value: Any


@dataclass
class _Tree:
    like: Any
    items: list[Any]


@dataclass
class _SparsePlace:
    kind: Kind
    like: Any
    grid: int
    features: _Place
    shape: Shape | None


class Answer:
    """The tree of what a call returned, its tensors numbered in the order in which they are met.

    Args:
        out: what the call returned, on grids of fixed size where ``family`` names their rows.
        given: its arguments.
        family: rows of each grid of fixed size -> the grid; None for an eager call.
        constants: what stands for a tensor that is the same in every call, by ``id``: a parameter or a buffer.
        own: rows of the grid that the caller's sparse tensor is on, whose voxels need not be returned; None where the
            call makes that tensor.
    """

    def __init__(
        self,
        out: Any,
        given: Given,
        family: Mapping[int, torch.Tensor] | None,
        constants: Mapping[int, torch.Tensor],
        own: int | None = None,
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        #: of each tensor, the number of the grid whose rows it has
        self.rows: list[int | None] = []
        #: rows of the grids that results are on, and those of them whose voxels are returned
        self.grids: list[int] = []
        self.voxels: dict[int, VoxelGrid] = {}
        self.plain: list[Any] = []
        self._given, self._family, self._constants = given, family, constants
        self._trees: dict[int, _Tree] = {}
        self._sparse_places: list[_SparsePlace] = []
        self._out = self._node(out)
        self._changes = [
            (path, gone, {key: self._node(value) for key, value in new.items()}) for path, gone, new in given.changed()
        ]
        del self._given, self._family, self._constants
        self._own = self.grids.index(own) if own in self.grids else None
        if self._own is not None:
            self.voxels.pop(self._own, None)

    def _node(self, value: Any) -> Any:
        path = self._given.path_of(value)
        if path is not None:
            return _FromCaller(path)
        kind = kind_of(value)
        if kind is not None:
            return self._sparse(kind, value)
        if isinstance(value, torch.Tensor):
            own = self._constants.get(id(value))
            return self._place(value) if own is None else _Constant(own)
        if self._given.is_held(value):
            return _Constant(value)
        if isinstance(value, PLAIN):
            self.plain.append(value)
            return _Constant(value)
        if is_container(value):
            return self._tree(value)
        raise CannotCapture(f"it returns a {type(value).__name__}, which may hold tensors that nobody can find")

    def _tree(self, value: Any) -> _Tree:
        """One for a container that is returned in several places."""
        known = self._trees.get(id(value))
        if known is None:
            known = self._trees[id(value)] = _Tree(value, [])
            known.items += [self._node(item) for _, item in items_of(value)]
        elif len(known.items) != len(items_of(value)):
            raise CannotCapture(f"it returns a {type(value).__name__} that holds itself")
        return known

    def _place(self, value: torch.Tensor) -> _Place:
        self.tensors.append(value)
        has_rows = value.ndim > 0 and self._family is not None and value.shape[0] in self._family
        self.rows.append(self._number(value.shape[0]) if has_rows else None)
        return _Place(len(self.tensors) - 1)

    def _sparse(self, kind: Kind, value: Any) -> _SparsePlace:
        try:
            grid, scene = kind.grid(value), kind.read(value)
        except ValueError as error:  # a client's own indices, which no layer has looked at
            raise CannotCapture(f"it returns a sparse tensor whose indices are no set of voxels: {error}") from error
        if self._family is not None and grid.count is None:
            raise CannotCapture("it returns a sparse tensor whose voxels the graph does not know")
        shape = getattr(value, "spatial_shape", None)
        place = self._place(scene.features)
        number = self._number(len(grid))
        self.voxels[number] = grid
        made = _SparsePlace(kind, value, number, place, shape if isinstance(shape, Shape) else None)
        self._sparse_places.append(made)
        return made

    def _number(self, rows: int) -> int:
        if rows not in self.grids:
            self.grids.append(rows)
        return self.grids.index(rows)

    def filled(
        self,
        given: Given,
        tensors: Sequence[torch.Tensor],
        grids: Mapping[int, VoxelGrid],
        root: Sequence[int] | None,
        path: tuple[Any, ...] | None,
    ) -> Any:
        """The same tree for another call: with its tensors and grids, and its arguments where they were returned.

        ``root`` is the spatial shape that the region begins with, ``path`` where its tensor is among the arguments.
        """
        return self._filled(_Filling(given, tensors, grids, root, None if path is None else given.at(path), self._own))

    def aliased(self, given: Given, tensors: Sequence[torch.Tensor]) -> Any:
        """The tree of the eager call itself, on its own grids, with aliases of its tensors."""
        return self._filled(_Filling(given, tensors, None, None, None, None))

    def _filled(self, filling: _Filling) -> Any:
        for path, gone, new in self._changes:
            into = fields_of(filling.given.at(path))
            for key in gone:
                into.pop(key, None)
            into.update({key: filling.made(node) for key, node in new.items()})
        return filling.made(self._out)

    def forget(self) -> None:
        """Let go of the tensors and of what the sparse ones were made of; the tree stays."""
        for place in self._sparse_places:
            place.like = place.kind.fill(place.kind.copy(place.like), _NOWHERE, _NOTHING, None)
        for tree in self._trees.values():
            tree.like = rebuilt(tree.like, [None] * len(tree.items))
        self.tensors, self.voxels, self._sparse_places, self._trees = [], {}, [], {}


@dataclass
class _Filling:
    """What takes the places of an answer; without ``grids`` sparse tensors stay on theirs."""

    given: Given
    tensors: Sequence[torch.Tensor]
    grids: Mapping[int, VoxelGrid] | None
    root: Sequence[int] | None
    first: Any
    own: int | None
    trees: dict[int, Any] = field(default_factory=dict)

    def made(self, node: Any) -> Any:
        if isinstance(node, _FromCaller):
            return self.given.at(node.path)
        if isinstance(node, _Constant):
            return node.value
        if isinstance(node, _Place):
            return self.tensors[node.number]
        if isinstance(node, _SparsePlace) and self.grids is None:
            made = node.kind.fill(node.kind.copy(node.like), None, self.tensors[node.features.number], None)
            return node.kind.follow(made, node.like)
        if isinstance(node, _SparsePlace):
            shape = None if node.shape is None or self.root is None else list(node.shape.again(self.root))
            kind, like, grid = kind_of(self.first), node.like, (self.grids or {}).get(node.grid)
            if node.grid == self.own and kind is node.kind:
                like = self.first  # whose voxels the copy has
            elif node.grid == self.own and kind is not None:
                grid = kind.grid(self.first)
            made = node.kind.fill(node.kind.copy(like), grid, self.tensors[node.features.number], shape)
            return node.kind.follow(made, self.first) if kind is node.kind else made
        if id(node) not in self.trees:
            self.trees[id(node)] = rebuilt(node.like, list(map(self.made, node.items)))
        return self.trees[id(node)]


_NOTHING = torch.empty(0, 0)
_NOWHERE = VoxelGrid(torch.empty(0, 2, dtype=torch.int32))
