"""Sparse scale and products on the CPU: batch and terms in pieces that stay in cache, each summed once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from sparseconv.memory import empty
from sparseconv.products.cpu import matrices
from sparseconv.products.cpu.bags import Formulation, Piece, formulate, weighted
from sparseconv.products.table import Product
from sparseconv.products.terms import Terms

#: elements of all temporaries of one piece: 2 MB of fp32, what the second-level caches of two cores hold
_PIECE = 1 << 19
#: elements of a result that is its own only temporary, and taken whole: 32 MB of fp32, which malloc keeps at hand
_WHOLE = 1 << 23


@torch.autocast("cpu", enabled=False)  # the caller has cast the inputs; what is made of them here stays as it is
def segment_scale(x: torch.Tensor, terms: Terms, dtype: torch.dtype) -> torch.Tensor:
    """(N, out_size, C) in ``dtype`` from x (N, M_in, C)."""
    batch, rows, channels = x.shape
    positions = terms.num_positions(rows, rows)
    terms = _composed(terms, dtype)
    if batch == 1 and terms.seg_out is None and terms.index1 is not None:
        out = _result((1, positions, channels), dtype)  # nothing is summed: every row straight to its place
        _place_rows(x[0].to(dtype), terms.index1, terms.scale, out[0])
        return _placed(out, terms)
    formulation = weighted(terms, terms.index1, None, channels)
    return _placed(_summed(formulation, (x,), terms, positions, [channels], dtype, False), terms)


@torch.autocast("cpu", enabled=False)
def segment_product(
    row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms, accumulated: bool, dtype: torch.dtype
) -> torch.Tensor:
    """(N, out_size, dense...) in ``dtype`` from x (N or 1, M1, dense...) and y (N or 1, M2, dense...).

    N is 1 where the result is summed over the batch or neither input has one.
    """
    positions = terms.num_positions(x.shape[1], y.shape[1])
    terms = _composed(terms, dtype)
    dense = dict(zip(row.axes1 + row.axes2, [*x.shape[2:], *y.shape[2:]]))
    shape = [dense[axis] for axis in row.axes_out]
    if matrices.pays_by_term(row, x, y, terms, positions, accumulated):
        batch = 1 if accumulated else max(x.shape[0], y.shape[0])
        out = _result((batch, terms.num_segments, *shape), dtype)
        matrices.sum_by_term(row, x.to(dtype), y.to(dtype), terms, positions, out)
        return _placed(out, terms)
    formulation = matrices.formulate(row, x, y, terms, positions) or formulate(row, x, y, terms)
    return _placed(_summed(formulation, (x, y), terms, positions, shape, dtype, accumulated), terms)


def _result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor in fp32, or fp64 where that is ``dtype``.

    A large one is touched all over at once: threads that write piece after piece would wait for one page after another
    to be cleared, and clear them half as fast.
    """
    out = empty(shape, torch.promote_types(dtype, torch.float32))
    if out.numel() >= 1 << 23:
        out.view(-1)[:: out.numel() >> 16].zero_()  # as few as torch shares among threads
    return out


