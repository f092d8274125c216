"""Captured calls that use objects with slots or copy methods of their own, functions, iterators and random generators.

The stand-in runs Python again at a replay. Here it reads what Python held at the capture, and writes nothing.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import UserDict
from enum import Enum
from fractions import Fraction

import numpy as np
import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.nn.capturing import module as capturing
from tests.nn.test_capture_module import DEVICE, LIMIT, WIDE, RunAgain, coords_of, replays
from tests.nn.test_capture_module import _graphs as _graphs  # the stand-in for a card's graphs

#: what is read in each call: a capture that is made before the sixth knows one of them
SCALES = [1.0] * 5 + [2.0] * 2 + [1.0] * 3
VOXELS = [300, 280, 310, 150, 320, 90, 300, 305, 200, 310]


class Slots:
    __slots__ = ("_Slots__unset", "scale")

    def __init__(self, scale):
        self.scale = scale


class OwnCopy:
    def __init__(self, scale):
        self.scale = scale

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return type(self)(self.scale)


class OwnReduce(OwnCopy):
    def __reduce__(self):
        return type(self), (self.scale,)


class Equal(Slots):
    """Equal to all of its kind."""

    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return 1


class Size(Enum):
    SMALL = 1.0
    LARGE = 2.0


class Net(torch.nn.Module):
    """A layer, and what is done behind it; it makes its scene, or is given it."""

    def __init__(self, after, makes, **held):
        super().__init__()
        self.conv, self.after, self.makes = spconv.SubMConv3d(4, 4, 3, indice_key="near"), after, makes
        vars(self).update(held)

    def forward(self, x, *more):
        y = self.conv(spconv.SparseConvTensor(*x, [16] * 3, 2) if self.makes else x)
        return self.after(self, y.features, *more)


def beside_a_twin(monkeypatch, make, before=lambda net, scale: (), held=lambda net: None, put=lambda net, was: None):
    """The captured network, after calls that gave what its eager twin gave.

    Args:
        make: makes a network.
        before: what is done before a call; gives further arguments.
        held: what Python holds that calls read or write, to be compared with the twin's.
        put: makes it what it was.
    """
    net, twin = (make().to(DEVICE, WIDE) for _ in range(2))
    twin.load_state_dict(net.state_dict())

    class Graph(RunAgain):
        def _capture(self):
            self.python = held(net)
            super()._capture()

        def _replay_forward(self):
            now = held(net)
            put(net, self.python)
            self._module = net
            super()._replay_forward()
            put(net, now)

    if DEVICE == "cpu":
        monkeypatch.setattr(capturing, "RECORDING", Graph)
    nn.capture(net)
    for seed, (voxels, scale) in enumerate(zip(VOXELS, SCALES)):
        coords = coords_of(seed, voxels)
        features = torch.randn(len(coords), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        results = []
        for one in (net, twin):
            x = features.to(DEVICE, WIDE), coords
            more = before(one, scale)
            with torch.no_grad():
                results.append(one(x if one.makes else spconv.SparseConvTensor(*x, [16] * 3, 2), *more))
        assert torch.allclose(*results, rtol=LIMIT, atol=LIMIT)
        assert held(net) == held(twin)
    return net


@pytest.fixture(params=[True, False], ids=["makes its scene", "is given it"])
def makes(request):
    return request.param


def scale_of(net):
    return net.held.scale


def put_scale(net, was):
    net.held.scale = was


@pytest.mark.parametrize("kind", [Slots, OwnCopy, OwnReduce, Equal])
def test_an_object_that_is_held(monkeypatch, kind, makes):
    net = beside_a_twin(
        monkeypatch,
        lambda: Net(lambda net, y: y * net.held.scale, makes, held=kind(1.0)),
        lambda net, scale: put_scale(net, scale) or (),
        scale_of,
        put_scale,
    )
    assert replays(net) == 8, nn.explain(net)


@pytest.mark.parametrize("kind", [Slots, OwnCopy, OwnReduce, Equal])
def test_an_object_that_counts(monkeypatch, kind, makes):
    def after(net, y):
        net.held.scale += 1
        return y * net.held.scale

    net = beside_a_twin(monkeypatch, lambda: Net(after, makes, held=kind(1.0)), held=scale_of, put=put_scale)
    assert "it changes Net.held" in nn.explain(net)


@pytest.mark.parametrize("kind", [Slots, OwnCopy, OwnReduce, Equal, lambda scale: UserDict(scale=scale)])
@pytest.mark.parametrize("is_new", [True, False])
def test_an_object_that_is_given(monkeypatch, kind, is_new, makes):
    """Before, one that was changed between calls was read as it was in the capture."""
    given = {}

    def before(net, scale):
        found = given[net] = kind(scale) if is_new or net not in given else given[net]
        found.scale = scale
        return (found,)

    def held(net):
        return getattr(given.get(net), "scale", None)

    def put(net, was):
        given[net].scale = was

    net = beside_a_twin(monkeypatch, lambda: Net(lambda net, y, one: y * one.scale, makes), before, held, put)
    assert replays(net) == 6, nn.explain(net)


@pytest.mark.parametrize("kind", [Slots, OwnCopy, OwnReduce, Equal])
def test_a_tensor_in_an_object_that_is_no_record(monkeypatch, kind, makes):
    def before(net, scale):
        return (kind(torch.full((4,), scale, dtype=WIDE, device=DEVICE)),)

    net = beside_a_twin(monkeypatch, lambda: Net(lambda net, y, one: y * one.scale, makes), before)
    assert replays(net) == 0, nn.explain(net)


@pytest.mark.parametrize("kind", [Size, Fraction, lambda scale: range(int(scale)), lambda scale: lambda: scale])
def test_a_value_that_is_given(monkeypatch, kind, makes):
    def after(net, y, one):
        return y * (
            len(one) if isinstance(one, range) else one() if callable(one) else float(getattr(one, "value", one))
        )

    net = beside_a_twin(monkeypatch, lambda: Net(after, makes), lambda net, scale: (kind(scale),))
    assert replays(net) == 6, nn.explain(net)


def test_a_variable_of_a_closure(monkeypatch, makes):
    def make(counts):
        n = 1.0

        def after(net, y):
            nonlocal n
            n += counts
            return y * n

        return Net(after, makes)

    def cell(net):
        return next(c for c in net.after.__closure__ if isinstance(c.cell_contents, float))

    def held(net):
        return cell(net).cell_contents

    def put(net, was):
        cell(net).cell_contents = was

    net = beside_a_twin(monkeypatch, lambda: make(1), held=held, put=put)
    assert "it changes Net.after" in nn.explain(net)
    net = beside_a_twin(monkeypatch, lambda: make(0), lambda net, scale: put(net, scale) or (), held, put)
    assert replays(net) == 8, nn.explain(net)


def test_what_functions_are_bound_to(monkeypatch, makes):
    def bound():
        return functools.partial(lambda one, y: y * one.scale, Slots(1.0))

    def put(net, was):
        net.held.args[0].scale = was

    net = beside_a_twin(
        monkeypatch,
        lambda: Net(lambda net, y: net.held(y), makes, held=bound()),
        lambda net, scale: put(net, scale) or (),
        lambda net: net.held.args[0].scale,
        put,
    )
    assert replays(net) == 8, nn.explain(net)


MOVING = {
    "count": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next),
    "generator": (lambda: (n for n in range(100)), next),
    "random": (lambda: random.Random(0), lambda one: one.random()),
    "numpy": (lambda: np.random.default_rng(0), lambda one: float(one.random())),
    "numpy's old": (lambda: np.random.RandomState(0), lambda one: float(one.rand())),
    "torch": (lambda: torch.Generator().manual_seed(0), lambda one: float(torch.rand(1, generator=one))),
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("within", [lambda one: one, lambda one: [one], OwnCopy])
def test_what_moves_when_it_is_asked_is_named(monkeypatch, name, within, makes):
    """Calls that were tried moved it, and replays did not."""
    make, ask = MOVING[name]

    def after(net, y):
        one = net.held
        return y * ask(one[0] if isinstance(one, list) else getattr(one, "scale", one))

    net = beside_a_twin(monkeypatch, lambda: Net(after, makes, held=within(make())))
    assert f"Net.held holds a {type(make()).__name__}" in nn.explain(net)


@pytest.mark.parametrize("name", MOVING)
def test_what_moves_and_is_given(monkeypatch, name, makes):
    make, ask = MOVING[name]
    given = {}

    def before(net, scale):
        return (given.setdefault(net, make()),)

    net = beside_a_twin(monkeypatch, lambda: Net(lambda net, y, one: y * ask(one), makes), before)
    assert replays(net) == 0, nn.explain(net)
