"""Modules whose calls are replayed: the same results and gradients as eager calls, for scenes of any size.

Without a card a stand-in of the graphs runs what was captured again at every replay, into the same memory.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import ExitStack

import pytest
import torch

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.gpu import graphs
from sparseconv.nn.capturing import module as capturing
from sparseconv.nn.capturing.joining import Changed, Norms
from sparseconv.nn.capturing.module_state import Attributes
from sparseconv.nn.capturing.recording import Recording
from sparseconv.nn.capturing.values.given import Given

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: what graphs and eager calls are compared in, and by how much they may differ: no graph holds layers in float64
WIDE, LIMIT = (torch.float64, 1e-7) if DEVICE == "cpu" else (torch.float32, 2e-3)


class RunAgain(Recording):
    """Replays by running the call again, into the memory of the first results."""

    def _capture(self):
        self.state.keep()
        try:
            self.answer = self.run()
        except Changed:  # as a graph's first run on its streams
            self._joined = Norms()
            self.answer = self.run()
        if self.trains:
            self._gather(self._find(self.answer))
        answer = self.answer
        self._finish()
        self._voxels_there = None if self._voxels_there is None else self._voxels_there.clone()
        self.results = [t.detach().clone() for t in answer.tensors] or [t.clone() for t in self.results]

    def tried(self):
        self._given = Given(*self._given.copied(), self._given.objects)  # results are put into the caller's dicts

    _at_replay = ()

    def _enter(self, *args, **kwargs):
        for buffer, value in self._at_replay:  # what the call does before its region is no part of a graph
            buffer.data.copy_(value)
        return super()._enter(*args, **kwargs)

    def _replay_forward(self):
        attributes = Attributes(self._module)  # which a graph, that runs no Python, would leave alone
        self._at_replay = [(b, b.clone()) for b in self._module.buffers()]
        with ExitStack() as stack:  # a graph's writes are counted by `begin` alone
            for buffer in self._module.buffers():
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(buffer))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self.trains))
            self._again = self.run()
        self._at_replay = ()
        attributes.put_back()
        for kept, new in zip(self.results, self._again.tensors, strict=True):
            kept.copy_(new.detach())
        if self._voxels_there is not None:
            self._voxels_there.copy_(self._voxels_now)

    def _replay_backward(self):
        with torch.enable_grad():
            self._gather(self._find(self._again))


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
        monkeypatch.setattr(capturing, "RECORDING", RunAgain)


def coords_of(seed, voxels, items=2, extent=12, shift=0):
    gen = torch.Generator().manual_seed(seed)
    found = torch.cat(
        [torch.randint(0, items, (voxels, 1), generator=gen), torch.randint(0, extent, (voxels, 3), generator=gen)], 1
    )
    found = torch.unique(found, dim=0)
    found[:, 1:] += shift
    return found[torch.randperm(len(found), generator=gen)].int().to(DEVICE)


def features_of(seed, coords, channels=4):
    return torch.randn(len(coords), channels, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Block(spconv.SparseModule):
    def __init__(self, channels, key):
        super().__init__()
        self.conv1 = spconv.SubMConv3d(channels, channels, 3, padding=1, bias=False, indice_key=key)
        self.bn1 = torch.nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)
        self.relu = torch.nn.ReLU()
        self.conv2 = spconv.SubMConv3d(channels, channels, 3, padding=1, bias=True, indice_key=key)
        self.bn2 = torch.nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)

    def forward(self, x):
        out = self.conv1(x)
        out = out.replace_feature(self.bn1(out.features))
        out = out.replace_feature(self.relu(out.features))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features))
        out = out.replace_feature(out.features + x.features)
        return out.replace_feature(self.relu(out.features))


def layer(conv, channels):
    return spconv.SparseSequential(conv, torch.nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01), torch.nn.ReLU())


class Detector(torch.nn.Module):
    """As detectors are written: a dict in, the same dict out with tensors on several grids."""

    def __init__(self):
        super().__init__()
        self.shape = [12, 12, 12]
        self.first = layer(spconv.SubMConv3d(4, 8, 3, padding=1, bias=False, indice_key="a"), 8)
        self.down = layer(spconv.SparseConv3d(8, 12, 3, 2, padding=1, bias=False, indice_key="b"), 12)
        self.block = Block(12, "c")
        self.out = layer(spconv.SparseConv3d(12, 16, (3, 1, 1), (2, 1, 1), bias=False, indice_key="d"), 16)

    def forward(self, batch):
        x = spconv.SparseConvTensor(batch["features"], batch["coords"].int(), self.shape, batch["batch_size"])
        x1 = self.first(x)
        x2 = self.block(self.down(x1))
        batch["encoded"] = self.out(x2)
        batch.update({"stride": 4, "scales": {"x1": x1, "x2": x2}})
        return batch


class Segmenter(torch.nn.Module):
    """As segmenters are written: sizes are read on the host first, and the shape differs from scene to scene."""

    def __init__(self):
        super().__init__()
        self.first = layer(spconv.SubMConv3d(4, 8, 5, padding=1, bias=False, indice_key="stem"), 8)
        self.down = layer(spconv.SparseConv3d(8, 12, 2, 2, bias=False, indice_key="down"), 12)
        self.block = Block(12, "low")
        self.up = layer(spconv.SparseInverseConv3d(12, 8, 2, bias=False, indice_key="down"), 8)
        self.last = spconv.SubMConv3d(16, 3, 1, padding=1, bias=True)

    def forward(self, coords, features):
        shape = torch.add(coords[:, 1:].max(0).values, self.margin).tolist()
        x = spconv.SparseConvTensor(features, coords.int().contiguous(), shape, coords[:, 0].max().item() + 1)
        x = self.first(x)
        y = self.up(self.block(self.down(x)))
        y = y.replace_feature(torch.cat((y.features, x.features), 1))
        return self.last(y).features

    margin = 9


def detect(net, seed, voxels=300, **where):
    coords = coords_of(seed, voxels, **where)
    batch = {"features": features_of(seed, coords), "coords": coords, "batch_size": 2, "name": "scene"}
    out = net(batch)
    assert out is batch
    assert out["stride"] == 4
    assert out["name"] == "scene"
    return [out["encoded"].features, out["scales"]["x1"].features, out["scales"]["x2"].features, out["encoded"].dense()]


def segment(net, seed, voxels=300, **where):
    coords = coords_of(seed, voxels, **where)
    return [net(coords, features_of(seed, coords))]


def own(net, seed, voxels=300, **where):
    coords = coords_of(seed, voxels, **where)
    return [net(sc.SparseTensor(sc.VoxelGrid(coords, 2), features_of(seed, coords))).features]


def make(kind):
    torch.manual_seed(0)
    if kind == "unet":
        return nn.UNet(4, 3, channels=(8, 12)).to(DEVICE)
    return {"detector": Detector, "segmenter": Segmenter}[kind]().to(DEVICE)


CALLS = {"detector": detect, "segmenter": segment, "unet": own}
KINDS = list(CALLS)


def step(net, call, seed, voxels=300, **where):
    """Results, gradients and buffers of a training step."""
    net.zero_grad(set_to_none=True)
    out = call(net, seed, voxels, **where)
    out[0].square().mean().backward()
    return [*(t.detach() for t in out), *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())]


def same(got, want, limit=2e-3):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert float((a.double() - b.double()).abs().max()) <= limit * max(1.0, float(b.double().abs().max()))


def forward_of(net):
    return net.__dict__["forward"]


def replays(net):
    return sum(kind.replays for kind in forward_of(net)._kinds.values())


@pytest.mark.parametrize("kind", KINDS)
def test_training_steps_on_scenes_of_many_sizes_equal_eager_ones(kind):
    net, call = make(kind), CALLS[kind]
    twin = copy.deepcopy(net)
    assert nn.capture(net) is net
    assert list(net.state_dict()) == list(twin.state_dict())
    for seed, voxels in enumerate([300, 280, 310, 150, 330, 300]):
        same(step(net, call, seed, voxels), step(twin, call, seed, voxels))
    assert replays(net) == 4, nn.explain(net)


class Weighted(torch.nn.Module):
    """A layer whose results are multiplied by the mean of some rows that come beside the scene."""

    def __init__(self):
        super().__init__()
        self.conv = spconv.SubMConv3d(4, 8, 3, padding=1, bias=False)

    def forward(self, x, rows):
        out = self.conv(x)
        return out.replace_feature(out.features * rows.mean(0))


def test_rows_beside_a_scene_may_be_any_number():
    """Once for each number: three rows were copied to where there had been five, or one of them to all five."""
    torch.manual_seed(0)
    net = Weighted().to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed, number in enumerate([5, 5, 5, 3, 1, 5, 1, 1, 3, 7, 8, 9, 10, 11, 5]):
        coords = coords_of(seed, 200)
        rows = features_of(seed, coords, 8)[:number]
        found = []
        for both in (net, twin):
            both.zero_grad(set_to_none=True)
            y = both(spconv.SparseConvTensor(features_of(seed, coords), coords, [12] * 3, 2), rows).features
            y.square().mean().backward()
            found.append([y.detach(), *(p.grad for p in both.parameters())])
        same(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_equals_eager_and_sees_every_change_of_a_weight(kind):
    net, call = make(kind).eval(), CALLS[kind]
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(5):
        with torch.inference_mode() if seed % 2 else torch.no_grad():
            same(call(net, seed, 300 - 20 * seed), call(twin, seed, 300 - 20 * seed))
        for one, other in zip(net.parameters(), twin.parameters(), strict=True):
            one.data.mul_(1.1)
            other.data.mul_(1.1)
    assert replays(net) >= 2, nn.explain(net)


# ---- a module as before


def small(seed=0):
    torch.manual_seed(seed)
    return layer(spconv.SubMConv3d(4, 8, 3, padding=1, bias=False), 8).to(DEVICE)


def through(net, seed, voxels=200, **where):
    coords = coords_of(seed, voxels, **where)
    features = features_of(seed, coords).requires_grad_(where.get("shift", 0) == 0)
    out = net(spconv.SparseConvTensor(features, coords, [12] * 3, 2))
    return [out.features, out.indices, features]


def run(net, seed, voxels=200):
    net.zero_grad(set_to_none=True)
    y, indices, features = through(net, seed, voxels)
    y.square().sum().backward()
    return [y.detach(), indices, features.grad, *(p.grad for p in net.parameters())]


def ready(seed=0, **options):
    """A captured network, its twin, and two calls of both that were its example."""
    net = small(seed)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in (90, 91):
        same(run(net, seed), run(twin, seed))
    return net, twin


def test_gradients_accumulate_and_reach_the_features():
    net, twin = ready()
    for both in (net, twin):
        both.zero_grad(set_to_none=True)
    for seed in range(3):
        ends = [through(both, seed) for both in (net, twin)]
        for y, _, _ in ends:
            y.square().sum().backward()
        same([ends[0][2].grad], [ends[1][2].grad])
    same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert replays(net) == 3


def test_a_gradient_belongs_to_whoever_holds_it():
    net, _ = ready()
    first = run(net, 0)
    kept = [t.clone() for t in first]
    run(net, 1, 120)
    same(first, kept, 0.0)


def test_results_are_forgotten_without_a_collection():
    net = make("detector")
    nn.capture(net)
    for seed in range(4):
        step(net, detect, seed)
    assert replays(net) == 2
    gc.collect()
    gc.disable()
    try:
        out = detect(net, 4)
        seen = weakref.ref(out[0])
        del out
        assert seen() is None
    finally:
        gc.enable()


def test_a_loss_of_the_step_before_may_be_kept():
    net, twin = small(), small()
    nn.capture(net)
    kept = []
    for seed in range(5):
        for both in (net, twin):
            both.zero_grad(set_to_none=True)
            kept.append(through(both, seed)[0].square().sum())
            kept[-1].backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert replays(net) == 3, nn.explain(net)


def test_an_optimizer_trains_a_captured_network_like_an_eager_one():
    net, twin = ready()
    optimizers = [torch.optim.AdamW(both.parameters(), 1e-2) for both in (net, twin)]
    for seed in range(4):
        for both, optimizer in zip((net, twin), optimizers):
            run(both, seed)
            torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
            optimizer.step()
    assert replays(net) == 4
    same(net.state_dict().values(), twin.state_dict().values())


def test_two_calls_before_a_gradient_give_both_their_own():
    net, twin = ready()
    for both in (net, twin):
        both.zero_grad(set_to_none=True)
        one, other = through(both, 1)[0], through(both, 2, 150)[0]
        (one.square().sum() + other.square().sum()).backward()
    same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert "the gradient of the call before is not taken yet" in nn.explain(net)


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_many_calls_are_summed(kind, count):
    """As of several views of a scene: recording the third call was a change of what the first ones had saved."""
    net, call = make(kind), CALLS[kind]
    twin = copy.deepcopy(net)
    nn.capture(net)
    for number in range(3):
        for both in (net, twin):
            both.zero_grad(set_to_none=True)
            sum(call(both, 10 * number + view)[0].square().mean() for view in range(count)).backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
        same(net.state_dict().values(), twin.state_dict().values())
    assert replays(net) == 3, nn.explain(net)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_changes_nothing_that_an_eager_call_saved(kind):
    net, call = make(kind), CALLS[kind]
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(4):
        same(step(net, call, seed), step(twin, call, seed))
    found = []
    for both in (net, twin):
        both.zero_grad(set_to_none=True)
        first, second = call(both, 1)[0], call(both, 2)[0]  # the second is eager, since the first's gradient is awaited
        first.square().mean().backward()
        third = call(both, 3)[0]
        second.square().mean().backward()
        third.square().mean().backward()
        found.append([p.grad for p in both.parameters()])
    same(*found)
    assert replays(net) == 4, nn.explain(net)


class Returning(torch.nn.Module):
    """A network that returns a parameter and a buffer of its own beside its features."""

    def __init__(self):
        super().__init__()
        self.conv = spconv.SubMConv3d(4, 3, 3, padding=1)
        self.queries = torch.nn.Parameter(torch.randn(5, 3))
        self.register_buffer("scale", torch.randn(2))

    def forward(self, x):
        return {"features": self.conv(x).features, "queries": self.queries, "scale": self.scale}


def test_a_parameter_that_is_returned_is_the_modules_own():
    """It was another one over the same memory, and its gradient went there."""
    torch.manual_seed(0)
    net = Returning().to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(5):
        coords = coords_of(seed, 200)
        found = []
        for both in (net, twin):
            both.zero_grad(set_to_none=True)
            out = both(spconv.SparseConvTensor(features_of(seed, coords), coords, [12] * 3, 2))
            (out["features"].square().sum() + (out["queries"] ** 2).sum() * out["scale"].sum()).backward()
            found.append([out["features"].detach(), *(p.grad for p in both.parameters())])
        same(*found)
    assert replays(net) == 3, nn.explain(net)
    with torch.no_grad():
        out = net.eval()(spconv.SparseConvTensor(features_of(1, coords_of(1, 200)), coords_of(1, 200), [12] * 3, 2))
    assert out["scale"] is net.scale or out["scale"].data_ptr() == net.scale.data_ptr()


def test_a_gradient_is_asked_for_again_after_the_weights_have_moved():
    """Without that the call is made again; torch's own graphs raise an error there, too."""
    net, _ = ready()
    y = through(net, 1)[0].sum()
    y.backward(retain_graph=True)
    with torch.no_grad():
        next(net.parameters()).add_(1)
    with pytest.raises(RuntimeError, match=r"has other weights now: .* nn\.release"):
        y.backward()


