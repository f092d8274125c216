"""From which size on a call on a CPU gains by threads of its own: a step, and a small network, by the bound.

    python -m benchmarks.cpu_shared [--threads 2] [--bounds 26 28 29 31]

*net*: two convolutions with torch's ReLU between, whose idle threads spin afterwards on the cores that others want.
Least / median of 25 runs in ms, fp32; run it on cores that nobody else uses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import sparseconv as sc
from sparseconv.backends import numpy_gather_scatter as engine
from sparseconv.bench import cases

SCENES = (("rings_64_1024", 32), ("uniform_10_64", 32), ("shell_64", 16), ("shell_64", 64), ("shell_128", 32))


def timed(call: Callable[[], None]) -> str:
    """Least / median milliseconds of 25 runs after three."""
    spent = []
    for _ in range(28):
        start = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - start))
    return f"{min(spent[3:]):.1f} / {statistics.median(spent[3:]):.1f}"


def measure(scene: str, channels: int, bound: int) -> str:
    """A step and a network with calls shared from 2^bound multiplications on."""
    engine.SHARED = 1 << bound
    grid = sc.VoxelGrid(cases.coordinates(scene))
    plan = sc.ConvolutionPlan(grid, 3)
    x = torch.randn(len(grid), channels, requires_grad=True)
    w = (torch.randn(27, channels, channels) / 30).requires_grad_()
    cotangent = torch.randn(len(grid), channels)

    def step() -> None:
        x.grad = w.grad = None
        plan.execute(x, w).backward(cotangent)

    def network() -> None:
        x.grad = w.grad = None
        middle = torch.relu(plan.execute(x, w))
        (torch.relu(plan.execute(middle, w)) * cotangent).sum().backward()

    size = (plan.kernel_map.num_pairs * channels**2).bit_length() - 1
    return f"{scene}, C {channels} (2^{size} to 2^{size + 1}), from 2^{bound}: step {timed(step)}, net {timed(network)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bounds", type=int, nargs="+", default=[26, 28, 29, 31])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for scene, channels in SCENES:
        for bound in options.bounds:
            print(measure(scene, channels, bound), flush=True)


if __name__ == "__main__":
    main()
