"""Align two LiDAR sweeps by gradients, and compare with the pose that small_gicp ships for them.

`source.ply` and `target.ply` are sweeps of 70,000 points, half a meter apart. The target becomes a smooth density on
voxels: each point is split between its eight nearest cells, and a convolution smooths that. The pose of the source is
moved to where the density, interpolated between voxels, is highest. Nothing is trained: gradients reach the pose
through the interpolation.

    pip download --no-deps --no-binary small-gicp small-gicp==1.0.1
    python examples/packaged/align_sweeps.py small_gicp-1.0.1.tar.gz
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from archives import member
from loop import COLORS, options

import sparseconv as sc

#: edges of voxels, from coarse to fine [m]; the errors to stay below [m, degrees]
SIZES, TARGET = (1.0, 0.5, 0.25, 0.125), (0.05, 0.3)
#: how far each of the six numbers of a pose moves: radians and meters that move a point at 20 m equally
SCALE = torch.tensor([0.05, 0.05, 0.05, 1.0, 1.0, 1.0], dtype=torch.float64)


def sweep(data: bytes) -> torch.Tensor:
    """Positions (N, 3) of a binary .ply of x, y, z and intensity."""
    head, _, body = data.partition(b"end_header\n")
    count = int(head.split(b"element vertex ")[1].split()[0])
    return torch.from_numpy(np.frombuffer(body, "<f4", 4 * count).reshape(count, 4)[:, :3].astype(np.float64))


def matrix(pose: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotation (3, 3) and translation (3,) of a rotation vector and a translation (6,)."""
    x, y, z = pose[:3]
    nothing = torch.zeros_like(x)
    rows = ((nothing, -z, y), (z, nothing, -x), (-y, x, nothing))
    return torch.linalg.matrix_exp(torch.stack([torch.stack(row) for row in rows])), pose[3:]


def thinned(points: torch.Tensor, size: float) -> torch.Tensor:
    """The mean position of the points in each voxel, so that what is near the sensor counts no more than the rest."""
    grid, rows = sc.voxelize(points, size)
    return sc.ops.voxelize_features(points.float(), rows, len(grid))


def density(points: torch.Tensor, size: float) -> tuple[sc.VoxelGrid, torch.Tensor]:
    """The voxels around points (N, 3), and how many points each sees, smoothed (M, 1)."""
    grid = sc.voxelize(points, size)[0].dilate(2)
    empty = torch.zeros(len(grid), 1, requires_grad=True)
    count = torch.autograd.grad(sc.ops.interpolate(empty, grid, points).sum(), empty)[0]  # each to its eight corners
    one = torch.tensor([0.5, 1.0, 0.5])
    weight = torch.einsum("i,j,k->ijk", one, one, one).reshape(27, 1, 1)
    return grid, sc.ConvolutionPlan(grid, 3).execute(count, weight)


def align(source: torch.Tensor, target: torch.Tensor, sizes: tuple[float, ...] = SIZES) -> torch.Tensor:
    """The pose (6,) that moves ``source`` (N, 3) onto ``target`` (M, 3)."""
    scaled = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    for size in sizes:
        grid, values = density(thinned(target, size / 2), size)
        points = thinned(source, size / 2).double()
        optimizer = torch.optim.LBFGS([scaled], max_iter=20, line_search_fn="strong_wolfe")

        def loss(grid=grid, values=values, points=points, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            rotation, translation = matrix(scaled * SCALE)
            moved = (points @ rotation.T + translation).float()
            found = -sc.ops.interpolate(values, grid, moved).mean()
            found.backward()
            return found

        optimizer.step(loss)
    return (scaled * SCALE).detach()


def errors(pose: torch.Tensor, known: torch.Tensor) -> tuple[float, float]:
    """How far a pose is from a known one (4, 4): meters, degrees."""
    rotation, translation = matrix(pose)
    turned = rotation.T @ known[:3, :3]
    sine = (
        torch.stack([turned[2, 1] - turned[1, 2], turned[0, 2] - turned[2, 0], turned[1, 0] - turned[0, 1]]).norm() / 2
    )
    return float((translation - known[:3, 3]).norm()), math.degrees(math.asin(min(1.0, float(sine))))


def draw(source: torch.Tensor, target: torch.Tensor, pose: torch.Tensor, path: Path) -> None:
    """What lies 1 to 2 m above the sensor, seen from above, before and after."""
    import matplotlib.pyplot as plt

    rotation, translation = matrix(pose)
    figure, both = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharex=True, sharey=True)
    for axes, title, points in zip(both, ("as recorded", "aligned"), (source, source @ rotation.T + translation)):
        for cloud, color, label in ((target, COLORS[0], "target"), (points, COLORS[1], "source")):
            wall = cloud[(cloud[:, 2] > 1) & (cloud[:, 2] < 2)]
            axes.scatter(wall[:, 0], wall[:, 1], s=1.5, color=color, lw=0, label=label)
        axes.set(title=title, xlabel="x [m]", ylabel="y [m]", aspect="equal", xlim=(-18, 12), ylim=(-15, 1))
    both[0].legend(markerscale=6, loc="center", bbox_to_anchor=(0.65, 0.8))
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(archive: Path, output: Path) -> bool:
    source, target = (sweep(member(archive, f"data/{name}.ply").read()) for name in ("source", "target"))
    known = torch.from_numpy(np.loadtxt(member(archive, "data/T_target_source.txt")))
    pose = align(source, target)
    (start, start_turn), (distance, turn) = (errors(p, known) for p in (torch.zeros_like(pose), pose))
    found = {
        "task": "align_sweeps",
        "points": [len(source), len(target)],
        "start": [round(start, 3), round(start_turn, 3)],
        "error": [round(distance, 3), round(turn, 3)],
        "target": TARGET,
    }
    output.mkdir(parents=True, exist_ok=True)
    draw(source, target, pose, output / "align_sweeps.png")
    (output / "align_sweeps.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))
    return distance <= TARGET[0] and turn <= TARGET[1]


if __name__ == "__main__":
    given = options(__doc__ or "", archive="small_gicp-1.0.1.tar.gz")
    raise SystemExit(0 if main(given.archive, given.output) else 1)
