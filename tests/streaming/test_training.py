"""Gradients of a streamed network are those of the whole, to rounding."""

from __future__ import annotations

import copy

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from tests.streaming.scenes import NETWORKS, Squeeze, forced, scene
from tests.streaming.test_totals import NORMS, block

TRAINED = {
    **{name: NETWORKS[name] for name in ("conv", "unet", "second", "pools", "several", "pruned")},
    **{f"{name} norm": (lambda norm=norm: block(norm)) for name, norm in NORMS.items()},
    "deep": NETWORKS["deep"],  # of the smaller sample one voxel is left, and of both in the next
    "coarse": lambda: nn.Sequential(nn.Conv(4, 4, 8, stride=8), nn.BatchNorm(4), nn.ReLU()),
    "squeeze": lambda: nn.Sequential(nn.SubmanifoldConv(4, 8, 3), Squeeze(8), nn.SubmanifoldConv(8, 3, 3)),
}


def loss(y):
    """A number that looks at every result, each row in its own way."""
    if isinstance(y, dict):
        return sum(loss(part) for part in y.values())
    rows = y.features if isinstance(y, sc.SparseTensor) else y
    return (rows * torch.linspace(-1, 1, rows.numel(), dtype=rows.dtype).view(rows.shape)).square().sum()


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("cuts", [0, 2])
def test_gradients_of_parameters_and_input(name, cuts, monkeypatch):
    torch.manual_seed(0)
    net, x = TRAINED[name]().double(), scene(count=120, dtype=torch.float64)
    other, features = copy.deepcopy(net), x.features.clone().requires_grad_()
    forced(monkeypatch, cuts, 50)
    want = loss(net(x.with_features(features)))
    grads = torch.autograd.grad(want, [features, *net.parameters()], allow_unused=True)
    again = x.features.clone().requires_grad_()
    got = loss(sc.stream(other, x.with_features(again), 10**9))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    got.backward()
    for (key, parameter), grad in zip([("x", again), *other.named_parameters()], grads):
        if grad is None:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, key
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-8, atol=1e-8, msg=key)


def test_two_runs_give_the_same_bits_and_steps_learn(monkeypatch):
    torch.manual_seed(0)
    x = scene(count=150)
    forced(monkeypatch, 1, 60)
    grads, losses = [], []
    net = nn.Sequential(nn.ConvBlock(4, 8), nn.SubmanifoldConv(8, 5, 3))
    for _ in range(2):
        net.zero_grad()
        y = sc.stream(net, x, 10**9)
        y.features.square().mean().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        value = (sc.stream(net, x, 10**9).features - 1).square().mean()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0]


def test_a_result_keeps_its_run_no_longer_than_it_lives(monkeypatch):
    import gc
    import weakref

    from sparseconv.streaming.run import Run

    runs, original = [], Run.run
    monkeypatch.setattr(Run, "run", lambda self: (runs.append(weakref.ref(self)), original(self))[1])
    y = sc.stream(NETWORKS["conv"](), scene(count=30), 10**9)
    assert runs[0]() is not None
    y.features.sum().backward()
    del y
    gc.collect()
    assert runs[0]() is None


def test_a_folder_is_for_inference(tmp_path):
    with pytest.raises(ValueError, match="resume and out are for inference"):
        sc.stream(NETWORKS["conv"](), scene(count=30), 10**9, resume=tmp_path)


def test_parts_are_for_inference_in_memory(tmp_path):
    with pytest.raises(ValueError, match="gather=False is for inference in memory, but gradients need the whole"):
        sc.stream(NETWORKS["conv"](), scene(count=30), 10**9, gather=False)
    with torch.no_grad(), pytest.raises(ValueError, match="but resume and out keep the whole result in files"):
        sc.stream(NETWORKS["conv"](), scene(count=30), 10**9, gather=False, resume=tmp_path)


