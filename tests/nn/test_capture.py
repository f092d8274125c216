"""Captured networks: scenes padded to a fixed number of rows, with the results that they have alone.

Without a card a stand-in of the graph runs what would be captured again at every replay, into the same memory.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree

import sparseconv as sc
from sparseconv import nn
from sparseconv.gpu import graphs
from sparseconv.nn.fused import normalize, remaking
from sparseconv.nn.fused.fusion import conv_norm_act
from sparseconv.nn.models.minkunet import MinkUNet
from tests.cases import error
from tests.trees import that_look_into_sparse_tensors
from tests.waits import nothing_waits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F = torch.nn.functional


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
        monkeypatch.setattr(graphs, "graph_of", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # the interpreter of Triton 3.6 makes numbers as numpy 1.26 advises against
        warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
        yield


def stand_in(run, device):
    """Like a graph, a replay writes the memory of the first results, and no version of a tensor tells of it."""
    kept = run()

    def replay():
        versions = [(b, b._version) for b in MOVED]
        with run.__self__._as_captured():
            found = run()
        for old, new in zip(tensors(kept), tensors(found), strict=True):
            old.copy_(new)
        for buffer, version in versions:
            torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))

    return SimpleNamespace(replay=replay), kept


#: buffers whose versions a stand-in hides
MOVED: list[torch.Tensor] = []


def tensors(tree):
    """The tensors of results, with the features of sparse ones."""
    leaves = [v.features if isinstance(v, sc.SparseTensor) else v for v in pytree.tree_leaves(tree)]
    return [v for v in leaves if isinstance(v, torch.Tensor)]


def scan(seed, voxels=120, dtype=torch.float32, extent=10, items=2):
    """A scene of two items, and a label a voxel."""
    gen = torch.Generator().manual_seed(seed)
    coords = torch.cat(
        [torch.randint(0, items, (voxels, 1), generator=gen), torch.randint(0, extent, (voxels, 3), generator=gen)], 1
    )
    grid = sc.VoxelGrid(coords.to(DEVICE), items, duplicates="first")
    features = torch.randn(len(grid), 4, generator=gen).to(DEVICE, dtype)
    return sc.SparseTensor(grid, features), (grid.coords[:, 1].long() + grid.coords[:, 2]) % 3


def unet(**options):
    torch.manual_seed(0)
    return nn.UNet(4, 3, channels=(8, 12), **options).to(DEVICE)


def mink():
    torch.manual_seed(0)
    return MinkUNet(4, 3, variant="14", planes=(8,) * 8, init_channels=8).to(DEVICE)


def cross_entropy(y, labels):
    return F.cross_entropy(y.features.double(), labels)


def eager(net, x, labels, loss=cross_entropy):
    """Loss, gradients and buffers of a step without a graph."""
    net.zero_grad()
    value = loss(net(x), labels)
    value.backward()
    return [value.detach(), *(p.grad for p in net.parameters()), *net.buffers()]


def same(got, want, limit):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert error(a, b.double().cpu()) < limit


NETWORKS = [unet, mink, lambda: unet(block="bottleneck", activation=nn.GELU)]


# ---- the same numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", NETWORKS, ids=["unet", "minkunet", "bottleneck"])
def test_steps_on_scenes_of_many_sizes_equal_eager_ones(make, dtype):
    if DEVICE == "cuda" and dtype == torch.float64:
        pytest.skip("torch's own operations, which the CPU runs too")
    net = make().to(dtype)
    twin, limit = copy.deepcopy(net), 1e-8 if dtype == torch.float64 else 1e-2
    before = [b.clone() for b in net.buffers()]
    step = nn.capture_step(net, cross_entropy, *scan(0, dtype=dtype), max_voxels=300)
    assert step.max_voxels == 512
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), before, strict=True))
    for seed, voxels in ((1, 120), (2, 250), (3, 60)):
        x, labels = scan(seed, voxels, dtype)
        got = [step(x, labels), *(p.grad for p in net.parameters()), *net.buffers()]
        same(got, eager(twin, x, labels), limit)
        x = (x.grid.coords, x.features)
        again = step(x, labels)
        same([again], eager(twin, sc.SparseTensor(sc.VoxelGrid(x[0], 2), x[1]), labels)[:1], limit)
    step.check()


class Classifier(torch.nn.Module):
    """A class for each batch item; its head has torch's own norm, which writes statistics that no version tells of."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.pool = nn.SubmanifoldConv(4, 8, 3), nn.GlobalAvgPool()
        self.head = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    def forward(self, x):
        return self.head(self.pool(self.body(x)))


