"""Which voxel meets which: the edges of a kernel map as lines and arrows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparseconv.geometry import VoxelGrid
from sparseconv.plan import ConvolutionPlan
from sparseconv.viz.cells import axis_label, unit_of
from sparseconv.viz.palette import CATEGORIES, INK, ROW, WINDOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def edges_into(plan: ConvolutionPlan, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The taps and the input rows (int64, on the CPU) that an output row meets, in the order of taps."""
    edges = plan.kernel_map
    if not 0 <= row < edges.num_out:
        raise ValueError(f"row must be an output of the plan, 0 to {edges.num_out - 1}; got {row}")
    here = (edges.out_rows == row).nonzero()[:, 0]
    return edges.pair_taps[here].long().cpu(), edges.in_rows[here].long().cpu()


def busiest_row(plan: ConvolutionPlan) -> int:
    """An output with the most inputs, the one nearest to the middle of the voxels."""
    if plan.kernel_map.num_out == 0:
        raise ValueError("the plan has no output voxel to draw")
    degree = torch.bincount(plan.kernel_map.out_rows.long(), minlength=plan.kernel_map.num_out)
    places = plan.target.positions()
    away = (places - places.mean(0)).norm(dim=1)
    return int(torch.where(degree == degree.max(), away, torch.inf).argmin())


def draw_lines(axes: Axes, plan: ConvolutionPlan, *, title: str = "") -> None:
    """Draw a plan of rank 1 whole: inputs below, outputs above, a line an edge, colored by its tap.

    Voxels lie at their place; hollow squares are places of the extent where no voxel is.

    >>> from sparseconv.viz import new_figure
    >>> with new_figure(4, 2) as figure:
    ...     axes = figure.subplots()
    ...     draw_lines(axes, ConvolutionPlan(VoxelGrid(torch.tensor([[0, 0], [0, 1]])), 3))
    >>> axes.get_legend_handles_labels()[1]
    ['tap 0', 'tap 1', 'tap 2']
    """
    if plan.source.rank != 1:
        raise ValueError(f"lines are drawn of plans of rank 1; got rank {plan.source.rank}: see draw_window")
    edges, colours = plan.kernel_map, tap_colours(plan.num_taps)
    ends = [grid.positions()[:, 0].cpu() for grid in (plan.source, plan.target)]
    for tap, a, b in zip(edges.pair_taps.tolist(), edges.in_rows.tolist(), edges.out_rows.tolist()):
        axes.plot([ends[0][a], ends[1][b]], [0.07, 0.93], color=colours[tap], linewidth=1.4, zorder=1)
    for grid, places, height in ((plan.source, ends[0], 0.0), (plan.target, ends[1], 1.0)):
        size, origin = grid.voxel_size[0], grid.origin[0]
        every = [origin + size * (n + 0.5) for n in range(grid.extent.start[0], grid.extent.end[0])]
        common: dict[str, Any] = {"marker": "s", "s": 95, "zorder": 2, "clip_on": False}
        axes.scatter(every, [height] * len(every), facecolors="white", edgecolors=ROW, **common)
        axes.scatter(places, [height] * len(places), color=INK, **common)
        for place, voxel in zip(places.tolist(), grid.coords[:, 1].tolist()):
            axes.annotate(
                str(voxel), (place, height), color="white", ha="center", va="center", fontsize=7, annotation_clip=False
            )
    for tap, colour in enumerate(colours):
        axes.plot([], [], color=colour, label=f"tap {tap}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.2)
    axes.set_yticks([0, 1], ["inputs", "outputs"])
    axes.set_xticks([])
    axes.set_ylim(-0.18, 1.18)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9)
    axes.set_title(title, loc="left")


