"""Many derivatives at once: batches of cotangents of torch.autograd, and batches of torch.func.vmap with no item."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, vmap

import sparseconv as sc
from sparseconv import nn, ops, pointwise, products

COORDS = torch.nn.functional.pad(torch.cartesian_prod(*[torch.arange(3)] * 2), (1, 0))
GRID = sc.VoxelGrid(COORDS[[7, 0, 3, 4, 5]])
DOWN = sc.ConvolutionPlan(GRID, 2, stride=2)
BACKENDS = ("auto", "numpy_gather_scatter")


def operands(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("epilogue", [None, pointwise.relu, pointwise.silu], ids=["plain", "relu", "silu"])
def test_a_batch_of_cotangents_passes_a_convolution(backend, epilogue):
    plan = sc.ConvolutionPlan(GRID, 3, backend=backend)
    x, weight, bias = operands((len(GRID), 4), (9, 4, 5), (5,))
    y = plan.execute(x, weight, bias, epilogue=epilogue)
    cotangents = torch.randn(3, *y.shape, dtype=torch.float64)
    together = torch.autograd.grad(y, (x, weight, bias), cotangents, is_grads_batched=True, retain_graph=True)
    for item, cotangent in enumerate(cotangents):
        alone = torch.autograd.grad(y, (x, weight, bias), cotangent, retain_graph=True)
        for got, want in zip(together, alone):
            torch.testing.assert_close(got[item], want)


def test_gradcheck_with_batched_gradients():
    plan = sc.ConvolutionPlan(GRID, 3)
    assert torch.autograd.gradcheck(plan.execute, operands((len(GRID), 4), (9, 4, 5)), check_batched_grad=True)


def test_vectorised_jacobians_and_hessians_are_the_others():
    layers = nn.SubmanifoldConv(2, 3, 3, rank=2), nn.BatchNorm(3), nn.ReLU(), nn.Conv(3, 2, 2, stride=2, rank=2)
    net = nn.Sequential(*layers).double()

    def run(x):
        return net(sc.SparseTensor(GRID, x)).features.square()

    (x,) = operands((len(GRID), 2))
    functional = torch.autograd.functional
    torch.testing.assert_close(functional.jacobian(run, x, vectorize=True), functional.jacobian(run, x))
    hessians = [functional.hessian(lambda x: run(x).sum(), x, vectorize=v) for v in (True, False)]
    torch.testing.assert_close(*hessians)


INFOS = products.sparse_scale_infos([0, 1, 2, 1], [0, 0, 1, 2], None, 4, len(GRID))
POINTS = torch.tensor([0, 0, 1, 2, 1])
NOT_TAKEN_APART = {
    "sparse_scale": lambda x: products.sparse_scale(x, *INFOS),
    "avg_pool": lambda x: ops.avg_pool(x, DOWN),
    "max_pool": lambda x: ops.max_pool(x, DOWN)[0],
    "voxelize_features": lambda x: ops.voxelize_features(x, POINTS, 3, "max"),
}


@pytest.mark.parametrize("name", NOT_TAKEN_APART)
def test_what_torch_cannot_take_apart_says_what_to_call(name):
    (x,) = operands((len(GRID), 2))
    y = NOT_TAKEN_APART[name](x)
    with pytest.raises(RuntimeError, match=r"is_grads_batched=True.*torch\.func\.jacrev"):
        torch.autograd.grad(y, x, torch.ones(3, *y.shape, dtype=y.dtype), is_grads_batched=True)
    assert jacrev(NOT_TAKEN_APART[name])(x.detach()).shape == (*y.shape, *x.shape)


PLAN = sc.ConvolutionPlan(GRID, 3)
WEIGHT = torch.randn(9, 4, 5)
PRODUCT_INFOS = PLAN.kernel_map.product_infos()
CALLS = {
    "convolution": lambda x: PLAN.execute(x, WEIGHT),
    "convolution with relu": lambda x: PLAN.execute(x, WEIGHT, epilogue=pointwise.relu),
    "vecmat": lambda x: products.sparse_vecmat(x, WEIGHT, *PRODUCT_INFOS),
    "vecmat of a batch": lambda x: products.sparse_vecmat(x[None], WEIGHT, *PRODUCT_INFOS),
    "relu": pointwise.relu,
    **NOT_TAKEN_APART,
}


@pytest.mark.parametrize("channels", [0, 4])
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_without_items_has_the_shape_of_one_with(name, channels):
    if channels == 0 and ("convolution" in name or "vecmat" in name):
        pytest.skip("the weight has channels")
    call, batches = CALLS[name], [torch.zeros(items, len(GRID), channels) for items in (0, 2)]
    none, two = (vmap(call)(batch) for batch in batches)
    assert none.shape == (0, *two.shape[1:])
    none, two = (vmap(grad(lambda x: call(x).sum()))(batch) for batch in batches)
    assert none.shape == (0, *two.shape[1:])


def test_per_sample_gradients_of_no_samples():
    def loss(x, weight):
        return PLAN.execute(x, weight).square().sum()

    of_x, of_weight = vmap(grad(loss, argnums=(0, 1)))(torch.zeros(0, len(GRID), 4), torch.zeros(0, 9, 4, 5))
    assert of_x.shape == (0, len(GRID), 4)
    assert of_weight.shape == (0, 9, 4, 5)


def test_a_batch_without_items_gives_the_shared_weight_a_gradient_of_zeros():
    x, weight = torch.zeros(0, len(GRID), 4, requires_grad=True), WEIGHT.clone().requires_grad_()
    found = torch.autograd.grad(vmap(PLAN.execute, in_dims=(0, None))(x, weight).sum(), (x, weight))
    assert found[0].shape == x.shape
    assert torch.equal(found[1], torch.zeros_like(weight))


@pytest.mark.parametrize("way", [jacrev, jacfwd])
def test_jacobians_of_a_scene_without_voxels(way):
    empty = sc.ConvolutionPlan(sc.VoxelGrid(torch.zeros(0, 3, dtype=torch.int32)), 3)
    of_x, of_weight = way(empty.execute, argnums=(0, 1))(torch.zeros(0, 4), WEIGHT)
    assert of_x.shape == (0, 5, 0, 4)
    assert of_weight.shape == (0, 5, 9, 4, 5)
