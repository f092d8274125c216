"""Halves on the CPU are rounded once, whatever is added to a convolution before its result is stored."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
from sparseconv import pointwise
from sparseconv.backends.registry import backend

HALVES = (torch.bfloat16, torch.float16)
BACKENDS = ("llvm_implicit_gemm", "numpy_gather_scatter")
ACTIVATIONS = (None, pointwise.relu, pointwise.leaky_relu, pointwise.sigmoid, pointwise.silu, pointwise.gelu)


def operands(dtype, groups=1):
    g = torch.Generator().manual_seed(0)
    coords = torch.unique(torch.randint(0, 14, (400, 3), generator=g), dim=0)
    grid = sc.VoxelGrid(torch.nn.functional.pad(coords, (1, 0)).int())
    shapes = (len(grid), 8), (27, 8 // groups, 8), (8,), (len(grid), 8)
    return grid, [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]


def wide(*tensors):
    """fp32 holds every product of halves, and its sums' errors lie far below a half's last place."""
    return [None if t is None else t.float() for t in tensors]


@pytest.mark.parametrize("with_gradient", [False, True], ids=["", "gradient"])
@pytest.mark.parametrize("added", ["bias", "residual", "both", "none"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: "none" if f is None else f.schema.name)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_result_is_the_rounded_wide_one(name, dtype, activation, added, with_gradient):
    grid, (x, w, bias, residual) = operands(dtype)
    bias, residual = bias if added in ("bias", "both") else None, residual if added in ("residual", "both") else None
    plan = sc.ConvolutionPlan(grid, 3, backend=name)
    want = plan.execute(*wide(x, w, bias), residual=None if residual is None else residual.float(), epilogue=activation)
    w.requires_grad_(with_gradient)
    got = plan.execute(x, w, bias, residual=residual, epilogue=activation)
    assert got.dtype == dtype
    assert torch.equal(got, want.to(dtype))
    if with_gradient:
        got.sum().backward()
        assert w.grad.dtype == dtype


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_under_autocast_and_transforms(dtype):
    grid, (x, w, bias, residual) = operands(dtype)
    plan = sc.ConvolutionPlan(grid, 3)

    def run(x, w, bias, residual):
        return plan.execute(x, w, bias, residual=residual, epilogue=pointwise.silu)

    want = run(*wide(x, w, bias, residual)).to(dtype)
    assert torch.equal(torch.func.vjp(run, x, w, bias, residual)[0], want)
    assert torch.equal(torch.compile(run, backend="eager")(x, w, bias, residual), want)
    with torch.autocast("cpu", dtype):
        assert torch.equal(run(*wide(x, w, bias, residual)), want)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_an_input_gradient_onto_another_is_rounded_once(name, dtype, groups):
    grid, (_, w, _, g) = operands(dtype, groups)
    kernel_map, serving, other = sc.ConvolutionPlan(grid, 3).kernel_map, backend(name), g.flip(0)
    want = serving.input_grad(g.float(), w.float(), kernel_map, groups) + other.float()
    assert torch.equal(serving.input_grad_onto(g, w, kernel_map, groups, other), want.to(dtype))


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_of_a_kept_sum_are_those_of_fp32(name):
    grid, (x, w, bias, residual) = operands(torch.bfloat16)
    plan = sc.ConvolutionPlan(grid, 3, backend=name)
    narrow, broad = ([t.requires_grad_() for t in ts] for ts in ((x, w, bias, residual), wide(x, w, bias, residual)))
    broad = [t.detach().requires_grad_() for t in broad]
    for tensors in (narrow, broad):
        plan.execute(*tensors[:3], residual=tensors[3], epilogue=pointwise.silu).sum().backward()
    for a, b in zip(narrow, broad):
        assert torch.equal(a.grad, b.grad.to(torch.bfloat16))
