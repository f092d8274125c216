"""Several ranks stream one scene: the bytes of one rank's run, gradients of the whole, errors that reach everybody."""

from __future__ import annotations

import copy
import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv import nn
from sparseconv.streaming.ranks import shared_out
from sparseconv.streaming.work import Work
from tests.ranks import START, TIMEOUT, on_ranks
from tests.streaming.scenes import NETWORKS, Squeeze, forced, scene
from tests.streaming.test_totals import NORMS, block
from tests.streaming.test_training import loss

WORLD = 2


def bits(value: Any) -> Any:
    """Everything of a result that must be equal, as plain arrays."""
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items()}
    if isinstance(value, sc.SparseTensor):
        return [value.coords.numpy().copy(), value.features.detach().numpy().copy()]
    return value.detach().numpy().copy()


def differing(got: Any, want: Any, name: str) -> list[str]:
    if isinstance(want, dict):
        return [line for key in want for line in differing(got[key], want[key], f"{name} {key}")]
    if isinstance(want, list):
        return [line for at, pair in enumerate(zip(got, want)) for line in differing(*pair, f"{name} {at}")]
    return [] if np.array_equal(got, want) else [f"{name} differs on rank {dist.get_rank()}"]


KINDS = {
    **{name: NETWORKS[name] for name in ("unet", "several", "pruned", "resnet")},
    "squeeze": lambda: nn.Sequential(nn.SubmanifoldConv(4, 8, 3), Squeeze(8), nn.SubmanifoldConv(8, 3, 3)),
    **{f"{name} norm": (lambda norm=norm: block(norm)) for name, norm in NORMS.items() if name != "momentless"},
}


def inference(names: list[str], cuts: int) -> list[str]:
    """Results and running statistics beside those of this rank's own run without the others; what differs."""
    wrong = []
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        forced(patched, cuts, 100)
        for name in names:
            torch.manual_seed(0)
            net, x, computed = KINDS[name](), scene(count=300), [0]
            other, original = copy.deepcopy(net), Work.run
            want = bits(sc.stream(other, x, 10**9))
            patched.setattr(Work, "run", lambda *args, c=computed, f=original: (c.__setitem__(0, c[0] + 1), f(*args)))
            seen: list[tuple[int, int]] = []
            got = sc.stream(net, x, 10**9, group=dist.group.WORLD, progress=lambda *at, to=seen: to.append(at))
            patched.setattr(Work, "run", original)
            wrong += differing(bits(got), want, name)
            wrong += [f"{name} {k}" for k, v in net.state_dict().items() if not torch.equal(v, other.state_dict()[k])]
            mine = [0] * WORLD
            dist.all_gather_object(mine, computed[0])
            if not all(mine) or seen[-1] != (len(seen), len(seen)):
                wrong.append(f"{name}: ranks compute {mine} blocks; {seen[-1]} of {len(seen)}")
    return wrong