def test_statistics_of_torchs_own_norms_are_those_of_the_steps_alone():
    net = Classifier().to(DEVICE)
    twin, before = copy.deepcopy(net), [b.clone() for b in net.buffers()]
    x, _ = scan(0, items=4)
    step = nn.capture_step(net, F.cross_entropy, x, torch.tensor([0, 1, 2, 1], device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), before, strict=True))
    for seed in (1, 2):
        (x, _), labels = scan(seed, items=4), torch.tensor([seed, 0, 2, 1], device=DEVICE)
        same([step(x, labels), *net.buffers()], _of_a_step(twin, x, labels), 1e-3)


def test_results_of_fewer_items_than_the_example_has_are_not_cut_from_a_graph():
    net = Classifier().to(DEVICE).eval()
    fast = nn.capture(net, scan(0, items=4)[0])
    for items in (4, 3):
        x, _ = scan(1, items=items)
        with nullcontext() if items == 4 else pytest.warns(UserWarning, match="3 batch items, .* results of 4"):
            y = fast(x)
        with torch.no_grad():
            assert error(y, net(x).double().cpu()) < 1e-4


def _of_a_step(twin, x, labels):
    """Loss and buffers of a step without a graph."""
    value, *rest = eager(twin, x, labels, F.cross_entropy)
    return [value, *rest[len([*twin.parameters()]) :]]


@pytest.mark.parametrize("make", NETWORKS, ids=["unet", "minkunet", "bottleneck"])
def test_inference_on_scenes_of_many_sizes_equals_eager_one(make):
    net = make().eval()
    fast = nn.capture(net, scan(0)[0], max_voxels=300)
    for seed, voxels in ((1, 120), (2, 250), (3, 60)):
        x, _ = scan(seed, voxels)
        with torch.no_grad():
            want = net(x).features
        y = fast(x)
        assert y.grid is x.grid
        assert not y.features.requires_grad
        assert error(y.features, want.double().cpu()) < 1e-4
        assert torch.equal(fast((x.grid.coords, x.features)), y.features)


def test_a_loop_of_training_finds_the_losses_of_an_eager_one():
    net = unet()
    twin, losses = copy.deepcopy(net), [[], []]
    step = nn.capture_step(net, cross_entropy, *scan(0), max_voxels=200)
    optimisers = [torch.optim.Adam(n.parameters(), 5e-3) for n in (net, twin)]
    for turn in range(8):
        x, labels = scan(turn % 2, 120 + 20 * (turn % 2))
        losses[0].append(step((x.grid.coords, x.features), labels))
        losses[1].append(eager(twin, x, labels)[0])
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    got, want = (torch.stack(one) for one in losses)
    assert error(got, want.cpu()) < 1e-2
    assert got[-1] < got[0] - 0.1


def test_weights_that_changed_are_seen():
    """An optimiser, a step's statistics, a write that no version tells of, and other memory."""
    net, (x, labels) = unet(), scan(0)
    fast = nn.capture(net.eval(), x)
    step = nn.capture_step(net.train(), cross_entropy, x, labels)
    MOVED[:] = net.buffers()

    def changed(change):
        before = fast(x).features
        change()
        after = fast(x).features
        with torch.no_grad():
            want = net.eval()(x).features
        net.train()
        assert not torch.equal(before, after)
        assert error(after, want.double().cpu()) < 1e-4

    try:
        changed(lambda: step(x, labels))  # statistics alone
        changed(lambda: torch.optim.SGD(net.parameters(), 0.5).step())
        changed(
            lambda: net.load_state_dict(
                {k: v * 0.9 if v.is_floating_point() else v for k, v in net.state_dict().items()}
            )
        )
        changed(lambda: net.stem[0].weight.data.mul_(0.5))
        changed(lambda: setattr(net.head.weight, "data", net.head.weight.data + 1))
    finally:
        MOVED.clear()
    twin = copy.deepcopy(net)
    same([step(x, labels)], eager(twin, x, labels)[:1], 1e-3)


