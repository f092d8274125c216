"""The part of a call that a graph replays: from the first grid that is asked for to the end of the call.

A client's `forward` often begins with work that no graph can hold (``shape.tolist()``) and then makes a sparse tensor.
The region begins where the grid of that tensor is first asked for. What comes before runs eagerly in every call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.tensor import SparseTensor


class Scene(NamedTuple):
    """What a region begins with."""

    coords: torch.Tensor  # (N, 1+D) int32
    features: torch.Tensor  # (N, C)
    batch_size: int
    shape: tuple[int, ...] | None  # cells along each axis, where the tensor has such a box
    voxel_size: tuple[float, ...] | None
    origin: tuple[float, ...] | None

    def without_features(self) -> Scene:
        """The same with no rows of features."""
        return self._replace(features=self.features.detach()[:0])


@dataclass(frozen=True)
class Kind:
    """How one class of sparse tensors is read, and filled with another grid and features.

    ``fill(x, grid, features, shape)`` changes x itself or returns a new tensor; without a grid, on the voxels of x.
    ``follow(x, first)`` gives a filled one the maps that are stored with the tensor that the region began with.
    """

    type: type
    read: Callable[[Any], Scene]
    grid: Callable[[Any], VoxelGrid]
    fill: Callable[[Any, VoxelGrid | None, torch.Tensor, Sequence[int] | None], Any]
    copy: Callable[[Any], Any]
    follow: Callable[[Any, Any], Any]


_kinds: dict[type, Kind] = {}


def register(kind: Kind) -> None:
    """Let regions begin with, and return, sparse tensors of another class."""
    _kinds[kind.type] = kind
    _kind_of_class.cache_clear()


_layers: set[type] = set()


def register_layers(*types: type) -> None:
    """Let `accelerate` find modules of these classes: those that take and return sparse tensors."""
    _layers.update(types)


def is_sparse_layer(module: Any) -> bool:
    return isinstance(module, tuple(_layers))


def kind_of(value: Any) -> Kind | None:
    """The kind of a sparse tensor; None for anything else."""
    of: Any = type(value)
    return _kind_of_class(of)


@lru_cache(1024)
def _kind_of_class(kind: Any) -> Kind | None:
    return next((_kinds[parent] for parent in kind.__mro__ if parent in _kinds), None)


register(
    Kind(
        SparseTensor,
        lambda x: Scene(x.grid.coords, x.features, x.grid.batch_size, None, x.grid.voxel_size, x.grid.origin),
        lambda x: x.grid,
        lambda x, grid, features, shape: SparseTensor(x.grid if grid is None else grid, features),
        lambda x: x,
        lambda x, first: x,
    )
)


class _State(threading.local):
    begin: Callable[[Any], bool] | None = None
    inside = False


_state = _State()


@contextmanager
def watched(begin: Callable[[Any], bool] | None) -> Iterator[None]:
    """Within it, ``begin`` is asked once: with the first sparse tensor whose grid is asked for on this thread."""
    before, _state.begin = _state.begin, begin
    try:
        yield
    finally:
        _state.begin = before


def begins_with(x: Any) -> bool:
    """Ask whether a region begins with this tensor; it then holds the region's grid and features."""
    begin = _state.begin
    if begin is None:
        return False
    _state.begin = None
    return begin(x)


def is_awaited() -> bool:
    """Whether a region begins with the next sparse tensor whose grid is asked for on this thread."""
    return _state.begin is not None


def never_begins() -> None:
    """A part replays a graph of its own: a region that began after it would lack what the part does."""
    _state.begin = None


def is_inside() -> bool:
    """Whether this thread records or tries a call, whose parts then run as if they were not captured."""
    return _state.inside


@contextmanager
def inside() -> Iterator[None]:
    before, _state.inside = _state.inside, True
    try:
        yield
    finally:
        _state.inside = before


class Shape(list):
    """A spatial shape that knows how it was made of the region's first one, which differs from scene to scene."""

    def __init__(self, cells: Sequence[int], again: Callable[[Sequence[int]], Sequence[int]], limits: Limits) -> None:
        super().__init__(cells)
        self.again, self.limits = again, limits

    def then(self, cells: Sequence[int], step: Callable[[Sequence[int]], Sequence[int]]) -> Shape:
        """The shape that ``step`` makes of this one."""
        before = self.again
        return Shape(cells, lambda root: step(before(root)), self.limits)


def own_shape(shape: Sequence[int]) -> list[int]:
    """The shape as a list of its own, one that knows its steps as itself."""
    return shape if isinstance(shape, Shape) else list(shape)


def stepped(shape: Sequence[int], step: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
    """The shape that ``step`` makes of one."""
    cells = step(shape)
    return shape.then(cells, step) if isinstance(shape, Shape) else list(cells)


class Limits:
    """The shapes of strided layers, for the scene at hand: a region is captured with a box that holds many scenes.

    A scene's own box may end earlier. A voxel behind its end would not be there in an eager call, so it is a fault.
    """

    def __init__(self, device: torch.device, rank: int, most: int = 64) -> None:
        self.on_device = torch.zeros((most, rank), dtype=torch.int32, device=device)
        self._steps: list[Callable[[Sequence[int]], Sequence[int]]] = []

    def begin(self) -> None:
        """Forget the layers of an earlier run."""
        self._steps.clear()

    def row(self, shape: Shape) -> torch.Tensor:
        """(D,) int32 on the device: where the scene at hand ends, by the steps of this shape."""
        if len(self._steps) == len(self.on_device):
            raise ValueError(f"a network of more than {len(self.on_device)} strided layers: capture its parts")
        self._steps.append(shape.again)
        return self.on_device[len(self._steps) - 1]

    def load(self, root: Sequence[int]) -> None:
        """Fill in the ends for a scene of this shape."""
        if self._steps:
            ends = torch.tensor([list(step(root)) for step in self._steps], dtype=torch.int32)
            if self.on_device.is_cuda:
                ends = ends.pin_memory()
            self.on_device[: len(ends)].copy_(ends, non_blocking=True)
