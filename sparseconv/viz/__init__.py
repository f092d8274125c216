"""Pictures of voxels: slices, clouds, solid surfaces, and where a sparse convolution works (extra ``viz``)."""

from sparseconv.viz.cells import dense_against_sparse
from sparseconv.viz.figures import new_figure, save_figure
from sparseconv.viz.slices import show_slice, slice_image
from sparseconv.viz.solid import render_surface, scatter3d

__all__ = [
    "dense_against_sparse",
    "new_figure",
    "render_surface",
    "save_figure",
    "scatter3d",
    "show_slice",
    "slice_image",
]