def draw_window(
    left: Axes, right: Axes, plan: ConvolutionPlan, row: int | None = None, *, unit: str | None = None
) -> int:
    """Draw one output of a plan of rank 2: its inputs with their taps on the left, itself on the right, arrows between.

    A dashed square is a tap that meets no voxel.

    Args:
        left: axes for the source.
        right: axes for the target, of the same figure.
        plan: of rank 2.
        row: the output; default: one with the most inputs.
        unit: of the grids' voxel size, for the labels; default: voxels where they have none.

    Returns:
        The output row that was drawn.

    >>> from sparseconv.viz import new_figure
    >>> plan = ConvolutionPlan(VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 2]])), 3)
    >>> with new_figure(4, 2) as figure:
    ...     draw_window(*figure.subplots(1, 2), plan)
    1
    """
    from matplotlib.patches import ConnectionPatch, Rectangle

    if plan.source.rank != 2:
        raise ValueError(f"windows are drawn of plans of rank 2; got rank {plan.source.rank}")
    row = busiest_row(plan) if row is None else row
    taps, inputs = edges_into(plan, row)
    for axes, grid in ((left, plan.source), (right, plan.target)):
        draw_cells(axes, grid, unit=unit)
    for limit in ("xlim", "ylim"):
        ends = [getattr(axes, f"get_{limit}")() for axes in (left, right)]
        both = min(low for low, _ in ends), max(high for _, high in ends)
        for axes in (left, right):
            getattr(axes, f"set_{limit}")(both)
    colours = tap_colours(plan.num_taps)
    goal = _centre(plan.target, row)
    size = plan.target.voxel_size
    right.add_patch(Rectangle((goal[0] - size[0] / 2, goal[1] - size[1] / 2), *size, color=WINDOW, zorder=3))
    size = plan.source.voxel_size
    if not plan.is_transposed:
        start = plan.projection(plan.target.coords[row : row + 1, 1:].cpu())[0]
        for place in (start + plan.projection.taps()).tolist():
            x, y = (o + s * p for o, s, p in zip(plan.source.origin, size, place))
            left.add_patch(Rectangle((x, y), *size, fill=False, ls=":", color=WINDOW, lw=1.2, zorder=3))
    for tap, source in zip(taps.tolist(), inputs.tolist()):
        place = _centre(plan.source, source)
        corner = (place[0] - size[0] / 2, place[1] - size[1] / 2)
        left.add_patch(Rectangle(corner, *size, facecolor=colours[tap], edgecolor=WINDOW, lw=1.2, zorder=4))
        bright = colours[tap] in ("#F0E442", "#56B4E9", "#E69F00")
        left.annotate(
            str(tap), place, ha="center", va="center", color="black" if bright else "white", fontsize=7, zorder=6
        )
        arrow = ConnectionPatch(
            place,
            goal,
            "data",
            "data",
            axesA=left,
            axesB=right,
            arrowstyle="-|>",
            connectionstyle=f"arc3,rad={0.3 - 0.6 * tap / max(1, plan.num_taps - 1):.3f}",
            color=colours[tap],
            lw=0.9,
            shrinkA=8,
            shrinkB=3,
            zorder=5,
            mutation_scale=8,
        )
        arrow.set_in_layout(False)
        right.add_artist(arrow)
    left.set_title(f"inputs, with their taps: {len(taps)} of {plan.num_taps} meet a voxel")
    right.set_title(f"output row {row}")
    return row


def draw_cells(axes: Axes, grid: VoxelGrid, *, unit: str | None = None) -> None:
    """Draw the voxels of a grid of rank 2 as squares, x to the right and y up.

    >>> from sparseconv.viz import new_figure
    >>> with new_figure(3, 3) as figure:
    ...     axes = figure.subplots()
    ...     draw_cells(axes, VoxelGrid(torch.tensor([[0, 0, 0], [0, 2, 1]]), voxel_size=0.5), unit="m")
    >>> axes.get_xlabel(), len(axes.collections[0].get_paths())
    ('x [m]', 2)
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    size, origin, extent = grid.voxel_size, grid.origin, grid.extent
    corners = grid.positions().cpu() - torch.tensor(size) / 2
    squares = [Rectangle((x, y), *size) for x, y in corners.tolist()]
    axes.add_collection(PatchCollection(squares, facecolor=INK, edgecolor="white", linewidth=0.6, zorder=2))
    low = [o + s * (v - 1) for o, s, v in zip(origin, size, extent.start)]
    high = [o + s * (v + 1) for o, s, v in zip(origin, size, extent.end)]
    axes.set_xlim(low[0], high[0])
    axes.set_ylim(low[1], high[1])
    axes.set_xlabel(axis_label("x", unit_of(grid, unit)))
    axes.set_ylabel(axis_label("y", unit_of(grid, unit)))
    axes.set_aspect("equal")


def tap_colours(taps: int) -> list[Any]:
    """A color a tap: distinct ones where they are few, else along a map."""
    from matplotlib import colormaps

    few = (*CATEGORIES, "#882255")
    if taps <= len(few):
        return list(few[:taps])
    return [colormaps["turbo"](0.05 + 0.9 * tap / (taps - 1)) for tap in range(taps)]


def _centre(grid: VoxelGrid, row: int) -> tuple[float, float]:
    x, y = grid.positions()[row].tolist()
    return x, y
