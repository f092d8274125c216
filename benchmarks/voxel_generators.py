"""Voxel generators in a loader's worker: ours beside those of spconv's CPU wheel, one thread, in turns.

    python -m benchmarks.voxel_generators --out FILE.json [--points 20000 ...] [--rounds N]

Scans are made: beams that turn, over a floor with walls and posts, as a sensor sends them (``scan``) or shuffled, as
loaders do for training. Boxes are those of detectors. Both get the same points, and each call's results are compared
before anything is timed. ``torch`` is ours without llvmlite. ``generate`` is VoxelGeneratorV2, beside spconv's
Point2VoxelCPU3d. Milliseconds: median and least of the rounds, of which the first are not counted.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.cpu import load_spconv
from benchmarks.layers.machine import machine
from sparseconv.bench.report import write
from sparseconv.interop.spconv import point_loop
from sparseconv.interop.spconv.pytorch.utils import PointToVoxel
from sparseconv.interop.spconv.utils import VoxelGeneratorV2

COLUMNS, MOST = 4, 150_000
#: (voxel size, box, points a voxel), x first
BOXES = {
    "cars, 0.05 m": ((0.05, 0.05, 0.1), (0.0, -40.0, -3.0, 70.4, 40.0, 1.0), 5),
    "all round, 0.1 m": ((0.1, 0.1, 0.15), (-75.2, -75.2, -2.0, 75.2, 75.2, 4.0), 5),
    "all round, 0.1 m, 10 points": ((0.1, 0.1, 0.2), (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0), 10),
    "pillars, 0.16 m": ((0.16, 0.16, 4.0), (0.0, -39.68, -3.0, 69.12, 39.68, 1.0), 32),
    "all round, 0.5 m": ((0.5, 0.5, 0.5), (-75.2, -75.2, -2.0, 75.2, 75.2, 4.0), 5),
}
COUNTS = (20_000, 60_000, 120_000, 180_000)
UNCOUNTED = 3


def scan(count: int) -> np.ndarray:
    """A turn of 64 beams (count, 4) fp32: positions in metres, and intensities; ordered by angle."""
    rng = np.random.default_rng(0)
    turns = -(-count // 64)
    angle = np.repeat(np.linspace(0, 2 * np.pi, turns, endpoint=False), 64)
    down = np.tile(np.radians(np.linspace(-24, 3, 64)), turns)
    walls = np.interp(angle, np.linspace(0, 2 * np.pi, 90), rng.uniform(6, 70, 90))  # metres to what stands there
    floor = np.where(down < -0.01, 1.8 / np.maximum(np.tan(-down), 1e-3), np.inf)
    reach = np.minimum(walls, floor) + rng.normal(0, 0.02, len(angle))
    columns = reach * np.cos(angle), reach * np.sin(angle), reach * np.tan(down), rng.random(len(angle))
    return np.stack(columns, 1)[:count].astype(np.float32)


def calls(points: np.ndarray, box: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """What is timed of some points: of ours, of ours without its loops, and of spconv's."""
    theirs, numpy_arrays = importlib.import_module("spconv.pytorch.utils"), importlib.import_module("cumm.tensorview")
    size, ends, most = box
    tensor = torch.from_numpy(points)
    mine = PointToVoxel(size, ends, COLUMNS, MOST, most)
    other = theirs.PointToVoxel(list(size), list(ends), COLUMNS, MOST, most, torch.device("cpu"))
    v2, plain = VoxelGeneratorV2(size, ends, most, MOST), importlib.import_module("spconv.utils").Point2VoxelCPU3d
    numpy_one = plain(list(size), list(ends), COLUMNS, MOST, most)

    def without() -> Any:
        with patch.object(point_loop, "serves", lambda _: False):
            return mine(tensor)

    def generate() -> Any:
        made = v2.generate(points)
        return made["voxels"], made["coordinates"], made["num_points_per_voxel"]

    def point_to_voxel() -> Any:
        return [part.numpy_view() for part in numpy_one.point_to_voxel(numpy_arrays.from_numpy(points))]

    return {
        "spconv": lambda: other(tensor),
        "ours": lambda: mine(tensor),
        "torch": without,
        "spconv generate": point_to_voxel,
        "generate": generate,
        "spconv means": lambda: other(tensor, empty_mean=True),
        "means": lambda: mine(tensor, empty_mean=True),
    }


def measure(points: np.ndarray, box: tuple[Any, ...], rounds: int) -> dict[str, Any]:
    """Median and least milliseconds of each call, all in turns."""
    what = calls(points, box)
    wanted = [np.asarray(part).copy() for part in what["spconv"]()]
    for name in ("ours", "torch", "spconv generate", "generate"):
        for got, expected in zip(what[name](), wanted, strict=True):
            if not np.array_equal(np.asarray(got), expected):
                raise SystemExit(f"{name} and spconv differ")
    found: dict[str, list[float]] = {name: [] for name in what}
    for _ in range(rounds + UNCOUNTED):
        for name, call in what.items():
            begin = time.perf_counter()
            made = call()
            found[name].append(1e3 * (time.perf_counter() - begin))
            del made
    kept = {name: times[UNCOUNTED:] for name, times in found.items()}
    figures = {name: {"median": statistics.median(times), "least": min(times)} for name, times in kept.items()}
    return {"voxels": len(wanted[1]), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--points", type=int, nargs="*", default=COUNTS)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load_spconv()
    rows, here = [], machine("cpu") | {"threads": 1, "spconv": "CPU wheel 2.3.8"}
    for name, box in BOXES.items():
        for count in args.points:
            points = scan(count)
            for order in ("scan", "shuffled"):
                if order == "shuffled":
                    points = np.random.default_rng(1).permutation(points)
                row = {"box": name, "points": count, "order": order, **measure(points, box, args.rounds)}
                rows.append(row)
                figures = {key: value["median"] for key, value in row.items() if isinstance(value, dict)}
                times = " ".join(f"{key} {value:.2f}" for key, value in figures.items())
                print(f"{name:>28} {count:7,} {order:>8} {row['voxels']:7,}  {times}", flush=True)
    write(args.out, here, rows, version="voxel_generators")


if __name__ == "__main__":
    main()
