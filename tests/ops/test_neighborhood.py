"""Attention and depthwise convolution over a plan's edges: against loops and torch, gradients to the second order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sparseconv as sc
from sparseconv import ops
from tests.backends.test_every_backend import edges_of
from tests.cases import CASES, TOLERANCE, Case, build, error, named, operands

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ATTENTION = named("no_voxels", "no_pairs", "submanifold", "asymmetric", "strided_gaps", "periodic", "cross", "inverse")
DEPTHWISE = [case for case in CASES if case.groups == 1 or case.groups == case.c_in == case.c_out]


def tensors(plan, heads=(), dtype=torch.float64, device="cpu", seed=0, channels=(4, 3)):
    """q (N_out, H, C), k (N_in, H, C), v (N_in, H, C_v), bias (K, H); without H where heads is empty."""
    gen = torch.Generator().manual_seed(seed)
    rows_in, rows_out = plan.kernel_map.num_in, plan.kernel_map.num_out
    shapes = [(rows_out, *heads, channels[0]), (rows_in, *heads, channels[0]), (rows_in, *heads, channels[1])]
    made = [torch.randn(shape, generator=gen) for shape in (*shapes, (plan.num_taps, *heads))]
    return [t.to(dtype).to(device) for t in made]


def looped(q, k, v, bias, edges, scale):
    """Output by output, in torch's own softmax."""
    q, k, v, bias = (t.double().cpu() for t in (q, k, v, bias))
    y = v.new_zeros(q.shape[0], *v.shape[1:])
    for out in range(q.shape[0]):
        seen = [(tap, i) for tap, i, o in edges if o == out]
        if seen:
            logits = torch.stack([scale * (q[out] * k[i]).sum(-1) + bias[tap] for tap, i in seen])
            weights = logits.softmax(0)
            y[out] = sum(w[..., None] * v[i] for w, (_, i) in zip(weights, seen, strict=True))
    return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(), (3,)], ids=["plain", "heads"])
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_against_loops(case, heads, dtype, device):
    plan = build(case, device)
    edges = edges_of(plan)
    q, k, v, bias = tensors(plan, heads, dtype, device)
    got = ops.neighborhood_attention(q, k, v, plan, bias=bias)
    assert got.dtype == dtype
    assert error(got, looped(q, k, v, bias, edges, 0.5)) < TOLERANCE[dtype]
    got = ops.neighborhood_attention(q, k, v, plan, scale=2.0)
    assert error(got, looped(q, k, v, torch.zeros_like(bias), edges, 2.0)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [(), (2,)], ids=["plain", "heads"])
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_logits_and_softmax_follow_the_edges_of_the_map(case, heads):
    plan = build(case)
    edges = plan.kernel_map
    q, k, _, _ = tensors(plan, heads)
    logits = ops.neighborhood_logits(q, k, plan)
    outs, ins = edges.out_rows.long(), edges.in_rows.long()
    assert logits.shape == (edges.num_pairs, *heads)
    assert error(logits, (q[outs] * k[ins]).sum(-1)) < 1e-12
    weights = ops.neighborhood_softmax(logits * 300, plan)  # far past what exp holds
    sums = torch.zeros(edges.num_out, *heads, dtype=weights.dtype).index_add_(0, outs, weights)
    assert error(sums, (torch.bincount(outs, minlength=edges.num_out) > 0).double().view(-1, *[1] * len(heads))
                 .expand_as(sums)) < 1e-12  # fmt: skip


@pytest.mark.parametrize("heads", [(), (2,)], ids=["plain", "heads"])
@pytest.mark.parametrize("name", ["submanifold", "strided_gaps", "inverse"])
def test_attention_gradients_to_the_second_order(name, heads):
    case = named(name)[0]
    plan = build(Case(**{**case.__dict__, "voxels": 12, "extent": 3}))
    given = tuple(t.requires_grad_() for t in tensors(plan, heads, channels=(2, 3)))

    def attend(q, k, v, bias):
        return ops.neighborhood_attention(q, k, v, plan, bias=bias)

    assert torch.autograd.gradcheck(attend, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, given, fast_mode=True)


def test_full_attention_is_torchs():
    """A window that sees all of a small box is attention over all of its voxels."""
    grid = sc.VoxelGrid(torch.cartesian_prod(torch.zeros(1).long(), *(torch.arange(3),) * 2))
    plan = sc.ConvolutionPlan(grid, 5)
    q, k, v, _ = (t.requires_grad_() for t in tensors(plan, (2,)))
    got = ops.neighborhood_attention(q, k, v, plan)
    want = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v))).transpose(0, 1)
    assert error(got, want) < 1e-12
    grad = torch.randn_like(got)
    for ours, theirs in zip(*(torch.autograd.grad(y, (q, k, v), grad) for y in (got, want)), strict=True):
        assert error(ours, theirs) < 1e-12


