"""A convolution is a sparse product of vectors and matrices over its map: results and gradients to the second order."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch

from sparseconv.products import sparse_mul, sparse_vecmat
from tests.backends.test_every_backend import edges_of
from tests.cases import CASES, TOLERANCE, build, error, operands

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DENSE_CHANNELS = [case for case in CASES if case.groups == 1]


def first_and_second(function, x, weight, grad):
    """y, its gradients to x and weight, and the gradients of those gradients to x, weight and the incoming one."""
    x, weight, grad = (t.detach().clone().requires_grad_() for t in (x, weight, grad))
    y = function(x, weight)
    first = torch.autograd.grad(y, (x, weight), grad, create_graph=True)
    probes = [torch.cos(torch.arange(t.numel(), dtype=t.dtype, device=t.device)).view_as(t) for t in first]
    second = torch.autograd.grad(first, (x, weight, grad), probes)
    return y, *first, *second


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", DENSE_CHANNELS, ids=str)
def test_a_plan_is_sparse_vecmat_over_its_map(case, dtype, device):
    plan = build(case, device)
    given = operands(plan, case, dtype)
    infos = plan.kernel_map.product_infos()
    planned = first_and_second(plan.execute, *given)
    product = first_and_second(lambda x, w: sparse_vecmat(x, w, *infos), *given)
    for got, want in zip(product, planned, strict=True):
        assert got.dtype == want.dtype
        assert error(got, want.double().cpu()) < TOLERANCE[dtype]


@pytest.mark.parametrize("case", DENSE_CHANNELS, ids=str)
def test_with_integers_the_two_are_equal_bit_for_bit(case):
    plan = build(case)
    x, weight, _ = operands(plan, case, torch.float32, integers=True)
    assert torch.equal(sparse_vecmat(x, weight, *plan.kernel_map.product_infos()), plan.execute(x, weight))


@pytest.mark.parametrize("case", [case for case in CASES if case.c_in == case.c_out == case.groups], ids=str)
def test_a_depthwise_plan_is_sparse_mul_over_its_map(case):
    plan = build(case)
    x, weight, grad = operands(plan, case)
    infos = plan.kernel_map.product_infos()
    planned = first_and_second(plan.execute, x, weight, grad)
    product = first_and_second(lambda x, w: sparse_mul(x, w[:, 0], *infos), x, weight, grad)
    for got, want in zip(product, planned, strict=True):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_infos_are_the_edges_and_views_of_the_map(case):
    plan = build(case)
    edges = plan.kernel_map
    infos = edges.product_infos()
    assert infos is edges.product_infos()
    sizes = [(edges.num_in, edges.num_taps), (edges.num_taps, edges.num_out), (edges.num_out, edges.num_in)]
    for info, (size1, size2) in zip(infos, sizes, strict=True):
        info.validate(size1, size2)
    forward, backward1, backward2 = infos
    assert forward.index1 is edges.in_rows
    assert backward2.index1 is edges.out_rows
    assert backward2.seg_out is edges.tap_offsets
    found = set()
    for info, place in ((forward, (2, 0, 1)), (backward1, (0, 1, 2)), (backward2, (1, 2, 0))):
        assert terms_of(info, place) == sorted(edges_of(plan))
        found.add(info.num_segments)
    assert found == {edges.num_out, edges.num_in, edges.num_taps}
    again = pickle.loads(pickle.dumps(edges)).product_infos()
    assert terms_of(again[0], (2, 0, 1)) == terms_of(forward, (2, 0, 1))


def terms_of(info, place):
    """The terms of an info, sorted (tap, in, out); ``place`` says what of these its row, index1 and index2 are."""
    bounds = info.seg_out.tolist()
    terms = []
    for row, (begin, end) in enumerate(pairwise(bounds)):
        for k in range(begin, end):
            t = k if info.gather_index is None else int(info.gather_index[k])
            term = dict(zip(place, (row, int(info.index1[t]), int(info.index2[t]))))
            terms.append((term[1], term[0], term[2]))
    return sorted(terms)
