"""Sharding itself: balance, what travels, files, and ranks that disagree or die."""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv.distributed import ShardedConvolutionPlan, load, save, shard
from sparseconv.distributed.agreement import agreed
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


def crumbs(order: str) -> list:
    """Features of fewer voxels than ranks, and of none."""
    found = []
    for count in (0, 1, 2):
        coords = torch.tensor([[0, 5 * k, 0, 0] for k in range(count)]).view(count, 4).int()
        grid, features = sc.VoxelGrid(coords, 2), torch.arange(count).double()[:, None] + 1
        part = mine(grid)
        sharded = shard(grid.subset(part), by=order)
        for reduce in ("first", "sum", "mean"):
            brought = features[part].requires_grad_()
            own = sharded.bring(brought, reduce)
            own.sum().backward()
            values = sharded.gather(own.detach())[1]
            found.append((sum(sharded.counts), sorted(values.flatten().tolist()), bool((brought.grad == 1).all())))
    return found


@pytest.mark.parametrize("order", ["morton", "slab", "kd"])
def test_ranks_without_a_row(order):
    want = [(count, [float(k + 1) for k in range(count)], True) for count in (0, 1, 2) for _ in range(3)]
    assert on_ranks(3, crumbs, order) == [want] * 3


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
    piece = Path(folder) / "piece_1.safetensors"
    whole = piece.read_bytes()
    piece.write_bytes(whole[:100])
    (tmp_path / "nothing").mkdir()
    for said in on_ranks(2, refused, folder, str(tmp_path / "nothing")):
        assert len(said) == 2
        assert all("cannot be loaded" in line for line in said)


