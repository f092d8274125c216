"""The demonstration on a cloud of the user's own: voxels, plans, one forward and one backward pass, a picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from sparseconv.demo.clouds import default_voxel_size, read_cloud
from sparseconv.demo.plans import plans_in_use
from sparseconv.demo.report import plans_table
from sparseconv.geometry import VoxelGrid, voxelize
from sparseconv.nn import UNet
from sparseconv.plan import shared_plan
from sparseconv.tensor import SparseTensor
from sparseconv.viz.figures import new_figure, save_figure
from sparseconv.viz.solid import scatter3d

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
        f"{len(points) / len(grid):.1f} points in each, {fill:.2g} of their box, on {device}, found in "
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
        f"backward {backward:.2f} s; a new scene needs {plans:.2f} s for its plans before. (The first step took "
        f"{max(0.0, first - scene):.2f} s more: kernels are compiled once.)",
        highlight=False,
    )
    save_figure(cloud_figure(grid, file.name), output)
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
    """(N, 4): the mean place of each voxel's points from its centre, in voxels, and the logarithm of their number."""
    counts = torch.bincount(rows, minlength=len(grid)).to(points)
    mean = points.new_zeros(len(grid), 3).index_add_(0, rows, points - points.new_tensor(grid.origin))
    mean = mean / counts[:, None] / points.new_tensor(grid.voxel_size)
    return torch.cat([mean - grid.coords[:, 1:] - 0.5, counts.log()[:, None]], 1).float()


def _wait(device: torch.device) -> None:
    """Let a GPU finish, so that a clock reads what was done and not what was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cloud_figure(grid: VoxelGrid, name: str) -> Figure:
    """The cloud from the side and from above, coloured by height and by neighbours, and how many voxels have."""
    plan = shared_plan(grid, 3)
    neighbours = (plan.kernel_map.neighbors >= 0).sum(0).cpu()
    grid = grid.to("cpu")
    shown = _within(grid)
    part, rest = grid.subset(shown), len(grid) - int(shown.sum())
    height = part.positions()[:, 2]
    low, high = (height.kthvalue(max(1, round(share * len(height)))).values for share in (0.02, 0.98))
    with new_figure(13.6, 6.2) as figure:
        areas = figure.add_gridspec(2, 2, width_ratios=(1.5, 1), height_ratios=(1.5, 1))
        side_view = figure.add_subplot(areas[:, 0], projection="3d", computed_zorder=False)
        scatter3d(
            side_view,  # type: ignore[arg-type]
            part,
            height,
            cmap="viridis",
            vmin=float(low),
            vmax=float(high),
            s=1.6,
            most=60_000,
            true_size=True,
        )
        side_view.set_title(
            "voxels, coloured by height z" + f" ({rest:,} far ones left out)" * (rest > 0), fontweight="bold"
        )
        above = figure.add_subplot(areas[0, 1])
        _from_above(figure, above, part, neighbours[shown])
        _neighbour_bars(figure.add_subplot(areas[1, 1]), plan.coverage, plan.num_taps)
        figure.suptitle(
            f"{name}: {len(grid):,} voxels of {grid.voxel_size[0]:g} (the file's unit), "
            f"{plan.kernel_map.num_pairs:,} pairs of neighbours in a 3×3×3 window",
            fontsize=12,
        )
    return figure


def _within(grid: VoxelGrid, share: float = 0.01) -> torch.Tensor:
    """(N,) bool: the voxels of a view that a few far ones do not shrink; all, where that would be little narrower."""
    coords = grid.coords[:, 1:].double()
    ordered = coords.sort(0).values
    margin = round(share * len(grid))
    low, high = ordered[margin], ordered[len(grid) - 1 - margin]
    room = 0.1 * (high - low) + 1
    return ((coords >= low - room) & (coords <= high + room)).all(1)


def _from_above(figure: Figure, axes: Axes, grid: VoxelGrid, neighbours: torch.Tensor) -> None:
    """The mean number of neighbours of each column of voxels."""
    box = grid.extent
    flat = (grid.coords[:, 1:3].long() - torch.tensor(box.start[:2])) @ torch.tensor([1, box.shape[0]])
    shrink = max(1, -(-max(box.shape[:2]) // 1500))  # no more cells than the picture has dots
    columns, rows = (-(-n // shrink) for n in box.shape[:2])
    place = flat.div(box.shape[0], rounding_mode="floor") // shrink * columns + flat % box.shape[0] // shrink
    count = torch.bincount(place, minlength=columns * rows)
    mean = torch.bincount(place, weights=neighbours.double(), minlength=columns * rows) / count
    edges: list[float] = []
    for axis in range(2):
        start = grid.origin[axis] + grid.voxel_size[axis] * box.start[axis]
        edges += [start, start + grid.voxel_size[axis] * shrink * (columns, rows)[axis]]
    shown = axes.imshow(
        mean.view(rows, columns).numpy(),
        origin="lower",
        extent=(edges[0], edges[1], edges[2], edges[3]),
        cmap="magma",
        interpolation="nearest",
    )
    figure.colorbar(shown, ax=axes, label="mean neighbours", shrink=0.85)
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.set_title("from above", fontweight="bold")


def _neighbour_bars(axes: Axes, coverage: torch.Tensor, taps: int) -> None:
    """How many voxels have 1, 2, ... neighbours, themselves included."""
    shares = (coverage[1:] / coverage.sum() * 100).tolist()
    axes.bar(range(1, taps + 1), shares, color="#2a7f62")
    axes.set_xlabel(f"occupied cells in the window of {taps}, the voxel itself included")
    axes.set_ylabel("% of voxels")
    axes.spines[["top", "right"]].set_visible(False)
    mean = sum(n * share for n, share in enumerate(shares, 1)) / 100
    axes.set_title(f"{mean:.1f} of {taps} taps find a neighbour: a dense convolution computes all", fontsize=9)
