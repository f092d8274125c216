"""Captured modules whose results have a row for each batch item, chosen voxel or point, beside those of a voxel."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch.utils import _pytree as pytree

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn, ops
from sparseconv.nn.capturing.values.given import Given
from tests.nn.test_capture_module import DEVICE, coords_of, features_of, replays, same
from tests.nn.test_capture_module import _graphs as _graphs  # the stand-in for a card's graphs


class Net(torch.nn.Module):
    """A convolution, and what ``after`` makes of its result and the other arguments."""

    def __init__(self, after, *parts):
        super().__init__()
        self.conv, self.parts, self.after = nn.SubmanifoldConv(4, 8, 3), torch.nn.ModuleList(parts), after

    def forward(self, x, *rest):
        return self.after(self.conv(x), *self.parts, *rest)


def pooled_head():
    """A classifier: torch's norm sees the items of a batch, not the voxels."""
    return torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def squeezed(y, pool, gate):
    """Channels weighed by what the whole item holds."""
    weights = torch.sigmoid(gate(pool(y)))
    return y.with_features(y.features * weights[y.coords[:, 0].long()])


def pruned(y, score, down, up):
    """The voxels of a level that a score chooses, a coarser level of them, and back."""
    chosen = y.subset(score(y).features[:, 0] > 0)
    coarse = down(chosen)
    return chosen, coarse, up(coarse, chosen)


MADE = {
    "sum": lambda: Net(lambda y, pool: pool(y), nn.GlobalSumPool()),
    "avg": lambda: Net(lambda y, pool: pool(y), nn.GlobalAvgPool()),
    "max": lambda: Net(lambda y, pool: pool(y), nn.GlobalMaxPool()),
    "classes": lambda: Net(lambda y, pool, head: head(pool(y)), nn.GlobalAvgPool(), pooled_head()),
    "squeeze": lambda: Net(squeezed, nn.GlobalAvgPool(), torch.nn.Linear(8, 8)),
    "instance": lambda: Net(lambda y, norm: norm(y), nn.InstanceNorm(8, affine=True)),
    "group": lambda: Net(lambda y, norm: norm(y), nn.GroupNorm(2, 8)),
    "pruned": lambda: Net(
        pruned, nn.SubmanifoldConv(8, 1, 1), nn.Conv(8, 8, 2, stride=2), nn.InverseConv(8, 8, 2, stride=2)
    ),
}


def tensors_of(results):
    found = []
    for value in pytree.tree_leaves(results, is_leaf=lambda v: isinstance(v, sc.SparseTensor)):
        found += [value.features, value.coords] if isinstance(value, sc.SparseTensor) else [value]
    return found


def run(net, seed, *rest, items=3, voxels=150, **options):
    """Results, gradients and buffers of a call; of every third scene one item is empty."""
    coords = coords_of(seed, voxels + 10 * (seed % 3), items, **options)
    if seed % 3 == 2:
        coords = coords[coords[:, 0] != 1]
    features = features_of(seed, coords).requires_grad_(torch.is_grad_enabled())
    net.zero_grad(set_to_none=True)
    found = tensors_of(net(sc.SparseTensor(sc.VoxelGrid(coords, items), features), *rest))
    if not torch.is_grad_enabled():
        return found
    weigh = [torch.linspace(-1, 1, t.numel(), device=DEVICE).view_as(t) for t in found if t.is_floating_point()]
    torch.autograd.backward([t for t in found if t.is_floating_point()], weigh)
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return [*(t.detach() for t in found), features.grad, *grads, *net.buffers()]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", list(MADE))
def test_results_by_item_and_of_chosen_voxels(kind, training):
    net = MADE[kind]().to(DEVICE).train(training)
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.set_grad_enabled(training):
        for seed in range(7):
            same(run(net, seed), run(twin, seed))
    assert replays(net) == 5, nn.explain(net)


def test_a_batch_of_fewer_items_is_another_kind_of_call():
    net = MADE["classes"]().to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(9):
        same(run(net, seed, items=3 - seed % 2), run(twin, seed, items=3 - seed % 2))
    assert replays(net) == 5, nn.explain(net)


@pytest.mark.parametrize("pool", ["SparseGlobalMaxPool", "SparseGlobalAvgPool"])
def test_global_pools_of_spconv(pool):
    net = spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3, padding=1), getattr(spconv, pool)()).to(DEVICE).eval()
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.no_grad():
        for seed in range(5):
            coords = coords_of(seed, 150)
            x = spconv.SparseConvTensor(features_of(seed, coords), coords, [12] * 3, 2)
            same([net(x)], [twin(x)])
    assert replays(net) == 3, nn.explain(net)


