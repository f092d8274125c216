"""The budget is kept: measured where the system counts, with an error in words where it cannot be."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.streaming import run
from tests.streaming.scenes import NETWORKS, scene

LIMITED = """
import resource, sys, numpy as np, torch, sparseconv as sc
from sparseconv import nn
torch.set_num_threads(1)
folder, budget = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
net = nn.Sequential(nn.SubmanifoldConv(256, 16, 3), nn.ReLU(), nn.SubmanifoldConv(16, 8, 3)).eval()
coords, features = (np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in ("coords", "features"))
out = np.lib.format.open_memmap(f"{folder}/out.npy", "r+")
with torch.no_grad():
    sc.stream(net, (coords[:100], features[:100]), budget)  # what is loaded and compiled once
    now = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + budget, now + budget))
    sc.stream(net, (coords, features), budget, resume=f"{folder}/run", out=out)
    print("streamed")
    try:
        grid = sc.VoxelGrid(torch.from_numpy(coords[:]))
        net(sc.SparseTensor(grid, torch.from_numpy(features)))
        print("the whole fits")
    except (RuntimeError, MemoryError):
        print("the whole does not fit")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's own memory is Linux's")
def test_a_scene_of_ten_times_the_memory_that_is_allowed(tmp_path):
    """The file of the features alone is ten times the budget; mapped files are not a process's own memory."""
    torch.manual_seed(0)
    a, b = torch.meshgrid(torch.arange(400), torch.arange(500), indexing="ij")
    height = (20 * torch.sin(a / 30) + 15 * torch.cos(b / 40)).long()
    coords = torch.stack([torch.zeros_like(a), a, b, height], -1).view(-1, 4).int()
    coords = coords[torch.randperm(len(coords))]
    features = torch.randn(len(coords), 256)
    budget = features.nbytes // 10
    np.save(tmp_path / "coords.npy", coords.numpy())
    np.save(tmp_path / "features.npy", features.numpy())
    np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float32, (len(coords), 8))
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(budget)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.stdout.split("\n")[:2] == ["streamed", "the whole does not fit"], done.stderr[-2000:]
    torch.manual_seed(0)
    net = nn.Sequential(nn.SubmanifoldConv(256, 16, 3), nn.ReLU(), nn.SubmanifoldConv(16, 8, 3)).eval()
    with torch.no_grad():
        want = net(sc.SparseTensor(sc.VoxelGrid(coords), features)).features
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "out.npy")), want)


def test_a_budget_that_is_too_small_says_the_least():
    net, x = NETWORKS["unet"]().eval(), scene(count=600)
    with torch.no_grad():
        with pytest.raises(ValueError, match="allow at least that") as caught:
            sc.stream(net, x, 20_000)
        found = re.search(r"takes about ([\d,]+)", str(caught.value))
        assert found is not None
        assert int(found[1].replace(",", "")) > 20_000
    with pytest.raises(TypeError, match="budget_bytes must be an integer"):
        sc.stream(net, x, 1e9)
    with pytest.raises(ValueError, match="budget_bytes must be at least 1"):
        sc.stream(net, x, 0)


@pytest.mark.parametrize("name", ["conv", "several", "pruned"])
@pytest.mark.parametrize("learns", [False, True], ids=["inference", "training"])
def test_a_budget_for_no_block_is_refused_before_blocks_are_cut(name, learns, monkeypatch):
    """And no budget is refused that would do: one byte less than the least is too little for the run itself."""
    net, x = NETWORKS[name]().train(learns), scene(count=150)
    with torch.set_grad_enabled(learns):
        with monkeypatch.context() as patched:
            patched.setattr(run, "Blocks", lambda *_: pytest.fail("blocks were cut"))
            with pytest.raises(ValueError, match="allow at least that") as caught:
                sc.stream(net, x, 100)
            assert "budget_bytes is 100, but the smallest block" in str(caught.value)
            with pytest.raises(ValueError, match="allow at least that"):
                sc.stream(net, (x.coords.numpy(), x.features), 1)
        least = int(re.search(r"takes about ([\d,]+)", str(caught.value))[1].replace(",", ""))
        monkeypatch.setattr(run, "smallest", lambda *_: (0, 0))
        with pytest.raises(ValueError, match="allow at least that"):
            sc.stream(net, x, least - 1)
