"""Voxels in three dimensions: cubes, point clouds, and ray-traced surfaces."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from sparseconv.geometry import VoxelGrid
from sparseconv.viz.cells import axis_label

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Shaped
    from mpl_toolkits.mplot3d.axes3d import Axes3D


def scatter3d(
    axes: Axes3D,
    grid: VoxelGrid,
    values: Shaped[torch.Tensor, " N"],
    *,
    unit: str = "",
    most: int = 40_000,
    zoom: float = 1.25,
    true_size: bool = False,
    **options: Any,
) -> Any:
    """Draw voxel centers as points colored by values (N,); of more than ``most`` voxels, every n-th is drawn.

    ``axes`` has matplotlib's 3-D projection; ``options`` go to its ``scatter``. ``zoom`` scales the box in its axes: 1
    leaves room for the tick labels of flat boxes. With ``true_size`` a point is a square as wide as a voxel in the
    picture (at the center of the box, for the figure's size at the call). Returns what ``scatter`` returns.

    >>> from sparseconv.viz import new_figure
    >>> grid = VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 0, 1, 2]]))
    >>> with new_figure(3, 3) as figure:
    ...     dots = scatter3d(figure.add_subplot(projection="3d"), grid, torch.tensor([0.0, 1.0]))
    >>> dots.get_array().tolist()
    [0.0, 1.0]
    """
    from matplotlib.markers import MarkerStyle

    step = max(1, math.ceil(len(grid) / most))
    centres = grid.positions()[::step].cpu().numpy()
    colours = values.detach()[::step].float().cpu().numpy()
    look: dict[str, Any] = {"s": 1.0, "linewidths": 0, "depthshade": False} | options
    dots = axes.scatter(centres[:, 0], centres[:, 1], centres[:, 2], c=colours, **look)
    if len(centres):
        _fit_box(axes, np.ptp(centres, 0), zoom)
    if true_size and len(centres):
        dots.set_paths([MarkerStyle("s").get_path().transformed(MarkerStyle("s").get_transform())])
        dots.set_sizes([_voxel_width(axes, grid) ** 2])
    for name in "xyz":
        getattr(axes, f"set_{name}label")(axis_label(name, unit))
    return dots


def draw_voxels(
    axes: Axes3D, grid: VoxelGrid, colors: Float[np.ndarray, "N 3"], *, unit: str = "", zoom: float = 1.25
) -> Any:
    """Draw voxels of rank 3 as cubes: the faces that the viewer can see, shaded by their direction.

    ``axes`` has matplotlib's 3-D projection, seen as it is now. Returns the collection of faces. Each face is a
    polygon, so some thousand voxels are enough; use `scatter3d` for more.

    >>> from sparseconv.viz import new_figure
    >>> grid = VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]]))
    >>> with new_figure(3, 3) as figure:
    ...     axes = figure.add_subplot(projection="3d")
    ...     faces = draw_voxels(axes, grid, np.ones((2, 3)))
    >>> len(faces.get_facecolor())  # two sides of each, and one top
    5
    """
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    a, e = math.radians(axes.azim), math.radians(axes.elev)
    toward = (math.cos(a) * math.cos(e), math.sin(a) * math.cos(e), math.sin(e))
    size = np.asarray(grid.voxel_size)
    low = grid.positions().cpu().numpy() - size / 2
    corners, shades = [], []
    for axis, (side, shade) in enumerate(zip(toward, (0.86, 0.7, 1.0))):
        step = torch.zeros(4, dtype=grid.coords.dtype, device=grid.device)
        step[1 + axis] = 1 if side >= 0 else -1
        open_ = (grid.lookup(grid.coords + step) < 0).cpu().numpy()
        square = np.insert(np.array([[0, 0], [1, 0], [1, 1], [0, 1]]), axis, int(side >= 0), axis=1)
        corners.append(low[open_][:, None] + square * size)
        shades.append(colors[open_] * shade)
    faces = Poly3DCollection(
        np.concatenate(corners), facecolors=np.concatenate(shades), edgecolors="#00000030", linewidths=0.3
    )
    axes.add_collection3d(faces)
    if len(low):
        spans = np.ptp(np.concatenate([low, low + size]), 0)
        for name, start, span in zip("xyz", low.min(0), spans):
            getattr(axes, f"set_{name}lim3d")(start, start + span)
        _fit_box(axes, spans, zoom)
    for name in "xyz":
        getattr(axes, f"set_{name}label")(axis_label(name, unit))
    return faces


def _fit_box(axes: Axes3D, spans: np.ndarray, zoom: float) -> None:
    """True proportions, and as many marks along an axis as there is room for."""
    from matplotlib.ticker import MaxNLocator

    sides = np.maximum(spans, 0.05 * spans.max() + 1e-9)
    axes.set_box_aspect(sides, zoom=zoom)
    for name, side in zip("xyz", sides):
        getattr(axes, f"{name}axis").set_major_locator(MaxNLocator(max(1, round(6 * side / sides.max()))))


def _voxel_width(axes: Axes3D, grid: VoxelGrid) -> float:
    """The width of a voxel on the picture, in points: of the longest axis' voxel where it lies across the view."""
    from mpl_toolkits.mplot3d import proj3d

    spans = [high - low for low, high in (axes.get_xlim3d(), axes.get_ylim3d(), axes.get_zlim3d())]
    middle = [(low + high) / 2 for low, high in (axes.get_xlim3d(), axes.get_ylim3d(), axes.get_zlim3d())]
    axes.apply_aspect()
    to_picture = axes.get_proj()

    def at(place: list[float]) -> np.ndarray:
        x, y, _ = proj3d.proj_transform(*place, to_picture)
        return np.asarray(axes.transData.transform((x, y)))

    widths = []
    for axis in range(3):
        ends = [list(middle), list(middle)]
        ends[0][axis] -= spans[axis] / 4
        ends[1][axis] += spans[axis] / 4
        length = float(np.linalg.norm(at(ends[1]) - at(ends[0])))  # pixels of half the axis
        widths.append(length / (spans[axis] / 2) * grid.voxel_size[axis])
    return max(widths) * 72 / axes.get_figure().dpi  # type: ignore[union-attr]


