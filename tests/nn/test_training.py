"""Training at scale: two processes, sharded parameters, synchronised norms, compiled networks, resuming."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import sparseconv as sc
from sparseconv import nn
from sparseconv.nn.models.convnext import ConvNeXtUNet
from sparseconv.nn.models.minkunet import MinkUNet
from sparseconv.nn.models.second import SecondEncoder
from sparseconv.nn.models.spunet import SpUNet
from sparseconv.nn.synchronized import SyncBatchNorm
from sparseconv.plan import PlanSet
from tests.cases import error
from tests.ranks import SHARDS, on_ranks

LABELS = 3


def scene(seed=0, voxels=250):
    gen = torch.Generator().manual_seed(seed)
    coords = torch.cat([torch.zeros(voxels, 1).long(), torch.randint(0, 12, (voxels, 3), generator=gen)], 1)
    grid = sc.VoxelGrid(coords, 1, duplicates="first")
    labels = (grid.coords[:, 1] // 4).long()
    return sc.SparseTensor(grid, torch.randn(len(grid), 4, generator=gen)), labels


def network():
    torch.manual_seed(0)
    return nn.UNet(4, LABELS, channels=(4, 6))


def loss_of(net, seed):
    x, labels = scene(seed)
    return torch.nn.functional.cross_entropy(net(x).features.float(), labels)


SIZES = [(5, 9), (7, 0), (1, 0)]  # voxels of the two processes


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What two processes with gloo found; started once, since starting them is most of the time."""
    folder = tmp_path_factory.mktemp("processes")
    on_ranks(2, find, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def find(folder):
    rank = dist.get_rank()
    found = {
        "sharded": sharded(rank) if SHARDS else None,
        "synchronised": [synchronised(rank, sizes) for sizes in SIZES],
    }
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()  # nobody leaves while the other still talks


def mean_gradients():
    """What two processes, a scene each, should find: the mean of the gradients of two networks."""
    total = {}
    for seed in range(2):
        net = network().eval()
        loss_of(net, seed).backward()
        for name, p in net.named_parameters():
            total[name] = total.get(name, 0) + p.grad / 2
    return total


# ---- two processes


def sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = network().eval()  # statistics of one process are not those of the other
    mesh = init_device_mesh("cpu", (2,))
    for part in (*net.encoder, *net.decoder):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    stored = sum(p.to_local().numel() for p in net.parameters())
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    loss_of(net, rank).backward()
    grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    optimiser.step()
    return stored, grads, loss_of(net, rank).item()


@pytest.mark.skipif(not SHARDS, reason="fully_shard of this torch does not average over gloo, of no layer")
def test_fully_sharded_parameters(processes):
    (stored, grads, after), (_, same, _) = (found["sharded"] for found in processes)
    want = mean_gradients()
    assert set(grads) == set(want)
    for name in want:
        assert torch.equal(grads[name], same[name])
        assert error(grads[name], want[name].double()) < 2e-5, name
    total = sum(p.numel() for p in network().parameters())
    assert stored < 0.7 * total
    assert after < loss_of(network().eval(), 0).item()


def synchronised(rank, sizes):
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 3, dtype=torch.float64)
    weight = torch.randn(sum(sizes), 3, dtype=torch.float64)
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    net = SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm(3))).double()
    assert type(net[0]) is SyncBatchNorm
    mine = x[rows].clone().requires_grad_()
    y = net(mine)
    (y * weight[rows]).sum().backward()
    return y.detach(), mine.grad, [p.grad for p in net.parameters()], dict(net.named_buffers())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_synchronised_norms_equal_one_norm_of_all(processes, sizes):
    found = [all_found["synchronised"][SIZES.index(sizes)] for all_found in processes]
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(sum(sizes), 3, dtype=torch.float64)
    net = nn.Sequential(nn.BatchNorm(3)).double()
    y = net(x)
    (y * weight).sum().backward()
    close = {"atol": 1e-10, "rtol": 1e-10}
    torch.testing.assert_close(torch.cat([f[0] for f in found]), y.detach(), **close)
    torch.testing.assert_close(torch.cat([f[1] for f in found]), x.grad, **close)
    for ours, p in zip(zip(*(f[2] for f in found)), net.parameters()):
        torch.testing.assert_close(sum(ours), p.grad, **close)
    for name, want in net.named_buffers():
        for f in found:
            torch.testing.assert_close(f[3][name], want, **close)


