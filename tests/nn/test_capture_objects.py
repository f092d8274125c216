"""Objects of clients' own classes in captured calls: around sparse tensors, as options, and held by modules."""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.nn.capturing.values.containers import is_record, items_of, rebuilt
from sparseconv.nn.capturing.values.snapshots import copied, is_another, is_same, restored, snapshot
from sparseconv.nn.capturing.values.telling import told
from tests.nn.test_capture_module import DEVICE, LIMIT, WIDE, coords_of, forward_of, replays
from tests.nn.test_capture_module import _graphs as _graphs  # the stand-in for a card's graphs

SHAPE = [16, 16, 16]


class Wrapped:
    """A sparse tensor with the rows of each item and a cache, as networks of 3-D generation hold them."""

    def __init__(self, data, layout=None, cache=None, scale=1.0):
        self.data, self.scale = data, scale
        self._layout = layout
        self._cache = {} if cache is None else cache

    @property
    def feats(self):
        return self.data.features

    def replace(self, feats):
        return Wrapped(self.data.replace_feature(feats), self._layout, self._cache, self.scale)


@dataclass
class Pair:
    first: Any
    second: Any
    told: dict[str, Any] = field(default_factory=dict)


class Block(torch.nn.Module):
    """A residual block whose layers take and return the client's class."""

    def __init__(self, by_item=False):
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.near = spconv.SubMConv3d(4, 4, 3, indice_key="near")
        self.also = spconv.SubMConv3d(4, 4, 3, indice_key="near")
        self.skip = torch.nn.Linear(4, 4)
        self.by_item = by_item

    def forward(self, x):
        h = x.replace(self.norm(x.feats))
        h = Wrapped(self.near(h.data), x._layout, x._cache, x.scale)
        h = h.replace(torch.nn.functional.silu(h.feats) * h.scale)
        if self.by_item:
            rows = [h.feats[part] - h.feats[part].mean(0) for part in h._layout]
            h = h.replace(
                h.feats.index_copy(0, torch.arange(h._layout[-1].stop, device=h.feats.device), torch.cat(rows))
            )
        h = Wrapped(self.also(h.data), x._layout, x._cache, x.scale)
        return h.replace(h.feats + self.skip(x.feats))


class Blocks(torch.nn.Module):
    def __init__(self, by_item=False):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(by_item), Block(by_item)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x._cache["blocks"] = len(self.blocks)
        return x


class Several(Blocks):
    def forward(self, x):
        fine = super().forward(x)
        pair = Pair(fine, fine.feats.mean(1), fine._cache)
        return {"pair": pair, "again": pair, "given": x}


def wrapped(seed, voxels, layout=True, scale=1.0):
    coords = coords_of(seed, voxels)
    coords = coords[coords[:, 0].argsort(stable=True)]
    gen = torch.Generator().manual_seed(seed)
    features = torch.randn(len(coords), 4, generator=gen, dtype=torch.float64).to(DEVICE, WIDE).requires_grad_()
    first = int((coords[:, 0] == 0).sum())
    parts = [slice(0, first), slice(first, len(coords))] if layout else None
    return Wrapped(spconv.SparseConvTensor(features, coords, SHAPE, 2), parts, scale=scale)


def step(net, seed, voxels, **how):
    x = wrapped(seed, voxels, **how)
    features = x.feats
    net.zero_grad(set_to_none=True)
    out = net(x)
    y = out["pair"].first if isinstance(out, dict) else out
    assert type(y) is Wrapped
    assert y._layout is x._layout
    assert y._cache is x._cache
    assert x._cache == {"blocks": 2}
    assert y.scale == x.scale
    found = [y.feats.detach(), y.data.indices]
    if isinstance(out, dict):
        assert out["again"] is out["pair"]
        assert out["given"] is x
        assert out["pair"].told is x._cache
        found.append(out["pair"].second.detach())
    y.feats.square().mean().backward()
    return [*found, features.grad, *(p.grad for p in net.parameters())]


