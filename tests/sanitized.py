"""Every family of GPU kernels once, small, for a memory checker: ``compute-sanitizer python -m tests.sanitized cuda``.

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each array is an allocation of its own, so that a step past its end is seen.
Results are compared with the CPU's in double precision.
"""

from __future__ import annotations

import sys

import torch

import sparseconv as sc
from sparseconv import pointwise, products
from sparseconv.bench.timing import DTYPES, precision
from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.nn import BatchNorm
from sparseconv.ops import max_pool

LIMIT = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
#: voxels, edge of their box: dense and sparse, no multiple of any tile
SCENES = ((601, 10), (777, 60))
#: channels in and out, groups
CHANNELS = ((16, 24, 1), (5, 7, 1), (64, 64, 1), (32, 32, 32), (8, 24, 8))
KINDS = ({"stride": 2}, {"dilation": 2}, {"target": "full"}, {"boundary": sc.Boundary.periodic((60, 60, 60))})


def voxels(count: int, edge: int) -> torch.Tensor:
    cells = torch.randperm(edge**3, generator=torch.Generator().manual_seed(edge))[:count]
    place = torch.stack([cells // edge**2, cells // edge % edge, cells % edge], 1)
    return torch.cat([torch.zeros(count, 1, dtype=torch.long), place], 1).int()


def close(got: torch.Tensor, want: torch.Tensor, dtype: str) -> None:
    got, want = got.detach().cpu().double(), want.detach().double()
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    assert error <= LIMIT[dtype], f"{dtype}: an error of {error:.2g}"


def convolve(
    coords: torch.Tensor, device: str, kernel: int, kind: dict, dtype: str, c_in: int, c_out: int, groups: int
) -> None:
    """Forward and both gradients of a plan and of its transpose, beside the CPU's."""
    gen = torch.Generator().manual_seed(c_in)
    plans = [sc.ConvolutionPlan(sc.VoxelGrid(c), kernel, groups=groups, **kind) for c in (coords.to(device), coords)]
    for there, here in (plans, [plan.transpose() for plan in plans]):
        rows, out = here.num_in, here.kernel_map.num_out
        made = (torch.randn(s, generator=gen) for s in ((rows, c_in), (here.num_taps, c_in // groups, c_out)))
        x, w = (t.to(DTYPES[dtype]) for t in made)
        grad = torch.randn(out, c_out, generator=gen).to(x.dtype)
        found = []
        for plan, place, of in ((there, device, x.dtype), (here, "cpu", torch.float64)):
            leaves = [t.to(place, of).requires_grad_() for t in (x, w)]
            y = plan.execute(*leaves)
            found.append((y, *torch.autograd.grad(y, leaves, grad.to(place, of))))
        for got, want in zip(*found):
            close(got, want, dtype)


def fixed(coords: torch.Tensor, device: str) -> None:
    """A grid with room for more rows than it has."""
    like = sc.VoxelGrid(coords.to(device))
    room = torch.full((len(coords) + 100, 4), -1, dtype=torch.int32)
    room[: len(coords)] = coords
    grid = FixedGrid(room.to(device), torch.tensor([len(coords)], dtype=torch.int32, device=device), like)
    x, w = torch.randn(len(room), 16), torch.randn(27, 16, 16)
    y = sc.ConvolutionPlan(grid, 3).execute(x.to(device), w.to(device))
    want = sc.ConvolutionPlan(sc.VoxelGrid(coords), 3).execute(x[: len(coords)].double(), w.double())
    close(y[: len(coords)], want, "tf32")


def others(coords: torch.Tensor, device: str) -> None:
    """Pooling, normalization, products, pointwise functions."""
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(len(coords), 24, generator=gen)
    w = torch.randn(27, 24, generator=gen)
    found = []
    for place, of in ((device, torch.float32), ("cpu", torch.float64)):
        grid = sc.VoxelGrid(coords.to(place))
        a, b = x.to(place, of).requires_grad_(), w.to(place, of).requires_grad_()
        pooled, _ = max_pool(a, sc.ConvolutionPlan(grid, 2, stride=2))
        infos = sc.ConvolutionPlan(grid, 3).kernel_map.product_infos()
        scaled = products.sparse_mul(a, b, *infos)
        norm = BatchNorm(24).to(place, of)
        normed = norm(sc.SparseTensor(grid, a)).features
        chain = pointwise.gelu(a.t() * 2 + a.t().flip(0))
        total = pooled.sum() + scaled.square().sum() + normed.square().sum() + chain.square().sum()
        found.append((pooled, scaled, normed, chain, *torch.autograd.grad(total, (a, b))))
    for got, want in zip(*found):
        close(got, want, "fp32")


def main(device: str) -> None:
    for scene in SCENES:
        coords = voxels(*scene)
        for dtype in ("fp16", "bf16", "tf32", "fp32", "fp64"):
            with precision(dtype):
                for channels in CHANNELS:
                    convolve(coords, device, 3, {}, dtype, *channels)
                for kind in KINDS:
                    convolve(coords, device, 3, kind, dtype, 32, 32, 1)
                convolve(coords, device, 5, {}, dtype, 16, 16, 1)
        fixed(coords, device)
        others(coords, device)
    print("all kernels ran")


if __name__ == "__main__":
    main(sys.argv[1])