def index_with(folder: Path, **changed) -> None:
    index = json.loads((folder / "scene.json").read_text())
    (folder / "scene.json").write_text(json.dumps(index | changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": 9}, "format 9 is not"),
        ({"batch_size": -1}, "batch_size of scene.json is -1"),
        ({"counts": [3, "many"]}, "counts of scene.json"),
        ({"counts": []}, "counts of scene.json"),
        ({"counts": [1, 1]}, "piece_0.safetensors holds"),
        ({"voxel_size": [float("nan")] * 3}, "voxel_size of scene.json"),
        ({"origin": [0.0]}, "origin of scene.json"),
        ({"features": [1, "load"]}, "features of scene.json"),
        ({"features": [1 << 40, "float64"]}, "piece_0.safetensors holds"),
        ({"features": [1, "float32"]}, "piece_0.safetensors holds"),
        ({"features": None}, "piece_0.safetensors holds"),
        ({"sha256": {}}, "piece_0.safetensors is not what was saved"),
        ({"sha256": []}, "sha256 of scene.json"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, changed, words):
    folder = tmp_path / "scene"
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        write_then_read(str(folder))
        index_with(folder, **changed)
        with pytest.raises(ValueError, match=f"cannot be loaded: .*{words}"):
            load(folder)
        (folder / "scene.json").write_bytes(b"\xff{")
        with pytest.raises(ValueError, match="cannot be loaded"):
            load(folder)
        (folder / "scene.json").unlink()
        with pytest.raises(ValueError, match="saving was cut short"):
            load(folder)
    finally:
        dist.destroy_process_group()


def changed_pieces(folder: str) -> list[str]:
    """What a load says of a scene after a bit of a piece was turned, and after two pieces became one and the same."""
    said = []
    path = Path(folder)
    piece = path / "piece_1.safetensors"
    whole = piece.read_bytes()
    changes = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (3, len(whole) // 2, len(whole) - 1)]
    changes += [whole[:100], b"", (path / "piece_0.safetensors").read_bytes()]
    dist.barrier()
    for change in changes:
        if dist.get_rank() == 0:
            piece.write_bytes(change)
        dist.barrier()
        said += refused(folder)
        dist.barrier()
    if dist.get_rank() == 0:
        piece.unlink()
    dist.barrier()
    return said + refused(folder)


def test_a_changed_piece_is_an_error_on_every_rank(tmp_path):
    folder = str(tmp_path / "scene")
    on_ranks(2, write_then_read, folder)
    results = on_ranks(2, changed_pieces, folder)
    assert results[0] == results[1]
    assert all("piece_1.safetensors is not what was saved: its checksum differs" in line for line in results[0][:-1])
    assert "piece_1.safetensors is missing" in results[0][-1]


def test_a_piece_twice_is_an_error(tmp_path):
    folder = tmp_path / "scene"
    on_ranks(2, write_then_read, str(folder))
    index = json.loads((folder / "scene.json").read_text())
    (folder / "piece_1.safetensors").write_bytes((folder / "piece_0.safetensors").read_bytes())
    sums = dict.fromkeys(index["sha256"], index["sha256"]["piece_0.safetensors"])
    index_with(folder, counts=[index["counts"][0]] * 2, sha256=sums)
    assert all("voxels lie in two pieces" in line for said in on_ranks(2, refused, str(folder)) for line in said)


class Silent(Exception):
    pass


def one_rank_errs() -> list[str]:
    """What each rank hears where one of two asks for what cannot be."""
    grid, features = scene()
    part = mine(grid)
    odd = dist.get_rank() == 1
    sharded = shard(grid.subset(part))
    plan = ShardedConvolutionPlan(sharded, 3)
    x, w = torch.ones(len(sharded), 2), torch.ones(27, 2, 2)
    learning = x.clone().requires_grad_()
    twice = torch.zeros(2, 4, dtype=torch.int32)
    plan.execute(x, w)  # a kind of call that the ranks know

    def silent():
        if odd:
            raise Silent
        return None, {}

    calls = {
        "a bias on one rank": lambda: plan.execute(x, w, torch.ones(2) if odd else None),
        "a gradient on one rank": lambda: plan.execute(learning if odd else x, w),
        "rows": lambda: plan.execute(x[1:] if odd else x, w),
        "weight": lambda: plan.execute(x, w[:, :1] if odd else w),
        "residual": lambda: plan.execute(x, w, residual=x[1:] if odd else x),
        "localize": lambda: plan.localize(x[1:] if odd else x),
        "a voxel twice": lambda: shard(twice if odd else twice[:1], batch_size=1),
        "order": lambda: shard(grid.subset(part), by="slab" if odd else "nonsense"),
        "kernel": lambda: ShardedConvolutionPlan(sharded, 0 if odd else 3),
        "target": lambda: ShardedConvolutionPlan(sharded, 3, target="fu" if odd else "full"),
        "mask": lambda: sharded.subset(torch.ones(2 if odd else len(sharded), dtype=torch.bool)),
        "bring": lambda: sharded.bring(features[:2] if odd else features[part]),
        "gather": lambda: sharded.gather(x[1:] if odd else x),
        "gather's dtype": lambda: sharded.gather(x.double() if odd else x),
        "fewer items than there are": lambda: shard(grid.subset(part), batch_size=1 if odd else 3),
        "no mask": lambda: sharded.subset([True] if odd else torch.ones(len(sharded), dtype=torch.bool)),
        "no tensor": lambda: plan.execute(x.tolist() if odd else x, w),
        "save": lambda: save("nowhere", sharded, x[1:] if odd else x),
        "an error without words": lambda: agreed(silent, None),
    }
    said = []
    for name, call in calls.items():
        begin = time.monotonic()
        try:
            call()
            said.append(f"{name}: no error")
        except (ValueError, TypeError) as error:
            said.append(f"{name}: {error}")
        assert time.monotonic() - begin < ranks.TIMEOUT.total_seconds() / 2
    plan.execute(learning, w.requires_grad_(), torch.ones(2, requires_grad=True)).sum().backward()
    assert learning.grad is not None
    return said


def test_what_one_rank_asks_wrongly_reaches_all_at_once():
    first, second = on_ranks(2, one_rank_errs)
    assert first == second
    for line in first:
        assert "no error" not in line
        assert "rank" in line
    assert "the ranks disagree in the operands of execute" in first[0]
    assert "rank 1: Silent" in first[-1]


def forbidding() -> list[int]:
    """A boundary that takes voxels from one rank's share alone."""
    coords = torch.tensor([[0, i, j] for i in range(12) for j in range(12)])
    sharded = shard(coords if dist.get_rank() == 0 else coords[:0], by="slab", batch_size=1)
    plan = ShardedConvolutionPlan(sharded, (3, 1), boundary=sc.Boundary.forbid((40, 12)))
    return list(plan.target.counts)


def test_voxels_that_one_rank_loses_hold_nobody_up():
    counts, same, _ = on_ranks(3, forbidding)
    assert counts == same
    assert sum(counts) == 11 * 12


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


def one_is_killed(folder: str, delay: float) -> None:
    """Scenes sharded, convolved, saved and read again without end, until rank 1 is killed somewhere."""
    if dist.get_rank() == 1:
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.start()
    grid, features = scene()
    part = mine(grid)
    end = time.monotonic() + delay + 3 * ranks.TIMEOUT.total_seconds()
    for turn in range(1 << 30):
        if time.monotonic() > end:
            return
        sharded = shard(grid.subset(part), by=("morton", "slab", "kd")[turn % 3])
        x = sharded.bring(features[part]).requires_grad_()
        plan = ShardedConvolutionPlan(sharded, 3, stride=1 + turn % 2)
        plan.execute(x, torch.ones(27, 1, 2, dtype=torch.float64, requires_grad=True)).sum().backward()
        save(f"{folder}/{turn % 4}", sharded, x)
        load(f"{folder}/{turn % 4}")


def killed_at(folder: Path, seed: int, monkeypatch) -> None:
    timeout = 10.0
    monkeypatch.setattr(ranks, "TIMEOUT", datetime.timedelta(seconds=timeout))
    delay = random.Random(seed).uniform(0.05, 2.5)
    begin = time.monotonic()
    with pytest.raises(Exception, match=r"SIGKILL|terminated|exited"):
        on_ranks(3, one_is_killed, str(folder), delay)
    # a machine may be busy: processes start before and end after
    assert time.monotonic() - begin < delay + timeout + 60


@pytest.mark.parametrize("seed", range(2))
def test_a_rank_killed_anywhere_holds_nobody_over_the_timeout(tmp_path, seed, monkeypatch):
    killed_at(tmp_path, seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_a_rank_killed_at_twenty_points(tmp_path, seed, monkeypatch):
    killed_at(tmp_path, seed, monkeypatch)


def test_without_a_process_group_the_error_says_what_to_start():
    with pytest.raises(ValueError, match="torchrun"):
        shard(scene()[0])


#: dtypes that features may have, with numbers that all of them hold
DTYPES = [
    *(
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.complex128,
    ),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


def every_dtype(folder: str) -> list[str]:
    """Features of each dtype, brought, gathered, saved and loaded; what is not what plain Python says."""
    grid, _ = scene(60, 9)
    wrong = []
    sharded = shard(grid)  # every rank gives all of the scene
    rows = grid.lookup(sharded.coords)
    world = dist.get_world_size()
    for dtype in DTYPES:
        values = (torch.arange(len(grid)) % 2)[:, None].expand(len(grid), 3).to(dtype)
        wide = values.to(torch.complex128)[rows]
        for reduce, times in (("first", 1), ("sum", world), ("mean", 1)):
            if not torch.equal(sharded.bring(values, reduce).to(torch.complex128), times * wide):
                wrong.append(f"{dtype} {reduce}")
        own = sharded.bring(values)
        own = own.conj() if own.is_complex() else own
        whole, gathered = sharded.gather(own)
        if gathered.dtype != dtype or not torch.equal(
            gathered.to(torch.complex128), values.to(torch.complex128)[grid.lookup(whole.coords)]
        ):
            wrong.append(f"{dtype} gather")
        save(f"{folder}/{dtype}", sharded, own)
        loaded, found = load(f"{folder}/{dtype}")
        if found.dtype != dtype or not torch.equal(
            found.to(torch.complex128), values.to(torch.complex128)[grid.lookup(loaded.coords)]
        ):
            wrong.append(f"{dtype} load")
    crowd = torch.full((len(grid), 1), 200, dtype=torch.uint8)
    if sharded.bring(crowd, "sum").max() != 200 * world:
        wrong.append("sums of bytes wrap")
    return wrong


def test_features_of_every_dtype_travel(tmp_path):
    assert on_ranks(2, every_dtype, str(tmp_path)) == [[], []]


def brought_twice() -> list[bool]:
    grid, _ = scene(40, 9)
    sharded = shard(grid)
    torch.manual_seed(0)
    x = torch.randn(len(grid), 2, dtype=torch.float64, requires_grad=True)
    checks = []
    for reduce, share in (("first", None), ("sum", 1.0), ("mean", 0.5)):
        y = sharded.bring(x, reduce)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        if share is not None:  # y = share (x0 + x1), x the same on both ranks: of each rank's own term
            own = 2 * share * share * 2 * x.detach()
            checks += [torch.allclose(grad, own), second.isfinite().all().item()]
    return checks


def test_brought_features_have_second_derivatives():
    assert on_ranks(2, brought_twice) == [[True] * 4] * 2


def given_anew(folder: str) -> list:
    grid = sc.VoxelGrid(torch.tensor([[0, 3], [0, 7], [0, 9]]))
    placed = sc.VoxelGrid(grid.coords, 1, 0.5, 2.0)
    found = []
    for one in (shard(grid), shard(grid, voxel_size=0.1), shard(placed), shard(placed, origin=1.0, batch_size=4)):
        save(folder, one)
        back, _ = load(folder)
        found.append([(g.voxel_size, g.origin, g.batch_size, g.is_placed) for g in (one, back)])
    return found


def test_what_shard_is_given_comes_before_the_grids_own(tmp_path):
    plain = ((1.0,), (0.0,), 1, False)
    sized, placed, moved = ((0.1,), (0.0,), 1, True), ((0.5,), (2.0,), 1, True), ((0.5,), (1.0,), 4, True)
    want = [[one, one] for one in (plain, sized, placed, moved)]
    assert on_ranks(2, given_anew, str(tmp_path)) == [want, want]