def test_an_output_whose_logits_are_all_masked_is_zero():
    plan = build(named("submanifold")[0])
    q, k, v, bias = tensors(plan)
    q.requires_grad_()
    y = ops.neighborhood_attention(q, k, v, plan, bias=torch.full_like(bias, -torch.inf))
    assert torch.equal(y, torch.zeros_like(y))
    masked = bias.clone()
    masked[plan.kernel_map.identity_tap] = -torch.inf
    y = ops.neighborhood_attention(q, k, v, plan, bias=masked)
    assert y.isfinite().all()
    edges = [edge for edge in edges_of(plan) if edge[0] != plan.kernel_map.identity_tap]
    assert error(y, looped(q.detach(), k, v, bias, edges, 0.5)) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DEPTHWISE, ids=str)
def test_depthwise_equals_the_plan_with_as_many_groups(case, dtype, device):
    plan = build(case, device)
    x, _, _ = operands(plan, case, dtype)
    channels = x.shape[1]
    gen = torch.Generator().manual_seed(5)
    weight = torch.randn(plan.num_taps, channels, generator=gen).to(dtype).to(device).requires_grad_()
    grad = torch.randn(plan.kernel_map.num_out, channels, generator=gen).to(dtype).to(device)
    x = x.requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = plan.with_groups(channels).execute(exact[0], exact[1][:, None])
    for given in (weight, weight[:, None]):
        got = ops.depthwise_convolution(x, given, plan)
        assert got.dtype == dtype
        assert error(got, want.detach().cpu()) < TOLERANCE[dtype]
    ours = torch.autograd.grad(got, (x, weight), grad)
    theirs = torch.autograd.grad(want, exact, grad.double())
    for got, want in zip(ours, theirs, strict=True):
        assert error(got, want.cpu()) < TOLERANCE[dtype]


def test_depthwise_gradients_to_the_second_order():
    plan = build(Case("small", voxels=10, extent=3, kernel=2, options={"stride": 2}))
    x = torch.randn(plan.kernel_map.num_in, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(plan.num_taps, 3, dtype=torch.float64, requires_grad=True)
    given = (x, weight)
    assert torch.autograd.gradcheck(lambda x, w: ops.depthwise_convolution(x, w, plan), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x, w: ops.depthwise_convolution(x, w, plan), given, fast_mode=True)


def test_the_same_bits_in_every_run_and_ready_plans_compile():
    plan = build(named("submanifold")[0])
    given = [t.requires_grad_() for t in tensors(plan, (2,), torch.float32)]

    def attend(q, k, v, bias):
        return ops.neighborhood_attention(q, k, v, plan, bias=bias)

    want = attend(*given)
    wanted = torch.autograd.grad(want.square().sum(), given)
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        got = function(*given)
        assert torch.equal(got, want)
        for one, other in zip(torch.autograd.grad(got.square().sum(), given), wanted, strict=True):
            assert torch.equal(one, other)


def test_under_autocast_the_softmax_stays_in_fp32():
    plan = build(named("submanifold")[0])
    q, k, v, bias = tensors(plan, (), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = ops.neighborhood_attention(q, k, v, plan, bias=bias)
        weights = ops.neighborhood_softmax(bias.index_select(0, plan.kernel_map.pair_taps), plan)
    assert weights.dtype == torch.float32
    assert error(got, looped(q, k, v, bias, edges_of(plan), 0.5)) < TOLERANCE[torch.bfloat16]


def test_errors_say_what_to_do():
    plan = build(named("strided")[0])
    q, k, v, bias = tensors(plan)
    for match, kind, call in (
        (r"q must be \(\d+, C\) or \(\d+, H, C\)", ValueError, lambda: ops.neighborhood_logits(q[1:], k, plan)),
        (r"k must be", ValueError, lambda: ops.neighborhood_logits(q, k[1:], plan)),
        ("same heads and channels", ValueError, lambda: ops.neighborhood_logits(q, k[:, 1:], plan)),
        ("v must have the heads", ValueError, lambda: ops.neighborhood_attention(q, k, v[:, None], plan)),
        ("bias must be", ValueError, lambda: ops.neighborhood_attention(q, k, v, plan, bias=bias[1:])),
        ("one row per edge", ValueError, lambda: ops.neighborhood_softmax(bias, plan)),
        ("floating point", TypeError, lambda: ops.neighborhood_logits(q, k.long(), plan)),
        ("the plan is on cpu", ValueError, lambda: ops.neighborhood_logits(q, k.to("meta"), plan)),
        ("weight must be", ValueError, lambda: ops.depthwise_convolution(k, torch.zeros(3, 3), plan)),
        ("x must be", ValueError, lambda: ops.depthwise_convolution(q[1:], torch.zeros(3, 3), plan)),
    ):
        with pytest.raises(kind, match=match):
            call()
