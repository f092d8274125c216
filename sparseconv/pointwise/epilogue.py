"""An activation with its numbers, to be inlined in the store of another kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.pointwise.derivative import through_twin
from sparseconv.pointwise.function import PointwiseDynamicFunction
from sparseconv.pointwise.metadata import dtypes_of
from sparseconv.pointwise.scalar import Composed, ScalarFunction

if TYPE_CHECKING:
    from jaxtyping import Shaped

#: functions of torch that give the same in place
IN_PLACE = {torch.relu: torch.relu_, torch.sigmoid: torch.sigmoid_, torch.tanh: torch.tanh_}


@dataclass(frozen=True)
class Epilogue:
    """A pointwise function with all arguments but the first tensor fixed: y = activation(x, *numbers).

    A kernel that has x in registers calls ``epilogue.scalar(x)``; where there is no such kernel ``apply(x)`` runs by
    itself, with the same numbers and gradients. Two epilogues of one activation and the same numbers are equal.

    Args:
        activation: a function made with `pointwise_dynamic`: its first argument is a tensor, the others are numbers, it
            has one output and takes neither index nor gathered arguments.
        numbers: the other arguments; those left out take their defaults.

    Raises:
        TypeError, ValueError: if the function does not have this form, or numbers are missing.

    Example:
        >>> from sparseconv.pointwise import leaky_relu
        >>> Epilogue(leaky_relu, (0.1,)).apply(torch.tensor([-1.0, 2.0]))
        tensor([-0.1000,  2.0000])
    """

    activation: PointwiseDynamicFunction
    numbers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        function = self.activation
        if not isinstance(function, PointwiseDynamicFunction):
            raise TypeError(
                f"Epilogue takes a function made with pointwise_dynamic, whose scalar function a kernel can call, "
                f"but got {function!r}"
            )
        schema = function.schema
        if schema.tensors != (0,) or schema.num_outputs != 1 or schema.index or schema.gather:
            raise ValueError(
                f"Epilogue: {schema.name} cannot be fused; an activation maps one tensor, its first argument, to one "
                f"output, but this one has {len(schema.tensors)} tensors and {schema.num_outputs} outputs"
                + (", and takes the index" if schema.index else "")
            )
        numbers = tuple(self.numbers)
        missing = schema.num_inputs - 1 - len(numbers)
        if not 0 <= missing <= len(function.defaults):
            raise ValueError(f"Epilogue: {schema.name} takes {schema.num_inputs - 1} numbers, but got {len(numbers)}")
        numbers += function.defaults[len(function.defaults) - missing :]
        for i, value in enumerate(numbers):
            if not isinstance(value, (int, float)):
                raise TypeError(f"Epilogue: number {i} of {schema.name} is an int or float, but got {value!r}")
        object.__setattr__(self, "numbers", numbers)

    @property
    def scalar(self) -> Any:
        """The jitted function of x alone, the numbers being constants in it; importing Triton happens here."""
        return self.activation.derived(with_constants, *self.numbers).jitted

    @property
    def saves_output(self) -> bool:
        """Whether the gradient needs y alone, so that x need be neither kept nor computed again."""
        derivative = (self.activation.derivative or {}).get(0)
        return derivative is not None and "in0" not in derivative.arguments

    def apply(self, x: Shaped[torch.Tensor, "*shape"]) -> Shaped[torch.Tensor, "*shape"]:
        """activation(x, *numbers), differentiable: x (any shape) -> the same shape."""
        return self.activation(x, *self.numbers)

    def over(self, x: Shaped[torch.Tensor, "*shape"]) -> Shaped[torch.Tensor, "*shape"]:
        """`apply` to a plain floating tensor without a gradient that nobody reads again: it may be written over.

        >>> from sparseconv.pointwise import relu
        >>> Epilogue(relu).over(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
        """
        reference: Any = self.activation.reference
        write = IN_PLACE.get(reference) if x.device.type == "cpu" else None
        return self.apply(x) if write is None else write(x)

    def input_grad(
        self,
        grad: Shaped[torch.Tensor, "*shape"],
        *,
        x: Shaped[torch.Tensor, "*shape"] | None = None,
        y: Shaped[torch.Tensor, "*shape"] | None = None,
    ) -> Shaped[torch.Tensor, "*shape"]:
        """dL/dx from dL/dy and x, or y where ``saves_output``; differentiable again.

        Args:
            grad: dL/dy.
            x: what the activation was applied to.
            y: what it gave; computed again from x where it is needed and not given.

        Example:
            >>> from sparseconv.pointwise import relu
            >>> Epilogue(relu).input_grad(torch.ones(2), y=torch.tensor([0.0, 3.0]))
            tensor([0., 1.])
        """
        name = self.activation.schema.name
        if not self.activation.differentiable:
            raise ValueError(f"Epilogue: {name} has neither derivative= nor reference= and cannot be differentiated")
        if self.activation.derivative is None:
            return self._through_twin(grad, x)
        derivative = self.activation.derivative.get(0)
        if derivative is None:
            return torch.zeros_like(grad)
        values: dict[str, Any] = {"grad0": grad, "in0": x, "out0": y}
        values.update({f"in{i + 1}": value for i, value in enumerate(self.numbers)})
        if "in0" in derivative.arguments and x is None:
            raise ValueError(f"Epilogue: the gradient of {name} needs x, what it was applied to")
        if "out0" in derivative.arguments and y is None:
            if x is None:
                raise ValueError(f"Epilogue: the gradient of {name} needs y, its result, or x")
            values["out0"] = self.apply(x)
        return derivative.function(*[values[argument] for argument in derivative.arguments])

    def _through_twin(self, grad: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        if x is None:
            raise ValueError(f"Epilogue: the gradient of {self.activation.schema.name} needs x, what it was applied to")
        if x.shape != grad.shape:  # of a sum with a larger tensor
            x = x.expand(torch.broadcast_shapes(x.shape, grad.shape))
        args = (x, *self.numbers)
        (dtype,) = dtypes_of(self.activation.schema, args).results
        values = {f"in{i}": value for i, value in enumerate(args)} | {"grad0": grad.to(dtype)}
        found: torch.Tensor | None = through_twin(self.activation, (0,), values).get(0)
        return torch.zeros_like(x) if found is None else found

    def __repr__(self) -> str:
        return f"Epilogue({', '.join([self.activation.schema.name, *map(repr, self.numbers)])})"


def with_constants(activation: PointwiseDynamicFunction, *numbers: float) -> ScalarFunction:
    """x -> activation(x, *numbers) as one scalar function; equal epilogues share it, and with it compiled kernels."""
    if not numbers:
        return activation.scalar_function
    arguments = ", ".join(["x", *(_literal(value) for value in numbers)])
    inner = (("inner", activation.scalar_function),)
    return ScalarFunction(Composed(f"{activation.schema.name}_epilogue", "x", f"inner({arguments})", inner))


def _literal(value: float) -> str:
    """The number in Python's words, also where it is of a subclass, such as numpy's, that has words of its own."""
    plain = next(kind(value) for kind in (bool, int, float) if isinstance(value, kind))
    return repr(plain) if plain - plain == 0 else f'float("{plain}")'
