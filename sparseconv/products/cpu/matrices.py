"""Products with matrices on the CPU: one matrix product for all that shares a matrix, a segment or a term."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from sparseconv.products.cpu.bags import Formulation, Piece, bag, bounds_of, column_of, scale_of
from sparseconv.products.table import Product
from sparseconv.products.terms import Terms

#: rows that one matrix product must sum or multiply on average: below, calls cost more than they save
_ROWS = 64
#: elements of a matrix times these rows, likewise
_WORK = 8192
#: multiplications of an item of a batch, likewise: items that are taken alone do not share calls
_ITEM = 1 << 22
#: elements of the vectors of a piece
_PIECE = 1 << 19


def pays_by_term(
    row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms, positions: int, accumulated: bool
) -> bool:
    """Whether the batch is so large that each term is worth a matrix product of its own."""
    batch = x.shape[0] if row.name != "mat_t_vec" else y.shape[0]
    if row.name == "outer":
        together, groups, area = accumulated, terms.num_segments, x.shape[2] * y.shape[2]
    elif row.name in ("vecmat", "mat_t_vec"):
        matrix = y if row.name == "vecmat" else x
        together, groups, area = matrix.shape[0] == 1, matrix.shape[1], matrix.shape[2] * matrix.shape[3]
    else:
        return False
    # where terms share a matrix or a segment more often than items share a term, these are the longer products
    return together and batch >= _ROWS and batch * area >= 4 * _WORK and batch * groups >= positions


def sum_by_term(
    row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms, positions: int, out: torch.Tensor
) -> None:
    """Products with shared matrices, or outer products summed over the batch, one call for each term, into ``out``.

    Matrices: x (N, M1, a) and y (1, M2, a, b) give out (N, S, b); ``mat_t_vec`` has its inputs exchanged. Outer
    products: x (N, M1, a) and y (N, M2, b) give out (1, S, a, b).
    """
    vectors, others, at_vector, at_other = x, y, terms.index1, terms.index2
    if row.name == "mat_t_vec":
        vectors, others, at_vector, at_other = y, x, terms.index2, terms.index1
    vectors, others = vectors.contiguous(), others.contiguous() if row.name == "outer" else others
    order = range(positions)
    from_rows, to_rows = (order if index is None else index.tolist() for index in (at_vector, at_other))
    factors = [1.0] * positions if terms.scale is None else terms.scale.tolist()
    bounds = range(positions + 1) if terms.seg_out is None else terms.seg_out.tolist()
    for segment, (begin, end) in enumerate(itertools.pairwise(bounds)):
        target = out[0, segment] if row.name == "outer" else out[:, segment]
        if begin == end:
            target.zero_()
        for t in order[begin:end]:
            one, other, factor = vectors[:, from_rows[t]], others[0, to_rows[t]], factors[t]
            if factor == 0:  # which as alpha would hide an infinity
                one, factor = one * factor, 1.0
            if row.name == "outer":
                one, other = one.t(), others[:, to_rows[t]]
            target.addmm_(one, other, beta=float(t > begin), alpha=factor)


def formulate(row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms, positions: int) -> Formulation | None:
    """Items one by one as matrix products, where an item alone has terms enough; None elsewhere."""
    several = max(x.shape[0], y.shape[0]) > 1
    if row.name == "outer" and terms.seg_out is not None and positions >= _ROWS * terms.num_segments:
        a, b = x.shape[2], y.shape[2]
        return None if several and positions * a * b < _ITEM else _outer_of_segments(terms, a, b)
    if row.name in ("vecmat", "mat_t_vec"):
        matrix = y if row.name == "vecmat" else x
        count, a, b = matrix.shape[1:]
        if several and positions * a * b < _ITEM:
            return None
        if min(positions, _PIECE // max(1, a + b)) * a * b >= _WORK * count and count < 2**15:
            return _by_matrix(terms, a, b, row.name == "mat_t_vec")
    return None


def _by_matrix(terms: Terms, a: int, b: int, matrix_first: bool) -> Formulation:
    """Vectors (1, M, a) and matrices (1, J, a, b) to (1, S', b): all rows of a piece that meet a matrix at once."""
    at_matrix, at_vector = (terms.index1, terms.index2) if matrix_first else (terms.index2, terms.index1)

    def prepare(piece: Piece, _: int) -> Callable[..., torch.Tensor]:
        count = piece.last - piece.first
        owner = column_of(at_matrix, piece).numpy().astype(np.int16)  # sorted by digits, 100 times as fast
        order = np.argsort(owner, kind="stable").astype(np.int32)
        place = np.empty(count, np.int32)
        place[order] = np.arange(count, dtype=np.int32)
        picked, places = column_of(at_vector, piece)[torch.from_numpy(order)], torch.from_numpy(place)
        ends = np.bincount(owner, minlength=1).cumsum().tolist()
        bounds, scale = bounds_of(terms, piece), scale_of(terms, piece)

        def sums(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            vectors, matrices = (second, first) if matrix_first else (first, second)
            gathered = vectors[0].index_select(0, picked)
            product = gathered.new_empty((count, b))
            for matrix, begin, end in zip(matrices[0], [0, *ends], ends):
                if begin < end:
                    torch.mm(gathered[begin:end], matrix, out=product[begin:end])
            return bag(product, places, bounds, scale)[None]

        return sums

    return Formulation(prepare, a + b, b, joint=False)


def _outer_of_segments(terms: Terms, a: int, b: int) -> Formulation:
    """x (1, M1, a) and y (1, M2, b) to (1, S', a, b): the outer products of a segment as one matrix product."""

    def prepare(piece: Piece, _: int) -> Callable[..., torch.Tensor]:
        rows, others = column_of(terms.index1, piece), column_of(terms.index2, piece)
        bounds, scale = bounds_of(terms, piece).tolist(), scale_of(terms, piece)

        def sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x, y = x[0].index_select(0, rows), y[0].index_select(0, others)
            if scale is not None:
                (x if a <= b else y).mul_(scale[:, None])
            out = x.new_zeros((1, piece.high - piece.low, a, b))
            for target, (begin, end) in zip(out[0], itertools.pairwise(bounds)):
                if begin < end:
                    torch.mm(x[begin:end].t(), y[begin:end], out=target)
            return out

        return sums

    return Formulation(prepare, a + b, a * b, joint=False)
