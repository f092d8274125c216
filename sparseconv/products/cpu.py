"""Sparse scale and products on the CPU: gathered in pieces that stay in cache, summed by torch's bag kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from sparseconv.products import cpu_matrices
from sparseconv.products.table import Product
from sparseconv.products.terms import Terms

#: elements of the largest temporary of one piece: 1 MB of fp32, what a core's second-level cache holds
_PIECE = 1 << 18


class Piece(NamedTuple):
    """Positions ``first`` .. ``last`` - 1 of the terms, all of them in segments ``low`` .. ``high`` - 1.

    ``whole`` where the piece has every term of these segments, so that its sums are final.
    """

    first: int
    last: int
    low: int
    high: int
    whole: bool


@torch.autocast("cpu", enabled=False)  # the caller has cast the inputs; what is made of them here stays as it is
def segment_scale(x: torch.Tensor, terms: Terms, dtype: torch.dtype) -> torch.Tensor:
    """(N, out_size, C) in ``dtype`` from x (N, M_in, C)."""
    batch, rows, channels = x.shape
    positions = terms.num_positions(rows, rows)
    terms = terms._replace(scale=None if terms.scale is None else terms.scale.to(dtype))
    out = fresh((batch, terms.num_segments, channels), dtype)
    # rows first, so that the items of one piece of the batch lie side by side and share one walk over the terms
    step = max(1, min(batch, _PIECE // max(1, max(rows, terms.num_segments) * channels)))
    pieces = _pieces(terms.seg_out, positions, _PIECE // max(1, step * channels))
    _clear(out, pieces, False)
    for start in range(0, batch, step):
        source = x[start : start + step].to(dtype).transpose(0, 1)
        flat = source.flatten(1).contiguous()
        for piece in pieces:
            span = slice(piece.first, piece.last)
            near, index = (flat[span], None) if terms.index1 is None else (flat, terms.index1[span])
            if index is not None and terms.seg_out is None and step == 1:
                torch.index_select(flat, 0, index, out=out[start, span])  # straight to its place
                if terms.scale is not None:
                    out[start, span] *= terms.scale[span, None]
                continue
            _store(_sum_segments(near, terms, piece, index), out[start : start + step], piece, False)
    return _placed(out, terms)


@torch.autocast("cpu", enabled=False)
def segment_product(
    row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms, accumulated: bool, dtype: torch.dtype
) -> torch.Tensor:
    """(N, out_size, dense...) in ``dtype`` from x (N or 1, M1, dense...) and y (N or 1, M2, dense...).

    N is 1 where the result is summed over the batch or neither input has one.
    """
    batch = max(x.shape[0], y.shape[0]) if x.shape[0] and y.shape[0] else 0
    positions = terms.num_positions(x.shape[1], y.shape[1])
    terms = _composed(terms, dtype)
    dense = dict(zip(row.axes1 + row.axes2, [*x.shape[2:], *y.shape[2:]]))
    shape = [dense[axis] for axis in row.axes_out]
    segments = terms.num_segments
    strategy = cpu_matrices.choose(row, x, y, terms, positions, accumulated)
    # a term's elements in the largest temporary: matrices that are never gathered or written for a term do not count
    sizes = {"x": math.prod(x.shape[2:]), "y": math.prod(y.shape[2:]), "out": math.prod(shape)}
    width = max(1, *(size for name, size in sizes.items() if name not in strategy.spares))
    step = max(1, min(batch, _PIECE // (width * max(1, min(positions, 256)))))
    pieces = _pieces(terms.seg_out, positions, strategy.piece // (width * step))
    adds = accumulated and step < batch
    out = fresh((1 if accumulated else batch, segments, *shape), dtype)
    _clear(out, pieces, adds or batch == 0)
    for start in range(0, batch, step):
        parts = [t if t.shape[0] == 1 != batch else t[start : start + step] for t in (x, y)]
        # what spares its memory is read once, and needs no copy
        copied = [positions if name not in strategy.spares else 0 for name in ("x", "y")]
        xs, ys = (_rows_first(part.to(dtype), reads) for part, reads in zip(parts, copied))
        target = out[:1] if accumulated else out[start : start + step]
        for piece in pieces:
            if strategy.name == "outer":
                summed = cpu_matrices.outer_of_segments(xs, ys, terms, piece, accumulated)
            else:
                product, at = _multiply(strategy, row, xs, ys, terms, piece, accumulated)
                summed = _sum_segments(product.flatten(1), terms, piece, at)
            _store(summed, target, piece, adds)
    return _placed(out, terms)


def fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor from numpy, which asks the system for huge pages: first writes cost a fifth."""
    return torch.from_numpy(np.empty(tuple(shape), np.float64 if dtype == torch.float64 else np.float32))


def _pieces(seg_out: torch.Tensor | None, positions: int, length: int) -> list[Piece]:
    """All segments in pieces of about ``length`` terms and segments together; only longer segments are cut."""
    length = max(1, length)
    if seg_out is None:
        ends = [*range(0, positions, length), positions]
        return [Piece(first, last, first, last, True) for first, last in itertools.pairwise(ends)]
    segments = seg_out.shape[0] - 1
    if segments == 0:
        return []
    weight = seg_out.long() + torch.arange(segments + 1)
    targets = torch.arange(int(weight[0]), int(weight[-1]), length)
    cuts = torch.unique_consecutive(torch.searchsorted(weight, targets, right=True) - 1)
    cuts = torch.cat([cuts, torch.tensor([segments])])
    found = []
    for low, high, begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), *_spans(seg_out[cuts])):
        if end - begin <= 2 * length:
            found.append(Piece(begin, end, low, high, True))
            continue
        for first in range(begin, end, length):
            last = min(first + length, end)
            edges = torch.searchsorted(seg_out, torch.tensor([first, last], dtype=seg_out.dtype), right=True)
            found.append(Piece(first, last, max(int(edges[0]) - 1, low), min(int(edges[1]), high), False))
    return found


