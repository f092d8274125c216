"""Signatures and what is said of those that do not fit."""

from __future__ import annotations

import gc
import inspect
from enum import Enum

import pytest
import torch

from sparseconv.pointwise import Config, Derivative, PointwiseDynamicFunction, Promotion, operations, pointwise_dynamic
from sparseconv.pointwise.schema import Schema, make_schema


def make(**given) -> Schema:
    settled = {
        "is_tensor": None,
        "dtypes": None,
        "num_inputs": None,
        "num_outputs": None,
        "promotion_methods": [(0, "DEFAULT")],
        "index": False,
        "gather": None,
    }
    return make_schema("f", **{**settled, **given})


class Foreign(Enum):
    DEFAULT = (0,)
    INT_TO_FLOAT = (2,)


@pytest.mark.parametrize(
    "entry",
    [
        (0, 1, "DEFAULT"),
        ((0, 1), "DEFAULT"),
        [[0, 1], "DEFAULT"],
        (0, 1, Promotion.DEFAULT),
        ((0, 1), Foreign.DEFAULT),
    ],
)
def test_promotion_is_flat_or_nested_by_name_or_by_enum(entry):
    (rule,) = make(num_inputs=2, promotion_methods=[entry]).outputs
    assert rule.arguments == (0, 1)
    assert rule.kind is Promotion.DEFAULT


def test_counts_follow_from_is_tensor_or_dtypes_or_the_signature():
    assert make(is_tensor=[True, False]).num_inputs == 2
    assert make(dtypes=[None, None, None]).num_inputs == 3
    two = make(num_inputs=2, promotion_methods=[(0, "DEFAULT"), (1, "NO_OPMATH")])
    assert two.num_outputs == 2

    @pointwise_dynamic(promotion_methods=[(0, "DEFAULT")], reference=lambda x, y: x + y)
    def plain(x, y):
        return x + y

    assert plain.schema.num_inputs == 2


def test_dtypes_of_numbers():
    schema = make(is_tensor=[True, False, False, False], dtypes=[float, float, "int", torch.bool])
    assert schema.scalar_types == (None, float, int, bool)
    assert schema.tensors == (0,)
    assert schema.scalars == (1, 2, 3)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({}, ValueError, "num_inputs is not known"),
        ({"num_inputs": 1, "promotion_methods": None}, ValueError, "promotion_methods= is required"),
        ({"num_inputs": 1, "promotion_methods": []}, ValueError, "promotion_methods= is required"),
        ({"num_inputs": 1, "promotion_methods": ["DEFAULT"]}, TypeError, "promotion_methods is"),
        ({"num_inputs": 1, "promotion_methods": [(1, "DEFAULT")]}, ValueError, "argument 1"),
        ({"num_inputs": 1, "promotion_methods": [(0, "PLAIN")]}, ValueError, "promotion is one of DEFAULT"),
        ({"num_inputs": 1, "promotion_methods": [((), "DEFAULT")]}, ValueError, "names no argument"),
        ({"num_inputs": 1, "num_outputs": 2}, ValueError, "num_outputs=2"),
        ({"num_inputs": 3, "is_tensor": [True]}, ValueError, "is_tensor has 1 entries"),
        ({"is_tensor": [True], "dtypes": [None, None]}, ValueError, "dtypes has 2 entries"),
        ({"is_tensor": [1]}, TypeError, "list of bools"),
        ({"is_tensor": [False]}, ValueError, "at least one argument must be a tensor"),
        ({"is_tensor": [True, False], "dtypes": [None, "double"]}, TypeError, r"dtypes\[1\]"),
        ({"num_inputs": 2, "gather": {1: 2}}, ValueError, "join two tensor arguments"),
        ({"num_inputs": 3, "gather": {1: 2, 2: 0}}, ValueError, "itself gathered"),
    ],
)
def test_a_signature_that_does_not_fit_is_an_error(given, kind, words):
    with pytest.raises(kind, match=words):
        make(**given)


def test_config_and_derivative_say_what_they_take():
    with pytest.raises(ValueError, match="power of two"):
        Config(elements=100)
    with pytest.raises(ValueError, match="1 or 2"):
        Config(tile_axes=3)
    with pytest.raises(ValueError, match="grad0, in0 or out0"):
        Derivative(torch.mul, "x")
    with pytest.raises(TypeError, match="takes a function"):
        Derivative(3)
    with pytest.raises(ValueError, match="not one of its tensors"):
        pointwise_dynamic(
            lambda x, a: x, is_tensor=[True, False], promotion_methods=[(0, "DEFAULT")], derivative={1: torch.mul}
        )
    with pytest.raises(ValueError, match="does not have"):
        pointwise_dynamic(
            lambda x: x, promotion_methods=[(0, "DEFAULT")], derivative={0: Derivative(torch.mul, "grad0", "in4")}
        )


def test_every_operation_and_gradient_has_its_scalar_function():
    """Named by text, so that nothing else than a card would miss one."""
    room = operations.__name__.rpartition(".")[0] + ".scalars."
    gc.unfreeze()  # what tests/conftest.py froze, operations among it
    made = [f for f in gc.get_objects() if type(f) is PointwiseDynamicFunction]
    gc.freeze()
    own = [f for f in made if getattr(f._scalar_function._given, "module", "").startswith(room)]
    assert {"clamp_grad", "clamp_min_grad", "gelu_grad2", "swiglu_grad_gate"} <= {f.schema.name for f in own}
    for function in own:
        assert len(inspect.signature(function.scalar.fn).parameters) >= function.schema.num_inputs
