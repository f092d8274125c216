"""Dtypes of outputs and of the computation, by torch's rules for elementwise operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from sparseconv.pointwise.schema import OutputRule, Promotion, Schema

_HALVES = (torch.float16, torch.bfloat16)
_REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX_OF = {torch.float16: torch.complex32, torch.float64: torch.complex128}


@dataclass(frozen=True)
class Operand:
    """All that promotion asks of an argument: its dtype, and how much say it has (2 tensor, 1 0-d tensor, 0 number)."""

    dtype: torch.dtype
    weight: int

    @staticmethod
    def of_number(kind: type) -> Operand:
        dtypes = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
        return Operand(dtypes[kind], 0)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one call: ``results`` of the outputs, ``compute`` in which the function sees each argument."""

    results: tuple[torch.dtype, ...]
    compute: tuple[torch.dtype, ...]


def result_type(operands: Iterable[Operand]) -> torch.dtype:
    """The common dtype: tensors with axes decide, unless a 0-d tensor or a number is of a higher category."""
    by_weight: list[torch.dtype | None] = [None, None, None]
    for operand in operands:
        before = by_weight[operand.weight]
        by_weight[operand.weight] = operand.dtype if before is None else torch.promote_types(before, operand.dtype)
    number, zero_dim, common = by_weight
    return _combine(common, _combine(zero_dim, number)) or torch.get_default_dtype()


def category(dtype: torch.dtype) -> int:
    """How much a dtype holds: 0 bool, 1 integers, 2 floats, 3 complex numbers; each is cast to its own or a higher."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return higher or lower
    if category(higher) >= category(lower):
        return higher
    if lower.is_complex and higher.is_floating_point:
        return _COMPLEX_OF.get(higher, torch.complex64)
    return torch.promote_types(higher, lower)


def promote(rule: OutputRule, operands: Sequence[Operand]) -> tuple[torch.dtype, torch.dtype]:
    """(compute dtype, result dtype) of one output.

    Example:
        >>> rule = OutputRule((0, 1), Promotion.DEFAULT)
        >>> promote(rule, (Operand(torch.float16, 2), Operand.of_number(float)))
        (torch.float32, torch.float16)
    """
    common = result_type(operands[i] for i in rule.arguments)
    if rule.kind is Promotion.INT_TO_FLOAT and category(common) < 2:
        common = torch.get_default_dtype()
    if rule.kind is Promotion.BOOL_TO_LONG and common is torch.bool:
        common = torch.int64
    result = common
    if rule.kind is Promotion.ALWAYS_BOOL:
        result = torch.bool
    elif rule.kind is Promotion.COMPLEX_TO_FLOAT:
        result = _REAL_OF.get(common, common)
    if rule.kind is Promotion.NO_OPMATH:
        return common, result
    if common in _HALVES:
        return torch.float32, result
    return (torch.complex64 if common is torch.complex32 else common), result


def resolve(schema: Schema, operands: tuple[Operand, ...]) -> Dtypes:
    """The dtypes of a call. An argument that no promotion names keeps its own; a float number keeps fp64 with fp64."""
    return _resolve(schema, operands, torch.get_default_dtype())


@lru_cache(maxsize=4096)
def _resolve(schema: Schema, operands: tuple[Operand, ...], default: torch.dtype) -> Dtypes:
    results = []
    compute: list[torch.dtype | None] = [None] * schema.num_inputs
    widest: torch.dtype | None = None
    for rule in schema.outputs:
        computed, result = promote(rule, operands)
        results.append(result)
        widest = computed if widest is None else torch.promote_types(widest, computed)
        for i in rule.arguments:
            seen = compute[i]
            compute[i] = computed if seen is None else torch.promote_types(seen, computed)
    for i, operand in enumerate(operands):
        if compute[i] is None:
            free_float = not schema.is_tensor[i] and operand.dtype.is_floating_point
            double = widest in (torch.float64, torch.complex128)
            compute[i] = (torch.float64 if double else torch.float32) if free_float else operand.dtype
    return Dtypes(tuple(results), tuple(dtype for dtype in compute if dtype is not None))
