"""One scene over several GPUs: strong and weak scaling of a training step, halo, overlap and memory.

    python -m benchmarks.scaling --worlds 1 2 4 --voxels 20000000 --out benchmarks/results/h200_scaling.json

A training step is forward and both gradients of a submanifold 3x3x3 convolution, as a user calls it: one process a GPU,
NCCL between them, the slowest rank's median counts. One GPU runs the plain plan. With ``--captured`` a step is one CUDA
graph on each rank, its exchange of halos included, and has the bits of the eager one. Without GPUs it runs over gloo,
to be tried out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv.distributed import ShardedConvolutionPlan, shard


def shell_slab(resolution: int, first: int, last: int, device: torch.device) -> torch.Tensor:
    """Voxels (N, 4) within 1.25 of a sphere's surface in a cube, of the planes first <= x < last."""
    centre = torch.arange(resolution, device=device).float() - resolution / 2 + 0.5
    plane = centre[:, None].square() + centre[None, :].square()
    parts = []
    for x in range(first, last):
        distance = (plane + centre[x].square()).sqrt()
        yz = ((distance <= resolution / 2) & (distance >= resolution / 2 - 1.25)).nonzero().int()
        parts.append(torch.cat([yz.new_tensor([[0, x]]).expand(len(yz), 2), yz], 1))
    return torch.cat(parts)


def resolution_for(voxels: int) -> int:
    """The resolution of the shell that has about so many voxels: its surface is 1.25 pi r^2."""
    return round((voxels / (1.25 * 3.1416)) ** 0.5)


def timed(step: Callable[[], None], repeats: int, world: int, wait: Callable[[], None]) -> list[float]:
    """Milliseconds of each of this rank's steps; the ranks begin each one together."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        if world > 1:
            dist.barrier()
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def captured(step: Callable[[], Any]) -> tuple[Callable[[], None], bool]:
    """A step over arrays that stay, as one graph; and whether a replay has the bits of an eager step."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            want = step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's watchdog asks events
            found = step()
    torch.cuda.current_stream().wait_stream(stream)
    for part in found:
        part.fill_(torch.nan)
    graph.replay()
    return graph.replay, all(torch.equal(a, b) for a, b in zip(found, want))


def by_rank(value: float, world: int, device: torch.device) -> list[float]:
    """A figure of every rank."""
    if world == 1:
        return [value]
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    return [float(part) for part in parts]


def measure(args: argparse.Namespace, rank: int, world: int, voxels: int) -> dict[str, Any]:
    """One scene on this rank's part: plan, check, time."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    resolution = resolution_for(voxels)
    coords = shell_slab(resolution, rank * resolution // world, (rank + 1) * resolution // world, device)
    wait()
    start = time.perf_counter()
    grid: Any = shard(coords, by=args.by) if world > 1 else sc.VoxelGrid(coords)
    wait()
    sharded_s, start = time.perf_counter() - start, time.perf_counter()
    del coords
    plan = ShardedConvolutionPlan(grid, 3) if world > 1 else sc.ConvolutionPlan(grid, 3)
    wait()
    planned_s = time.perf_counter() - start
    dtype = torch.float16 if on_gpu else torch.float32
    x = torch.randn(len(grid), args.channels, device=device, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    w = (torch.randn(27, args.channels, args.channels, device=device) * 0.05).to(dtype).requires_grad_()
    g = torch.randn(len(grid), args.channels, device=device, dtype=dtype)

    same: list[bool] = []

    def step_of(plan: Any) -> Callable[[], Any]:
        def step() -> Any:
            y = plan.execute(x, w)
            return y.detach(), *torch.autograd.grad(y, (x, w), g)

        if not args.captured:
            return step
        replay, equal = captured(step)
        same.append(equal)
        return replay

    step = step_of(plan)
    step()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    times = timed(step, args.repeats, world, wait)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    sizes = by_rank(len(grid), world, device)
    medians = by_rank(statistics.median(times), world, device)
    result = {
        "voxels": int(sum(sizes)),
        "step_ms": max(medians),
        "rank_ms": medians,
        "spread_ms": [min(times), max(times)],
        "largest_shard": int(max(sizes)),
        "shard_s": sharded_s,
        "plan_s": planned_s,
        "peak_bytes": peak,
    }
    if same:
        result["same_bits"] = min(by_rank(float(same[0]), world, device)) == 1
    if isinstance(plan, ShardedConvolutionPlan):
        alone = step_of(sc.ConvolutionPlan(sc.VoxelGrid(grid.coords), 3))
        result["alone_ms"] = by_rank(statistics.median(timed(alone, args.repeats, world, wait)), world, device)
        result |= {
            "halo_rows": plan.halo_rows,
            "halo_bytes": plan.halo_bytes(args.channels, dtype),
            "overlapped": plan.overlapped,
        }
    return result


def worker(
    rank: int, world: int, port: int, args: argparse.Namespace, jobs: list[tuple[str, int]], results: Any
) -> None:
    """One rank: every job of this number of ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    if world > 1:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120))
    for name, voxels in jobs:
        try:
            result = measure(args, rank, world, voxels)
        except torch.OutOfMemoryError as error:
            result = {"voxels": voxels, "out_of_memory": str(error).split(".")[0]}
        if rank == 0:
            results[name, world] = result
            print(f"{name} on {world}: {json.dumps(result)}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    """Run the scaling table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--voxels", type=int, default=20_500_000, help="of the strong-scaling scene; 0: none")
    parser.add_argument("--weak", type=int, default=10_000_000, help="voxels a GPU of the weak-scaling scenes; 0: none")
    parser.add_argument("--large", type=int, default=0, help="voxels of a scene too large for one GPU; 0: none")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--by", default="kd")
    parser.add_argument("--captured", action="store_true", help="each step is a CUDA graph")
    parser.add_argument("--out", type=Path, help="JSON; rows of an earlier run that this one does not measure stay")
    args = parser.parse_args()
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        for world in args.worlds:
            jobs = [("strong", args.voxels)] if args.voxels else []
            jobs += [("weak", args.weak * world)] if args.weak else []
            jobs += [("large", args.large)] if args.large and world in (1, max(args.worlds)) else []
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            torch.multiprocessing.spawn(worker, (world, port, args, jobs, results), nprocs=world)
        table = {f"{name}_{world}": value for (name, world), value in results.items()}
    one = table.get("strong_1", {}).get("step_ms")
    for name, row in table.items():
        kind, world = name.split("_")
        if "step_ms" not in row:
            continue
        if kind == "strong" and one:
            row["speedup"] = one / row["step_ms"]
        if kind == "weak" and "weak_1" in table:
            row["efficiency"] = table["weak_1"]["step_ms"] / row["step_ms"]
        shown = {k: round(v, 3) for k, v in row.items() if isinstance(v, float)}
        print(f"{kind:7} {world} ranks, {row['voxels']:,} voxels: {shown}")
    facts = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "arguments": [{k: str(v) for k, v in vars(args).items() if k != "out"}],
    }
    if args.out and args.out.exists():  # scenes that were left out before are added to those that are there
        before = json.loads(args.out.read_text())
        facts["arguments"] = before["facts"]["arguments"] + facts["arguments"]
        table = before["results"] | table
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"facts": facts, "results": table}, indent=1))


if __name__ == "__main__":
    main()
