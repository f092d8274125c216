"""Products with matrices on the CPU: one matrix product for all terms of a piece that share a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sparseconv.products.table import Product
from sparseconv.products.terms import Terms

if TYPE_CHECKING:
    from sparseconv.products.cpu import Piece

#: terms that a segment of outer products must have on average: below, calls cost more than they save
_TERMS = 64
#: elements of a matrix times its terms in a piece, likewise
_WORK = 8192
#: elements of the largest temporary of a piece
_PIECE = 1 << 19


class Strategy(NamedTuple):
    """How the terms of a product are multiplied.

    ``name``: ``runs`` (each matrix with all rows of a piece that meet it), ``outer`` (a segment's outer products as one
    matrix product) or ``terms`` (each by itself). ``spares``: which of x, y and out need no memory for each term.
    """

    name: str
    spares: tuple[str, ...] = ()

    @property
    def piece(self) -> int:
        """Elements of the largest temporary of a piece: 1 MB of fp32, what a core's second-level cache holds, or twice
        as many where a call for each matrix is to be paid."""
        return _PIECE if self.spares else _PIECE // 2


def choose(row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms, positions: int, accumulated: bool) -> Strategy:
    """The strategy of a product of x (N or 1, M1, dense...) and y (N or 1, M2, dense...)."""
    if row.name == "outer" and terms.seg_out is not None and positions >= _TERMS * terms.num_segments:
        return Strategy("outer", ("out",))
    if row.name in ("vecmat", "mat_t_vec") and not accumulated:
        matrix, name, vector = (y, "y", x) if row.name == "vecmat" else (x, "x", y)
        count, a, b = matrix.shape[1:]
        rows = min(positions * vector.shape[0], _PIECE // max(1, a, b))
        if matrix.shape[0] == 1 and rows * a * b >= _WORK * count and count < 2**15:
            return Strategy("runs", (name,))
    return Strategy("terms")


def products_by_matrix(
    row: Product, xs: torch.Tensor, ys: torch.Tensor, terms: Terms, piece: Piece
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The products (T', n, b) of a piece's terms sorted by matrix, and where each position's product lies (T',).

    xs and ys are the vectors (M, n, a) and the matrices (J, 1, a, b), or the other way round for ``mat_t_vec``.
    """
    vectors, matrices = (xs, ys[:, 0]) if row.name == "vecmat" else (ys, xs[:, 0])
    at_vector, at_matrix = (
        column if column is None else column[piece.first : piece.last]
        for column in ((terms.index1, terms.index2) if row.name == "vecmat" else (terms.index2, terms.index1))
    )
    count = piece.last - piece.first
    if at_matrix is None:
        owner = np.arange(piece.first, piece.last, dtype=np.int16)
    else:
        owner = at_matrix.numpy().astype(np.int16)  # numpy sorts 16 bits by their digits, 100 times as fast
    order = np.argsort(owner, kind="stable").astype(np.int32)
    place = np.empty(count, np.int32)
    place[order] = np.arange(count, dtype=np.int32)
    by_matrix = torch.from_numpy(order)
    picked = by_matrix + piece.first if at_vector is None else at_vector[by_matrix]
    gathered = vectors.index_select(0, picked)
    product = gathered.new_empty((count, gathered.shape[1], matrices.shape[2]))
    rows, results = gathered.flatten(0, 1), product.flatten(0, 1)
    batch, start = gathered.shape[1], 0
    for j, terms_of in enumerate(np.bincount(owner, minlength=1).tolist()):
        if terms_of:
            span = slice(start * batch, (start + terms_of) * batch)
            torch.mm(rows[span], matrices[j], out=results[span])
            start += terms_of
    return product, torch.from_numpy(place)


def outer_of_segments(
    xs: torch.Tensor, ys: torch.Tensor, terms: Terms, piece: Piece, accumulated: bool
) -> torch.Tensor:
    """The sums (S', n, a, b) of a piece's outer products over each segment; xs (M1, n or 1, a) and ys (M2, n or 1, b).

    With ``accumulated`` they are summed over n as well, and the result has n = 1.
    """
    assert terms.seg_out is not None  # chosen for sums only
    span = slice(piece.first, piece.last)
    x, y = (
        source[span] if index is None else source.index_select(0, index[span])
        for source, index in ((xs, terms.index1), (ys, terms.index2))
    )
    if terms.scale is not None:
        scale = terms.scale[span, None, None]
        x, y = (x * scale, y) if x.numel() <= y.numel() else (x, y * scale)
    batch = 1 if accumulated else max(x.shape[1], y.shape[1])
    out = x.new_zeros((piece.high - piece.low, batch, x.shape[2], y.shape[2]))
    bounds = (terms.seg_out[piece.low : piece.high + 1].clamp(piece.first, piece.last) - piece.first).tolist()
    for sums, begin, end in zip(out, bounds[:-1], bounds[1:]):
        if begin == end:
            continue
        if accumulated:
            torch.mm(x[begin:end].flatten(0, 1).t(), y[begin:end].flatten(0, 1), out=sums[0])
        else:
            sums.copy_(torch.matmul(x[begin:end].permute(1, 2, 0), y[begin:end].transpose(0, 1)))
    return out
