"""From coordinates to everything a training step needs, timed on one GPU.

    python -m benchmarks.gpu_map [--data FOLDER] [--cases shell_64 ...] [--profile CASE] [--out FILE]

A map is: table of coordinates, row order, permuted table with the tap lists of its tiles, and the edges by tap.
Median of CUDA-event times and of wall times (synchronised) over about 0.3 s of repeats after warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from sparseconv.geometry.gpu.hash_table.table import build_table
from sparseconv.geometry.gpu.pairs.pair_lists import pairs_of
from sparseconv.geometry.gpu.tiles.build import build_schedule
from sparseconv.geometry.gpu.tiles.schedule import ROW_BITS
from sparseconv.geometry.gpu.window.search import search_window
from sparseconv.geometry.gpu.window.taps import encode_window
from tests.twins import pairs_torch

OFFSETS = tuple(itertools.product((-1, 0, 1), repeat=3))
#: case -> (must, goal) in ms
TARGETS = {
    "shell_1024": (1.30, 0.90),
    "shell_512": (0.32, 0.25),
    "shell_256": (0.20, 0.11),
    "shell_128": (0.15, 0.10),
    "shell_64": (0.13, 0.09),
    "lidar_ouster_os1_3sweeps_005": (0.20, 0.12),
    "tls_lonestar_005": (0.22, 0.14),
    "indoor_rooms_pcl_002": (0.13, 0.09),
    "shape_spot_256": (0.15, 0.10),
    "brain_mni152_2mm": (0.19, 0.11),
}


def shell(res: int, device: str) -> torch.Tensor:
    """Voxels whose distance from the centre of a res^3 cube lies in [res/2 - 1.25, res/2]."""
    axis = torch.arange(res, device=device).float() - res / 2 + 0.5
    parts = []
    for i in range(0, res, 16):
        d = (axis[i : i + 16, None, None] ** 2 + axis[None, :, None] ** 2 + axis[None, None] ** 2).sqrt()
        found = torch.nonzero((d <= res / 2) & (d >= res / 2 - 1.25)).int()
        found[:, 0] += i
        parts.append(found)
    return torch.cat(parts)


def case(name: str, data: Path, device: str) -> torch.Tensor:
    """The coordinates (N, 4) int32 of a case, batch first, in lexicographic order."""
    if name.startswith("shell_"):
        coords = shell(int(name[6:]), device)
    else:
        coords = torch.from_numpy(np.load(data / f"{name}.npz")["coords"]).int().to(device)
    return torch.nn.functional.pad(coords, (1, 0)).contiguous()


def neighbors_searched(coords: torch.Tensor) -> torch.Tensor:
    """The reference: sorted 64-bit keys and binary search."""
    c = coords.long()
    c = c - c.amin(0) + torch.tensor([0, 1, 1, 1], device=c.device)
    size = c.amax(0) + 2
    key = ((c[:, 0] * size[1] + c[:, 1]) * size[2] + c[:, 2]) * size[3] + c[:, 3]
    ordered, rows = torch.sort(key)
    table = torch.empty(27, len(c), dtype=torch.int32, device=c.device)
    for tap, (a, b, d) in enumerate(OFFSETS):
        wanted = key + (a * size[2] + b) * size[3] + d
        at = torch.searchsorted(ordered, wanted).clamp_(max=len(c) - 1)
        table[tap] = torch.where(ordered[at] == wanted, rows[at], -1).int()
    return table


def make_map(coords: torch.Tensor, block_m: int = 128):
    """Everything for a submanifold 3 x 3 x 3 convolution."""
    table = build_table(coords)
    window = encode_window(OFFSETS, (1, 1, 1), None, coords.device)
    search = search_window(table, table.coords, window)
    schedule = build_schedule(search, block_m)
    pairs = pairs_of(search)
    return search, schedule, pairs


def check(coords: torch.Tensor, **options) -> None:
    """Raise where the map differs from the reference."""
    found, schedule, (in_rows, out_rows, offsets) = make_map(coords, **options)
    want = neighbors_searched(coords)
    live = want >= 0
    n = len(coords)
    if not torch.equal(found.neighbors, want):
        raise SystemExit(f"neighbours differ in {int((found.neighbors != want).sum())} places")
    for got, edges in zip((in_rows, out_rows), pairs_torch(want, mirrored=True)):
        if not torch.equal(got, edges):
            raise SystemExit("edges differ")
    if list(offsets[1:]) != live.sum(1).cumsum(0).tolist():
        raise SystemExit("tap offsets differ")
    order = schedule.out_rows[:n].long()
    if not torch.equal(order, torch.sort(found.keys[0], stable=True).indices):
        raise SystemExit("row order differs")
    if not torch.equal(schedule.neighbors[:-1, :n], want[:, order]) or int(schedule.neighbors[-1].max()) != -1:
        raise SystemExit("permuted table differs")
    on = (schedule.neighbors[:-1].view(27, schedule.num_tiles, -1) >= 0).any(-1)
    if not torch.equal(on.sum(0).int(), schedule.tile_counts):
        raise SystemExit("tile counts differ")
    if not torch.equal(
        torch.sort(schedule.tile_counts, descending=True, stable=True).indices.int(), schedule.tile_order
    ):
        raise SystemExit("tile order differs")
    listed = torch.zeros(schedule.num_tiles, 28, dtype=torch.bool, device=coords.device)
    listed.scatter_(1, (schedule.tile_rows & ROW_BITS).long(), True)
    if not torch.equal(listed[:, :27], on.t()):
        raise SystemExit("tap lists differ")


def timed(run, seconds: float = 0.3) -> tuple[float, float]:
    """Median milliseconds of a call, by events in a stream of calls and by the wall clock with a wait after each."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(10, min(1000, int(seconds / 2 / max(1e-5, time.perf_counter() - begin))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    walls = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        walls.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(s.elapsed_time(e) for s, e in events), statistics.median(walls)


def profile(coords: torch.Tensor, **options) -> list[tuple[str, float, int]]:
    """(kernel, microseconds on the device, calls) of one map."""
    make_map(coords, **options)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            make_map(coords, **options)
        torch.cuda.synchronize()
    rows = [(e.key[:60], e.device_time_total / 5, e.count // 5) for e in seen.key_averages() if e.device_time_total]
    return sorted(rows, key=lambda row: -row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--cases", nargs="*", default=list(TARGETS))
    parser.add_argument("--profile", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'case':30} {'N':>9} {'must':>7} {'goal':>7} {'event':>7} {'wall':>7} {'mixed':>7}  ms")
    for name in args.cases:
        coords = case(name, args.data, "cuda")
        check(coords)
        event, wall = timed(lambda c=coords: make_map(c), args.seconds)
        mixed = coords[torch.randperm(len(coords), device="cuda", generator=torch.Generator("cuda").manual_seed(1))]
        check(mixed)
        shuffled, _ = timed(lambda c=mixed: make_map(c), args.seconds)
        must, goal = TARGETS[name]
        figures = {"must": must, "goal": goal, "event": event, "wall": wall, "shuffled": shuffled}
        results.append({"case": name, "N": len(coords), **figures})
        print(f"{name:30} {len(coords):9,} " + " ".join(f"{v:7.3f}" for v in figures.values()), flush=True)
    for name in args.profile:
        print(f"-- {name}")
        for kernel, us, calls in profile(case(name, args.data, "cuda")):
            print(f"{us:9.1f} us {calls:3d}  {kernel}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
