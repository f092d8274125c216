"""``out=``: the same bits as without it, wherever it lies, and refusals that write nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

import sparseconv.products as sp
from tests.products.cases import CASES, PRODUCT_NAMES, inputs, listed, random_case

FLAGS = list(itertools.product([False, True], repeat=3))
CASE = random_case("small", 9, 5, 4, 3, seed=2)


def function(name):
    return getattr(sp, f"sparse_{name}")


def apart(like):
    """An uninitialised result whose elements lie apart, filled with what nobody should read."""
    return torch.full((*like.shape, 3), float("nan"), dtype=like.dtype)[..., 1]


@pytest.mark.parametrize("make", [lambda like: torch.full_like(like, float("nan")), apart], ids=["dense", "strided"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "".join("yn"[not v] for v in f))
@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_products_write_what_they_would_return(name, flags, dtype, make):
    shared1, shared2, accumulated = flags
    x, y = inputs(name, CASE, shared1, shared2, dtype=dtype)
    forward = listed(CASE.infos(dtype)[0])
    expected = function(name)(x, y, forward, out_accumulated=accumulated)
    out = make(expected)
    version = out._version
    assert function(name)(x, y, forward, out_accumulated=accumulated, out=out) is out
    assert torch.equal(out, expected)
    assert out._version > version


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scales_write_what_they_would_return(case):
    index, _, index_out, scale = case.columns()
    info = sp.sparse_scale_info(index, index_out, torch.tensor(scale), case.out_size, case.in1_size)
    for shape in ((case.in1_size, 5), (2, case.in1_size, 5), (0, case.in1_size, 5)):
        x = torch.randn(shape)
        expected = sp.sparse_scale(x, info)
        out = apart(expected)
        assert sp.sparse_scale(x, info, out=out) is out
        assert torch.equal(out, expected)


def test_out_is_overwritten_and_rows_that_nobody_lists_are_zero():
    info = sp.SparseScaleInfo(None, torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([2]), 4)
    out = torch.full((4, 1), 7.0)
    sp.sparse_scale(torch.tensor([[1.0], [2.0]]), info, out=out)
    assert out.flatten().tolist() == [0, 0, 3, 0]


def test_out_may_lie_over_an_input():
    infos = sp.sparse_product_infos([1, 2, 0], [0, 1, 2], [0, 1, 2], None, 3, 3, 3)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    expected = sp.sparse_mul(x, y, infos[0])
    assert torch.equal(sp.sparse_mul(x, y, infos[0], out=x), expected)


def test_out_within_compile_and_vmap_and_autocast():
    info = CASE.infos(torch.float32)[0]
    x, y = inputs("mul", CASE, False, False, dtype=torch.float32)
    expected = sp.sparse_mul(x, y, info)
    out = torch.empty_like(expected)
    compiled = torch.compile(lambda x, y, out: sp.sparse_mul(x, y, info, out=out), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, y, out), expected)
    assert torch.equal(out, expected)
    with torch.autocast("cpu", torch.bfloat16):
        half = sp.sparse_mul(x, y, info)
        assert torch.equal(sp.sparse_mul(x, y, info, out=torch.empty_like(half)), half)
        with pytest.raises(TypeError, match=r"result is torch.bfloat16, but out is torch.float32"):
            sp.sparse_mul(x, y, info, out=out)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda like: like[:-1], ValueError, "shape"),
        (lambda like: like[None], ValueError, "shape"),
        (lambda like: like.double(), TypeError, "float64"),
        (lambda like: like.to("meta"), ValueError, "meta"),
        (lambda like: like[:1].clone().expand_as(like), ValueError, "share memory"),
        (lambda like: like.to_sparse(), TypeError, "to_dense"),
        (lambda like: like.numpy(), TypeError, "as_tensor"),
        (lambda like: like.tolist(), TypeError, "list"),
        (lambda like: like.clone().requires_grad_(), ValueError, "not differentiable"),
    ],
)
def test_out_that_does_not_fit_is_refused_before_anything_is_written(make, kind, words):
    info = sp.sparse_scale_info([0, 1], [0, 1], None, 2, 2)
    x, like = torch.ones(2, 3), torch.full((2, 3), 7.0)
    out = make(like)
    with pytest.raises(kind, match=words):
        sp.sparse_scale(x, info, out=out)
    with pytest.raises(kind, match=words):
        sp.sparse_mul(x, x, sp.sparse_product_info([0, 1], [0, 1], [0, 1], None, 2, 2, 2), out=out)
    assert bool((like == 7).all())


def test_out_is_refused_where_a_gradient_is_asked_for_as_torch_does():
    info = sp.sparse_scale_info([0, 1], [0, 1], None, 2, 2)
    x, out = torch.ones(2, 3, requires_grad=True), torch.empty(2, 3)
    with pytest.raises(ValueError, match="not differentiable"):
        sp.sparse_scale(x, info, out=out)
    with torch.no_grad():
        assert torch.equal(sp.sparse_scale(x, info, out=out), x)