def _place_rows(x: torch.Tensor, index: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    """out (T, C) = scale (T,) times the rows index (T,) of x (M, C), multiplied while they are in cache."""
    length = out.shape[0] if scale is None else max(1, _PIECE // max(1, out.shape[1]))
    for first in range(0, out.shape[0], max(1, length)):
        rows = out[first : first + length]
        torch.index_select(x, 0, index[first : first + length], out=rows)
        if scale is not None:
            rows *= scale[first : first + length, None]


def _summed(
    formulation: Formulation,
    inputs: tuple[torch.Tensor, ...],
    terms: Terms,
    positions: int,
    shape: list[int],
    dtype: torch.dtype,
    accumulated: bool,
) -> torch.Tensor:
    """(N, S, dense...), or (1, S, dense...) summed over the batch, from inputs (N or 1, rows, dense...)."""
    batch = max(t.shape[0] for t in inputs) if all(t.shape[0] for t in inputs) else 0
    outcome = (1 if accumulated else batch, terms.num_segments, *shape)
    if positions == 0 or batch == 0 or any(t.numel() == 0 for t in inputs):
        return torch.zeros(outcome, dtype=dtype)
    # an item of the batch is taken with its neighbors where it is small, and cut into pieces where it is not
    item = positions * formulation.per_term + terms.num_segments * formulation.per_segment
    item += sum(math.prod(t.shape[1:]) for t in inputs if t.shape[0] > 1)
    size = _WHOLE if formulation.streams and batch * item <= _WHOLE else _PIECE
    step = min(batch, size // item) if formulation.joint and item <= size else 1
    pieces = _pieces(terms.seg_out, positions, formulation, size if step == 1 else item)
    shared = [t.to(dtype).contiguous() if t.shape[0] == 1 else None for t in inputs]
    if step == batch and len(pieces) == 1 and pieces[0].whole:
        parts = [t.to(dtype).contiguous() if one is None else one for t, one in zip(inputs, shared)]
        found = formulation.prepare(pieces[0], batch)(*parts)
        return found.sum(0, keepdim=True) if accumulated and batch > 1 else found.contiguous()
    out = _result(outcome, dtype)
    adds = accumulated and step < batch
    _clear(out, pieces, adds)
    prepared: dict[Piece, Callable[..., torch.Tensor]] = {}
    for start in range(0, batch, step):
        count = min(step, batch - start)
        parts = [
            t[start : start + count].to(dtype).contiguous() if one is None else one for t, one in zip(inputs, shared)
        ]
        target = out[:1] if accumulated else out[start : start + count]
        for piece in pieces:
            sums = prepared.get(piece) if count == step else None
            if sums is None:
                sums = formulation.prepare(piece, count)
                if start + count < batch:  # kept only if the batch needs it again
                    prepared[piece] = sums
            _store(sums(*parts), target, piece, accumulated, adds)
    return out


def _pieces(seg_out: torch.Tensor | None, positions: int, formulation: Formulation, elements: int) -> list[Piece]:
    """All segments in pieces with temporaries of about ``elements``; only segments longer than two pieces are cut."""
    per_term, per_segment = formulation.per_term, formulation.per_segment
    if seg_out is None:
        ends = [*range(0, positions, max(1, elements // (per_term + per_segment))), positions]
        return [Piece(first, last, first, last, True) for first, last in itertools.pairwise(ends)]
    segments = seg_out.shape[0] - 1
    if segments == 0:
        return []
    if positions * per_term + segments * per_segment <= elements:
        return [Piece(int(seg_out[0]), int(seg_out[-1]), 0, segments, True)]
    length = max(1, elements // per_term)
    weight = seg_out.long() * per_term + torch.arange(segments + 1) * per_segment
    targets = torch.arange(int(weight[0]), int(weight[-1]) + 1, elements)
    cuts = torch.unique_consecutive(torch.searchsorted(weight[:-1], targets, right=True) - 1)
    cuts = torch.cat([cuts, torch.tensor([segments])])
    found = []
    segments_of, terms_of = (itertools.pairwise(ends.tolist()) for ends in (cuts, seg_out[cuts]))
    for (low, high), (begin, end) in zip(segments_of, terms_of):
        if end - begin <= 2 * length:
            found.append(Piece(begin, end, low, high, True))
            continue
        for first in range(begin, end, length):
            last = min(first + length, end)
            edges = torch.searchsorted(seg_out, torch.tensor([first, last], dtype=seg_out.dtype), right=True)
            found.append(Piece(first, last, max(int(edges[0]) - 1, low), min(int(edges[1]), high), False))
    return found


def _clear(out: torch.Tensor, pieces: list[Piece], everything: bool) -> None:
    """Zeros where sums are added."""
    if everything:
        out.zero_()
    for piece in pieces:
        if not (everything or piece.whole):
            out[:, piece.low : piece.high] = 0


def _store(summed: torch.Tensor, target: torch.Tensor, piece: Piece, accumulated: bool, adds: bool) -> None:
    """Sums (n, S', dense...) of a piece to their rows of target (n or 1, S, dense...)."""
    rows = target[:, piece.low : piece.high]
    if accumulated and summed.shape[0] > 1:
        summed = summed.sum(0, keepdim=True)
    if adds or not piece.whole:
        rows += summed
    else:
        rows.copy_(summed)


def _composed(terms: Terms, dtype: torch.dtype) -> Terms:
    """The same terms with gather_index worked into the other columns, as the bag kernel wants them."""
    scale = None if terms.scale is None else terms.scale.to(dtype)
    index = next((index for index in (terms.index1, terms.index2) if index is not None), None)
    if terms.seg_out is not None and index is not None:
        terms = terms._replace(seg_out=terms.seg_out.to(index.dtype))
    gather = terms.gather_index
    if gather is None:
        return terms._replace(scale=scale)
    index1, index2 = (gather if index is None else index[gather] for index in (terms.index1, terms.index2))
    scale = None if scale is None else scale[gather]
    return terms._replace(scale=scale, index1=index1, index2=index2, gather_index=None)


def _placed(out: torch.Tensor, terms: Terms) -> torch.Tensor:
    """The rows of the segments at their places among out_size rows."""
    if terms.index_out is None:
        return out
    placed = out.new_zeros((out.shape[0], terms.out_size, *out.shape[2:]))
    placed[:, terms.index_out.long()] = out
    return placed
