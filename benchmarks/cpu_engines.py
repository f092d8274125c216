"""The CPU engine of two checkouts side by side, in turns, so that a disturbance of the machine meets both.

    python benchmarks/cpu_engines.py OLD_CHECKOUT NEW_CHECKOUT [--channels 16 64 128] [--rounds 15] [--threads 1]

A submanifold kernel 3 over 30,000 voxels as a spinning LiDAR sees them, fp32, forward and step. Each checkout runs in a
process of its own. Printed are the least milliseconds of either, their ratio, and the median ratio of a turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

VOXELS, CELL, REPEATS = 30_000, 0.2, 3


def serve(channels: list[int], threads: int) -> None:
    """Answer each line ``CHANNELS KIND`` with the least seconds of a few runs."""
    import torch

    import sparseconv as sc

    torch.set_num_threads(threads)
    g = torch.Generator().manual_seed(0)
    radius, angle = 4 + 50 * torch.rand(400_000, generator=g) ** 2, torch.rand(400_000, generator=g)
    ring = torch.randint(-48, 16, (400_000,), generator=g)
    height = (torch.tan(ring * 0.0073) * radius).clamp(-2, 3)
    points = torch.stack([radius * (6.2832 * angle).cos(), radius * (6.2832 * angle).sin(), height], 1)
    voxels = torch.unique((points / CELL).floor().int(), dim=0)
    kept = torch.randperm(len(voxels), generator=g)[:VOXELS].sort().values
    grid = sc.VoxelGrid(torch.nn.functional.pad(voxels[kept], (1, 0)).contiguous())
    plan = sc.ConvolutionPlan(grid, 3, backend="llvm_implicit_gemm")
    calls: dict[tuple[int, str], Callable[[], object]] = {}
    for width in channels:
        x, w = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((len(grid), width), (27, width, width)))
        grad = torch.randn(len(grid), width, generator=g)

        def forward(x: torch.Tensor = x, w: torch.Tensor = w) -> None:
            with torch.no_grad():
                plan.execute(x, w)

        def step(x: torch.Tensor = x, w: torch.Tensor = w, grad: torch.Tensor = grad) -> None:
            x.grad = w.grad = None
            plan.execute(x, w).backward(grad)

        calls[width, "forward"], calls[width, "step"] = forward, step
        step()
    for line in sys.stdin:
        wide, kind = line.split()
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            calls[int(wide), kind]()
            times.append(time.perf_counter() - start)
        print(min(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--channels", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.channels, options.threads)
    if len(options.checkouts) != 2:
        parser.error(f"two checkouts are compared; got {len(options.checkouts)}")
    widths = [str(width) for width in options.channels]
    command = [sys.executable, __file__, "--serve", "--threads", str(options.threads), "--channels", *widths]
    sides = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
        )
        for checkout in options.checkouts
    ]
    for width in widths:
        for kind in ("forward", "step"):
            times: list[list[float]] = [[], []]
            for turn in range(options.rounds):
                for which in (0, 1) if turn % 2 else (1, 0):
                    ask, answer = sides[which].stdin, sides[which].stdout
                    assert ask is not None
                    assert answer is not None
                    ask.write(f"{width} {kind}\n")
                    ask.flush()
                    times[which].append(float(answer.readline()))
            old, new = map(min, times)
            ratio = statistics.median(b / a for a, b in zip(*times))
            print(
                f"{width:>4} {kind:8} old {1e3 * old:8.2f} ms, new {1e3 * new:8.2f} ms: "
                f"{new / old:.3f}; of a turn {ratio:.3f}",
                flush=True,
            )
    for side in sides:
        side.terminate()


if __name__ == "__main__":
    main()
