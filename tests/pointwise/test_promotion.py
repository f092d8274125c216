"""Dtypes, judged by torch's own rules for elementwise operations."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from sparseconv.pointwise.promotion import Operand, promote, resolve
from sparseconv.pointwise.schema import OutputRule, Promotion, make_schema

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
VALUES = [torch.empty(shape, dtype=dtype) for dtype in DTYPES for shape in ((2,), ())] + [True, 3, 2.5]


def operand(value) -> Operand:
    if isinstance(value, torch.Tensor):
        return Operand(value.dtype, 2 if value.dim() else 1)
    return Operand.of_number(type(value))


def judge(kind: Promotion, values):
    compute, result = elementwise_dtypes(*values, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND[kind.name])
    return compute, result


@pytest.mark.parametrize("kind", list(Promotion))
def test_every_pair_is_promoted_as_torch_promotes_it(kind):
    for pair in itertools.product(VALUES, repeat=2):
        if not any(isinstance(v, torch.Tensor) for v in pair):
            continue
        rule = OutputRule((0, 1), kind)
        assert promote(rule, [operand(v) for v in pair]) == judge(kind, pair), pair


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(Promotion)), st.lists(st.sampled_from(VALUES), min_size=1, max_size=4))
def test_any_number_of_arguments(kind, values):
    if not any(isinstance(v, torch.Tensor) for v in values):
        return
    rule = OutputRule(tuple(range(len(values))), kind)
    assert promote(rule, [operand(v) for v in values]) == judge(kind, values)


def test_the_default_dtype_is_torchs():
    torch.set_default_dtype(torch.float64)
    try:
        rule = OutputRule((0,), Promotion.INT_TO_FLOAT)
        assert promote(rule, [Operand(torch.int32, 2)]) == (torch.float64, torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)


def test_arguments_outside_the_promotion_keep_their_dtype_and_numbers_keep_fp64():
    schema = make_schema(
        "f",
        is_tensor=[True, True, False],
        dtypes=None,
        num_inputs=None,
        num_outputs=None,
        promotion_methods=[(0, "DEFAULT")],
        index=False,
        gather=None,
    )
    half = resolve(schema, (Operand(torch.float16, 2), Operand(torch.int8, 2), Operand.of_number(float)))
    assert half.compute == (torch.float32, torch.int8, torch.float32)
    assert half.results == (torch.float16,)
    double = resolve(schema, (Operand(torch.float64, 2), Operand(torch.int8, 2), Operand.of_number(float)))
    assert double.compute == (torch.float64, torch.int8, torch.float64)
    whole = resolve(schema, (Operand(torch.float64, 2), Operand(torch.int8, 2), Operand.of_number(int)))
    assert whole.compute[2] is torch.int64
