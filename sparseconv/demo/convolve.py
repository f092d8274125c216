"""The demonstration on a cloud of the user's own: voxels, plans, one forward and one backward pass, a picture."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console

from sparseconv.demo.clouds import default_voxel_size, read_cloud
from sparseconv.demo.plans import plans_in_use
from sparseconv.demo.report import plans_table
from sparseconv.geometry import VoxelGrid, voxelize
from sparseconv.nn import UNet
from sparseconv.plan import shared_plan
from sparseconv.tensor import SparseTensor
from sparseconv.viz import show
from sparseconv.viz.view import View

CHANNELS = (16, 32, 64)


def convolve_cloud(
    console: Console,
    device: torch.device,
    output: Path,
    file: Path,
    voxel_size: float | None = None,
    seed: int = 0,
    *,
    columns: int | None = None,
    drop_nonfinite: bool = False,
) -> bool:
    """Voxelise a cloud, plan a U-Net on it, run it forward and backward, and draw the voxels. Returns True.

    Args:
        console: where to write.
        device: where to compute.
        output: the picture.
        file: the cloud, in a format of `read_cloud`.
        voxel_size: in the file's unit; default: about 1/250 of the cloud's widest axis.
        seed: of the weights.
        columns, drop_nonfinite: as `read_cloud` takes them.
    """
    begin = time.perf_counter()
    points = read_cloud(file, columns=columns, drop_nonfinite=drop_nonfinite)
    read = time.perf_counter() - begin
    size = voxel_size or default_voxel_size(points)
    low = points.amin(0)
    widths = " × ".join(f"{w:.4g}" for w in (points.amax(0) - low).tolist())
    console.print(
        f"[bold]{file.name}[/]: {len(points):,} points, {widths} in the file's unit, read in {read:.1f} s",
        highlight=False,
    )
    begin = time.perf_counter()
    corner = torch.floor(low / size) * size  # of a voxel, so that indices start near 0 however far away the origin is
    grid, rows = voxelize(points.to(device), size, origin=corner.tolist())
    features = _where_points_lie(grid, points.to(device), rows)
    _wait(device)
    fill = len(grid) / grid.extent.size
    console.print(
        f"Voxels of {size:g}{'' if voxel_size else ' (chosen from the extent)'}: {len(grid):,}, "
        f"{len(points) / len(grid):.1f} points per voxel, {fill:.2g} of the bounding box, on {device}, voxelized in "
        f"{time.perf_counter() - begin:.2f} s\n",
        highlight=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = UNet(features.shape[1], 1, CHANNELS, block="plain").to(device)
    x = SparseTensor(grid, features)
    begin = time.perf_counter()
    uses = plans_in_use(net, x)
    _step(net, x, device)  # the first gradient compiles kernels too
    first = time.perf_counter() - begin
    console.print(plans_table(uses))
    anew = SparseTensor(VoxelGrid(grid.coords, grid.batch_size, grid.voxel_size, grid.origin), features)
    scene = sum(_step(net, anew, device))
    forward, backward = _step(net, x, device)
    plans = max(0.0, scene - forward - backward)
    console.print(
        f"\nA sparse U-Net of {sum(p.numel() for p in net.parameters()):,} parameters: forward {forward:.2f} s, "
        f"backward {backward:.2f} s; building the plans of a new scene takes {plans:.2f} s. (The first step took "
        f"{max(0.0, first - scene):.2f} s longer, because kernels are compiled once.)",
        highlight=False,
    )
    cloud_view(grid, file.name).save(output)
    console.print(f"Picture: [bold]{output}[/]")
    return True


def _step(net: torch.nn.Module, x: SparseTensor, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and of its backward pass."""
    begin = time.perf_counter()
    y = net(x).features
    _wait(device)
    between = time.perf_counter()
    y.square().mean().backward()
    _wait(device)
    return between - begin, time.perf_counter() - between


def _where_points_lie(grid: VoxelGrid, points: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(N, 4): the mean place of each voxel's points from its center, in voxels, and the logarithm of their number."""
    counts = torch.bincount(rows, minlength=len(grid)).to(points)
    mean = points.new_zeros(len(grid), 3).index_add_(0, rows, points - points.new_tensor(grid.origin))
    mean = mean / counts[:, None] / points.new_tensor(grid.voxel_size)
    return torch.cat([mean - grid.coords[:, 1:] - 0.5, counts.log()[:, None]], 1).float()


def _wait(device: torch.device) -> None:
    """Let a GPU finish, so that a clock reads what was done and not what was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cloud_view(grid: VoxelGrid, name: str) -> View:
    """The cloud, colored by height, without a few voxels that lie far away."""
    pairs = shared_plan(grid, 3).kernel_map.num_pairs
    near = _within(grid)
    rest = len(grid) - int(near.sum())
    title = f"{name}: {len(grid):,} voxels of {grid.voxel_size[0]:g}, {pairs:,} pairs of neighbors in a 3×3×3 window"
    return show(grid.subset(near), title=title + f" ({rest:,} far ones left out)" * (rest > 0))


def _within(grid: VoxelGrid, share: float = 0.01) -> torch.Tensor:
    """(N,) bool: the voxels of a view that a few far ones do not shrink; all, where that would be little narrower."""
    coords = grid.coords[:, 1:].double()
    ordered = coords.sort(0).values
    margin = round(share * len(grid))
    low, high = ordered[margin], ordered[len(grid) - 1 - margin]
    room = 0.1 * (high - low) + 1
    return ((coords >= low - room) & (coords <= high + room)).all(1)
