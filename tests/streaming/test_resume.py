"""A run that was interrupted goes on from its finished blocks, to the same bytes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

import sparseconv as sc
from tests.streaming.scenes import NETWORKS, forced, scene


class Interrupted(Exception):
    pass


def test_interrupted_at_ten_random_points(tmp_path, monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS["several"]().eval(), scene()
    forced(monkeypatch, 1, 30)
    with torch.no_grad():
        want, draw, left = sc.stream(net, x, 10**9), random.Random(0), 10

        def progress(done: int, total: int) -> None:
            nonlocal left
            if left and draw.random() < 0.5:
                left -= 1
                raise Interrupted

        while True:
            try:
                got = sc.stream(net, x, 10**9, resume=tmp_path, progress=progress)
                break
            except Interrupted:
                continue
    assert left == 0
    for name in want:
        a, b = (one[name].features if name in ("fine", "coarse") else one[name] for one in (got, want))
        assert torch.equal(a, b)


def test_nothing_is_computed_twice(tmp_path, monkeypatch):
    from sparseconv.streaming.work import Work

    net, x = NETWORKS["unet"]().eval(), scene()
    forced(monkeypatch, 0, 100)
    with torch.no_grad():
        want = sc.stream(net, x, 10**9, resume=tmp_path).features.clone()
        monkeypatch.setattr(Work, "run", lambda *_: pytest.fail("a finished block is run"))
        assert torch.equal(sc.stream(net, x, 10**9, resume=tmp_path).features, want)


def test_a_finished_block_is_written_while_the_next_is_computed(tmp_path, monkeypatch):
    from threading import Event, current_thread

    from sparseconv.streaming.store import Store
    from sparseconv.streaming.work import Work

    begun, run, finish, writers = [Event() for _ in range(100)], Work.run, Store.finish, []

    def computes(*args):
        next(event for event in begun if not event.is_set()).set()
        return run(*args)

    def writes(self, task):
        writers.append(current_thread().name)
        if len(writers) == 1:
            assert begun[1].wait(60), "the second block waits for the first one's files"
        finish(self, task)

    net, x = NETWORKS["conv"]().eval(), scene()
    with torch.no_grad():
        want = net(x).features
        monkeypatch.setattr(Work, "run", computes)
        monkeypatch.setattr(Store, "finish", writes)
        forced(monkeypatch, 0, 100)
        assert torch.equal(sc.stream(net, x, 10**9, resume=tmp_path).features, want)
    assert len(writers) > 2
    assert all(name.startswith("stream-out") for name in writers)


CHILD = """
import os, signal, sys, numpy as np, torch, sparseconv as sc
from tests.streaming.scenes import NETWORKS
torch.set_num_threads(1)
torch.manual_seed(0)
net = NETWORKS["conv"]().eval()
coords, features = (np.load(f"{sys.argv[1]}/{name}.npy", mmap_mode="r") for name in ("coords", "features"))
kill = int(sys.argv[2])
def progress(done, total):
    if done == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    print(done, total, flush=True)
with torch.no_grad():
    sc.stream(net, (coords, features), 200_000, resume=f"{sys.argv[1]}/run", progress=progress,
              out=np.lib.format.open_memmap(f"{sys.argv[1]}/out.npy", "r+"))
    whole = sc.SparseTensor(sc.VoxelGrid(torch.from_numpy(np.array(coords))), torch.from_numpy(np.array(features)))
    np.save(f"{sys.argv[1]}/whole.npy", net(whole).features.numpy())
"""


def test_killed_and_gone_on(tmp_path):
    torch.manual_seed(0)
    net, x = NETWORKS["conv"]().eval(), scene(count=2000)
    np.save(tmp_path / "coords.npy", x.coords.numpy())
    np.save(tmp_path / "features.npy", x.features.numpy())
    np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float32, (len(x.grid), 4))[:] = np.nan
    codes = []
    for kill in (2, 5, -1):  # by itself after a block, by us in the middle of one, and not at all
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), str(kill)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        if kill == 5:
            child.stdout.readline()
            time.sleep(0.01)
            child.kill()
        child.stdout.read()
        codes.append(child.wait())
    assert codes[0] == -signal.SIGKILL
    assert len((tmp_path / "run" / "done.txt").read_text().split()) > 10
    assert codes[-1] == 0
    assert np.array_equal(np.load(tmp_path / "out.npy"), np.load(tmp_path / "whole.npy"))
    with torch.no_grad():  # this process may be held to another CPU's kernels
        torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "out.npy")), net(x).features)


def test_a_folder_of_another_run_is_refused(tmp_path, monkeypatch):
    net, x = NETWORKS["conv"]().eval(), scene()
    forced(monkeypatch, 0, 100)
    with torch.no_grad():
        sc.stream(net, x, 10**9, resume=tmp_path)
        with pytest.raises(ValueError, match="differs in scene"):
            sc.stream(net, x * 2.0, 10**9, resume=tmp_path)
        net[0].weight.mul_(2)
        with pytest.raises(ValueError, match="differs in network"):
            sc.stream(net, x, 10**9, resume=tmp_path)


def test_out_must_fit():
    net, x = NETWORKS["conv"]().eval(), scene()
    with torch.no_grad():
        out = torch.empty(len(x.grid), 4)
        assert torch.equal(sc.stream(net, x, 10**9, out=out).features, net(x).features)
        assert torch.equal(out, net(x).features)
        with pytest.raises(ValueError, match=r"out must be \(\d+, 4\)"):
            sc.stream(net, x, 10**9, out=torch.empty(3, 4))
        with pytest.raises(ValueError, match="returns something else"):
            sc.stream(NETWORKS["several"]().eval(), x, 10**9, out=out)