@pytest.mark.parametrize("cuts", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_results_have_the_bytes_of_one_rank(cuts):
    """Rows on the scene's voxels and others, and totals of all rows: their parts are joined in the order of blocks."""
    assert not [line for lines in on_ranks(WORLD, inference, list(KINDS), cuts) for line in lines]


def parts(names: list[str], cuts: int) -> list[str]:
    """What each rank computed, put together, beside the whole; what differs."""
    wrong = []
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        forced(patched, cuts, 100)
        for name in names:
            torch.manual_seed(0)
            net, x = KINDS[name]().eval(), scene(count=300)
            want = sc.stream(net, x, 10**9)
            got = sc.stream(net, x, 10**9, group=dist.group.WORLD, gather=False)
            pairs = [(got[key], want[key]) for key in want] if isinstance(want, dict) else [(got, want)]
            for at, (mine, whole) in enumerate(pairs):
                everybody: list[Any] = [None] * WORLD
                dist.all_gather_object(everybody, mine)
                rows = whole.features if isinstance(whole, sc.SparseTensor) else whole
                if isinstance(mine, sc.streaming.Part):
                    of = torch.cat([part.rows for part in everybody])
                    good = torch.equal(of.sort().values, torch.arange(len(x.grid)))
                    good &= torch.equal(torch.cat([part.features for part in everybody]), rows[of])
                elif isinstance(mine, sc.SparseTensor):
                    where = whole.grid.lookup(torch.cat([part.coords for part in everybody]))
                    good = torch.equal(where.sort().values, torch.arange(len(whole.grid)))
                    good &= torch.equal(torch.cat([part.features for part in everybody]), rows[where])
                else:
                    good = torch.equal(mine, rows)
                wrong += [] if good else [f"{name} {at}"]
    return wrong


@pytest.mark.parametrize("cuts", [0, 2])
def test_parts_of_all_ranks_are_the_whole(cuts):
    names = ["unet", "several", "pruned", "resnet", "squeeze"]
    assert not [line for lines in on_ranks(WORLD, parts, names, cuts) for line in lines]


def training(names: list[str], dtype: torch.dtype, exact: bool) -> list[str]:
    """Gradients beside those of one rank's run, and over the ranks."""
    wrong = []
    with pytest.MonkeyPatch.context() as patched:
        for name, cuts in ((name, cuts) for name in names for cuts in (0, 2)):
            forced(patched, cuts, 50)
            torch.manual_seed(0)
            net, x = KINDS[name]().to(dtype), scene(count=120, dtype=dtype)
            if exact:
                x = x.with_features(x.features.round())
                for parameter in net.parameters():
                    parameter.data = torch.randint(-1, 2, parameter.shape).to(dtype)
            found = []
            for group in (None, dist.group.WORLD):
                one, features = copy.deepcopy(net), x.features.clone().requires_grad_()
                y = sc.stream(one, x.with_features(features), 10**9, group=group)
                value = (y.features * 3).sum() if exact else loss(y)
                again = torch.autograd.grad(value, [features, *one.parameters()], retain_graph=True)
                value.backward()
                grads = [features.grad, *(p.grad for p in one.parameters())]
                wrong += [f"{name}: second pass {at}" for at, pair in enumerate(zip(grads, again)) if not equal(*pair)]
                found.append((value.detach(), grads))
            (value, want), (other, got) = found
            if not torch.equal(value, other):
                wrong.append(f"{name}: loss")
            for at, (a, b) in enumerate(zip(got, want)):
                close = equal(a, b) if exact else torch.allclose(a, b, rtol=1e-9, atol=1e-10)
                everybody: list[Any] = [None] * WORLD
                dist.all_gather_object(everybody, a.numpy().tobytes())
                if not close or len(set(everybody)) > 1:
                    wrong.append(f"{name} {cuts} gradient {at}: {float((a - b).abs().max()):.2g}")
    return wrong


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b)


@pytest.mark.slow
def test_gradients_are_those_of_one_rank_and_equal_on_all():
    names = ["unet", "squeeze", "batch norm"]
    assert not [line for lines in on_ranks(WORLD, training, names, torch.float64, False) for line in lines]


def test_gradients_of_whole_numbers_are_exact():
    """Sums over ranks take another order than over blocks of one: no difference where nothing is rounded."""
    KINDS["whole"] = NETWORKS["conv"]
    assert not [line for lines in on_ranks(WORLD, exactly) for line in lines]


def exactly() -> list[str]:
    KINDS["whole"] = lambda: nn.Sequential(nn.SubmanifoldConv(4, 6, 3), nn.Conv(6, 4, 2, stride=2), nn.AvgPool(1))
    return training(["whole"], torch.float64, True)


def raised(work: Any) -> str:
    try:
        with torch.no_grad():
            work()
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def disagreements(folder: str) -> list[str]:
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    net, x = NETWORKS["conv"]().eval(), scene(count=100)
    other = copy.deepcopy(net)
    if rank:
        with torch.no_grad():
            other[0].weight.add_(1)
    moved = x.with_features(x.features + rank)
    file = np.lib.format.open_memmap(f"{folder}/{rank}.npy", "w+", np.float32, (len(x.grid), 4))

    def never(done: int, total: int) -> None:
        raise AssertionError("a block was run")

    def last(done: int, total: int) -> None:
        raise KeyError("the disk is full")

    return [
        raised(lambda: sc.stream(net, x, 10**9 + rank, group=group, progress=never)),
        raised(lambda: sc.stream(other, x, 10**9, group=group, progress=never)),
        raised(lambda: sc.stream(net, moved, 10**9, group=group, progress=never)),
        raised(lambda: sc.stream(net, x, 10**9, group=group, progress=never, out=torch.empty(len(x.grid), 4))),
        raised(lambda: sc.stream(net, x, 10**9, group=group, progress=never, out=file)),
        raised(lambda: sc.stream(net, x, 10**9, group=group, progress=never, resume=f"{folder}/{rank}")),
        raised(lambda: sc.stream(net, x, 10**9, group=group, resume=f"{folder}/{'1.npy' if rank else 'run'}")),
        raised(lambda: sc.stream(net, x, -rank or 10**9, group=group, progress=never)),
        raised(lambda: sc.stream(net, x, 10**9, group=group, progress=last)),  # the one block is rank 0's
    ]


def test_ranks_that_disagree_hear_so_before_a_block_is_run(tmp_path):
    first, second = on_ranks(WORLD, disagreements, str(tmp_path))
    words = [
        "ValueError: the ranks disagree in budget_bytes: rank 0: 1000000000, rank 1: 1000000001",
        "ValueError: the ranks disagree in network",
        "ValueError: the ranks disagree in scene",
        "ValueError: of several ranks, out is one file that all map",
        "ValueError: the ranks disagree in the file of out",
        "is not the folder that rank 0 sees: give resume= one that all ranks see",
        "ValueError: rank 1: resume must be a folder",
        "ValueError: rank 1: budget_bytes must be at least 1",
    ]
    for at, text in enumerate(words):
        assert text in first[at], first[at]
        assert text in second[at], second[at]
    assert first[-1] == "KeyError: 'the disk is full'"
    assert second[-1] == "RuntimeError: rank 0: KeyError: 'the disk is full'"


def _streams(rank: int, port: int, folder: str, kill: int) -> None:
    """One rank of a run from files into one; rank ``kill % 2`` dies at its block number ``kill // 4``: where it is
    kept, or as it is computed, the one before being on its way into files."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=TIMEOUT)
    torch.manual_seed(0)
    net = NETWORKS["unet"]().eval()
    coords, features = (np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in ("coords", "features"))
    out, left, original = np.load(f"{folder}/out.npy", mmap_mode="r+"), [kill // 4], Work.run

    def maybe_dies(at: int) -> None:
        if kill >= 0 and rank == kill % WORLD and at == kill // WORLD % 2:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        forced(patched, 3, 40)
        patched.setattr(Work, "run", lambda *args: (maybe_dies(0), original(*args)))
        made = {"resume": f"{folder}/run", "out": out, "group": dist.group.WORLD}
        sc.stream(net, (coords, features), 10**9, progress=lambda *_: maybe_dies(1), **made)


def run_once(folder: Path, kill: int) -> list[int | None]:
    """Exit codes of the ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = torch.multiprocessing.get_context(START)
    ranks = [context.Process(target=_streams, args=(rank, port, str(folder), kill)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("deaths", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_rank_dies_and_all_go_on_to_the_same_bytes(deaths, tmp_path, monkeypatch):
    torch.manual_seed(0)
    net, x, draw = NETWORKS["unet"]().eval(), scene(count=900), np.random.default_rng(0)
    np.save(tmp_path / "coords.npy", x.coords.numpy())
    np.save(tmp_path / "features.npy", x.features.numpy())
    np.save(tmp_path / "out.npy", np.full((len(x.grid), 5), np.nan, np.float32))
    for _ in range(deaths):
        kill = int(draw.integers(0, 4 * WORLD))
        codes = run_once(tmp_path, kill)
        assert codes[kill % WORLD] == -signal.SIGKILL
        assert codes[1 - kill % WORLD] not in (0, None)  # it hears of it, within the group's timeout
    assert run_once(tmp_path, -1) == [0] * WORLD
    forced(monkeypatch, 3, 40)
    np.save(tmp_path / "alone.npy", np.full((len(x.grid), 5), np.nan, np.float32))
    with torch.no_grad():
        sc.stream(net, x, 10**9, out=np.load(tmp_path / "alone.npy", mmap_mode="r+"))
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "alone.npy").read_bytes()


def test_the_longest_tasks_go_first_to_whoever_has_least():
    draw = np.random.default_rng(0)
    for size in (1, 2, 3, 7):
        costs = draw.random(60).tolist()
        shares = shared_out(costs, size)
        assert sorted(task for share in shares for task in share) == list(range(60))
        loads = [sum(costs[task] for task in share) for share in shares]
        assert max(loads) <= 1.05 * sum(costs) / size
    assert shared_out([], 2) == [[], []]
    assert shared_out([1.0], 3) == [[0], [], []]
