"""Sparse scale and products on the CPU: gathered in pieces that stay in cache, summed by torch's bag kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparseconv.products.table import Product
from sparseconv.products.terms import Terms

#: elements of the largest temporary of one piece: 1 MB of fp32, what a core's second-level cache holds
_PIECE = 1 << 18


@torch.autocast("cpu", enabled=False)  # the caller has cast the inputs; what is made of them here stays as it is
def segment_scale(x: torch.Tensor, terms: Terms, dtype: torch.dtype) -> torch.Tensor:
    """(N, out_size, C) in ``dtype`` from x (N, M_in, C)."""
    batch, rows, channels = x.shape
    positions = terms.num_positions(rows, rows)
    scale = None if terms.scale is None else terms.scale.to(dtype)
    out = x.new_empty((batch, terms.num_segments, channels), dtype=dtype)
    # rows first, so that the items of one piece of the batch lie side by side and share one walk over the terms
    step = max(1, min(batch, _PIECE // max(1, rows * channels)))
    for start in range(0, batch, step):
        piece = _rows_first(x[start : start + step], dtype)
        summed = _sum_segments(piece, scale, terms.index1, terms.seg_out, positions)
        out[start : start + step] = summed.view(terms.num_segments, min(step, batch - start), channels).transpose(0, 1)
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
    out = x.new_zeros((1 if accumulated else batch, terms.num_segments, *shape), dtype=dtype)
    widths = [_volume(x.shape[2:]), _volume(y.shape[2:]), _volume(shape)]
    width = max(1, *widths)
    step = max(1, min(batch, _PIECE // (width * max(1, min(positions, 256)))))
    for start in range(0, batch, step):
        pieces = [t if t.shape[0] == 1 != batch else t[start : start + step] for t in (x, y)]
        xs, ys = (piece.to(dtype).transpose(0, 1) for piece in pieces)
        target = out[:1] if accumulated else out[start : start + step]
        for first in range(0, positions, max(1, _PIECE // (width * step))):
            last = min(positions, first + max(1, _PIECE // (width * step)))
            _add_piece(row, xs, ys, terms, (first, last), target, accumulated)
    return _placed(out, terms)


def _add_piece(
    row: Product,
    xs: torch.Tensor,
    ys: torch.Tensor,
    terms: Terms,
    span: tuple[int, int],
    target: torch.Tensor,
    accumulated: bool,
) -> None:
    """Adds the terms at positions ``span`` to target (n, S, dense...); xs and ys are (M, n or 1, dense...)."""
    first, last = span
    gathered_x, gathered_y = _rows(xs, terms.index1, span), _rows(ys, terms.index2, span)
    product = _dense_product(row, gathered_x, gathered_y, accumulated)  # (span, n, dense...)
    scale = None if terms.scale is None else terms.scale[first:last]
    if terms.seg_out is None:
        low, high, bounds = first, last, None
    else:
        # the segments that this piece of the terms touches; the first may have begun in the piece before
        edges = torch.searchsorted(terms.seg_out, torch.tensor(span, dtype=terms.seg_out.dtype), right=True).tolist()
        low, high = max(edges[0] - 1, 0), min(edges[1], terms.num_segments)
        bounds = (terms.seg_out[low : high + 1] - first).clamp(0, last - first)
    if low >= high:
        return
    summed = _sum_segments(product.flatten(1), scale, None, bounds, last - first)
    target[:, low:high] += summed.unflatten(1, product.shape[1:]).transpose(0, 1)


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


def _sum_segments(
    rows: torch.Tensor,
    scale: torch.Tensor | None,
    index: torch.Tensor | None,
    seg_out: torch.Tensor | None,
    positions: int,
) -> torch.Tensor:
    """(S, W) sums of scale[k] * rows[index[k]] over k in each segment; rows (M, W) with its rows side by side."""
    if seg_out is None:
        picked = rows[:positions] if index is None else rows.index_select(0, index)
        return picked if scale is None else picked * scale[:, None]
    segments = seg_out.shape[0] - 1
    if segments == 0 or rows.shape[0] == 0 or rows.shape[1] == 0 or positions == 0:
        return rows.new_zeros((segments, rows.shape[1]))
    if index is None:
        index = torch.arange(positions, dtype=seg_out.dtype)
    # the bag wants both in one dtype; it starts at 0 and ends with the last offset
    start, end = int(seg_out[0]), int(seg_out[-1])
    if (start, end) != (0, positions):
        index, seg_out = index[start:end], seg_out - start
        scale = None if scale is None else scale[start:end]
    return F.embedding_bag(
        index, rows, seg_out.to(index.dtype), mode="sum", per_sample_weights=scale, include_last_offset=True
    )


def _composed(terms: Terms, dtype: torch.dtype) -> Terms:
    """The same terms with gather_index worked into the other columns."""
    scale = None if terms.scale is None else terms.scale.to(dtype)
    gather = terms.gather_index
    if gather is None:
        return terms._replace(scale=scale)
    index1, index2 = (gather if index is None else index[gather] for index in (terms.index1, terms.index2))
    scale = None if scale is None else scale[gather]
    return terms._replace(scale=scale, index1=index1, index2=index2, gather_index=None)


def _rows(source: torch.Tensor, index: torch.Tensor | None, span: tuple[int, int]) -> torch.Tensor:
    return source[span[0] : span[1]] if index is None else source.index_select(0, index[span[0] : span[1]])


def _rows_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(M, n * C) from (n, M, C)."""
    return x.to(dtype).transpose(0, 1).flatten(1).contiguous()


def _placed(out: torch.Tensor, terms: Terms) -> torch.Tensor:
    """The rows of the segments at their places among out_size rows."""
    if terms.index_out is None:
        return out
    placed = out.new_zeros((out.shape[0], terms.out_size, *out.shape[2:]))
    placed[:, terms.index_out.long()] = out
    return placed


def _volume(shape: torch.Size | list[int]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume
