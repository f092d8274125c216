"""Operators that stand for several of a traced network: `sparseconv.compiler.fusion` puts them there.

On the scene's own rows, and on a CPU, each runs the operators that it stands for; over arrays of fixed capacity on a
GPU, one or two launches do.
"""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.compiler.operators import (
    batch_norm,
    batch_norm_back,
    define,
    has_dead_rows,
    held_by,
    implement,
    norm_back_of_kernels,
    norm_kernels,
    shape_of,
)
from sparseconv.plan.convolution import ConvolutionPlan

_ops: Any = torch.ops.sparseconv

define(
    "convolve_norm_act(Tensor plan, Tensor x, Tensor weight, Tensor? bias, SymInt rows, int groups,"
    " Tensor? norm_weight, Tensor? norm_bias, Tensor? mean, Tensor? var, float? eps, Tensor? residual,"
    " str activation, float[] numbers) -> Tensor",
    "batch_norm_act(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, Tensor count, float momentum,"
    " float eps, bool single, Tensor? residual, float slope) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "batch_norm_act_back(Tensor grad, Tensor x, Tensor y, Tensor? weight, Tensor? bias, Tensor mean, Tensor std,"
    " Tensor count, float eps, bool[] mask, bool added, float slope) -> (Tensor, Tensor, Tensor, Tensor)",
)

_ACTIVATIONS: dict[str, Any] = {
    "": lambda y: y,
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@implement("convolve_norm_act")
def _convolve_norm_act(
    plan: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    groups: int,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    eps: float | None,
    residual: torch.Tensor | None,
    activation: str,
    numbers: list[float],
) -> torch.Tensor:
    """activation(norm(convolution(x)) + residual) in evaluation."""
    kernels = norm_kernels() if has_dead_rows(x) else None
    if kernels is not None and kernels.on_kernels(x) and (norm_weight is None) == (norm_bias is None):
        from sparseconv import pointwise  # loaded where it is used

        if mean is not None and var is not None and eps is not None:
            weight, bias = kernels.folded(weight, bias, norm_weight, norm_bias, mean, var, eps, x.dtype)
        ready = held_by(plan, ConvolutionPlan).with_groups(groups)
        epilogue = pointwise.Epilogue(getattr(pointwise, activation), tuple(numbers)) if activation else None
        return ready.execute(x.contiguous(), weight, bias, residual=residual, epilogue=epilogue)
    weight = weight.to(x.dtype)
    y = _ops.convolve(plan, x, weight, bias, rows, groups, False)
    if mean is not None and var is not None:
        y = torch.nn.functional.batch_norm(y, mean, var, norm_weight, norm_bias, eps=eps or 0.0)
    y = y if residual is None else y + residual
    return _ACTIVATIONS[activation](y, *numbers)


@implement("batch_norm_act")
def _batch_norm_act(*given: Any) -> tuple[torch.Tensor, ...]:
    """act(norm(x) + residual) in training, act being max(z, slope * z), and what `batch_norm` returns besides."""
    return batch_norm(*given)


@implement("batch_norm_act_back")
def _batch_norm_act_back(
    grad: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    std: torch.Tensor,
    count: torch.Tensor,
    eps: float,
    mask: list[bool],
    added: bool,
    slope: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients by x, weight and bias, and where a residual was ``added``, by that; ``y`` is the result."""
    if has_dead_rows(x):
        back = norm_back_of_kernels(grad, x, y if added else None, weight, bias, mean, std, count, eps, slope)
        if back is not None:
            return *back[:3], back[3] if added else x.new_empty(0)
    gated = torch.where(y > 0, grad, 0 if slope == 0 else grad * slope)
    return *batch_norm_back(gated, x, weight, None, None, mean, std, count, True, eps, mask), gated


@shape_of("convolve_norm_act")
def _(plan, x, weight, bias, rows, groups, *_):  # type: ignore[no-untyped-def]
    return x.new_empty((rows, weight.shape[2]))


@shape_of("batch_norm_act")
def _(x, weight, bias, mean, var, count, momentum, eps, single, residual, slope):  # type: ignore[no-untyped-def]
    return _ops.batch_norm(x, weight, bias, mean, var, count, momentum, eps, single)


@shape_of("batch_norm_act_back")
def _(grad, x, y, weight, bias, mean, std, count, eps, mask, added, slope):  # type: ignore[no-untyped-def]
    like = x if weight is None else weight
    return torch.empty_like(x), like.new_empty(x.shape[1]), like.new_empty(x.shape[1]), torch.empty_like(x)
