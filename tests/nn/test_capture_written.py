"""What captured calls write to: arguments, and objects that they share with the module; large objects."""

from __future__ import annotations

import copy
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.nn.capturing.values.containers import is_record
from sparseconv.nn.capturing.values.given import Given
from sparseconv.nn.capturing.values.snapshots import copied, is_another, is_same, restored, snapshot
from sparseconv.nn.capturing.values.telling import MOST_HELD
from tests.nn.test_capture_module import DEVICE, LIMIT, WIDE, coords_of, replays
from tests.nn.test_capture_module import _graphs as _graphs  # the stand-in for a card's graphs


class Held:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Noting:
    """Attributes whose names are noted, as samples of detectors do."""

    def __init__(self, **attributes):
        object.__setattr__(self, "names", set())
        for name, value in attributes.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        self.names.add(name)
        object.__setattr__(self, name, value)


class Net(torch.nn.Module):
    """A layer within a call that makes its scene; ``ahead`` and ``after`` are done before it and behind it."""

    def __init__(self, ahead=None, after=None, **attributes):
        super().__init__()
        self.conv = spconv.SubMConv3d(4, 4, 3, indice_key="near")
        self.ahead, self.after = ahead, after
        vars(self).update(attributes)

    def forward(self, given):
        if self.ahead is not None:
            self.ahead(self, given)
        out = self.conv(spconv.SparseConvTensor(given.features, given.coords, [16] * 3, 2)).features
        return out if self.after is None else self.after(self, given, out)


class Bare(Net):
    """What it is given is read before the scene alone."""

    def forward(self, given):
        return self.conv(spconv.SparseConvTensor(given.features, given.coords, [16] * 3, 2)).features


class Dropping(Net):
    def forward(self, given):
        features = torch.nn.functional.dropout(given.features, 0.5)
        return super().forward(Held(features=features, coords=given.coords))


def compared(net, give, look=lambda net, given: None, voxels=(300,) * 8):
    """Calls of a captured network and its twin; how often the first was replayed."""
    net = net.to(DEVICE, WIDE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed, number in enumerate(voxels):
        coords, found = coords_of(seed, number), []
        features = torch.randn(len(coords), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for one in (net, twin):
            torch.manual_seed(seed)
            given = give(coords=coords.clone(), features=features.clone().to(DEVICE, WIDE))
            with torch.no_grad():
                found.append((one(given), look(one, given)))
        (got, seen), (want, wanted) = found
        assert torch.allclose(got, want, rtol=LIMIT, atol=LIMIT)
        assert seen == wanted
    return replays(net)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_argument_written_to_before_the_scene_is_written_to_once(mode):
    """Each run that was tried wrote to it again: features that are doubled in place were 64 times as large."""
    net = Net(lambda net, given: given.features.mul_(2)).eval()
    with mode():  # tensors that are made in inference have no version
        assert compared(net, Held, lambda net, given: given.features.abs().sum().item()) == 0
    assert "it changes an argument in place, 0.features" in nn.explain(net)


def test_an_array_among_the_arguments_is_written_to_once():
    net = Net(lambda net, given: np.add(given.count, 1, out=given.count))
    assert compared(net, lambda **of: Held(count=np.zeros(1), **of), lambda net, given: given.count[0]) == 0


def test_what_is_noted_of_the_scene_in_an_argument_is_of_this_call():
    net = Net(lambda net, given: setattr(given, "is_large", len(given.coords) > 200))
    assert compared(net, Held, lambda net, given: given.is_large, (300, 300, 300, 300, 100, 100, 100, 300)) > 0


def test_a_set_among_the_arguments():
    def after(net, given, out):
        given.found = out
        return out

    net = Net(after=after)
    assert compared(net, Noting, lambda net, given: sorted(given.names)) == 0
    assert "it changes a set that it is given" in nn.explain(net)


@pytest.mark.parametrize(
    ("held", "write"),
    [
        (set, lambda held: held.add(len(held))),
        (deque, lambda held: held.append(1)),
        (bytearray, lambda held: held.append(1)),
        (lambda: np.zeros(1), lambda held: np.add(held, 1, out=held)),
        (lambda: ({"calls": [0]},), lambda held: held[0]["calls"].append(1)),
    ],
)
def test_what_a_module_writes_to_in_place_is_seen(held, write):
    def after(net, given, out):
        write(net.held)
        return out

    net = Net(after=after, held=held())
    assert compared(net, Held, lambda net, given: repr(net.held)) == 0
    assert "it changes Net.held" in nn.explain(net)
    value = held()
    before, was = copied(value), repr(value)
    write(value)
    assert not is_same(value, before)
    assert restored(value, before) is value
    assert repr(value) == was


def test_an_object_that_the_module_holds_stays_itself():
    def ahead(net, given):
        given.manager = net.manager

    def after(net, given, out):
        return out * (2 if given.manager is net.manager else 1)

    assert compared(Net(ahead, after, manager=Held(n=1)), Held, lambda net, given: given.manager is net.manager) == 6
    shared = Net(after=after, manager=Held(n=1))
    others = []

    def give(**of):
        others.append(Held(manager=None, **of))
        return others[-1]

    def given_too(net, given):
        given.manager = net.manager

    shared.register_forward_pre_hook(lambda net, args: given_too(net, *args))
    assert compared(shared, give, lambda net, given: given.manager is net.manager) == 6


class Closed:
    closed = 0

    def __del__(self):
        Closed.closed += 1


def test_objects_that_are_ended_are_not_copied():
    assert not is_record(Closed())
    assert is_record(SimpleNamespace(one=1))
    assert not is_record(type("Data", (torch.utils.data.Dataset,), {"__module__": "mine"})())
    kept = Closed()
    Closed.closed = 0
    assert compared(Net(), lambda **of: Held(kept=kept, **of)) == 6
    assert Closed.closed == 0


def test_large_and_deep_objects_are_told_by_who_they_are():
    deep = None
    for _ in range(3000):
        deep = Held(next=deep)
    large = Held(items=[Held(n=n) for n in range(10 * MOST_HELD)])
    assert len(Given((Held(large=large),), {}).leaves) < 2 * MOST_HELD
    assert not is_another(deep, snapshot(deep))
    assert is_same(deep, copied(deep))
    assert compared(Bare(), lambda **of: Held(deep=deep, large=large, **of)) == 6


def test_random_numbers_before_the_scene_are_drawn_once():
    """A scene that did not fit was given other random numbers than the plain call gives it."""

    assert compared(Dropping(), Held, voxels=(300, 280, 310, 700, 100, 2000, 300)) > 0
