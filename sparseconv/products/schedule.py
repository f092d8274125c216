"""Work lists for kernels: long segments cut into pieces, and small structures written out as a table."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: terms in a piece, at least; more where there are so many terms that sums of pieces would cost
_PIECE = 512
#: the most terms of a structure that is written out
TABLE = 512


class WorkItems(NamedTuple):
    """The work list of a segment sum, in a fixed order.

    ``items`` (W, 3): begin, end and destination of each piece of a segment. The destination is an output row where the
    piece is a whole segment. It is ``-2 - slot`` where several pieces make the segment, and -1 where there is nothing.
    ``joins`` (V, 3) says the same of the second pass, which adds a segment's slots; None if no segment can be long.
    ``slots`` is their number. W and V are bounds that the CPU knows, so nothing waits for the device.

    Example: segments of 3 and 600 terms, pieces of 512::

        items = [[0, 3, 0], [3, 515, -2], [515, 603, -3]]
        joins = [[0, 2, 1]]
    """

    items: torch.Tensor
    joins: torch.Tensor | None
    slots: int


def piece_length(positions: int) -> int:
    """Terms in a piece: about 4096 pieces of the whole, and no fewer than 512 terms."""
    length = _PIECE
    while length * 4096 < positions:
        length *= 2
    return length


def work_items(seg_out: torch.Tensor, index_out: torch.Tensor | None, positions: int) -> WorkItems:
    """Cuts the segments of ``positions`` terms; everything stays on the device of ``seg_out``."""
    segments, length = seg_out.shape[0] - 1, piece_length(positions)
    seg = seg_out.long()
    device = seg.device
    rows = torch.arange(segments, device=device) if index_out is None else index_out.long()
    if positions <= length:
        return WorkItems(torch.stack([seg[:-1], seg[1:], rows], 1), None, 0)
    pieces = ((seg[1:] - seg[:-1] + length - 1) // length).clamp_min(1)
    ends = pieces.cumsum(0)
    work = torch.arange(segments + positions // length, device=device)
    segment = torch.searchsorted(ends, work, right=True)
    real = segment < segments
    segment = segment.clamp_max(segments - 1)
    nth = work - (ends - pieces)[segment]
    begin = seg[segment] + nth * length
    end = torch.minimum(begin + length, seg[segment + 1])
    parts = torch.where(pieces > 1, pieces, 0)
    first_slot = parts.cumsum(0) - parts
    destination = torch.where(pieces[segment] > 1, -2 - (first_slot[segment] + nth), rows[segment])
    items = torch.stack([begin, end, destination.where(real, -1)], 1)
    # the long segments, side by side: at most positions // length of them
    bound = positions // length
    long = pieces > 1
    place = torch.where(long, long.cumsum(0) - 1, bound)
    ids = torch.full((bound + 1,), -1, device=device).scatter_(0, place, torch.arange(segments, device=device))[:bound]
    there, ids = ids >= 0, ids.clamp_min(0)
    joins = torch.stack([first_slot[ids], first_slot[ids] + pieces[ids], rows[ids].where(there, -1)], 1)
    return WorkItems(items, joins, 2 * bound)


def table_text(
    scale: torch.Tensor | None,
    index1: torch.Tensor | None,
    index2: torch.Tensor | None,
    seg_out: torch.Tensor | None,
    gather_index: torch.Tensor | None,
    index_out: torch.Tensor | None,
) -> str:
    """The terms of a small structure as ``row1,row2,row_out,factor`` joined by ``;``, or nothing where it is large."""
    known = [column.shape[0] for column in (gather_index, scale, index1, index2) if column is not None]
    if not known or max(known) > TABLE or (seg_out is not None and seg_out.shape[0] > TABLE):
        return ""
    order = range(known[0]) if gather_index is None else gather_index.tolist()
    bounds = range(known[0] + 1) if seg_out is None else seg_out.tolist()
    rows = range(len(bounds) - 1) if index_out is None else index_out.tolist()
    factors = None if scale is None else scale.tolist()
    rows1 = None if index1 is None else index1.tolist()
    rows2 = None if index2 is None else index2.tolist()
    terms = []
    for row, begin, end in zip(rows, bounds[:-1], bounds[1:]):
        for t in order[begin:end]:
            column1, column2 = t if rows1 is None else rows1[t], t if rows2 is None else rows2[t]
            terms.append(f"{column1},{column2},{row},{1.0 if factors is None else factors[t]!r}")
    return ";".join(terms)
