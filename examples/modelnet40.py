"""Classify the meshes of ModelNet40 with a sparse ResNet.

    python examples/modelnet40.py --data DIR --workers 8 --epochs 100
    python examples/modelnet40.py --stand-in

DIR is the folder ``ModelNet40`` with ``<class>/{train,test}/<class>_NNNN.off``. Points are drawn on the surface, evenly
by area, anew in each epoch. The score is the overall accuracy on the test split.

The real set (not run here) has 9,843 training and 2,468 test meshes. Reading .off text takes
longer than training: use workers, or a fast disk.
"""

from __future__ import annotations

from itertools import pairwise
from math import pi
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from stand_ins import modelnet40 as stand_in_set
from torch.utils.data import DataLoader, Dataset
from training import Run, begin, data_folder

import sparseconv as sc
from sparseconv import nn


def read_off(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Vertices (V, 3) fp32 and triangles (F, 3) int64; polygons become fans of triangles.

    In some files of ModelNet40 the first line holds the counts too, without a space: ``OFF490 518 0``.
    """
    text = path.read_text()
    if not text.startswith("OFF"):
        raise ValueError(f"{path} does not start with OFF")
    words = text[3:].split()
    vertices, faces = int(words[0]), int(words[1])
    body = np.array(words[3:], np.float64)
    points, rest = body[: 3 * vertices].reshape(-1, 3), body[3 * vertices :].astype(np.int64)
    if len(rest) == 4 * faces and (rest[::4] == 3).all():
        triangles = rest.reshape(-1, 4)[:, 1:]
    else:
        found, at = [], 0
        for _ in range(faces):
            corners = rest[at + 1 : at + 1 + rest[at]]
            found += [(corners[0], b, c) for b, c in pairwise(corners[1:])]
            at += 1 + rest[at]
        triangles = np.array(found)
    return torch.from_numpy(points).float(), torch.from_numpy(triangles)


def sample(vertices: torch.Tensor, triangles: torch.Tensor, count: int) -> torch.Tensor:
    """Points (count, 3), even over the surface, from torch's generator."""
    a, b, c = vertices[triangles].unbind(1)
    area = torch.linalg.cross(b - a, c - a).norm(dim=1).double()
    at = torch.searchsorted(area.cumsum(0), torch.rand(count, dtype=torch.float64) * area.sum())
    at = at.clamp_max(len(area) - 1)
    u, v = torch.rand(2, count, 1)
    u, v = torch.where(u + v > 1, 1 - u, u), torch.where(u + v > 1, 1 - v, v)
    return a[at] + u * (b - a)[at] + v * (c - a)[at]


def in_unit_ball(points: torch.Tensor) -> torch.Tensor:
    """Moved and scaled so that the farthest point from the middle of the bounding box lies at 1."""
    points = points - (points.amin(0) + points.amax(0)) / 2
    return points / points.norm(dim=1).max()


class ModelNet40(Dataset):
    """One mesh an item: voxels (N, 3), their features (N, 4), the class."""

    def __init__(self, folder: Path, split: str, points: int, resolution: int, augment: bool = False) -> None:
        self.points, self.resolution, self.augment = points, resolution, augment
        self.classes = sorted(p.name for p in folder.iterdir() if p.is_dir())
        self.files = [p for name in self.classes for p in sorted((folder / name / split).glob("*.off"))]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        path = self.files[index]
        with torch.random.fork_rng(devices=[], enabled=not self.augment):
            if not self.augment:
                torch.manual_seed(index)  # the same points of a test mesh in every epoch
            points = in_unit_ball(sample(*read_off(path), self.points))
        if self.augment:
            angle = torch.rand(()) * 2 * pi
            turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
            points = torch.cat([points[:, :2] @ turn.T, points[:, 2:]], 1) * (0.8 + 0.2 * torch.rand(3))
        grid, rows = sc.voxelize(points, 2 / self.resolution, origin=-1)
        features = sc.ops.voxelize_features(torch.cat([torch.ones(len(points), 1), points], 1), rows, len(grid))
        return grid.coords[:, 1:], features, self.classes.index(path.parent.parent.name)


def collate(items: list[tuple[torch.Tensor, torch.Tensor, int]]) -> tuple[sc.SparseTensor, torch.Tensor]:
    """Runs in the workers."""
    coords, features, classes = zip(*items)
    return sc.SparseTensor.from_list(list(coords), list(features)), torch.tensor(classes)


@torch.no_grad()
def accuracy(net: torch.nn.Module, loader: DataLoader) -> float:
    device = next(net.parameters()).device
    net.eval()
    hits = [(net(x.to(device)).argmax(1).cpu() == classes).float() for x, classes in loader]
    return float(torch.cat(hits).mean())


def train(
    folder: Path,
    output: Path,
    epochs: int,
    batch: int = 32,
    width: int = 64,
    points: int = 20_000,
    resolution: int = 100,
    workers: int = 0,
    seed: int = 0,
) -> Run:
    """Train, score after each epoch, keep what is needed to continue."""
    device = begin(seed)
    loaders = {}
    for split in ("train", "test"):
        meshes = ModelNet40(folder, split, points, resolution, augment=split == "train")
        loaders[split] = DataLoader(meshes, batch, split == "train", collate_fn=collate, num_workers=workers)
    planes = tuple(width * m for m in (1, 2, 4, 8))
    net = nn.ResNet(4, len(meshes.classes), depth=14, planes=planes).to(device)
    if device.type == "cuda":
        sc.accelerate(net)  # captured as CUDA graphs
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    steps = epochs * len(loaders["train"])
    run = Run(output, "modelnet40", net, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, steps))
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in run.epochs(epochs):
        net.train()
        for x, classes in loaders["train"]:
            with run.autocast():
                scores = net(x.to(device))
            run.step(loss_of(scores.float(), classes.to(device)))
        run.finish_epoch(accuracy=accuracy(net, loaders["test"]), guessing=1 / len(meshes.classes))
    return run


def main(
    data: Annotated[Path | None, typer.Option(help="The folder ModelNet40.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    epochs: int = 25,
    batch: int = typer.Option(None, help="Meshes per batch: 32, and 16 for the stand-in."),
    width: int = typer.Option(None, help="Channels of the first stage: 64, and 16 for the stand-in."),
    points: int = typer.Option(None, help="Points on each mesh: 20,000, and 2,000 for the stand-in."),
    resolution: int = typer.Option(None, help="Voxels along an axis: 100, and 40 for the stand-in."),
    workers: int = 0,
    output: Path = Path("runs"),
    seed: int = 0,
) -> None:
    """Classify ModelNet40 with a sparse ResNet; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        defaults = (16, 16, 2000, 40) if stand_in else (32, 64, 20_000, 100)
        size = [given or default for given, default in zip((batch, width, points, resolution), defaults)]
        run = train(folder, output, epochs, *size, workers, seed)
    print(run.summary("accuracy", run.history[-1]["guessing"]))


if __name__ == "__main__":
    typer.run(main)
