"""`show`: a grid, a tensor or a plan, as an interactive view in a notebook and as a picture elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sparseconv.checks import check_count, check_tensor
from sparseconv.geometry import VoxelGrid
from sparseconv.plan import ConvolutionPlan
from sparseconv.tensor import SparseTensor
from sparseconv.viz.cells import axis_label, unit_of
from sparseconv.viz.figures import STYLE, new_figure, save_figure
from sparseconv.viz.meetings import busiest_row, draw_cells, draw_lines, draw_window, edges_into
from sparseconv.viz.palette import CATEGORIES, GREY, INK, SEQUENTIAL, WINDOW
from sparseconv.viz.solid import draw_voxels, scatter3d

if TYPE_CHECKING:
    from jaxtyping import Shaped
    from matplotlib.figure import Figure

#: voxels that a picture draws as cubes, at most
CUBES = 6000


@dataclass(frozen=True)
class View:
    """What `show` returns: a picture and, in a notebook with k3d, an interactive scene.

    A notebook displays it by itself. A script opens no window: ``show(grid).save("grid.png")`` writes the picture.

    >>> show(VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1]])))
    View(picture: save('picture.png') writes it)
    """

    figure: Figure
    scene: Any = None  # a k3d.Plot

    def save(self, path: str | Path, dpi: int = 110) -> Path:
        """Write the picture: a whole file or none."""
        return save_figure(self.figure, path, dpi, tight=True)

    def _repr_mimebundle_(self, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> dict[str, Any]:
        """The picture as PNG, and the interactive scene for front ends that support it."""
        from matplotlib import rc_context

        image = BytesIO()
        with rc_context(STYLE):
            self.figure.savefig(image, format="png", dpi=90, bbox_inches="tight", pad_inches=0.08)
        bundle: dict[str, Any] = {"text/plain": f"View({self._holds})", "image/png": image.getvalue()}
        if self.scene is not None:
            made = self.scene._repr_mimebundle_()
            bundle |= made[0] if isinstance(made, tuple) else made
        return bundle

    def __repr__(self) -> str:
        return f"View({self._holds}: save('picture.png') writes it)"

    @property
    def _holds(self) -> str:
        return "picture" if self.scene is None else "picture and scene"


def show(
    what: VoxelGrid | SparseTensor | ConvolutionPlan,
    values: Shaped[torch.Tensor, " N"] | None = None,
    *,
    row: int | None = None,
    batch: int = 0,
    unit: str | None = None,
    title: str = "",
    names: Sequence[str] = (),
    live: bool | None = None,
) -> View:
    """Show voxels colored by value, or the edges of a plan's kernel map.

    A notebook displays what this returns. In a script, save it: ``show(grid).save("grid.png")``.

    Args:
        what: a grid or a tensor of rank 2 or 3, or a plan of rank 1, 2 or 3.
        values: (N,), one per voxel: floats use a color scale, integers (shards, labels) one color each. Default: for a
            tensor its single channel, or the norm of its features; for a grid the last axis, the height.
        row: for a plan of rank 2 or 3, the output whose edges are drawn; default: one with the most inputs.
        batch: the batch item to show.
        unit: unit of the grid's voxel size, for the labels; default: voxels if it has none.
        title: title of the picture; default: what it shows.
        names: names of the integers 0, 1, ... among the values.
        live: whether to create an interactive k3d scene too; default: in a notebook with k3d installed.

    Returns:
        A `View` with the matplotlib ``figure`` and, if created, the k3d ``scene``.

    Raises:
        TypeError: if ``what`` is no grid, tensor or plan. ValueError: if the rank cannot be drawn or values do not fit.
        ImportError: if matplotlib, or k3d with ``live=True``, is not installed.

    >>> grid = VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1]]))
    >>> show(ConvolutionPlan(grid, 3)).figure.axes[0].get_title()
    'inputs, with their taps: 3 of 9 meet a voxel'
    """
    live = _in_notebook() if live is None else live
    if isinstance(what, ConvolutionPlan):
        return _plan_view(what, row, unit, title, live)
    if isinstance(what, SparseTensor):
        length = what.features.float().norm(dim=1) if what.channels != 1 else what.features[:, 0]
        grid, values, label = what.grid, length if values is None else values, "value"
        label = "value" if what.channels == 1 else "norm of the features"
    elif isinstance(what, VoxelGrid):
        grid, label = what, "value"
        if values is None:
            label = axis_label("xyzw"[what.rank - 1], unit_of(what, unit))
    else:
        raise TypeError(f"show takes a VoxelGrid, a SparseTensor or a ConvolutionPlan; got {type(what).__name__}")
    if grid.rank not in (2, 3):
        raise ValueError(f"voxels of rank 2 or 3 are shown; got {grid}")
    values = grid.positions()[:, -1] if values is None else values
    check_tensor("values", values)
    check_count("batch", batch)
    if values.shape != (len(grid),):
        raise ValueError(f"values must be ({len(grid)},), one per voxel; got {tuple(values.shape)}")
    here = grid.coords[:, 0] == batch
    values = values.detach()[here].cpu()
    grid = grid.subset(here).to("cpu")
    title = title or f"{len(grid):,} voxel{'s' * (len(grid) != 1)}"
    unit = unit_of(grid, unit)
    flat = grid.rank == 2
    whole = not values.is_floating_point()
    with new_figure(6.4 if whole else 5.6, 4.6) as figure:
        axes = figure.add_subplot(projection=None if flat else "3d")
        colours = _category_colours(values) if whole else None
        if flat:
            _flat_cells(figure, axes, grid, values, colours, unit, label)
        else:
            _cloud(figure, axes, grid, values, colours, unit, label)
        if whole:
            for number in values.unique().tolist()[:12]:
                colour = CATEGORIES[number % len(CATEGORIES)]
                name = names[number] if 0 <= number < len(names) else str(number)
                axes.plot(*([[]] * (2 if flat else 3)), linestyle="", marker="s", color=colour, label=name)
            figure.legend(loc="outside right center")
        axes.set_title(title)
    return View(figure, _scene(grid, values, colours) if live and not flat else None)


def _plan_view(plan: ConvolutionPlan, row: int | None, unit: str | None, title: str, live: bool) -> View:
    rank = plan.source.rank
    if rank == 1:
        with new_figure(7.2, 2.2) as figure:
            draw_lines(figure.add_subplot(), plan, title=title or repr(plan))
        return View(figure)
    if rank == 2:
        with new_figure(8.4, 4.4) as figure:
            left, right = figure.subplots(1, 2)
            draw_window(left, right, plan, row, unit=unit)
            figure.suptitle(title or repr(plan), fontsize=9)
        return View(figure)
    if rank != 3:
        raise ValueError(f"plans of rank 1, 2 or 3 are shown; got rank {rank}")
    row = busiest_row(plan) if row is None else row
    taps, inputs = edges_into(plan, row)
    unit = unit_of(plan.source, unit)
    starts = plan.source.positions().cpu()[inputs]
    goal = plan.target.positions().cpu()[row]
    near = _around(plan.source, goal)
    with new_figure(6.0, 5.2) as figure:
        axes: Any = figure.add_subplot(projection="3d", computed_zorder=False)
        if bool(near.any()):
            part = plan.source.subset(near)
            look: dict[str, Any] = {"s": 22, "alpha": 0.4, "cmap": _one_colour(GREY), "zorder": 1}
            scatter3d(axes, part, torch.zeros(len(part)), unit=unit, zoom=0.95, **look)
        arrows = (goal - starts).numpy()
        axes.quiver(*starts.T.numpy(), *arrows.T, color=WINDOW, linewidth=1.2, arrow_length_ratio=0.12, zorder=2)
        axes.scatter(*starts.T.numpy(), color=INK, s=34, zorder=3, depthshade=False)
        axes.scatter(*goal[:, None].numpy(), color=WINDOW, s=60, zorder=4, depthshade=False)
        axes.set_title(title or f"output row {row}: {len(taps)} of {plan.num_taps} taps meet a voxel")
    scene = None
    if live:
        k3d = _k3d()
        scene = _scene(plan.source.to("cpu"), torch.zeros(len(plan.source)), np.full(len(plan.source), _number(GREY)))
        heads = (goal - starts).numpy().astype(np.float32)
        scene += k3d.vectors(starts.numpy().astype(np.float32), heads, color=_number(WINDOW), use_head=True)
    return View(figure, scene)


def _around(grid: VoxelGrid, place: torch.Tensor) -> torch.Tensor:
    """(N,) bool: the voxels of a grid within three and a half cells of a place."""
    reach = 3.5 * torch.tensor(grid.voxel_size)
    return ((grid.positions().cpu() - place).abs() <= reach).all(1).to(grid.device)


def _flat_cells(
    figure: Figure, axes: Any, grid: VoxelGrid, values: torch.Tensor, colours: np.ndarray | None, unit: str, label: str
) -> None:
    draw_cells(axes, grid, unit=unit)
    cells = axes.collections[0]
    if colours is not None:
        cells.set_facecolor([f"#{c:06x}" for c in colours.tolist()])
        return
    cells.set_array(values.numpy())
    cells.set_cmap(SEQUENTIAL)
    figure.colorbar(cells, ax=axes, label=label, shrink=0.8)


def _cloud(
    figure: Figure, axes: Any, grid: VoxelGrid, values: torch.Tensor, colours: np.ndarray | None, unit: str, label: str
) -> None:
    """Cubes, or of many voxels squares as large as voxels, and a scale of the values unless they are categories."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    numbers = values.float().numpy() if colours is None else (values % len(CATEGORIES)).numpy()
    low, high = (0, len(CATEGORIES) - 1) if colours is not None else _ends(numbers)
    scale = ScalarMappable(Normalize(low, high), SEQUENTIAL if colours is None else ListedColormap(CATEGORIES))
    zoom = 0.95 if 2 * max(grid.extent.shape[-1:], default=1) < max(grid.extent.shape, default=1) else 1.05
    if len(grid) <= CUBES:
        draw_voxels(axes, grid, scale.to_rgba(numbers)[:, :3], unit=unit, zoom=zoom)
    else:
        shared: dict[str, Any] = {"cmap": scale.cmap, "vmin": low, "vmax": high}
        scatter3d(axes, grid, torch.from_numpy(numbers), unit=unit, zoom=zoom, true_size=True, **shared)
    if colours is None:
        figure.colorbar(scale, ax=axes, label=label, shrink=0.6, pad=0.12)


