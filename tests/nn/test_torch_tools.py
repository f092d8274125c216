"""Networks under torch's own tools: compile, functional_call, checkpoint, autocast, DDP."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from tests.cases import error
from tests.nn.test_convolution import sparse
from tests.ranks import on_ranks

#: inductor compiles C++ for a CPU, for a minute and more
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


def small(c_in: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.SubmanifoldConv(c_in, 8, 3), nn.BatchNorm(8), nn.ReLU(), nn.SubmanifoldConv(8, 8, 3, groups=2), nn.ReLU()
    )


class Pools(nn.SparseModule):
    """Every way down and back, and every norm."""

    def __init__(self) -> None:
        super().__init__()
        # side by side: one after another, the later ones take away what the earlier ones' biases add
        self.norms = torch.nn.ModuleList([nn.GroupNorm(2, 4), nn.InstanceNorm(4, affine=True), nn.LayerNorm(4)])
        self.max, self.back = nn.MaxPool(2, return_winners=True), nn.MaxUnpool(2)
        self.avg, self.up, self.whole = nn.AvgPool(3, 2), nn.Unpool(3, 2), nn.GlobalMaxPool()

    def forward(self, x):
        y, winners = self.max(x.with_features(sum(norm(x).features for norm in self.norms)))
        y = self.back(y, winners, onto=x) + self.up(self.avg(x), onto=x)
        return y.with_features(y.features + self.whole(y).sum())


def step(net, x):
    """The output, and the gradients of a loss."""
    net.zero_grad()
    y = net(x).features
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("make", "ready"),
    [
        pytest.param(
            make, ready, marks=pytest.mark.slow if ready == (name != "submanifold") else (), id=f"{name}-{ready=}"
        )
        for name, make in {"submanifold": small, "pools": Pools, "unet": lambda: nn.UNet(4, 3, channels=(4, 6))}.items()
        for ready in (True, False)
    ],
)
def test_compiled_without_a_break(make, ready):
    """The sparse tensor's grid holds the plans; without them the first run is an eager one that makes them."""
    net, x = make().eval(), sparse()
    want = step(net, x)
    if not ready:
        x = sc.SparseTensor(sc.VoxelGrid(x.grid.coords, x.grid.batch_size), x.features)
        net(x)
    got = step(torch.compile(net, fullgraph=True, backend="aot_eager"), x)
    for a, b in zip(got, want):
        assert error(a, b.double()) < 2e-5


def test_compiled_once_for_every_scene():
    """The second scene compiles anew, with symbols for sizes and maps; the others run what is there."""
    torch.manual_seed(0)  # no size is that of the scene before it, which would be taken for a constant
    net = nn.UNet(4, 3, channels=(4, 6)).eval()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for scene in range(5):
        grid, _ = sc.voxelize(torch.rand(400 + 20 * scene, 3), voxel_size=0.1)
        x = sc.SparseTensor(grid, torch.randn(len(grid), 4))
        want = step(net, x)
        with torch.compiler.set_stance("fail_on_recompile" if scene > 2 else "default"):
            got = step(compiled, x)
        for a, b in zip(got, want):
            assert error(a, b.double()) < 2e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Pools, id="pools"),
        pytest.param(lambda: nn.UNet(4, 3, channels=(4, 6)), id="unet", marks=pytest.mark.slow),
    ],
)
def test_compiled_by_inductor_for_every_scene(make, device):
    """Its own code has to find every number of rows: in the first scene they are constants, in others symbols."""
    if make is Pools and torch.__version__ < "2.13":
        pytest.skip("its inductor loses the rows of a pool: docs/troubleshooting.md")
    torch.manual_seed(0)
    net = make().to(device).eval()
    compiled = torch.compile(net, fullgraph=True)
    for scene in range(4):
        grid, _ = sc.voxelize(torch.rand(400 + 20 * scene, 3, device=device), voxel_size=0.1)
        x = sc.SparseTensor(grid, torch.randn(len(grid), 4, device=device))
        want = step(net, x)
        for a, b in zip(step(compiled, x), want):
            assert error(a, b.double()) < 2e-3


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Back(), id="back"),
        pytest.param(lambda: nn.UNet(4, 3, channels=(4, 6)), id="unet", marks=pytest.mark.slow),
    ],
)
def test_compiled_with_breaks_for_new_scenes(make):
    """Plans that nobody prepared are made between graphs, and no graph keeps the number of a map that is gone."""
    net = make().eval()
    compiled = torch.compile(net, backend="eager")
    for scene in range(3):
        grid, _ = sc.voxelize(torch.rand(300 + 20 * scene, 3), voxel_size=0.15)
        x = sc.SparseTensor(grid, torch.randn(len(grid), 4))
        got = step(compiled, x)
        for a, b in zip(got, step(net, x)):
            assert error(a, b.double()) < 2e-5


