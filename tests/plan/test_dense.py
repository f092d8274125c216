"""The semantics are torch's: a plan on random occupancies equals dense convolution of the zero-filled volume."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import sparseconv as sc
from tests import oracle

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SIZE = {1: 17, 2: 8, 3: 6}


@st.composite
def problems(draw):
    rank = draw(st.integers(1, 3))
    most = {1: 5, 2: 5, 3: 4}[rank]
    kernel = tuple(draw(st.lists(st.integers(1, most), min_size=rank, max_size=rank)))
    stride = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    dilation = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    padding = draw(st.one_of(st.none(), st.tuples(*[st.integers(0, 3)] * rank)))
    occupancy = draw(st.sampled_from([0.01, 0.1, 0.4, 1.0]))
    return rank, kernel, stride, dilation, padding, occupancy, draw(st.integers(0, 10_000))


def scene(rank, occupancy, seed, channels=3, batch=2):
    gen = torch.Generator().manual_seed(seed)
    shape = (SIZE[rank],) * rank
    mask = torch.rand(batch, *shape, generator=gen) < occupancy
    grid = sc.VoxelGrid(mask.nonzero()[torch.randperm(int(mask.sum()), generator=gen)], batch)
    x = torch.randn(len(grid), channels, generator=gen, dtype=torch.float64, requires_grad=True)
    return grid, x, shape, gen


def at(dense: torch.Tensor, grid: sc.VoxelGrid) -> torch.Tensor:
    """The values (N, C) of a dense (B, C, *spatial) at a grid's voxels."""
    return dense.movedim(1, -1)[tuple(grid.coords.long().unbind(1))]


def same_with_gradients(got, want, inputs, gen):
    assert torch.allclose(got, want, atol=1e-10)
    cotangent = torch.randn(got.shape, generator=gen, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(got, inputs, cotangent), torch.autograd.grad(want, inputs, cotangent)):
        assert torch.allclose(a, b, atol=1e-10)


