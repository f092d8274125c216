"""An activation with its numbers: inlined in another kernel, run by itself, and differentiated."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import sparseconv.pointwise as pw
from sparseconv.pointwise import Epilogue, pointwise_dynamic
from sparseconv.pointwise.operations import seeded
from tests.pointwise.cases import DEVICE, UNARY, assert_close, needs_kernels
from tests.pointwise.test_derivatives import away_from_kinks

ACTIVATIONS = [case for case in UNARY if case.name != "copy"]


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda case: case.name)
def test_apply_and_input_grad_are_those_of_the_activation(case):
    epilogue = Epilogue(case.ours, case.numbers)
    x = away_from_kinks(5, 3)
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    y = epilogue.apply(x)
    assert_close(y, case.torch(x, *case.numbers))
    (exact,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
    assert_close(epilogue.input_grad(weight, x=x, y=y), exact)
    if epilogue.saves_output:
        assert_close(epilogue.input_grad(weight, y=y), exact)
    elif "in0" in epilogue.activation.derivative[0].arguments:
        with pytest.raises(ValueError, match="needs x"):
            epilogue.input_grad(weight, y=y)
    grad = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda g, x: epilogue.input_grad(g, x=x, y=epilogue.apply(x)), (grad, x))


@needs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda case: case.name)
def test_another_kernel_calls_it_on_its_tile(case):
    from tests.pointwise.scalar_functions import activate_rows

    x = torch.randn(64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    y = torch.full_like(x, float("nan"))
    activate_rows[(1,)](x, y, 64, Epilogue(case.ours, case.numbers).scalar)
    assert_close(y, case.torch(x.double() * 2, *case.numbers), torch.float32, factor=2)


@needs_kernels
def test_a_users_own_function_is_fused():
    from tests.pointwise.scalar_functions import activate_rows, squared_relu

    own = pointwise_dynamic(
        squared_relu,
        is_tensor=[True, False],
        dtypes=[None, float],
        promotion_methods=[(0, "DEFAULT")],
        reference=lambda x, threshold: F.relu(x - threshold).square(),
    )
    epilogue = Epilogue(own, (0.25,))
    x = torch.linspace(-1, 1, 32, device=DEVICE)
    y = torch.empty_like(x)
    activate_rows[(1,)](x, y, 32, epilogue.scalar)
    assert_close(y, F.relu(2 * x - 0.25).square())
    assert_close(own.kernel_path(x, 0.25), epilogue.apply(x))
    z = away_from_kinks(4)
    assert gradgradcheck(epilogue.apply, z)
    grad = torch.ones_like(z)
    assert_close(epilogue.input_grad(grad, x=z), torch.autograd.grad(epilogue.apply(z).sum(), z)[0])


def test_equal_epilogues_share_one_scalar_function():
    a, b = Epilogue(pw.leaky_relu, (0.2,)), Epilogue(pw.leaky_relu, (0.2,))
    assert a == b
    assert hash(a) == hash(b)
    assert a != Epilogue(pw.leaky_relu)
    assert Epilogue(pw.leaky_relu).numbers == (0.01,)
    assert repr(a) == "Epilogue(leaky_relu, 0.2)"
    pytest.importorskip("triton")
    assert a.scalar is b.scalar
    assert Epilogue(pw.relu).scalar is pw.relu.scalar


@needs_kernels
def test_infinite_numbers_are_written_as_such():
    from sparseconv.pointwise.operations.activations import clamp_both
    from tests.pointwise.scalar_functions import activate_rows

    x = torch.randn(16, device=DEVICE)
    y = torch.empty_like(x)
    activate_rows[(1,)](x, y, 16, Epilogue(clamp_both, (-math.inf, 0.5)).scalar)
    assert torch.equal(y, (2 * x).clamp(max=0.5))


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ((torch.relu,), TypeError, "made with pointwise_dynamic"),
        ((pw.add,), TypeError, "made with pointwise_dynamic"),
        ((pw.relu, (1.0,)), ValueError, "takes 0 numbers, but got 1"),
        ((pw.leaky_relu, ("steep",)), TypeError, "is an int or float"),
        ((seeded.seeded_dropout, (0.5, 3)), ValueError, "takes the index"),
    ],
)
def test_what_cannot_be_fused_is_an_error(given, kind, words):
    with pytest.raises(kind, match=words):
        Epilogue(*given)


def test_two_tensors_cannot_be_fused():
    from sparseconv.pointwise.operations.arithmetic import multiply

    with pytest.raises(ValueError, match="2 tensors and 1 outputs"):
        Epilogue(multiply)