def _spans(bounds: torch.Tensor) -> tuple[list[int], list[int]]:
    values = bounds.tolist()
    return values[:-1], values[1:]


def _clear(out: torch.Tensor, pieces: list[Piece], everything: bool) -> None:
    """Zeros where sums are added."""
    if everything:
        out.zero_()
    for piece in pieces:
        if not (everything or piece.whole):
            out[:, piece.low : piece.high] = 0


def _store(summed: torch.Tensor, target: torch.Tensor, piece: Piece, adds: bool) -> None:
    """Sums (S', n * dense...) of a piece to their rows of target (n, S, dense...)."""
    rows = target[:, piece.low : piece.high]
    summed = summed.view(rows.shape[1], rows.shape[0], *rows.shape[2:]).transpose(0, 1)
    if adds or not piece.whole:
        rows += summed
    else:
        rows.copy_(summed)


def _multiply(
    strategy: cpu_matrices.Strategy,
    row: Product,
    xs: torch.Tensor,
    ys: torch.Tensor,
    terms: Terms,
    piece: Piece,
    accumulated: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The products (T', n, dense...) of a piece's terms, and the row of each position where they are not in order."""
    if strategy.name == "runs":
        return cpu_matrices.products_by_matrix(row, xs, ys, terms, piece)
    x, y = cpu_matrices.rows_of(xs, terms.index1, piece), cpu_matrices.rows_of(ys, terms.index2, piece)
    return _dense_product(row, x, y, accumulated), None


def _dense_product(row: Product, x: torch.Tensor, y: torch.Tensor, accumulated: bool) -> torch.Tensor:
    """x (t, n or 1, dense...) o y (t, n or 1, dense...), summed over n where asked: (t, n, dense...)."""
    if accumulated:
        return torch.einsum(f"tn{row.axes1},tn{row.axes2}->t{row.axes_out}", x, y)[:, None]
    if row.name == "mul":
        return x * y
    if row.name == "vecsca":
        return x * y[..., None]
    if row.name == "scavec":
        return x[..., None] * y
    if row.name == "outer":
        return x[..., :, None] * y[..., None, :]
    if row.name == "inner":
        return (x * y).sum(-1)
    vector, matrix = (x, y) if row.name == "vecmat" else (y, x)
    if matrix.shape[1] == 1:
        return torch.matmul(vector, matrix[:, 0])  # one matrix for the whole batch: (t, n, a) @ (t, a, b)
    return torch.matmul(vector[..., None, :], matrix)[..., 0, :]


def _sum_segments(rows: torch.Tensor, terms: Terms, piece: Piece, index: torch.Tensor | None) -> torch.Tensor:
    """(S', W) sums of scale[k] * rows[index[k]] over the positions k of each segment of a piece.

    rows (M, W) with its rows side by side; index (T',), or None where position k's row is row k of the piece.
    """
    scale = None if terms.scale is None else terms.scale[piece.first : piece.last]
    if terms.seg_out is None:
        picked = rows if index is None else rows.index_select(0, index)
        return picked if scale is None else picked * scale[:, None]
    segments = piece.high - piece.low
    if piece.first == piece.last or rows.numel() == 0:
        return rows.new_zeros((segments, rows.shape[1]))
    bounds = terms.seg_out[piece.low : piece.high + 1]
    if not piece.whole:
        bounds = bounds.clamp(piece.first, piece.last)
    if index is None:
        index = torch.arange(piece.last - piece.first, dtype=bounds.dtype)
    # the bag wants both in one dtype; it starts at 0 and ends with the last offset; rows apart it sums in another order
    bounds = (bounds - piece.first).to(index.dtype)
    rows = rows.contiguous()
    return F.embedding_bag(index, rows, bounds, mode="sum", per_sample_weights=scale, include_last_offset=True)


def _composed(terms: Terms, dtype: torch.dtype) -> Terms:
    """The same terms with gather_index worked into the other columns."""
    scale = None if terms.scale is None else terms.scale.to(dtype)
    gather = terms.gather_index
    if gather is None:
        return terms._replace(scale=scale)
    index1, index2 = (gather if index is None else index[gather] for index in (terms.index1, terms.index2))
    scale = None if scale is None else scale[gather]
    return terms._replace(scale=scale, index1=index1, index2=index2, gather_index=None)


def _rows_first(x: torch.Tensor, reads: int) -> torch.Tensor:
    """(M, n, dense...) from (n, M, dense...), side by side where rows are read often enough to pay for the copy."""
    x = x.transpose(0, 1)
    return x.contiguous() if x.shape[1] > 1 and reads >= x.shape[0] else x


def _placed(out: torch.Tensor, terms: Terms) -> torch.Tensor:
    """The rows of the segments at their places among out_size rows."""
    if terms.index_out is None:
        return out
    placed = out.new_zeros((out.shape[0], terms.out_size, *out.shape[2:]))
    placed[:, terms.index_out.long()] = out
    return placed
