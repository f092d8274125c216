"""Bias, residual and activation in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from sparseconv.pointwise.decorator import pointwise_dynamic
from sparseconv.pointwise.epilogue import Epilogue
from sparseconv.pointwise.function import PointwiseDynamicFunction
from sparseconv.pointwise.operations.arithmetic import add_tensors, same
from sparseconv.pointwise.scalar import Composed
from sparseconv.pointwise.schema import Derivative

if TYPE_CHECKING:
    from jaxtyping import Shaped

Residual = Literal["before", "after"]


def chain(epilogue: Epilogue, *, bias: bool = True, residual: Residual | None = None) -> PointwiseDynamicFunction:
    """The pointwise function that adds and activates in one pass.

    residual "before": y = activation(x + bias + residual); "after": y = activation(x + bias) + residual

    Args:
        epilogue: the activation with its numbers.
        bias: whether a bias is the second argument.
        residual: whether, and where, a residual is added: the last argument.

    Returns:
        a pointwise function of (x, bias, residual), those of them that there are; all broadcast.

    Example:
        >>> from sparseconv.pointwise import relu
        >>> chain(Epilogue(relu))(torch.tensor([[1.0, -5.0]]), torch.tensor([2.0, 3.0]))
        tensor([[3., 0.]])
    """
    if residual not in (None, "before", "after"):
        raise ValueError(f"chain: residual is None, 'before' or 'after' the activation, but got {residual!r}")
    function: PointwiseDynamicFunction = epilogue.activation.derived(_make_chain, bias, residual, *epilogue.numbers)
    return function


def _make_chain(
    activation: PointwiseDynamicFunction, bias: bool, residual: Residual | None, *defaults: float
) -> PointwiseDynamicFunction:
    epilogue = Epilogue(activation, defaults)
    names = ["x", *(["bias"] if bias else []), *(["residual"] if residual else [])]
    summed = [name for name in names if name != "residual" or residual == "before"]
    numbers = [f"number{i}" for i in range(len(epilogue.numbers))]
    expression = f"inner({', '.join([' + '.join(summed), *numbers])})" + (" + residual" if residual == "after" else "")
    name = "_".join([activation.schema.name, *names[1:], *([residual] if residual else [])])
    parameters = ", ".join(names + numbers)
    scalar = Composed(name, parameters, expression, (("inner", activation.scalar_function),))

    def total(values: Any) -> Any:
        result = values[0]
        for value in values[1:]:
            result = result + value
        return result

    def reference(*args: Any) -> torch.Tensor:
        if activation.reference is None:
            raise TypeError(f"{name}: {activation.schema.name} has no reference= and cannot run on CPU tensors")
        y = activation.reference(total(args[: len(summed)]), *args[len(names) :])
        return y + args[len(names) - 1] if residual == "after" else y

    def gradient(grad: torch.Tensor, *args: Any) -> torch.Tensor:
        x = args[0]
        for value in args[1 : len(summed)]:
            x = add_tensors(x, value)
        return Epilogue(activation, args[len(summed) :]).input_grad(grad, x=x)

    def gradient_from_output(grad: torch.Tensor, y: torch.Tensor, *values: Any) -> torch.Tensor:
        return Epilogue(activation, values).input_grad(grad, y=y)

    extra = [f"in{len(names) + i}" for i in range(len(numbers))]
    if epilogue.saves_output and residual != "after":
        shared = Derivative(gradient_from_output, "grad0", "out0", *extra)
    else:
        shared = Derivative(gradient, "grad0", *(f"in{i}" for i in range(len(summed))), *extra)
    rule = activation.schema.outputs[0]
    derivative = {i: shared for i in range(len(summed))}
    if residual == "after":
        derivative[len(names) - 1] = Derivative(same, "grad0")
    function: PointwiseDynamicFunction = pointwise_dynamic(
        scalar,
        is_tensor=[True] * len(names) + [False] * len(numbers),
        dtypes=[None] * len(names) + list(activation.schema.scalar_types[1:]),
        promotion_methods=[(*range(len(names)), *(p + len(names) - 1 for p in rule.arguments if p), rule.kind)],
        reference=reference if activation.reference is not None else None,
        derivative=derivative if activation.differentiable else None,
        defaults=epilogue.numbers,
        doc=f"{expression.replace('inner', activation.schema.name)} in one pass.",
    )
    return function


def bias_activation(
    x: Shaped[torch.Tensor, "*#shape"],
    bias: Shaped[torch.Tensor, "*#shape"] | None = None,
    residual: Shaped[torch.Tensor, "*#shape"] | None = None,
    *,
    activation: PointwiseDynamicFunction | Epilogue,
    order: Residual = "before",
    out: Shaped[torch.Tensor, "*shape"] | None = None,
) -> Shaped[torch.Tensor, "*shape"]:
    """Bias, residual and activation in one pass: y = activation(x + bias + residual), broadcast.

    While torch.compile traces this, new functions cannot be made and the steps run one by one; a function that `chain`
    made beforehand stays one pass.

    Args:
        x: (N, C) or any shape.
        bias: (C,) or what broadcasts with x; None for none.
        residual: of the shape of x; None for none.
        activation: a pointwise function of one tensor, or an `Epilogue` of one.
        order: "before": the residual is added before the activation; "after": y = activation(x + bias) + residual.
        out: where to write; a new tensor by default.

    Returns:
        tensor of the broadcast shape and of the common dtype.

    Example:
        >>> from sparseconv.pointwise import silu
        >>> bias_activation(torch.zeros(1, 2), torch.tensor([0.0, 1.0]), activation=silu)
        tensor([[0.0000, 0.7311]])
    """
    epilogue = activation if isinstance(activation, Epilogue) else Epilogue(activation)
    if torch.compiler.is_compiling() and out is None:
        return _apart(x, bias, residual, epilogue, order)
    if bias is None and residual is None:
        return epilogue.activation(x, *epilogue.numbers, out=out) if out is not None else epilogue.apply(x)
    function = chain(epilogue, bias=bias is not None, residual=order if residual is not None else None)
    tensors = [t for t in (x, bias, residual) if t is not None]
    return function(*tensors, *epilogue.numbers, **({} if out is None else {"out": out}))


def _apart(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, epilogue: Epilogue, order: Residual
) -> torch.Tensor:
    """The same, one step after another."""
    if bias is not None:
        x = add_tensors(x, bias)
    if residual is not None and order == "before":
        x = add_tensors(x, residual)
    y = epilogue.apply(x)
    return add_tensors(y, residual) if residual is not None and order == "after" else y
