"""What 8 bits take: forwards of one layer, and a U-Net's inference, beside wider numbers.

    python -m benchmarks.eight_bits --out FILE.json [--device cpu] [--case shell_256 256 ...] [--network shell_512]

A layer is a submanifold 3x3x3 convolution with its way back to 8 bits, over a map that is there, its weight laid out as
quantized networks keep it. Wider: fp16 on a card, fp32 on a CPU. A network is the U-Net of 32 to 256 channels, whose
plans are there. Milliseconds by `sparseconv.bench.timing`, in turns; of a network on a card, what it is busy, too.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sparseconv as sc
from benchmarks.clients.timing import busy
from benchmarks.layers.machine import machine
from sparseconv import nn
from sparseconv.backends.base import Request
from sparseconv.backends.float8 import FLOAT8, Float8Rescale
from sparseconv.backends.integers import Rescale
from sparseconv.backends.registry import choose
from sparseconv.bench import cases
from sparseconv.bench.report import write
from sparseconv.bench.timing import clock_of


def layers(name: str, channels: int, device: str) -> tuple[int, dict[str, Callable[[], Any]]]:
    """The number of voxels, and the layer in each kind of numbers."""
    torch.manual_seed(0)
    grid = sc.VoxelGrid(cases.coordinates(name).to(device), 1)
    plan = sc.ConvolutionPlan(grid, 3)
    x, weight = torch.randn(len(grid), channels, device=device), torch.randn(27, channels, channels, device=device) / 30
    edges, ones = plan.kernel_map, torch.ones(channels, device=device)

    def lying(weight: torch.Tensor) -> torch.Tensor:
        return weight.mT.contiguous().mT

    def called(dtype: torch.dtype) -> Any:
        return choose(Request(edges, x.device, dtype, channels, channels, 1))

    small, narrow = (x * 8).to(torch.int8), lying((weight * 900).to(torch.int8))
    eighths, taps = x.to(FLOAT8), lying(weight).to(FLOAT8)
    sums, way = torch.zeros(channels, dtype=torch.int32, device=device), ones.int() * 1000
    wide = torch.float16 if device == "cuda" else torch.float32
    wide_x, wide_weight = x.to(wide), weight.to(wide)
    made = {
        str(wide).removeprefix("torch."): lambda: plan.execute(wide_x, wide_weight),
        "int8": lambda: called(torch.int8).integers(small, narrow, edges, 1, sums, Rescale(way, 20, slope=0, low=0)),
    }
    if device == "cuda":
        rescale = Float8Rescale(ones / 100, 0.0, 0.0)
        made["fp8"] = lambda: called(FLOAT8).float8(eighths, taps, edges, 1, 0 * ones, rescale)
    return len(grid), made


def networks(name: str, device: str) -> tuple[int, dict[str, Callable[[], Any]]]:
    """The number of voxels, and the U-Net's inference in each kind of numbers."""
    torch.manual_seed(0)
    grid = sc.VoxelGrid(cases.coordinates(name).to(device), 1)
    x = sc.SparseTensor(grid, torch.randn(len(grid), 4, device=device))
    net, wide = nn.UNet(4, 20).to(device).eval(), torch.float16 if device == "cuda" else torch.float32
    for module in net.modules():
        if isinstance(module, nn.BatchNorm) and module.running_var is not None and module.running_mean is not None:
            module.running_var.uniform_(0.5, 1.5)
            module.running_mean.normal_(0, 0.1)
    made: dict[str, Callable[[], Any]] = {}
    for kind in ("int8", "fp8") if device == "cuda" else ("int8",):
        made[kind] = partial(sc.quantize(net, [x], dtype=kind), x)
    wider, given = net.to(wide), x.to(dtype=wide)
    return len(grid), {str(wide).removeprefix("torch."): lambda: wider(given)} | made


def _without_scene(call: Callable[[], Any], scene: None) -> Any:
    return call()


def measured(calls: dict[str, Callable[[], Any]], device: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Each call's median, in turns."""
    clock = clock_of(device)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(rounds), calls.items()):
        found[name].append(clock.time(call, seconds).median)
    return {name: {"median": statistics.median(times), "rounds": times} for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eight_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", nargs="*", default=["shell_256", "256", "shell_1024", "64"], help="name channels ...")
    parser.add_argument("--network", nargs="*", default=["shell_512"])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    here = machine(args.device)
    jobs: list[tuple[str, int | None]] = [*zip(args.case[::2], map(int, args.case[1::2]))]
    jobs += [(name, None) for name in args.network]
    with torch.no_grad():
        for name, channels in jobs:
            voxels, calls = networks(name, args.device) if channels is None else layers(name, channels, args.device)
            times, worked = measured(calls, args.device, args.seconds, args.rounds), {}
            if channels is None and args.device == "cuda":
                worked = {kind: busy(partial(_without_scene, call), [None] * 4) for kind, call in calls.items()}
            rows.append({"case": name, "channels": channels, "voxels": voxels, "ms": times, "busy": worked})
            shown = ", ".join(f"{kind} {found['median']:.3f}" for kind, found in times.items())
            shown += "".join(f"; {kind} busy {found['busy_ms']:.3f}" for kind, found in worked.items())
            print(f"{name} {channels or 'U-Net'}, {voxels:,} voxels, ms: {shown}")
            write(args.out, here, rows, version="eight_bits")


if __name__ == "__main__":
    main()
