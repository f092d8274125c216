"""Index projections: integer affine maps from an index space to box-shaped regions of another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from sparseconv.geometry.ranges import Boundary, IndexRange, Ints, integers, per_axis

if TYPE_CHECKING:
    from jaxtyping import Int64, Integer, Shaped

__all__ = ["Boundary", "IndexProjection", "IndexRange"]


@dataclass(frozen=True)
class IndexProjection:
    """An integer affine map from points to regions of constant shape.

        start(p) = matrix . p + offset        region(p) = [start(p), start(p) + shape)

    ``matrix`` is (D_out, D_in), ``offset``, ``shape`` and ``step`` have one integer for each of the D_out axes.
    ``step`` is the spacing of the region's points (a dilated window visits every ``step``-th one, the first and the
    last among them: ``shape - 1`` is a multiple of it). ``anchors`` are named points of the region, given from its
    start, that follow it through every change, as a window's ``center``.

    The idea is that of "index projection functions" for sharding operations over tensors; exact regions of ranges
    under mixed signs, anchors, steps and preimages are added here.

    >>> window = IndexProjection.window((3, 3), stride=2, padding=1)
    >>> str(window.region((4, 0)))
    '[7, 10) x [-1, 2)'
    >>> str(window.preimage(IndexRange((8, 0), (9, 1))))
    '[4, 5) x [0, 1)'
    """

    matrix: tuple[Ints, ...]
    offset: Ints
    shape: Ints
    step: Ints = ()
    anchors: Mapping[str, Ints] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        rows = tuple(integers(row, "a row of the matrix") for row in self.matrix)
        rank = len(rows)
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"the rows of a projection matrix must have one length; got {rows}")
        given = {"offset": self.offset, "shape": self.shape, "step": self.step or (1,) * rank}
        given.update({f"anchor {name!r}": anchor for name, anchor in self.anchors.items()})
        checked = {name: integers(values, name) for name, values in given.items()}
        for name, values in checked.items():
            if len(values) != rank:
                raise ValueError(f"{name} must have {rank} entries, one per row of the matrix; got {values}")
        shape, step = checked["shape"], checked["step"]
        if min(shape, default=1) < 1 or min(step, default=1) < 1:
            raise ValueError(f"shape and step must be positive on every axis; got {shape} and {step}")
        if any((n - 1) % d for n, d in zip(shape, step)):
            last = tuple((n - 1) // d * d + 1 for n, d in zip(shape, step))
            raise ValueError(f"a region of shape {shape} does not end on a point of step {step}: give shape {last}")
        anchors = {name: checked[f"anchor {name!r}"] for name in self.anchors}
        for name, value in (("matrix", rows), ("offset", checked["offset"]), ("shape", shape), ("step", step)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "anchors", anchors)

    # ---- named constructors

    @classmethod
    def fixed(cls, rank: int, start: Sequence[int], shape: Sequence[int]) -> IndexProjection:
        """A projection that maps every point of a ``rank``-dimensional index space to the same region."""
        return cls(tuple((0,) * rank for _ in start), tuple(start), tuple(shape))

    @classmethod
    def linear(cls, strides: Sequence[int], offset: Sequence[int] | None = None) -> IndexProjection:
        """One element per point, walking each axis by its stride, which may be negative or zero."""
        rank = len(strides)
        matrix = tuple(tuple(strides[i] if i == j else 0 for j in range(rank)) for i in range(rank))
        return cls(matrix, tuple(offset) if offset is not None else (0,) * rank, (1,) * rank)

    @classmethod
    def reduce(cls, shape: Sequence[int], axis: int) -> IndexProjection:
        """A whole row along ``axis`` of a tensor of the given shape, for each point of the other axes."""
        rank = len(shape)
        if not -rank <= axis < rank:
            raise ValueError(f"axis must be in [{-rank}, {rank}); got {axis}")
        axis %= rank
        kept = [i for i in range(rank) if i != axis]
        matrix = tuple(tuple(int(i == j) for j in kept) for i in range(rank))
        return cls(matrix, (0,) * rank, tuple(shape[i] if i == axis else 1 for i in range(rank)))

    @classmethod
    def window(
        cls,
        kernel_size: Sequence[int],
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        padding: int | Sequence[int] | None = None,
    ) -> IndexProjection:
        """A convolution's window: output point -> the inputs under its taps.

            fine = stride * coarse + dilation * tap - padding        (tap = 0 .. kernel_size - 1, per axis)

        ``padding`` defaults to floor(dilation * (kernel_size - 1) / 2). The anchor ``center`` is stride * coarse.
        """
        rank = len(kernel_size)
        kernel = per_axis(tuple(kernel_size), rank, "kernel_size", 1)
        strides = per_axis(stride, rank, "stride", 1)
        steps = per_axis(dilation, rank, "dilation", 1)
        pad = (
            tuple(d * (k - 1) // 2 for d, k in zip(steps, kernel))
            if padding is None
            else per_axis(padding, rank, "padding")
        )
        base = cls.linear(strides, tuple(-p for p in pad))
        return replace(
            base, shape=tuple(d * (k - 1) + 1 for d, k in zip(steps, kernel)), step=steps, anchors={"center": pad}
        )

    # ---- reading

    @property
    def rank_in(self) -> int:
        return len(self.matrix[0]) if self.matrix else 0

    @property
    def rank_out(self) -> int:
        return len(self.matrix)

    @cached_property
    def counts(self) -> Ints:
        """Points of a region along each axis, with its step."""
        return tuple((s - 1) // d + 1 for s, d in zip(self.shape, self.step))

    def points(self) -> list[Ints]:
        """The points of a region counted from its start, last axis fastest."""
        return [tuple(d * t for d, t in zip(self.step, tap)) for tap in IndexRange.of_shape(self.counts)]

    def taps(self) -> Int64[torch.Tensor, "K D_out"]:
        """The same `points` as a tensor (K, D_out) int64."""
        points = self.points()
        return torch.tensor(points, dtype=torch.int64).reshape(len(points), self.rank_out)

    def __call__(self, points: Integer[torch.Tensor, "*M D_in"]) -> Int64[torch.Tensor, "*M D_out"]:
        """Points (..., D_in) of any integer dtype -> the starts of their regions (..., D_out) int64."""
        if not isinstance(points, torch.Tensor) or points.is_floating_point() or points.is_complex():
            got = points.dtype if isinstance(points, torch.Tensor) else type(points).__name__
            raise TypeError(f"points must be a tensor of integers; got {got}")
        if points.shape[-1] != self.rank_in:
            raise ValueError(f"points must have {self.rank_in} columns; got shape {tuple(points.shape)}")
        points = points.long()
        zero = points.new_zeros(points.shape[:-1])
        axes = [
            sum((a * points[..., j] for j, a in enumerate(row) if a), zero + b)
            for row, b in zip(self.matrix, self.offset)
        ]
        return torch.stack(axes, -1) if axes else zero[..., None].expand(*zero.shape, 0)

    def anchor(self, name: str, points: Integer[torch.Tensor, "*M D_in"]) -> Int64[torch.Tensor, "*M D_out"]:
        """The positions of the named anchor in the regions of ``points``, (..., D_out) int64."""
        if name not in self.anchors:
            raise ValueError(f"no anchor {name!r}; this projection has {sorted(self.anchors) or 'none'}")
        return self(points) + torch.tensor(self.anchors[name], device=points.device)

    def region(self, of: Sequence[int] | IndexRange) -> IndexRange:
        """The exact bounding box of the region of a point, or of all points of a range (interval arithmetic)."""
        box = of if isinstance(of, IndexRange) else IndexRange(tuple(of), tuple(p + 1 for p in of))
        if box.rank != self.rank_in:
            raise ValueError(f"expected a point or range of rank {self.rank_in}; got {of}")
        if box.size == 0:
            raise ValueError(f"an empty range sees no region; got {box}")
        last = tuple(e - 1 for e in box.end)
        low = tuple(
            b + sum(a * (s if a > 0 else e) for a, s, e in zip(row, box.start, last))
            for row, b in zip(self.matrix, self.offset)
        )
        high = tuple(
            b + n + sum(a * (e if a > 0 else s) for a, s, e in zip(row, box.start, last))
            for row, b, n in zip(self.matrix, self.offset, self.shape)
        )
        return IndexRange(low, high)

    def preimage(self, region: IndexRange, within: IndexRange | None = None) -> IndexRange:
        """The box of the points whose region (its bounding box) meets ``region``: of a window, the transposed one.

        Exact where every row of the matrix has at most one entry (windows, linear, reduce, fixed), else the smallest
        box that interval propagation finds. An axis that no row constrains is taken from ``within``.
        """
        if region.rank != self.rank_out:
            raise ValueError(f"expected a range of rank {self.rank_out}; got {region}")
        low: list[int | None] = list(within.start) if within else [None] * self.rank_in
        high: list[int | None] = [e - 1 for e in within.end] if within else [None] * self.rank_in
        nothing = IndexRange((0,) * self.rank_in, (0,) * self.rank_in)
        if region.size == 0:
            return nothing
        changed = True
        while changed:
            changed = False
            for row, b, n, s, e in zip(self.matrix, self.offset, self.shape, region.start, region.end):
                bottom, top = s - b - n + 1, e - 1 - b  # the row's value must lie in [bottom, top]
                columns = [j for j, a in enumerate(row) if a]
                if not columns and not bottom <= 0 <= top:
                    return nothing
                for j in columns:
                    rest = [
                        sorted((row[i] * lo, row[i] * hi))
                        if (lo := low[i]) is not None and (hi := high[i]) is not None
                        else None
                        for i in columns
                        if i != j
                    ]
                    if None in rest:
                        continue
                    least = bottom - sum(r[1] for r in rest if r)
                    most = top - sum(r[0] for r in rest if r)
                    a = row[j]
                    first, last = (-(-least // a), most // a) if a > 0 else (-(-most // a), least // a)
                    old = (low[j], high[j])
                    low[j] = first if old[0] is None else max(old[0], first)
                    high[j] = last if old[1] is None else min(old[1], last)
                    if low[j] > high[j]:  # type: ignore[operator]
                        return nothing
                    changed |= (low[j], high[j]) != old
        free = [j for j in range(self.rank_in) if low[j] is None or high[j] is None]
        if free:
            raise ValueError(f"axes {free} of the index space are not bounded by {region}: give within=")
        return IndexRange(tuple(low), tuple(h + 1 for h in high))  # type: ignore[operator, arg-type]

    # ---- changing

    def compose(self, inner: IndexProjection) -> IndexProjection:
        """The composition of two projections: points -> the region of ``inner`` -> this projection's region of it.

        The shape is exact; the step is the coarsest spacing that visits every point seen. An anchor is what this
        projection's anchor of that name sees of the inner one's. Where one of the two lacks the name and its regions
        are single points, these stand for it; where they are not, no one point bears the name any longer.
        """
        if self.rank_in != inner.rank_out:
            raise ValueError(f"cannot compose: the inner one ends in rank {inner.rank_out}, this takes {self.rank_in}")
        matrix = tuple(
            tuple(sum(a * inner.matrix[k][j] for k, a in enumerate(row)) for j in range(inner.rank_in))
            for row in self.matrix
        )
        offset = tuple(
            b + sum(a * o + min(a, 0) * (n - 1) for a, o, n in zip(row, inner.offset, inner.shape))
            for row, b in zip(self.matrix, self.offset)
        )
        shape = tuple(
            n + sum(abs(a) * (m - 1) for a, m in zip(row, inner.shape)) for row, n in zip(self.matrix, self.shape)
        )
        step = tuple(
            math.gcd(d if c > 1 else 0, *(a * s for a, s, m in zip(row, inner.step, inner.counts) if m > 1)) or 1
            for row, d, c in zip(self.matrix, self.step, self.counts)
        )
        anchors = {}
        for name in dict.fromkeys([*inner.anchors, *self.anchors]):
            within, own = inner._anchor_or_point(name), self._anchor_or_point(name)
            if within is not None and own is not None:
                moved = (
                    sum(a * v - min(a, 0) * (n - 1) for a, v, n in zip(row, within, inner.shape)) for row in self.matrix
                )
                anchors[name] = tuple(a + b for a, b in zip(own, moved))
        return IndexProjection(matrix, offset, shape, step, anchors)

    def _anchor_or_point(self, name: str) -> Ints | None:
        """An anchor; where there is no such, the one point of a region; None where there are several."""
        alone = (0,) * self.rank_out if all(n == 1 for n in self.shape) else None
        return self.anchors.get(name, alone)

    def translate(self, delta: Sequence[int]) -> IndexProjection:
        """The same regions moved by ``delta``."""
        return replace(self, offset=tuple(b + d for b, d in zip(self.offset, per_axis(delta, self.rank_out, "delta"))))

    def permute(self, axes: Sequence[int]) -> IndexProjection:
        """The same regions of the tensor whose axes are permuted as by ``Tensor.permute(axes)``."""
        axes = integers(axes, "axes")
        if sorted(axes) != list(range(self.rank_out)):
            raise ValueError(f"axes must be a permutation of 0..{self.rank_out - 1}; got {axes}")

        def pick(values: Sequence) -> tuple:
            return tuple(values[a] for a in axes)

        return IndexProjection(
            pick(self.matrix),
            pick(self.offset),
            pick(self.shape),
            pick(self.step),
            {name: pick(v) for name, v in self.anchors.items()},
        )

    def flip(self, axis: int, size: int) -> IndexProjection:
        """The same regions of the tensor whose axis of ``size`` elements runs backwards; anchors follow."""
        axis, size = integers((axis, size), "axis and size")
        if not -self.rank_out <= axis < self.rank_out:
            raise ValueError(f"axis must be in [{-self.rank_out}, {self.rank_out}); got {axis}")
        axis %= self.rank_out
        matrix, offset = list(self.matrix), list(self.offset)
        matrix[axis] = tuple(-a for a in matrix[axis])
        offset[axis] = size - self.shape[axis] - offset[axis]
        anchors = {
            name: tuple(self.shape[i] - 1 - v if i == axis else v for i, v in enumerate(point))
            for name, point in self.anchors.items()
        }
        return replace(self, matrix=tuple(matrix), offset=tuple(offset), anchors=anchors)

    # ---- dense arrays

    def gather(
        self,
        array: Shaped[torch.Tensor, "*shape"],
        points: Integer[torch.Tensor, "M D_in"],
        boundary: Boundary | str,
        fill: float = 0,
    ) -> Shaped[torch.Tensor, " M *counts"]:
        """The regions of ``points`` (M, D_in) read from a dense array of rank D_out: (M, *counts), dtype of the array.

        Every out-of-bounds policy of `Boundary` works; ``fill`` is what ``absent`` reads. Raises IndexError where the
        policy forbids an index, before anything is read.
        """
        boundary = boundary if isinstance(boundary, Boundary) else Boundary(boundary)  # type: ignore[arg-type]
        if array.ndim != self.rank_out:
            raise ValueError(f"expected an array of rank {self.rank_out}; got shape {tuple(array.shape)}")
        starts = self(points)
        flat = torch.zeros((len(points),) + (1,) * self.rank_out, dtype=torch.int64, device=array.device)
        real = torch.ones_like(flat, dtype=torch.bool)
        for axis, (count, step) in enumerate(zip(self.counts, self.step)):
            index = starts[:, axis, None] + step * torch.arange(count, device=array.device)
            index, inside = boundary.resolve(index, array.shape[axis])
            view = (len(points),) + tuple(count if i == axis else 1 for i in range(self.rank_out))
            flat = flat * array.shape[axis] + index.view(view)
            real = real & inside.view(view)
        if array.numel() == 0:
            return array.new_full(flat.shape, fill)
        values = array.reshape(-1)[flat]
        return torch.where(real, values, torch.as_tensor(fill, dtype=array.dtype, device=array.device))
