"""A convolution with bias, residual and activation as one graph node, and as one kernel where the backend has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparseconv.autograd import (
    Edges,
    both_gradients,
    convolution,
    is_direct,
    is_plain,
    serving_backend,
    without_casts,
)
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.torch_private import functional

if TYPE_CHECKING:
    from sparseconv.pointwise import Epilogue

_HALVES = (torch.float16, torch.bfloat16)


class _Fused(torch.autograd.Function):
    """act(convolution + bias + residual) as one node, and from one kernel where the gradient needs only the result.

    Where it needs the sum before the activation, that sum is the node's second result: what is kept of it then has a
    derivative too.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, residual: Any, epilogue: Any, call: tuple) -> Any:
        apart = not _keeps_result(epilogue)
        kept = y = _forward_fused(x, weight, bias, residual, None if apart else epilogue, *call)
        if apart:
            y = epilogue.apply(kept)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None, None if epilogue is None else kept)
        ctx.set_materialize_grads(False)
        ctx.epilogue, ctx.call, ctx.taps = epilogue, call, weight.shape[0]
        return (y, kept) if apart else y

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_sum: torch.Tensor | None = None) -> tuple:  # type: ignore[override]
        x, weight, kept = ctx.saved_tensors
        (edges, groups, backend), needs = ctx.call, ctx.needs_input_grad
        if grad is not None and ctx.epilogue is not None:
            grad = ctx.epilogue.input_grad(grad, **{"y" if ctx.epilogue.saves_output else "x": kept})
        if grad_sum is not None:
            grad = grad_sum if grad is None else grad + grad_sum
        if grad is None:
            return (None,) * 6
        pair = both_gradients(needs[:2], x, weight, grad, edges, ctx.taps, groups, backend)
        return *pair, grad.sum(0) if needs[2] else None, grad if needs[3] else None, None, None


def _forward_fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue: Epilogue | None,
    edges: KernelMap,
    groups: int,
    backend: str,
) -> torch.Tensor:
    serving = serving_backend(edges, x, weight.shape, groups, backend)
    return serving.forward_fused(x, weight, edges, groups, bias, residual, epilogue)


def fused_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue: Epilogue | None,
    edges: Edges,
    groups: int = 1,
    backend: str = "auto",
) -> torch.Tensor:
    """epilogue(convolution + residual (N_out, C_out)): one kernel where a backend has one, the same numbers elsewhere.

    With a gradient, an activation whose derivative needs only its result (relu, sigmoid, tanh) is fused too and keeps
    nothing but y; for others the sum before it is kept, which is leaner than computing it again, and they run after it.
    A result is rounded once, to the dtype of x: on a CPU a sum that is kept for halves is fp32.
    """
    call, tensors = (edges, groups, backend), (x, weight, bias, residual)
    if residual is None and epilogue is None:
        return convolution(x, weight, bias, *call)
    with_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    watched = torch.compiler.is_compiling() or functional()
    if not with_gradient and not watched and is_plain(*tensors):
        return without_casts(x, _forward_fused, x, weight, bias, residual, epilogue, *call)
    apart = watched or not is_direct(*tensors)
    if x.dtype in _HALVES and x.device.type == "cpu" and (apart or not _keeps_result(epilogue)):
        more = [None if t is None else t.float() for t in (bias, residual)]  # the sum outlives its kernel: not rounded
        wide = fused_convolution(x.float(), weight.float(), more[0], more[1], epilogue, *call)
        return wide.to(x.dtype)
    if apart:
        z = convolution(x, weight, bias, *call)
        z = z if residual is None else z + residual
        return z if epilogue is None else epilogue.apply(z)
    result = _Fused.apply(x, weight, bias, residual, epilogue, call)
    return result[0] if isinstance(result, tuple) else result


def _keeps_result(epilogue: Epilogue | None) -> bool:
    """Whether the gradient needs nothing but what the epilogue gave."""
    return epilogue is None or epilogue.saves_output
