"""Plans that travel: from a data loader's worker to the trainer, which then builds none."""

from __future__ import annotations

import pickle

import pytest
import torch

import sparseconv as sc
import sparseconv.plan.convolution
from sparseconv import nn
from sparseconv.nn.models.minkunet import MinkUNet
from sparseconv.nn.models.resnet import ResNet
from sparseconv.nn.models.second import SecondEncoder
from sparseconv.plan import PlanSet, plan_within
from sparseconv.plan.within import dense_shape
from tests.plan.test_plan import through_a_file

NETS = {
    "unet": lambda: nn.UNet(4, 3, channels=(4, 6, 8)),
    "minkunet": lambda: MinkUNet(4, 3, variant="14", planes=(4,) * 8, init_channels=4),
    "resnet": lambda: ResNet(4, 3, depth=14, planes=(4, 4, 4, 4)),
    "second": lambda: SecondEncoder(4, (41, 24, 24)),
    "norms": lambda: nn.Sequential(nn.SubmanifoldConv(4, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.MaxPool(2)),
}


def scene(seed=0, voxels=300):
    gen = torch.Generator().manual_seed(seed)
    coords = torch.cat(
        [torch.randint(0, 2, (voxels, 1), generator=gen), torch.randint(0, 24, (voxels, 3), generator=gen)], 1
    )
    grid = sc.VoxelGrid(coords, 2, duplicates="first")
    return sc.SparseTensor(grid, torch.randn(len(grid), 4, generator=gen))


def result(net, x):
    y = net(x)
    return y.features if isinstance(y, sc.SparseTensor) else y


@pytest.fixture
def no_building(monkeypatch):
    """From the call on, building a kernel map or a coarse grid is an error."""

    def start():
        def refuse(*_, **__):
            raise AssertionError("a map was built")

        monkeypatch.setattr(sparseconv.plan.convolution, "find_edges", refuse)
        monkeypatch.setattr(sparseconv.plan.convolution, "coarse_grid", refuse)
        monkeypatch.setattr(sparseconv.plan.within, "coarse_grid", refuse)
        monkeypatch.setattr(sc.VoxelGrid, "coarsen", refuse)

    return start


@pytest.mark.parametrize("name", NETS)
def test_a_set_has_every_plan_and_pickles(name, no_building):
    torch.manual_seed(0)
    net = NETS[name]()
    x = scene()
    want = result(net.eval(), x).detach()
    net.train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    fresh = sc.VoxelGrid(x.grid.coords, 2)
    plans = PlanSet.of(net, fresh)
    assert plans.grid is fresh
    assert net.training
    assert all(m.training for m in net.modules())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items()), "no statistics were touched"
    assert len(plans) >= 1
    assert plans.num_bytes > 0
    assert f"{len(plans)} plans" in repr(plans)
    sent = pickle.dumps(plans)
    no_building()
    here = pickle.loads(sent)
    assert len(through_a_file(plans)) == len(plans)
    net.eval()
    for grid in (plans.grid, here.grid, here.into(sc.VoxelGrid(x.grid.coords, 2))):
        y = sc.SparseTensor(grid, x.features.clone().requires_grad_())
        got = result(net, y)
        assert torch.equal(got.detach(), want)
        got.sum().backward()
        assert bool(y.features.grad.isfinite().all())


def test_no_convolution_is_computed_ahead(monkeypatch):
    grid = scene().grid

    def refuse(*_, **__):
        raise AssertionError("a convolution ran")

    from sparseconv.backends import base  # noqa: F401

    monkeypatch.setattr(sparseconv.autograd, "serving_backend", refuse)
    monkeypatch.setattr(sparseconv.plan.fused, "serving_backend", refuse)
    assert len(PlanSet.of(nn.UNet(4, 3, channels=(4, 6)), grid)) == 4


def test_an_inverse_shares_the_edges_of_its_way_down():
    net = nn.UNet(4, 3, channels=(4, 6))
    here = pickle.loads(pickle.dumps(PlanSet.of(net, scene().grid)))
    down, up = (
        next(p for p in here.plans if p.kernel_size == (2, 2, 2) and p.is_transposed is way) for way in (False, True)
    )
    assert up.kernel_map is down.kernel_map.reverse()
    assert down.target is up.source
    assert up.target is here.grid


