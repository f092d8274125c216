"""Make the pictures of the page on concepts: python docs/pictures/make_concepts.py [FOLDER].

window.png: a window's projection, from outputs to inputs and back. kernel_map.png: the edges of four plans on a line.
plan.png: one output of a strided plan in the plane, and the inputs that it meets.
show_grid.png, show_plan.png: what `show` draws of a grid and of a plan, for the page on pictures.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import sparseconv as sc
from sparseconv.viz import draw_lines, draw_window, new_figure, save_figure, show
from sparseconv.viz.palette import INK, ROW, WINDOW

LINE = (0, 1, 2, 4, 5, 7)


def window(folder: Path) -> None:
    """A window of 3 at stride 2: what output 2 sees, and who sees input 5."""
    projection = sc.IndexProjection.window((3,), stride=2)
    output, point = 2, 5
    region = projection.region((output,))
    seers = projection.preimage(sc.IndexRange((point,), (point + 1,)))
    with new_figure(4.2, 4.6) as figure:
        left, right = figure.subplots(2, 1)
        seen_by, seeing = ({x for (x,) in found} for found in (region, seers))
        for axes, title, low, high in (
            (left, f"region of output {output}: inputs {region}", {output}, seen_by),
            (right, f"preimage of input {point}: outputs {seers}", seeing, {point}),
        ):
            for place in range(-1, 10):
                axes.text(place, 0, str(place), ha="center", va="center", color="white", fontsize=8, zorder=3)
                axes.scatter(place, 0, marker="s", s=190, color=WINDOW if place in high else INK, zorder=2)
            for place in range(5):
                axes.text(2 * place, 1, str(place), ha="center", va="center", color="white", fontsize=8, zorder=3)
                axes.scatter(2 * place, 1, marker="s", s=190, color=WINDOW if place in low else INK, zorder=2)
                for (seen,) in projection.region((place,)):
                    marked = place in low and seen in high
                    axes.plot([2 * place, seen], [1, 0], color=WINDOW if marked else ROW, lw=1 + marked, zorder=1)
            axes.set_yticks([0, 1], ["inputs", "outputs"])
            axes.set_xticks([])
            axes.set_ylim(-0.3, 1.3)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, labelsize=9)
            axes.set_title(title)
    save_figure(figure, folder / "window.png", dpi=130)


def kernel_map(folder: Path) -> None:
    """Six voxels on a line under four plans."""
    grid = sc.VoxelGrid(torch.tensor([[0, x] for x in LINE]))
    down = sc.ConvolutionPlan(grid, 2, stride=2)
    plans = {
        "ConvolutionPlan(grid, 3): outputs where inputs are": sc.ConvolutionPlan(grid, 3),
        "ConvolutionPlan(grid, 2, stride=2): coarse voxels": down,
        "its transpose(): the same edges, back": down.transpose(),
        "boundary=Boundary.periodic((8,)): 7 and 0 are neighbors": sc.ConvolutionPlan(
            grid, 3, boundary=sc.Boundary.periodic((8,))
        ),
    }
    with new_figure(5.0, 7.6) as figure:  # one below the other, to be read on a telephone
        for axes, (title, plan) in zip(figure.subplots(4, 1), plans.items()):
            draw_lines(axes, plan, title=title)
    save_figure(figure, folder / "kernel_map.png", dpi=130)


def plan(folder: Path) -> None:
    """A circle of voxels, a window of 3 x 3 at stride 2."""
    angle = torch.linspace(0, 2 * torch.pi, 200)
    circle = torch.stack([0 * angle, 6 * angle.cos(), 6 * angle.sin()], 1).round().int()
    grid = sc.VoxelGrid(torch.unique(circle, dim=0))
    with new_figure(8.4, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        draw_window(left, right, sc.ConvolutionPlan(grid, 3, stride=2))
    save_figure(figure, folder / "plan.png", dpi=130)


def shown(folder: Path) -> None:
    """A sphere of voxels, and one output of a plan over it."""
    points = torch.randn(4_000, 3, generator=torch.Generator().manual_seed(0))
    grid, _ = sc.voxelize(torch.nn.functional.normalize(points, dim=1), voxel_size=0.1)
    show(grid, unit="m", live=False).save(folder / "show_grid.png", dpi=130)
    show(sc.ConvolutionPlan(grid, 3), unit="m", live=False).save(folder / "show_plan.png", dpi=130)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in (window, kernel_map, plan, shown):
        draw(folder)