def test_weights_may_be_replaced_and_loaded():
    net, twin = ready()
    run(net, 0), run(twin, 0)
    other = small(3)
    net.load_state_dict(other.state_dict())
    same(run(net, 1), run(copy.deepcopy(other), 1))
    net[0].weight = torch.nn.Parameter(twin[0].weight.detach().clone())
    other[0].weight = torch.nn.Parameter(twin[0].weight.detach().clone())
    other.load_state_dict(net.state_dict())
    same(run(net, 2), run(other, 2))
    assert replays(net) == 3


@pytest.mark.parametrize("kind", ["detector", "segmenter"])
def test_a_part_that_is_replaced_is_seen_and_its_hook_is_called(kind):
    net, call = make(kind), CALLS[kind]
    twin, called = copy.deepcopy(net), []
    nn.capture(net)
    for seed in range(9):
        if seed in (4, 6):
            for other in (net, twin):
                torch.manual_seed(seed)
                part = spconv.SubMConv3d(4, 8, 3, padding=1, bias=False, indice_key="other").to(DEVICE)
                setattr(other.first, "0", part)
        if seed == 6:
            net.first[0].register_forward_hook(lambda *_, seed=seed: called.append(seed))
        same(step(net, call, seed), step(twin, call, seed))  # running statistics too: each scene counts once
    assert replays(net) == 4
    assert called == [6] * (3 + (DEVICE == "cpu"))  # the stand-in's replay, which is taken back, calls it too


