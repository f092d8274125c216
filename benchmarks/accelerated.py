"""Training steps and inference of accelerated networks on scans that change from call to call, in milliseconds.

    python -m benchmarks.accelerated > FILE.json

Maps are built in every call, under fp16 autocast; the loss and the gradients are part of a step, an optimizer is not.
For each network: the median and the least of nine rounds of six scans, the seconds of the first round, which traces and
records, and the MiB that PyTorch has reserved. To compare two revisions, run each from its own checkout, in turns.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch

import sparseconv as sc
from sparseconv import nn

#: a network, and points of a scan and the side of its square, in voxels
NETWORKS: dict[str, tuple[Any, int, int]] = {
    "unet": (lambda: nn.UNet(4, 20, channels=(32, 64, 128, 256)), 60_000, 200),
    "spunet": (lambda: nn.SpUNet(4, 20), 110_000, 300),
}


def scan(seed: int, points: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates (N, 4) int32 of two hilly grounds, and features (N, 4), on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    plane = torch.rand(points, 2, generator=generator) * side
    height = torch.sin(plane[:, :1] / 20) * 5 + torch.rand(points, 1, generator=generator) + 8
    items = torch.randint(0, 2, (points, 1), generator=generator)
    coords = torch.unique(torch.cat([items, torch.cat([plane, height], 1).floor().int()], 1).int(), dim=0)
    return coords.cuda(), torch.randn(len(coords), 4, generator=generator).cuda()


def call(net: torch.nn.Module, coords: torch.Tensor, features: torch.Tensor, trains: bool) -> None:
    for p in net.parameters():
        p.grad = None
    with torch.set_grad_enabled(trains), torch.autocast("cuda", torch.float16):
        y = net(sc.SparseTensor(sc.VoxelGrid(coords, 2), features)).features
    if trains:
        y.float().square().mean().backward()


def measure(name: str, trains: bool) -> dict[str, float]:
    make, points, side = NETWORKS[name]
    scans = [scan(seed, points, side) for seed in range(6)]
    torch.manual_seed(0)
    net = sc.accelerate(make().cuda().train(trains))
    rounds = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for coords, features in scans:
            call(net, coords, features, trains)
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - begin) / len(scans) * 1e3)
    times, reserved = rounds[3:], torch.cuda.memory_reserved() / 2**20
    print(nn.explain(net), file=sys.stderr)
    del net
    gc.collect()
    torch.cuda.empty_cache()
    first = rounds[0] * len(scans) / 1e3
    return {"ms": statistics.median(times), "least_ms": min(times), "first_s": first, "reserved_mib": reserved}


def main() -> None:
    found = {f"{name} {kind}": measure(name, kind == "step") for name in NETWORKS for kind in ("inference", "step")}
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({"facts": facts, "found": found}, indent=1))


if __name__ == "__main__":
    main()