def _ends(numbers: np.ndarray) -> tuple[float, float]:
    return (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 1.0)


def _scene(grid: VoxelGrid, values: torch.Tensor, colours: np.ndarray | None) -> Any:
    """The voxels as dots in a k3d plot."""
    k3d = _k3d()
    places = grid.positions().numpy().astype(np.float32)
    look: dict[str, Any] = {"point_size": float(min(grid.voxel_size)), "shader": "3d"}
    if colours is not None:
        look["colors"] = colours.astype(np.uint32)
    else:
        numbers = values.float().numpy()
        look |= {"attribute": numbers, "color_map": k3d.colormaps.matplotlib_color_maps.Viridis}
        look["color_range"] = [float(numbers.min()), float(numbers.max())] if len(numbers) else [0.0, 1.0]
    plot = k3d.plot(height=420, grid_visible=False)
    plot += k3d.points(places, **look)
    return plot


def _category_colours(values: torch.Tensor) -> np.ndarray:
    """(N,) int: a color 0xRRGGBB for each whole number."""
    table = np.array([_number(colour) for colour in CATEGORIES])
    return table[values.long().numpy() % len(CATEGORIES)]


def _number(colour: str) -> int:
    return int(colour[1:], 16)


def _one_colour(colour: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([colour])


def _k3d() -> Any:
    try:
        import k3d
    except ImportError:
        raise ImportError("interactive scenes need k3d: pip install 'sparseconv[viz]'") from None
    return k3d


def _in_notebook() -> bool:
    """True in a kernel of Jupyter with k3d at hand; nothing is imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell" and importlib.util.find_spec("k3d") is not None
