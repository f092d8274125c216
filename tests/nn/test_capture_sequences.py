"""A captured network and its twin through the same random calls: modes, sizes, waiting gradients, moving weights."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from tests.nn.test_capture_module import (
    CALLS,
    DEVICE,
    KINDS,
    LIMIT,
    WIDE,
    _graphs,
    coords_of,
    features_of,
    make,
    replays,
    same,
    step,
)

__all__ = ["_graphs"]

ACTIONS = ["step", "step", "infer", "forward", "backward", "unseen", "graded", "more", "load", "decay"]


class Pair:
    """A captured network and its twin, which must agree in all that they give."""

    def __init__(self, kind: str) -> None:
        self.call = CALLS[kind]
        self.net = make(kind)
        self.twin = copy.deepcopy(self.net)
        self.waiting: list[list[torch.Tensor]] = []
        nn.capture(self.net)

    @property
    def both(self):
        return self.net, self.twin

    def mode(self, trains: bool) -> None:
        for net in self.both:
            net.train(trains)

    def step(self, seed: int, voxels: int, trains: bool = True) -> None:
        if not self.waiting:  # the weights' gradients are compared
            self.mode(trains)
            same(*(step(net, self.call, seed, voxels) for net in self.both))

    def infer(self, seed: int, voxels: int, trains: bool = False) -> None:
        self.mode(trains)
        with torch.no_grad() if trains else torch.inference_mode():
            same(*(self.call(net, seed, voxels) for net in self.both))

    def forward(self, seed: int, voxels: int) -> None:
        self.mode(True)
        found = [self.call(net, seed, voxels)[0] for net in self.both]
        same(*([t.detach()] for t in found))
        self.waiting.append(found)

    def backward(self, number: int) -> None:
        if self.waiting:
            for net, y in zip(self.both, self.waiting.pop(number % len(self.waiting))):
                net.zero_grad(set_to_none=True)
                y.square().mean().backward()
            same(*([p.grad for p in net.parameters()] for net in self.both))

    def load(self) -> None:
        if not self.waiting:
            self.net.load_state_dict({name: t.clone() for name, t in self.twin.state_dict().items()})

    @torch.no_grad()
    def decay(self) -> None:
        if not self.waiting:
            for net in self.both:
                for p in net.parameters():
                    p.mul_(0.99)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
def test_any_order_of_calls_gives_what_eager_ones_give(seed):
    choose = random.Random(seed)
    pair = Pair(KINDS[seed % len(KINDS)])
    for _ in range(40):
        action, at, voxels = choose.choice(ACTIONS), choose.randrange(50), choose.choice([150, 300, 310])
        if action in ("step", "graded"):
            pair.step(at, voxels, action == "step")
        elif action == "more":
            pair.step(at, choose.choice([400, 700]))
        elif action in ("infer", "unseen"):
            pair.infer(at, voxels, action == "unseen")
        elif action == "forward":
            pair.forward(at, voxels)
        elif action == "backward":
            pair.backward(at)
        else:
            getattr(pair, action)()
    assert replays(pair.net), nn.explain(pair.net)


class Keeping(torch.nn.Module):
    """A network that keeps something of each call, or counts calls."""

    def __init__(self, how):
        super().__init__()
        self.conv = spconv.SubMConv3d(4, 3, 3, padding=1)
        self.how, self.count, self.found, self.rows = how, 0, {}, []

    def forward(self, x):
        y = self.conv(x)
        if self.how == "count":
            self.count += 1
        elif self.how == "found":
            self.found["y"] = y.features
        elif self.how == "rows":
            self.rows.append(len(self.rows))
        elif self.how == "last":
            self.last = y.features
        elif self.how == "same":
            self.shape = [1, 2]
        return y


def through(net, seed):
    coords = coords_of(seed, 200)
    return net(spconv.SparseConvTensor(features_of(seed, coords), coords, [12] * 3, 2)).features


@pytest.mark.parametrize("how", ["count", "found", "rows", "last", "same"])
def test_what_keeps_something_of_a_call_is_named(how):
    """A replay runs no Python: what it kept would be that of the call that was recorded."""
    net = Keeping(how).to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(5):
        for one in (net, twin):
            through(one, seed).sum().backward()
    assert (net.count, net.rows) == (twin.count, twin.rows), "a call that was tried has left a trace"
    assert (f"it changes Keeping.{how}" in nn.explain(net)) == (how != "same"), nn.explain(net)
    assert replays(net) == (3 if how == "same" else 0)


def test_settings_are_seen():
    """As by a schedule of the norms' momentum: graphs kept the one that they were recorded with."""
    net = make("detector")
    twin = copy.deepcopy(net)
    nn.capture(net)
    call = CALLS["detector"]
    for seed in range(6):
        for both in (net, twin):
            for m in both.modules():
                if isinstance(m, torch.nn.BatchNorm1d):
                    m.momentum = 0.5 if seed >= 4 else 0.01
        same(step(net, call, seed), step(twin, call, seed))
    (kind,) = net.__dict__["forward"]._kinds.values()
    assert (kind.captures, kind.replays) == (2, 4), nn.explain(net)


