"""Boxes of integer points, and what lies beyond their edges."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from sparseconv.checks import INT32

if TYPE_CHECKING:
    from jaxtyping import Bool, Integer

Ints = tuple[int, ...]
BoundaryKind = Literal["absent", "forbid", "periodic", "negative"]
#: all kinds of boundary, and those that mean something for dense arrays alone
KINDS, DENSE_KINDS = get_args(BoundaryKind), ("negative",)


def integers(values: Iterable[int], name: str) -> Ints:
    """Integers, whatever Python or an array library calls them; TypeError for anything else, which is not rounded."""
    try:
        return tuple(map(operator.index, values))
    except (TypeError, RuntimeError):  # torch's, of a tensor of several
        raise TypeError(f"{name} must be integers; got {values!r}") from None


def _index(value: Any) -> int | None:
    """The integer that a value is, or None."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # torch's, of a tensor of several
        return None


def per_axis(value: int | Sequence[int], rank: int, name: str, minimum: int | None = None) -> Ints:
    """One integer for each of ``rank`` axes, from one integer or a sequence of them."""
    if (
        isinstance(value, (tuple, list))  # as most come, from layers
        and len(value) == rank > 0
        and all([type(v) is int for v in value])
        and (minimum is None or min(value) >= minimum)
    ):
        return tuple(value)
    wanted = f"{name} must be one integer or {rank} of them, one for each axis; got {value!r}"
    if isinstance(value, (str, bytes, Set, Mapping)):
        raise TypeError(wanted)
    several: Any = value
    if not isinstance(value, (tuple, list)):  # of which Dynamo of torch 2.11 cannot ask for an index
        one = _index(value)
        several = value if one is None else (one,) * rank
    try:
        given = integers(several, name)
    except TypeError:
        raise TypeError(wanted) from None
    if len(given) != rank:
        raise ValueError(wanted)
    if minimum is not None and min(given, default=minimum) < minimum:
        raise ValueError(f"{name} must be at least {minimum} on every axis; got {value!r}")
    return given