def test_in_inference_mode():
    net, (x, _) = unet().eval(), scan(0)
    with torch.inference_mode():
        fast = nn.capture(net, x)
        inside = fast(x).features
    outside = fast(x).features
    assert torch.equal(inside, outside)
    outside.add_(1)
    with torch.no_grad():
        net.head.bias.add_(1)
    assert error(fast(x).features, outside.double().cpu()) < 1e-4


def test_networks_side_by_side_and_results_of_ones_own():
    nets = [unet().eval(), mink().eval()]
    both = [nn.capture(net, scan(0)[0]) for net in nets]
    scans = [scan(seed, 100)[0] for seed in range(3)]
    results = [[one(x).features for x in scans] for one in both]
    with torch.no_grad():
        for net, found in zip(nets, results, strict=True):
            for x, y in zip(scans, found, strict=True):
                assert error(y, net(x).features.double().cpu()) < 1e-4


def test_a_step_of_several_results_targets_and_modes():
    """Targets in a dictionary, some of them not by row; a frozen part; a loss with an own mask."""
    net = unet()
    net.stem.requires_grad_(False)
    net.stem.eval()
    twin, (x, labels) = copy.deepcopy(net), scan(0)

    def loss(y, targets):
        there = targets["labels"] != 7
        picked = torch.where(there[:, None], y.features, 0).square().mean(1)
        return (picked * targets["scale"]).sum() / there.sum()

    def targets_of(labels, scale):
        return {"labels": labels, "scale": torch.full((1,), scale, device=DEVICE), "none": None}

    step = nn.capture_step(net, loss, x, targets_of(labels, 1.0), ignore=7)
    for seed, scale in ((1, 2.0), (2, 0.5)):
        x, labels = scan(seed, 100)
        twin.zero_grad()
        want = loss(twin(x), targets_of(labels, scale))
        want.backward()
        same([step(x, targets_of(labels, scale))], [want.detach()], 1e-4)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or error(p.grad, q.grad.double().cpu()) < 2e-3