class Back(nn.SparseModule):
    """A stride and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv(4, 8, 2, stride=2), nn.InverseConv(8, 4, 2, stride=2)

    def forward(self, x):
        return self.up(self.down(x), onto=x)


def test_a_scene_goes_with_its_grid():
    """Nothing of a scene waits for the garbage collector: a stream of scans would fill the card meanwhile."""
    gc.collect()
    gc.disable()
    try:
        net, left = nn.UNet(4, 3, channels=(4, 6)), []
        for _ in range(2):
            x = sparse()
            net(x).features.sum().backward()
            left.append(weakref.ref(x.grid))
            left += [weakref.ref(p.kernel_map) for p in x.grid.derived.values() if isinstance(p, sc.ConvolutionPlan)]
        del x
        assert len(left) > 8
        assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()


def test_compiled_with_a_plan_of_its_own():
    """A module that holds its plan and sees features alone."""

    class Held(torch.nn.Module):
        def __init__(self, plan):
            super().__init__()
            self.plan, self.conv, self.norm = plan, nn.SubmanifoldConv(4, 6, 3), nn.BatchNorm(6)

        def forward(self, features):
            return torch.relu(self.norm(self.conv(features, plan=self.plan)))

    x = sparse()
    net = Held(sc.ConvolutionPlan(x.grid, 3))
    want = net(x.features)
    got = torch.compile(net, fullgraph=True, backend="aot_eager")(x.features)
    assert error(got, want.double()) < 2e-5


def test_functional_call():
    net, x = small(), sparse()
    state = {name: torch.nn.Parameter(p.detach() * 2) for name, p in net.named_parameters()}
    y = torch.func.functional_call(net, state, (x,))
    twice = copy.deepcopy(net)
    twice.load_state_dict(state, strict=False)
    assert torch.equal(y.features, twice(x).features)
    y.features.sum().backward()
    assert all(p.grad is not None for p in state.values())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("make", [small, Pools], ids=["submanifold", "pools"])
def test_functional_gradients(make):
    """torch.func.grad through a whole network equals backward."""
    net, x = make().eval(), sparse()

    def loss(state):
        return torch.func.functional_call(net, state, (x,)).features.square().sum()

    got = torch.func.grad(loss)({name: p.detach() for name, p in net.named_parameters()})
    for (name, _), want in zip(net.named_parameters(), step(net, x)[1:]):
        assert error(got[name], want.double()) < 2e-5


def test_an_ensemble_of_networks():
    """torch.func.vmap over the stacked weights of networks equals a loop over them, their gradients too."""
    nets, x = [small().eval() for _ in range(3)], sparse()
    weights, buffers = torch.func.stack_module_state(nets)

    def loss(state, buffers):
        return torch.func.functional_call(nets[0], (state, buffers), (x,)).features.square().sum()

    got = torch.func.vmap(torch.func.grad(loss))(weights, buffers)
    for item, net in enumerate(nets):
        for (name, _), want in zip(net.named_parameters(), step(net, x)[1:]):
            assert error(got[name][item], want.double()) < 2e-5


def test_gradient_checkpointing():
    net, x = small().eval(), sparse()
    want = step(net, x)
    net.zero_grad()
    features = x.features.requires_grad_()
    y = checkpoint(lambda t: net(x.with_features(t)).features, features, use_reentrant=False)
    y.square().sum().backward()
    for a, b in zip([y.detach(), *(p.grad for p in net.parameters())], want):
        assert torch.equal(a, b)


def test_autocast_on_the_cpu():
    net, x = nn.UNet(4, 3, channels=(4, 6)).eval(), sparse()
    want = step(net, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert net.stem[0](x).dtype == torch.bfloat16
        assert net(x).dtype == torch.bfloat16
        got = step(net, x)
    assert error(got[0], want[0].double()) < 0.2
    for a, p in zip(got[1:], net.parameters()):
        assert a.dtype == p.dtype == torch.float32


def averaged(state: dict, items: list) -> list:
    net = small().eval()
    net.load_state_dict(state)
    parallel = torch.nn.parallel.DistributedDataParallel(net)
    coords, features = items[dist.get_rank()]
    parallel(sc.SparseTensor(sc.VoxelGrid(coords), features)).features.square().sum().backward()
    del parallel
    dist.barrier()  # nobody leaves while the other still talks
    return [p.grad.numpy() for p in net.parameters()]


def test_two_processes_average_their_gradients():
    net = small().eval()
    items = [(x.grid.coords, x.features) for x in (sparse(), sparse(voxels=20))]
    got = on_ranks(2, averaged, net.state_dict(), items)
    alone = [step(net, sc.SparseTensor(sc.VoxelGrid(c), f))[1:] for c, f in items]
    for first, second, a, b in zip(*got, *alone):
        assert np.array_equal(first, second)
        assert error(torch.from_numpy(first), (a + b).double() / 2) < 2e-5


class FromRows(torch.nn.Module):
    """A network whose scene is gone when it returns, as clients of other libraries are written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = spconv.SubMConv3d(4, 8, 3), spconv.SubMConv3d(8, 3, 3)

    def forward(self, features, indices):
        x = self.first(spconv.SparseConvTensor(features, indices, [8, 8, 8], 1))
        return self.second(x.replace_feature(x.features.relu())).features


def test_compiled_where_the_scene_is_gone_before_its_gradients():
    torch.manual_seed(0)
    net = FromRows()
    compiled = torch.compile(net, backend="aot_eager")
    for voxels in (60, 70, 80, 90):
        cells = torch.unique(torch.randint(0, 8, (voxels, 3)), dim=0)
        features, indices = torch.randn(len(cells), 4), torch.nn.functional.pad(cells, (1, 0)).int()
        got, want = (torch.autograd.grad(f(features, indices).sum(), net.first.weight)[0] for f in (compiled, net))
        torch.testing.assert_close(got, want)