def test_a_copied_or_pickled_module_is_captured_anew():
    net, twin = ready()
    run(net, 0), run(twin, 0)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert forward_of(other).module is other
        same(run(other, 5), run(copy.deepcopy(twin), 5))


def test_a_hook_inside_is_called_and_one_outside_changes_nothing():
    net, twin = ready()
    called = []
    net.register_forward_hook(lambda *_: called.append("outside"))
    same(run(net, 0), run(twin, 0))
    assert (called, replays(net)) == (["outside"], 1)
    handle = net[0].register_forward_hook(lambda *_: called.append("inside"))
    same(run(net, 1), run(twin, 1))
    assert called[1:] == ["inside", "outside"]
    handle.remove()
    run(net, 2)
    assert replays(net) == 2


def test_a_captured_network_is_forgotten_with_its_graphs():
    net, _ = ready()
    run(net, 0)
    seen = weakref.ref(net), weakref.ref(next(iter(forward_of(net)._kinds.values())).recording)
    gc.collect()
    gc.disable()
    try:
        if DEVICE == "cpu":  # the stand-in for graphs calls the module
            del seen[1]()._call, seen[1]()._module
        del net
        assert [s() for s in seen] == [None, None]  # at once: Python's collector does not know of a card's memory
    finally:
        gc.enable()