def test_other_results_than_one_of_the_voxels():
    class Several(nn.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv = nn.SubmanifoldConv(4, 3, 3)

        def forward(self, x):
            y = self.conv(x)
            return {"y": y, "best": y.features.argmax(1), "weight": self.conv.weight.sum(), "no": None}

    net = Several().to(DEVICE).eval()
    x, _ = scan(1, 90)
    with that_look_into_sparse_tensors():
        captured = nn.capture(net, scan(0)[0])
        found, on_grid = captured((x.grid.coords, x.features)), captured(x)
    with torch.no_grad():
        want = net(x)
    assert torch.equal(found["best"], want["best"])
    assert isinstance(found["y"], torch.Tensor)
    assert found["y"].shape == want["y"].features.shape
    assert on_grid["y"].grid is x.grid
    assert torch.equal(found["weight"], want["weight"])
    assert found["no"] is None


def test_autocast_of_the_moment():
    net = unet()
    twin, (x, labels) = copy.deepcopy(net), scan(1)
    with torch.autocast(DEVICE, torch.bfloat16):
        step = nn.capture_step(net, cross_entropy, *scan(0))
        want = cross_entropy(twin(x), labels)
    want.backward()
    same([step(x, labels)], [want.detach()], 1e-2)
    full = cross_entropy(copy.deepcopy(twin)(x), labels)
    assert abs(step(x, labels) - full) > 1e-7
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert p.grad.dtype == p.dtype
        assert error(p.grad, q.grad.double().cpu()) < 0.5


def test_a_step_through_the_kernels_of_norms(monkeypatch):
    """On a card they serve every step; here Triton's interpreter runs them, and results are made again."""
    pytest.importorskip("triton")
    monkeypatch.setattr(normalize, "on_kernels", lambda x: True)
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", 0)
    net = unet()
    twin, step = copy.deepcopy(net), nn.capture_step(net, cross_entropy, *scan(0), room=2)
    for seed, voxels in ((1, 60), (2, 200)):
        x, labels = scan(seed, voxels)
        same([step(x, labels), *(p.grad for p in net.parameters()), *net.buffers()], eager(twin, x, labels), 1e-2)


# ---- what does not fit


def test_scenes_that_the_host_sees_to_be_too_large_run_without_the_graph():
    net = unet()
    twin, fast = copy.deepcopy(net), nn.capture(net.eval(), scan(0)[0], extent=(12, 12, 12))
    step = nn.capture_step(net.train(), cross_entropy, *scan(0))
    far, _ = scan(1, extent=14)
    many, labels = scan(1, 400)
    third, _ = scan(1, items=3)
    for x, why in ((many, "voxels of at most 256"), (third, "3 batch items"), (far, "extent")):
        with pytest.warns(UserWarning, match=why):
            y = fast(x)
        with torch.no_grad():
            assert torch.equal(y.features, twin.eval()(x).features)
    with pytest.warns(UserWarning, match="voxels of at most 256"):
        assert fast((many.grid.coords, many.features)).shape == (len(many.grid), 3)
    with pytest.warns(UserWarning, match="voxels of at most 256"):
        value = step(many, labels)
    same(
        [value, *(p.grad for p in net.parameters())],
        eager(twin.train(), many, labels)[: 1 + len([*net.parameters()])],
        1e-6,
    )
    step.check()
    x, labels = scan(2)
    same([step(x, labels)], eager(twin, x, labels)[:1], 1e-4)


FAR = [[0, 60, 0, 0]]


@pytest.mark.parametrize(
    ("more", "why"), [(FAR, "outside"), ([[2, 0, 0, 0]], "outside"), (None, "twice")], ids=["extent", "batch", "twice"]
)
def test_what_the_device_finds_is_nan_and_raises_later(more, why):
    net = unet()
    step = nn.capture_step(net, cross_entropy, *scan(0))
    fast = nn.capture(copy.deepcopy(net).eval(), scan(0)[0])
    x, labels = scan(1, 100)
    more = x.grid.coords[:1] if more is None else torch.tensor(more, dtype=torch.int32, device=DEVICE)
    bad = torch.cat([x.grid.coords, more]), torch.cat([x.features, x.features[:1]])
    y = fast(bad)
    assert y.isnan().all()
    with pytest.raises(RuntimeError, match=why):
        fast.check()
    assert fast(x).features.isfinite().all()
    value = step(bad, torch.cat([labels, labels[:1]]))
    assert value.isnan()
    assert not any(p.grad.any() for p in net.parameters())
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=why):
        step(x, labels)
    assert step(x, labels).isfinite()
    step.check()


def test_nan_in_a_scene_that_does_not_fit_gives_no_gradient():
    """As from rows of a map that nobody wrote."""
    net = unet()
    step = nn.capture_step(net, cross_entropy, *scan(0))
    x, labels = scan(1, 100)
    far = torch.tensor(FAR, dtype=torch.int32, device=DEVICE)
    bad = torch.cat([x.grid.coords, far]), torch.cat([x.features, torch.full_like(x.features[:1], torch.nan)])
    bad[1][:5] = torch.nan
    assert step(bad, torch.cat([labels, labels[:1]])).isnan()
    assert not any(p.grad.any() for p in net.parameters())
    with pytest.raises(RuntimeError, match="outside"):
        step.check()
    bad[1].nan_to_num_()
    assert step(x, labels).isfinite()
    assert any(p.grad.any() for p in net.parameters())


