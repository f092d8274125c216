"""A run that was interrupted goes on from its finished blocks, to the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

import sparseconv as sc
from sparseconv import nn
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


class Scaled(nn.SparseModule):
    """A layer, a function, and a number that no state_dict has."""

    def __init__(self, scale, function, **layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.function = nn.SubmanifoldConv(4, 4, 3, **layer), function
        self.register_buffer("scale", torch.full((4,), scale), persistent=False)

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        y = self.conv(x)
        return y.with_features(self.function(y.features * self.scale))


def stopped(net, x, folder, **options):
    """A run that ends after its third block."""

    def progress(done: int, total: int) -> None:
        if done == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        sc.stream(net, x, 10**9, resume=folder, progress=progress, **options)


@pytest.mark.parametrize(
    "other",
    [
        lambda: Scaled(3.0, torch.relu),
        lambda: Scaled(2.0, torch.tanh),
        lambda: Scaled(2.0, lambda f: f.relu().clamp(max=0.1)),
        lambda: Scaled(2.0, torch.relu, dilation=2),
    ],
    ids=["a buffer", "a function", "a number", "a dilation"],
)
def test_another_network_of_the_same_weights_is_refused(other, tmp_path, monkeypatch):
    x = scene()
    forced(monkeypatch, 0, 100)
    with torch.no_grad():
        stopped(Scaled(2.0, torch.relu), x, tmp_path)
        with pytest.raises(ValueError, match="differs in steps"):
            sc.stream(other(), x, 10**9, resume=tmp_path)
        want = Scaled(2.0, torch.relu)(x).features
        assert torch.equal(sc.stream(Scaled(2.0, torch.relu), x, 10**9, resume=tmp_path).features, want)


def test_one_row_of_a_scene_that_changed_is_seen(tmp_path, monkeypatch):
    net, x = NETWORKS["conv"]().eval(), scene(count=3000)
    assert len(x.grid) > 2000
    features = x.features.clone()
    features[1, 2] += 1
    forced(monkeypatch, 0, 500)
    with torch.no_grad():
        stopped(net, x, tmp_path)
        for other in (x.with_features(features), scene(count=3500)):
            with pytest.raises(ValueError, match="differs in scene"):
                sc.stream(net, other, 10**9, resume=tmp_path)
        assert torch.equal(sc.stream(net, x, 10**9, resume=tmp_path).features, net(x).features)


@pytest.mark.parametrize("kinds", ["another out", "an emptied out", "out at first", "out at last"])
def test_rows_that_finished_blocks_left_must_be_there(kinds, tmp_path, monkeypatch):
    net, x = NETWORKS["conv"]().eval(), scene()
    first, last = torch.zeros(len(x.grid), 4), torch.zeros(len(x.grid), 4)
    forced(monkeypatch, 0, 100)
    given = {
        "another out": ({"out": first}, {"out": last}),
        "an emptied out": ({"out": first}, {"out": first}),
        "out at first": ({"out": first}, {}),
        "out at last": ({}, {"out": last}),
    }
    before, after = given[kinds]
    with torch.no_grad():
        stopped(net, x, tmp_path, **before)
        kept = first.clone()
        first.zero_()
        with pytest.raises(ValueError, match=r"are missing from out.*opened with mode 'r\+'"):
            sc.stream(net, x, 10**9, resume=tmp_path, **after)
        first.copy_(kept)
        got = sc.stream(net, x, 10**9, resume=tmp_path, **before)
        assert torch.equal(got.features, net(x).features)


def test_two_runs_do_not_write_into_one_folder(tmp_path, monkeypatch):
    net, x = NETWORKS["conv"]().eval(), scene()
    forced(monkeypatch, 0, 100)

    @torch.no_grad()
    def progress(done: int, total: int) -> None:
        if done == 2:
            with pytest.raises(ValueError, match="is used by another run"):
                sc.stream(net, x, 10**9, resume=tmp_path)

    with torch.no_grad():
        got = sc.stream(net, x, 10**9, resume=tmp_path, progress=progress)
        assert torch.equal(got.features, net(x).features)
        assert torch.equal(sc.stream(net, x, 10**9, resume=tmp_path).features, net(x).features)


def files_of_a_run(net, x, folder) -> list[str]:
    """Names of the files of a run that was stopped, one a kind."""

    def progress(done: int, total: int) -> None:
        if list(folder.glob("total.*")):
            raise Interrupted

    with pytest.raises(Interrupted):
        sc.stream(net, x, 10**9, resume=folder, progress=progress)
    kinds = {name.split(".")[0]: name for name in sorted(path.name for path in folder.iterdir())}
    assert {"stream", "done", "rows", "order", "piece", "total", "lock"} <= set(kinds)
    return sorted(kinds.values())


@torch.no_grad()
def test_links_in_the_folder_are_not_followed(tmp_path, monkeypatch):
    net, x = NETWORKS["several"]().eval(), scene()
    forced(monkeypatch, 1, 30)
    victim, seen = tmp_path / "victim", tmp_path / "seen"
    for name in files_of_a_run(net, x, seen):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        victim.write_bytes(b"precious")
        (folder / name).symlink_to(victim)
        if name.endswith(".pt"):  # it is written anew, and takes the link's place
            sc.stream(net, x, 10**9, resume=folder)
        else:
            with pytest.raises(ValueError, match=f"{name} is a link or no regular file"):
                sc.stream(net, x, 10**9, resume=folder)
        assert victim.read_bytes() == b"precious", name
        if name.endswith(".pt"):
            continue
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "nothing")
        with pytest.raises(ValueError, match="is a link or no regular file"):
            sc.stream(net, x, 10**9, resume=folder)
        assert not (tmp_path / "nothing").exists(), name
        (folder / name).unlink()
        os.mkfifo(folder / name)  # nobody writes into it: reading it would wait for ever
        with pytest.raises((ValueError, OSError)):
            sc.stream(net, x, 10**9, resume=folder)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


@torch.no_grad()
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: bytes(b ^ 255 for b in data),
        lambda data: flipped(data, len(data) // 2 if data[:2] == b"PK" else 20),
    ],
    ids=["half", "nothing", "noise", "one byte"],
)
def test_damaged_files_of_a_folder_are_named(damage, tmp_path, monkeypatch):
    net, x = NETWORKS["several"]().eval(), scene()
    forced(monkeypatch, 1, 30)
    want = sc.stream(net, x, 10**9)
    for name in files_of_a_run(net, x, tmp_path / "seen"):
        if name.startswith("lock"):
            continue
        folder = tmp_path / f"of {name}"
        shutil.copytree(tmp_path / "seen", folder)
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(damage(kept))
        if name == "done.txt" and kept.startswith(damage(kept)):  # what is finished and not named is computed again
            got = sc.stream(net, x, 10**9, resume=folder)
            assert torch.equal(got["fine"].features, want["fine"].features)
            continue
        with pytest.raises(ValueError, match=f"({name}|are missing from out).*new folder"):
            sc.stream(net, x, 10**9, resume=folder)


@torch.no_grad()
def test_a_folder_of_files_that_are_missing_or_describe_nothing(tmp_path, monkeypatch):
    net, x = NETWORKS["several"]().eval(), scene()
    forced(monkeypatch, 1, 30)
    files_of_a_run(net, x, tmp_path)
    piece = next(tmp_path.glob("total.*"))
    kept = piece.read_bytes()
    piece.unlink()
    with pytest.raises(ValueError, match=f"{piece.name} cannot be resumed from"):
        sc.stream(net, x, 10**9, resume=tmp_path)
    piece.write_bytes(kept)
    for name, text in (("done.txt", "0.99999 abc\n"), ("done.txt", "nonsense\n"), ("stream.json", "[]")):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} cannot be resumed from"):
            sc.stream(net, x, 10**9, resume=tmp_path)
        (tmp_path / name).write_bytes(kept)
    with pytest.raises(ValueError, match="resume must be a folder"):
        sc.stream(net, x, 10**9, resume=tmp_path / "stream.json")


def test_a_disk_without_room_is_an_error(tmp_path, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with torch.no_grad(), pytest.raises(OSError, match="bytes are needed and 100 are free"):
        sc.stream(NETWORKS["conv"]().eval(), scene(), 10**9, resume=tmp_path)


def test_out_lies_elsewhere_than_the_scene(tmp_path):
    net, x = NETWORKS["conv"]().eval(), scene()
    both = torch.zeros(len(x.grid), 8)
    both[:, :4] = x.features
    np.save(tmp_path / "x.npy", x.features.numpy())
    files = [np.load(tmp_path / "x.npy", mmap_mode=mode) for mode in ("r", "r+")]
    with torch.no_grad():
        assert torch.equal(sc.stream(net, (x.coords, both[:, :4]), 10**9, out=both[:, 4:]), net(x).features)
        with pytest.raises(ValueError, match="out lies in the memory of x"):
            sc.stream(net, (x.coords, both[:, :4]), 10**9, out=both[:, 3:7])
        with pytest.raises(ValueError, match="out is a file of x"):
            sc.stream(net, (x.coords, files[0]), 10**9, out=files[1])


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