def test_a_forward_without_its_module_says_so():
    forward = nn.capture(small()).forward
    with pytest.raises(RuntimeError, match="the module of this captured forward is gone"):
        forward(spconv.SparseConvTensor(features_of(0, coords_of(0, 9)), coords_of(0, 9), [12] * 3, 2))


def test_modes_and_released_modules():
    net, twin = ready()
    run(net, 0), run(twin, 0)
    for both in (net, twin):
        both.eval()
    with torch.no_grad():
        for seed in range(4):
            same(through(net, seed)[:2], through(twin, seed)[:2])
    assert nn.release(net) is net
    assert nn.explain(net) == "nothing is captured: see nn.capture"
    assert "forward" not in net.__dict__
    same(run(net.train(), 3), run(twin.train(), 3))


# ---- scenes that do not fit


def test_a_scene_with_too_many_rows_is_right_and_makes_room():
    net, twin = make("detector"), None
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed, voxels in enumerate([120, 120, 120, 900, 900, 120]):
        same(step(net, detect, seed, voxels), step(twin, detect, seed, voxels))
    said = nn.explain(net)
    assert "voxels, and places for" in said
    assert replays(net) == 3, said
    assert ("graphs hold 0 MiB" in said) == (DEVICE == "cpu"), said


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_of_which_several_captures_were_tried_is_right(monkeypatch, kind):
    """As of networks whose graphs take much memory."""
    monkeypatch.setattr("sparseconv.nn.capturing.recording.WORTH", 0)
    net, call = make(kind), CALLS[kind]
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(5):
        same(step(net, call, seed), step(twin, call, seed))
    assert replays(net) == 3, nn.explain(net)
    assert "graphs hold 0 MiB" not in nn.explain(net)