@dataclass(frozen=True, init=False)
class IndexRange:
    """A box of integer points: ``start`` inclusive, ``end`` exclusive, one integer per axis.

    >>> IndexRange((0, -2), (3, 2)).shape
    (3, 4)
    """

    start: Ints
    end: Ints

    def __init__(self, start: Iterable[int], end: Iterable[int]) -> None:
        first, last = integers(start, "start"), integers(end, "end")
        if len(first) != len(last):
            raise ValueError(f"start and end must have the same rank; got {first} and {last}")
        object.__setattr__(self, "start", first)
        object.__setattr__(self, "end", last)

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> IndexRange:
        """The box of the given shape whose first point is the origin."""
        end = integers(shape, "shape")
        return cls((0,) * len(end), end)

    @property
    def rank(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> Ints:
        """Points along each axis, never negative."""
        return tuple([e - s if e > s else 0 for s, e in zip(self.start, self.end)])

    @property
    def size(self) -> int:
        """Points in the box."""
        return math.prod(self.shape)

    def __contains__(self, point: Sequence[int]) -> bool:
        return len(point) == self.rank and all(s <= p < e for s, p, e in zip(self.start, point, self.end))

    def __iter__(self) -> Iterator[Ints]:
        """The points, last axis fastest."""
        return product(*(range(s, e) for s, e in zip(self.start, self.end)))

    def encloses(self, other: IndexRange) -> bool:
        """True if every point of ``other`` lies in this box."""
        if other.size == 0:
            return True
        edges = zip(self.start, other.start, other.end, self.end)
        return self.rank == other.rank and all([a <= first and last <= b for a, first, last, b in edges])

    def intersect(self, other: IndexRange) -> IndexRange:
        """The box of the points that lie in both; ValueError where they have other ranks."""
        if self.rank != other.rank:
            raise ValueError(f"boxes must have the same rank; got {self} and {other}")
        start = tuple(map(max, self.start, other.start))
        return IndexRange(start, map(max, start, map(min, self.end, other.end)))

    def translate(self, delta: Sequence[int]) -> IndexRange:
        """This box moved by ``delta``."""
        moves = per_axis(delta, self.rank, "delta")
        return IndexRange([s + d for s, d in zip(self.start, moves)], [e + d for e, d in zip(self.end, moves)])

    def __str__(self) -> str:
        return " x ".join(f"[{s}, {e})" for s, e in zip(self.start, self.end))


def outside(box: IndexRange) -> bool:
    """Whether a box of voxels leaves 32 bits."""
    return box.rank > 0 and (min(box.start) < INT32.min or max(box.end) > INT32.max)


def check_box(box: IndexRange, what: str) -> None:
    """Raise ValueError where a box of voxels leaves 32 bits."""
    if outside(box):
        raise ValueError(f"{what} must lie within 32 bits, from {INT32.min} to {INT32.max}; got {box}")


@dataclass(frozen=True)
class Boundary:
    """How an index outside of an extent is treated.

    ``absent``: nothing is there (padding); ``forbid``: such an index may not occur; ``periodic``: the space is a torus
    of the given extent; ``negative``: numpy's counting from the end, for dense arrays only. The extent is an
    `IndexRange`; for dense arrays it is the array itself.

    >>> Boundary.periodic((8, 8, 8)).kind
    'periodic'
    """

    kind: BoundaryKind = "absent"
    extent: IndexRange | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "extent", _as_range(self.extent))
        if self.kind not in KINDS:
            voxels, dense = (
                ", ".join(repr(k) for k in KINDS if (k in DENSE_KINDS) is there) for there in (False, True)
            )
            raise ValueError(f"a boundary is one of {voxels} or (for dense arrays) {dense}; got {self.kind!r}")

    @classmethod
    def absent(cls) -> Boundary:
        """Outside is empty."""
        return cls("absent")

    @classmethod
    def forbid(cls, extent: IndexRange | Sequence[int] | None = None) -> Boundary:
        """Outputs that need an index outside of the extent (a range, or a shape from the origin) do not exist."""
        return cls("forbid", _as_range(extent))

    @classmethod
    def periodic(cls, extent: IndexRange | Sequence[int] | None = None) -> Boundary:
        """A torus of the given extent (a range, or a shape from the origin)."""
        return cls("periodic", _as_range(extent))

    @classmethod
    def negative(cls) -> Boundary:
        """-1 is the last element, as in numpy; indices beyond that are an error."""
        return cls("negative")

    def resolve(
        self, index: Integer[torch.Tensor, "*shape"], size: int
    ) -> tuple[Integer[torch.Tensor, "*shape"], Bool[torch.Tensor, "*shape"]]:
        """Indices along a dense axis of ``size`` elements -> (indices within it, which of them are real).

        Raises IndexError where this boundary does not allow an index.
        """
        if index.dtype == torch.uint8 or size > torch.iinfo(index.dtype).max:  # torch wraps sizes round to the dtype
            index = index.long()
        inside = (index >= 0) & (index < size)
        if self.kind == "periodic":
            if size == 0:
                raise IndexError("a periodic axis needs at least one element; got none")
            return index.remainder(size), torch.ones_like(inside)
        if self.kind == "absent":
            return index.clamp(0, max(size - 1, 0)), inside
        allowed = inside if self.kind == "forbid" else (index >= -size) & (index < size)
        if not bool(allowed.all()):
            first = int(index[~allowed].flatten()[0])
            raise IndexError(f"index {first} is out of bounds for an axis of {size} elements under {self.kind!r}")
        return torch.where(index < 0, index + size, index), torch.ones_like(inside)


def _as_range(extent: IndexRange | Sequence[int] | None) -> IndexRange | None:
    return extent if extent is None or isinstance(extent, IndexRange) else IndexRange.of_shape(extent)