def test_a_hook_of_all_modules_is_called_for_each_part():
    net = nn.capture(make("detector"))
    counts = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: counts.append(1))
    found = []
    for seed in range(4):
        counts.clear()
        step(net, CALLS["detector"], seed)
        found.append(len(counts))
    handle.remove()
    assert len({*found}) == 1, found
    step(net, CALLS["detector"], 4)
    assert replays(net) == 1, nn.explain(net)


class Writing(torch.nn.Module):
    """A network that writes into what it was given or holds."""

    def __init__(self, how):
        super().__init__()
        self.conv = spconv.SubMConv3d(4, 3, 3, padding=1)
        self.how, self.mean, self.means = how, torch.zeros(3, device=DEVICE), {"y": torch.zeros(3, device=DEVICE)}
        self.register_buffer("seen", torch.zeros(3))
        self.before = 0

    def forward(self, x, by):
        if self.how == "features":
            x.features.mul_(0.5)
        elif self.how == "argument":
            by.mul_(1.5)
        y = self.conv(x).features * by
        if self.how in ("attribute", "held", "buffer"):
            kept = {"attribute": self.mean, "held": self.means["y"], "buffer": self.seen}[self.how]
            with torch.no_grad():
                kept.lerp_(y.detach()[0], 0.5)
            y = y + kept
        return y


@pytest.mark.parametrize("how", ["features", "argument", "attribute", "held", "buffer"])
def test_what_a_call_writes_in_place_is_written_as_often_as_eagerly(how):
    """Buffers are the graph's own; the caller's tensors and plain attributes are not, and such a module is named."""
    net = Writing(how).to(DEVICE).eval()
    twin = copy.deepcopy(net)
    nn.capture(net)
    bys = [torch.ones(3, device=DEVICE) for _ in range(2)]
    with torch.no_grad():
        for seed in range(6):
            coords, found = coords_of(seed, 200), []
            for one, by in zip((net, twin), bys, strict=True):
                x = spconv.SparseConvTensor(features_of(seed, coords), coords, [12] * 3, 2)
                found.append([one(x, by), x.features, by, one.mean, one.means["y"], one.seen])
            same(*found)
    said = nn.explain(net)
    names = {"attribute": "Writing.mean", "held": "Writing.means"}
    assert how == "buffer" or f"it changes {names.get(how, 'an argument in place')}" in said, said
    assert replays(net) == (4 if how == "buffer" else 0), said


