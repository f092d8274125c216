"""Sharding itself: balance, what travels, files, and ranks that disagree or die."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv.distributed import ShardedConvolutionPlan, load, save, shard
from tests import ranks
from tests.ranks import on_ranks


def scene(n: int = 500, extent: int = 40) -> tuple[sc.VoxelGrid, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    coords = torch.unique(torch.randint(-extent, extent, (n, 3), generator=gen), dim=0)
    grid = sc.VoxelGrid(torch.cat([torch.arange(len(coords))[:, None] % 2, coords], 1), 3)
    return grid, torch.arange(len(grid)).double()[:, None]


def mine(grid: sc.VoxelGrid) -> torch.Tensor:
    return torch.arange(len(grid)) % dist.get_world_size() == dist.get_rank()


def shares(order: str) -> tuple:
    grid, features = scene()
    part = mine(grid)
    sharded = shard(grid.subset(part), by=order)
    brought = sharded.bring(features[part])
    whole, values = sharded.gather(brought)
    rows = grid.lookup(whole.coords)
    crowd = shard(sc.VoxelGrid(torch.tensor([[0, 0, 0, 0]]), 1), by=order)  # all ranks hold one and the same voxel
    sums = crowd.bring(torch.ones(1, 1), "sum")
    return sharded.counts, torch.equal(values[:, 0].long(), rows), len(whole), crowd.counts, sums.tolist()


@pytest.mark.parametrize("order", ["morton", "slab", "kd"])
def test_shares_are_even_and_features_follow(order):
    total = len(scene()[0])
    for counts, follows, whole, crowd, _ in (results := on_ranks(3, shares, order)):
        assert follows
        assert whole == sum(counts) == total
        assert max(counts) - min(counts) <= (2 if order != "kd" else 60)
        assert sum(crowd) == 1
    assert [s for *_, sums in results for s in sums] == [[3.0]]


def write_then_read(folder: str) -> list:
    grid, features = scene()
    part = mine(grid)
    sharded = shard(grid.subset(part))
    save(folder, sharded, sharded.bring(features[part]))
    return list(sharded.counts)


def read(folder: str) -> tuple:
    grid, features = scene()
    sharded, values = load(folder, by="kd")
    rows = grid.lookup(sharded.coords)
    return len(sharded), torch.equal(values, features[rows]), sharded.batch_size


def refused(*folders: str) -> list[str]:
    said = []
    for folder in folders:
        try:
            load(folder)
            said.append("loaded")
        except ValueError as error:
            said.append(str(error))
    return said


def test_files_are_read_by_any_number_of_ranks_and_torn_ones_refused(tmp_path):
    folder = str(tmp_path / "scene")
    total = sum(on_ranks(3, write_then_read, folder)[0])
    for world in (2, 4):
        results = on_ranks(world, read, folder)
        assert sum(n for n, _, _ in results) == total
        assert all(equal and batch == 3 for _, equal, batch in results)
    piece = next(Path(folder).glob("__1_*.distcp"))
    piece.write_bytes(piece.read_bytes()[:100])
    (tmp_path / "nothing").mkdir()
    for said in on_ranks(2, refused, folder, str(tmp_path / "nothing")):
        assert len(said) == 2
        assert all("cannot be loaded" in line for line in said)


def disagree(what: str) -> str:
    grid, _ = scene()
    odd = dist.get_rank() == 1
    sharded = shard(grid.subset(mine(grid)))
    try:
        if what == "kernel":
            ShardedConvolutionPlan(sharded, 5 if odd else 3)
        elif what == "grid":
            ShardedConvolutionPlan(shard(grid.subset(mine(grid)), by="kd") if odd else sharded, 3)
        else:
            plan = ShardedConvolutionPlan(sharded, 3)
            dtype, channels = (torch.float64, 2) if what == "dtype" and odd else (torch.float32, 3 if odd else 2)
            if what == "dtype":
                channels = 2
            plan.execute(torch.ones(len(sharded), channels, dtype=dtype), torch.ones(27, channels, 2, dtype=dtype))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["kernel", "dtype", "channels"])
def test_ranks_that_disagree_hear_of_it(what):
    for said in on_ranks(2, disagree, what):
        assert "the ranks disagree" in said
        assert "rank 1" in said


def one_dies() -> str:
    grid, _ = scene()
    sharded = shard(grid.subset(mine(grid)))
    plan = ShardedConvolutionPlan(sharded, 3)
    if dist.get_rank() == 2:
        os._exit(7)
    try:
        for _ in range(3):
            plan.execute(torch.ones(len(sharded), 2), torch.ones(27, 2, 2))
    except RuntimeError as error:
        return f"ended: {error}"[:60]
    return "went on"


def test_a_rank_that_dies_ends_the_others(monkeypatch):
    monkeypatch.setattr(ranks, "TIMEOUT", datetime.timedelta(seconds=20))
    with pytest.raises(Exception, match=r"exit code 7|terminated|exited"):
        on_ranks(3, one_dies)


def test_without_a_process_group_the_error_says_what_to_start():
    with pytest.raises(RuntimeError, match="torchrun"):
        shard(scene()[0])
