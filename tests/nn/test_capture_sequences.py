"""A captured network and its twin through the same random calls: modes, sizes, waiting gradients, moving weights."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from tests.nn.test_capture_module import (
    CALLS,
    DEVICE,
    KINDS,
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
    net = nn.capture(Keeping(how).to(DEVICE))
    for seed in range(5):
        through(net, seed).sum().backward()
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
