"""Sparse scale and products on a GPU: which kernel serves which shape."""

from __future__ import annotations

import torch

from sparseconv.gpu.cuda_capability import precision_of
from sparseconv.products.gpu.batch import batch_vecmat, batch_vectors
from sparseconv.products.gpu.matrices import sum_matrices
from sparseconv.products.gpu.segments import sum_rows
from sparseconv.products.gpu.unrolled import Line, Operand, Structure, can_unroll, run_unrolled
from sparseconv.products.schedule import WorkItems
from sparseconv.products.table import Product
from sparseconv.products.terms import Terms

#: batch items from which a block of them is worth a program of its own
_BATCH = 16
#: batch items x channels from which a kernel written for the very structure repays its compilation
_UNROLLED = 1 << 18
#: programs that keep a large GPU busy
_PROGRAMS = 2048


def segment_scale(
    x: torch.Tensor, terms: Terms, dtype: torch.dtype, target: torch.Tensor | None = None
) -> torch.Tensor:
    """(N, out_size, C) from x (N, M_in, C), in ``target`` where that is given: contiguous, apart from x."""
    out = _output((x.shape[0], terms.out_size, x.shape[2]), dtype, x.device, terms, target)
    _vectors("vector", x, None, terms, out, x.shape[0], False)
    return out


def segment_product(
    row: Product,
    x: torch.Tensor,
    y: torch.Tensor,
    terms: Terms,
    accumulated: bool,
    dtype: torch.dtype,
    target: torch.Tensor | None = None,
) -> torch.Tensor:
    """(N, out_size, dense...) from x (N or 1, M1, dense...) and y (N or 1, M2, dense...); N is 1 where it is summed.

    Where nothing is summed it is written to ``target``, if that is given: contiguous, apart from x and y.
    """
    batch = max(x.shape[0], y.shape[0]) if x.shape[0] and y.shape[0] else 0
    dense = dict(zip(row.axes1 + row.axes2, [*x.shape[2:], *y.shape[2:]]))
    shape = [terms.out_size, *(dense[axis] for axis in row.axes_out)]
    if row.name == "mat_t_vec":  # the vector first, as the kernels have it
        x, y, terms = y, x, terms._replace(index1=terms.index2, index2=terms.index1)
    if not accumulated:
        out = _output((batch, *shape), dtype, x.device, terms, target)
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
    precision = precision_of(torch.float32, x.device)
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
        structure = _product_structure(x, y, out, terms)
        if not batch_sum and batch * channels >= _UNROLLED and can_unroll(structure):
            run_unrolled(structure, [x, out] if y is None else [x, y, out], batch)
        else:
            batch_vectors(kind, x, y, terms, out, batch, batch_sum, _block(batch))
        return
    positions = terms.num_positions(x.shape[1], x.shape[1] if y is None else y.shape[1])
    work = None if terms.seg_out is None else terms.work(positions)
    sum_rows(kind, x, y, terms, out, batch, batch_sum, work, positions)


def _product_structure(x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor, terms: Terms) -> Structure:
    inputs = (Operand("x", 0, x.dim() == 3),) + (() if y is None else (Operand("y", 1, y.dim() == 3),))
    rows = (x.shape[1], 0 if y is None else y.shape[1], terms.out_size)
    lines = (Line("out", "x", None if y is None else "y"),)
    return Structure(terms.table, inputs, (Operand("out", 2, out.dim() == 3),), lines, rows)


def gradient_pair(
    x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor, terms: Terms
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both gradients of a product in one pass over dL/dz, or None where no such kernel serves.

    All three are batched, (N, rows, C) or (N, rows); ``terms`` are those of the product itself.
    """
    structure = Structure(
        terms.table,
        (Operand("x", 0, x.dim() == 3), Operand("y", 1, y.dim() == 3), Operand("grad", 2, grad.dim() == 3)),
        (Operand("grad_x", 0, x.dim() == 3), Operand("grad_y", 1, y.dim() == 3)),
        (Line("grad_x", "grad", "y"), Line("grad_y", "grad", "x")),
        (x.shape[1], y.shape[1], terms.out_size),
    )
    if not _serves(structure, x, y):
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(y.shape, dtype=y.dtype, device=y.device)
    run_unrolled(structure, [x, y, grad, *out], x.shape[0])
    return out


def product_sum(
    row: Product, x: torch.Tensor, y: torch.Tensor, x2: torch.Tensor, y2: torch.Tensor, terms: Terms
) -> torch.Tensor | None:
    """The products of x and y and of x2 and y2, added in one pass, or None where no such kernel serves."""
    shape = [x.shape[0], terms.out_size] + [x.shape[2] if x.dim() == 3 else y.shape[2]] * (row.name != "inner")
    out = torch.empty(shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
    structure = Structure(
        terms.table,
        tuple(Operand(n, s, t.dim() == 3) for n, s, t in (("x", 0, x), ("y", 1, y), ("x2", 0, x2), ("y2", 1, y2))),
        (Operand("out", 2, out.dim() == 3),),
        (Line("out", "x", "y"), Line("out", "x2", "y2")),
        (x.shape[1], y.shape[1], terms.out_size),
    )
    if not _serves(structure, x, y):
        return None
    run_unrolled(structure, [x, y, x2, y2, out], x.shape[0])
    return out


def _serves(structure: Structure, x: torch.Tensor, y: torch.Tensor) -> bool:
    channels = x.shape[2] if x.dim() == 3 else y.shape[2]
    return x.shape[0] >= _BATCH and x.shape[0] * channels >= _UNROLLED and can_unroll(structure)


def _by_batch(row: Product, batch: int) -> bool:
    return batch >= _BATCH and row.name in ("mul", "vecsca", "scavec", "inner")


def _block(batch: int) -> int:
    """Batch items of a block: few where the batch is small, so that more programs run."""
    return 16 if batch >= 4096 else 8


def _output(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, terms: Terms, target: torch.Tensor | None
) -> torch.Tensor:
    """The target or a new tensor: zeros where rows may stay unwritten, else whatever lies there."""
    if target is not None:
        return target if terms.index_out is None else target.zero_()
    make = torch.zeros if terms.index_out is not None else torch.empty
    return make(shape, dtype=dtype, device=device)


def _work(terms: Terms, positions: int, device: torch.device) -> WorkItems:
    if terms.seg_out is not None:
        return terms.work(positions)
    begin = torch.arange(positions, device=device)
    rows = begin if terms.index_out is None else terms.index_out.long()
    return WorkItems(torch.stack([begin, begin + 1, rows], 1), None, 0)
