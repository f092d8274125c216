"""What an argument must be: each question asked in one place, each wrong kind answered with what to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch


def check_tensor(name: str, value: object, wanted: str = "", several: str = "") -> None:
    """Raise TypeError unless ``value`` is a plain tensor: dense in memory, neither sparse, nested nor quantised.

    ``wanted`` says its shape and dtype in the message, ``several`` what to do with a list of tensors or arrays.

    >>> check_tensor("x", [1.0, 2.0])
    Traceback (most recent call last):
    TypeError: x must be a torch.Tensor, but it is a list: torch.tensor(x) makes one
    """
    if (
        not isinstance(value, torch.Tensor)
        or value.layout is not torch.strided
        or value.is_quantized
        or value.is_nested
    ):
        raise TypeError(_not_a_plain_tensor(name, value, wanted, several))


def check_values(name: str, value: torch.Tensor, wanted: str = "", several: str = "") -> None:
    """Raise TypeError unless ``value`` is a plain tensor, ValueError where it keeps no values, on the device meta."""
    check_tensor(name, value, wanted, several)
    if value.is_meta:
        raise ValueError(
            f"{name} must hold values, but it is on the device meta, which keeps none: make it on another device"
        )


def as_tensor(name: str, value: Any, device: torch.device | None = None) -> torch.Tensor:
    """A plain tensor of a tensor, an array or a nested list of numbers; TypeError for what holds no numbers."""
    if isinstance(value, np.ndarray) and any(step < 0 for step in value.strides):
        value = value.copy()  # which torch does not do by itself
    try:
        tensor = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"{name} must be a tensor, an array or a list of numbers, but it is {described(value)} "
            f"({shortened(value)}), of which torch says: {error}"
        ) from None
    check_tensor(name, tensor)
    return tensor


def _not_a_plain_tensor(name: str, value: Any, wanted: str, several: str) -> str:
    if not isinstance(value, torch.Tensor):
        kind = f"torch.Tensor, {wanted}" if wanted else "torch.Tensor"
        return f"{name} must be a {kind}, but it is {described(value)}: {_instead(name, value, several)}"
    if value.is_nested:
        return f"{name} must be one tensor, but it is a nested one: torch.cat({name}.unbind()) puts its items together"
    if value.is_quantized:
        return f"{name} must not be quantised, but its dtype is {value.dtype}: pass {name}.dequantize()"
    return (
        f"{name} must be dense in memory, but its layout is {value.layout}: pass {name}.to_dense(), or the values of "
        "its entries as features of a VoxelGrid of their indices"
    )


def _instead(name: str, value: object, several: str) -> str:
    if value is None:
        return "it cannot be left out here, so pass one"
    if hasattr(value, "grid") and hasattr(value, "features"):
        return f"pass its features, {name}.features, or give the whole to a module of sparseconv.nn"
    if hasattr(value, "__array__"):
        return f"torch.as_tensor({name}) makes one"
    if is_several(value):
        joined = joining(name, value)
        return several.format(joined=joined) if several else f"{joined} puts their rows together"
    if isinstance(value, (list, tuple, int, float, bool, range)):
        return f"torch.tensor({name}) makes one"
    return "pass the tensor that it stands for"


def is_several(value: object) -> bool:
    """Whether a value is a list or tuple of tensors or arrays, such as the scenes of a batch."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(getattr(item, "ndim", 0) for item in value)


def joining(name: str, value: Any) -> str:
    """The call that puts the rows of several tensors or arrays together."""
    tensors = isinstance(value[0], torch.Tensor)
    return f"torch.cat({name})" if tensors else f"torch.from_numpy(numpy.concatenate({name}))"


def described(value: object) -> str:
    """The kind of a value in words: ``None``, ``a list``, ``a numpy.ndarray``."""
    if value is None:
        return "None"
    kind = type(value)
    text = (
        kind.__name__
        if kind.__module__ in ("builtins", "torch")
        else f"{kind.__module__.split('.')[0]}.{kind.__name__}"
    )
    return f"{'an' if text[0] in 'aeiouAEIOU' else 'a'} {text}"


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], advice: str) -> None:
    """Raise TypeError unless ``value`` is one of ``kinds``; ``advice`` says how to come by one."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise TypeError(f"{name} must be a {wanted}, but it is {described(value)}: {advice}")


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raise TypeError unless ``value`` is an integer (a bool is none), ValueError where it is below ``least``."""
    if (type(value) is int and least <= value < 2**63) or isinstance(value, torch.SymInt):
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, but it is {described(value)} ({shortened(value)}): pass an int")
    if int(value) < least:
        raise ValueError(f"{name} must be at least {least}, but it is {value}: pass a larger one")
    if int(value) >= 2**63:
        raise ValueError(f"{name} must fit in 64 bits, but it is {value}: pass a smaller one")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of the names: TypeError for another kind, ValueError for another name."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(map(repr, choices))}, but it is {described(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, but it is {value!r}")


def warn(message: str) -> None:
    """A UserWarning at the line that called this library, so that Python shows it once for each such line."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "sparseconv":
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)


def as_device(value: object) -> torch.device:
    """The device of this name, with its number: TypeError for what names none, ValueError for one that torch lacks.

    >>> as_device("banana")
    Traceback (most recent call last):
    ValueError: 'banana' names no device of torch: pass 'cpu', 'cuda' or 'cuda:1'
    """
    if isinstance(value, torch.dtype):
        raise TypeError(
            f"device must name a device, but it is the dtype {value}: pass a dtype as dtype= where there is one"
        )
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise TypeError(
            f"device must be a torch.device or its name, but it is {described(value)}: pass 'cpu' or 'cuda'"
        )
    try:
        device = torch.device(value)
    except RuntimeError:
        raise ValueError(f"{value!r} names no device of torch: pass 'cpu', 'cuda' or 'cuda:1'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{value!r} asks for a GPU, but torch.cuda.is_available() is False here: stay on 'cpu'")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"no memory can be had on {value!r}: {str(error).splitlines()[0]}") from None


def shortened(value: object) -> str:
    """A value as text that fits into a message."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."
