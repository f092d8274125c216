"""What torch asks of an operation: opcheck, compile, autocast."""

from __future__ import annotations

import pytest
import torch

import sparseconv.products as sp
from sparseconv.products import autograd
from sparseconv.products.execute import accumulator
from sparseconv.products.table import PRODUCTS
from sparseconv.products.terms import pack
from tests.products.cases import CASES, PRODUCT_NAMES, inputs

CASE = CASES[0]


def function(name):
    return getattr(sp, f"sparse_{name}")


@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_opcheck_of_the_products(name):
    infos = CASE.infos()
    packed = [pack(info.terms) for info in infos]
    sizes = [info.out_size for info in infos]
    for shared1, shared2, accumulated in ((False, False, False), (True, False, True), (False, False, True)):
        x, y = (t.requires_grad_() for t in inputs(name, CASE, shared1, shared2))
        torch.library.opcheck(
            torch.ops.sparseconv.sparse_product.default,
            (x, y, *(p.tensors for p in packed), [p.layout for p in packed], sizes, name, accumulated),
        )


def test_opcheck_of_the_scale():
    infos = sp.sparse_scale_infos([0, 2, 1], [1, 1, 0], [1.0, 2.0, 3.0], 3, 3)
    x = torch.randn(2, 3, 4, requires_grad=True)
    packed = [pack(info.terms) for info in infos]
    torch.library.opcheck(
        torch.ops.sparseconv.sparse_scale.default,
        (x, *(p.tensors for p in packed), [p.layout for p in packed], [i.out_size for i in infos]),
    )


class Layer(torch.nn.Module):
    """Holds its infos as a user's layer would."""

    def __init__(self, name, infos):
        super().__init__()
        self.name, self.infos = name, infos

    def forward(self, x, y):
        return function(self.name)(x.sin(), y, *self.infos, False).cos()


@pytest.mark.parametrize("name", ["mul", "vecmat", "inner"])
def test_compiles_as_one_graph_with_gradients(name):
    layer = Layer(name, CASE.infos())
    x, y = (t.requires_grad_() for t in inputs(name, CASE, False, True))
    expected = layer(x, y)
    wanted = torch.autograd.grad(expected.square().sum(), (x, y))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(x, y)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (x, y)), wanted)


def test_compiles_with_infos_as_arguments_and_any_batch():
    infos = CASE.infos()
    compiled = torch.compile(sp.sparse_mul, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (3, 5, 8):
        x, y = inputs("mul", CASE, False, False, batch=batch)
        torch.testing.assert_close(compiled(x, y, *infos), sp.sparse_mul(x, y, *infos))


@pytest.mark.slow
def test_compiles_through_the_inductor():
    layer = Layer("vecmat", CASE.infos())
    x, y = (t.requires_grad_() for t in inputs("vecmat", CASE, False, True))
    expected = layer(x, y)
    out = torch.compile(layer, fullgraph=True)(x, y)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_takes_the_users_dtype(dtype):
    infos = CASE.infos(torch.float32)
    x, y = (t.requires_grad_() for t in inputs("vecmat", CASE, False, True, dtype=torch.float32))
    with torch.autocast("cpu", dtype=dtype):
        out = sp.sparse_vecmat(x, y, *infos)
        scaled = sp.sparse_scale(x, *sp.sparse_scale_infos([0], [0], None, out_size=1, in_size=4))
    assert out.dtype == scaled.dtype == dtype
    assert torch.equal(out, sp.sparse_vecmat(x.to(dtype), y.to(dtype), *infos))
    grads = torch.autograd.grad(out.float().sum(), (x, y))
    assert [g.dtype for g in grads] == [torch.float32] * 2
    with torch.autocast("cpu", dtype=dtype):
        assert sp.sparse_vecmat(x.double(), y.double(), *infos).dtype == torch.float64


def test_mixed_dtypes_promote_and_each_gradient_keeps_its_own():
    infos = CASE.infos(torch.float32)
    x, y = inputs("mul", CASE, False, False, dtype=torch.float32)
    x, y = x.requires_grad_(), y.half().requires_grad_()
    out = sp.sparse_mul(x, y, *infos)
    assert out.dtype == torch.float32
    grads = torch.autograd.grad(out.sum(), (x, y))
    assert [g.dtype for g in grads] == [torch.float32, torch.float16]


def test_accumulators():
    assert accumulator(torch.bfloat16) == accumulator(torch.float32) == torch.float32
    assert accumulator(torch.float64) == torch.float64


@pytest.mark.parametrize("name", ["SparseMul", "SparseOuter", "SparseInner", "SparseVecMat", "SparseVecSca"])
def test_the_classes_apply_as_the_functions_do(name):
    product = {"SparseVecMat": "vecmat", "SparseVecSca": "vecsca"}.get(name, name[6:].lower())
    x, y = inputs(product, CASE, False, False)
    assert torch.equal(getattr(sp, name).apply(x, y, *CASE.infos(), True), function(product)(x, y, *CASE.infos(), True))


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "shared"])
@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_only_the_gradients_asked_for_are_computed(name, batched, monkeypatch):
    infos = CASE.infos()
    x, y = inputs(name, CASE, not batched, not batched)
    ran = []
    execute = autograd.execute_product
    monkeypatch.setattr(autograd, "execute_product", lambda row, *rest: ran.append(row.name) or execute(row, *rest))
    row = PRODUCTS[name]
    both = torch.autograd.grad(function(name)(x.requires_grad_(), y.requires_grad_(), *infos).sum(), (x, y))
    assert sorted(ran) == sorted([name, row.grad1.product, row.grad2.product])
    # the other's info is neither given nor needed, and nothing but the one gradient runs
    alone = ((x, y.detach(), row.grad1, infos[1], None), (x.detach(), y, row.grad2, None, infos[2]))
    for (first, second, rule, *backward), leaf, wanted in zip(alone, (x, y), both):
        ran.clear()
        out = function(name)(first, second, infos[0], *backward)
        (got,) = torch.autograd.grad(out.sum(), leaf)
        assert ran == [name, rule.product]
        assert torch.equal(got, wanted)
    ran.clear()
    assert not function(name)(x.detach(), y.detach(), infos[0]).requires_grad
    assert ran == [name]
