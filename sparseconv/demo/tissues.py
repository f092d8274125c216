"""The picture of the brain demonstration: slices, scores, and the prediction as a solid."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from sparseconv.demo.learn import Scan
from sparseconv.demo.volume import CLASSES
from sparseconv.geometry import VoxelGrid
from sparseconv.viz.figures import new_figure
from sparseconv.viz.slices import show_slice
from sparseconv.viz.solid import render_surface

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: other, grey, white
COLOURS = ((0.20, 0.36, 0.54), (0.85, 0.46, 0.38), (0.97, 0.94, 0.86))
NIGHT = "#0d1117"


def tissue_figure(
    whole: Scan,
    shares: torch.Tensor,
    in_front: torch.Tensor,
    cut: float,
    scores: dict[str, list[float]],
    noise: float,
) -> Figure:
    """Input, target and prediction in two slices, the predicted tissues as a solid with a corner cut out, and the Dice.

    Args:
        whole: the scanned brain.
        shares: (N, 3) what the network believes.
        in_front: (N,) bool, the half that was held out.
        cut: where it begins, y in mm.
        scores: Dice of each class under the names of the methods.
        noise: of the scan.
    """
    grid, labels = whole.brain.grid, whole.brain.labels
    palette = torch.tensor(COLOURS)
    predicted = shares.argmax(1)
    planes = ((2, 12.0), (1, cut + 45.0))
    looks: tuple[tuple[str, torch.Tensor, dict[str, Any]], ...] = (
        (f"input: T1, {noise:.0%} noise", whole.brightness, {"cmap": "gray", "vmin": 0.05, "vmax": 1.0}),
        ("target", palette[labels], {}),
        ("prediction", palette[predicted], {}),
    )
    with new_figure(13.6, 7.2) as figure:
        areas = figure.add_gridspec(2, 4, width_ratios=(1, 1, 1, 1.7), height_ratios=(1.15, 1))
        for row, (axis, at) in enumerate(planes):
            for column, (title, values, look) in enumerate(looks):
                axes = figure.add_subplot(areas[row, column], facecolor=NIGHT)
                show_slice(axes, grid, values.clamp(0, 1), axis, at, unit="mm", **look)
                if row == 0:
                    axes.set_title(title, fontweight="bold")
                    _mark_cut(axes, cut, dim=column == 2)
                if column == 0:
                    where = f"axial, z = {at:g} mm" if axis == 2 else f"coronal, y = {at:g} mm, held out"
                    axes.set_ylabel(f"{where}\n{axes.get_ylabel()}")
                else:
                    axes.set_ylabel("")
                    axes.tick_params(labelleft=False)
        right = areas[:, 3].subgridspec(2, 1, height_ratios=(1.7, 1))
        solid = figure.add_subplot(right[0])
        solid.set_title("prediction, one corner cut away", fontweight="bold")
        _show_solid(solid, grid, shares, in_front, cut)
        _bars(figure.add_subplot(right[1]), scores)
        figure.suptitle(
            f"A sparse U-Net learns the tissues of a brain: {len(grid):,} voxels of {grid.voxel_size[0]:g} mm",
            fontsize=13,
        )
    return figure


def _mark_cut(axes: Axes, cut: float, dim: bool) -> None:
    """The line between the halves, their names, and a veil over the one that is no test."""
    axes.axhline(cut, color="white", linewidth=0.8, linestyle=(0, (4, 3)))
    left, right = axes.get_xlim()
    low, _ = axes.get_ylim()
    place: dict[str, Any] = {"color": "white", "fontsize": 7, "ha": "right"}
    axes.text(right - 2, cut + 2, "held out", va="bottom", **place)
    axes.text(right - 2, cut - 2, "trained on", va="top", **place)
    if dim:
        axes.fill_between([left, right], low, cut, color=NIGHT, alpha=0.55, linewidth=0)
        axes.set_xlim(left, right)


def _show_solid(axes: Axes, grid: VoxelGrid, shares: torch.Tensor, in_front: torch.Tensor, cut: float) -> None:
    """The predicted grey and white matter seen from the front, right and above, with a scale.

    A corner of the held-out half is cut away; the half that was trained on has lost its colors.
    """
    matter = shares[:, 1:].sum(1, keepdim=True)
    whiteness = ((shares[:, 2:] / matter.clamp(min=1e-3) - 0.5) * 3 + 0.5).clamp(0, 1)
    colours = torch.lerp(torch.tensor(COLOURS[1]), torch.tensor(COLOURS[2]), whiteness)
    plain = 0.8 * colours.mean(1, keepdim=True).expand(-1, 3)
    colours = torch.where(in_front[:, None], colours, plain)
    margin = 2
    dense = grid.to_dense(torch.cat([matter, colours], 1))
    dense = F.pad(dense, (margin, margin) * 3)
    dense[:, :1] = F.avg_pool3d(dense[:, :1], 3, 1, 1)

    def cell(axis: int, mm: float) -> int:
        return round((mm - grid.origin[axis]) / grid.voxel_size[axis]) - grid.extent.start[axis] + margin

    dense[0, 0, cell(0, 0) :, cell(1, cut + 45) :, cell(2, 12) :] = 0
    image = render_surface(dense[0, 0], dense[0, 1:], azimuth=50, elevation=24, pixels=700)
    met = image[..., 3] > 0
    rows, columns = met.any(1).nonzero()[0], met.any(0).nonzero()[0]
    axes.set_axis_off()
    if not len(rows):
        return
    axes.imshow(image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1], interpolation="antialiased")
    pixel = math.hypot(*dense.shape[2:]) * grid.voxel_size[0] / len(image)  # mm
    length, bottom = 50 / pixel, rows[-1] - rows[0]
    axes.plot([0, length], [bottom, bottom], color="#444444", linewidth=2, solid_capstyle="butt")
    axes.text(length / 2, bottom - 8, "50 mm", ha="center", va="bottom", fontsize=8, color="#444444")
    axes.text(
        columns[-1] - columns[0],
        bottom,
        "in color: held out\nin grey: trained on",
        ha="right",
        va="bottom",
        fontsize=8,
        color="#444444",
    )


def _bars(axes: Axes, scores: dict[str, list[float]]) -> None:
    """Dice of each class, one bar a method."""
    shades = ("#c9ced6", "#8d99a8", "#2a7f62")
    width = 0.8 / len(scores)
    for n, (name, figures) in enumerate(scores.items()):
        places = np.arange(len(figures)) + (n - (len(scores) - 1) / 2) * width
        axes.bar(places, figures, 0.92 * width, color=shades[n % len(shades)], label=name)
        for x, value in zip(places, figures):
            axes.text(x, value + 0.015, f"{value:.2f}", ha="center", va="bottom", fontsize=8, color="#333333")
    names = {"other": "other (fluid)", "grey": "grey matter", "white": "white matter"}
    axes.set_xticks(range(len(CLASSES)), [names[c] for c in CLASSES], fontsize=9)
    for tick, colour in zip(axes.get_xticklabels(), COLOURS):
        tick.set_bbox({"facecolor": colour, "edgecolor": "#999999", "linewidth": 0.5, "boxstyle": "round,pad=0.25"})
        tick.set_color("white" if sum(colour) < 1.5 else "#222222")
    axes.set_ylim(0, 1.18)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel("Dice on the held-out half")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0, pad=6)
    axes.legend(ncol=3, loc="upper center", columnspacing=1.2, handlelength=1.2, borderaxespad=0)
