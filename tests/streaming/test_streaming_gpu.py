"""On a card: bits of the whole, the budget by torch's own count, and copies beside the compute."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.streaming import run
from sparseconv.streaming.blocks import Blocks
from sparseconv.streaming.scene import Scene
from sparseconv.streaming.store import Store
from tests.streaming.scenes import NETWORKS, forced, same, scene

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def shell(count: int, channels: int = 4) -> sc.SparseTensor:
    """A wavy surface of about ``count`` voxels, in host memory."""
    side = int(count**0.5)
    a, b = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    height = (40 * torch.sin(a / 60) + 30 * torch.cos(b / 80)).long()
    coords = torch.stack([torch.zeros_like(a), a, b, height], -1).view(-1, 4).int()
    return sc.SparseTensor(sc.VoxelGrid(coords, 1), torch.randn(len(coords), channels))


def widely(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch's `linear` in fp64: cuBLAS chooses an order of sums by the number of rows, as fp32's last bit shows."""
    return LINEAR(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


LINEAR = torch.nn.functional.linear


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("cuts", [0, 2])
@pytest.mark.parametrize("wide", [True, False])
def test_blocks_are_the_whole_on_a_card(name, cuts, wide, monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS[name]().eval().cuda(), scene(count=3000)
    has_products = any(isinstance(module, torch.nn.Linear) for module in net.modules())
    if wide:
        monkeypatch.setattr(torch.nn.functional, "linear", widely)
    forced(monkeypatch, cuts, 500)
    with torch.no_grad():
        want = net(x.to("cuda"))
        got = sc.stream(net, x, 10**9)
    host = {key: value.to("cpu") for key, value in want.items()} if isinstance(want, dict) else want.to("cpu")
    if wide or not has_products:
        same(got, host)
    else:
        plain = [value.features if isinstance(value, sc.SparseTensor) else value for value in (got, host)]
        torch.testing.assert_close(*plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_shell_within_its_budget(dtype):
    torch.manual_seed(0)
    x, net = shell(2_000_000), nn.UNet(4, 20).eval().cuda().to(dtype)
    x = x.to(dtype=dtype)
    budget = 1_000_000_000
    with torch.no_grad():
        sc.stream(net, shell(10_000).to(dtype=dtype), budget)  # what is compiled and tuned once
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, seen = torch.cuda.memory_allocated(), []
        got = sc.stream(net, x, budget, progress=lambda done, total: seen.append(total))
        peak = torch.cuda.max_memory_allocated() - before
        want = net(x.to("cuda")).features.cpu()
    assert seen[-1] > 1
    assert peak <= budget, (peak, budget)
    assert torch.equal(got.features, want)


@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("moved", [0, 40_000])
def test_a_scene_lies_on_the_card_or_not(kind, moved, monkeypatch):
    """Coordinates of 16 bits or 32 there, and features, or read from the host: the same bits, within the budget."""
    if moved and kind == torch.int16:
        pytest.skip("40,000 has more than 16 bits")
    torch.manual_seed(0)
    net, x, held = Levels((8, 16)).eval().cuda(), shell(2_000_000, 8), []
    coords, budget = x.coords + torch.tensor([0, moved, -moved, 0]), 2_000_000_000
    held_on = Scene.held_on
    monkeypatch.setattr(Scene, "held_on", lambda *args: held.append(held_on(*args)) or held[-1])
    results, seen = [], []
    with torch.no_grad():
        for part in (run.HELD, budget / 50_000_000, 10**9):  # all, all but features, nothing
            monkeypatch.setattr(run, "HELD", part)
            seen.clear()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results.append(sc.stream(net, (coords.to(kind), x.features), budget, progress=lambda *at: seen.append(at)))
            assert len(seen) > 1
            assert torch.cuda.max_memory_allocated() - before <= budget
    whole, without, none = held
    wide = torch.int32 if moved else torch.int16
    assert [one.scene.coords.dtype for one in (whole, without)] == [wide] * 2
    assert [one.scene.coords.is_cuda for one in held] == [True, True, False]
    assert [one.scene.features.is_cuda for one in held] == [True, False, False]
    assert [one.order_on is None for one in held] == [False, False, True]
    assert whole.num_bytes == without.num_bytes + x.features.nbytes
    assert none.num_bytes == 0
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("cuts", [0, 2])
def test_results_that_are_not_gathered(cuts, monkeypatch):
    """As they leave the card: their rows, each once, and their bits."""
    torch.manual_seed(0)
    net, x = Levels((8, 16)).eval().cuda(), shell(300_000, 8)
    forced(monkeypatch, cuts, 20_000)
    with torch.no_grad():
        want = sc.stream(net, x, 10**9).features
        rows, features = sc.stream(net, x, 10**9, gather=False)
    assert torch.equal(rows.sort().values, torch.arange(len(x.grid)))
    assert torch.equal(features, want[rows])


def test_a_users_peak_of_memory_is_left_alone(monkeypatch):
    """Torch's own count goes on: a run neither lowers it nor hides what it took itself."""
    monkeypatch.setattr(torch.nn.functional, "linear", widely)
    net, x = nn.UNet(4, 5, channels=(8, 16)).eval().cuda(), shell(300_000)
    torch.cuda.reset_peak_memory_stats()
    torch.empty(2**30, dtype=torch.uint8, device="cuda")
    before, seen = torch.cuda.max_memory_allocated(), []
    assert before >= 2**30
    with torch.no_grad():
        got = sc.stream(net, x, 60_000_000, progress=lambda done, total: seen.append(torch.cuda.max_memory_allocated()))
        assert len(seen) > 1
        assert min(seen) >= before
        assert torch.cuda.max_memory_allocated() >= before
        assert torch.equal(got.features, net(x.to("cuda")).features.cpu())


def test_blocks_are_cut_alike_where_the_card_sorts():
    """By pinned copies on a card, or there, once and anew: each row in one leaf, in its old order, as on a CPU."""
    x = shell(200_000)
    space = x.grid.extent
    extent = sc.IndexRange((0, *space.start), (1, *space.end))
    for spare in (0, 10**9):
        made = []
        for where, coords in (("cpu", x.coords), ("cuda", x.coords), ("cuda", x.coords.cuda())):
            on = coords.device if coords.is_cuda else None
            blocks = Blocks(coords, extent, 5000, Store(None), 30_000, torch.device(where), spare, on)
            blocks.refine(700)
            made.append(blocks)
        assert made[2].order.is_cuda
        for other in made[1:]:
            assert torch.equal(made[0].order, other.order.cpu())
            assert [leaf.box for leaf in made[0].leaves] == [leaf.box for leaf in other.leaves]
            for block in (made[0].leaves[3], made[0].root.halves[0]):
                box = block.box.intersect(extent)
                got, want = other.rows_in(box), made[0].rows_in(box)
                assert torch.equal(got.rows.cpu(), want.rows)
                assert got.ranges == want.ranges


class Levels(nn.SparseModule):
    """Convolutions alone, down to few voxels and up again: no layer of torch's."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.SubmanifoldConv(8, channels[0], 3)
        steps = list(itertools.pairwise(channels))
        self.down = torch.nn.ModuleList(nn.Conv(a, b, 2, stride=2) for a, b in steps)
        self.inner = torch.nn.ModuleList(nn.SubmanifoldConv(b, b, 3) for _, b in steps)
        self.up = torch.nn.ModuleList(nn.InverseConv(b, a, 2, stride=2) for a, b in steps)

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        x, finer = self.stem(x), []
        for down, inner in zip(self.down, self.inner):
            finer.append(x)
            x = inner(down(x))
        for up in reversed(self.up):
            x = up(x, onto=finer.pop())
        return x


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "tf32"])
@pytest.mark.parametrize("channels", [(32, 64, 128, 256), (16, 256, 1024)])
def test_convolutions_of_blocks_have_the_bits_of_the_whole(kind, channels, monkeypatch):
    """Maps of the whole that keep a card busy, and blocks that do not."""
    torch.manual_seed(0)
    before = torch.backends.cuda.matmul.allow_tf32
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    x, net = shell(300_000, 8).to(dtype=dtype), Levels(channels).eval().cuda().to(dtype)
    forced(monkeypatch, 0, 30_000)
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        with torch.no_grad():
            want = net(x.to("cuda")).features.cpu()
            got = sc.stream(net, x, 10**10).features
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert torch.equal(got, want), float((got - want).abs().max())


def test_gradients_on_a_card(monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS["unet"]().cuda(), scene(count=3000)
    forced(monkeypatch, 1, 500)
    weights = torch.randn(len(x.grid), 5)
    ours, theirs = (x.with_features(x.features.clone().requires_grad_()) for _ in range(2))
    (net(theirs.to("cuda")).features.cpu() * weights).sum().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    (sc.stream(net, ours, 10**9).features * weights).sum().backward()
    found = [p.grad for p in net.parameters()]
    for mine, grad in zip([*found, ours.features.grad], [*want, theirs.features.grad]):
        torch.testing.assert_close(mine, grad, rtol=2e-3, atol=2e-3 * float(grad.abs().max()))


def test_an_error_in_a_block_is_raised_and_leaves_no_thread(monkeypatch):
    import threading

    net, x = NETWORKS["conv"]().eval().cuda(), scene(count=3000)
    forced(monkeypatch, 0, 200)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("stop")

    with torch.no_grad(), pytest.raises(RuntimeError, match="stop"):
        sc.stream(net, x, 10**9, progress=fail)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stream-")]


def _on_a_card(rank: int, world: int, port: int, folder: str) -> None:
    import os

    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.manual_seed(0)
    net, x = Levels((16, 32, 64)).cuda(), shell(300_000, 8)
    with torch.no_grad():
        y = sc.stream(net.eval(), x, 60_000_000, group=dist.group.WORLD)
        alone = sc.stream(net, x, 60_000_000)
        rows, features = sc.stream(net, x, 60_000_000, group=dist.group.WORLD, gather=False)
    assert torch.equal(y.features, alone.features)
    assert torch.equal(features, alone.features[rows])
    counts = [None] * world
    dist.all_gather_object(counts, len(rows))
    assert all(counts)
    assert sum(counts) == len(x.grid)
    grads = []
    for group in (None, dist.group.WORLD):
        net.zero_grad()
        sc.stream(net.train(), x, 120_000_000, group=group).features.square().mean().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    for got, want in zip(grads[1], grads[0]):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
        everybody = [torch.empty_like(got) for _ in range(world)]
        dist.all_gather(everybody, got)
        assert all(torch.equal(got, other) for other in everybody)
    (Path(folder) / str(rank)).touch()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_cards_stream_one_scene_over_nccl(tmp_path):
    """The bytes of one rank's run, and gradients of it to rounding, the same on both."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_on_a_card, (2, port, str(tmp_path)), nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
