"""Norms and pools over all rows, in two passes: equal to the whole to rounding, and rows after them in one order."""

from __future__ import annotations

import copy

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.trace.totals import BatchStatistics
from tests.elsewhere import Elsewhere
from tests.streaming.scenes import Squeeze, forced, scene


def block(norm):
    return nn.Sequential(
        nn.SubmanifoldConv(4, 8, 3),
        norm(8),
        nn.ReLU(),
        nn.Conv(8, 6, 2, stride=2),
        norm(6),
        nn.SubmanifoldConv(6, 4, 3),
    )


NORMS = {
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": lambda c: nn.InstanceNorm(c, affine=True),
    "batch": nn.BatchNorm,
    "momentless": lambda c: nn.BatchNorm(c, momentum=None, affine=False),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("cuts", [0, 2])
def test_norms_of_all_rows(name, cuts, monkeypatch):
    torch.manual_seed(0)
    net, x = block(NORMS[name]).double(), scene(dtype=torch.float64)
    other = copy.deepcopy(net)
    forced(monkeypatch, cuts, 200)
    with torch.no_grad():
        for _ in range(2):
            want, got = net(x), sc.stream(other, x, 10**9)
            torch.testing.assert_close(got.features, want.features, rtol=1e-10, atol=1e-10)
    for (key, a), b in zip(net.state_dict().items(), other.state_dict().values()):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10, msg=key)


@pytest.mark.parametrize("pool", [nn.GlobalSumPool, nn.GlobalAvgPool, nn.GlobalMaxPool])
def test_pools_of_items(pool, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.SubmanifoldConv(4, 8, 3), pool(), torch.nn.Linear(8, 3)).double().eval()
    x = scene(batch=3, dtype=torch.float64)
    forced(monkeypatch, 0, 200)
    with torch.no_grad():
        want, got = net(x), sc.stream(net, x, 10**9)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_value_of_the_scene_meets_rows(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.SubmanifoldConv(4, 8, 3), Squeeze(8), nn.SubmanifoldConv(8, 3, 3)).double().eval()
    x = scene(dtype=torch.float64)
    forced(monkeypatch, 0, 200)
    with torch.no_grad():
        torch.testing.assert_close(sc.stream(net, x, 10**9).features, net(x).features, rtol=1e-12, atol=1e-12)


def test_a_dense_array(monkeypatch):
    torch.manual_seed(0)
    x = scene()
    low = x.grid.extent
    net = nn.Sequential(nn.SubmanifoldConv(4, 3, 3), nn.ToDense(low)).eval()
    forced(monkeypatch, 0, 200)
    with torch.no_grad():
        assert torch.equal(sc.stream(net, x, 10**9), net(x))


def test_running_statistics_move_once_and_not_at_all_where_a_run_fails(monkeypatch):
    torch.manual_seed(0)
    net, x = block(nn.BatchNorm), scene()
    before = copy.deepcopy(net.state_dict())
    forced(monkeypatch, 0, 200)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("stop")

    with torch.no_grad(), pytest.raises(RuntimeError, match="stop"):
        sc.stream(net, x, 10**9, progress=fail)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values()))


class Shared(nn.SparseModule):
    """One norm of two branches, the first of which waits for another norm; and norms of a branch without a result."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.both, self.aside = nn.BatchNorm(channels), nn.BatchNorm(4), block(nn.BatchNorm)
        self.conv, self.other = (nn.SubmanifoldConv(channels, 4, 3) for _ in range(2))

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        self.aside(x)
        return self.both(self.conv(self.first(x))) + self.both(self.other(x) * 3 + 1)


@pytest.mark.parametrize("cuts", [0, 2])
def test_running_statistics_move_in_the_network_s_order_and_without_a_result(cuts, monkeypatch):
    torch.manual_seed(0)
    net, x = Shared(4).double(), scene(dtype=torch.float64)
    other = copy.deepcopy(net)
    forced(monkeypatch, cuts, 200)
    net(x).features.sum().backward()
    sc.stream(other, x, 10**9).features.sum().backward()
    for (key, a), b in zip(net.state_dict().items(), other.state_dict().values()):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10, msg=key)
    for (key, p), q in zip(net.named_parameters(), other.parameters()):
        assert (p.grad is None) == (q.grad is None), key
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, msg=key)


def test_running_statistics_on_another_device_than_what_blocks_found():
    mean, var = torch.zeros(3), torch.ones(3)
    step = BatchStatistics(
        of=0, grid=0, running=(mean.as_subclass(Elsewhere), var.as_subclass(Elsewhere)), momentum=0.1
    )
    rows = torch.randn(5, 3)
    step.follow([step.part(rows, torch.zeros(5, 4).int(), 1)])
    torch.testing.assert_close(mean, 0.1 * rows.mean(0))
    torch.testing.assert_close(var, 0.9 + 0.1 * rows.var(0))