@given(problems())
def test_regular_convolution_is_torchs(problem):
    rank, kernel, stride, dilation, padding, occupancy, seed = problem
    grid, x, shape, gen = scene(rank, occupancy, seed)
    w = torch.randn(4, 3, *kernel, generator=gen, dtype=torch.float64, requires_grad=True)
    pad = oracle.default_padding(kernel, dilation) if padding is None else padding
    plan = sc.ConvolutionPlan(grid, kernel, stride=stride, dilation=dilation, padding=padding, target="full")
    given_weight = w if rank > 1 else w.permute(2, 1, 0)
    y = plan.execute(x, given_weight)
    # dense, with room for outputs that lie outside of torch's own frame
    room = tuple(2 * d * k for d, k in zip(dilation, kernel))
    room = tuple(-(-r // s) * s for r, s in zip(room, stride))
    whole = CONV[rank](
        F.pad(grid.to_dense(x, shape), [v for r, p in zip(reversed(room), reversed(pad)) for v in (r + p, r + p)]),
        w,
        stride=stride,
        dilation=dilation,
    )
    moved = plan.target.coords.clone()
    moved[:, 1:] += torch.tensor([r // s for r, s in zip(room, stride)], dtype=torch.int32)
    assert bool((moved >= 0).all())
    same_with_gradients(y, whole.movedim(1, -1)[tuple(moved.long().unbind(1))], (x, w), gen)
    # and nothing but those outputs can be non-zero
    left = whole.detach().clone().movedim(1, -1)
    left[tuple(moved.long().unbind(1))] = 0
    assert not bool(left.any())


@given(problems())
def test_outputs_on_a_given_grid_are_torchs(problem):
    rank, kernel, stride, dilation, padding, occupancy, seed = problem
    grid, x, shape, gen = scene(rank, occupancy, seed)
    w = torch.randn(*[4, 3], *kernel, generator=gen, dtype=torch.float64, requires_grad=True)
    pad = oracle.default_padding(kernel, dilation) if padding is None else padding
    want = F_conv(rank, grid.to_dense(x, shape), w, stride, pad, dilation)
    if want is None:
        return
    sites = (torch.rand(2, *want.shape[2:], generator=gen) < 0.5).nonzero()
    target = sc.VoxelGrid(sites, 2)
    plan = sc.ConvolutionPlan(grid, kernel, stride=stride, dilation=dilation, padding=padding, target=target)
    y = plan.execute(x, w if rank > 1 else w.permute(2, 1, 0))
    same_with_gradients(y, at(want, target), (x, w), gen)


def F_conv(rank, dense, w, stride, pad, dilation):
    """torch's convolution, or None where its frame has no output at all."""
    for n, k, d, p in zip(dense.shape[2:], w.shape[2:], dilation, pad):
        if n + 2 * p < d * (k - 1) + 1:
            return None
    return CONV[rank](dense, w, stride=stride, padding=pad, dilation=dilation)


@given(problems())
def test_transposed_convolution_is_torchs(problem):
    rank, kernel, stride, dilation, _, occupancy, seed = problem
    coarse, x, shape, gen = scene(rank, occupancy, seed)
    w = torch.randn(3, 4, *kernel, generator=gen, dtype=torch.float64, requires_grad=True)  # torch's: (C_in, C_out, *k)
    want = CONV_TRANSPOSE[rank](coarse.to_dense(x, shape), w, stride=stride, dilation=dilation)
    by_tap = w.flatten(2).permute(2, 0, 1)
    plan = sc.ConvolutionPlan.transposed(coarse, kernel, stride=stride, dilation=dilation, padding=0)
    y = plan.execute(x, by_tap)
    same_with_gradients(y, at(want, plan.target), (x, w), gen)
    want = CONV_TRANSPOSE[rank](coarse.to_dense(x, shape), w, stride=stride, dilation=dilation)
    left = want.detach().clone().movedim(1, -1)
    left[tuple(plan.target.coords.long().unbind(1))] = 0
    assert not bool(left.any())
    sites = (torch.rand(2, *want.shape[2:], generator=gen) < 0.5).nonzero()
    fine = sc.VoxelGrid(sites, 2)
    onto = sc.ConvolutionPlan.transposed(coarse, kernel, stride=stride, dilation=dilation, padding=0, target=fine)
    same_with_gradients(onto.execute(x, by_tap), at(want, fine), (x, w), gen)


@given(problems())
def test_transpose_is_the_exact_adjoint(problem):
    rank, kernel, stride, dilation, padding, occupancy, seed = problem
    grid, x, _, gen = scene(rank, occupancy, seed)
    plan = sc.ConvolutionPlan(grid, kernel, stride=stride, dilation=dilation, padding=padding)
    w = torch.randn(plan.num_taps, 3, 4, generator=gen, dtype=torch.float64)
    g = torch.randn(len(plan.target), 4, generator=gen, dtype=torch.float64)
    back = plan.transpose()
    assert back.target is plan.source
    assert back.kernel_map.reverse() is plan.kernel_map
    inner = (plan.execute(x, w) * g).sum()
    assert torch.allclose(inner, (x * back.execute(g, w.transpose(1, 2))).sum(), atol=1e-9)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (2, 2, 1), (3, 2, 2), (4, 3, 1)])
def test_torch_obeys_the_same_oracle(rank, kernel, stride, dilation):
    """The judge judged: torch's dense convolution, and its transpose, on a full grid against the loops."""
    kernel, stride, dilation = ((v,) * rank for v in (kernel, stride, dilation))
    size = {1: 9, 2: 7, 3: 5}[rank]
    pad = oracle.default_padding(kernel, dilation)
    fine = list(itertools.product(range(1), *[range(size)] * rank))
    dense = torch.randn(1, 2, *[size] * rank, dtype=torch.float64)
    w = torch.randn(3, 2, *kernel, dtype=torch.float64)
    want = CONV[rank](dense, w, stride=stride, padding=pad, dilation=dilation)
    coarse = list(itertools.product(range(1), *map(range, want.shape[2:])))
    taps = oracle.window_taps(kernel, dilation)
    edges = oracle.edges(fine, coarse, taps, stride, pad)
    x = dense.flatten(2)[0].T.numpy()
    by_tap = w.flatten(2).permute(2, 1, 0).numpy()
    assert np.allclose(oracle.convolve(x, by_tap, edges, len(coarse)), want.flatten(2)[0].T)
    g = torch.randn_like(want)
    fits = [
        (n - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, d, k in zip(want.shape[2:], stride, pad, dilation, kernel)
    ]
    extra = [size - n for n in fits]
    if all(0 <= e < max(s, d) for e, s, d in zip(extra, stride, dilation)):
        back = CONV_TRANSPOSE[rank](g, w, stride=stride, padding=pad, dilation=dilation, output_padding=extra)
        adjoint = oracle.input_grad(g.flatten(2)[0].T.numpy(), by_tap, edges, len(fine))
        assert np.allclose(adjoint, back.flatten(2)[0].T)
