"""Tell ridges from furrows on the surface of the human cortex, from nothing but where the surface is.

The voxels are those that the folded surface of one hemisphere (fsaverage5, 10,242 points) passes through at 2 mm; a
voxel is a furrow where the surface lies deeper than the mean there. Both hemispheres are surfaces without thickness:
the case that sparse convolutions are for. The network learns from the left one, the mirrored right one is held out.
Run: python examples/packaged/cortex_folds.py
"""

from __future__ import annotations

import nibabel
import numpy as np
import torch
from loop import Task, Tile, options, reached, tile, train
from volumes import package_folder

import sparseconv as sc

FOLDER = "datasets/data/fsaverage5"


def load(name: str) -> list[np.ndarray]:
    return [array.data for array in nibabel.load(package_folder("nilearn") / FOLDER / name).darrays]


def hemisphere(side: str, millimetres: float) -> Tile:
    points, triangles = load(f"pial_{side}.gii.gz")
    depth = load(f"sulc_{side}.gii.gz")[0]
    # points in the triangles, so that no voxel on the surface is missed
    shares = np.array([(i, j, 6 - i - j) for i in range(7) for j in range(7 - i)], np.float32) / 6
    dense = np.einsum("sk,tkd->tsd", shares, points[triangles]).reshape(-1, 3)
    deep = np.einsum("sk,tk->ts", shares, depth[triangles]).reshape(-1)
    dense[:, 0] *= -1 if side == "right" else 1
    dense -= dense.mean(0)
    grid, rows = sc.voxelize(torch.from_numpy(dense).float(), millimetres)
    count = torch.bincount(rows, minlength=len(grid))
    mean = torch.zeros(len(grid)).index_add(0, rows, torch.from_numpy(deep).float()) / count
    place = grid.positions() / 60
    features = torch.cat([torch.ones(len(grid), 1), place], 1)
    return tile(grid.coords[:, 1:], features, mean > 0)


def task(millimetres: float = 2.0) -> Task:
    left, right = (hemisphere(side, millimetres) for side in ("left", "right"))
    return Task("cortex_folds", [left], [right], ["ridge", "furrow"], target=0.80)


if __name__ == "__main__":
    given = options(__doc__ or "", 120, 2.0)
    raise SystemExit(0 if reached(train(task(given.millimetres), given.steps, given.output)) else 1)
