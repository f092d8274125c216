"""Bias, residual and activation in one call: the numbers and gradients of one after the other, on every backend."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import sparseconv as sc
from sparseconv import nn, pointwise
from sparseconv.backends.registry import BACKENDS, backend
from sparseconv.pointwise import Epilogue
from tests.cases import TOLERANCE, build, error, named, operands

ACTIVATIONS = {
    "relu": (pointwise.relu, torch.relu),
    "leaky": (Epilogue(pointwise.leaky_relu, (0.2,)), lambda z: torch.nn.functional.leaky_relu(z, 0.2)),
    "gelu": (pointwise.gelu, torch.nn.functional.gelu),
    "silu": (Epilogue(pointwise.silu), torch.nn.functional.silu),
    "none": (None, lambda z: z),
}
SOME = named("submanifold", "strided_overlap", "inverse", "grouped", "no_pairs", "no_voxels")


def setting(case, name, dtype, device="cpu"):
    plan = build(case, device, backend=name)
    sentence = backend(name).unsupported(plan.request(case.c_in, case.c_out, dtype))
    if sentence is not None:
        pytest.skip(sentence)
    x, w, residual = operands(plan, case, dtype)
    bias = torch.linspace(-1, 1, case.c_out).to(dtype).to(device)
    return plan, [x, w, bias, residual]


def convolved(plan, groups, x, w, bias):
    """The convolution as gather, multiply and add over the plan's edges, on the CPU."""
    edges = plan.kernel_map.to("cpu")
    rows = x[edges.in_rows.long()].unflatten(1, (groups, -1))
    matrices = w[edges.pair_taps.long()].unflatten(2, (groups, -1))
    terms = torch.einsum("pga,pagb->pgb", rows, matrices).flatten(1)
    return bias + terms.new_zeros(edges.num_out, w.shape[2]).index_add(0, edges.out_rows.long(), terms)


def settings() -> Iterator:
    """All, of which Triton's interpreter runs every second: each case with each activation, and either with each dtype.
    The slow rest adds the other dtype to each."""
    dtypes = [torch.float64, torch.float32, torch.float16]
    for (i, case), (j, activation), name, (k, dtype) in itertools.product(
        enumerate(SOME), enumerate(ACTIVATIONS), BACKENDS, enumerate(dtypes)
    ):
        rest = name == "triton_implicit_gemm" and dtype != torch.float64 and (i + j + k) % 2
        marks = pytest.mark.slow if rest else ()
        yield pytest.param(case, activation, name, dtype, "cpu", id=f"{case}-{activation}-{name}-{dtype}", marks=marks)
        yield pytest.param(
            case, activation, name, dtype, "cuda", id=f"{case}-{activation}-{name}-{dtype}-cuda", marks=pytest.mark.gpu
        )


@pytest.mark.parametrize(("case", "activation", "name", "dtype", "device"), list(settings()))
def test_values_and_gradients(case, activation, name, dtype, device):
    plan, tensors = setting(case, name, dtype, device)
    given, reference = ACTIVATIONS[activation]
    x, w, bias, residual = (t.requires_grad_() for t in tensors)
    y = plan.execute(x, w, bias, residual=residual, epilogue=given)
    wide = [t.detach().cpu().double().requires_grad_() for t in tensors]
    want = reference(convolved(plan, case.groups, *wide[:3]) + wide[3])
    assert y.dtype == dtype
    limit = 2 * TOLERANCE[dtype]
    assert error(y, want) < limit
    with torch.no_grad():
        assert error(plan.execute(x, w, bias, residual=residual, epilogue=given), want) < limit
    cotangent = torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype)
    got = torch.autograd.grad(y, tensors, cotangent.to(device))
    for a, b in zip(got, torch.autograd.grad(want, wide, cotangent.double())):
        assert error(a, b) < 4 * limit


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "none"])
def test_gradients_of_gradients(activation):
    case = named("strided")[0]
    plan, tensors = setting(case, "numpy_gather_scatter", torch.float64)
    given, _ = ACTIVATIONS[activation]
    for t in tensors:
        t.requires_grad_()

    def run(x, w, bias, residual):
        return plan.execute(x, w, bias, residual=residual, epilogue=given)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