def test_converting_norms_keeps_parameters_and_keys():
    net = MinkUNet(4, 3, variant="14", planes=(4,) * 8, init_channels=4)
    state = net.state_dict()
    other = SyncBatchNorm.convert(copy.deepcopy(net))
    assert not any(type(m) is nn.BatchNorm for m in other.modules())
    assert list(other.state_dict()) == list(state)
    x, _ = scene()
    assert torch.equal(other.eval()(x).features, net.eval()(x).features)


# ---- compiled, given the plans


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: MinkUNet(4, 3, variant="14", planes=(4,) * 8, init_channels=4), marks=pytest.mark.slow),
        lambda: SecondEncoder(4, (41, 12, 12)),
        pytest.param(lambda: SpUNet(4, 3, base_channels=4, channels=(4,) * 4, layers=(1,) * 4), marks=pytest.mark.slow),
        pytest.param(
            lambda: ConvNeXtUNet(4, 3, channels=(4, 8), blocks=(1, 1), layer_scale=0.1), marks=pytest.mark.slow
        ),
    ],
    ids=["minkunet", "second", "spunet", "convnext"],
)
def test_compiled_whole_given_a_plan_set(make):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, (x, _) = make().eval(), scene()
    grid = sc.VoxelGrid(x.grid.coords, 1)
    plans = PlanSet.of(net, grid)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    found = []
    for run, at in ((net, x.grid), (compiled, plans.grid)):
        net.zero_grad()
        y = run(sc.SparseTensor(at, x.features)).features
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in net.parameters())])
    for a, b in zip(*found, strict=True):
        assert error(b, a.double()) < 1e-4


# ---- one process


def test_gradient_checkpointing_of_blocks():
    """A block is computed again in backward, with the same numbers and less kept."""
    net, (x, labels) = network().eval(), scene()
    loss_of(net, 0).backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    for stage in (*net.encoder, *net.decoder):
        inner = stage.forward
        stage.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    torch.nn.functional.cross_entropy(net(x).features, labels).backward()
    for got, p in zip(want, net.parameters()):
        assert torch.equal(got, p.grad)


def test_gradient_scaler_and_half_precision():
    net = network()
    optimiser, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for _ in range(12):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(net, 0)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.dtype == torch.float32 for p in net.parameters())


def train(net, optimiser, average, steps):
    for step in steps:
        optimiser.zero_grad()
        loss_of(net, step).backward()
        optimiser.step()
        average.update_parameters(net)


def fresh():
    net = network()
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    return net, torch.optim.AdamW(net.parameters(), 1e-2), average


def test_resumed_training_gives_the_same_bits(tmp_path):
    """Six steps at once, and three, a file, and three: network, optimiser and running average are equal."""
    net, optimiser, average = fresh()
    train(net, optimiser, average, range(6))
    first, state, mean = fresh()
    train(first, state, mean, range(3))
    parts = {"net": first, "optimiser": state, "average": mean}
    torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "halfway.pth")
    again = dict(zip(parts, fresh()))
    for name, saved in torch.load(tmp_path / "halfway.pth", weights_only=True).items():
        again[name].load_state_dict(saved)
    train(*again.values(), range(3, 6))
    for ours, want in ((again["net"], net), (again["average"], average)):
        for key, value in want.state_dict().items():
            assert torch.equal(ours.state_dict()[key], value), key
    moved = [not torch.equal(a, b) for a, b in zip(average.module.parameters(), net.parameters())]
    assert all(moved), "the running average lags behind"
