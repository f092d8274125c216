"""What a call takes and returns, with places for the tensors that a replay writes.

A call returns a tree: sparse tensors, tensors and plain values in tuples, lists and dicts. Some of it may be what the
caller gave. A client may also fill in the dicts that it was given, as detectors do with their batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import is_not
from typing import Any, NamedTuple

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.nn.capturing.reads import MISSING, PLAIN, ReadDict, form_of, is_container, items_of
from sparseconv.nn.capturing.region import Kind, Shape, kind_of


class CannotCapture(Exception):
    """Why a call cannot become a graph, in words for the user."""

    @classmethod
    def told(cls, error: BaseException) -> CannotCapture:
        """By an error's first line. A frame that named the error, which holds that frame, would not be freed."""
        return cls(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


class DoesNotFit(Exception):
    """The scene at hand has more rows or edges than there are places for."""


class Given:
    """The arguments of a call: what they are made of, and copies of their containers."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.whole = (args, kwargs)
        self._paths: dict[int, tuple[Any, ...]] = {}
        self._note_read: Callable[[tuple[Any, ...]], None] | None = None
        self._copies: dict[int, tuple[Any, ...]] = {}
        #: dicts that the call may fill in: the caller's, or the copies made last; and what they held before the call
        self._dicts: dict[tuple[Any, ...], dict[Any, Any]] = {}
        self._before: dict[tuple[Any, ...], dict[Any, Any]] = {}
        self._lists: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
        #: every argument that is no container, and where it is; classes of the containers
        self.leaves: list[tuple[tuple[Any, ...], Any]] = []
        self._classes: list[Any] = []
        self._note(self.whole, ())

    def _note(self, value: Any, path: tuple[Any, ...]) -> None:
        if not is_container(value):
            self.leaves.append((path, value))
            if not isinstance(value, PLAIN):
                self._paths.setdefault(id(value), path)
            return
        self._paths.setdefault(id(value), path)
        self._classes.append((path, type(value)))
        if isinstance(value, dict) and len(path) > 1:
            self._dicts[path], self._before[path] = value, dict(value)
        elif isinstance(value, list):
            self._lists[path] = value, list(value)
        for key, item in items_of(value):
            self._note(item, (*path, key))

    def forms(self, rows: int, device: torch.device) -> tuple[Any, ...]:
        """What calls are told apart by: of a tensor its form, of others what is `spelled`; sparse tensors are left out.

        Only the number of rows of a tensor on ``device`` is left out, unless that is 0, for which code often has a way
        of its own. One elsewhere is told by its values, since a graph holds what it was. Which of them are one and the
        same counts, too.
        """
        leaves = [(path, leaf) for path, leaf in self.leaves if kind_of(leaf) is None]
        forms = ((path, self._paths.get(id(leaf)), form_of(leaf, rows, device)) for path, leaf in leaves)
        return *self._classes, *forms

    def entry(self, path: tuple[Any, ...]) -> Any:
        """What a dict among the arguments holds at a path now: the call may have changed it."""
        try:
            return self.at(path)
        except (KeyError, IndexError, TypeError):
            return MISSING

    def is_dict(self, value: Any) -> bool:
        """Whether it is a dict among the arguments of which `copied` can tell what is read."""
        return type(value) is dict and id(value) in self._paths

    def lengths(self, rows: int, device: torch.device) -> tuple[int, ...]:
        """Rows of each tensor on a device that are not one a voxel, whose number is ``rows``."""
        return tuple(len(leaf) for _, leaf in self.leaves if is_there(leaf, device) and has_own_rows(leaf, rows))

    def put_back(self) -> None:
        """Make the caller's dicts what they were before the call."""
        for path, into in self._dicts.items():
            into.clear()
            into.update(self._before[path])

    def forget(self) -> None:
        """Let go of everything."""
        self.whole, self.leaves = ((), {}), []
        self._dicts, self._before, self._lists, self._paths, self._copies = {}, {}, {}, {}, {}

    def copied(
        self,
        replaced: Mapping[tuple[Any, ...], Any] | None = None,
        note: Callable[[tuple[Any, ...]], None] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in new containers, some leaves ``replaced`` by their path.

        ``note`` is called with the path of every entry of a dict that is read; it ends in EVERY for all entries.
        """
        self._copies, self._note_read = {}, note
        made: tuple[tuple[Any, ...], dict[str, Any]] = self._copied(self.whole, (), replaced or {})
        return made

    def _copied(self, value: Any, path: tuple[Any, ...], replaced: Mapping[tuple[Any, ...], Any]) -> Any:
        """A method, since a function that calls itself would keep what it sees in a circle."""
        if path in replaced:
            self._copies[id(replaced[path])] = path
            return replaced[path]
        if not is_container(value):
            return value
        made = _rebuilt(value, [self._copied(item, (*path, key), replaced) for key, item in items_of(value)])
        note = self._note_read
        if note is not None and self.is_dict(value):
            made = ReadDict(made, lambda key: note((*path, key)))
        self._copies[id(made)] = path
        if path in self._dicts:
            self._dicts[path] = made
        elif path in self._lists:
            self._lists[path] = made, list(made)
        return made

    def path_of(self, value: Any) -> tuple[Any, ...] | None:
        """Where a value is among the arguments or their copies; None for a new one."""
        if isinstance(value, PLAIN):
            return None
        path = self._copies.get(id(value))
        return self._paths.get(id(value)) if path is None else path

    def changed(self) -> list[tuple[tuple[Any, ...], list[Any], dict[Any, Any]]]:
        """Of each dict that the call changed: its path, the keys that went, and the items that are new or others."""
        if any(len(now) != len(was) or any(map(is_not, now, was)) for now, was in self._lists.values()):
            raise CannotCapture("it changes a list that it is given, which a replay would leave as it was")
        found = []
        for path, now in self._dicts.items():
            before = self._before[path]
            gone = [key for key in before if not dict.__contains__(now, key)]
            new = {k: v for k, v in dict.items(now) if k not in before or not self._same(v, before[k])}
            if gone or new:
                found.append((path, gone, new))
        return found

    def _same(self, value: Any, before: Any) -> bool:
        if value is before:
            return True
        if isinstance(value, PLAIN):
            return type(value) is type(before) and value == before
        path = self._copies.get(id(value))
        return path is not None and path == self._paths.get(id(before))

    def at(self, path: Sequence[Any]) -> Any:
        value: Any = self.whole
        for key in path:
            value = value[key]
        return value


class _Place(NamedTuple):
    """A tensor that the graph writes; ``rows``: the grid whose rows it has, or None."""

    number: int
    rows: int | None


class _FromCaller(NamedTuple):
    path: tuple[Any, ...]


class _Constant(NamedTuple):
    value: Any


class _Tree(NamedTuple):
    like: Any
    items: list[Any]


class _SparsePlace(NamedTuple):
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
        #: rows of the grids that results are on, and those of them whose voxels are returned
        self.grids: list[int] = []
        self.voxels: dict[int, VoxelGrid] = {}
        self.plain: list[Any] = []
        self._given, self._family, self._constants = given, family, constants
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
        if isinstance(value, PLAIN):
            self.plain.append(value)
            return _Constant(value)
        if is_container(value):
            return _Tree(value, [self._node(item) for _, item in items_of(value)])
        raise CannotCapture(f"it returns a {type(value).__name__}, which may hold tensors that nobody can find")

    def _place(self, value: torch.Tensor) -> _Place:
        self.tensors.append(value)
        rows = value.shape[0] if value.ndim and self._family is not None and value.shape[0] in self._family else None
        return _Place(len(self.tensors) - 1, None if rows is None else self._number(rows))

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
        return _SparsePlace(kind, value, number, place, shape if isinstance(shape, Shape) else None)

    def _number(self, rows: int) -> int:
        if rows not in self.grids:
            self.grids.append(rows)
        return self.grids.index(rows)

    def rows(self) -> list[int | None]:
        """Of each tensor, the number of the grid whose rows it has."""
        found: list[int | None] = [None] * len(self.tensors)

        def walk(node: Any) -> None:
            if isinstance(node, _SparsePlace):
                node = node.features
            if isinstance(node, _Place):
                found[node.number] = node.rows
            elif isinstance(node, _Tree):
                for item in node.items:
                    walk(item)

        walk(self._out)
        for _, _, new in self._changes:
            for node in new.values():
                walk(node)
        return found

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
            into = filling.given.at(path)
            for key in gone:
                into.pop(key, None)
            into.update({key: filling.made(node) for key, node in new.items()})
        return filling.made(self._out)

    def forget(self) -> None:
        """Let go of the tensors and of what the sparse ones were made of; the tree stays."""

        def walk(node: Any) -> Any:
            if isinstance(node, _SparsePlace):
                bare = node.kind.copy(node.like)
                return node._replace(like=node.kind.fill(bare, _NOWHERE, _NOTHING, None))
            if isinstance(node, _Tree):
                return _Tree(_rebuilt(node.like, [None] * len(node.items)), [walk(item) for item in node.items])
            return node

        self._out = walk(self._out)
        self._changes = [(p, g, {key: walk(node) for key, node in new.items()}) for p, g, new in self._changes]
        self.tensors, self.voxels = [], {}


class _Filling(NamedTuple):
    """What takes the places of an answer; without ``grids`` sparse tensors stay on theirs."""

    given: Given
    tensors: Sequence[torch.Tensor]
    grids: Mapping[int, VoxelGrid] | None
    root: Sequence[int] | None
    first: Any
    own: int | None

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
        return _rebuilt(node.like, [self.made(item) for item in node.items])


_NOTHING = torch.empty(0, 0)
_NOWHERE = VoxelGrid(torch.empty(0, 2, dtype=torch.int32))


def is_there(leaf: Any, device: torch.device) -> bool:
    """Whether an argument is a tensor, not a sparse one, on a device."""
    return isinstance(leaf, torch.Tensor) and leaf.device == device and kind_of(leaf) is None


def has_own_rows(leaf: torch.Tensor, rows: int) -> bool:
    """Whether it has rows, and not ``rows`` of them."""
    return leaf.ndim > 0 and len(leaf) != rows


def _rebuilt(like: Any, items: list[Any]) -> Any:
    """A container like this one of other items."""
    if isinstance(like, dict):
        made = copy.copy(like)
        for key, item in zip(list(like), items):
            made[key] = item
        return made
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*items)
    return type(like)(items)