def test_a_scene_outside_of_the_extent_is_right_and_makes_room():
    net = make("unet")
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed, shift in enumerate([0, 0, 0, 500, 500, -400, 0]):
        same(step(net, own, seed, shift=shift), step(twin, own, seed, shift=shift))
    assert "lies outside of the extent" in nn.explain(net)
    assert replays(net) == 3, nn.explain(net)


def test_running_statistics_of_a_scene_that_did_not_fit_are_counted_once():
    net = make("unet")
    nn.capture(net)
    for seed, shift in enumerate([0, 0, 0, 500]):
        step(net, own, seed, shift=shift)
    counts = [b for name, b in net.named_buffers() if name.endswith("num_batches_tracked")]
    assert {int(c) for c in counts} == {4}


def test_voxels_behind_the_end_of_a_scenes_own_shape_are_as_in_an_eager_call():
    net = make("segmenter")
    net.margin = 1  # an odd shape then drops the last coarse voxel
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed, extent in enumerate([12, 11, 12, 10, 12, 13, 9]):
        same(step(net, segment, seed, extent=extent), step(twin, segment, seed, extent=extent))
    assert replays(net) >= 1, nn.explain(net)


def test_an_empty_scene_runs_eagerly():
    net, twin = ready()
    for both in (net, twin):
        both.eval()
    empty = torch.empty(0, 4, dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        x = spconv.SparseConvTensor(torch.empty(0, 4, device=DEVICE), empty, [12] * 3, 2)
        out = [both(x) for both in (net, twin)]
    assert [o.features.shape for o in out] == [(0, 8), (0, 8)]
    assert "a scene without voxels" in nn.explain(net)


def test_a_result_that_gets_a_gradient_for_the_first_time_gets_a_right_one():
    net = make("detector")
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(3):
        step(net, detect, seed), step(twin, detect, seed)
    for seed in (3, 4):
        for both in (net, twin):
            both.zero_grad(set_to_none=True)
            out = detect(both, seed)
            (out[0].square().mean() + out[1].square().mean()).backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])