@pytest.mark.gpu
def test_a_set_moves_to_the_gpu(no_building):
    net, x = nn.UNet(4, 3, channels=(4, 6)).eval(), scene()
    want = result(net, x).detach()
    plans = PlanSet.of(net, x.grid).to("cuda")
    assert plans.grid.device.type == "cuda"
    no_building()
    got = result(net.cuda(), sc.SparseTensor(plans.grid, x.features.cuda()))
    torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=1e-3)


def test_errors():
    plans = PlanSet.of(nn.UNet(4, 3, channels=(4, 6)), scene().grid)
    with pytest.raises(ValueError, match="the given grid is another"):
        plans.into(scene(1).grid)
    with pytest.raises(ValueError, match="channels="):
        PlanSet.of(nn.MaxPool(2), scene().grid)
    assert plans.to("cpu") is plans


class Scenes(torch.utils.data.Dataset):
    def __init__(self, net):
        self.net = net

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = scene(index)
        return PlanSet.of(self.net, x.grid), x.features


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_data_loader_fill_sets(workers, no_building):
    torch.manual_seed(0)
    net = nn.UNet(4, 3, channels=(4, 6)).eval()
    want = [result(net, scene(i)).detach() for i in range(4)]
    loader = torch.utils.data.DataLoader(Scenes(net), batch_size=None, num_workers=workers)
    loaded = iter(loader)
    got = []
    for i in range(4):
        plans, features = next(loaded)
        if i == 3:
            no_building()
        got.append(result(net, sc.SparseTensor(plans.grid, features)).detach())
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [(3, 2, 1, 1), (2, 3, 0, 1), (3, 1, 2, 2), (5, 2, 0, 1)]
)
def test_within_equals_a_dense_convolutions_support(kernel, stride, padding, dilation):
    """The voxels are where torch's dense convolution of ones is not zero."""
    grid = sc.VoxelGrid(torch.unique(torch.randint(0, 11, (30, 3)) * torch.tensor([0, 1, 1]), dim=0))
    size = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    dense = grid.to_dense(torch.ones(len(grid), 1), (11, 11))
    ones = torch.nn.functional.conv2d(
        dense, torch.ones(1, 1, kernel, kernel), stride=stride, padding=padding, dilation=dilation
    )
    pairs = {name: (value,) * 2 for name, value in size.items()}
    shape = dense_shape((11, 11), *(pairs[n] for n in ("kernel_size", "stride", "padding", "dilation")))
    assert shape == tuple(ones.shape[2:])
    plan = plan_within(grid, shape, **size)
    assert plan_within(grid, shape, **size).kernel_map is plan.kernel_map
    assert plan.target.coords[:, 1:].tolist() == ones[0, 0].nonzero().tolist()
    y = plan.execute(torch.ones(len(grid), 1), torch.ones(kernel**2, 1, 1))
    assert torch.equal(plan.target.to_dense(y, shape), ones)


def test_plans_within_a_box_go_down_or_up():
    """One grid keeps both, of the same shape and window."""
    grid = sc.VoxelGrid(torch.tensor([[0, 1], [0, 2]]))
    down, up = (plan_within(grid, (6,), 2, stride=2, generative=generative) for generative in (False, True))
    assert down.target.coords[:, 1].tolist() == [0, 1]
    assert up.target.coords[:, 1].tolist() == [2, 3, 4, 5]


def test_a_box_without_a_cell_is_an_error():
    with pytest.raises(ValueError, match="no cell"):
        plan_within(scene().grid, (0, 1, 1), 3, stride=2)


@pytest.mark.parametrize("other", [{"batch_size": 5}, {"voxel_size": 0.5}, {"origin": 1.0}], ids=str)
def test_plans_go_into_no_grid_of_another_space(other):
    """The coarser grids that come along have the first one's batch items and voxel sizes."""
    grid = sc.VoxelGrid(torch.tensor([[0, 0], [0, 1], [1, 5]]))
    plans = PlanSet.of(nn.Conv(2, 4, 2, stride=2, rank=1), grid)
    with pytest.raises(ValueError, match=f"differ in {next(iter(other))}"):
        plans.into(sc.VoxelGrid(grid.coords, **other))
    twin = plans.into(sc.VoxelGrid(grid.coords))
    y = nn.Conv(2, 4, 2, stride=2, rank=1)(sc.SparseTensor(twin, torch.ones(3, 2)))
    assert not y.grid.is_placed