def test_coarser_grids_without_room():
    """A dense scene as the example, a scattered one after it: as many voxels, more coarse ones."""
    dense = torch.cartesian_prod(*[torch.arange(n) for n in (1, 16, 16, 16)]).int().to(DEVICE)
    scattered = dense * torch.tensor([1, 3, 3, 3], dtype=torch.int32, device=DEVICE)
    features = torch.randn(len(dense), 4, device=DEVICE)
    net = unet().eval()
    fast = nn.capture(net, sc.SparseTensor(sc.VoxelGrid(dense), features), room=1.0, extent=(48, 48, 48))
    assert fast((dense, features)).isfinite().all()
    assert fast((scattered, features)).isnan().all()
    with pytest.raises(RuntimeError, match="more room"):
        fast.check()
    with torch.no_grad():
        want = net(sc.SparseTensor(sc.VoxelGrid(dense), features)).features
    assert error(fast((dense, features)), want.double().cpu()) < 1e-4


@pytest.mark.skipif(DEVICE == "cpu", reason="places for edges are a card's, whose pairs are a bound")
def test_more_edges_than_the_example_has_leave_room_for(monkeypatch):
    """As many voxels side by side, where those of the example had no neighbours."""
    monkeypatch.setattr("sparseconv.geometry.fixed_grid.EDGES", 1)
    dense = torch.cartesian_prod(*[torch.arange(n) for n in (1, 16, 16, 16)]).int().to(DEVICE)
    apart = dense * torch.tensor([1, 3, 3, 3], dtype=torch.int32, device=DEVICE)
    features, labels = torch.randn(len(dense), 4, device=DEVICE), torch.arange(len(dense), device=DEVICE) % 3
    net = nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.BatchNorm(8), nn.Linear(8, 3)).to(DEVICE)
    step = nn.capture_step(net, cross_entropy, sc.SparseTensor(sc.VoxelGrid(apart), features), labels)
    assert step((apart, features), labels).isfinite()
    assert step((dense, features), labels).isnan()
    assert not any(p.grad.any() for p in net.parameters())
    with pytest.raises(RuntimeError, match="more edges"):
        step.check()
    assert step((apart, features), labels).isfinite()
    step.check()


# ---- what shares a gradient


class Twice(nn.SparseModule):
    """One convolution in two places, whose gradients torch adds, and a loss on its weight would too."""

    def __init__(self):
        super().__init__()
        self.first = nn.ConvBlock(4, 8)
        self.conv, self.norms = nn.SubmanifoldConv(8, 8, 3, bias=False), nn.BatchNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = conv_norm_act(x, self.conv, self.norms, nn.ReLU())
        return self.head(x)


@pytest.mark.parametrize("weighed", [False, True])
def test_a_weight_that_has_several_gradients(weighed):
    torch.manual_seed(0)
    net = Twice().to(DEVICE)
    twin, (x, labels) = copy.deepcopy(net), scan(0)

    def loss_of(module):
        return lambda y, t: cross_entropy(y, t) + (module.first[0].weight.square().sum() if weighed else 0)

    step = nn.capture_step(net, loss_of(net), x, labels)
    for seed in (1, 2):
        x, labels = scan(seed, 110)
        got = [step(x, labels), *(p.grad for p in net.parameters()), *net.buffers()]
        same(got, eager(twin, x, labels, loss_of(twin)), 1e-2)


# ---- errors


