"""The seven products against the oracle: values, gradients, gradients of gradients, on every combination of flags."""

from __future__ import annotations

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import sparseconv.products as sp
from sparseconv.products import execute, plain
from tests.products import oracle
from tests.products.cases import (
    AXES,
    CASES,
    PRODUCT_NAMES,
    TOLERANCE,
    Case,
    gathered,
    inputs,
    listed,
    random_case,
    relative_error,
)

FLAGS = list(itertools.product([False, True], repeat=3))
SMALL = random_case("small", 7, 3, 3, 2, seed=4)
REWRITTEN = {
    "gathered": gathered,
    "listed": listed,
    "listed and gathered": lambda info: gathered(listed(info)),
}


def function(name):
    return getattr(sp, f"sparse_{name}")


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "".join("yn"[not v] for v in f))
@pytest.mark.parametrize("name", PRODUCT_NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torchs_operations_alone_are_exact(case, name, flags, monkeypatch):
    """What serves devices that have no kernels, here on the CPU; in pieces of a few terms."""
    monkeypatch.setattr(execute, "on_cpu", plain)
    monkeypatch.setattr(plain, "PIECE", 64)
    test_integers_are_exact_with_both_gradients(case, name, flags)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "".join("yn"[not v] for v in f))
@pytest.mark.parametrize("name", PRODUCT_NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_integers_are_exact_with_both_gradients(case, name, flags):
    shared1, shared2, accumulated = flags
    x, y = (t.requires_grad_() for t in inputs(name, case, shared1, shared2, dtype=torch.float32, integers=True))
    out = function(name)(x, y, *case.infos(torch.float32), accumulated)
    xr, yr = (t.detach().clone().requires_grad_() for t in (x, y))
    expected = oracle.product(name, xr, yr, case.triples, case.out_size, accumulated)
    assert out.shape == expected.shape
    assert torch.equal(out, expected)
    grad = torch.randint(-2, 3, out.shape, generator=torch.Generator().manual_seed(2)).float()
    got = torch.autograd.grad(out, (x, y), grad)
    wanted = torch.autograd.grad(expected, (xr, yr), grad, allow_unused=True, materialize_grads=True)
    for g, w in zip(got, wanted):
        assert g.shape == w.shape
        assert torch.equal(g, w)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "".join("yn"[not v] for v in f))
@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_gradients_of_every_order(name, flags):
    shared1, shared2, accumulated = flags
    axes = {"a": 2, "b": 3, "c": 2}
    x, y = (t.requires_grad_() for t in inputs(name, SMALL, shared1, shared2, batch=2, axes=axes))
    infos = SMALL.infos()
    call = lambda x, y: function(name)(x, y, *infos, accumulated)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, y))
    assert torch.autograd.gradgradcheck(call, (x, y))


@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_the_third_order(name):
    axes = {"a": 2, "b": 3, "c": 2}
    pairs = [[t.requires_grad_() for t in inputs(name, SMALL, False, False, batch=2, axes=axes)] for _ in range(2)]
    calls = [
        lambda x, y: function(name)(x, y, *SMALL.infos()),
        lambda x, y: oracle.product(name, x, y, SMALL.triples, SMALL.out_size),
    ]
    results = []
    for (x, y), call in zip(pairs, calls):
        found = call(x, y)
        for _ in range(3):
            found = torch.autograd.grad(found.square().sum() if found.dim() else found, (x, y), create_graph=True)
            results.append(found)
            found = sum(g.pow(3).sum() for g in found)
    for got, wanted in zip(results[:3], results[3:]):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("shared", [False, True], ids=["batched", "shared"])
