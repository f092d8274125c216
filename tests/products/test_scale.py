"""The sparse scale against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparseconv.products as sp
from sparseconv.products import execute, plain
from tests.products import oracle
from tests.products.cases import CASES, TOLERANCE, relative_error


def pairs(case):
    return [(i, m, s) for i, _, m, s in case.triples]


def infos(case, dtype=torch.float64):
    index, _, index_out, scale = case.columns()
    return sp.sparse_scale_infos(index, index_out, torch.tensor(scale, dtype=dtype), case.out_size, case.in1_size)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (40,)], ids=["shared", "one", "three", "none", "forty"])
@pytest.mark.parametrize("channels", [1, 7, 0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_integers_are_exact_with_the_gradient(case, channels, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (*shape, case.in1_size, channels), generator=generator).float().requires_grad_()
    out = sp.sparse_scale(x, *infos(case, torch.float32))
    expected = oracle.scale(x, pairs(case), case.out_size)
    assert torch.equal(out, expected)
    grad = torch.randint(-2, 3, out.shape, generator=generator).float()
    got = torch.autograd.grad(out, x, grad)[0]
    wanted = torch.autograd.grad(expected, x, grad)[0]
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("shape", [(), (3,), (0,)], ids=["shared", "three", "none"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torchs_operations_alone_are_exact(case, shape, monkeypatch):
    """What serves devices that have no kernels, here on the CPU; in pieces of a few terms."""
    monkeypatch.setattr(execute, "on_cpu", plain)
    monkeypatch.setattr(plain, "PIECE", 64)
    test_integers_are_exact_with_the_gradient(case, 7, shape)


@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: case.name)
def test_gradients_of_every_order(case):
    forward, backward = infos(case)
    x = torch.randn(2, case.in1_size, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sp.sparse_scale(x, forward, backward), (x,))
    assert torch.autograd.gradgradcheck(lambda x: sp.sparse_scale(x, forward, backward), (x,))


@pytest.mark.parametrize("absent", [(), ("scale",), ("index",), ("seg_out",), ("scale", "index", "seg_out")])
@pytest.mark.parametrize("named", [False, True], ids=["row M", "index_out"])
def test_absent_fields_and_named_rows(absent, named):
    terms = 5
    index = list(range(terms)) if "index" in absent else [3, 0, 0, 2, 1]
    rows = list(range(terms)) if "seg_out" in absent else [0, 0, 1, 3, 3]
    scale = [1.0] * terms if "scale" in absent else [1.0, -2.0, 0.5, 3.0, -1.0]
    info, backward = sp.sparse_scale_infos(index, rows, torch.tensor(scale, dtype=torch.float64), terms, terms)
    info = replace(info, **dict.fromkeys(absent))
    if named:
        place = torch.tensor([6, 2, 0, 5, 3])
        info = replace(info, index_out=place, out_size=8)
        _, backward = sp.sparse_scale_infos(index, place[rows], torch.tensor(scale, dtype=torch.float64), 8, terms)
        rows = place[rows].tolist()
    x = torch.randn(2, terms, 3, dtype=torch.float64, requires_grad=True)
    expected = oracle.scale(x, list(zip(index, rows, scale)), info.out_size)
    torch.testing.assert_close(sp.sparse_scale(x, info, backward), expected)
    assert torch.autograd.gradgradcheck(lambda x: sp.sparse_scale(x, info, backward), (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_segment_of_ten_thousand(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(50, 6, generator=generator).to(dtype)
    index = torch.randint(50, (10_000,), generator=generator)
    rows = torch.zeros(10_000, dtype=torch.int64)
    out = sp.sparse_scale(x, *sp.sparse_scale_infos(index, rows, None, 2, 50))
    expected = torch.zeros(2, 6, dtype=torch.float64).index_add_(0, rows, x.double()[index])
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]


def test_offsets_that_leave_terms_out():
    info = sp.SparseScaleInfo(None, torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3]), None, 2).validate(4)
    x = torch.arange(4.0)[:, None]
    assert sp.sparse_scale(x, info)[:, 0].tolist() == [1.0, 2.0]


def test_more_than_65535_segments():
    rows = torch.arange(70_000)
    infos = sp.sparse_scale_infos(rows.flip(0), rows, None, 70_000, 70_000)
    x = torch.arange(70_000.0)[:, None].requires_grad_()
    out = sp.sparse_scale(x, *infos)
    assert torch.equal(out, x.flip(0))
    assert torch.equal(torch.autograd.grad(out, x, x.detach())[0], x.detach().flip(0))


@pytest.mark.parametrize("batched", [False, True], ids=["shared", "batched"])
def test_the_same_bits_from_any_strides(batched):
    case = CASES[-1]
    shape = (3, case.in1_size, 6) if batched else (case.in1_size, 6)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    apart = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    forward, backward = (replace(info, scale=torch.rand(len(case.triples))) for info in infos(case, torch.float32))
    assert torch.equal(sp.sparse_scale(x, forward), sp.sparse_scale(apart, forward))
    grad = torch.randn(*shape[:-2], case.out_size, 6)
    apart = grad.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(sp.sparse_scale(grad, backward), sp.sparse_scale(apart, backward))


def test_rows_that_are_only_scaled_and_moved():
    rows, factors = torch.arange(70_000), (torch.arange(70_000) % 3 - 1).float()
    infos = sp.sparse_scale_infos(rows.flip(0), rows, factors, 70_000, 70_000)
    x = torch.randint(-2, 3, (70_000, 9), generator=torch.Generator().manual_seed(0)).float().requires_grad_()
    out = sp.sparse_scale(x, *infos)
    assert torch.equal(out, x.flip(0) * factors[:, None])
    assert torch.equal(torch.autograd.grad(out, x, x.detach())[0], (x * factors[:, None]).flip(0).detach())
    assert torch.equal(sp.sparse_scale(torch.stack([x, -x]), *infos), torch.stack([out, -out]))
