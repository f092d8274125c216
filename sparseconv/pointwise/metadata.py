"""What a call will produce, from its arguments alone: shape, strides, dtypes and device of the outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparseconv.checks import check_tensor
from sparseconv.pointwise import promotion
from sparseconv.pointwise.kernel import layout
from sparseconv.pointwise.promotion import Dtypes, Operand
from sparseconv.pointwise.schema import Schema
from sparseconv.pointwise.strided import StridedBuffer


@dataclass(frozen=True)
class Metadata:
    """``shape`` and ``strides`` of new outputs, ``operands`` the strides of the tensor arguments over that shape."""

    shape: layout.Ints
    strides: layout.Ints
    operands: tuple[layout.Ints, ...]
    dtypes: Dtypes

    def allocate(self, device: torch.device) -> list[torch.Tensor]:
        return [torch.empty_strided(self.shape, self.strides, dtype=t, device=device) for t in self.dtypes.results]


def check_arguments(schema: Schema, args: Sequence[Any]) -> None:
    """Raise TypeError unless the arguments have the number and kinds that the schema asks for."""
    if len(args) != schema.num_inputs:
        raise TypeError(
            f"{schema.name} takes {schema.num_inputs} positional arguments, but got {len(args)}: {describe(args)}"
        )
    for i, (value, flag) in enumerate(zip(args, schema.is_tensor)):
        if flag:
            if not isinstance(value, (torch.Tensor, StridedBuffer)):
                raise TypeError(f"{schema.name}: argument {i} is a tensor, but got {describe([value])}")
            if isinstance(value, torch.Tensor):
                check_tensor(f"{schema.name}: argument {i}", value)
            continue
        kind = schema.scalar_types[i] or float
        numbers = (
            (bool,)
            if kind is bool
            else (int, torch.SymInt)
            if kind is int
            else (int, float, torch.SymFloat, torch.SymInt)
        )
        if not isinstance(value, numbers) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{schema.name}: argument {i} is a number ({kind.__name__}), but got {describe([value])}")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise ValueError(f"{schema.name}: argument {i} must fit in 64 bits, but got {describe([value])}")


def check_devices(schema: Schema, args: Sequence[Any]) -> torch.device:
    """The one device of the tensor arguments; 0-d CPU tensors go with any."""
    arrays = [args[i] for i in schema.tensors]
    devices = {a.device for a in arrays if not (a.device.type == "cpu" and len(a.shape) == 0)}
    if len(devices) > 1:
        raise ValueError(
            f"{schema.name}: tensors must be on one device, but got {describe(arrays)}; move them with .to(device)"
        )
    return devices.pop() if devices else arrays[0].device


def infer(schema: Schema, args: Sequence[Any]) -> Metadata:
    """Shape, strides and dtypes of the outputs; arguments may be tensors, fake tensors or StridedBuffers."""
    gathered = {i for i, _ in schema.gather}
    shapes, strides = [], []
    for i in schema.tensors:
        shape, step = tuple(args[i].shape), tuple(args[i].stride())
        if i in gathered:
            if not shape:
                raise ValueError(f"{schema.name}: argument {i} is gathered along its first axis, but has none")
            shape, step = (1, *shape[1:]), (0, *step[1:])
        shapes.append(shape)
        strides.append(step)
    shape = layout.broadcast_shape(shapes, schema.name)
    operands = tuple(layout.broadcast_strides(n, s, shape) for n, s in zip(shapes, strides))
    return Metadata(shape, layout.output_strides(shape, operands), operands, dtypes_of(schema, args))


def dtypes_of(schema: Schema, args: Sequence[Any]) -> Dtypes:
    """The dtypes of a call's results and of its computation."""
    operands = []
    for value, flag, kind in zip(args, schema.is_tensor, schema.scalar_types):
        if flag:
            operands.append(Operand(value.dtype, 2 if len(value.shape) else 1))
        elif isinstance(value, bool):
            operands.append(Operand.of_number(bool))
        else:
            integer = kind is int or (kind is None and isinstance(value, (int, torch.SymInt)))
            operands.append(Operand.of_number(int if integer else float))
    return promotion.resolve(schema, tuple(operands))


