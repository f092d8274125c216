"""What a captured call is given and returns beside scenes: indices that are no set of voxels, arrays, numbers."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.nn.capturing import module as capturing
from sparseconv.nn.capturing.calls import MOST_REFUSED
from tests.nn.test_capture_module import DEVICE, WIDE, Detector, coords_of, features_of, forward_of, replays, same
from tests.nn.test_capture_module import _graphs as _graphs  # the stand-in for a card's graphs


class Stacked(Detector):
    """Voxels of two levels one behind the other, some of them twice, as VoxelNeXt makes them."""

    def forward(self, features, coords):
        fine = self.first(spconv.SparseConvTensor(features, coords, self.shape, 2))
        coarse = self.block(self.down(fine))
        coarse.indices[:, 1:] *= 2
        fine = fine.replace_feature(torch.cat([fine.features, coarse.features[:, :8]]))
        fine.indices = torch.cat([fine.indices, coarse.indices])
        rows, which = torch.unique(fine.indices[:, :3], dim=0, return_inverse=True)
        flat = fine.features.new_zeros(len(rows), 8).index_add_(0, which, fine.features)
        return {"flat": spconv.SparseConvTensor(flat, rows, self.shape[:2], 2), "stacked": fine}


def test_a_result_that_is_no_set_of_voxels_is_named_and_parts_are_captured_instead():
    torch.manual_seed(0)
    net = Stacked().to(DEVICE)
    twin = copy.deepcopy(net)
    nn.accelerate(net)
    for seed in range(7):
        found = []
        for one in (net, twin):
            coords = coords_of(seed, 300)
            one.zero_grad(set_to_none=True)
            out = one(features_of(seed, coords), coords)
            out["flat"].features.square().mean().backward()
            grads = [p.grad for p in one.parameters()]
            found.append([out["flat"].features.detach(), out["flat"].indices, out["stacked"].indices, *grads])
        same(*found)
    said = nn.explain(net)
    assert "it returns a sparse tensor whose indices are no set of voxels: rows" in said
    assert sum(replays(part) for part in (net.first, net.down, net.block)) >= 6, said


class Scaled(torch.nn.Module):
    """Two layers, and a factor that is no tensor."""

    def __init__(self):
        super().__init__()
        self.conv = spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3, padding=1), torch.nn.ReLU())
        self.out = spconv.SubMConv3d(8, 8, 3, padding=1)

    def forward(self, x, by):
        y = self.out(self.conv(x))
        return y.replace_feature(y.features * float(np.sum(list(by)) if isinstance(by, set) else np.sum(by)))


def scaled(net, seed, by):
    coords = coords_of(seed, 150)
    return net(spconv.SparseConvTensor(features_of(seed, coords), coords, [12] * 3, 2), by).features


@pytest.mark.parametrize("kind", [np.array, set, list], ids=["array", "set", "list"])
def test_an_argument_that_is_changed_in_place_is_seen(kind):
    torch.manual_seed(0)
    net = Scaled().to(DEVICE).eval()
    twin = copy.deepcopy(net)
    nn.capture(net)
    by = kind([2.0])
    with torch.no_grad():
        for seed in range(5):
            same([scaled(net, seed, by)], [scaled(twin, seed, by)])
        if kind is set:
            by.add(3.0)
        else:
            by[0] = 5.0
        for seed in range(5):
            same([scaled(net, seed, by)], [scaled(twin, seed, by)])
    assert (replays(net) > 0) == (kind is not set), nn.explain(net)


def test_arrays_of_the_same_values_are_one_argument():
    net = nn.capture(Scaled().to(DEVICE).eval())
    with torch.no_grad():
        for seed in range(6):
            scaled(net, seed, np.array([1.0, 2.0]))
    assert replays(net) == 4, nn.explain(net)


def test_arguments_that_are_others_in_every_call_leave_the_parts_captured():
    torch.manual_seed(0)
    net = Scaled().to(DEVICE).eval()
    twin = copy.deepcopy(net)
    nn.accelerate(net)
    with torch.no_grad():
        for seed in range(capturing.MOST_KINDS + 5):
            same([scaled(net, seed, 1.0 + seed)], [scaled(twin, seed, 1.0 + seed)])
    assert len(forward_of(net)._kinds) == capturing.MOST_KINDS
    assert "others in every call" in nn.explain(net)
    assert replays(net.conv) >= 2, nn.explain(net)
    assert "forward" not in vars(net.out), "a layer alone stays as it is"


class Seen(float):
    """A factor that counts how often calls are told apart by it."""

    looks = 0

    def __hash__(self):
        type(self).looks += 1
        return super().__hash__()


class WaitsInTraining(Scaled):
    def forward(self, x, by):
        y = super().forward(x, by)
        return y if not self.training or y.features.sum().item() > -1e9 else x


def test_a_mode_that_is_refused_again_and_again_is_left_and_the_other_is_captured():
    torch.manual_seed(0)
    net = nn.capture(WaitsInTraining().to(DEVICE))
    twin = copy.deepcopy(nn.release(copy.deepcopy(net)))
    by = Seen(2.0)
    calls = capturing.EXAMPLES + 1 + MOST_REFUSED
    for seed in range(calls + 5):
        Seen.looks = 0
        same([scaled(net, seed, by).detach()], [scaled(twin, seed, by).detach()])
        assert (Seen.looks > 0) == (seed < calls)
    assert f"{MOST_REFUSED + 6} eager calls: _local_scalar_dense waits" in nn.explain(net), nn.explain(net)
    net.eval(), twin.eval()
    with torch.no_grad():
        for seed in range(4):
            same([scaled(net, seed, by)], [scaled(twin, seed, by)])
    assert replays(net) == 2, nn.explain(net)


class Any(torch.nn.Module):
    """A layer, and what a function makes of its features and of further arguments."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.out, self.function = spconv.SubMConv3d(4, 8, 3, padding=1), torch.nn.Linear(8, 3), function

    def forward(self, x, *further):
        return self.function(self, self.conv(x).features, *further)


