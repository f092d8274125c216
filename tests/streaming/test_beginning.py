"""What a run does before its first block: few leaves, few cuts, and little looking at leaves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.streaming import cells, run
from sparseconv.streaming.blocks import Blocks
from sparseconv.streaming.device.peak import Peak
from sparseconv.streaming.device.pipeline import place
from sparseconv.streaming.store import Store
from sparseconv.trace.boxes import within


def shell(side: int) -> torch.Tensor:
    """Coordinates of a wavy surface, shuffled."""
    a, b = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    height = (40 * torch.sin(a / 60) + 30 * torch.cos(b / 80)).long()
    coords = torch.stack([torch.zeros_like(a), a, b, height], -1).view(-1, 4).int()
    return coords[torch.randperm(len(coords), generator=torch.Generator().manual_seed(0))]


@pytest.fixture
def calls(monkeypatch):
    """How often the work on blocks was done, by its name."""
    found: dict[str, int] = {}

    def counting(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            found[name] = found.get(name, 0) + 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    for name in ("_cut", "_coords", "most_in", "rows_in"):
        counting(Blocks, name)
    counting(cells, "halve")
    return found


@pytest.mark.parametrize("budget", [60_000_000, 10_000_000_000])
def test_work_before_the_first_block(budget, calls, monkeypatch):
    class Begun(Exception):
        """All is planned."""

    made: list[run.Run] = []

    def begun(self: run.Run) -> None:
        made.append(self)
        raise Begun

    monkeypatch.setattr(run.Run, "run", begun)
    torch.manual_seed(0)
    coords, net = shell(500), nn.UNet(4, 20, channels=(8, 16, 32)).eval()
    with torch.no_grad(), pytest.raises(Begun):
        sc.stream(net, (coords, torch.randn(len(coords), 4)), budget, batch_size=1)
    blocks, plans = made[0].blocks, made[0].plans
    leaves, planned = len(blocks.leaves), sum(map(len, plans))
    assert (planned > len(plans)) == (budget < 10**9)
    assert leaves <= 1024 + 4 * run.FINE * max(map(len, plans)), (leaves, planned)
    assert calls["_cut"] <= 3 * leaves
    assert calls["halve"] <= 5 * leaves
    # both passes over the scene, and another over what was cut anew
    assert calls["_coords"] <= 4 * -(-len(coords) // blocks.piece) + 2 * calls["_cut"]
    assert calls["most_in"] <= 40 * len(plans) + 40 * planned, (calls, planned)


@pytest.mark.parametrize("piece", [300, 10**6])
@pytest.mark.parametrize("spare", [0, 10**9])
@pytest.mark.parametrize("limits", [(20_000,), (20_000, 500), (500, 20_000), (1,)])
def test_rows_in_boxes(piece, spare, limits):
    """Against a look at every voxel; no leaf is larger than the smallest limit, and each row is in one."""
    coords = shell(60)
    space = sc.VoxelGrid(coords, 1).extent
    extent = sc.IndexRange((0, *space.start), (1, *space.end))
    blocks = Blocks(coords, extent, limits[0], Store(None), piece, torch.device("cpu"), spare)
    for limit in limits[1:]:
        blocks.refine(limit)
    assert max(leaf.size for leaf in blocks.leaves) <= min(limits)
    assert torch.equal(blocks.order.sort().values.long(), torch.arange(len(coords)))
    for leaf in blocks.leaves:
        rows = blocks.order[leaf.first : leaf.last].long()
        assert within(coords[rows], leaf.box).all()
        assert (rows.diff() > 0).all()
    generator = np.random.default_rng(0)
    boxes = [leaf.box for leaf in blocks.leaves[:: max(1, len(blocks.leaves) // 10)]] + [blocks.root.box]
    for _ in range(20):
        low = generator.integers(-70, 70, 3).tolist()
        boxes.append(
            sc.IndexRange((0, *low), (1, *(a + n for a, n in zip(low, generator.integers(0, 60, 3).tolist()))))
        )
    for box in boxes:
        found = blocks.rows_in(box)
        rows, block = found.rows, blocks.at(box)
        own = found.place_of(block)
        if block is not None and block.size:
            assert own is not None
            assert torch.equal(rows[own], blocks.order[block.first : block.last].long())
        want = within(coords, box).nonzero().flatten()
        assert torch.equal(rows.sort().values, want)
        assert len(want) <= blocks.most_in(box) <= len(coords)


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((1, 15_000, 15_000, 140), [0, 6, 6, 6]),
        ((8, 64, 64, 64), [0, 1, 1, 1]),
        ((1, 10**6, 1, 1), [0, 2, 0, 0]),
        ((10**6, 2, 2, 1), [4, 0, 0, 0]),
    ],
)
def test_cells_are_as_near_cubes_as_may_be(shape, want):
    box = sc.IndexRange.of_shape(shape)
    shifts = cells.shifts_for(box, 2**18)
    assert shifts == want
    assert math.prod(-(-n >> s) if s else n for n, s in zip(shape, shifts)) <= 2**18


def test_a_peak_is_read_without_a_reset(monkeypatch):
    """A peak that grew is the answer; below an older one, what marks have seen."""
    now, highest = [100], [500]

    def stats(device: Any = None) -> Any:
        return {"allocated_bytes": {"all": {"current": now[0], "peak": highest[0]}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: pytest.fail("a user's statistics"))
    peak = Peak(torch.device("cuda"))
    peak.begin()
    for at in (300, 200):
        now[0] = at
        peak.mark()
    assert peak.most() == 300
    peak.begin()
    assert peak.most() == 200
    highest[0] = 900
    assert peak.most() == 900
    assert Peak(torch.device("cpu")).most() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (0,), (1,)])
def test_rows_are_put_in_their_places_as_bytes(dtype, shape):
    into = torch.randint(-100, 100, (50, *shape)).to(dtype)
    rows, want = torch.randperm(50)[:20], into.clone()
    values = torch.randint(-100, 100, (20, *shape)).to(dtype)
    want[rows] = values
    place(into, rows, values)
    assert torch.equal(into, want)
    place(into, rows[:0], values[:0])
    assert torch.equal(into, want)