@pytest.mark.parametrize("name", PRODUCT_NAMES)
@pytest.mark.parametrize("way", list(REWRITTEN))
def test_infos_written_otherwise_say_the_same(way, name, shared):
    infos = [REWRITTEN[way](info) for info in CASES[0].infos()]
    for info in infos:
        info.validate()
    x, y = (t.requires_grad_() for t in inputs(name, CASES[0], shared, shared))
    expected = function(name)(x, y, *CASES[0].infos())
    torch.testing.assert_close(function(name)(x, y, *infos), expected)
    assert torch.autograd.gradgradcheck(lambda x, y: function(name)(x, y, *infos), (x, y), fast_mode=True)


@pytest.mark.parametrize("shared", [False, True], ids=["batched", "shared"])
@pytest.mark.parametrize("name", PRODUCT_NAMES)
@pytest.mark.parametrize("absent", ["scale", "index1", "index2", "seg_out", "index1 index2", "scale index1 index2"])
def test_absent_fields_mean_the_identity(absent, name, shared):
    # term t: x row t where index1 is absent, and so on
    terms = 6
    rows = {
        "index1": list(range(terms)) if "index1" in absent else [3, 0, 0, 2, 1, 3],
        "index2": list(range(terms)) if "index2" in absent else [1, 1, 0, 2, 0, 2],
        "seg_out": list(range(terms)) if "seg_out" in absent else [0, 0, 1, 3, 3, 3],
    }
    scale = [1.0] * terms if "scale" in absent else [1.0, -2.0, 0.5, 3.0, -1.0, 2.0]
    case = Case(absent, list(zip(*rows.values(), scale)), 6, 6, 6)
    infos = list(case.infos())
    infos[0] = replace(infos[0], **dict.fromkeys(absent.split()))
    x, y = (t.requires_grad_() for t in inputs(name, case, shared, shared))
    out = function(name)(x, y, *infos)
    torch.testing.assert_close(out, oracle.product(name, x, y, case.triples, 6))
    assert torch.autograd.gradcheck(lambda x, y: function(name)(x, y, *infos), (x, y), fast_mode=True)
    # the same info as a gradient's: its absent fields are then read in the second order
    turned = [infos[1], infos[2], infos[0]]
    y2, z2 = (t.requires_grad_() for t in inputs("mul", case, shared, shared))
    assert torch.autograd.gradgradcheck(lambda y, z: sp.sparse_mul(y, z, *turned), (y2, z2), fast_mode=True)


