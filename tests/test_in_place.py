"""What a function gives may be changed in place, as what torch's own functions give, and gradients stay right."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
import sparseconv.products as sp
from sparseconv import nn, ops, pointwise
from sparseconv.interop.spconv import pytorch as spconv
from tests.products.cases import PRODUCT_NAMES, inputs, random_case

torch.manual_seed(0)
COORDS = torch.nn.functional.pad(torch.unique(torch.randint(0, 9, (150, 3)), dim=0), (1, 0)).int()
GRID = sc.VoxelGrid(COORDS)
BACKENDS = ("llvm_implicit_gemm", "numpy_gather_scatter")
PLANS = {name: sc.ConvolutionPlan(GRID, 3, backend=name) for name in BACKENDS}
PLAN, STRIDED, GROUPED = (
    PLANS[BACKENDS[0]],
    sc.ConvolutionPlan(GRID, 2, stride=2),
    sc.ConvolutionPlan(GRID, 3, groups=2),
)
BACK = STRIDED.transpose()
POINTS = torch.rand(40, 3) * 8
ROWS = torch.arange(40) % 7


def rows(count: int, channels: int = 8, **kwargs) -> torch.Tensor:
    return torch.randn(count, channels, generator=torch.Generator().manual_seed(count), **kwargs).requires_grad_()


def fine(channels: int = 8, **kwargs) -> torch.Tensor:
    return rows(len(GRID), channels, **kwargs)


WEIGHT, WIDE = rows(27 * 8).view(27, 8, 8).detach(), rows(len(STRIDED.target))
SCALE = sp.sparse_scale_infos
CASE = random_case("small", 7, 3, 3, 2, seed=4)


def convolutions():
    for name, plan in PLANS.items():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            w = WEIGHT.to(dtype)
            label = f"{name} {str(dtype)[6:]}"
            yield label, (lambda x, plan=plan, w=w: plan.execute(x, w)), fine(dtype=dtype)
            yield (
                label + " residual",
                (lambda x, plan=plan, w=w: plan.execute(x, w, residual=x, epilogue=pointwise.silu)),
                fine(dtype=dtype),
            )
    yield "groups", (lambda x: GROUPED.execute(x, WEIGHT[:, :4])), fine()
    yield "one channel", (lambda x: PLAN.execute(x, WEIGHT[:, :, :1])), fine()
    yield "strided", (lambda x: STRIDED.execute(x, WEIGHT[:8])), fine()
    yield "transposed", (lambda x: BACK.execute(x, WEIGHT[:8])), WIDE


def others():
    yield "sum_pool", (lambda x: ops.sum_pool(x, STRIDED)), fine()
    yield "avg_pool", (lambda x: ops.avg_pool(x, STRIDED)), fine()
    yield "max_pool", (lambda x: ops.max_pool(x, STRIDED)[0]), fine()
    yield "unpool", (lambda x: ops.unpool(x, BACK)), WIDE
    winners = ops.max_pool(fine(), STRIDED)[1]
    yield "max_unpool", (lambda x: ops.max_unpool(x, winners, BACK)), WIDE
    for name in ("global_sum_pool", "global_avg_pool", "global_max_pool"):
        yield name, (lambda x, name=name: getattr(ops, name)(x, GRID)), fine()
    yield "interpolate", (lambda x: ops.interpolate(x, GRID, POINTS)), fine()
    yield "splat", (lambda x: ops.splat(x, GRID, POINTS)), rows(40)
    yield "depthwise", (lambda x: ops.depthwise_convolution(x, WEIGHT[:, 0], PLAN)), fine()
    yield "logits", (lambda x: ops.neighborhood_logits(x, x, PLAN)), fine()
    yield "attention", (lambda x: ops.neighborhood_attention(x, x, x, PLAN)), fine()
    for reduce in ("mean", "sum", "max"):
        yield f"voxelize {reduce}", (lambda x, how=reduce: ops.voxelize_features(x, ROWS, 7, how)), rows(40)


def products():
    for name in PRODUCT_NAMES:
        for accumulated in (False, True):
            x, y = (t.detach() for t in inputs(name, CASE, False, False, batch=2))

            def call(x, name=name, y=y, accumulated=accumulated):
                return getattr(sp, f"sparse_{name}")(x, y, *CASE.infos(), accumulated)

            yield f"{name} {accumulated}", call, x.requires_grad_()


def pointwise_functions():
    for name in ("relu", "silu", "gelu", "leaky_relu", "softplus", "mish", "hardswish", "elu"):
        if not pointwise.Epilogue(getattr(pointwise, name)).saves_output:
            yield name, getattr(pointwise, name), fine()
    for name in ("add", "mul", "sub"):
        yield name, (lambda x, name=name: getattr(pointwise, name)(x, WEIGHT[0, 0])), fine()
    yield "bias_activation", (lambda x: pointwise.bias_activation(x, WEIGHT[0, 0], activation=pointwise.silu)), fine()


CASES = [*convolutions(), *others(), *products(), *pointwise_functions()]


@pytest.mark.parametrize(("call", "x"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_results_may_be_changed_in_place(call, x):
    changed = call(x).mul_(3)
    (got,) = torch.autograd.grad(changed.sum(), x)
    (want,) = torch.autograd.grad((call(x) * 3).sum(), x)
    assert torch.equal(got, want)


ACTIVATIONS = (torch.nn.ReLU(inplace=True), torch.nn.LeakyReLU(inplace=True), torch.nn.Dropout(inplace=True))


@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda act: type(act).__name__)
@pytest.mark.parametrize("layer", ["SubMConv3d", "SparseConv3d", "SparseInverseConv3d", "SparseMaxPool3d"])
def test_in_place_activations_follow_the_drop_ins_layers(layer, act):
    makers = {
        "SubMConv3d": lambda: spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3), act),
        "SparseConv3d": lambda: spconv.SparseSequential(spconv.SparseConv3d(4, 8, 3, 2, 1), act),
        "SparseInverseConv3d": lambda: spconv.SparseSequential(
            spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="a"),
            act,
            spconv.SparseInverseConv3d(4, 8, 3, indice_key="a"),
            act,
        ),
        "SparseMaxPool3d": lambda: spconv.SparseSequential(spconv.SparseMaxPool3d(2, 2), act),
    }
    x = rows(len(GRID), 4)
    makers[layer]()(spconv.SparseConvTensor(x, COORDS, [9] * 3, 1)).features.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda act: type(act).__name__)
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.SubmanifoldConv(4, 8, 3),
        lambda: nn.Conv(4, 8, 2, stride=2),
        lambda: nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.BatchNorm(8)),
        lambda: nn.MaxPool(2, stride=2),
        lambda: nn.Linear(4, 8),
        lambda: nn.LayerNorm(4),
    ],
    ids=["SubmanifoldConv", "Conv", "BatchNorm", "MaxPool", "Linear", "LayerNorm"],
)
def test_in_place_activations_follow_modules(layer, act):
    x = rows(len(GRID), 4)
    nn.Sequential(layer(), act)(sc.SparseTensor(GRID, x)).features.sum().backward()
    assert x.grad is not None
