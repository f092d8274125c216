"""Recordings of one module share memory: calls of several threads, and of several kinds before a gradient."""

from __future__ import annotations

import copy
import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.nn.capturing.region import is_inside
from tests.nn.test_capture_module import (
    DEVICE,
    _graphs,
    coords_of,
    detect,
    features_of,
    forward_of,
    make,
    own,
    replays,
    same,
    segment,
    step,
)

__all__ = ["_graphs"]


def infer(net, call, seed, voxels=300):
    with torch.inference_mode():
        return call(net, seed, voxels)


@pytest.mark.parametrize("call", [segment, own])
def test_threads_share_a_captured_network(call):
    """As a server's: a scene of one thread was replayed with the arrays of another's."""
    net = make("unet" if call is own else "segmenter").eval()
    wanted = [infer(net, call, seed) for seed in range(4)]
    nn.capture(net)
    for seed in range(3):
        infer(net, call, seed)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda at: infer(net, call, at % 4), range(24)))
    finally:
        sys.setswitchinterval(before)
    for at, got in enumerate(found):
        same(got, wanted[at % 4])
    assert replays(net) == 25, nn.explain(net)


def recordings(net):
    return [kind.recording for kind in forward_of(net)._kinds.values() if kind.recording is not None]


def memories(net):
    return {id(recording.memory) for recording in recordings(net)}


def trained_and_evaluated(net, call, seed, voxels=300):
    """A step and an inference."""
    found = step(net.train(), call, seed, voxels)
    net.eval()
    return found + infer(net, call, seed, voxels)


@pytest.mark.parametrize("call", [detect, segment, own])
def test_training_and_evaluation_share_memory(call):
    net = make({detect: "detector", segment: "segmenter", own: "unet"}[call])
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed, voxels in enumerate([300, 280, 310, 150, 330]):
        same(trained_and_evaluated(net, call, seed, voxels), trained_and_evaluated(twin, call, seed, voxels))
    assert len(recordings(net)) == 2, nn.explain(net)
    assert len(memories(net)) == 1, nn.explain(net)
    assert replays(net) == 6, nn.explain(net)
    assert nn.explain(net).count("graphs hold") == 1


def test_the_largest_recording_gives_the_memory():
    """What was evaluated first is captured anew, in the memory of what trains."""
    net = make("unet")
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(3):
        same(infer(net.eval(), own, seed), infer(twin.eval(), own, seed))
    first = memories(net)
    for seed in range(4):
        same(trained_and_evaluated(net, own, seed), trained_and_evaluated(twin, own, seed))
    assert len(memories(net)) == 1
    assert memories(net) != first
    assert len(recordings(net)) == 2
    assert all(kind.captures == 1 for kind in forward_of(net)._kinds.values()), nn.explain(net)


def test_an_evaluation_before_the_gradient_leaves_what_that_needs():
    """Eager at first, then in memory of its own."""
    net = make("unet")
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(3):
        same(trained_and_evaluated(net, own, seed), trained_and_evaluated(twin, own, seed))
    for seed in range(3):
        found = []
        for both in (net, twin):
            both.train().zero_grad(set_to_none=True)
            loss = own(both, seed)[0].square().mean()
            found.append(infer(both.eval(), own, seed + 5))
            loss.backward()
            found[-1] += [p.grad for p in both.parameters()]
        same(*found)
    assert len(memories(net)) == 2, nn.explain(net)
    assert "the gradient of the call before is not taken yet" in nn.explain(net)
    before = replays(net)
    same(trained_and_evaluated(net, own, 1), trained_and_evaluated(twin, own, 1))
    assert replays(net) == before + 2, nn.explain(net)


def test_kinds_that_are_called_before_one_gradient_have_memory_of_their_own():
    """As a step on two batches of other sizes: both replay."""
    net = make("unet")
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(5):
        found = []
        for both in (net, twin):
            both.zero_grad(set_to_none=True)
            loss = own(both, seed)[0].square().mean()
            x = own(both.eval(), seed + 9)[0].square().mean()  # in evaluation, with gradients
            (loss + x).backward()
            both.train()
            found.append([p.grad for p in both.parameters()])
        same(*found)
    assert replays(net) == 6, nn.explain(net)
    assert len(memories(net)) == 2


@pytest.mark.gpu
def test_memory_that_is_shared_is_held_once():
    held = []
    for both in (False, True):
        net = nn.capture(make("unet"))
        for seed in range(4):
            step(net, own, seed, 3000)
            if both:
                infer(net.eval(), own, seed, 3000)
                net.train()
        held.append(recordings(net)[0].memory.held_bytes())
    assert len(recordings(net)) == 2
    assert held[1] < 1.5 * held[0]


class Raising(torch.nn.Module):
    """A network that raises while it is recorded."""

    def __init__(self):
        super().__init__()
        self.conv = spconv.SubMConv3d(4, 3, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        if is_inside():
            raise RuntimeError("no")
        return y


def test_a_capture_that_was_refused_leaves_nothing():
    """Its recording was held by the error that refused it."""
    tensors = (torch.Tensor, torch.nn.Parameter)

    def lived():
        net = nn.capture(Raising().to(DEVICE))
        for seed in range(4):
            coords = coords_of(seed, 200)
            x = spconv.SparseConvTensor(features_of(seed, coords), coords, [12] * 3, 2)
            net(x).features.sum().backward()
        assert "eager: RuntimeError: no" in nn.explain(net)

    lived()  # what is imported and kept once
    gc.collect()
    gc.disable()
    try:
        before = {id(t) for t in gc.get_objects() if type(t) in tensors}
        lived()
        assert [tuple(t.shape) for t in gc.get_objects() if type(t) in tensors and id(t) not in before] == []
    finally:
        gc.enable()


def scene_of(seed, voxels):
    coords = coords_of(seed, voxels, extent=40)
    return coords, features_of(seed, coords)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["the module", "by an example"])
def test_threads_and_streams_take_turns(what):
    """The next call's scene was written while the one before was still read on another stream."""
    net = make("unet").eval()
    scenes = [scene_of(seed, 20_000 + 500 * seed) for seed in range(6)]

    def plain(scene):
        return net(sc.SparseTensor(sc.VoxelGrid(scene[0], 2), scene[1])).features

    with torch.inference_mode():
        wanted = [plain(scene) for scene in scenes]
        if what == "the module":
            nn.capture(net)
            call = plain
        else:
            call = nn.capture(net, sc.SparseTensor(sc.VoxelGrid(scenes[-1][0], 2), scenes[-1][1]))
        for scene in scenes[::-1]:
            call(scene)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]

    def run(at):
        with torch.inference_mode(), torch.cuda.stream(streams[at % 4]):
            return call(scenes[at % 6])

    one_thread = [run(at) for at in range(48)]
    with ThreadPoolExecutor(4) as threads:
        several = list(threads.map(run, range(48)))
    torch.cuda.synchronize()
    for found in (one_thread, several):
        for at, got in enumerate(found):
            same([got], [wanted[at % 6]])
