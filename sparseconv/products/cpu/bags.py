"""Every product as torch's bag kernel, which gathers rows, weighs each and sums them in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sparseconv.products.table import Product
from sparseconv.products.terms import Terms


class Piece(NamedTuple):
    """Positions ``first`` .. ``last`` - 1 of the terms, all of them in segments ``low`` .. ``high`` - 1.

    ``whole`` where the piece has every term of these segments, so that its sums are final.
    """

    first: int
    last: int
    low: int
    high: int
    whole: bool


class Formulation(NamedTuple):
    """How the terms of a piece are multiplied and summed.

    ``prepare(piece, n)`` computes what depends on the structure alone and returns a function. That function takes the
    inputs of n batch items, (n or 1, rows, dense...), to the sums (n, S', dense...) of the piece's segments.
    ``per_term`` and ``per_segment`` are the elements of its temporaries. ``joint``: n may be more than 1. ``streams``:
    the temporaries are small against the result.
    """

    prepare: Callable[[Piece, int], Callable[..., torch.Tensor]]
    per_term: int
    per_segment: int
    joint: bool = True
    streams: bool = False


def formulate(row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms) -> Formulation:
    """The product of x (N or 1, M1, dense...) and y (N or 1, M2, dense...) as sums of weighted rows."""
    at_x, at_y = terms.index1, terms.index2
    if row.name == "vecsca":
        return weighted(terms, at_x, at_y, x.shape[2])
    if row.name == "scavec":
        return _swapped(weighted(terms, at_y, at_x, y.shape[2]))
    if row.name == "vecmat":
        return _matrices(terms, at_x, at_y, *y.shape[2:])
    if row.name == "mat_t_vec":
        return _swapped(_matrices(terms, at_y, at_x, *x.shape[2:]))
    if row.name == "outer":
        a, b = x.shape[2], y.shape[2]
        return _outer(terms, at_x, at_y, a, b, False) if a <= b else _swapped(_outer(terms, at_y, at_x, b, a, True))
    return _multiplied(terms, x, y, summed=row.name == "inner")


def weighted(
    terms: Terms, at_vector: torch.Tensor | None, at_scalar: torch.Tensor | None, channels: int
) -> Formulation:
    """Vectors (n or 1, M, C) summed with the terms' factors, times scalars (n or 1, M') where they are given."""

    def prepare(piece: Piece, items: int) -> Callable[..., torch.Tensor]:
        rows, bounds, scale = _Rows(at_vector, piece, items), bounds_of(terms, piece, items), scale_of(terms, piece)
        columns = column_of(at_scalar, piece)

        def sums(vector: torch.Tensor, scalar: torch.Tensor | None = None) -> torch.Tensor:
            factors = scale
            if scalar is not None:
                factors = scalar.index_select(1, columns)
                factors = factors if scale is None else factors.mul_(scale)
            if factors is not None:
                factors = factors.expand(items, -1).reshape(-1)
            return bag(vector.flatten(0, 1), rows.of(vector), bounds, factors).view(items, -1, vector.shape[2])

        return sums

    return Formulation(prepare, 3, channels, streams=True)


def _outer(
    terms: Terms, at_scalar: torch.Tensor | None, at_row: torch.Tensor | None, a: int, b: int, turned: bool
) -> Formulation:
    """x (n or 1, M, a) and y (n or 1, M', b) to (n, S', a, b), or ``turned`` to (n, S', b, a).

    Each of the a components of x weighs rows of y.
    """

    def prepare(piece: Piece, items: int) -> Callable[..., torch.Tensor]:
        rows, bounds = _Rows(at_row, piece, items, a), bounds_of(terms, piece, items * a)
        gather = _gather(at_scalar, piece, items, scale_of(terms, piece))

        def sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            factors = gather(x).view(items, -1, a).transpose(1, 2).reshape(-1)
            found = bag(y.flatten(0, 1), rows.of(y), bounds, factors).view(items, a, -1, b)
            return found.permute(0, 2, 3, 1) if turned else found.transpose(1, 2)

        return sums

    return Formulation(prepare, 4 * a, a * b)


def _matrices(
    terms: Terms, at_vector: torch.Tensor | None, at_matrix: torch.Tensor | None, a: int, b: int
) -> Formulation:
    """Vectors (n or 1, M, a) and matrices (n or 1, M', a, b) to (n, S', b): each component weighs a row of a matrix."""

    def prepare(piece: Piece, items: int) -> Callable[..., torch.Tensor]:
        rows, bounds = _Rows(at_matrix, piece, items, 1, a), bounds_of(terms, piece, items, a)
        gather = _gather(at_vector, piece, items, scale_of(terms, piece))

        def sums(vector: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
            factors = gather(vector).flatten()
            return bag(matrix.flatten(0, 2), rows.of(matrix), bounds, factors).view(items, -1, b)

        return sums

    return Formulation(prepare, 3 * a, b)


def _multiplied(terms: Terms, x: torch.Tensor, y: torch.Tensor, summed: bool) -> Formulation:
    """Vectors of both inputs, (n or 1, rows, C), multiplied and, where asked, summed over C."""
    channels = x.shape[2]
    kept: list[torch.Tensor] = []

    def prepare(piece: Piece, items: int) -> Callable[..., torch.Tensor]:
        count = items * (piece.last - piece.first)
        bounds, scale = bounds_of(terms, piece, items), scale_of(terms, piece)
        scale = scale if scale is None or items == 1 else scale.repeat(items)
        gathers = [_gather(index, piece, items, None) for index in (terms.index1, terms.index2)]

        def sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if not kept or kept[0].shape[0] < count:  # the same memory for every piece: it stays in cache
                kept[:] = *x.new_empty((2, count, channels)), torch.arange(count, dtype=torch.int32)
            factors = [gather(t, out=memory[:count]) for gather, t, memory in zip(gathers, (x, y), kept)]
            product = torch.mul(*factors, out=kept[0][:count])
            product = product.sum(1, keepdim=True) if summed else product
            found = bag(product, kept[2][:count], bounds, scale).view(items, -1, product.shape[1])
            return found[..., 0] if summed else found

        return sums

    return Formulation(prepare, 2 * channels + 3, 1 if summed else channels)


def _swapped(formulation: Formulation) -> Formulation:
    """The same with its two inputs exchanged."""

    def prepare(piece: Piece, items: int) -> Callable[..., torch.Tensor]:
        sums = formulation.prepare(piece, items)
        return lambda x, y: sums(y, x)

    return formulation._replace(prepare=prepare)


class _Rows:
    """Which rows of an input (n or 1, M, dense...) the terms of a piece read, for n items one after the other.

    An item's terms come ``copies`` times, and each reads ``wide`` rows side by side.
    """

    def __init__(self, index: torch.Tensor | None, piece: Piece, items: int, copies: int = 1, wide: int = 1) -> None:
        self.index = column_of(index, piece)
        self.items, self.copies, self.wide = items, copies, wide
        self.known: tuple[int, torch.Tensor] | None = None

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """(n * copies * T' * wide,) rows of the flattened source."""
        stride = source.shape[1] if source.shape[0] > 1 else 0
        if self.known is None or self.known[0] != stride:
            self.known = stride, self._make(stride, source.shape[0] * source.shape[1] * self.wide)
        return self.known[1]

    def _make(self, stride: int, rows: int) -> torch.Tensor:
        index = self.index if rows < 2**31 else self.index.long()
        if self.items == self.copies == self.wide == 1:
            return index
        at = torch.arange(self.items, dtype=index.dtype)[:, None, None, None] * stride
        index = (at + index[:, None]) * self.wide + torch.arange(self.wide, dtype=index.dtype)
        return index.expand(-1, self.copies, -1, -1).reshape(-1)


def column_of(index: torch.Tensor | None, piece: Piece) -> torch.Tensor:
    """The rows (T',) that the positions of a piece read; those of an absent index are their own."""
    if index is None:
        return torch.arange(piece.first, piece.last, dtype=torch.int32 if piece.last < 2**31 else torch.int64)
    return index[piece.first : piece.last]


def scale_of(terms: Terms, piece: Piece) -> torch.Tensor | None:
    """The factors (T',) of a piece."""
    return None if terms.scale is None else terms.scale[piece.first : piece.last]


def bounds_of(terms: Terms, piece: Piece, lists: int = 1, wide: int = 1) -> torch.Tensor:
    """Where the segments of a piece begin in ``lists`` lists of its terms, ``wide`` entries each, and the end."""
    count = piece.last - piece.first
    if terms.seg_out is None:
        return torch.arange(lists * count + 1, dtype=torch.int32) * wide
    bounds = terms.seg_out[piece.low : piece.high + 1]
    bounds = (bounds if piece.whole else bounds.clamp(piece.first, piece.last)) - piece.first
    if lists > 1:
        starts = torch.arange(lists, dtype=bounds.dtype)[:, None] * count + bounds[:-1]
        bounds = torch.cat([starts.flatten(), bounds.new_tensor([lists * count])])
    return bounds * wide if wide > 1 else bounds


def _gather(
    index: torch.Tensor | None, piece: Piece, items: int, scale: torch.Tensor | None
) -> Callable[..., torch.Tensor]:
    """A function from an input (n or 1, M, C) to the rows (n * T', C) of the terms, times their factors."""
    rows = _Rows(index, piece, items)
    scale = None if scale is None else (scale if items == 1 else scale.repeat(items))[:, None]

    def gather(source: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if index is None and items == 1 and scale is None:
            return source[0, piece.first : piece.last]
        found = torch.index_select(source.flatten(0, 1), 0, rows.of(source), out=out)
        return found if scale is None else found.mul_(scale)

    return gather


def bag(rows: torch.Tensor, index: torch.Tensor, bounds: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """(S', W) sums of factors[k] * rows[index[k]] over the entries k of each segment; rows (M, W) side by side."""
    bounds = bounds.to(index.dtype)  # the bag wants both in one dtype; it starts at 0 and ends with the last offset
    # one that wants a gradient would be told where each entry went, for half as long again
    return torch.embedding_bag(rows.detach(), index, bounds, False, 0, False, factors, True)[0]
