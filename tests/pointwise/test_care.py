"""What is easily got wrong without a word: complex gradients, shared memory, negated views, infinities, copies."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import sparseconv.pointwise as pw
from sparseconv.pointwise import Epilogue, StridedBuffer, pointwise_dynamic
from sparseconv.pointwise.epilogue import with_constants
from sparseconv.pointwise.operations import activations, batch
from sparseconv.pointwise.operations import arithmetic as arith
from tests.pointwise.cases import DEVICE, by_kernel, needs_kernels

INF, NAN = float("inf"), float("nan")


def twin_of(reference, *promotions, **options):
    """A function of one tensor that is known by its twin alone."""
    kinds = [(0, kind) for kind in promotions or ("DEFAULT",)]
    return pointwise_dynamic(lambda x: x, name="plain", promotion_methods=kinds, reference=reference, **options)


cube = twin_of(lambda x: x**3)


def complex_numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex128).requires_grad_()


def negated(*shape: int) -> torch.Tensor:
    """A real tensor whose memory holds the negative of its values."""
    found = torch.randn(shape, dtype=torch.complex64).conj().imag
    assert found.is_neg()
    return found


@pytest.mark.parametrize(
    ("ours", "exact"), [(pw.add, torch.add), (pw.sub, torch.sub), (pw.mul, torch.mul), (pw.div, torch.div)]
)
def test_complex_gradients_of_two_arguments(ours, exact):
    x, y = complex_numbers(3), complex_numbers(2, 3)
    assert torch.autograd.gradcheck(ours, (x, y))
    assert torch.autograd.gradgradcheck(ours, (x, y))
    real = torch.randn(3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, dtype=torch.complex128)
    got = torch.autograd.grad(ours(real, y), (real, y), weight)
    for one, other in zip(got, torch.autograd.grad(exact(real, y), (real, y), weight)):
        assert one.dtype == other.dtype
        assert torch.allclose(one, other)


@pytest.mark.parametrize("function", [pw.sigmoid, pw.tanh])
def test_complex_gradients_of_one_argument(function):
    x = complex_numbers(4)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_complex_tangents():
    x, y, of_x, of_y = (complex_numbers(3).detach() for _ in range(4))
    for ours, exact in ((pw.mul, torch.mul), (pw.div, torch.div), (lambda x, _: pw.tanh(x), lambda x, _: x.tanh())):
        got = torch.func.jvp(ours, (x, y), (of_x, of_y))[1]
        assert torch.allclose(got, torch.func.jvp(exact, (x, y), (of_x, of_y))[1])


@pytest.mark.parametrize("view", [lambda x: x.view_as(x), lambda x: x, lambda x: x[:]])
def test_a_twin_that_returns_a_view_gives_memory_of_its_own(view):
    function = twin_of(view)
    for x in (torch.ones(6), torch.ones(6)[1:], torch.ones(2, 3).t()):
        function(x).add_(1)
        assert torch.equal(x, torch.ones_like(x))


def test_a_twin_that_returns_part_of_a_view_gives_memory_of_its_own():
    z = torch.ones(6, dtype=torch.complex64)[1:]
    twin_of(lambda z: z.real, "COMPLEX_TO_FLOAT")(z).add_(1)
    assert torch.equal(z, torch.ones_like(z))


def test_a_twin_that_returns_a_tensor_twice_gives_two():
    def twice(x):
        y = x * 2
        return y, y

    first, second = twin_of(twice, "DEFAULT", "DEFAULT")(torch.ones(3))
    first.add_(1)
    assert second.tolist() == [2, 2, 2]


def test_outputs_that_overlap_are_refused_before_anything_is_written():
    pair = twin_of(lambda x: (x, x + 1), "DEFAULT", "DEFAULT")
    memory = torch.zeros(8)
    with pytest.raises(ValueError, match="share memory"):
        pair(torch.arange(4.0), out0=memory[:4], out1=memory[2:6])
    assert not memory.any()
    small = torch.zeros(8, dtype=torch.int8)
    with pytest.raises(ValueError, match="share memory"):  # by one byte
        pair(torch.ones(4, dtype=torch.int8), out0=small[:4], out1=small[3:7])
    assert not small.any()
    pair(torch.arange(4.0), out0=memory[::2], out1=memory[1::2])  # neighbours that never meet
    assert memory.tolist() == [0, 1, 1, 2, 2, 3, 3, 4]


def test_a_gathered_argument_is_no_output():
    x, item, table = torch.ones(2, 3), torch.tensor([[1], [0]]), torch.randn(2, 3)
    before = table.clone()
    with pytest.raises(ValueError, match="shares memory with argument 2 in another order"):
        batch.batch_scale(x, item, table, out=table)
    assert torch.equal(table, before)
    assert torch.equal(batch.batch_scale(x, item, table, out=x), before[[1, 0]])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_takes_strided_buffers(name):
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    buffer = StridedBuffer(y, strides=(-3, -1), offset=5)
    function = getattr(pw, name)
    assert torch.equal(function(x, buffer), function(x, y.flip(0, 1)))
    assert torch.equal(function(buffer, x), function(y.flip(0, 1), x))


@pytest.mark.parametrize("other", [torch.tensor([1, 2]), 3, torch.tensor(True)])
def test_alpha_is_never_cut_to_an_integer(other):
    x = torch.tensor([1, 2])
    for function in (pw.add, pw.sub):
        if function is pw.sub and isinstance(other, torch.Tensor) and other.dtype == torch.bool:
            with pytest.raises(TypeError, match="bool"):  # as torch does, whatever alpha is
                function(x, other, alpha=0.5)
            continue
        with pytest.raises(TypeError, match=r"alpha is an int"):
            function(x, other, alpha=0.5)
        assert torch.equal(function(x, other, alpha=2), function(x, other * 2))
    assert pw.add(x, 0.5, alpha=0.5).tolist() == [1.25, 2.25]
    assert pw.add(x.float(), other, alpha=0.5).dtype == torch.float32


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (None, None, 0), (1, 0, 2)])
@pytest.mark.parametrize("rows", [3, 5])
def test_batches_of_gathered_arguments(dims, rows):
    x, item, table = torch.randn(4, 5, 2), torch.randint(0, 3, (4, 5)), torch.randn(4, rows, 2)
    given = [t if d is not None else t[0] for t, d in zip((x, item, table), dims)]
    turned = [t if not d else t.movedim(0, d) for t, d in zip(given, dims)]
    got = torch.func.vmap(pw.batch_affine, in_dims=dims)(*turned)
    for n in range(4):
        one = [t[n] if d is not None else t for t, d in zip(given, dims)]
        assert torch.equal(got[n], pw.batch_affine(*one))


def test_per_sample_gradients_of_a_gathered_argument():
    x, item, table = torch.randn(5, 2), torch.tensor([0, 2, 2, 1, 0]), torch.randn(4, 3, 2)
    got = torch.func.vmap(torch.func.grad(lambda t: pw.batch_affine(x, item, t).square().sum()))(table)
    for n in range(4):
        exact = torch.zeros(3, 2).index_add(0, item, 2 * x.square() * table[n][item])
        assert torch.allclose(got[n], exact, atol=1e-5)


def test_scale_and_shift_have_as_many_rows():
    with pytest.raises(ValueError, match=r"shift is \(B, 1\), with one B .* got \(1, 1\)"):
        pw.batch_affine(torch.ones(2, 1), torch.tensor([0, 0]), torch.ones(3, 1), torch.ones(1, 1))
    with pytest.raises(TypeError, match="are real"):
        pw.batch_affine(torch.ones(2, 1), torch.tensor([0, 0]), torch.ones(3, 1, dtype=torch.complex64))


@pytest.mark.parametrize("limit", [0, 2**26])
def test_what_is_not_finite_stays_in_its_batch_item(limit, monkeypatch):
    monkeypatch.setattr(batch, "_ONE_HOT_LIMIT", limit)
    x = torch.tensor([[1.0, 1], [INF, 2], [-INF, 3], [INF, INF], [float("nan"), 4], [2, -INF]])
    item = torch.tensor([0, 1, 2, 2, 3, 0])
    exact = torch.tensor([[3.0, -INF], [INF, 2], [float("nan"), INF], [float("nan"), 4], [0, 0]])
    assert torch.equal(batch.segment_sum(x, item, 5).nan_to_num(7.0, 8.0, 9.0), exact.nan_to_num(7.0, 8.0, 9.0))


def test_sums_of_batch_items_stay_exact_in_a_backward_pass_within_autocast():
    scale, x = torch.ones(1, 1, requires_grad=True), torch.full((1001, 1), 1.001)
    y = pw.batch_affine(x, torch.zeros(1001, dtype=torch.long), scale).sum()
    with torch.autocast("cpu", torch.bfloat16):
        (grad,) = torch.autograd.grad(y, scale)
    assert torch.allclose(grad, x.sum(0, keepdim=True))


def test_chains_promote_as_their_activation_does():
    x, bias = torch.tensor([0, 3]), torch.tensor([0, 0])
    got = pw.bias_activation(x, bias, activation=Epilogue(activations.clamp_min, (0.5,)))
    assert got.tolist() == activations.clamp_min(x, 0.5).tolist() == [0.5, 3.0]


@pytest.mark.parametrize("order", ["before", "after"])
def test_chains_without_declared_derivatives(order):
    x, bias, residual = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 3), (3,), (4, 3)))

    def chained(x, bias, residual):
        return pw.bias_activation(x, bias, residual, activation=cube, order=order)

    assert torch.autograd.gradcheck(chained, (x, bias, residual))
    assert torch.autograd.gradgradcheck(chained, (x, bias, residual))
    assert torch.autograd.gradcheck(chained, (x, bias, residual), check_forward_ad=True, check_backward_ad=False)


def test_chains_without_declared_derivatives_within_transforms():
    x, bias = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def total(x):
        return pw.bias_activation(x, bias, activation=cube).sum()

    assert torch.allclose(torch.func.grad(total)(x), 3 * (x + bias) ** 2)
    hessian = torch.func.hessian(total)(x).reshape(6, 6)
    assert torch.allclose(hessian, torch.diag((6 * (x + bias)).flatten()))
    assert torch.allclose(torch.func.vmap(torch.func.grad(total))(x), 3 * (x + bias) ** 2)


def test_compiled_outputs_are_checked_too():
    step = torch.compile(lambda x, out: pw.relu(x, out=out), backend="eager")
    with pytest.raises(Exception, match=r"has shape \(5, 3\)"):
        step(torch.randn(3), torch.zeros(5, 3))


@needs_kernels
def test_kernels_see_the_values_of_negated_views():
    x = negated(3, 4).to(DEVICE)
    x = torch._neg_view(-x)  # which a copy to a card has resolved
    assert x.is_neg()
    assert torch.equal(by_kernel(pw.copy)(x), x)
    with pytest.raises(ValueError, match="a lazily negated view"):
        by_kernel(pw.copy)(torch.ones(3, 4, device=DEVICE), out=x)
    with pytest.raises(ValueError, match="the negative or conjugate"):
        StridedBuffer(x)


@needs_kernels
@pytest.mark.parametrize("bounds", [(NAN, 2.0), (0.0, NAN), (-1.0, 1.0), (2.0, 1.0), (NAN, None), (None, NAN)], ids=str)
def test_bounds_that_are_not_numbers(bounds):
    low, high = bounds
    # not torch.clamp for one bound: on a card some of its releases pass over a NaN there
    by_bounds = {
        (True, True): (activations.clamp_both, torch.clamp),
        (True, False): (activations.clamp_min, torch.clamp_min),
        (False, True): (activations.clamp_max, torch.clamp_max),
    }
    function, oracle = by_bounds[low is not None, high is not None]
    x = torch.tensor([NAN, -3.0, 0.0, 3.0, INF], device=DEVICE)
    given = tuple(bound for bound in bounds if bound is not None)
    assert torch.allclose(by_kernel(function)(x, *given), oracle(x, *given), equal_nan=True)


@needs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, where the interpreter computes what is masked
@pytest.mark.parametrize("value", [np.float64(0.25), 0.25, True, INF])
def test_numbers_of_other_libraries_as_constants(value):
    scalar = with_constants(pw.leaky_relu, value)
    function = pointwise_dynamic(scalar.jitted, name="constant", promotion_methods=[(0, "DEFAULT")])
    x = torch.tensor([-1.0, 2.0], device=DEVICE)
    assert torch.equal(function.kernel_path(x), torch.where(x > 0, x, x * float(value)))


@pytest.mark.parametrize("function", [pw.relu, pw.gelu, activations.silu_grad, cube, arith.copy])
def test_functions_are_copied_as_functions_are(function):
    assert copy.copy(function) is function
    assert copy.deepcopy(function) is function


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "gelu", "sigmoid", "tanh", "silu", "mish", "softplus", "elu"])
def test_activations_are_pickled_by_name(name):
    function = getattr(pw, name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert pickle.loads(pickle.dumps(Epilogue(function))) == Epilogue(function)


def test_a_function_that_has_no_name_says_so_when_it_is_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError), match="plain"):
        pickle.dumps(cube)


def test_a_module_with_an_activation_is_copied_and_saved(tmp_path):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.activation = torch.nn.Linear(2, 2), pw.silu

    layer = copy.deepcopy(Layer())
    assert layer.activation is pw.silu
    torch.save(layer.activation, tmp_path / "activation.pt")
    assert torch.load(tmp_path / "activation.pt", weights_only=False) is pw.silu


@needs_kernels
def test_what_a_kernel_wrote_in_place_is_known_to_autograd():
    from tests.pointwise.scalar_functions import axpy

    function = pointwise_dynamic(
        axpy, is_tensor=[True, True, False], dtypes=[None, None, float], promotion_methods=[(0, 1, "DEFAULT")]
    )
    x, y = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    for _ in range(2):  # a second call of these arguments is launched as the first was remembered
        saved, before = weight * x, x._version
        with torch.no_grad():
            function(x, y, 2.0, out=x)
        assert x._version == before + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()
    assert x.tolist() == [5.0] * 4
    memory = torch.zeros(8, device=DEVICE)
    before = memory._version
    function(x, y, 2.0, out=StridedBuffer(memory, shape=(4,), strides=(2,)))
    assert memory._version == before + 1
    assert memory.tolist() == [7.0, 0.0] * 4