def render_surface(
    solid: Float[torch.Tensor, "X Y Z"],
    colours: Float[torch.Tensor, "3 X Y Z"],
    *,
    azimuth: float = 40.0,
    elevation: float = 25.0,
    pixels: int = 480,
    level: float = 0.5,
    shine: float = 0.15,
    depth_of_colour: float = 1.0,
) -> Float32[np.ndarray, "pixels pixels 4"]:
    """A shaded picture of the surface ``solid = level``, seen from far away along parallel rays.

    Args:
        solid: (X, Y, Z) floats, how much of each cell is filled; z is up.
        colors: (3, X, Y, Z) in [0, 1], the color of each cell.
        azimuth, elevation: where the viewer stands, in degrees: azimuth 0 looks back from +x, 90 from +y.
        pixels: width and height; the picture spans the box's diagonal.
        level: the value of ``solid`` at the surface.
        shine: the strength of the highlight.
        depth_of_color: how far below the surface its color is read, in cells.

    Returns:
        (pixels, pixels, 4) float32 in [0, 1], row 0 on top; transparent where no ray meets the surface.

    >>> image = render_surface(torch.ones(4, 4, 4), torch.ones(3, 4, 4, 4), pixels=8)
    >>> image.shape, image[0, 0].tolist(), float(image[4, 4, 3])
    ((8, 8, 4), [0.0, 0.0, 0.0, 0.0], 1.0)
    """
    shape = torch.tensor(solid.shape, dtype=torch.float32)
    around = F.avg_pool3d(F.pad(solid[None, None].float(), (3,) * 6), 7, 1)[0]
    fields = torch.cat([solid[None].float(), around, colours.float()])
    radius = float(shape.norm()) / 2
    a, e = math.radians(azimuth), math.radians(elevation)
    toward = torch.tensor([math.cos(a) * math.cos(e), math.sin(a) * math.cos(e), math.sin(e)])
    right = torch.tensor([-math.sin(a), math.cos(a), 0.0])
    up = torch.linalg.cross(toward, right)

    def at(points: torch.Tensor, channels: slice) -> torch.Tensor:
        """Values (n, C) of the fields at points (n, 3), in cells from the middle of the box."""
        place = (2 * points / shape).flip(-1).view(1, 1, 1, -1, 3)
        return F.grid_sample(fields[None, channels], place, align_corners=False)[0, :, 0, 0].T

    line = torch.linspace(-radius, radius, pixels)
    start = (line[None, :, None] * right - line[:, None, None] * up).reshape(-1, 3) + radius * toward
    depth = torch.full((len(start),), torch.nan)
    active, before = torch.arange(len(start)), torch.zeros(len(start))
    step = 0.5
    for n in range(math.ceil(2 * radius / step)):
        points = start[active] - n * step * toward
        near = (points.abs() <= shape / 2 + 1).all(1)
        value = torch.zeros(len(active))
        value[near] = at(points[near], slice(0, 1))[:, 0]
        hit = value >= level
        share = (level - before[hit]) / (value[hit] - before[hit]).clamp(min=1e-6)
        depth[active[hit]] = (n - 1 + share) * step
        active, before = active[~hit], value[~hit]
    met = depth.isfinite()
    points = start[met] - depth[met, None] * toward
    steps = torch.eye(3) * 0.75
    slope = torch.cat([at(points + d, slice(0, 1)) - at(points - d, slice(0, 1)) for d in steps], 1)
    normal = -F.normalize(slope, dim=1)
    light = F.normalize(toward + 0.9 * up - 0.5 * right, dim=0)
    halfway = F.normalize(light + toward, dim=0)
    shade = 0.46 + 0.54 * (normal @ light).clamp(min=0)
    hollow = 1 - 0.75 * (at(points + 1.5 * normal, slice(1, 2))[:, 0] - 0.25).clamp(0, 0.8)
    gleam = shine * (normal @ halfway).clamp(min=0) ** 24
    colour = at(points - depth_of_colour * normal, slice(2, 5)) * (shade * hollow)[:, None] + gleam[:, None]
    image = torch.zeros(len(start), 4)
    image[met] = torch.cat([colour.clamp(0, 1), torch.ones(len(points), 1)], 1)
    return image.view(pixels, pixels, 4).numpy()
