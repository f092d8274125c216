"""Sparse scale and products by torch's operations alone, on any device: terms are gathered, multiplied and added.

Terms are added to their rows by ``index_put_``, which sorts them first on a CUDA device: the bits of every run are the
same there.
"""

from __future__ import annotations

import math

import torch

from sparseconv.products.table import Product
from sparseconv.products.terms import Terms

#: elements of a temporary, 64 MB of fp32
PIECE = 1 << 24


def segment_scale(x: torch.Tensor, terms: Terms, dtype: torch.dtype) -> torch.Tensor:
    """(N, out_size, C) in ``dtype`` from x (N, M_in, C)."""
    return _summed("ntc->ntc", [(x, terms.index1)], terms, [x.shape[2]], x.shape[0], False, dtype)


def segment_product(
    row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms, accumulated: bool, dtype: torch.dtype
) -> torch.Tensor:
    """(N, out_size, dense...) in ``dtype`` from x (N or 1, M1, dense...) and y (N or 1, M2, dense...).

    N is 1 where the result is summed over the batch or neither input has one.
    """
    dense = dict(zip(row.axes1 + row.axes2, [*x.shape[2:], *y.shape[2:]]))
    batch = max(x.shape[0], y.shape[0]) if x.shape[0] and y.shape[0] else 0
    formula = f"nt{row.axes1},nt{row.axes2}->{'' if accumulated else 'n'}t{row.axes_out}"
    factors = [(x, terms.index1), (y, terms.index2)]
    return _summed(formula, factors, terms, [dense[axis] for axis in row.axes_out], batch, accumulated, dtype)


def _summed(
    formula: str,
    factors: list[tuple[torch.Tensor, torch.Tensor | None]],
    terms: Terms,
    shape: list[int],
    batch: int,
    accumulated: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    positions, segments = terms.num_positions(factors[0][0].shape[1], factors[-1][0].shape[1]), terms.num_segments
    sums = torch.zeros(segments + 1, 1 if accumulated else batch, *shape, dtype=dtype, device=factors[0][0].device)
    widest = max(batch, 1) * max(1, *(math.prod(t.shape[2:]) for t in (sums, *(t for t, _ in factors))))
    length = max(1, PIECE // widest)
    for first in range(0, positions if batch else 0, length):
        here = torch.arange(first, min(first + length, positions), device=sums.device)
        at = here if terms.gather_index is None else terms.gather_index[here].long()
        rows = [
            t.index_select(1, at if index is None else index[at].long()).to(dtype).expand(batch, *[-1] * (t.dim() - 1))
            for t, index in factors
        ]
        if terms.scale is not None:
            rows[0] = rows[0] * terms.scale[at].to(dtype).view(-1, *[1] * (rows[0].dim() - 2))
        with torch.autocast(here.device.type, enabled=False):
            found = torch.einsum(formula, *rows)
        segment = here
        if terms.seg_out is not None:  # what lies in no segment goes behind the last
            segment = torch.searchsorted(terms.seg_out, here.to(terms.seg_out.dtype), right=True) - 1
            segment = torch.where(segment < 0, segments, segment)
        sums.index_put_((segment,), found[:, None] if accumulated else found.transpose(0, 1), accumulate=True)
    out = sums[:segments].transpose(0, 1).contiguous()
    if terms.index_out is None:
        return out
    return out.new_zeros(out.shape[0], terms.out_size, *shape).index_copy_(1, terms.index_out.long(), out)
