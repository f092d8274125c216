"""The derivatives of an eager call, to any order: four functions, closed under differentiation.

    product   z = f(x, y)                    derivatives: the pair of gradients, or each product of the table alone
    pair      (G1(y, g), G2(g, x))           with cotangents u, v: the pair of (u, v, g), and f(u, y) + f(x, v) for g
    sum       f(x, y) + f(x2, y2)            two pairs
    scale     S x                            the transpose

A pair reads dL/dz once for both gradients where a kernel serves it. Calls go straight to the kernels: passing torch's
dispatcher twice costs several times what launching a small kernel does. Where someone traces, fakes or counts, calls go
through the operators of ``operation.py`` instead, whose derivatives come from the same table.
"""

from __future__ import annotations

from typing import Any

import torch

from sparseconv import transforms
from sparseconv.autograd_function import Function
from sparseconv.gpu.cuda_capability import has_triton
from sparseconv.products.execute import execute_product, execute_scale, settle, turn
from sparseconv.products.operation import call_product, call_scale
from sparseconv.products.table import Derivative, Product
from sparseconv.products.terms import Terms
from sparseconv.torch_private import below_autograd, dispatch_modes

Triple = tuple[Terms | None, Terms | None, Terms | None]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def direct(*tensors: torch.Tensor) -> bool:
    """Whether a call may bypass torch's dispatcher: plain eager tensors, no transform, no tracing."""
    if torch.compiler.is_compiling():
        return False
    transforms.check_no_batch(*tensors)
    return _is_plain(*tensors) and not transforms.present()


def scale(x: torch.Tensor, infos: tuple[Terms, Terms | None], out: torch.Tensor | None = None) -> torch.Tensor:
    """A sparse scale with its derivatives; written to ``out``, which was checked, where that is given."""
    if out is not None:
        if direct(x, out):
            return execute_scale(x, infos[0], out)
        return out.copy_(scale(x, infos))
    if not direct(x):
        return _SeenScale.apply(x, infos) if transforms.active() else call_scale(x, infos)
    if x.requires_grad and torch.is_grad_enabled():
        return _Scale.apply(x, infos)
    return execute_scale(x, infos[0])


def product(
    row: Product,
    x: torch.Tensor,
    y: torch.Tensor,
    infos: Triple,
    out_accumulated: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A product with its derivatives; written to ``out``, which was checked, where that is given."""
    if out is not None:
        if direct(x, y, out):
            return execute_product(row, x, y, _given(infos[0]), out_accumulated, out)
        return out.copy_(product(row, x, y, infos, out_accumulated))
    if not direct(x, y):
        if transforms.active():
            return _SeenProduct.apply(x, y, row, infos, out_accumulated)
        return call_product(row.name, x, y, infos, out_accumulated)
    if (x.requires_grad or y.requires_grad) and torch.is_grad_enabled():
        return _Product.apply(x, y, row, infos, out_accumulated)
    return execute_product(row, x, y, _given(infos[0]), out_accumulated)


def _given(terms: Terms | None) -> Terms:
    if terms is None:
        raise ValueError("a derivative needs an info that was not given: pass all backward infos to the product")
    return terms


class _Scale(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, infos: tuple[Terms, Terms | None]) -> torch.Tensor:
        ctx.infos = infos
        return execute_scale(x, infos[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return scale(grad, (_given(ctx.infos[1]), ctx.infos[0])), None


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, row: Product, infos: Triple, out_accumulated: bool
    ) -> torch.Tensor:
        # dL/dx reads y and dL/dy reads x: keep only what will be asked for
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, y if ctx.needs_input_grad[0] else None)
        ctx.call = row, infos
        ctx.like = (x.shape, x.dtype), (y.shape, y.dtype)
        return execute_product(row, x, y, _given(infos[0]), out_accumulated)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        (row, infos), (like_x, like_y) = ctx.call, ctx.like
        return (*_gradients(row, infos, x, y, grad, like_x, like_y), None, None, None)


class _SeenScale(Function):
    """The same for transforms and forward mode, which the operator's derivative knows nothing of."""

    backward = staticmethod(_Scale.backward)

    @staticmethod
    def forward(x: torch.Tensor, infos: tuple[Terms, Terms | None]) -> torch.Tensor:
        if below_autograd is None or _is_plain(x):
            return execute_scale(x, infos[0])
        with below_autograd():
            return call_scale(x, infos)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.infos = inputs[1]

    @staticmethod
    def jvp(ctx: Any, along: torch.Tensor, _: None) -> torch.Tensor:
        return scale(along, ctx.infos)

    @staticmethod
    def vmap(info: Any, dims: tuple, x: torch.Tensor, infos: tuple[Terms, Terms | None]) -> tuple[torch.Tensor, int]:
        """A batch side by side in the channels."""
        several = x.movedim(dims[0], -2)
        found = scale(several.flatten(-2), infos)
        return found.unflatten(-1, several.shape[-2:]), found.dim() - 1


class _SeenProduct(Function):
    """The same for transforms and forward mode, which the operator's derivative knows nothing of."""

    backward = staticmethod(_Product.backward)

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor, row: Product, infos: Triple, out_accumulated: bool) -> torch.Tensor:
        if below_autograd is None or _is_plain(x, y):
            return execute_product(row, x, y, _given(infos[0]), out_accumulated)
        with below_autograd():
            return call_product(row.name, x, y, infos, out_accumulated)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        x, y, row, infos, ctx.accumulated = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, y if ctx.needs_input_grad[0] else None)
        ctx.save_for_forward(x, y)
        ctx.call = row, infos
        ctx.like = (x.shape, x.dtype), (y.shape, y.dtype)

    @staticmethod
    def jvp(ctx: Any, of_x: torch.Tensor, of_y: torch.Tensor, *_: None) -> torch.Tensor:
        (x, y), (row, infos), accumulated = ctx.saved_tensors, ctx.call, ctx.accumulated
        return product(row, of_x, y, infos, accumulated) + product(row, x, of_y, infos, accumulated)

    @staticmethod
    def vmap(
        info: Any, dims: tuple, x: torch.Tensor, y: torch.Tensor, row: Product, infos: Triple, out_accumulated: bool
    ) -> tuple[torch.Tensor, int]:
        """A batch as that of one call; one after another where a call has a batch of its own."""
        of_x, of_y = dims[:2]
        xs, ys = x if of_x is None else x.movedim(of_x, 0), y if of_y is None else y.movedim(of_y, 0)
        if xs.dim() - (of_x is not None) == len(row.axes1) + 1 and ys.dim() - (of_y is not None) == len(row.axes2) + 1:
            return product(row, xs, ys, infos, False), 0
        size = info.batch_size
        xs, ys = ((t if size or of is None else t.sum(0, keepdim=True)) for t, of in ((xs, of_x), (ys, of_y)))
        items = [
            product(row, xs if of_x is None else xs[item], ys if of_y is None else ys[item], infos, out_accumulated)
            for item in range(max(1, size))  # of an empty batch, the one that gives the shape
        ]
        return torch.stack(items)[:size], 0


