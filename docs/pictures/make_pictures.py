"""Make the pictures of the README: python docs/pictures/make_pictures.py (demo.png is the demo's own).

dense_vs_sparse.png: the surface of the white matter of the MNI152 brain in voxels of 3 mm, cut at z = 24 mm.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import sparseconv as sc
from sparseconv.demo.volume import CLASSES, load_brain
from sparseconv.viz import dense_against_sparse, new_figure, save_figure, slice_image

SIZE, HEIGHT = 3.0, 24.0
CROSS = [(0, 0, 0), (1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)]


def main() -> None:
    brain = load_brain(SIZE)
    white = brain.grid.subset(brain.labels == CLASSES.index("white"))
    faces = (sc.ConvolutionPlan(white, taps=CROSS).kernel_map.neighbors >= 0).sum(0)
    surface = white.subset(faces < len(CROSS))
    plan = sc.ConvolutionPlan(surface, 3)
    image, _ = slice_image(surface, surface.coords[:, 0] + 1, axis=2, at=HEIGHT)
    cells = np.isfinite(image)
    filled = np.lib.stride_tricks.sliding_window_view(np.pad(cells, 1), (3, 3)).sum((2, 3))
    rows, columns = (cells & (filled == 4)).nonzero()
    middle = int(np.argmin((rows - 0.5 * cells.shape[0]) ** 2 + (columns - 0.75 * cells.shape[1]) ** 2))
    with new_figure(7.2, 4.9) as figure:
        left, right = figure.subplots(1, 2)
        dense_against_sparse(left, right, cells, (int(rows[middle]), int(columns[middle])))
        box = surface.extent.size
        left.set_xlabel(f"whole box: {box:,} cells × 27 taps\n= {27 * box / 1e6:.2f} million products", fontsize=10)
        right.set_xlabel(
            f"plan: {len(surface):,} voxels, {plan.kernel_map.num_pairs / 1e6:.2f} million products,\n"
            f"{27 * box / plan.kernel_map.num_pairs:.0f} times fewer",
            fontsize=10,
        )
        for axes in (left, right):
            axes.title.set_fontsize(12)
        figure.suptitle("What a 3×3×3 convolution computes: one layer of a brain's surface", fontsize=13)
    save_figure(figure, Path(__file__).with_name("dense_vs_sparse.png"), dpi=130)


if __name__ == "__main__":
    main()
