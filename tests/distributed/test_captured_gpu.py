"""A step of a sharded network as one CUDA graph on each of two cards, halos and norms' sums through NCCL within it."""

from __future__ import annotations

import datetime
import json
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv import nn
from sparseconv.distributed import Sharded, shard
from tests.distributed.test_network import scene

pytestmark = pytest.mark.gpu


def _on_a_card(rank: int, world: int, port: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        *("nccl", f"tcp://127.0.0.1:{port}"),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    grid = scene().to("cuda")
    shards = shard(grid.subset(torch.arange(len(grid), device="cuda") % world == rank))
    torch.manual_seed(5)
    net = Sharded(nn.UNet(3, 4, (8, 16), block="residual").cuda())
    gen = torch.Generator("cuda").manual_seed(rank)
    x, grad = (torch.randn(len(shards), channels, device="cuda", generator=gen) for channels in (3, 4))
    parameters = list(net.parameters())

    def step() -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y = net(sc.SparseTensor(shards, leaf)).features
        return [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], grad)]

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = step()
    torch.cuda.current_stream().wait_stream(stream)
    same = []
    for _ in range(3):
        x.normal_(generator=gen)
        for part in found:
            part.fill_(torch.nan)
        graph.replay()
        got = [part.clone() for part in found]
        same.append(all(torch.equal(a, b) for a, b in zip(got, step(), strict=True)))
    Path(folder, f"{rank}.json").write_text(json.dumps({"same": same, "rows": len(shards), "all": len(grid)}))
    torch.cuda.synchronize()
    del graph
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_a_sharded_step_is_one_graph_on_each_card(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_on_a_card, (2, port, str(tmp_path)), nprocs=2)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["same"] for one in told] == [[True] * 3] * 2
    assert sum(one["rows"] for one in told) == told[0]["all"]
