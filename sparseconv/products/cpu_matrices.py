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
    if row.name == "outer" and terms.seg_out is not None:
        segments, batch = terms.num_segments, max(x.shape[0], y.shape[0])
        if positions >= 4 * segments and positions * batch >= _TERMS * segments:
            return Strategy("outer", ("out",))
    if row.name in ("vecmat", "mat_t_vec") and not accumulated:
        matrix, name, vector = (y, "y", x) if row.name == "vecmat" else (x, "x", y)
        count, a, b = matrix.shape[1:]
        rows = min(positions * vector.shape[0], _PIECE // max(1, a, b))
        together = matrix.shape[0] == 1 or (vector.shape[0] == matrix.shape[0] and positions >= 4 * count)
        if together and rows * a * b >= _WORK * count and count < 2**15:
            return Strategy("runs", (name,))
    return Strategy("terms")


def rows_of(source: torch.Tensor, index: torch.Tensor | None, piece: Piece) -> torch.Tensor:
    """The rows of source (M, n, dense...) that the terms of a piece read; transposed matrices stay transposed."""
    span = slice(piece.first, piece.last)
    if index is None:
        return source[span]
    if source.dim() == 4 and source.stride(2) == 1:
        return source.transpose(2, 3).index_select(0, index[span]).transpose(2, 3)
    return source.index_select(0, index[span])


def products_by_matrix(
    row: Product, xs: torch.Tensor, ys: torch.Tensor, terms: Terms, piece: Piece
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The products (T', n, b) of a piece's terms sorted by matrix, and where each position's product lies (T',).

    xs and ys are the vectors (M, n, a) and the matrices (J, 1 or n, a, b), or the other way round for ``mat_t_vec``.
    """
    vectors, matrices = (xs, ys) if row.name == "vecmat" else (ys, xs)
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
    product = gathered.new_empty((*gathered.shape[:2], matrices.shape[3]))
    ends = np.bincount(owner, minlength=1).cumsum().tolist()
    for matrix, begin, end in zip(matrices, [0, *ends], ends):
        if begin == end:
            continue
        if matrix.shape[0] == 1:
            torch.mm(gathered[begin:end].flatten(0, 1), matrix[0], out=product[begin:end].flatten(0, 1))
        else:
            product[begin:end].transpose(0, 1).copy_(torch.bmm(gathered[begin:end].transpose(0, 1), matrix))
    return product, torch.from_numpy(place)


def outer_of_segments(
    xs: torch.Tensor, ys: torch.Tensor, terms: Terms, piece: Piece, accumulated: bool
) -> torch.Tensor:
    """The sums (S', n, a, b) of a piece's outer products over each segment; xs (M1, n or 1, a) and ys (M2, n or 1, b).

    With ``accumulated`` they are summed over n as well, and the result has n = 1.
    """
    assert terms.seg_out is not None  # chosen for sums only
    span = slice(piece.first, piece.last)
    x, y = (rows_of(source, index, piece) for source, index in ((xs, terms.index1), (ys, terms.index2)))
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