def pair(function):
    torch.manual_seed(0)
    net = Any(function).to(DEVICE, WIDE)
    twin = copy.deepcopy(net)
    return nn.capture(net), twin


def scene(seed, voxels=150):
    coords = coords_of(seed, voxels)
    return spconv.SparseConvTensor(features_of(seed, coords).to(WIDE), coords, [12] * 3, 2)


def test_an_argument_that_wants_a_gradient_only_later_gets_it():
    """As the output of an encoder that was frozen at first: its gradient was lost."""
    net, twin = pair(lambda m, y, by: y * by)
    for seed in range(6):
        found = []
        for one in (net, twin):
            by = torch.ones(8, device=DEVICE, dtype=torch.float64, requires_grad=seed >= 3)
            one(scene(seed), by).square().sum().backward()
            found.append([by.grad])
        same(*found)
    assert replays(net) == 1, nn.explain(net)


ARGUMENTS = {
    "numbers": [(True,), (1,), (1.0,)],
    "containers": [(), ([],), ({},), ((),)],
    "aliases": [(torch.ones(8, device=DEVICE), torch.ones(8, device=DEVICE)), (torch.ones(8, device=DEVICE),) * 2],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_compare_as_equal_are_told_apart(name):
    def told(_, y, *further):
        said = " ".join(repr(f) for f in further if not isinstance(f, torch.Tensor))
        return y, said, len(further) == 2 and further[0] is further[1]

    net, twin = pair(told)
    for further in ARGUMENTS[name]:
        with torch.no_grad():
            for seed in range(4):
                (y, *rest), (z, *wanted) = net(scene(seed), *further), twin(scene(seed), *further)
                same([y], [z])
                assert rest == wanted
    assert replays(net) == (2 if name == "aliases" else 2 * len(ARGUMENTS[name])), nn.explain(net)


def test_a_list_that_a_call_appends_to_is_named():
    """A replay appended nothing."""
    net, twin = pair(lambda _, y, kept: kept.append(y) or y)
    for seed in range(5):
        kept = [], []
        with torch.no_grad():
            for one, its in zip((net, twin), kept, strict=True):
                one(scene(seed), its)
        same(*kept)
    assert "it changes a list that it is given" in nn.explain(net)


class Frozen(torch.nn.Module):
    """Its scene is made, and its first layer called, in modes of its own."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.out, self.how = spconv.SubMConv3d(4, 8, 3, padding=1), torch.nn.Linear(8, 3), how

    def forward(self, coords, features):
        with torch.no_grad() if self.how == "grad" else torch.autocast(DEVICE, enabled=False):
            y = self.conv(spconv.SparseConvTensor(features, coords, [12] * 3, 2))
        return self.out(y.features)


@pytest.mark.parametrize("how", ["grad", "autocast"])
def test_the_modes_around_a_call_tell_it_from_others(how):
    """Graphs of calls without gradients, or of half precision, were replayed for calls of another kind."""
    torch.manual_seed(0)
    net = Frozen(how).to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(12):
        is_on, coords = seed // 4 % 2 == 1, coords_of(seed, 150)
        features = features_of(seed, coords)
        with torch.set_grad_enabled(is_on) if how == "grad" else torch.autocast(DEVICE, torch.bfloat16, enabled=is_on):
            found = [one(coords, features) for one in (net, twin)]
        assert {y.requires_grad for y in found} == {is_on or how != "grad"}
        assert len({y.dtype for y in found}) == 1
        same(*([y.detach()] for y in found))
        del found
    assert replays(net) >= 4, nn.explain(net)


def test_an_accelerated_model_is_copied_and_pickled():
    net = nn.accelerate(torch.nn.ModuleDict({"backbone": Detector()})).to(DEVICE)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert forward_of(other["backbone"]).module is other["backbone"]


def assigned(m, y):
    m.seen = 0.5 * m.seen + y.detach()[0]
    return y + m.seen


def drawn():
    return np.random.rand()  # noqa: NPY002 (as clients draw)


NAMED = {
    "it changes Any.seen": assigned,
    "it draws random numbers of Python or NumPy": lambda m, y: y * (random.random() + drawn()),
    "a tensor that is no parameter of it": lambda m, y: y * m.loose[0],
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("why", NAMED)
def test_what_a_replay_would_leave_out_is_named(why, frozen):
    """A buffer that is assigned anew, Python's random numbers, and gradients of tensors that modules do not show."""
    net, twin = pair(NAMED[why])
    for one in (net, twin):
        one.register_buffer("seen", torch.zeros(8, device=DEVICE, dtype=torch.float64))
        one.loose = [torch.ones(8, device=DEVICE, dtype=torch.float64, requires_grad=True)]
        one.requires_grad_(not frozen)
    for seed in range(5):
        found, following = [], []
        for one in (net, twin):
            random.seed(seed), np.random.seed(seed)  # noqa: NPY002
            y = one(scene(seed))
            if y.requires_grad:
                y.square().sum().backward()
            found.append([y.detach(), one.seen, one.loose[0].grad])
            following.append((random.random(), drawn()))
        same(*found)
        assert following[0] == following[1], "a call that was tried has drawn"
    assert f"eager: {why}" in nn.explain(net), nn.explain(net)


def test_parameters_of_results_that_get_no_gradient_have_none():
    """As of heads that are trained in turn: zeros would let an optimizer decay the weights of the others."""
    net, twin = pair(lambda m, y: (m.out(y), y.sum(1)))
    for seed in range(8):
        found = []
        for one in (net, twin):
            one.zero_grad(set_to_none=True)
            ends = [y.square().sum() for y in one(scene(seed))]
            (sum(ends) if seed < 4 else ends[seed % 2]).backward()
            found.append([p.grad for p in one.parameters()])
        same(*found)
    assert replays(net) == 6, nn.explain(net)


CHANGES = {
    "tuple": lambda m: setattr(m, "pair", (3.0, 2.0)),
    "list": lambda m: m.held["list"].__setitem__(0, 3.0),
    "tensor": lambda m: setattr(m, "by", m.by * 3),
    "function": lambda m: setattr(m, "function", lambda m, y: y + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_that_are_no_numbers_are_settings_too(name):
    """A card's graph kept what they were; the stand-in reads them anew."""
    net, twin = pair(lambda m, y: y * m.pair[0] * m.held["list"][0] * m.by)
    for one in (net, twin):
        one.pair, one.held, one.by = (1.0, 2.0), {"list": [1.0]}, torch.ones((), device=DEVICE, dtype=torch.float64)
    for seed in range(6):
        if seed == 4:
            CHANGES[name](net), CHANGES[name](twin)
        found = [one(scene(seed)) for one in (net, twin)]
        same(*([y.detach()] for y in found))
        found[0].sum().backward()
        del found
    (kind,) = forward_of(net)._kinds.values()
    assert (kind.captures, kind.replays) == (2, 4), nn.explain(net)


class Popping(torch.nn.Module):
    """It takes what it needs out of the dict that it is given."""

    def __init__(self):
        super().__init__()
        self.conv = spconv.SubMConv3d(4, 8, 3, padding=1)

    def forward(self, batch):
        features, coords = batch.pop("features"), batch.pop("coords")
        batch["out"] = self.conv(spconv.SparseConvTensor(features, coords, [12] * 3, 2)).features
        return batch


def test_what_is_taken_out_of_a_dict_before_the_scene_is_there_when_a_call_starts_anew():
    """The third call raised a KeyError."""
    torch.manual_seed(0)
    net = Popping().to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(6):
        coords, found = coords_of(seed, 150 if seed < 5 else 400), []  # the last one does not fit
        for one in (net, twin):
            batch = {"features": features_of(seed, coords), "coords": coords, "name": "scene"}
            assert one(batch) is batch
            assert list(batch) == ["name", "out"]
            batch["out"].square().sum().backward()
            found.append(batch["out"].detach())
        same(found[:1], found[1:])
    assert replays(net) == 3, nn.explain(net)