def test_what_comes_before_the_scene_is_counted_once():
    """Calls that are tried for a capture go through it, too."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.count = spconv.SubMConv3d(4, 3, 3, padding=1), 0

        def forward(self, features, coords):
            self.count += 1
            return self.conv(spconv.SparseConvTensor(features, coords, [12] * 3, 2)).features

    net = Counting().to(DEVICE).eval()
    nn.capture(net)
    with torch.no_grad():
        for seed in range(6):
            coords = coords_of(seed, 200)
            net(features_of(seed, coords), coords)
            assert net.count == seed + 1
    assert replays(net) == 4, nn.explain(net)


class Block(torch.nn.Module):
    """Two layers and a norm, checkpointed within the network where that is asked for."""

    def __init__(self, within):
        super().__init__()
        self.conv, self.norm = spconv.SubMConv3d(4, 8, 3, padding=1), torch.nn.BatchNorm1d(8, momentum=0.5)
        self.out, self.within = torch.nn.Linear(8, 3), within

    def forward(self, x):
        y = self.conv(x)
        return checkpoint(self._head, y.features, use_reentrant=False) if self.within else self._head(y.features)

    def _head(self, features):
        return self.out(torch.relu(self.norm(features)))


@pytest.mark.parametrize("how", ["whole", "with more", "reentrant", "within", "offloaded"])
def test_activation_checkpointing_is_as_without_graphs(how):
    """The call is made again in the backward pass, where a replay would keep other tensors."""
    torch.manual_seed(0)
    net = Block(how == "within").to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)

    def called(one, features, coords):
        def run(features):
            y = one(spconv.SparseConvTensor(features, coords, [12] * 3, 2))
            return torch.sigmoid(y) if how == "with more" else y

        if how in ("within", "offloaded"):
            with torch.autograd.graph.save_on_cpu() if how == "offloaded" else nullcontext():
                return run(features)
        return checkpoint(run, features, use_reentrant=how == "reentrant")

    for seed in range(6):
        coords, found = coords_of(seed, 200), []
        for one in (net, twin):
            one.zero_grad(set_to_none=True)
            features = features_of(seed, coords).requires_grad_()
            y = called(one, features, coords)
            y.square().mean().backward()
            found.append([y.detach(), features.grad, *(p.grad for p in one.parameters()), *one.buffers()])
        same(*found)
    said = nn.explain(net)
    if how in ("whole", "with more", "offloaded"):
        assert "eager calls: within torch.utils.checkpoint" in said, said
        assert replays(net) == 0, said


class Smooth(torch.nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.conv = spconv.SubMConv3d(4, 8, 3, padding=1, bias=False)  # which the norm would take away
        self.norm = torch.nn.BatchNorm1d(8, momentum=0.5)
        self.out, self.drop = torch.nn.Linear(8, 3), torch.nn.Dropout(drop)

    def forward(self, features, coords):
        y = self.conv(spconv.SparseConvTensor(features, coords, [12] * 3, 2)).features
        return self.drop(self.out(torch.nn.functional.softplus(self.norm(y))))


class Wrapped(Smooth):
    """The same, given the sparse tensor."""

    def forward(self, x):
        return self.out(torch.nn.functional.softplus(self.norm(self.conv(x).features)))


def called(net, features, coords):
    return net(features, coords) if type(net) is Smooth else net(spconv.SparseConvTensor(features, coords, [12] * 3, 2))


def penalised(net, features, coords):
    """A gradient penalty, as of a critic."""
    (slope,) = torch.autograd.grad(called(net, features, coords).square().sum(), features, create_graph=True)
    ((slope.norm() - 1) ** 2).backward()


def of_weights(net, features, coords):
    slopes = torch.autograd.grad(
        called(net, features, coords).square().sum(), list(net.parameters()), create_graph=True
    )
    sum(slope.square().sum() for slope in slopes).backward()


def twice(net, features, coords):
    y = called(net, features, coords)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()


@pytest.mark.parametrize("make", [Smooth, Wrapped])
@pytest.mark.parametrize("way", [penalised, of_weights, twice])
def test_gradients_of_gradients_and_second_backward_passes(way, make):
    """They worked in the first, eager calls and were errors of torch's from the third call on."""
    torch.manual_seed(0)
    net = make().to(DEVICE, WIDE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(5):
        coords, found = coords_of(seed, 200), []
        for one in (net, twin):
            one.zero_grad(set_to_none=True)
            features = (features_of(seed, coords).to(WIDE) * 2).detach().requires_grad_()  # not a leaf of the scene
            way(one, features * 1.5, coords) if way is not penalised else way(one, features, coords)
            found.append([features.grad, *(p.grad for p in one.parameters()), *one.buffers()])
        same(*found, LIMIT)
    said = nn.explain(net)
    assert ("asked for more than once" if way is twice else "its gradients are differentiated") in said, said
    assert "2 eager calls: its gradient" in said, said


def test_a_second_gradient_of_random_numbers_is_an_error_with_a_remedy():
    net = nn.capture(Smooth(0.5).to(DEVICE))
    for seed in range(3):
        coords = coords_of(seed, 200)
        features = features_of(seed, coords).requires_grad_()
        y = net(features, coords)
        if seed < 2:
            y.sum().backward()
    with pytest.raises(RuntimeError, match=r"draws random numbers: call .* or nn.release"):
        torch.autograd.grad(y.square().sum(), features, create_graph=True)
