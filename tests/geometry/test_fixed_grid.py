"""Grids of fixed size: live rows as on an ordinary grid, dead rows met by nothing, faults said, graphs replayed."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparseconv import ConvolutionPlan, VoxelGrid
from sparseconv.geometry.fixed_grid import FixedGrid

on_a_card = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def scene(rows: int, spread: int, seed: int, batches: int = 2, device: str = "cpu") -> torch.Tensor:
    """Distinct rows in a random order, some coordinates negative; the last batch item is empty now and then."""
    generator = torch.Generator().manual_seed(seed)
    coords = torch.randint(-spread, spread, (rows, 4), generator=generator, dtype=torch.int32)
    coords[:, 0] = coords[:, 0].abs() % batches
    coords = torch.unique(coords, dim=0)
    return coords[torch.randperm(len(coords), generator=generator)].contiguous().to(device)


def padded(coords: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates followed by dead rows, and their count."""
    dead = coords.new_full((rows - len(coords), coords.shape[1]), -1)
    return torch.cat([coords, dead]), torch.tensor([len(coords)], dtype=torch.int32, device=coords.device)


class Step:
    """Maps and convolutions of every kind over one grid, and all gradients."""

    def __init__(self, channels: int = 16, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = [
            (torch.randn(taps, channels, channels, generator=generator) / 8).to(device, dtype).requires_grad_()
            for taps in (27, 8, 27, 27, 27, 8)
        ]
        self.bias = torch.randn(channels, generator=generator).to(device, dtype).requires_grad_()

    def __call__(self, grid: VoxelGrid, x: torch.Tensor, cotangent: torch.Tensor) -> list[torch.Tensor]:
        """z, then the gradients of x, the weights and the bias; ``cotangent`` is 0 in dead rows."""
        same, down = ConvolutionPlan(grid, 3), ConvolutionPlan(grid, 2, stride=2)
        below, wide = ConvolutionPlan(down.target, 3), ConvolutionPlan(down.target, 3, stride=2)
        a, b, c, d, e, f = self.weights
        y = same.execute(x, a, self.bias)
        h = below.execute(down.execute(y, b), c, self.bias)
        h = h + wide.transpose().execute(wide.execute(h, d), e, self.bias)
        z = down.transpose().execute(h, f, self.bias) + y
        self.plans = same, down, below, wide  # a graph's constants live with them
        return [z, *torch.autograd.grad((z * cotangent).sum(), (x, *self.weights, self.bias))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "spread"), [(3000, 12), (60_000, 25), (900_000, 120)])
def test_a_captured_step_serves_other_scenes(rows: int, spread: int, dtype: torch.dtype) -> None:
    step, like = Step(32, "cuda", dtype), VoxelGrid(scene(rows, spread, 0, device="cuda"))
    capacity = len(like) * 5 // 4
    coords, count = padded(like.coords, capacity)
    x = torch.zeros(capacity, 32, device="cuda", dtype=dtype, requires_grad=True)
    cotangent = torch.zeros(capacity, 32, device="cuda", dtype=dtype)

    def run() -> tuple[FixedGrid, list[torch.Tensor]]:
        grid = FixedGrid(coords, count, like)
        return grid, step(grid, x, cotangent)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        grid, results = run()
    for seed, part in enumerate((1.0, 0.6, 1.15, 0.05), 1):
        real = scene(int(rows * part), spread, seed, device="cuda")[:capacity]
        ordinary, generator = VoxelGrid(real, 2), torch.Generator("cuda").manual_seed(seed)
        rows_of, n = torch.randn(capacity, 64, generator=generator, device="cuda").to(dtype), len(real)
        with torch.no_grad():
            coords.fill_(-1)[:n] = real
            count.fill_(n)
            x.copy_(rows_of[:, :32])  # whatever the dead rows hold
            cotangent.zero_()[:n] = rows_of[:n, 32:]
        for buffer in results:
            buffer.fill_(float("nan"))
        graph.replay()
        assert grid.fault.item() == 0
        want = Step(32, "cuda", dtype)(ordinary, x.detach()[:n].clone().requires_grad_(), rows_of[:n, 32:])
        for index, (a, b) in enumerate(zip(results, want)):
            assert bool(torch.isfinite(a).all()), index
            if index < 2:
                assert bool((a[n:] == 0).all()) or index == 0
                a = a[:n]
            assert float((a.double() - b.double()).norm() / b.double().norm()) < (
                5e-3 if dtype == torch.float16 else 1e-5
            )
    with torch.no_grad():
        coords[0, 1] = 10_000
    graph.replay()
    assert grid.fault.item() == 1