@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_every_field_absent_is_the_dense_product_of_equal_rows(name):
    info = sp.SparseProductInfo(None, None, None, None, None, None, 4)
    case = Case("identity", [(t, t, t, 1.0) for t in range(4)], 4, 4, 4)
    x, y = inputs(name, case, False, True)
    torch.testing.assert_close(function(name)(x, y, info), oracle.product(name, x, y, case.triples, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_long_segments_accumulate_in_fp32(name, dtype):
    case = random_case("long", 5000, 2, 40, 50, seed=8)
    axes = {"a": 4, "b": 3, "c": 5}
    x, y = inputs(name, case, True, True, axes=axes, dtype=dtype)
    x, y = x.abs().requires_grad_(), y.abs().requires_grad_()
    infos = [replace(info, scale=info.scale.abs()) for info in case.infos(torch.float32)]
    out = function(name)(x, y, *infos)
    assert out.dtype == dtype
    xr, yr = (t.detach().double().requires_grad_() for t in (x, y))
    triples = [(i, j, m, abs(s)) for i, j, m, s in case.triples]
    expected = oracle.product(name, xr, yr, triples, 2)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    for got, wanted in zip(
        torch.autograd.grad(out, (x, y), torch.ones_like(out)),
        torch.autograd.grad(expected, (xr, yr), torch.ones_like(expected)),
    ):
        assert got.dtype == dtype
        assert relative_error(got, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_strides_do_not_matter(name):
    case = CASES[0]
    x, y = inputs(name, case, False, False)
    expected = function(name)(x, y, *case.infos())
    strided = [torch.empty(*t.shape[::-1], 2, dtype=t.dtype)[..., 0].permute(*range(t.dim())[::-1]) for t in (x, y)]
    for target, source in zip(strided, (x, y)):
        target.copy_(source)
    torch.testing.assert_close(function(name)(*strided, *case.infos()), expected)
    broadcast = x[:1].expand(x.shape)
    torch.testing.assert_close(
        function(name)(broadcast, y, *case.infos()), function(name)(x[0].contiguous(), y, *case.infos())
    )


@pytest.mark.parametrize("name", PRODUCT_NAMES)
@pytest.mark.parametrize("accumulated", [False, True])
def test_an_empty_batch(name, accumulated):
    case = CASES[0]
    for shared1, shared2 in ((False, False), (False, True), (True, False)):
        x, y = (t.requires_grad_() for t in inputs(name, case, shared1, shared2, batch=0))
        out = function(name)(x, y, *case.infos(), accumulated)
        expected = oracle.product(name, x, y, case.triples, case.out_size, accumulated)
        assert out.shape == expected.shape
        assert torch.equal(out, expected)
        grads = torch.autograd.grad(out.sum(), (x, y))
        assert [g.shape for g in grads] == [x.shape, y.shape]
        assert all(bool((g == 0).all()) for g in grads)


@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_pieces_of_batch_and_terms_join(name):
    # wide enough that the batch, and many enough terms that the terms, are taken in several pieces
    axes = {"a": 16, "b": 24, "c": 96}
    wide = random_case("wide", 40, 9, 6, 5, seed=3)
    many = random_case("many", 9000, 31, 50, 40, seed=5)
    for case, shared, batch in ((wide, False, 150), (many, True, 1), (many, False, 2)):
        x, y = inputs(name, case, shared, shared, batch=batch, axes=axes, dtype=torch.float32, integers=True)
        reduced = Case("one", case.triples, case.out_size, case.in1_size, case.in2_size)
        for accumulated in (False, True):
            out = function(name)(x, y, *reduced.infos(torch.float32), accumulated)
            index1, index2, index_out, scale = (torch.tensor(column) for column in case.columns())
            xs, ys = (t if shared else t.transpose(0, 1) for t in (x, y))
            dense = oracle.DENSE[name](xs[index1], ys[index2])
            dense = dense * scale.reshape(-1, *[1] * (dense.dim() - 1))
            expected = torch.zeros(case.out_size, *dense.shape[1:]).index_add_(0, index_out, dense)
            if not shared:
                expected = expected.sum(1) if accumulated else expected.transpose(0, 1)
            assert torch.equal(out, expected)


def test_two_runs_give_the_same_bits():
    case = random_case("many", 3000, 11, 50, 40, seed=5)
    x, y = inputs("mul", case, False, False, batch=4, dtype=torch.float32)
    runs = [sp.sparse_mul(x, y, *case.infos(torch.float32), True) for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_terms_in_any_order(data):
    name = data.draw(st.sampled_from(PRODUCT_NAMES))
    sizes = [data.draw(st.integers(1, 5)) for _ in range(3)]
    term = st.tuples(*(st.integers(0, size - 1) for size in sizes), st.integers(-2, 2).map(float))
    case = Case("drawn", data.draw(st.lists(term, max_size=12)), sizes[2], sizes[0], sizes[1])
    flags = [data.draw(st.booleans()) for _ in range(3)]
    axes = {letter: data.draw(st.integers(1, 4)) for letter in AXES}
    x, y = inputs(name, case, *flags[:2], axes=axes, integers=True)
    out = function(name)(x, y, *case.infos(), flags[2])
    assert torch.equal(out, oracle.product(name, x, y, case.triples, case.out_size, flags[2]))


@pytest.mark.parametrize("batched", [(), (1,), (2,), (1, 2)], ids=["shared", "first", "second", "both"])
@pytest.mark.parametrize("name", ["vecmat", "mat_t_vec", "outer"])
@pytest.mark.parametrize("form", ["sorted", "gathered", "identity"])
def test_terms_that_share_a_matrix_or_a_segment(form, name, batched):
    """Many terms a matrix, many a segment: matrix products of many rows take the place of one for each term."""
    case = random_case("few matrices", 3000, 9, 3000 if form == "identity" else 40, 5, seed=6)
    index1, index2, index_out, scale = case.columns()
    if form == "identity":
        index1 = list(range(3000))
    rows1, rows2 = (case.in2_size, case.in1_size) if name == "mat_t_vec" else (case.in1_size, case.in2_size)
    ways = (index2, index1) if name == "mat_t_vec" else (index1, index2)
    case = Case("few matrices", list(zip(*ways, index_out, scale)), 9, rows1, rows2)
    infos = case.infos(torch.float32)
    infos = [gathered(info) for info in infos] if form == "gathered" else infos
    given = inputs(name, case, 1 not in batched, 2 not in batched, dtype=torch.float32, integers=True)
    x, y = (t.requires_grad_() for t in given)
    index1, index2, index_out, scale = (torch.tensor(column) for column in case.columns())
    pairs = []
    for flag in (False, True):
        out = function(name)(x, y, *infos, flag)
        parts = zip((x, y), oracle.RANKS[name], (index1, index2))
        rows = [t.index_select(t.dim() - rank - 1, index) for t, rank, index in parts]
        dense = oracle.DENSE[name](*rows)
        axis = 1 if batched else 0
        dense = dense * scale.reshape(-1, *[1] * (dense.dim() - 1 - axis))
        want = dense.new_zeros(*dense.shape[:axis], 9, *dense.shape[axis + 1 :]).index_add(axis, index_out, dense)
        want = want.sum(0) if flag and batched else want
        pairs.append((out, want))
    for out, want in pairs:
        assert torch.equal(out, want)
        grad = torch.randint(-2, 3, out.shape, generator=torch.Generator().manual_seed(2)).float()
        for g, w in zip(torch.autograd.grad(out, (x, y), grad), torch.autograd.grad(want, (x, y), grad)):
            assert torch.equal(g, w)


@pytest.mark.parametrize("axes", [{"a": 24, "b": 16, "c": 33}, {"a": 16, "b": 24, "c": 1}], ids=["a > b", "a < b"])
@pytest.mark.parametrize("batched", [(1,), (2,), (1, 2)], ids=["first", "second", "both"])
@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_a_large_batch_of_few_terms(name, batched, axes):
    """Items are taken together until a piece is full, or terms one by one over the whole batch."""
    terms = [(0, 1, 2, 1.0), (2, 0, 0, -2.0), (1, 1, 2, 3.0), (2, 1, 2, 1.0)]  # row 1 is empty
    case = Case("few terms", terms, 4, 3, 2)
    given = inputs(name, case, 1 not in batched, 2 not in batched, 301, axes, torch.float32, integers=True)
    apart = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in given]
    infos = case.infos(torch.float32)
    for accumulated in (False, True):
        x, y = (t.requires_grad_() for t in given)
        out = function(name)(x, y, *infos, accumulated)
        expected = oracle.product(name, x, y, case.triples, case.out_size, accumulated)
        assert torch.equal(out, expected)
        assert torch.equal(function(name)(*apart, *infos, accumulated), expected)
        grad = torch.randint(-1, 2, out.shape, generator=torch.Generator().manual_seed(2)).float().requires_grad_()
        got = torch.autograd.grad(out, (x, y), grad, create_graph=True)
        wanted = torch.autograd.grad(expected, (x, y), grad, create_graph=True)
        for g, w in zip(got, wanted):
            assert torch.equal(g, w)
        turned = [
            torch.autograd.grad(first, (x, y, grad), [torch.ones_like(t) for t in first]) for first in (got, wanted)
        ]
        for g, w in zip(*turned):
            assert torch.equal(g, w)
