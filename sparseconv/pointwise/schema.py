"""What a pointwise function is before any tensor is seen: its arguments, outputs, promotion and derivative."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from jaxtyping import Shaped

ScalarType = type[float] | type[int] | type[bool]


class Promotion(Enum):
    """How the dtype of an output follows from its arguments; the names are those of torch.

    `pointwise_dynamic` takes them by name, ``promotion_methods=[(0, "INT_TO_FLOAT")]``.

    >>> from sparseconv.pointwise import relu, sigmoid
    >>> [rule.kind.name for function in (relu, sigmoid) for rule in function.schema.outputs]
    ['DEFAULT', 'INT_TO_FLOAT']
    """

    DEFAULT = 0  # add: the common dtype, halves computed in fp32
    NO_OPMATH = 1  # where: the common dtype, computed as it is
    INT_TO_FLOAT = 2  # sin: integers become the default float dtype
    ALWAYS_BOOL = 3  # eq: the answer is a bool
    COMPLEX_TO_FLOAT = 4  # abs: complex becomes its real dtype
    BOOL_TO_LONG = 5  # pow: bools become int64


@dataclass(frozen=True)
class OutputRule:
    """The dtype of one output: the promotion ``kind`` of the arguments at ``arguments``."""

    arguments: tuple[int, ...]
    kind: Promotion


@dataclass(frozen=True)
class Config:
    """The tile and launch configuration of a kernel; None chooses by the layout of the operands.

    Args:
        tile_axes: how many axes a tile spans at most, 1 or 2. Two lets operands of different stride order each be read
            along their own fast axis.
        elements: elements in a tile, a power of two.
        columns: of them along the fastest axis, a power of two.
        num_warps: warps in a program.

    >>> Config(num_warps=3)
    Traceback (most recent call last):
    ValueError: Config(num_warps=) is None or a power of two, but 3 was given
    """

    tile_axes: int = 2
    elements: int | None = None
    columns: int | None = None
    num_warps: int | None = None

    def __post_init__(self) -> None:
        if self.tile_axes not in (1, 2):
            raise ValueError(f"Config(tile_axes=) is 1 or 2, but {self.tile_axes!r} was given")
        for name in ("elements", "columns", "num_warps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1 or value & (value - 1)):
                raise ValueError(f"Config({name}=) is None or a power of two, but {value!r} was given")


@dataclass(frozen=True)
class Derivative:
    """The gradient with respect to one tensor argument, and what it is computed from.

    ``function(*arguments)`` gives the gradient in the shape of the output (it is then summed over broadcast axes);
    ``arguments`` names them: ``grad0, grad1, ...`` the gradients of the outputs, ``in0, in1, ...`` the arguments of the
    call by position, ``out0, out1, ...`` its outputs. Of complex arguments it is the gradient as torch takes it: the
    gradient of ``x * y`` by x is ``grad * y.conj()``. Only tensors that are named are kept for the backward pass. The
    function is a pointwise function, or any composition of differentiable ones.

    Example:
        >>> Derivative(lambda grad, y: grad * y, "grad0", "in1").arguments
        ('grad0', 'in1')
    """

    function: Callable[..., Shaped[torch.Tensor, " ..."]]
    arguments: tuple[str, ...]

    def __init__(self, function: Callable[..., Shaped[torch.Tensor, " ..."]], *arguments: str) -> None:
        if not callable(function):
            raise TypeError(f"Derivative takes a function and names of its arguments, but got {function!r}")
        for name in arguments:
            if not re.fullmatch(r"(grad|in|out)\d+", name):
                raise ValueError(f"Derivative: arguments are named grad0, in0 or out0 and so on, but got {name!r}")
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "arguments", arguments)


@dataclass(frozen=True)
class Schema:
    """The signature of a pointwise function.

    Args:
        name: what the kernels are called in profiles, tracebacks and cache files.
        is_tensor: for each argument, whether it is a tensor.
        scalar_types: for each argument, float, int or bool for a number, None for a tensor or an undeclared number.
        outputs: the dtype rule of each output.
        index: the function takes, after its arguments, the row-major linear index of the element (int64).
        gather: argument -> argument; the first axis of the former is addressed by the values of the latter.
    """

    name: str
    is_tensor: tuple[bool, ...]
    scalar_types: tuple[ScalarType | None, ...]
    outputs: tuple[OutputRule, ...]
    index: bool = False
    gather: tuple[tuple[int, int], ...] = field(default=())

    @property
    def num_inputs(self) -> int:
        return len(self.is_tensor)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Positions of the tensor arguments."""
        return tuple(i for i, flag in enumerate(self.is_tensor) if flag)

    @cached_property
    def scalars(self) -> tuple[int, ...]:
        """Positions of the arguments that are numbers."""
        return tuple(i for i, flag in enumerate(self.is_tensor) if not flag)


