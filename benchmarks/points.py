"""From points: `voxelize` beside ``torch.unique(dim=0)``, and from points to a first forward.

    python -m benchmarks.points --out FILE.json [--device cpu] [--sizes 1000 ...] [--seconds N]

Points lie twice in each voxel of ``lidar_ouster_os1_3sweeps_005``, rows shuffled; other numbers of points fill a layer
of voxels at random, about two in each. ``voxelize`` gets fp32 points. ``torch.unique(dim=0)`` gets their voxels as
(M, 4) int32, already rounded, and makes the inverse too. Forward: points -> grid -> plan -> convolution of C 32.
Both are timed in turns by `sparseconv.bench.timing`; milliseconds, medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sparseconv as sc
from benchmarks.layers.machine import machine
from sparseconv.bench import cases
from sparseconv.bench.report import write
from sparseconv.bench.timing import clock_of

LIDAR, CHANNELS, SIZES = "lidar_ouster_os1_3sweeps_005", 32, (1_000, 10_000, 100_000, 1_000_000, 10_000_000)


def lidar(device: str) -> torch.Tensor:
    """Two points in each voxel of the scan, (M, 3) fp32 in voxels, shuffled."""
    cells = cases.coordinates(LIDAR)[:, 1:].float()
    made = torch.Generator().manual_seed(0)
    points = torch.cat([cells, cells]) + torch.rand(2 * len(cells), 3, generator=made) * 0.9
    return points[torch.randperm(len(points), generator=made)].to(device)


def layer(count: int, device: str) -> torch.Tensor:
    """Points at random in a layer of four cells' height, (count, 3) fp32 in voxels; about two a voxel."""
    side = max(1.0, (count / 6) ** 0.5)
    return (torch.rand(count, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([side, side, 4.0])).to(
        device
    )


def calls(points: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed of a cloud of points."""
    dtype = torch.float16 if points.is_cuda else torch.float32
    voxels = torch.nn.functional.pad(points.double().floor().int(), (1, 0))
    weight = torch.randn(27, CHANNELS, CHANNELS, device=points.device, dtype=dtype) / 30
    features = torch.randn(len(points), CHANNELS, device=points.device, dtype=dtype)

    def forward() -> torch.Tensor:
        grid, _ = sc.voxelize(points, 1.0)
        return sc.ConvolutionPlan(grid, 3).execute(features[: len(grid)], weight)

    return {
        "unique": lambda: torch.unique(voxels, dim=0, return_inverse=True),
        "voxelize": lambda: sc.voxelize(points, 1.0),
        "forward": forward,
    }


def check(points: torch.Tensor) -> int:
    """The number of voxels; raises where `voxelize` and torch.unique differ."""
    voxels = torch.nn.functional.pad(points.double().floor().int(), (1, 0))
    for _ in range(2):  # first by torch, where kernels are not compiled
        grid, rows = sc.voxelize(points, 1.0)
        if points.is_cuda:
            from sparseconv.gpu.launcher import await_compilers  # Triton is loaded where it is used

            await_compilers()
    found, inverse = torch.unique(voxels, dim=0, return_inverse=True)
    if not (torch.equal(grid.coords, found) and torch.equal(rows, inverse)):
        raise SystemExit("voxelize and torch.unique(dim=0) differ")
    return len(grid)


def measure(points: torch.Tensor, device: str, seconds: float, rounds: int) -> dict[str, Any]:
    """A row: `unique` and `voxelize` in turns, then ``forward``."""
    clock, what = clock_of(device), calls(points)
    row: dict[str, Any] = {"points": len(points), "voxels": check(points)}
    found: dict[str, list[float]] = {name: [] for name in what}
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in what.items():
                found[name].append(clock.time(call, seconds).median)
    ratios = [mine / other for other, mine in zip(found["unique"], found["voxelize"])]
    row |= {name: {"median": statistics.median(times), "rounds": times} for name, times in found.items()}
    row["ratio"] = row["voxelize"]["median"] / row["unique"]["median"]
    return row | {"ratios": [min(ratios), max(ratios)]}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.points", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--repeat", type=float, default=0.3, help="seconds of repeats of a figure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240, help="seconds after which no cloud begins")
    args = parser.parse_args()
    end, rows, here = time.monotonic() + args.seconds, [], machine(args.device)
    print(f"{'points':>10} {'voxels':>10} {'unique':>9} {'voxelize':>9} {'ratio':>6} {'forward':>9}  ms")
    for count in (0, *args.sizes):
        if time.monotonic() > end or (count == 0 and cases.missing(LIDAR)):
            continue
        points = layer(count, args.device) if count else lidar(args.device)
        row = {"cloud": "layer" if count else LIDAR, **measure(points, args.device, args.repeat, args.rounds)}
        rows.append(row)
        ms = [row[name]["median"] for name in ("unique", "voxelize", "forward")]
        print(
            f"{row['points']:10,} {row['voxels']:10,} {ms[0]:9.3f} {ms[1]:9.3f} {row['ratio']:6.2f} {ms[2]:9.3f}",
            flush=True,
        )
        write(args.out, here, rows, version="points")


if __name__ == "__main__":
    main()
