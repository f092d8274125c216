"""Forward mode: duals of torch.autograd.forward_ad, torch.func.jvp and jacfwd, through everything with a gradient.

A kernel that is launched past a dual gives a result without a tangent, which torch takes for a constant: so each case
is held against its own gradient, by which the same number comes from the other side.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import sparseconv as sc
from sparseconv import nn, ops
from sparseconv import pointwise as pw
from sparseconv import products as pr

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CHANNELS = 4


class Scene:
    """Features and a direction (N, 4), and what the cases take beside them."""

    def __init__(self, device: str) -> None:
        gen = torch.Generator().manual_seed(1)
        self.dtype = torch.float64 if device == "cpu" else torch.float32

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64).to(device, self.dtype)

        cells = torch.unique(torch.randint(0, 6, (60, 3), generator=gen), dim=0)
        coords = torch.nn.functional.pad(cells, (1, 0)).int().to(device)
        self.grid = grid = sc.VoxelGrid(coords)
        self.plan, self.down = sc.ConvolutionPlan(grid, 3), sc.ConvolutionPlan(grid, 2, stride=2)
        self.infos = self.plan.kernel_map.product_infos()
        self.x, self.along, self.points = normal(len(grid), CHANNELS), normal(len(grid), CHANNELS), normal(len(grid), 3)
        self.weight, self.other = normal(27, CHANNELS, CHANNELS) / 8, normal(len(grid), CHANNELS)
        self.items = torch.randint(0, 7, (len(grid),), generator=gen).to(device)
        self.groups = ops.PointGroups(self.items, 7)
        self.attended = normal(len(grid), 2, CHANNELS)


def module(make: Callable[[], torch.nn.Module], training: bool = False) -> Callable:
    def case(s: Scene) -> Callable[[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        layer = make().to(s.x.device, s.dtype).train(training)
        return lambda x: layer(sc.SparseTensor(s.grid, x)).features

    return case


@pw.pointwise_dynamic(
    promotion_methods=[(0, 1, "DEFAULT"), (0, 1, "DEFAULT")], num_outputs=2, reference=lambda x, y: (x * y, x - y * y)
)
def two_of(x, y):
    return x * y, x - y * y


CASES: dict[str, Callable[[Scene], Callable[[torch.Tensor], torch.Tensor]]] = {
    "features": lambda s: lambda x: s.plan.execute(x, s.weight),
    "weight": lambda s: lambda x: s.plan.execute(s.x, s.weight * x[0]),
    "weight of torch": lambda s: lambda x: s.plan.execute(x, s.weight.permute(2, 1, 0).unflatten(-1, (3, 3, 3))),
    "bias and residual": lambda s: lambda x: s.plan.execute(s.x, s.weight, x[0], residual=x),
    "epilogue by its result": lambda s: lambda x: s.plan.execute(x, s.weight, epilogue=pw.relu),
    "epilogue by its argument": lambda s: lambda x: s.plan.execute(x, s.weight, residual=x, epilogue=pw.gelu),
    "strided, back": lambda s: lambda x: s.down.transpose().execute(s.down.execute(x, s.weight[:8]), s.weight[:8]),
    "depthwise": lambda s: lambda x: ops.depthwise_convolution(x, s.weight[:, 0], s.plan),
    "mul": lambda s: lambda x: pr.sparse_mul(x, s.weight[:, 0] * x[1], *s.infos),
    "vecmat": lambda s: lambda x: pr.sparse_vecmat(x, s.weight * x[0], *s.infos),
    "outer": lambda s: lambda x: pr.sparse_outer(x, s.weight[:, 0] * x[0], *s.infos),
    "inner": lambda s: lambda x: pr.sparse_inner(x, s.weight[:, 0] * x[0], *s.infos),
    "a batch of products": lambda s: lambda x: pr.sparse_mul(torch.stack([x, x * x]), s.weight[:, 0], *s.infos),
    "add": lambda s: lambda x: pw.add(x, x[0]),
    "mul, pointwise": lambda s: lambda x: pw.mul(x, x[:, :1]),
    "div": lambda s: lambda x: pw.div(x, x * x + 1),
    "where": lambda s: lambda x: pw.where(x > 0, x, 2 * x),
    "clamp": lambda s: lambda x: pw.clamp(x, -1.0, 1.0),
    "swiglu": lambda s: lambda x: pw.swiglu(x, x.flip(0)),
    "two outputs through a twin": lambda s: lambda x: torch.cat(two_of(x, x[0]), 1),
    "flip": lambda s: lambda x: pw.flip(x, 0),
    "bias and activation": lambda s: lambda x: pw.bias_activation(x, x[0], activation=pw.silu),
    "gathered": lambda s: lambda x: pw.batch_affine(x, s.items, x[:7], 2 * x[:7]),
    "sum pool": lambda s: lambda x: ops.sum_pool(x, s.down),
    "average pool": lambda s: lambda x: ops.avg_pool(x, s.down),
    "max pool": lambda s: lambda x: ops.max_pool(x, s.down)[0],
    "unpool": lambda s: lambda x: ops.unpool(ops.avg_pool(x, s.down), s.down.transpose()),
    "max unpool": lambda s: lambda x: ops.max_unpool(*ops.max_pool(x, s.down), s.down.transpose()),
    "global average": lambda s: lambda x: ops.global_avg_pool(x, s.grid),
    "global maximum": lambda s: lambda x: ops.global_max_pool(x, s.grid),
    "mean of points": lambda s: lambda x: s.groups.reduce(x, "mean"),
    "maximum of points": lambda s: lambda x: s.groups.reduce(x, "max"),
    "interpolated": lambda s: lambda x: ops.interpolate(x, s.grid, s.points),
    "by position": lambda s: lambda x: ops.interpolate(s.x, s.grid, s.points + x[:, :3]),
    "splatted": lambda s: lambda x: ops.splat(x, s.grid, s.points),
    "attention": lambda s: lambda x: ops.neighborhood_attention(
        s.attended * x[:, None], s.attended, x[:, None] * s.attended, s.plan
    ),
    "layer norm": module(lambda: nn.LayerNorm(CHANNELS)),
    "group norm": module(lambda: nn.GroupNorm(2, CHANNELS)),
    "batch norm": module(lambda: nn.BatchNorm(CHANNELS, track_running_stats=False), training=True),
    "batch norm, known": module(lambda: nn.BatchNorm(CHANNELS)),
    "prelu": module(lambda: nn.PReLU()),
    "a block": module(lambda: nn.ResidualBlock(CHANNELS, CHANNELS)),
    "a network": module(lambda: nn.UNet(CHANNELS, 3)),
}  # fmt: skip


def activation(name: str) -> Callable:
    return lambda s: lambda x: getattr(pw, name)(x)


ACTIVATIONS = ("relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "leaky_relu", "elu", "softplus", "mish")
CASES |= {name: activation(name) for name in (*ACTIVATIONS, "hardswish")}


def by_dual(run, x, along):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(x, along)))


def by_dual_leaf(run, x, along):
    return by_dual(run, x.clone().requires_grad_(), along)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", [by_dual, by_dual_leaf, lambda run, x, along: jvp(run, (x,), (along,))],
                         ids=["dual", "dual leaf", "jvp"])  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_forward_mode_agrees_with_reverse_mode(name, way, device):
    s = Scene(device)
    run = CASES[name](s)
    leaf = s.x.clone().requires_grad_()
    want = run(leaf)
    cotangent = torch.randn_like(want)
    (slope,) = torch.autograd.grad(want, leaf, cotangent)
    y, tangent = way(run, s.x, s.along)
    near = {"rtol": 1e-9, "atol": 1e-9} if s.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y, want, **near)
    assert tangent is not None, "a result without a tangent is a constant"
    assert (tangent.shape, tangent.dtype) == (y.shape, y.dtype)
    a, b = (tangent * cotangent).double(), (slope * s.along).double()
    assert abs(a.sum() - b.sum()) <= near["rtol"] * (a.abs().sum() + b.abs().sum())


SMOOTH = ["features", "epilogue by its argument", "mul", "vecmat", "gelu", "mul, pointwise", "gathered", "average pool",
          "two outputs through a twin", "max pool", "interpolated"]  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivatives_by_both_modes_in_any_order(name):
    s = Scene("cpu")
    run = CASES[name](s)

    def loss(x):
        return run(x).pow(3).sum()

    def along(x):
        return jvp(loss, (x,), (s.along,))[1]

    leaf = s.x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (want,) = torch.autograd.grad((first * s.along).sum(), leaf)
    assert torch.allclose(jvp(grad(loss), (s.x,), (s.along,))[1], want)
    assert torch.allclose(grad(along)(s.x), want)
    with forward_ad.dual_level():  # forward over reverse, of plain torch
        dual = forward_ad.make_dual(s.x.clone().requires_grad_(), s.along)
        (found,) = torch.autograd.grad(loss(dual), dual)
        assert torch.allclose(forward_ad.unpack_dual(found).tangent, want)


@pytest.mark.parametrize(
    "name", ["mul", "vecmat", "average pool", "max pool", "gathered", "two outputs through a twin"]
)
def test_jacobians_of_both_modes_are_one(name):
    s = Scene("cpu")
    run = CASES[name](s)

    def few(part):
        return run(torch.cat([part, s.x[2:]]))

    assert torch.allclose(jacfwd(few)(s.x[:2]), jacrev(few)(s.x[:2]))


def test_a_product_of_a_batch_under_vmap_is_a_loop():
    s = Scene("cpu")
    xs, ws = torch.stack([s.x, s.other, s.along]), torch.stack([s.weight, -s.weight, 2 * s.weight])
    batch = torch.stack([s.x, s.other])

    def run(x, w):
        return pr.sparse_vecmat(x, w, *s.infos)

    for got, want in (
        (vmap(run)(xs, ws), [run(x, w) for x, w in zip(xs, ws)]),
        (vmap(run, (1, None))(xs.movedim(0, 1), s.weight), [run(x, s.weight) for x in xs]),
        (vmap(run, (None, 3))(s.x, ws.movedim(0, 3)), [run(s.x, w) for w in ws]),
        (vmap(run, (None, 0))(batch, ws), [run(batch, w) for w in ws]),
        (vmap(vmap(run, (None, 0)), (0, None))(xs, ws), [torch.stack([run(x, w) for w in ws]) for x in xs]),
        (vmap(lambda x: ops.sum_pool(x, s.down), 2)(xs.movedim(0, 2)), [ops.sum_pool(x, s.down) for x in xs]),
    ):
        torch.testing.assert_close(got, torch.stack(want), rtol=1e-9, atol=1e-9)
    slopes = vmap(grad(lambda x, w: run(x, w).square().sum(), 1))(xs, ws)
    want = [grad(lambda x, w: run(x, w).square().sum(), 1)(x, w) for x, w in zip(xs, ws)]
    torch.testing.assert_close(slopes, torch.stack(want), rtol=1e-9, atol=1e-9)


def test_levels_without_duals_change_nothing():
    s = Scene("cpu")
    with forward_ad.dual_level():
        leaf, w = s.x.clone().requires_grad_(), s.weight.clone().requires_grad_()
        y = s.plan.execute(leaf, w, epilogue=pw.gelu)
        found = torch.autograd.grad(y.square().sum(), (leaf, w))
    leaf, w = s.x.clone().requires_grad_(), s.weight.clone().requires_grad_()
    want = torch.autograd.grad(s.plan.execute(leaf, w, epilogue=pw.gelu).square().sum(), (leaf, w))
    for one, other in zip(found, want):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["features", "vecmat", "gelu", "mul, pointwise", "average pool"])
def test_forward_mode_of_forward_mode_is_refused(name):
    """torch loses terms of it at autograd functions: here d2/dt2 of (x + t)^4 at 3 would be 72 instead of 108."""
    s = Scene("cpu")
    run = CASES[name](s)
    with pytest.raises(RuntimeError, match="torch drops a part of the derivative: use"):
        jvp(lambda x: jvp(run, (x,), (s.along,))[1], (s.x,), (s.along,))