def check_output(
    name: str, which: str, out: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless ``out`` can take a result of this shape, dtype and device."""
    if not isinstance(out, (torch.Tensor, StridedBuffer)):
        raise TypeError(f"{name}: {which}= takes a tensor, but got {describe([out])}")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{name}: {which}= has shape {tuple(out.shape)}, but the result has shape {tuple(shape)}")
    if promotion.category(dtype) > promotion.category(out.dtype):
        raise TypeError(f"{name}: {which}= has dtype {out.dtype}, to which a result of {dtype} cannot be cast")
    if out.device != device:
        raise ValueError(f"{name}: {which}= is on {out.device}, but the arguments are on {device}")
    steps = sorted((abs(s), n) for n, s in zip(out.shape, out.stride()) if n > 1)
    reach = 0
    for step, size in steps:
        if step <= reach:
            raise ValueError(
                f"{name}: {which}= has shape {tuple(out.shape)} and strides {tuple(out.stride())}, so that several of "
                f"its elements may share one address; write to a clone"
            )
        reach += step * (size - 1)


def check_aliasing(schema: Schema, which: str, out: Any, args: Sequence[Any]) -> None:
    """Raise if ``out`` shares memory with an argument other than element for element, or with a negated tensor."""
    if isinstance(out, torch.Tensor) and out.is_neg():
        raise ValueError(f"{schema.name}: {which}= is a lazily negated view; pass a clone")
    gathered = dict(schema.gather)  # whose elements serve other rows than their own
    for i, value in enumerate(args):
        if not isinstance(value, (torch.Tensor, StridedBuffer)) or separate(value, out):
            continue
        same = (
            value.data_ptr() == out.data_ptr() and value.dtype == out.dtype and tuple(value.shape) == tuple(out.shape)
        )
        same = same and all(n == 1 or a == b for n, a, b in zip(out.shape, out.stride(), value.stride()))
        if not same or i in gathered:
            raise ValueError(
                f"{schema.name}: {which}= shares memory with argument {i} in another "
                f"{'order' if i in gathered else 'layout'}, so that elements would be overwritten before they are "
                f"read; pass a clone of one of them"
            )


def separate(a: Any, b: Any) -> bool:
    """Whether no element of one array shares memory with one of the other."""
    (low, high), (first, last) = span(a), span(b)
    return a.device != b.device or last < low or high < first or _interleaved(a, b)


def span(array: Any) -> tuple[int, int]:
    """The addresses of the first and last byte of an array."""
    reach = [s * (n - 1) for n, s in zip(array.shape, array.stride())]
    size, start = array.element_size(), array.data_ptr()
    if 0 in array.shape:
        return start, start - 1
    return start + size * sum(r for r in reach if r < 0), start + size * (sum(r for r in reach if r > 0) + 1) - 1


def _dense(array: Any) -> bool:
    low, high = span(array)
    return high - low + 1 == array.numel() * array.element_size()


def _interleaved(a: Any, b: Any) -> bool:
    """Two views of equal strides between whose elements the other's lie, such as x[::2] and x[1::2]."""
    if a.element_size() != b.element_size() or _dense(a) or _dense(b):
        return False
    steps = {abs(s) for view in (a, b) for n, s in zip(view.shape, view.stride()) if n > 1}
    if not steps or 0 in steps:
        return False
    return (a.data_ptr() - b.data_ptr()) // a.element_size() % math.gcd(*steps) != 0


def describe(values: Sequence[Any]) -> str:
    """The arguments in words for an error message."""
    words = []
    for v in values:
        if isinstance(v, (torch.Tensor, StridedBuffer)):
            words.append(f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)} on {v.device}")
        else:
            words.append(f"{type(v).__name__} {v!r:.40}")
    return ", ".join(words)
