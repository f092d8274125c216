"""Find the ground under trees and a stadium in an airborne LiDAR scan, which laspy ships with its tests.

`autzen_trim.laz` has 110,000 points around Autzen Stadium in Oregon, 26,107 of them classified as ground. The network
sees voxels of 6 ft with their mean intensity and number of returns. It learns from the western half and is scored on
the eastern one. A voxel is ground if most of its points are.

    pip download --no-deps --no-binary laspy laspy==2.7.0
    python examples/packaged/autzen_ground.py laspy-2.7.0.tar.gz
"""

from __future__ import annotations

from pathlib import Path

import laspy
import torch
from archives import member
from loop import Task, options, reached, tile, train

import sparseconv as sc

FEET, GROUND = 6.0, 2


def task(archive: Path) -> Task:
    scan = laspy.read(member(archive, "tests/data/autzen_trim.laz"))
    points = torch.from_numpy(scan.xyz.copy())
    points -= points.amin(0)
    columns = (scan.intensity / 128 - 1, scan.number_of_returns / 2 - 1, scan.return_number / 2 - 1)
    values = torch.stack([torch.from_numpy(column).float() for column in columns], 1)
    is_ground = torch.from_numpy(scan.classification == GROUND).float()[:, None]
    west = points[:, 0] < points[:, 0].median()

    def half(here: torch.Tensor):
        grid, rows = sc.voxelize(points[here], FEET)
        x = sc.ops.voxelize_features(values[here], rows, len(grid))
        share = sc.ops.voxelize_features(is_ground[here], rows, len(grid))
        return tile(grid.coords[:, 1:], x, (share[:, 0] > 0.5).long())

    return Task("autzen_ground", [half(west)], [half(~west)], ["other", "ground"], target=0.60)


if __name__ == "__main__":
    given = options(__doc__ or "", 40, archive="laspy-2.7.0.tar.gz")
    raise SystemExit(0 if reached(train(task(given.archive), given.steps, given.output)) else 1)