def _is_plain(*tensors: torch.Tensor) -> bool:
    # torch's dispatcher negates what kernels would read as it lies in memory, and knows what meta tensors give
    plain = all(type(t) in _PLAIN and not t.is_neg() and not t.is_meta for t in tensors)
    return plain and not dispatch_modes()


class _Pair(Function):
    """Both gradients of a product of two batched inputs."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor, row: Product, infos: Triple
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y, grad)
        ctx.call = row, infos
        ctx.set_materialize_grads(False)
        if has_triton(x.device):
            from sparseconv.products.gpu import sums as on_gpu

            both = on_gpu.gradient_pair(x, y, grad, _given(infos[0]))
            if both is not None:
                return both
        grad_x = execute_product(row.grad1.row, *turn(row.grad1, y, grad), _given(infos[1]), False)
        grad_y = execute_product(row.grad2.row, *turn(row.grad2, grad, x), _given(infos[2]), False)
        return settle(row.grad1, grad_x, x.shape, x.dtype), settle(row.grad2, grad_y, y.shape, y.dtype)

    @staticmethod
    def backward(ctx: Any, u: torch.Tensor | None, v: torch.Tensor | None) -> tuple[Any, ...]:
        x, y, grad = ctx.saved_tensors
        row, infos = ctx.call
        needs = ctx.needs_input_grad
        like_x = (x.shape, x.dtype) if needs[0] and v is not None else None
        like_y = (y.shape, y.dtype) if needs[1] and u is not None else None
        grads = _gradients(row, infos, u, v, grad, like_x, like_y)
        grad_grad = None
        if needs[2] and u is not None and v is not None:
            grad_grad = _Sum.apply(u, y, x, v, row, infos)
        elif needs[2] and u is not None:
            grad_grad = product(row, u, y, infos, False)
        elif needs[2] and v is not None:
            grad_grad = product(row, x, v, infos, False)
        return (*grads, None if grad_grad is None else grad_grad.to(grad.dtype), None, None)


class _Sum(Function):
    """The sum of two products of batched inputs over the same terms."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        x2: torch.Tensor,
        y2: torch.Tensor,
        row: Product,
        infos: Triple,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, y, x2, y2)
        ctx.call = row, infos
        terms = _given(infos[0])
        if has_triton(x.device):
            from sparseconv.products.gpu import sums as on_gpu

            both = on_gpu.product_sum(row, x, y, x2, y2, terms)
            if both is not None:
                return both
        return execute_product(row, x, y, terms, False) + execute_product(row, x2, y2, terms, False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, y, x2, y2 = ctx.saved_tensors
        row, infos = ctx.call
        likes = [(t.shape, t.dtype) if need else None for t, need in zip((x, y, x2, y2), ctx.needs_input_grad)]
        first = _gradients(row, infos, x, y, grad, likes[0], likes[1])
        return (*first, *_gradients(row, infos, x2, y2, grad, likes[2], likes[3]), None, None)


Like = tuple[torch.Size, torch.dtype]


def _gradients(
    row: Product,
    infos: Triple,
    x: torch.Tensor | None,
    y: torch.Tensor | None,
    grad: torch.Tensor,
    like_x: Like | None,
    like_y: Like | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dL/dx from y and dL/dy from x, of the shapes and dtypes given, each where its other input is there."""
    if (
        x is not None
        and y is not None
        and like_x is not None
        and like_y is not None
        and (len(like_x[0]), len(like_y[0]), grad.dim())
        == (len(row.axes1) + 2, len(row.axes2) + 2, len(row.axes_out) + 2)
        and direct(x, y, grad)
    ):
        return _Pair.apply(x, y, grad, row, infos)
    grad_x = grad_y = None
    if y is not None and like_x is not None:
        grad_x = _one(row.grad1, y, grad, (infos[1], infos[2], infos[0]), like_x, len(row.axes1))
    if x is not None and like_y is not None:
        grad_y = _one(row.grad2, grad, x, (infos[2], infos[0], infos[1]), like_y, len(row.axes2))
    return grad_x, grad_y


def _one(
    rule: Derivative, first: torch.Tensor, second: torch.Tensor, infos: Triple, like: Like, rank: int
) -> torch.Tensor:
    # the gradient of an input that was shared is summed over the batch
    shared = len(like[0]) == rank + 1
    return settle(rule, product(rule.row, *turn(rule, first, second), infos, shared), *like)