def make_schema(
    name: str,
    *,
    is_tensor: Sequence[bool] | None,
    dtypes: Sequence[Any] | None,
    num_inputs: int | None,
    num_outputs: int | None,
    promotion_methods: Sequence[Any] | None,
    index: bool,
    gather: Mapping[int, int] | None,
) -> Schema:
    """The schema that the arguments of the decorator describe, or an error that names what does not fit."""
    if num_inputs is None:
        known = [len(given) for given in (is_tensor, dtypes) if given is not None]
        if not known:
            raise ValueError(f"{name}: num_inputs is not known; give num_inputs=, is_tensor= or dtypes=")
        num_inputs = known[0]
    flags = tuple(is_tensor) if is_tensor is not None else (True,) * num_inputs
    if any(not isinstance(flag, bool) for flag in flags):
        raise TypeError(f"{name}: is_tensor is a list of bools, but got {list(flags)}")
    types = tuple(dtypes) if dtypes is not None else (None,) * num_inputs
    for what, given in (("is_tensor", flags), ("dtypes", types)):
        if len(given) != num_inputs:
            raise ValueError(f"{name}: {what} has {len(given)} entries, but the function takes {num_inputs} arguments")
    if not any(flags):
        raise ValueError(f"{name}: at least one argument must be a tensor, since shape and device come from tensors")
    scalar_types = tuple(None if flag else _scalar_type(name, i, types[i]) for i, flag in enumerate(flags))
    rules = _rules(name, num_inputs, num_outputs, promotion_methods)
    pairs = tuple(sorted((gather or {}).items()))
    for target, source in pairs:
        if not (0 <= target < num_inputs and 0 <= source < num_inputs and flags[target] and flags[source]):
            raise ValueError(f"{name}: gather={{{target}: {source}}} must join two tensor arguments")
        if source in (gather or {}):
            raise ValueError(f"{name}: gather={{{target}: {source}}}: argument {source} is itself gathered")
    return Schema(name, flags, scalar_types, rules, bool(index), pairs)


def _scalar_type(name: str, position: int, given: Any) -> ScalarType | None:
    if given is None:
        return None
    if given in (float, int, bool):
        return given
    if isinstance(given, torch.dtype):
        return bool if given is torch.bool else float if given.is_floating_point else int
    by_name: dict[str, ScalarType] = {"float": float, "int": int, "bool": bool}
    if isinstance(given, str) and given in by_name:
        return by_name[given]
    raise TypeError(f"{name}: dtypes[{position}] is float, int, bool or None, but got {given!r}")


def _rules(
    name: str, num_inputs: int, num_outputs: int | None, methods: Sequence[Any] | None
) -> tuple[OutputRule, ...]:
    if not methods:
        raise ValueError(
            f"{name}: promotion_methods= is required, one entry per output such as (0, 1, 'DEFAULT'), "
            f"because the dtype of an output cannot be guessed"
        )
    rules = tuple(_rule(name, num_inputs, entry) for entry in methods)
    if num_outputs is not None and len(rules) != num_outputs:
        raise ValueError(f"{name}: num_outputs={num_outputs}, but promotion_methods has {len(rules)} entries")
    return rules


def _rule(name: str, num_inputs: int, entry: Any) -> OutputRule:
    if not isinstance(entry, (tuple, list)) or len(entry) < 2:
        raise TypeError(
            f"{name}: an entry of promotion_methods is (0, 1, 'DEFAULT') or ((0, 1), 'DEFAULT'), not {entry!r}"
        )
    *positions, kind = entry
    if len(positions) == 1 and isinstance(positions[0], (tuple, list)):
        positions = list(positions[0])
    for position in positions:
        if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position < num_inputs:
            raise ValueError(
                f"{name}: promotion_methods names argument {position!r}; arguments are 0..{num_inputs - 1}"
            )
    if not positions:
        raise ValueError(f"{name}: an entry of promotion_methods names no argument: {entry!r}")
    kind_name = kind.name if isinstance(kind, Enum) else kind
    if not isinstance(kind_name, str) or kind_name not in Promotion.__members__:
        raise ValueError(f"{name}: promotion is one of {', '.join(Promotion.__members__)}, but got {kind!r}")
    return OutputRule(tuple(positions), Promotion[kind_name])
