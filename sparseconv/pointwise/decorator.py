"""The decorator that makes a pointwise operator of a scalar function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparseconv.pointwise.function import PointwiseDynamicFunction
from sparseconv.pointwise.scalar import ScalarFunction
from sparseconv.pointwise.schema import Config, Derivative, Schema, make_schema


def pointwise_dynamic(
    function: Any = None,
    *,
    is_tensor: Sequence[bool] | None = None,
    dtypes: Sequence[Any] | None = None,
    num_inputs: int | None = None,
    num_outputs: int | None = None,
    promotion_methods: Sequence[Any] | None = None,
    config: Config | None = None,
    reference: Callable[..., Any] | None = None,
    derivative: Mapping[int, Any] | Sequence[Any] | None = None,
    index: bool = False,
    gather: Mapping[int, int] | None = None,
    autocast: torch.dtype | None = None,
    defaults: Sequence[Any] | None = None,
    name: str | None = None,
    doc: str | None = None,
) -> Any:
    """Make a pointwise operator of a ``triton.jit`` function of scalars.

    out[i] = function(in0[i], in1[i], ..., numbers), over the broadcast shape of the tensor arguments.

    The scalar function sees its arguments in the dtype of the computation (fp32 for halves, except under NO_OPMATH),
    numbers too; what it returns is cast to the dtype of the output.

    Args:
        is_tensor: for each argument, whether it is a tensor (default) or a number.
        dtypes: for each argument that is a number, float, int or bool; else None. An undeclared number keeps its kind.
        num_inputs: arguments, where the function's signature does not tell.
        num_outputs: outputs, checked against ``promotion_methods``.
        promotion_methods: for each output ``(0, 1, "DEFAULT")`` or ``((0, 1), Promotion.DEFAULT)``: the arguments that
            its dtype depends on, and how.
        config: how kernels are cut.
        reference: the twin, a torch function of the same arguments, in the dtypes that the scalar function would see;
            it runs on CPU tensors.
        derivative: for each tensor argument a `Derivative`, or a function of (gradients of the outputs, arguments), or
            None where the gradient is zero; a mapping by position or a sequence. Without it the twin is differentiated.
        index: the scalar function and the twin take, last, the row-major linear index of the element.
        gather: argument -> argument; the first axis of the former is addressed by the integer values of the latter.
        autocast: the dtype to which autocast brings half precision arguments.
        defaults: values of the last arguments, where a call leaves them out; those of the signature by default.
        name: of kernels and of the operator; that of the function by default.
        doc: the docstring of the operator; that of the function by default.

    Returns:
        PointwiseDynamicFunction, or a decorator. It is pickled by its name in the module that calls this.

    Example:
        >>> import triton
        >>> @pointwise_dynamic(promotion_methods=[(0, 1, "DEFAULT")], reference=lambda x, y: x * x + y)
        ... @triton.jit
        ... def square_add(x, y):
        ...     return x * x + y
        >>> square_add(torch.arange(3), torch.ones(2, 1))
        tensor([[1., 2., 5.],
                [1., 2., 5.]])
    """

    module = sys._getframe(1).f_globals.get("__name__", __name__)

    def make(given: Any) -> PointwiseDynamicFunction:
        scalar = ScalarFunction(given)
        own = name or scalar.name
        counted = num_inputs
        if counted is None and scalar.num_parameters is not None:
            counted = scalar.num_parameters - bool(index)
        schema = make_schema(
            own,
            is_tensor=is_tensor,
            dtypes=dtypes,
            num_inputs=counted,
            num_outputs=num_outputs,
            promotion_methods=promotion_methods,
            index=index,
            gather=gather,
        )
        made = PointwiseDynamicFunction(
            scalar,
            schema,
            reference=reference,
            derivative=_derivatives(schema, derivative),
            config=config,
            autocast=autocast,
            defaults=scalar.defaults if defaults is None else defaults,
            doc=doc,
        )
        made.__module__ = module
        return made

    return make if function is None else make(function)


def _derivatives(schema: Schema, given: Any) -> dict[int, Derivative] | None:
    if given is None:
        return None
    pairs = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
    names = [f"grad{j}" for j in range(schema.num_outputs)] + [f"in{i}" for i in range(schema.num_inputs)]
    found = {}
    for i, entry in pairs.items():
        if entry is None:
            continue
        if i not in schema.tensors:
            raise ValueError(f"{schema.name}: derivative= names argument {i!r}, which is not one of its tensors")
        entry = entry if isinstance(entry, Derivative) else Derivative(entry, *names)
        unknown = set(entry.arguments) - {*names, *(f"out{j}" for j in range(schema.num_outputs))}
        if unknown:
            raise ValueError(f"{schema.name}: derivative= uses {sorted(unknown)}, which the function does not have")
        found[i] = entry
    return found