class Wrong(nn.SparseModule):
    """Modules that dead rows change, or whose results the host cannot cut."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.down = nn.SubmanifoldConv(4, 3, 3), nn.Conv(3, 3, 2, stride=2)
        self.norm, self.how = torch.nn.BatchNorm1d(3), how

    def forward(self, x):
        y = self.conv(x)
        if self.how == "norm":
            return y.with_features(self.norm(y.features))
        if self.how == "mean":
            return y.with_features(y.features - y.features.mean(0))
        return self.down(y)


@pytest.mark.parametrize(
    ("how", "why"), [("norm", "no voxels change"), ("mean", "no voxels change"), ("down", "input's")]
)
def test_networks_that_cannot_be_captured(how, why):
    x, labels = scan(0)
    with pytest.raises(ValueError, match=why):
        nn.capture_step(Wrong(how).to(DEVICE), cross_entropy, x, labels)


def test_losses_that_count_dead_rows():
    x, labels = scan(0)
    with pytest.raises(ValueError, match="counts rows"):
        nn.capture_step(unet(), lambda y, t: y.features.square().mean(), x, labels)
    with pytest.raises(ValueError, match="counts rows"):
        nn.capture_step(unet(), cross_entropy, x, labels, ignore=0)
    with pytest.raises(ValueError, match="scalar"):
        nn.capture_step(unet(), lambda y, t: y.features.sum(1), x, labels)


def test_dropout_is_no_loss_of_dead_rows():
    """Random networks differ from run to run, which is not taken for the work of dead rows."""
    net = nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.BatchNorm(8), nn.Dropout(0.5), nn.Linear(8, 3)).to(DEVICE)
    state, (x, labels) = torch.get_rng_state(), scan(0)
    step = nn.capture_step(net, cross_entropy, x, labels)
    assert torch.equal(torch.get_rng_state(), state)
    assert step(x, labels) != step(x, labels)


def test_arguments():
    x, labels = scan(0)
    net = unet()
    with pytest.raises(ValueError, match="in training"):
        nn.capture(net, x)
    net.eval()
    with pytest.raises(TypeError, match="Module"):
        nn.capture(lambda x: x, x)
    with pytest.raises(TypeError, match="example"):
        nn.capture(net, x.features)
    for options in ({"room": 0.9}, {"max_voxels": 3}):
        with pytest.raises(ValueError, match="room"):
            nn.capture(net, x, **options)
    with pytest.raises(RuntimeError, match="outside"):
        nn.capture(net, x, extent=(4, 4, 4))
    fast, step = nn.capture(net, x), nn.capture_step(net.train(), cross_entropy, x, labels)
    for bad, kind in (
        (x.features, TypeError),
        ((x.grid.coords.long(), x.features), TypeError),
        (x.to(dtype=torch.float64), ValueError),
        ((x.grid.coords, x.features[:-1]), ValueError),
        ((x.grid.coords, x.features[:, :3]), ValueError),
    ):
        with pytest.raises(kind):
            fast(bad)
    for bad, kind in ((None, TypeError), ([labels], TypeError), (labels[:-1], ValueError), (labels.int(), ValueError)):
        with pytest.raises(kind):
            step(x, bad)


def test_without_a_card_a_call_is_the_plain_call(monkeypatch):
    monkeypatch.setattr(graphs, "has_graphs", lambda device: False)
    net, (x, labels) = unet(), scan(0)
    twin = copy.deepcopy(net)
    step = nn.capture_step(net, cross_entropy, x, labels)
    value = step(x, labels)
    same([value, *(p.grad for p in net.parameters()), *net.buffers()], eager(twin, x, labels), 1e-6)
    step.check()
    fast = nn.capture(net.eval(), x)
    with torch.no_grad():
        assert torch.equal(fast(x).features, net(x).features)
        assert torch.equal(fast((x.grid.coords, x.features)), net(x).features)


# ---- on a card


def large(seed, points=60_000):
    torch.manual_seed(seed)
    grid, _ = sc.voxelize(
        torch.rand(points, 3, device="cuda") * torch.tensor([1, 1, 0.1], device="cuda"), voxel_size=0.01
    )
    return sc.SparseTensor(grid, torch.randn(len(grid), 4, device="cuda").half()), grid.coords[:, 1].long() % 3


def off(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.gpu
def test_large_scenes_in_halves_without_a_wait():
    torch.manual_seed(0)
    net = nn.UNet(4, 3, channels=(32, 64, 128)).cuda().half()
    twin = copy.deepcopy(net)
    step = nn.capture_step(net, cross_entropy, *large(0), max_voxels=80_000)
    fast = nn.capture(copy.deepcopy(net).eval(), large(0)[0], max_voxels=80_000)
    for seed, points in ((1, 60_000), (2, 75_000), (3, 30_000)):
        x, labels = large(seed, points)
        inputs = x.grid.coords, x.features
        with nothing_waits():
            loss, logits = step(inputs, labels), fast(inputs)
        wanted, *grads = eager(twin, x, labels)
        assert off(loss, wanted) < 1e-3
        for p, grad in zip(net.parameters(), grads):
            assert off(p.grad, grad) < 0.1
        with torch.no_grad():
            norms = [b.clone() for b in twin.buffers()]
            for b, start in zip(twin.buffers(), fast.network.buffers(), strict=True):
                b.copy_(start)
            assert off(logits, twin.eval()(x).features) < 0.02
            for b, now in zip(twin.train().buffers(), norms, strict=True):
                b.copy_(now)
        assert torch.equal(step(inputs, labels), loss)
        assert torch.equal(fast(inputs), logits)
        with torch.no_grad():
            twin(x)
    step.check()
    fast.check()


@pytest.mark.gpu
def test_two_graphs_on_two_streams():
    torch.manual_seed(0)
    nets = [nn.UNet(4, 3, channels=(32, 64)).cuda().half().eval() for _ in range(2)]
    both, (x, _) = [nn.capture(net, large(0)[0], max_voxels=80_000) for net in nets], large(1)
    want = [fast(x).features for fast in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for fast, stream in zip(both, streams):
            with torch.cuda.stream(stream):
                found.append(fast(x).features)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.gpu
def test_a_network_that_waits_cannot_be_captured():
    class Waits(nn.UNet):
        def forward(self, x):
            y = super().forward(x)
            return y.with_features(y.features * float(y.features[0, 0] > -1e9))

    x, _ = scan(0)
    with pytest.raises(RuntimeError):
        nn.capture(Waits(4, 3, channels=(8, 12)).cuda().eval(), x)
    torch.cuda.synchronize()
    assert nn.capture(unet().eval(), x)(x).features.isfinite().all()


@pytest.mark.gpu
def test_calls_take_no_more_memory():
    net, (x, labels) = nn.UNet(4, 3, channels=(32, 64)).cuda().half(), large(0)
    step = nn.capture_step(net, cross_entropy, x, labels)
    step(x, labels)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        step(x, labels)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_a_scaled_loss_under_autocast():
    net, (x, labels) = unet(), scan(1)
    scaler, optimiser = torch.amp.GradScaler("cuda", 1024.0), torch.optim.SGD(net.parameters(), 0.1)
    with torch.autocast("cuda", torch.float16):
        step = nn.capture_step(net, lambda y, t: scaler.scale(cross_entropy(y, t)), *scan(0))
    losses = []
    for _ in range(20):
        losses.append(step(x, labels) / scaler.get_scale())
        scaler.step(optimiser)
        scaler.update()
    assert losses[-1] < losses[0] - 0.1


def test_a_derivative_by_the_scene_is_refused():
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)  # torch's own, at its first dual
    scene, labels = scan(0)
    net = unet().eval()
    fast, step = nn.capture(net, scene), nn.capture_step(unet(), cross_entropy, scene, labels)
    x, along = scene.features, torch.ones_like(scene.features)
    for run in (lambda x: fast(scene.with_features(x)).features.sum(), lambda x: step(scene.with_features(x), labels)):
        with pytest.raises(RuntimeError, match="call the network itself"):
            torch.func.grad(run)(x)
        with pytest.raises(RuntimeError, match="detach the features"):
            torch.func.jvp(run, (x,), (along,))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="no derivative by its scene"):
            run(torch.autograd.forward_ad.make_dual(x, along))


@pytest.mark.gpu
def test_a_captured_teacher_within_a_transform_that_does_not_follow_it():
    scene, _ = scan(0)
    fast = nn.capture(unet().eval(), scene)
    want = fast(scene).features
    found = torch.func.grad(lambda w: (fast(scene).features * w).sum())(torch.ones(3, device=DEVICE))
    torch.testing.assert_close(found, want.sum(0))
    found = torch.func.grad(lambda x: (fast(scene.with_features(x.detach())).features * x[:, :3]).sum())(scene.features)
    torch.testing.assert_close(found[:, :3], want)