def close(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize("kind", [Blocks, Several])
def test_a_network_of_a_clients_own_tensors_is_captured_whole(kind):
    torch.manual_seed(0)
    net = kind().to(DEVICE, WIDE)
    twin = copy.deepcopy(net)
    nn.accelerate(net)
    for seed, voxels in enumerate([300, 280, 310, 150, 320, 90, 300, 305, 200, 310]):
        close(step(net, seed, voxels, layout=False), step(twin, seed, voxels, layout=False))
    assert replays(net) == 8, nn.explain(net)


def test_what_an_object_holds_tells_calls_apart():
    torch.manual_seed(0)
    net = Blocks().to(DEVICE, WIDE)
    twin = copy.deepcopy(net)
    nn.accelerate(net)
    for seed, scale in enumerate([1.0] * 4 + [2.0] * 4 + [1.0, 2.0]):
        close(*(step(one, seed, 300, layout=False, scale=scale) for one in (net, twin)))
    assert replays(net) == 6, nn.explain(net)


def test_rows_of_items_are_numbers_that_a_graph_keeps():
    torch.manual_seed(0)
    net = Blocks(by_item=True).to(DEVICE, WIDE)
    twin = copy.deepcopy(net)
    nn.accelerate(net)
    for seed in [0, 0, 0, 0, 0, *range(1, 20)]:  # the steps of a sampler have the same voxels
        close(*(step(one, seed, 250 + seed) for one in (net, twin)))
    said = nn.explain(net)
    assert "its arguments 0._layout." in said
    assert ".stop" in said


class Scaled(torch.nn.Module):
    """Layers within a call that makes its scene; what it multiplies by comes with an object."""

    def __init__(self, options=None):
        super().__init__()
        self.first = spconv.SubMConv3d(4, 8, 3, indice_key="near")
        self.second = spconv.SubMConv3d(8, 4, 3, indice_key="near")
        self.options = options

    def forward(self, given):
        y = self.second(self.first(spconv.SparseConvTensor(given.features, given.coords, SHAPE, 2)))
        return y.features * (self.options or given).scale


def given(seed, **more):
    x = wrapped(seed, 300)
    return Namespace(features=x.feats.detach(), coords=x.data.indices, **more)


def test_a_number_of_an_argument_that_the_graph_reads():
    net = Scaled().to(DEVICE, WIDE)
    twin = copy.deepcopy(net)
    nn.accelerate(net)
    with torch.no_grad():
        for seed, scale in enumerate([1.0] * 6 + [2.0] * 4 + [1.0, 3.0, 4.0]):
            close([net(given(seed, scale=scale))], [twin(given(seed, scale=scale))])
    assert replays(net) == 7, nn.explain(net)


class Options(dict):
    """Entries that are read as attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__

    def __deepcopy__(self, memo):
        return Options(self)


@pytest.mark.parametrize("kind", [Options, Namespace, Pair])
def test_options_that_a_module_holds_may_change(kind):
    inner = {"scale": 1.0}
    options = Pair(1, 2) if kind is Pair else kind(**inner)
    options.scale = 1.0
    net = Scaled(options).to(DEVICE, WIDE)
    nn.accelerate(net)
    with torch.no_grad():
        for seed in range(5):
            net(given(seed))
        assert replays(net) == 3
        assert not forward_of(net).parts.is_changed()
        options.scale = 2.0
        assert forward_of(net).parts.is_changed()
        x = given(7)
        want = copy.deepcopy(net)
        nn.release(want)
        close([net(x)], [want(x)])
    captures = [known.captures for known in forward_of(net)._kinds.values()]
    assert captures == [2]


class Counting(Scaled):
    def forward(self, given):
        found = super().forward(given)
        self.options.calls += 1
        return found


def test_an_object_that_counts_calls_is_named():
    net = Counting(Namespace(scale=1.0, calls=0)).to(DEVICE, WIDE)
    nn.accelerate(net)
    with torch.no_grad():
        for seed in range(6):
            net(given(seed))
    assert net.options.calls == 6
    assert "it changes Counting.options" in nn.explain(net)


class Whole:
    def __init__(self):
        self.itself, self.tensor = self, torch.ones(3)
        self.items, self.options = [1, {"two": self}], Options(three=3)


def test_an_object_may_hold_itself():
    whole = Whole()
    assert told(whole) == told(whole)
    other = Whole()
    assert told(whole) == told(other)
    other.items[0] = 2
    assert told(whole) != told(other)
    seen, kept = snapshot(whole), copied(whole)
    assert not is_another(whole, seen)
    assert is_same(whole, kept)
    whole.options["three"] = 4
    whole.items.append(5)
    whole.tensor.add_(1)
    assert is_another(whole, seen)
    assert not is_same(whole, kept)
    assert restored(whole, kept) is whole
    assert whole.options == {"three": 3}
    assert whole.items == [1, {"two": whole}]
    assert whole.tensor.eq(1).all()


class Slots:
    __slots__ = ("one",)


class OwnCopy:
    def __copy__(self):
        return self


def test_which_objects_are_looked_into():
    assert all(map(is_record, (Whole(), Wrapped(None), Pair(1, 2), Namespace(a=1))))
    others = (
        torch.nn.ReLU(),
        torch.ones(2),
        len,
        Slots(),
        OwnCopy(),
        torch.Generator(),
        object(),
        {},
        Pair,
        Exception(),
    )
    assert not any(map(is_record, others))
    pair = rebuilt(Pair(1, 2, {}), [3, 4, {}])
    assert pair == Pair(3, 4, {})
    assert rebuilt(slice(1, 2), [item for _, item in items_of(slice(3, 4, 5))]) == slice(3, 4, 5)
