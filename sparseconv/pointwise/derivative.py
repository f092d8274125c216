"""Gradients of a pointwise function from its declared derivatives, or through its twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.pointwise.schema import Derivative

if TYPE_CHECKING:
    from sparseconv.pointwise.function import PointwiseDynamicFunction
    from sparseconv.pointwise.launch import Plan


def wanted_names(function: PointwiseDynamicFunction, needed: Sequence[bool]) -> tuple[str, ...]:
    """The arguments and outputs that the gradients of these arguments are computed from."""
    if function.derivative is None:
        return tuple(f"in{i}" for i in range(function.schema.num_inputs))
    names: dict[str, None] = {}
    for i, derivative in function.derivative.items():
        if needed[i]:
            names.update(dict.fromkeys(n for n in derivative.arguments if not n.startswith("grad")))
    return tuple(names)


def keep(
    ctx: Any,
    function: PointwiseDynamicFunction,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    needed: Sequence[bool],
) -> None:
    """Save for the backward pass what the gradients asked for need, and no more."""
    tensors, numbers = [], {}
    names = []
    for name in wanted_names(function, needed):
        value = inputs[int(name[2:])] if name[0] == "i" else outputs[int(name[3:])]
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            names.append(name)
        else:
            numbers[name] = value
    ctx.save_for_backward(*tensors)
    ctx.tensor_names, ctx.numbers = names, numbers
    ctx.forms = {i: (inputs[i].shape, inputs[i].dtype) for i in function.schema.tensors if needed[i]}


def gradients(ctx: Any, function: PointwiseDynamicFunction, grads: Sequence[Any]) -> list[Any]:
    """The gradient of every argument, None where there is none."""
    values: dict[str, Any] = dict(zip(ctx.tensor_names, ctx.saved_tensors))
    values.update(ctx.numbers)
    values.update({f"grad{j}": g for j, g in enumerate(grads)})
    wanted = list(ctx.shapes)
    found = (
        _declared(function, wanted, values)
        if function.derivative is not None
        else _through_twin(function, wanted, values)
    )
    results: list[Any] = [None] * function.schema.num_inputs
    for i, grad in found.items():
        if grad is not None:
            shape, dtype = ctx.forms[i]
            grad = _reduce(grad, shape)
            results[i] = grad if grad.dtype is dtype else grad.to(dtype)
    return results


def _declared(function: PointwiseDynamicFunction, wanted: Sequence[int], values: dict[str, Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    computed: list[tuple[Derivative, Any]] = []  # arguments that share a derivative share its result
    for i in wanted:
        derivative = (function.derivative or {}).get(i)
        if derivative is None:
            continue
        known = next((grad for other, grad in computed if other is derivative), None)
        if known is None:
            known = derivative.function(*[values[name] for name in derivative.arguments])
            computed.append((derivative, known))
        found[i] = known
    return found


def _through_twin(function: PointwiseDynamicFunction, wanted: Sequence[int], values: dict[str, Any]) -> dict[int, Any]:
    schema = function.schema
    args = [values[f"in{i}"] for i in range(schema.num_inputs)]
    again_differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        outputs = function.twin(args)
        pairs = [(y, values[f"grad{j}"]) for j, y in enumerate(outputs) if y.requires_grad]
        if not pairs:
            return {}
        grads = torch.autograd.grad(
            [y for y, _ in pairs],
            [args[i] for i in wanted],
            [g for _, g in pairs],
            create_graph=again_differentiable,
            allow_unused=True,
        )
    return dict(zip(wanted, grads))


def _reduce(grad: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Sum over the axes along which the argument was repeated."""
    return grad if grad.shape == shape else grad.sum_to_size(shape)


class Differentiable(torch.autograd.Function):
    """One call of a pointwise function as a node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, function: PointwiseDynamicFunction, plan: Plan | None, addresses: Any, numbers: Any, *args: Any
    ) -> Any:
        ctx.function = function
        result = function.evaluate(args) if plan is None else plan.fresh(addresses, numbers)
        outputs = [result] if isinstance(result, torch.Tensor) else result
        keep(ctx, function, args, outputs, ctx.needs_input_grad[4:])
        fixed = [y for y in outputs if not (y.is_floating_point() or y.is_complex())]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, None, None, *gradients(ctx, ctx.function, grads))