def test_nan_of_one_item_stays_in_it():
    net = MADE["instance"]().to(DEVICE).eval()
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.no_grad():
        for seed in range(4):
            found = []
            for one in (net, twin):
                coords = coords_of(seed, 150)
                features = features_of(seed, coords)
                features[(coords[:, 0] == 1).nonzero()[0]] = torch.nan
                found.append(one(sc.SparseTensor(sc.VoxelGrid(coords, 2), features)).features)
            assert torch.equal(found[0].isnan(), found[1].isnan())
            assert not found[0].isnan().all()
    assert replays(net) == 2, nn.explain(net)


# ---- points


def at_points(y, mlp, points, items):
    """Features at points, by linear interpolation, and a norm over the points."""
    return mlp(ops.interpolate(y.features, y.grid, points, batch=items)), y


def points_of(seed, count):
    gen = torch.Generator().manual_seed(seed)
    points, items = torch.rand(count, 3, generator=gen) * 12, torch.randint(0, 3, (count,), generator=gen)
    return points.to(DEVICE), items.to(DEVICE)


def point_net():
    first, last = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 2)
    mlp = torch.nn.Sequential(first, torch.nn.BatchNorm1d(8), torch.nn.ReLU(), last)
    return Net(at_points, mlp).to(DEVICE)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_features_at_points_of_any_number(training):
    net = point_net().train(training)
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.set_grad_enabled(training):
        for seed, count in enumerate((400, 390, 410, 250, 405, 411)):
            same(run(net, seed, *points_of(seed, count)), run(twin, seed, *points_of(seed, count)))
        assert replays(net) == 4, nn.explain(net)
        for seed in (6, 7, 8):  # many more points: eager once, then places for them
            same(run(net, seed, *points_of(seed, 3000)), run(twin, seed, *points_of(seed, 3000)))
    assert replays(net) == 6, nn.explain(net)
    assert "1 eager calls: arguments of 3000 and 3000 rows" in nn.explain(net)


@pytest.mark.parametrize("wrong", ["point", "item"])
def test_points_that_are_an_error_are_one_in_a_replay(wrong):
    net = nn.capture(point_net().eval())
    with torch.no_grad():
        for seed in range(4):
            run(net, seed, *points_of(seed, 300))
        points, items = points_of(9, 300)
        if wrong == "point":
            points[17, 1] = torch.nan
        else:
            items[17] = 3
        with pytest.raises(ValueError, match="point 17" if wrong == "point" else r"within 0 .. 2; got 0 .. 3"):
            run(net, 4, points, items)
        run(net, 5, *points_of(5, 300))
    assert "1 eager calls: a point is not finite" in nn.explain(net)


def evaluated(net, seeds, rest_of):
    """A captured module on scenes, with ``rest_of(seed)`` for other arguments, beside its eager twin."""
    net = net.to(DEVICE).eval()
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.no_grad():
        for seed in seeds:
            rest = rest_of(seed)
            same(run(net, seed, *rest), run(twin, seed, *rest))
    return net


def test_numbers_of_rows_that_were_the_same_by_chance():
    """Points and items as many in the first calls, then not; and an argument whose rows are the same in all calls."""

    def both(y, weight, points, more):
        return y.features @ weight.T, points * 2, more.sum(1)

    rows = [(300, 300), (310, 310), (320, 320), (320, 290), (300, 330), (310, 340)]

    def rest_of(seed):
        weight = torch.full((5, 8), 1.0 + seed, device=DEVICE)
        return weight, *(points_of(seed, count)[0] for count in rows[seed])

    net = evaluated(Net(both), range(6), rest_of)
    assert replays(net) == 3, nn.explain(net)


def test_an_argument_that_is_broadcast_has_no_rows_to_spare():
    """One number for all channels, or one a channel: two recordings, since places behind them would change a result."""
    net = Net(lambda y, scale: y.features * scale)
    evaluated(net, range(12), lambda seed: [torch.full((1 if seed % 3 else 8,), 1.0 + seed, device=DEVICE)])
    assert replays(net) == 5, nn.explain(net)


def test_an_empty_argument_is_another_kind_of_call():
    net = Net(lambda y, points: y.features + points.mean() if len(points) else y.features)
    evaluated(net, range(8), lambda seed: points_of(seed, 0 if seed % 2 else 40)[:1])
    assert replays(net) == 4, nn.explain(net)


