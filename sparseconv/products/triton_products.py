"""Sparse scale and products on a GPU: which kernel serves which shape."""

from __future__ import annotations

import torch

from sparseconv.products.schedule import WorkItems
from sparseconv.products.table import Product
from sparseconv.products.terms import Terms
from sparseconv.products.triton_batch import batch_vecmat, batch_vectors
from sparseconv.products.triton_matrices import sum_matrices
from sparseconv.products.triton_segments import sum_rows
from sparseconv.products.triton_unrolled import can_unroll, unrolled_vectors

#: batch items from which a block of them is worth a program of its own
_BATCH = 16
#: batch items x channels from which a kernel written for the very structure repays its compilation
_UNROLLED = 1 << 18
#: programs that keep a large card busy
_PROGRAMS = 2048


def segment_scale(x: torch.Tensor, terms: Terms, dtype: torch.dtype) -> torch.Tensor:
    """(N, out_size, C) from x (N, M_in, C)."""
    out = _output((x.shape[0], terms.out_size, x.shape[2]), dtype, x.device, terms)
    _vectors("vector", x, None, terms, out, x.shape[0], False)
    return out


def segment_product(
    row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms, accumulated: bool, dtype: torch.dtype
) -> torch.Tensor:
    """(N, out_size, dense...) from x (N or 1, M1, dense...) and y (N or 1, M2, dense...); N is 1 where it is summed."""
    batch = max(x.shape[0], y.shape[0]) if x.shape[0] and y.shape[0] else 0
    dense = dict(zip(row.axes1 + row.axes2, [*x.shape[2:], *y.shape[2:]]))
    shape = [terms.out_size, *(dense[axis] for axis in row.axes_out)]
    if row.name == "mat_t_vec":  # the vector first, as the kernels have it
        x, y, terms = y, x, terms._replace(index1=terms.index2, index2=terms.index1)
    if not accumulated:
        out = _output((batch, *shape), dtype, x.device, terms)
        _write(row, x, y, terms, out, batch, False)
        return out
    # parts of the batch are summed each by one owner, then in a fixed order
    parts = torch.zeros if terms.index_out is not None or batch == 0 else torch.empty
    tiles = max(1, terms.num_segments)
    count = -(-batch // _block(batch)) if _by_batch(row, batch) else max(1, min(batch, _PROGRAMS // tiles))
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    out = parts((count, *shape), dtype=accumulator, device=x.device)
    _write(row, x, y, terms, out, batch, True)
    return out.sum(0, keepdim=True).to(dtype)


def _write(
    row: Product, x: torch.Tensor, y: torch.Tensor, terms: Terms, out: torch.Tensor, batch: int, batch_sum: bool
) -> None:
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    if row.name in ("mul", "vecsca", "scavec"):
        _vectors("vector", x, y, terms, out, batch, batch_sum)
    elif row.name == "inner":
        _vectors("inner", x, y, terms, out, batch, batch_sum)
    elif row.name == "outer":
        work = _work(terms, terms.num_positions(x.shape[1], y.shape[1]), x.device)
        sum_matrices("outer", x, y, terms, out, batch, batch_sum, work, precision)
    elif batch >= _BATCH and y.shape[0] == 1 and torch.float64 not in (x.dtype, y.dtype):
        batch_vecmat(x, y, terms, out, batch, precision)
    else:
        work = _work(terms, terms.num_positions(x.shape[1], y.shape[1]), x.device)
        sum_matrices("vecmat", x, y, terms, out, batch, batch_sum, work, precision)


def _vectors(
    kind: str, x: torch.Tensor, y: torch.Tensor | None, terms: Terms, out: torch.Tensor, batch: int, batch_sum: bool
) -> None:
    channels = max(x.shape[2] if x.dim() == 3 else 1, y.shape[2] if y is not None and y.dim() == 3 else 1)
    if batch >= _BATCH:
        if not batch_sum and batch * channels >= _UNROLLED and can_unroll(kind, x, y, terms):
            unrolled_vectors(kind, x, y, terms, out, batch)
        else:
            batch_vectors(kind, x, y, terms, out, batch, batch_sum, _block(batch))
        return
    positions = terms.num_positions(x.shape[1], x.shape[1] if y is None else y.shape[1])
    work = None if terms.seg_out is None else terms.work(positions)
    sum_rows(kind, x, y, terms, out, batch, batch_sum, work, positions)


def _by_batch(row: Product, batch: int) -> bool:
    return batch >= _BATCH and row.name in ("mul", "vecsca", "scavec", "inner")


def _block(batch: int) -> int:
    """Batch items of a block: few where the batch is small, so that more programs run."""
    return 16 if batch >= 4096 else 8


def _output(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, terms: Terms) -> torch.Tensor:
    """Zeros where rows may stay unwritten, else whatever lies there."""
    make = torch.zeros if terms.index_out is not None else torch.empty
    return make(shape, dtype=dtype, device=device)


def _work(terms: Terms, positions: int, device: torch.device) -> WorkItems:
    if terms.seg_out is not None:
        return terms.work(positions)
    begin = torch.arange(positions, device=device)
    rows = begin if terms.index_out is None else terms.index_out.long()
    return WorkItems(torch.stack([begin, begin + 1, rows], 1), None, 0)
