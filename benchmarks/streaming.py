"""``python -m benchmarks.streaming --voxels 50e6 --budget 20e9``: a U-Net over a shell larger than the card.

Prints the time of the streamed run, of its compute alone, and its peak of memory; with ``--whole`` it compares the bits
with those of the whole scene, where that fits.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer

import sparseconv as sc
from sparseconv import nn
from sparseconv.streaming.work import Work


def shell(voxels: int, channels: int, dtype: torch.dtype) -> sc.SparseTensor:
    """A wavy surface in host memory, its rows in lexicographic order."""
    side = int(voxels**0.5)
    a, b = torch.arange(side, dtype=torch.int32)[:, None], torch.arange(side, dtype=torch.int32)[None]
    height = (40 * torch.sin(a / 60) + 30 * torch.cos(b / 80)).int()
    coords = torch.stack([torch.zeros_like(height), a.expand_as(height), b.expand_as(height), height], -1).view(-1, 4)
    low, high = torch.aminmax(coords[:, 3])
    box = sc.IndexRange((0, 0, int(low)), (side, side, int(high) + 1))
    like = sc.VoxelGrid(coords[:1], 1)  # the rows are distinct by construction, and a check would sort all of them
    grid = like._known(coords, box)
    features = torch.randn(min(len(coords), 2**20), channels).to(dtype)  # repeated: noise for all of them takes long
    times = -(-len(coords) // len(features))
    return sc.SparseTensor(grid, features.repeat(times, 1)[: len(coords)])


def main(
    voxels: Annotated[float, typer.Option(help="Voxels of the shell.")] = 50e6,
    budget: Annotated[float, typer.Option(help="Bytes that blocks may take.")] = 20e9,
    dtype: Annotated[str, typer.Option(help="Of features and weights.")] = "float16",
    device: Annotated[str, typer.Option(help="Where the network is.")] = "cuda",
    whole: Annotated[bool, typer.Option(help="Compare with the whole scene on the device.")] = False,
    channels: Annotated[int, typer.Option(help="Width of the finest level.")] = 32,
) -> None:
    torch.manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)
    widths = [channels * 2**level for level in range(4)]
    net = nn.UNet(4, 20, channels=widths).eval().to(device, kind)
    compute, original, counted = 0.0, Work.run, []

    def timed(self: Work, *args: object) -> None:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        original(self, *args)  # type: ignore[arg-type]
        end.record()
        counted.append((begin, end))

    with torch.no_grad():
        sc.stream(net, shell(200_000, 4, kind), int(budget))  # what is compiled and tuned once
        x = shell(int(voxels), 4, kind)
        on_gpu = device.startswith("cuda")
        if on_gpu:
            Work.run = timed  # type: ignore[method-assign, assignment]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seen: list[tuple[int, int, float]] = []
        begun = time.perf_counter()

        def progress(done: int, total: int) -> None:
            seen.append((done, total, time.perf_counter() - begun))

        y = sc.stream(net, x, int(budget), progress=progress)
        seconds, peak = time.perf_counter() - begun, 0
        Work.run = original  # type: ignore[method-assign]
        if on_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            compute = sum(a.elapsed_time(b) for a, b in counted) / 1000
        print(f"{len(x.grid):,} voxels, {seen[-1][1]} blocks, budget {budget / 1e9:.1f} GB, {dtype}")
        print(f"streamed {seconds:.2f} s, first block after {seen[0][2]:.2f} s, convolutions alone {compute:.2f} s")
        print(f"peak {peak / 1e9:.2f} GB, network included")
        if whole:
            begun = time.perf_counter()
            want = net(x.to(device)).features.cpu()
            print(f"whole {time.perf_counter() - begun:.2f} s, same bits: {torch.equal(y.features, want)}")


if __name__ == "__main__":
    typer.run(main)