def test_results_that_the_caller_ignores_cost_no_gradient():
    net = make("detector")
    nn.capture(net)
    for seed in range(4):  # the loss is of out[0] alone; the network goes on from the scales that it returns
        step(net, detect, seed)
    assert replays(net) == 2
    (kind,) = forward_of(net)._kinds.values()
    assert len(kind.recording.results) == 3
    assert [len(g) for g in kind.recording.grads] == [len(kind.recording.results[kind.recording.taken[0]])]
    assert kind.recording.results[kind.recording.taken[0]].shape[1] == 16


# ---- what no graph can hold


class Counts(Detector):
    """A network that reads a number in its middle."""

    def forward(self, batch):
        x = spconv.SparseConvTensor(batch["features"], batch["coords"].int(), self.shape, batch["batch_size"])
        x = self.first(x)
        batch["encoded"] = self.block(self.down(x))
        batch["stride"] = 4 if x.features.sum().item() > -1e9 else 5
        batch["scales"] = {"x1": x, "x2": batch["encoded"]}
        return batch


def test_voxels_that_a_strided_layer_drops_at_the_end_of_a_shape_are_dropped_in_graphs():
    torch.manual_seed(0)
    net = Segmenter().to(DEVICE)
    net.margin = 1  # of an odd number of cells, a window of two at stride two leaves out the last
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(9):
        extent = (12, 9, 11, 7, 13)[seed % 5]
        same(step(net, segment, seed, extent=extent), step(twin, segment, seed, extent=extent))
    assert replays(net) == 7, nn.explain(net)


class Reads(Segmenter):
    """A segmenter that reads a number in its middle."""

    def forward(self, coords, features):
        x = spconv.SparseConvTensor(features, coords.int().contiguous(), [14] * 3, 2)
        x = self.first(x)
        y = self.down(x)
        y = self.up(self.block(y if y.features.sum().item() > -1e9 else x))
        y = y.replace_feature(torch.cat((y.features, x.features), 1))
        return self.last(y).features


