"""Windows: which fine voxels a coarse one sees, through which tap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.checks import INT32, row
from sparseconv.geometry.projection import IndexProjection
from sparseconv.geometry.ranges import IndexRange, Ints, integers, per_axis

if TYPE_CHECKING:
    from sparseconv.geometry.gpu.taps import TapWindow

#: taps of a window, at most: 31 x 31 x 31 and the like
MOST_TAPS = 2**15


@dataclass(frozen=True)
class Window:
    """An `IndexProjection` from coarse voxels to fine ones, and the points of its region that carry a weight.

    fine = stride * coarse + offsets[k]        (offsets[k] = dilation * tap - padding)
    """

    projection: IndexProjection
    stride: Ints
    offsets: tuple[Ints, ...]

    @classmethod
    def of(
        cls,
        rank: int,
        kernel_size: int | Sequence[int] | None,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        padding: int | Sequence[int] | None = None,
        taps: torch.Tensor | Sequence[Sequence[int]] | None = None,
    ) -> Window:
        """A box of ``kernel_size`` taps, or an explicit list of them (K, D), whose padding defaults to 0."""
        if (kernel_size is None) == (taps is None):
            raise ValueError(
                "give either kernel_size (a box of taps) or taps (an explicit list), not both, not neither"
            )
        if taps is None and _is_plain(kernel_size) and _is_plain(stride) and _is_plain(dilation) and _is_plain(padding):
            return _box_window(rank, kernel_size, stride, dilation, padding)
        return _window(
            rank,
            None if kernel_size is None else per_axis(kernel_size, rank, "kernel_size", 1),
            per_axis(stride, rank, "stride", 1),
            per_axis(dilation, rank, "dilation", 1),
            None if padding is None else per_axis(padding, rank, "padding"),
            None if taps is None else _listed(taps, rank),
        )

    def fine(self, coarse: torch.Tensor, tap: int) -> torch.Tensor:
        """What coords (M, 1+D) int64 of coarse voxels see through a tap, (M, 1+D) int64."""
        return coarse * row((1, *self.stride), coarse) + row((0, *self.offsets[tap]), coarse)

    @cached_property
    def is_strided(self) -> bool:
        """Whether coarse voxels lie farther apart than fine ones, along an axis."""
        return any(s != 1 for s in self.stride)

    @cached_property
    def encoded(self) -> dict[int, TapWindow]:
        """The window as kernels on a device read it, on no torus, by the device's number."""
        return {}

    def __reduce__(self) -> tuple:
        return Window, (self.projection, self.stride, self.offsets)

    @cached_property
    def symmetry(self) -> tuple[int | None, tuple[int, ...] | None]:
        """The identity tap and the mirrored tap of each, where both sides are one grid on no torus."""
        return symmetry(self, None)

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """(smallest offset, largest offset, stride) of each axis."""
        return tuple((min(column), max(column), s) for column, s in zip(zip(*self.offsets), self.stride))

    @cached_property
    def fills_box(self) -> bool:
        """Whether a coarse voxel sees all of a box: no offset between the smallest and the largest is left out."""
        return len(self.offsets) == math.prod(last - first + 1 for first, last, _ in self.spans)

    @cached_property
    def sees_all(self) -> bool:
        """Whether every fine voxel has a coarse one that sees it, and the first and last of them move with it."""
        if all(s == 1 for s in self.stride):
            return True
        return self.fills_box and all(last - first + 1 >= s for first, last, s in self.spans)

    @cached_property
    def is_tiling(self) -> bool:
        """Whether the windows of the coarse voxels lie side by side, so that one of them sees each fine voxel, once."""
        box = math.prod(self.stride)
        return len(self.offsets) == box and all(last - first + 1 == s for first, last, s in self.spans)

    def coarse_bounds(self, extent: IndexRange) -> IndexRange:
        """A box around all coarse voxels that see a fine one in this box."""
        edges = list(zip(self.spans, extent.start, extent.end))
        start = tuple(-((last - lo) // s) for (_, last, s), lo, _ in edges)
        return IndexRange(start, tuple((hi - 1 - first) // s + 1 for (first, _, s), _, hi in edges))

    def fine_extent(self, extent: IndexRange) -> IndexRange:
        """The bounding box of all fine voxels that coarse ones with this one see."""
        edges = list(zip(self.spans, extent.start, extent.end))
        start = tuple(s * lo + first for (first, _, s), lo, _ in edges)
        return IndexRange(start, tuple(s * (hi - 1) + last + 1 for (_, last, s), _, hi in edges))

    def coarse_torus(self, torus: IndexRange | None) -> IndexRange | None:
        """The torus of the coarse voxels, where the fine ones live on one."""
        if torus is None:
            return None
        start = tuple(lo // s for lo, s in zip(torus.start, self.stride))
        return IndexRange(start, tuple(lo + n // s for lo, n, s in zip(start, torus.shape, self.stride)))


def check_taps(kernel: Sequence[int]) -> None:
    """Raise ValueError for a box of more taps than a window has."""
    count = math.prod(kernel)
    if count > MOST_TAPS:
        raise ValueError(_too_many(f"kernel_size {tuple(kernel)}, {count} taps,"))


def _too_many(asked: str) -> str:
    return f"{asked} are more than {MOST_TAPS}: chain smaller windows, or pool with a stride first"


def _is_plain(value: Any) -> bool:
    """Whether equal arguments mean the same: an integer, a tuple of them, or None, and no bool or float among them."""
    return type(value) is int or value is None or (type(value) is tuple and all(type(v) is int for v in value))


@lru_cache(maxsize=1024)
def _box_window(rank: int, kernel_size: Any, stride: Any, dilation: Any, padding: Any) -> Window:
    """`_window` of a box, by its arguments as they were given."""
    return _window(
        rank,
        per_axis(kernel_size, rank, "kernel_size", 1),
        per_axis(stride, rank, "stride", 1),
        per_axis(dilation, rank, "dilation", 1),
        None if padding is None else per_axis(padding, rank, "padding"),
        None,
    )


@lru_cache(maxsize=1024)
def _window(
    rank: int, kernel: Ints | None, strides: Ints, steps: Ints, padding: Ints | None, taps: tuple[Ints, ...] | None
) -> Window:
    """The window of checked arguments, made once for all plans that ask for it: it takes as long as a small map."""
    if kernel is not None:
        check_taps(kernel)
    elif len(taps or ()) > MOST_TAPS:
        raise ValueError(_too_many(f"{len(taps or ())} taps"))
    for name, values in (("stride", strides), ("dilation", steps), ("padding", padding or ())):
        if any(abs(v) > INT32.max for v in values):
            raise ValueError(f"{name} must fit in 32 bits on every axis; got {values}")
    if kernel is not None:
        projection = IndexProjection.window(kernel, strides, steps, padding)
        points = projection.points()
    else:
        listed = taps or ()
        if len(set(listed)) < len(listed):
            raise ValueError("taps must be distinct: add the weights of equal ones")
        pad = (0,) * rank if padding is None else padding
        low = [min(tap[i] for tap in listed) for i in range(rank)]
        size = [max(tap[i] for tap in listed) - low[i] + 1 for i in range(rank)]
        projection = IndexProjection.window(
            size, strides, steps, tuple(p - d * lo for p, d, lo in zip(pad, steps, low))
        )
        points = [tuple(d * (t - lo) for d, t, lo in zip(steps, tap, low)) for tap in listed]
    offsets = tuple(tuple(o + p for o, p in zip(projection.offset, point)) for point in points)
    if any(abs(v) > INT32.max for v in (*map(min, zip(*offsets)), *map(max, zip(*offsets)))):
        raise ValueError(f"the window reaches past 32 bits: kernel {kernel}, dilation {steps}, padding {padding}")
    return Window(projection, strides, offsets)


def _listed(taps: torch.Tensor | Sequence[Sequence[int]], rank: int) -> tuple[Ints, ...]:
    """An explicit list of taps, checked."""
    wanted = f"taps must be a non-empty list of integer points (K, {rank})"
    if isinstance(taps, torch.Tensor):
        if taps.layout is not torch.strided or taps.is_floating_point() or taps.is_complex() or taps.is_quantized:
            raise TypeError(f"{wanted}; got a tensor of {taps.dtype}, {taps.layout}")
        taps = taps.tolist()
    try:
        rows = [tuple(tap) for tap in taps]
    except TypeError:
        raise TypeError(f"{wanted}; got {taps!r}") from None
    if not rows or any(len(tap) != rank for tap in rows):
        raise ValueError(f"{wanted}; got {rows[:4]}")
    try:
        return tuple(integers(tap, "taps") for tap in rows)
    except TypeError:
        raise TypeError(f"{wanted}; got {rows[:4]}") from None


@lru_cache(maxsize=1024)
def symmetry(window: Window, torus: IndexRange | None) -> tuple[int | None, tuple[int, ...] | None]:
    """The identity tap and the mirrored tap of each, for a window at stride 1 whose two sides are one grid.

    Round a torus smaller than the window several taps move by the same. As many then have to move back, and each of
    those mirrors one of them; else there is no mirror.
    """
    if any(s != 1 for s in window.stride):
        return None, None

    def folded(offset: Sequence[int]) -> Ints:
        return tuple(offset) if torus is None else tuple(o % n for o, n in zip(offset, torus.shape))

    alike: dict[Ints, list[int]] = {}
    for tap, offset in enumerate(window.offsets):
        alike.setdefault(folded(offset), []).append(tap)
    identity = alike.get(folded((0,) * len(window.stride)), [None])[0]
    mirror = [0] * len(window.offsets)
    for move, taps in alike.items():
        back = alike.get(folded([-m for m in move]), [])
        if len(back) != len(taps):
            return identity, None
        for tap, other in zip(taps, reversed(back)):
            mirror[tap] = other
    return identity, tuple(mirror)