def test_tensors_on_the_host_are_told_apart_by_their_values():
    """A graph would hold what they were."""
    elsewhere, there = torch.device("meta"), torch.zeros(5, 2, device="meta")
    forms = [Given((there, value), {}).forms(7, elsewhere) for value in map(torch.tensor, (0.5, 0.5, 0.25))]
    assert forms[0] == forms[1] != forms[2]
    half = [Given((torch.tensor([v], dtype=torch.bfloat16),), {}).forms(7, elsewhere) for v in (1.0, 2.0)]
    assert half[0] != half[1]
    large = torch.zeros(5000)
    assert Given((large,), {}).forms(7, elsewhere) != Given((large,), {}).forms(7, elsewhere)
    other = torch.zeros(6, 2, device="meta")  # another number of rows is no other kind
    assert Given((there,), {}).forms(7, elsewhere) == Given((other,), {}).forms(7, elsewhere)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs tensors on two devices")
def test_numbers_on_the_host_are_not_frozen():
    net = Net(lambda y, t: y.features * t)
    evaluated(net, range(12), lambda seed: [torch.tensor(1.0 + seed // 6)])
    assert replays(net) == 8, nn.explain(net)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a capture that CUDA breaks off")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_what_breaks_off_a_capture_is_named_and_leaves_random_numbers(training):
    net = Net(lambda y: y.features @ torch.linalg.inv(torch.eye(8, device=DEVICE))).to(DEVICE).train(training)
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.set_grad_enabled(training):
        for seed in range(4):
            same(run(net, seed), run(twin, seed))
    said = nn.explain(net)
    assert re.search(r"linalg\w* cannot be in a graph, at test_capture_rows.py", said), said
    assert torch.rand(3, device=DEVICE).isfinite().all()


def sparse(seed, voxels):
    coords = coords_of(seed, voxels)
    return sc.SparseTensor(sc.VoxelGrid(coords, 2), features_of(seed, coords))


MIXING = {
    "mean": lambda y: y.features + y.features.mean(0),
    "gate": lambda y: y.features * torch.sigmoid(y.features.mean(0)),
    "softmax": lambda y: y.features.softmax(0),
    "norm": lambda y: torch.nn.functional.batch_norm(y.features.view(-1, 4, 2), None, None, training=True).flatten(1),
    "transposed": lambda y: y.features + y.features.t().amax(1),
}


@pytest.mark.parametrize("drop", [0.0, 0.3], ids=["plain", "dropout"])
@pytest.mark.parametrize("how", MIXING)
def test_what_mixes_rows_is_named_whatever_a_comparison_would_forgive(how, drop):
    """A gate differed by less than rounding may; with dropout nothing was compared. Smaller scenes were far off."""
    net = Net(lambda y: torch.nn.functional.dropout(MIXING[how](y), drop)).to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed, voxels in enumerate([1000, 1000, 1000, 30]):
        found = []
        for one in (net, twin):
            torch.manual_seed(seed)
            found.append(one(sparse(seed, voxels)).detach())
        same(found[:1], found[1:], 1e-6)
    assert "rows that are no voxels change its results" in nn.explain(net), nn.explain(net)


class Counting(torch.nn.Module):
    """Counts rows in a buffer, which no result shows."""

    def __init__(self, drop):
        super().__init__()
        self.conv, self.drop = nn.SubmanifoldConv(4, 8, 3), torch.nn.Dropout(drop)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        y = self.conv(x)
        self.seen += y.features.shape[0]
        return self.drop(y.features)


@pytest.mark.parametrize("drop", [0.0, 0.3], ids=["plain", "dropout"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_what_a_call_leaves_in_buffers_is_compared(training, drop):
    net = nn.capture(Counting(drop).to(DEVICE).train(training))
    voxels = [200, 180, 220, 30]
    with torch.set_grad_enabled(training):
        for seed, count in enumerate(voxels):
            y = net(sparse(seed, count))
            if training:
                y.sum().backward()
    assert int(net.seen) == sum(len(coords_of(seed, count)) for seed, count in enumerate(voxels))
    assert "buffer seen" in nn.explain(net), nn.explain(net)


class Gated(torch.nn.Module):
    """Operations of a client that work on each row alone: views, writes in place, sums over channels."""

    def __init__(self):
        super().__init__()
        self.conv, self.lin = nn.SubmanifoldConv(4, 8, 3), torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.conv(x).features
        out = torch.zeros_like(y)
        out[:, :4] = torch.relu_(self.lin(y))[:, 4:]
        out[:, 4:] += torch.nn.functional.dropout(y[:, :4].softmax(1), 0.5) * torch.sigmoid(y.mean(1, keepdim=True))
        return torch.cat([out, y.view(-1, 2, 4).amax(1)], 1)


def test_what_works_on_each_row_alone_is_captured():
    torch.manual_seed(0)
    net = nn.capture(Gated().to(DEVICE))
    for seed in range(4):
        net(sparse(seed, 200)).sum().backward()
    assert replays(net) == 2, nn.explain(net)