def test_a_layer_that_another_one_undoes_is_not_captured_alone():
    torch.manual_seed(0)
    net = Reads().to(DEVICE)
    twin = copy.deepcopy(net)
    nn.accelerate(net)
    for seed in range(6):
        same(step(net, segment, seed), step(twin, segment, seed))
    assert "forward" not in net.down.__dict__
    assert replays(net.first) >= 2, nn.explain(net)
    assert replays(net.block) >= 2, nn.explain(net)
    nn.capture(net.down)
    for seed in range(2):
        step(net, segment, seed)
    with pytest.raises(ValueError, match="a captured module keeps its maps to itself"):
        step(net, segment, 2)


def test_the_callers_tensor_stays_what_it_is():
    net, twin = ready()
    for seed in range(3):  # the first of these calls is recorded, and compared with an eager one
        coords = coords_of(seed, 150)
        weight = torch.ones(4, device=DEVICE, requires_grad=True)
        found = []
        for other in (net, twin):
            x = spconv.SparseConvTensor(features_of(seed, coords) * weight, coords, [12] * 3, 2)
            x.indice_dict["of before"] = None
            features = x.features
            y = other(x).features.sum() + x.features.square().sum()
            assert x.features is features
            assert "of before" in x.indice_dict
            found.append(torch.autograd.grad(y, weight)[0])
        same(found[:1], found[1:])
    assert replays(net) == 3


def test_a_result_on_the_voxels_of_the_input_keeps_its_grid_and_its_maps():
    net, _ = ready()
    coords = coords_of(0, 150)
    x = spconv.SparseConvTensor(features_of(0, coords).requires_grad_(), coords, [12] * 3, 2)
    x.indice_dict["of before"] = stored = object()
    grid = x.voxels
    y = net(x)
    assert replays(net) == 1
    assert y.voxels is grid
    assert y.indices is x.indices
    assert y.indice_dict["of before"] is stored


def test_what_waits_in_the_middle_is_named_and_its_parts_are_captured_instead():
    torch.manual_seed(0)
    net = Counts().to(DEVICE)
    twin = copy.deepcopy(net)
    assert nn.accelerate(net) is net
    for seed in range(7):
        same(step(net, detect, seed), step(twin, detect, seed))
    said = nn.explain(net)
    assert "_local_scalar_dense waits for the device, at test_capture_module.py" in said
    assert 'batch["stride"]' in said
    assert sum(replays(part) for part in (net.first, net.down, net.block)) >= 6, said


class Embeds(torch.nn.Module):
    """A norm and a counter before the scene is made, and layers of which one waits for the device."""

    def __init__(self, waits):
        super().__init__()
        self.embed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.first = Block(4, "a")
        self.last = Block(4, "b")
        self.waits, self.steps = waits, 0

    def forward(self, coords, features):
        self.steps += 1
        x = self.first(spconv.SparseConvTensor(self.embed(features), coords, [12] * 3, 2))
        if self.waits:
            x.features.sum().item()
        return self.last(x).features


@pytest.mark.parametrize("waits", [True, False])
def test_a_call_that_no_replay_answers_moves_what_is_before_its_scene_once(waits):
    """Its norms and counters had moved twice: the call was begun, and then made anew."""
    torch.manual_seed(0)
    net = Embeds(waits).to(DEVICE).to(WIDE)
    twin = copy.deepcopy(net)
    nn.accelerate(net)
    for seed in range(6):
        coords = coords_of(seed, 900 if seed == 4 else 200)  # the fifth does not fit
        features = features_of(seed, coords).to(WIDE)
        for both in (net, twin):
            both(coords, features).square().mean().backward()
        same(net.buffers(), twin.buffers(), LIMIT)
        assert net.steps == twin.steps == seed + 1
    assert replays(net) == (0 if waits else 3), nn.explain(net)


