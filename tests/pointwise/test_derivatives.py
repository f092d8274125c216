"""Gradients of gradients, through declared derivatives and through twins; what is kept for them."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import sparseconv.pointwise as pw
from sparseconv.pointwise import Derivative, derivative, pointwise_dynamic
from sparseconv.pointwise.operations import activations, batch, chain, gated
from sparseconv.pointwise.operations import arithmetic as arith
from tests.pointwise.cases import UNARY, Unary, assert_close


def away_from_kinks(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values at which no operation here has a kink: fp64, requiring a gradient."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    for kink in (0.0, -0.5, 0.75, -0.25, 0.25, 3.0, -3.0):
        x = torch.where((x - kink).abs() < 0.02, x + 0.05, x)
    return x.requires_grad_()


@pytest.mark.parametrize("case", UNARY, ids=lambda case: case.name)
def test_unary_gradients_to_the_third_order(case: Unary):
    x = away_from_kinks(4, 3)
    assert gradcheck(lambda x: case.ours(x, *case.numbers), x)
    assert gradgradcheck(lambda x: case.ours(x, *case.numbers), x)
    weight = torch.randn(4, 3, dtype=torch.float64)

    def orders(function):
        results, y = [], function(x, *case.numbers)
        for _ in range(3):
            if not y.requires_grad:
                break
            (y,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True, allow_unused=True)
            if y is None:
                break
            results.append(y)
        return results

    ours, judge = orders(case.ours), orders(case.torch)
    for k in range(3):
        zero = torch.zeros_like(x)
        a, b = (found[k] if len(found) > k else zero for found in (ours, judge))
        assert_close(a, b, factor=100)


@pytest.mark.parametrize("case", UNARY, ids=lambda case: case.name)
def test_the_gradient_at_a_kink_is_that_of_torch(case: Unary):
    """Halves and 8-bit values lie on kinks often."""
    kinks = torch.tensor([-3.0, -0.5, -0.25, -0.0, 0.0, 0.25, 0.75, 3.0], requires_grad=True)
    ours, judge = (
        torch.autograd.grad(function(kinks, *case.numbers).sum(), kinks)[0] for function in (case.ours, case.torch)
    )
    torch.testing.assert_close(ours, judge)


@pytest.mark.parametrize("slope", [activations.hardswish_grad, activations.hardswish_grad2], ids=lambda f: f.__name__)
def test_kernel_and_twin_agree_at_kinks(slope):
    x = torch.tensor([-4.0, -3.0, 0.0, 3.0, 4.0, float("nan")])
    grad = torch.full_like(x, 2.0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel = slope.kernel_path(grad.to(device), x.to(device)).cpu()
    torch.testing.assert_close(kernel, slope(grad, x), equal_nan=True)


BINARY = {
    "add": lambda x, y: pw.add(x, y, 0.5),
    "sub": pw.sub,
    "mul": pw.mul,
    "div": lambda x, y: pw.div(x, y.abs() + 0.5),
    "swiglu": pw.swiglu,
    "where": lambda x, y: pw.where(torch.tensor([True, False, True]), x, y),
    "chain": chain(pw.Epilogue(pw.gelu)),
    "chain from the output": chain(pw.Epilogue(pw.tanh)),
    "chain with a number": chain(pw.Epilogue(pw.elu, (0.6,))),
    "chain, residual after": chain(pw.Epilogue(pw.tanh), bias=False, residual="after"),
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((3,), ())], ids=str)
def test_binary_gradients_are_summed_over_broadcast_axes(name, shapes):
    x, y = away_from_kinks(*shapes[0], seed=1), away_from_kinks(*shapes[1], seed=2)
    assert gradcheck(BINARY[name], (x, y))
    assert gradgradcheck(BINARY[name], (x, y))


def test_swiglu_of_halves_and_dropout():
    x = away_from_kinks(3, 4)
    assert gradcheck(pw.swiglu, x)
    assert gradgradcheck(pw.swiglu, x)
    assert gradcheck(lambda x: pw.dropout(x, 0.4, seed=3), x)
    assert gradgradcheck(lambda x: pw.dropout(x, 0.4, seed=3), x)
    assert gradcheck(lambda x: pw.flip(x, [0, 1]), x)


@pytest.mark.parametrize("one_hot", [True, False])
def test_batch_affine_gradients(one_hot, monkeypatch):
    if not one_hot:
        monkeypatch.setattr(batch, "_ONE_HOT_LIMIT", 0)
    x, scale, shift = away_from_kinks(6, 2), away_from_kinks(4, 2, seed=1), away_from_kinks(4, 2, seed=2)
    item = torch.tensor([3, 0, 0, 1, 3, 0], dtype=torch.int32)  # item 2 is empty, rows are in no order
    assert gradcheck(lambda *args: pw.batch_affine(args[0], item, *args[1:]), (x, scale, shift))
    assert gradcheck(lambda *args: pw.batch_affine(args[0], item, args[1]), (x, scale))
    if one_hot:
        assert gradgradcheck(lambda *args: pw.batch_affine(args[0], item, *args[1:]), (x, scale, shift))


def test_halves_are_summed_in_fp32():
    x = torch.full((4096, 2), 0.1, dtype=torch.float16)
    scale, shift = (torch.ones(1, 2, dtype=torch.float16, requires_grad=True) for _ in range(2))
    pw.batch_affine(x, torch.zeros(4096, dtype=torch.int32), scale, shift).sum().backward()
    assert scale.grad.dtype is torch.float16
    assert_close(scale.grad, torch.full((1, 2), 4096 * x[0, 0].double().item()), torch.float16)


def test_only_the_gradients_asked_for_are_computed_and_only_what_they_need_is_kept():
    called = []

    def note(which):
        def derivative(grad, other):
            called.append(which)
            return grad * other

        return derivative

    product = pointwise_dynamic(
        lambda x, y: x * y,
        name="noted_product",
        promotion_methods=[(0, 1, "DEFAULT")],
        reference=torch.mul,
        derivative={0: Derivative(note("x"), "grad0", "in1"), 1: Derivative(note("y"), "grad0", "in0")},
    )
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    z = product(x, y)
    assert [t is y for t in z.grad_fn.saved_tensors] == [True]
    z.sum().backward()
    assert called == ["x"]
    assert torch.equal(x.grad, y)
    relu = pw.relu(x)
    assert len(relu.grad_fn.saved_tensors) == 1  # the output, which the next layer keeps anyway
    assert torch.equal(relu.grad_fn.saved_tensors[0], relu)


def test_an_argument_without_a_derivative_gets_none():
    selected = pointwise_dynamic(
        lambda x, y: x,
        name="first",
        promotion_methods=[(0, 1, "DEFAULT")],
        reference=lambda x, y: x.clone(),
        derivative=[lambda g, x, y: g],
    )
    x, y = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    assert torch.autograd.grad(selected(x, y).sum(), (x, y), allow_unused=True)[1] is None


def test_without_declared_derivatives_the_twin_is_differentiated():
    function = pointwise_dynamic(
        lambda x, y, a: x,
        name="twin_only",
        is_tensor=[True, True, False],
        promotion_methods=[(0, 1, "DEFAULT")],
        reference=lambda x, y, a: torch.sin(x) * y**2 + a,
    )
    x, y = away_from_kinks(2, 3), away_from_kinks(3)
    assert gradcheck(lambda x, y: function(x, y, 2.0), (x, y))
    assert gradgradcheck(lambda x, y: function(x, y, 2.0), (x, y))
    assert torch.autograd.grad(function(x, y.detach(), 2.0).sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("declared", [False, True])
def test_an_argument_that_was_made_of_another_is_one_of_its_own(declared):
    """What the other has of it is added once, by its own graph."""
    function = pointwise_dynamic(
        lambda x, y: x,
        name="of_both",
        promotion_methods=[(0, 1, "DEFAULT")],
        reference=lambda x, y: torch.sin(x) * y**2,
        derivative={
            0: Derivative(lambda g, x, y: g * torch.cos(x) * y**2, "grad0", "in0", "in1"),
            1: Derivative(lambda g, x, y: 2 * g * torch.sin(x) * y, "grad0", "in0", "in1"),
        }
        if declared
        else None,
    )
    x = away_from_kinks(2, 3)

    def ours(x):
        return function(x, 3 * x[:1])

    def plain(x):
        return torch.sin(x) * (3 * x[:1]) ** 2

    assert torch.allclose(torch.autograd.grad(ours(x).sum(), x)[0], torch.autograd.grad(plain(x).sum(), x)[0])
    assert gradcheck(ours, (x,))
    assert gradgradcheck(ours, (x,))
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        assert torch.allclose(transform(ours)(x.detach()), transform(plain)(x.detach()))
    sums = torch.func.vmap(torch.func.grad(lambda x: ours(x).sum()))(torch.stack([x.detach(), x.detach() + 1]))
    assert torch.allclose(sums[0], torch.autograd.grad(plain(x).sum(), x)[0])


def test_several_outputs_have_gradients():
    function = pointwise_dynamic(
        lambda x, y: (x, y),
        name="sum_and_product",
        promotion_methods=[(0, 1, "DEFAULT")] * 2,
        reference=lambda x, y: (x + y, x * y),
        derivative={
            0: Derivative(lambda s, p, y: s + p * y, "grad0", "grad1", "in1"),
            1: Derivative(lambda s, p, x: s + p * x, "grad0", "grad1", "in0"),
        },
    )
    x, y = away_from_kinks(2, 3), away_from_kinks(3)
    assert gradcheck(function, (x, y))
    assert gradgradcheck(function, (x, y))


def test_integer_outputs_have_no_gradient():
    compare = pointwise_dynamic(
        lambda x, y: x, name="less", promotion_methods=[(0, 1, "ALWAYS_BOOL")], reference=torch.lt
    )
    assert not compare(torch.randn(3, requires_grad=True), torch.randn(3)).requires_grad
    plain = pointwise_dynamic(lambda x: x, name="plain", promotion_methods=[(0, "ALWAYS_BOOL")], reference=None)
    assert not plain.differentiable


def test_gradient_dtypes_follow_the_arguments():
    x = torch.randn(4, dtype=torch.float16, requires_grad=True)
    y = torch.randn(2, 1, dtype=torch.float32, requires_grad=True)
    pw.mul(x, y).sum().backward()
    assert (x.grad.dtype, y.grad.dtype) == (torch.float16, torch.float32)
    assert (x.grad.shape, y.grad.shape) == (x.shape, y.shape)


def test_every_function_of_the_library_has_a_twin_and_a_gradient():
    found = 0
    for room in (activations, arith, batch, gated):
        for function in vars(room).values():
            if isinstance(function, pw.PointwiseDynamicFunction):
                found += 1
                assert function.reference is not None
                assert function.differentiable
                assert function.__doc__
    assert found > 40


def test_what_has_no_tangent_says_what_to_declare():
    """On a card alone: without a twin nothing runs on a CPU."""
    gathered = pointwise_dynamic(
        lambda x, item, scale: x,
        name="gathered",
        num_inputs=3,
        promotion_methods=[(0, 2, "DEFAULT")],
        gather={2: 1},
        derivative={0: Derivative(lambda g: g, "grad0")},
    )
    x = torch.ones(2, 1)
    with pytest.raises(NotImplementedError, match="gathered has no derivative in forward mode: declare reference="):
        derivative._pushed(gathered, (x, torch.zeros(2, 1).int(), x), (x,), {0: x})
