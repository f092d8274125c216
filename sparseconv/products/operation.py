"""The two differentiable operations, as torch.library knows them; the only file of the room that touches it."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.products.arguments import out_shape
from sparseconv.products.execute import execute_product, execute_scale, settle, turn
from sparseconv.products.table import PRODUCTS, Derivative
from sparseconv.products.terms import ABSENT, Terms, pack, unpack

torch.library.define(
    "sparseconv::sparse_scale",
    "(Tensor x, Tensor[] info, Tensor[] info_backward, str[] layouts, SymInt[] out_sizes) -> Tensor",
)
torch.library.define(
    "sparseconv::sparse_product",
    "(Tensor x, Tensor y, Tensor[] info, Tensor[] info_backward1, Tensor[] info_backward2, str[] layouts, "
    "SymInt[] out_sizes, str product, bool out_accumulated) -> Tensor",
)


def call_scale(x: torch.Tensor, infos: tuple[Terms | None, ...]) -> torch.Tensor:
    """``sparse_scale`` as an operator, over (forward, backward), of which the second may be absent."""
    tensors, layouts = zip(*(pack(terms) for terms in infos))
    return torch.ops.sparseconv.sparse_scale(x, *tensors, list(layouts), _sizes(infos))


def call_product(
    product: str, x: torch.Tensor, y: torch.Tensor, infos: tuple[Terms | None, ...], out_accumulated: bool
) -> torch.Tensor:
    """One of the seven products as an operator, over (forward, backward1, backward2); the last two may be absent."""
    tensors, layouts = zip(*(pack(terms) for terms in infos))
    sizes = _sizes(infos)
    return torch.ops.sparseconv.sparse_product(x, y, *tensors, list(layouts), sizes, product, out_accumulated)


def _sizes(infos: tuple[Terms | None, ...]) -> list[int]:
    return [0 if terms is None else terms.out_size for terms in infos]


def _scale_real(
    x: torch.Tensor, info: list[torch.Tensor], _backward: object, layouts: list[str], out_sizes: list[int]
) -> torch.Tensor:
    return execute_scale(x, unpack(info, layouts[0], out_sizes[0]))


def _scale_fake(
    x: torch.Tensor, info: object, _backward: object, layouts: list[str], out_sizes: list[int]
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-2], out_sizes[0], x.shape[-1]))


def _scale_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, info, backward, layouts, out_sizes = inputs
    ctx.save_for_backward(*info, *backward)
    ctx.lengths, ctx.layouts, ctx.out_sizes = [len(info), len(backward)], list(layouts), list(out_sizes)


def _scale_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    grad_x = call_scale(grad, _split(ctx)[::-1]) if ctx.needs_input_grad[0] else None
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
    return execute_product(PRODUCTS[product], x, y, unpack(info, layouts[0], out_sizes[0]), out_accumulated)


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
    shape = out_shape(PRODUCTS[product], x, y, out_sizes[0], out_accumulated)
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
    infos = _split(ctx, sum(wanted))
    grads: list[torch.Tensor | None] = [None, None]
    if wanted[0]:
        pair = turn(row.grad1, kept.pop(0), grad)
        grads[0] = _derivative(row.grad1, *pair, infos[1:] + infos[:1], len(row.axes1), *ctx.inputs[0])
    if wanted[1]:
        pair = turn(row.grad2, grad, kept.pop(0))
        grads[1] = _derivative(row.grad2, *pair, infos[2:] + infos[:2], len(row.axes2), *ctx.inputs[1])
    return (*grads, *([None] * n for n in ctx.lengths), None, None, None, None)


def _derivative(
    rule: Derivative,
    first: torch.Tensor,
    second: torch.Tensor,
    infos: tuple[Terms | None, ...],
    rank: int,
    shape: torch.Size,
    dtype: torch.dtype,
) -> torch.Tensor:
    # the gradient of an input that was shared is summed over the batch
    shared = len(shape) == rank + 1
    return settle(rule, call_product(rule.product, first, second, infos, shared), shape, dtype)


def _split(ctx: Any, start: int = 0) -> tuple[Terms | None, ...]:
    infos: list[Terms | None] = []
    for length, layout, size in zip(ctx.lengths, ctx.layouts, ctx.out_sizes):
        tensors = list(ctx.saved_tensors[start : start + length])
        infos.append(None if layout == ABSENT.layout else unpack(tensors, layout, size))
        start += length
    return tuple(infos)


torch.library.impl("sparseconv::sparse_scale", "default", _scale_real)
torch.library.register_fake("sparseconv::sparse_scale", _scale_fake)
torch.library.register_autograd("sparseconv::sparse_scale", _scale_backward, setup_context=_scale_context)
torch.library.impl("sparseconv::sparse_product", "default", _product_real)
torch.library.register_fake("sparseconv::sparse_product", _product_fake)
torch.library.register_autograd("sparseconv::sparse_product", _product_backward, setup_context=_product_context)