def test_compiled_and_functional():
    case = named("submanifold")[0]
    plan, (x, w, bias, residual) = setting(case, "numpy_gather_scatter", torch.float32)

    def run(w):
        return plan.execute(x, w, bias, residual=residual, epilogue=pointwise.relu)

    want = run(w)
    assert torch.allclose(torch.compile(run, fullgraph=True, backend="aot_eager")(w), want, atol=1e-5)
    leaf = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(leaf).sum(), leaf)
    assert torch.allclose(torch.func.grad(lambda v: run(v).sum())(w), expected, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_under_autocast_inference_is_one_call_of_a_backend(activation, monkeypatch):
    plan, (x, w, bias, residual) = setting(named("submanifold")[0], "numpy_gather_scatter", torch.float32)
    fused, seen = type(backend("numpy_gather_scatter")).forward_fused, []

    def forward_fused(*args):
        seen.append((args[1].dtype, torch.is_autocast_enabled("cpu")))
        return fused(*args)

    monkeypatch.setattr(type(backend("numpy_gather_scatter")), "forward_fused", forward_fused)
    epilogue, same = ACTIVATIONS[activation]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = plan.execute(x, w, bias, residual=residual, epilogue=epilogue)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(torch.bfloat16, False)]
    exact = same(convolved(plan, 1, x.double(), w.double(), bias.double()) + residual)
    assert error(y, exact) < TOLERANCE[torch.bfloat16]


def test_refusals():
    plan, (x, w, bias, residual) = setting(named("submanifold")[0], "numpy_gather_scatter", torch.float32)
    with pytest.raises(ValueError, match="residual must be"):
        plan.execute(x, w, bias, residual=residual[:-1])
    with pytest.raises(TypeError, match="residual is"):
        plan.execute(x, w, bias, residual=residual.double())
    with pytest.raises(TypeError, match=r"sparseconv\.pointwise has relu"):
        plan.execute(x, w, bias, epilogue=torch.relu)


@pytest.mark.parametrize("block", ["plain", "residual", "bottleneck"])
def test_networks_fold_their_norms_in_inference(block, monkeypatch):
    torch.manual_seed(0)
    grid, _ = sc.voxelize(torch.rand(300, 3), 0.15)
    net = nn.UNet(4, 5, (8, 12), block=block, activation=nn.SiLU)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 2)
            module.bias.data.normal_()
    x = sc.SparseTensor(grid, torch.randn(len(grid), 4))
    want = net.eval()(x).features
    seen = []
    execute = sc.ConvolutionPlan.execute
    monkeypatch.setattr(
        sc.ConvolutionPlan, "execute", lambda *a, **k: seen.append(k.get("epilogue")) or execute(*a, **k)
    )
    with torch.no_grad():
        assert torch.allclose(net(x).features, want, atol=1e-5)
        assert sum(e is not None for e in seen) >= len(seen) / 2
        net.stem[1].weight.mul_(2)  # an optimiser's step: what was folded is stale
        changed = net(x).features
    assert torch.allclose(changed, net(x).features, atol=1e-5)
    assert not torch.allclose(changed, want, atol=1e-2)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_whole_call_is_one_node(activation):
    plan, tensors = setting(SOME[0], "numpy_gather_scatter", torch.float64)
    x, w, bias, residual = (t.requires_grad_() for t in tensors)
    y = plan.execute(x, w, bias, residual=residual, epilogue=ACTIVATIONS[activation][0])
    leaves = {node.variable for node, _ in y.grad_fn.next_functions if node is not None}
    assert leaves == {x, w, bias, residual}
