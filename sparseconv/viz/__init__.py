"""Visualization: `show` for grids, tensors and plans; slices, voxels, surfaces and kernel maps (extra ``viz``)."""

from sparseconv.viz.cells import dense_against_sparse
from sparseconv.viz.figures import new_figure, save_figure
from sparseconv.viz.meetings import draw_cells, draw_lines, draw_window
from sparseconv.viz.slices import show_slice, slice_image
from sparseconv.viz.solid import draw_voxels, render_surface, scatter3d
from sparseconv.viz.view import View, show

__all__ = [
    "View",
    "dense_against_sparse",
    "draw_cells",
    "draw_lines",
    "draw_voxels",
    "draw_window",
    "new_figure",
    "render_surface",
    "save_figure",
    "scatter3d",
    "show",
    "show_slice",
    "slice_image",
]