class Heads(torch.nn.Module):
    """Two parts on scenes of one call, which holds its second scene's rows before the first part runs."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Block(4, "a"), Block(6, "b")

    def forward(self, coords, features, others):
        y = self.one(spconv.SparseConvTensor(features, coords, [12] * 3, 2)).features
        z = self.two(spconv.SparseConvTensor(others, coords, [12] * 3, 2)).features
        return torch.cat([y, z], 1)


def test_no_region_begins_behind_a_part_that_was_replayed():
    """A second one began there, and the part's norm moved twice where that was refused, too."""
    torch.manual_seed(0)
    net = Heads().to(DEVICE).to(WIDE)
    twin = copy.deepcopy(net)
    nn.accelerate(net)
    for seed in range(8):
        coords = coords_of(seed, 200)
        given = [features_of(seed, coords, channels).to(WIDE) for channels in (4, 6)]
        for both in (net, twin):
            both(coords, *given).square().mean().backward()
        same(net.buffers(), twin.buffers(), LIMIT)
    said = nn.explain(net).split("Block:")[0]
    assert said.count("\n  eager: ") == 1, said
    assert "no sparse tensor was made" not in said  # which is no reason: parts made their graphs of it
    assert [replays(part) for part in (net.one, net.two)] == [4, 4]


class Projected(torch.nn.Module):
    """A residual block of which the shortcut, a layer of one tap, comes first."""

    def __init__(self):
        super().__init__()
        self.shortcut = layer(spconv.SubMConv3d(4, 8, 1, bias=False), 8)
        self.branch = layer(spconv.SubMConv3d(4, 8, 3, padding=1, bias=False, indice_key="a"), 8)

    def forward(self, coords, features):
        x = spconv.SparseConvTensor(features, coords, [12] * 3, 2)
        shortcut = self.shortcut(x)
        return self.branch(x).features + shortcut.features


def test_a_graph_begins_with_a_layer_of_one_tap():
    """It began behind that layer, whose result was then from before the graph: the call stayed eager."""
    torch.manual_seed(0)
    net = Projected().to(DEVICE).to(WIDE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(5):
        coords = coords_of(seed, 200)
        found = []
        for both in (net, twin):
            both.zero_grad(set_to_none=True)
            y = both(coords, features_of(seed, coords).to(WIDE))
            y.square().mean().backward()
            found.append([y.detach(), *(p.grad for p in both.parameters()), *both.buffers()])
        same(*found, LIMIT)
    assert replays(net) == 3, nn.explain(net)


class Chaos(torch.nn.Module):
    """Rounding is enlarged until results have nothing in common."""

    def __init__(self):
        super().__init__()
        self.conv = spconv.SubMConv3d(4, 8, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        return y.replace_feature(torch.sin(1e8 * y.features))


class Plain(Chaos):
    def forward(self, x):
        return self.conv(x)


@pytest.mark.parametrize(("make", "noise", "is_kept"), [(Chaos, 2e-7, True), (Plain, 0.2, False)])
def test_a_capture_is_compared_by_what_rounding_does_to_the_network(monkeypatch, make, noise, is_kept):
    class Moved(capturing.RECORDING):
        def begin(self, scene, given):
            super().begin(scene._replace(features=scene.features * (1 + noise)), given)

    monkeypatch.setattr(capturing, "RECORDING", Moved)
    torch.manual_seed(0)
    net = nn.capture(make().to(DEVICE))
    for seed in range(3):
        run(net, seed)
    assert (replays(net) == 1) == is_kept, nn.explain(net)


class Fails(Segmenter):
    """Works on ordinary grids alone."""

    def forward(self, coords, features):
        x = spconv.SparseConvTensor(features, coords.int().contiguous(), [14] * 3, 2)
        if x.voxels.count is not None:
            raise KeyError("fixed")
        return super().forward(coords, features)


def test_what_fails_while_a_call_is_recorded_is_named():
    net = nn.capture(Fails().to(DEVICE))
    for seed in range(3):
        step(net, segment, seed)
    assert "eager: KeyError: 'fixed'" in nn.explain(net)


def test_accelerate_says_where_it_changes_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="sc.accelerate changes nothing here: it replays CUDA graphs") as seen:
        sc.accelerate(nn.UNet(4, 3, channels=(8, 16)))
    assert [warning.filename for warning in seen] == [__file__]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sc.accelerate(nn.UNet(4, 3, channels=(8, 16)))
