"""At a network's first call on a GPU: compile what all its convolutions will launch, while the call runs.

Layers are known by their making, the voxels by the input of the first that runs. Layers are taken in the order in which
they were made, and channels tell on which voxels each one lies. One with a stride starts from the coarsest voxels on
which the last layer gave as many channels as it takes. Others lie where the last layer lies, if that gave their
channels, else on voxels where a layer gives as many channels as they do. Keys say what belongs together. A wrong guess
costs a kernel that nobody asks for, and another that is compiled when it is met.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from sparseconv.geometry.cpu.sorted_table import KeySpace
from sparseconv.geometry.ranges import IndexRange
from sparseconv.geometry.window import Window
from sparseconv.gpu.compiling.starting import start_early
from sparseconv.pointwise import relu
from sparseconv.pointwise.epilogue import Epilogue

if TYPE_CHECKING:
    from sparseconv.backends.triton_implicit_gemm.ahead import ExpectedLayer
    from sparseconv.geometry.gpu.ahead import ExpectedMap

logger = logging.getLogger(__name__)

#: the share of a window's cells that are occupied, of scans
DENSITY = 0.3
#: channels whose kernels take the longest to compile
WIDE = 256
#: voxels that are looked at: more of them ask for the same kernels
MOST_ROWS = 2**22
#: layers that are noted at most: where none ever runs on a GPU, old ones are forgotten
MOST_NOTED = 4096
#: what a call is given, and not a recording that counts operations
PLAIN = (torch.Tensor, torch.nn.Parameter)
#: where outputs lie: on the input's voxels, on those that a stride reaches, or on those that a stride came from
SAME, STRIDED, INVERSE = "same", "strided", "inverse"


@dataclass(frozen=True)
class MadeLayer:
    """A convolution as it is known when it is made.

    ``key``: what layers over one map share. ``out_shape``: of bounded voxels, the shape that a stride makes of theirs.
    """

    window: Window
    c_in: int
    c_out: int
    groups: int
    outputs: str
    bias: torch.dtype | None
    key: Hashable = None
    out_shape: Callable[[Sequence[int]], Sequence[int]] | None = None


class Layer(Protocol):
    """A module that is a convolution. ``made_layer``: None of one whose kernels nobody knows before it runs."""

    training: bool

    def made_layer(self) -> MadeLayer | None: ...


#: layers that did not run yet
_made: list[weakref.ref[Layer]] = []


def register(layer: Layer) -> None:
    """Note a layer that was made, and start what will compile its kernels."""
    start_early()
    if len(_made) >= MOST_NOTED:
        _made[:] = [made for made in _made if made() is not None][-MOST_NOTED // 2 :]
    _made.append(weakref.ref(layer))


def is_due(features: torch.Tensor) -> bool:
    """Whether layers were made since the last time, and this is a call on a GPU: then `begin` is to be called."""
    if torch.compiler.is_compiling() or not _made or type(features) not in PLAIN or not features.is_cuda:
        return False
    return not torch.cuda.is_current_stream_capturing()


def begin(
    features: torch.Tensor, coords: torch.Tensor, batch_size: int, spatial_shape: Sequence[int] | None = None
) -> None:
    """Start to compile what the layers made since the last time will launch on such voxels (N, 1+D).

    ``spatial_shape``: of voxels that lie in a box from 0 on, as do all that are made of them.
    """
    layers = [layer for layer in (made() for made in _made) if layer is not None]
    _made.clear()
    try:
        finest = Level.of(coords[:MOST_ROWS], spatial_shape)
        compile_layers(layers, finest, batch_size, _dtype_of(features))
    except Exception:  # nothing depends on it
        logger.debug("layers are compiled when they are met", exc_info=True)


def compile_layers(layers: Sequence[Layer], finest: Level, batch_size: int, dtype: torch.dtype) -> None:
    """Start to compile what layers take that run on voxels like these, in processes beside this one.

    Gradients too, of layers in training mode, where torch records gradients; in evaluation, what joins a layer there.
    """
    from sparseconv.backends.triton_implicit_gemm import ahead  # Triton is loaded where it is used
    from sparseconv.geometry.gpu.ahead import tables_ahead
    from sparseconv.gpu.launcher import compilers_for
    from sparseconv.nn.fused import normalize

    device = finest.coords.device
    pool = compilers_for(device.index)
    if pool is None or not pool.is_usable:
        return
    is_training = any(layer.training for layer in layers)
    trained = is_training and torch.is_grad_enabled()
    rows, columns = finest.coords.shape
    tables_ahead(device, columns, rows)
    made = [layer.made_layer() for layer in layers]
    expected = list(dict.fromkeys(expected_layers(made, finest, batch_size, dtype)))
    for layer in expected:  # what takes longest begins first, and what is met first
        ahead.schedules_ahead(layer, dtype, device)
    for layer in expected:
        layer.map.ahead(device)
    if trained:
        normalize.ahead([layer.c_out for layer in expected], device, dtype)
    by_width = sorted(expected, key=lambda layer: max(layer.c_in, layer.c_out) < WIDE)
    for layer in by_width:
        ahead.forward_ahead(layer, dtype, device)
    if not is_training:
        for layer in by_width:
            ahead.inference_ahead(layer, dtype, device, Epilogue(relu))
    if not trained:
        return
    for layer in expected:
        ahead.schedules_ahead(layer, dtype, device, transposed=True)
    for layer in by_width:
        ahead.gradients_ahead(layer, dtype, device)


def expected_layers(
    layers: Sequence[MadeLayer | None], finest: Level, batch_size: int, dtype: torch.dtype
) -> Iterator[ExpectedLayer]:
    """What is known about layers before they run; nearly in the order of their making, and not of all."""
    from sparseconv.backends.triton_implicit_gemm.ahead import ExpectedLayer  # Triton is loaded where it is used

    rank, places = finest.coords.shape[1] - 1, _Places(finest, batch_size)
    left = [layer for layer in layers if layer is not None and len(layer.window.stride) == rank]
    for is_last in (False, True):  # those whose voxels are not known yet come once more
        waiting = []
        for layer in left:
            found = places.of(layer, is_last)
            if found is None:
                waiting.append(layer)
                continue
            bias = layer.bias if layer.bias is None or not torch.is_autocast_enabled("cuda") else dtype
            turned = layer.outputs == INVERSE
            yield ExpectedLayer(found, layer.c_in, layer.c_out, layer.groups, turned, bias, layer is not layers[0])
        left = waiting


class _Places:
    """On which voxels layers lie, as one after another is looked at."""

    def __init__(self, finest: Level, batch_size: int) -> None:
        self._levels, self._batch_size, self._at = [finest], batch_size, 0
        #: channels that the last layer on a level gave, and those that all gave
        self._last, self._widths = [0], [set[int]()]
        self._known: dict[Hashable, tuple[int, ExpectedMap]] = {}
        #: layers with a stride, the finer voxels of each, and its map; and which of them were gone back
        self._strided: list[tuple[MadeLayer, int, ExpectedMap]] = []
        self._undone: set[int] = set()
        #: channels of levels that were gone back to, with those that were there before beside them
        self._joined: dict[int, int] = {}

    def of(self, layer: MadeLayer, is_last: bool) -> ExpectedMap | None:
        """The map of a layer. None where its voxels are not known, of one that stays on them unless it ``is_last``."""
        key, found = layer.key, None
        if layer.outputs != STRIDED and key is not None and key in self._known:
            at, found = self._known[key]
        elif layer.outputs == INVERSE:
            way = None if key is not None else self._way_back(layer)
            if way is None:
                return None
            at, found = way
            self._joined[at] = self._last[at] + layer.c_out
        elif layer.outputs == SAME:
            where = self._same(layer, is_last)
            if where is None:
                return None
            at, found = where, self._map(layer, self._levels[where], self._levels[where], None)
        else:
            at, found = self._coarser(layer)
        if key is not None:
            self._known.setdefault(key, (at, found))
        self._at = at
        self._last[at] = layer.c_out
        self._widths[at].add(layer.c_out)
        return found

    def _same(self, layer: MadeLayer, is_last: bool) -> int | None:
        """The level of a layer that stays on its voxels."""
        joined = [level for level, channels in self._joined.items() if channels == layer.c_in]
        if joined and layer.key is None:
            del self._joined[joined[-1]]
            return joined[-1]
        if layer.key is not None or self._last[self._at] in (0, layer.c_in):
            return self._at
        fits = [level for level, widths in enumerate(self._widths) if layer.c_out in widths]
        return self._at if self._at in fits or (is_last and not fits) else fits[0] if fits else None

    def _way_back(self, layer: MadeLayer) -> tuple[int, ExpectedMap] | None:
        """Of the strides with this window that were not gone back, the last; one with these channels goes first."""
        ways = [n for n, (made, *_) in enumerate(self._strided) if made.window == layer.window]
        ways = [n for n in ways if n not in self._undone] or ways
        exact = [n for n in ways if (self._strided[n][0].c_out, self._strided[n][0].c_in) == (layer.c_in, layer.c_out)]
        if not ways:
            return None
        chosen = (exact or ways)[-1]
        self._undone.add(chosen)
        return self._strided[chosen][1:]

    def _coarser(self, layer: MadeLayer) -> tuple[int, ExpectedMap]:
        alike = [level for level, count in enumerate(self._last) if count == layer.c_in]
        fine = alike[-1] if alike else len(self._levels) - 1
        coarse, pairs = self._levels[fine].strided(layer, self._batch_size)
        found = self._map(layer, self._levels[fine], coarse, pairs)
        self._levels.append(coarse)
        self._last.append(0)
        self._widths.append(set())
        self._strided.append((layer, fine, found))
        if layer.key is not None:
            self._known.setdefault(layer.key, (fine, found))
        return len(self._levels) - 1, found

    def _map(self, layer: MadeLayer, fine: Level, coarse: Level, pairs: int | None) -> ExpectedMap:
        from sparseconv.geometry.gpu.ahead import ExpectedMap

        window = layer.window
        count = max(1, round(fine.rows * len(window.offsets) * DENSITY)) if pairs is None else pairs
        return ExpectedMap(window.offsets, window.stride, pairs is None, fine.rows, coarse.rows, count)


class Level(NamedTuple):
    """Voxels of one resolution (N, 1+D), and a box around them, which may bound what is made of them."""

    coords: torch.Tensor
    box: IndexRange
    is_bounded: bool

    @classmethod
    def of(cls, coords: torch.Tensor, shape: Sequence[int] | None) -> Level:
        """The voxels of a network's input; without a shape, their box is read from the device."""
        if shape is not None:
            return cls(coords, IndexRange((0,) * len(shape), tuple(shape)), True)
        low, high = torch.stack(torch.aminmax(coords[:, 1:], dim=0)).tolist()
        return cls(coords, IndexRange(tuple(low), tuple(n + 1 for n in high)), False)

    @property
    def rows(self) -> int:
        return self.coords.shape[0]

    def strided(self, layer: MadeLayer, batch_size: int) -> tuple[Level, int]:
        """The voxels that a layer with a stride reaches, and the number of pairs."""
        window, fine = layer.window, self.box
        if layer.out_shape is not None and self.is_bounded:
            coarse = IndexRange((0,) * fine.rank, tuple(layer.out_shape(fine.end)))
        else:
            coarse = window.coarse_bounds(fine)
        pairs, rows = torch.ones_like(self.coords[:, 0], dtype=torch.int64), self.coords.long()
        for axis, stride in enumerate(window.stride):
            offsets = torch.tensor(sorted({offset[axis] for offset in window.offsets}), device=rows.device)
            reached = (offsets, stride, coarse.start[axis], coarse.end[axis])
            pairs *= _reached(self.coords[:, 1 + axis].long(), *reached)[1].sum(1)
            cells, met = _reached(rows[:, 1 + axis], *reached)
            rows = rows.repeat_interleave(cells.shape[1], 0)
            rows[:, 1 + axis] = cells.flatten()
            start = (0, *coarse.start[: axis + 1], *fine.start[axis + 1 :])
            end = (batch_size, *coarse.end[: axis + 1], *fine.end[axis + 1 :])
            space = KeySpace.covering(IndexRange(start, end))
            rows = space.coords(torch.unique(space.keys(rows[met.flatten()]))).long()
        return Level(rows, coarse, self.is_bounded), max(1, int(pairs.sum()))


def _reached(
    column: torch.Tensor, offsets: torch.Tensor, stride: int, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, k) coarse places from which fine ones are seen on an axis, and whether there is such a place."""
    shifted = column[:, None] - offsets
    cells = torch.div(shifted, stride, rounding_mode="floor")
    return cells, (cells * stride == shifted) & (cells >= start) & (cells < end)


def _dtype_of(features: torch.Tensor) -> torch.dtype:
    if torch.is_autocast_enabled("cuda") and features.dtype != torch.float64:
        return torch.get_autocast_dtype("cuda")
    return features.dtype
