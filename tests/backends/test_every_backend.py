"""Every backend over every case: values, gradients, bits. A new backend is picked up from `BACKENDS`."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
from sparseconv.backends.registry import BACKENDS, backend, choose
from tests import oracle
from tests.cases import CASES, TOLERANCE, Case, build, error, named, operands

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


TWICE = named(
    *("no_voxels", "one_voxel", "line", "submanifold", "full", "mixed_strides", "strided", "forbid", "periodic"),
    *("cross", "grouped", "depthwise", "inverse", "generative"),
)


def everywhere() -> list:
    """(case, backend, dtype, device). Triton's interpreter runs each case in one dtype of 16 bits, and the next case in
    the other one: both are read and multiplied by the same lines. The rest is slow."""
    found = []
    for number, case in enumerate(CASES):
        other = DTYPES[2 + number % 2]
        for name in BACKENDS:
            for dtype in DTYPES:
                slow = name == "triton_implicit_gemm" and dtype == other
                for device, marks in (("cpu", pytest.mark.slow if slow else ()), ("cuda", pytest.mark.gpu)):
                    found.append(
                        pytest.param(case, name, dtype, device, marks=marks, id=f"{case}-{name}-{dtype}-{device}")
                    )
    return found


def exactly() -> list:
    """(case, backend, dtype). Triton's interpreter runs each case in one dtype, and the next case in another.

    Integers are exact in all of them, by the same kernels, and `test_values_and_gradients` runs each case in each.
    The others are slow.
    """
    found = []
    for number, case in enumerate(CASES):
        for name in BACKENDS:
            for dtype in DTYPES:
                one = name != "triton_implicit_gemm" or dtype == DTYPES[1:][number % 3]
                marks = () if one else pytest.mark.slow
                found.append(pytest.param(case, name, dtype, marks=marks, id=f"{case}-{name}-{dtype}"))
    return found


def plan_for(case: Case, name: str, device: str, dtype: torch.dtype) -> sc.ConvolutionPlan:
    plan = build(case, device, backend=name)
    sentence = None if name == "auto" else backend(name).unsupported(plan.request(case.c_in, case.c_out, dtype))
    if sentence is not None:
        pytest.skip(sentence)
    return plan


def edges_of(plan: sc.ConvolutionPlan) -> list[tuple[int, int, int]]:
    """The edges, found anew by the oracle from the coordinates alone."""
    window = plan.window
    fine, coarse = (plan.target, plan.source) if plan.is_transposed else (plan.source, plan.target)
    extent = (plan.boundary.extent.start, plan.boundary.extent.shape) if plan.boundary.kind == "periodic" else None
    zero = (0,) * plan.source.rank
    found = oracle.edges(fine.coords.tolist(), coarse.coords.tolist(), window.offsets, window.stride, zero, extent)
    return [(k, o, i) for k, i, o in found] if plan.is_transposed else found


@pytest.mark.parametrize(("case", "name", "dtype", "device"), everywhere())
def test_values_and_gradients(case, name, dtype, device):
    plan = plan_for(case, name, device, dtype)
    x, w, g = operands(plan, case, dtype)
    bias = torch.linspace(-1, 1, case.c_out).to(dtype).to(device)
    edges = edges_of(plan)
    assert plan.kernel_map.num_pairs == len(edges)
    for t in (x, w, bias):
        t.requires_grad_()
    y = plan.execute(x, w, bias)
    y.backward(g)
    assert y.dtype == dtype
    n_in, n_out = plan.kernel_map.num_in, plan.kernel_map.num_out
    xs, ws, gs, bs = (t.detach().double().cpu().numpy() for t in (x, w, g, bias))
    limit = TOLERANCE[dtype]
    assert error(y, oracle.convolve(xs, ws, edges, n_out, case.groups, bs)) < limit
    assert error(x.grad, oracle.input_grad(gs, ws, edges, n_in, case.groups)) < limit
    assert error(w.grad, oracle.weight_grad(xs, gs, edges, plan.num_taps, case.groups)) < limit
    assert error(bias.grad, gs.sum(0)) < max(limit, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "name", "dtype"), exactly())
def test_integers_match_to_the_bit(case, name, dtype, device):
    """Small integers are exact in every dtype, so a lost or doubled pair cannot hide behind a tolerance."""
    plan = plan_for(case, name, device, dtype)
    x, w, g = operands(plan, case, dtype, integers=True)
    edges = edges_of(plan)
    n_in, n_out = plan.kernel_map.num_in, plan.kernel_map.num_out
    y = plan.execute(x.requires_grad_(), w.requires_grad_())
    y.backward(g)
    xs, ws, gs = (t.detach().double().cpu().numpy() for t in (x, w, g))

    def same(got, want):
        want = torch.from_numpy(want)
        return torch.equal(got.detach().cpu(), want.to(dtype))

    assert same(y, oracle.convolve(xs, ws, edges, n_out, case.groups))
    assert same(x.grad, oracle.input_grad(gs, ws, edges, n_in, case.groups))
    assert same(w.grad, oracle.weight_grad(xs, gs, edges, plan.num_taps, case.groups))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", named("submanifold", "strided_overlap", "grouped", "inverse"), ids=str)
def test_strides_and_repeats(case, name, device):
    """Non-contiguous operands give the same bits as contiguous ones, and a second run the same as the first."""
    plan = plan_for(case, name, device, torch.float32)
    x, w, g = operands(plan, case, torch.float32)

    def run(x, w, g):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = plan.execute(x, w)
        return y, *torch.autograd.grad(y, (x, w), g)

    first = run(x, w, g)
    again = run(x, w, g)
    apart = run(
        x.t().contiguous().t(),
        torch.stack([w, -w], -1)[..., 0],
        torch.cat([g, g], 1)[:, : case.c_out] if case.c_out > 1 else g,
    )
    for a, b, c in zip(first, again, apart):
        assert torch.equal(a, b)
        assert error(c, a.double().cpu()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layout", ["spaced", "expanded"])
def test_a_bias_and_a_residual_of_any_strides(layout, name, device):
    case = named("submanifold")[0]
    plan = plan_for(case, name, device, torch.float32)
    x, w, _ = operands(plan, case, torch.float32)
    generator = torch.Generator().manual_seed(0)
    if layout == "spaced":
        bias = torch.randn(2 * case.c_out, generator=generator).to(device)[::2]
        residual = torch.randn(case.c_out, plan.kernel_map.num_out, generator=generator).to(device).t()
    else:
        bias = torch.randn(1, generator=generator).to(device).expand(case.c_out)
        residual = torch.randn(1, case.c_out, generator=generator).to(device).expand(plan.kernel_map.num_out, -1)
    want = plan.execute(x, w, bias.contiguous(), residual=residual.contiguous())
    assert torch.equal(plan.execute(x, w, bias, residual=residual), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "cupy_gather_scatter"])
@pytest.mark.parametrize("layout", ["spaced", "expanded"])
def test_integer_sums_from_a_bias_of_any_strides(layout, name, device):
    case = named("submanifold")[0]
    plan = plan_for(case, name, device, torch.float32)
    x, w = (t.mul(10).clamp(-100, 100).to(torch.int8) for t in operands(plan, case, torch.float32)[:2])
    start = torch.arange(1, case.c_out + 1, dtype=torch.int32, device=device) * 1000
    start = start if layout == "spaced" else start[:1].repeat(case.c_out)
    spread = start.repeat_interleave(2)[::2] if layout == "spaced" else start[:1].expand(case.c_out)
    sums = [backend(name).integers(x, w, plan.kernel_map, case.groups, bias) for bias in (start, spread)]
    assert torch.equal(*sums)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", named("submanifold", "grouped"), ids=str)
def test_features_without_channels(case, name, device):
    """Sums of nothing: the bias, the residual and the activation are left, and gradients have no channel or are 0."""
    plan = plan_for(case, name, device, torch.float32)
    rows, taps, c_out = plan.kernel_map.num_out, plan.num_taps, case.c_out
    if backend(name).unsupported(plan.request(0, c_out, torch.float32)) is not None:
        pytest.skip("it takes no layer without channels")
    x, w = (torch.zeros(s, device=device, requires_grad=True) for s in ((plan.num_in, 0), (taps, 0, c_out)))
    bias = torch.linspace(-1, 1, c_out, device=device).requires_grad_()
    y = plan.execute(x, w, bias, epilogue=sc.pointwise.relu)
    assert torch.equal(y, bias.relu().expand(rows, -1))
    assert [t.shape for t in torch.autograd.grad(y.sum(), (x, w))] == [x.shape, w.shape]
    sizes = (plan.num_in, case.c_in), (taps, case.c_in // case.groups, 0)
    x, w = (torch.ones(s, device=device, requires_grad=True) for s in sizes)
    y = plan.execute(x, w)
    assert y.shape == (rows, 0)
    of_x, of_w = torch.autograd.grad(y.sum(), (x, w))
    assert torch.equal(of_x, torch.zeros_like(x))
    assert of_w.shape == w.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("channels", [1, 8])
def test_views_that_torch_negates(channels, name, device):
    """The imaginary part of a conjugate lies in memory with the other sign."""
    case = Case(**{**named("submanifold")[0].__dict__, "c_in": channels, "c_out": channels, "groups": 1})
    plan = plan_for(case, name, device, torch.float32)
    sizes = [(plan.num_in, channels), (plan.num_taps, channels, channels), (channels,), (plan.num_in, channels)]
    gen = torch.Generator().manual_seed(3)
    views = [torch.randn(*s, dtype=torch.complex64, generator=gen).to(device).conj().imag for s in sizes]
    assert all(t.is_neg() for t in views)
    runs = []
    for *inputs, grad in (views, [t.clone().resolve_neg() for t in views]):
        inputs = [t.detach().requires_grad_() for t in inputs]
        y = plan.execute(*inputs)
        with torch.no_grad():
            runs.append([y, plan.execute(*inputs, residual=grad), *torch.autograd.grad(y, inputs, grad)])
    for mine, wanted in zip(*runs):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", named("submanifold", "strided_overlap", "grouped", "inverse"), ids=str)
def test_an_input_gradient_onto_another(case, name, dtype, device):
    plan = plan_for(case, name, device, dtype)
    _, w, g = operands(plan, case, dtype)
    gen = torch.Generator().manual_seed(5)
    other = torch.randn(plan.kernel_map.num_in, case.c_in, generator=gen).to(device, dtype)
    kept, serving = other.clone(), backend(name)
    got = serving.input_grad_onto(g, w, plan.kernel_map, case.groups, other)
    want = serving.input_grad(g, w, plan.kernel_map, case.groups).double() + other.double()
    assert got.dtype == dtype
    assert error(got, want.cpu()) < TOLERANCE[dtype]
    assert torch.equal(other, kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", TWICE, ids=str)
def test_gradients_of_gradients(case, name, device):
    small = Case(**{**case.__dict__, "voxels": min(case.voxels, 12)})
    plan = plan_for(small, name, device, torch.float64)
    x, w, _ = operands(plan, small)
    bias = torch.randn(small.c_out, dtype=torch.float64, device=device, requires_grad=True)
    inputs = (x.requires_grad_(), w.requires_grad_(), bias)
    assert torch.autograd.gradcheck(plan.execute, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(plan.execute, inputs, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["auto", *BACKENDS])
@pytest.mark.parametrize("case", named("submanifold", "strided_overlap", "grouped", "inverse"), ids=str)
def test_second_derivatives_are_exact_and_the_backends_own(case, name, device, monkeypatch):
    """Gradients of gradients are sums of integers too; every one of them comes from the backend that was asked."""
    case = Case(**{**case.__dict__, "voxels": 15})
    plan = plan_for(case, name, device, torch.float32)
    serving = choose(plan.request(case.c_in, case.c_out, torch.float32), name)
    for other in BACKENDS:
        for verb in ("forward", "input_grad", "weight_grad", "gradients"):
            if backend(other) is not serving:
                monkeypatch.setattr(backend(other), verb, None, raising=False)
    x, w, g = (t.requires_grad_() for t in operands(plan, case, torch.float32, integers=True))
    along_x, along_w, _ = operands(plan, case, torch.float32, integers=True, seed=7)
    first = torch.autograd.grad(plan.execute(x, w), (x, w), g, create_graph=True)
    second = torch.autograd.grad(first, (x, w, g), (along_x, along_w))
    edges, groups, n_out = edges_of(plan), case.groups, plan.kernel_map.num_out
    xs, ws, gs, of_x, of_w = (t.detach().double().cpu().numpy() for t in (x, w, g, along_x, along_w))
    wanted = (
        oracle.input_grad(gs, of_w, edges, plan.kernel_map.num_in, groups),
        oracle.weight_grad(of_x, gs, edges, plan.num_taps, groups),
        oracle.convolve(of_x, ws, edges, n_out, groups) + oracle.convolve(xs, of_w, edges, n_out, groups),
    )
    for got, want in zip(second, wanted, strict=True):
        assert torch.equal(got.cpu(), torch.from_numpy(want).float())