def test_gradients_that_are_given_stay_as_they_are(monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS["several"](), scene()
    forced(monkeypatch, 2, 100)
    y = sc.stream(net, x, 10**9)
    results = [y["fine"].features, y["coarse"].features]
    grads = [torch.randn_like(rows) for rows in results]
    before = [grad.clone() for grad in grads]
    torch.autograd.backward(results, grads)
    assert all(map(torch.equal, grads, before))


class Beside(nn.SparseModule):
    """What it was given, beside what a layer makes of it, and what the next makes of that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.SubmanifoldConv(4, 4, 3), nn.BatchNorm(4), nn.SubmanifoldConv(4, 4, 3)

    def forward(self, x: sc.SparseTensor) -> list[sc.SparseTensor]:
        y = self.first(x)
        return [x, y, self.second(self.norm(y))]


@pytest.mark.parametrize("cuts", [0, 2])
def test_a_network_may_return_what_it_was_given(cuts, monkeypatch):
    torch.manual_seed(0)
    net, x, found = Beside().double(), scene(count=120, dtype=torch.float64), []
    given = [torch.randn_like(x.features) for _ in range(3)]
    before = [grad.clone() for grad in given]
    forced(monkeypatch, cuts, 50)
    for run in (net, lambda part: sc.stream(net, part, 10**9)):
        features = x.features.clone().requires_grad_()
        results = [part.features for part in run(x.with_features(features))]
        found.append(torch.autograd.grad(results, [features, *net.parameters()], given))
    for want, got in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("changed", ["a weight", "the scene", "a result"])
def test_what_blocks_are_computed_from_once_more_must_stay(changed, monkeypatch):
    net, x = Beside(), scene(count=60)
    features = x.features.clone().requires_grad_()
    forced(monkeypatch, 0, 30)
    _, y, z = sc.stream(net, x.with_features(features), 10**9)
    with torch.no_grad():
        {"a weight": net.second.weight, "the scene": features, "a result": y.features}[changed].zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        z.features.sum().backward()


def test_gradients_of_gradients_are_refused():
    features = scene(count=30).features.requires_grad_()
    y = sc.stream(NETWORKS["conv"](), scene(count=30).with_features(features), 10**9)
    (grad,) = torch.autograd.grad(y.features.square().sum(), features, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (y.features.sum() + grad.square().sum()).backward()


def test_blocks_are_computed_once_more_in_the_same_autocast(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm(8), nn.Linear(8, 4), nn.SubmanifoldConv(4, 4, 3))
    x, found = scene(count=120), []
    forced(monkeypatch, 0, 50)
    for run in (net, lambda part: sc.stream(net, part, 10**9)):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        found.append([y.features, *torch.autograd.grad(loss(y.features.float()), [*net[2:].parameters()])])
    for want, got in zip(*found):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * want.abs().max().item())


class Moded(nn.SparseModule):
    """A part without gradients, a mean without them, and a part in autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.seen = nn.SubmanifoldConv(4, 4, 3), nn.SubmanifoldConv(4, 4, 3)
        self.pool, self.last = nn.GlobalAvgPool(), nn.Linear(4, 4)

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        with torch.no_grad():
            y = self.frozen(x)
        y = self.seen(y)
        with torch.no_grad():
            means = self.pool(y)
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(y.with_features(y.features + means[y.coords[:, 0].long()]))


@pytest.mark.parametrize("cuts", [0, 2])
def test_modes_that_a_network_sets_on_its_way(cuts, monkeypatch):
    torch.manual_seed(0)
    net, x, found = Moded(), scene(count=120), []
    forced(monkeypatch, cuts, 50)
    for run in (net, lambda part: sc.stream(net, part, 10**9)):
        net.zero_grad()
        y = run(x).features
        loss(y.float()).backward()
        found.append([y.detach(), *(p.grad for p in net.parameters())])
    for want, got in zip(*found):
        assert (got is None) == (want is None)
        if want is not None:
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * want.abs().max().item())
