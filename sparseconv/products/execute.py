"""One call of a scale or a product as arithmetic: which device, which batch; no autograd."""

from __future__ import annotations

from typing import TypeGuard

import torch

from sparseconv.gpu.cuda_capability import has_triton
from sparseconv.products import plain
from sparseconv.products.cpu import sums as on_cpu
from sparseconv.products.table import Derivative, Product
from sparseconv.products.terms import Terms


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: fp64 for fp64, fp32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def execute_scale(x: torch.Tensor, terms: Terms, out: torch.Tensor | None = None) -> torch.Tensor:
    """(N, out_size, C) or (out_size, C) from x (N, M_in, C) or (M_in, C); in ``out`` where that is given."""
    batched = x if x.dim() == 3 else x[None]
    if has_triton(x.device):
        from sparseconv.products.gpu import sums as on_gpu

        target = None if not _holds(out, x) else out if x.dim() == 3 else out[None]
        result = on_gpu.segment_scale(batched, terms, x.dtype, target)
    else:
        result = (on_cpu if x.is_cpu else plain).segment_scale(batched, terms, accumulator(x.dtype))
    return _settled(result if x.dim() == 3 else result[0], x.dtype, out)


def execute_product(
    row: Product,
    x: torch.Tensor,
    y: torch.Tensor,
    terms: Terms,
    out_accumulated: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of x and y, with or without a batch each, in the promoted dtype; in ``out`` where that is given."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    in_place = _holds(out, x, y)
    batched1, batched2 = x.dim() == len(row.axes1) + 2, y.dim() == len(row.axes2) + 2
    # the product is linear in each input: a sum over the batch of one that meets a shared other comes first
    if out_accumulated and batched1 != batched2:
        if batched1:
            x, batched1 = x.sum(0, dtype=accumulator(dtype)), False
        else:
            y, batched2 = y.sum(0, dtype=accumulator(dtype)), False
    accumulated = out_accumulated and batched1 and batched2
    has_batch = (batched1 or batched2) and not accumulated
    x, y = (x if batched1 else x[None]), (y if batched2 else y[None])
    if has_triton(x.device):
        from sparseconv.products.gpu import sums as on_gpu

        target = None if out is None or not in_place else out if has_batch else out[None]
        result = on_gpu.segment_product(row, x, y, terms, accumulated, dtype, target)
    else:
        result = (on_cpu if x.is_cpu else plain).segment_product(row, x, y, terms, accumulated, accumulator(dtype))
    return _settled(result if has_batch else result[0], dtype, out)


def _holds(out: torch.Tensor | None, *inputs: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether a kernel may write straight to ``out``: it lies as a new tensor would, in memory that no input shares."""
    if out is None or not out.is_contiguous():
        return False
    memory = out.untyped_storage().data_ptr()
    return all(tensor.untyped_storage().data_ptr() != memory for tensor in inputs)


def _settled(result: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """The result in ``dtype``, or ``out`` that holds it and says that it was written."""
    if out is None:
        return _own(result.to(dtype))
    if result.data_ptr() != out.data_ptr():
        return out.copy_(result)
    torch.autograd.graph.increment_version(out)
    return out


def _own(out: torch.Tensor) -> torch.Tensor:
    """The same memory as no view, which autograd lets callers change in place after a custom function."""
    return out.detach() if out._is_view() else out


def turn(rule: Derivative, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two inputs of a derivative, transposed as its rule says."""
    if rule.transposed == "first":
        return first.transpose(-1, -2), second
    return first, second.transpose(-1, -2) if rule.transposed == "second" else second


def settle(rule: Derivative, out: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The result of a derivative as the gradient of an input of this shape and dtype."""
    if rule.transposed == "result":
        out = out.transpose(-1, -2)
    if out.dim() < len(shape):  # nothing else had a batch: every item of this one has the same gradient
        out = out.expand(shape)
    return out.to(dtype)
