"""The two differentiable operations, as torch.library knows them; the only file of the room that touches it."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.products import cpu
from sparseconv.products.table import PRODUCTS, Derivative
from sparseconv.products.terms import Packed, unpack

torch.library.define(
    "sparseconv::sparse_scale",
    "(Tensor x, Tensor[] info, Tensor[] info_backward, str[] layouts, SymInt[] out_sizes) -> Tensor",
)
torch.library.define(
    "sparseconv::sparse_product",
    "(Tensor x, Tensor y, Tensor[] info, Tensor[] info_backward1, Tensor[] info_backward2, str[] layouts, "
    "SymInt[] out_sizes, str product, bool out_accumulated) -> Tensor",
)


def call_scale(x: torch.Tensor, infos: list[Packed], out_sizes: list[int]) -> torch.Tensor:
    """``sparse_scale`` on packed infos (forward, backward), of which the second may be absent."""
    tensors, layouts = zip(*infos)
    return torch.ops.sparseconv.sparse_scale(x, *tensors, list(layouts), out_sizes)


def call_product(
    product: str, x: torch.Tensor, y: torch.Tensor, infos: list[Packed], out_sizes: list[int], out_accumulated: bool
) -> torch.Tensor:
    """One of the seven products on packed infos (forward, backward1, backward2); the last two may be absent."""
    tensors, layouts = zip(*infos)
    return torch.ops.sparseconv.sparse_product(x, y, *tensors, list(layouts), out_sizes, product, out_accumulated)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: fp64 for fp64, fp32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scale_cpu(
    x: torch.Tensor, info: list[torch.Tensor], _backward: object, layouts: list[str], out_sizes: list[int]
) -> torch.Tensor:
    terms = unpack(info, layouts[0], out_sizes[0])
    batched = x if x.dim() == 3 else x[None]
    out = cpu.segment_scale(batched, terms, accumulator(x.dtype)).to(x.dtype)
    return out if x.dim() == 3 else out[0]


def _scale_cuda(
    x: torch.Tensor, info: list[torch.Tensor], _backward: object, layouts: list[str], out_sizes: list[int]
) -> torch.Tensor:
    from sparseconv.products import triton_products

    terms = unpack(info, layouts[0], out_sizes[0])
    batched = x if x.dim() == 3 else x[None]
    out = triton_products.segment_scale(batched, terms, x.dtype)
    return out if x.dim() == 3 else out[0]


def _scale_fake(
    x: torch.Tensor, info: object, _backward: object, layouts: list[str], out_sizes: list[int]
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-2], out_sizes[0], x.shape[-1]))


def _scale_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, info, backward, layouts, out_sizes = inputs
    ctx.save_for_backward(*info, *backward)
    ctx.lengths, ctx.layouts, ctx.out_sizes = [len(info), len(backward)], list(layouts), list(out_sizes)


def _scale_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    infos = _split(ctx)
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = call_scale(grad, infos[::-1], ctx.out_sizes[::-1])
    return (grad_x, *([None] * n for n in ctx.lengths), None, None)


def _product_real(
    x: torch.Tensor,
    y: torch.Tensor,
    info: list[torch.Tensor],
    _backward1: object,
    _backward2: object,
    layouts: list[str],
    out_sizes: list[int],
    product: str,
    out_accumulated: bool,
) -> torch.Tensor:
    row = PRODUCTS[product]
    terms = unpack(info, layouts[0], out_sizes[0])
    dtype = torch.promote_types(x.dtype, y.dtype)
    batched1, batched2 = x.dim() == len(row.axes1) + 2, y.dim() == len(row.axes2) + 2
    # the product is linear in each input: a sum over the batch of one that meets a shared other comes first
    if out_accumulated and batched1 != batched2:
        if batched1:
            x, batched1 = x.sum(0, dtype=accumulator(dtype)), False
        else:
            y, batched2 = y.sum(0, dtype=accumulator(dtype)), False
    accumulated = out_accumulated and batched1 and batched2
    x, y = (x if batched1 else x[None]), (y if batched2 else y[None])
    if x.device.type == "cpu":
        out = cpu.segment_product(row, x, y, terms, accumulated, accumulator(dtype)).to(dtype)
    else:
        from sparseconv.products import triton_products

        out = triton_products.segment_product(row, x, y, terms, accumulated, dtype)
    return out if (batched1 or batched2) and not accumulated else out[0]


def _product_fake(
    x: torch.Tensor,
    y: torch.Tensor,
    info: object,
    _backward1: object,
    _backward2: object,
    layouts: list[str],
    out_sizes: list[int],
    product: str,
    out_accumulated: bool,
) -> torch.Tensor:
    row = PRODUCTS[product]
    dense = dict(zip(row.axes1, x.shape[x.dim() - len(row.axes1) :]))
    dense.update(zip(row.axes2, y.shape[y.dim() - len(row.axes2) :]))
    shape = [out_sizes[0], *(dense[axis] for axis in row.axes_out)]
    if not out_accumulated:
        if x.dim() == len(row.axes1) + 2:
            shape = [x.shape[0], *shape]
        elif y.dim() == len(row.axes2) + 2:
            shape = [y.shape[0], *shape]
    return torch.empty(shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)


def _product_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, y, *infos, layouts, out_sizes, product, _ = inputs
    # dL/dx reads y and dL/dy reads x: keep only what will be asked for
    kept = [y] * ctx.needs_input_grad[0] + [x] * ctx.needs_input_grad[1]
    ctx.save_for_backward(*kept, *(tensor for info in infos for tensor in info))
    ctx.lengths, ctx.layouts, ctx.out_sizes = [len(info) for info in infos], list(layouts), list(out_sizes)
    ctx.product = product
    ctx.inputs = [(t.shape, t.dtype) for t in (x, y)]


def _product_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    row = PRODUCTS[ctx.product]
    wanted = ctx.needs_input_grad[:2]
    kept = list(ctx.saved_tensors[: sum(wanted)])
    infos, sizes = _split(ctx, sum(wanted)), ctx.out_sizes
    grads: list[torch.Tensor | None] = [None, None]
    if wanted[0]:
        batched = len(ctx.inputs[0][0]) == len(row.axes1) + 2
        turned = (infos[1:] + infos[:1], sizes[1:] + sizes[:1])
        grads[0] = _derivative(row.grad1, kept.pop(0), grad, *turned, batched, *ctx.inputs[0])
    if wanted[1]:
        batched = len(ctx.inputs[1][0]) == len(row.axes2) + 2
        turned = (infos[2:] + infos[:2], sizes[2:] + sizes[:2])
        grads[1] = _derivative(row.grad2, grad, kept.pop(0), *turned, batched, *ctx.inputs[1])
    return (*grads, *([None] * n for n in ctx.lengths), None, None, None, None)


def _derivative(
    rule: Derivative,
    first: torch.Tensor,
    second: torch.Tensor,
    infos: list[Packed],
    out_sizes: list[int],
    batched: bool,
    shape: torch.Size,
    dtype: torch.dtype,
) -> torch.Tensor:
    if rule.transposed == "first":
        first = first.transpose(-1, -2)
    elif rule.transposed == "second":
        second = second.transpose(-1, -2)
    # the gradient of an input that was shared is summed over the batch
    out = call_product(rule.product, first, second, infos, out_sizes, not batched)
    if rule.transposed == "result":
        out = out.transpose(-1, -2)
    if out.dim() < len(shape):  # nothing else had a batch: every item of this one has the same gradient
        out = out.expand(shape)
    return out.to(dtype)


def _split(ctx: Any, start: int = 0) -> list[Packed]:
    infos = []
    for length, layout in zip(ctx.lengths, ctx.layouts):
        infos.append(Packed(list(ctx.saved_tensors[start : start + length]), layout))
        start += length
    return infos


torch.library.impl("sparseconv::sparse_scale", "cpu", _scale_cpu)
torch.library.impl("sparseconv::sparse_scale", "cuda", _scale_cuda)
torch.library.register_fake("sparseconv::sparse_scale", _scale_fake)
torch.library.register_autograd("sparseconv::sparse_scale", _scale_backward, setup_context=_scale_context)
torch.library.impl("sparseconv::sparse_product", ("cpu", "cuda"), _product_real)
torch.library.register_fake("sparseconv::sparse_product", _product_fake)
torch.library.register_autograd("sparseconv::sparse_product", _product_backward, setup_context=_product_context)
