"""What the recipes for labelled scans share: voxels made in workers, augmentation, batches, training, the score."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from training import Run, begin

import sparseconv as sc
from sparseconv import nn

#: the label of what is not counted; torch's own default
IGNORE = -100


@dataclass
class Scan:
    """A scan as voxels, and the way back to its points."""

    coords: torch.Tensor  # (N, 3) int32
    features: torch.Tensor  # (N, C)
    labels: torch.Tensor  # (N,) the most frequent label of each voxel's points, IGNORE where none has one
    point_rows: torch.Tensor  # (M,) the voxel of each point
    point_labels: torch.Tensor  # (M,)


def to_voxels(points: torch.Tensor, features: torch.Tensor, labels: torch.Tensor, size: float, classes: int) -> Scan:
    """Points (M, 3) [m], features (M, C), labels (M,) -> a `Scan`; features are means. Runs in a worker."""
    grid, rows = sc.voxelize(points, size)
    known = labels != IGNORE
    votes = torch.bincount(rows[known] * classes + labels[known], minlength=len(grid) * classes).view(-1, classes)
    winner = torch.where(votes.sum(1) > 0, votes.argmax(1), IGNORE)
    mean = sc.ops.voxelize_features(features, rows, len(grid))
    return Scan(grid.coords[:, 1:], mean, winner, rows, labels)


def augmented(points: torch.Tensor) -> torch.Tensor:
    """Points turned about z by any angle, mirrored, scaled by up to 5 %: what the benchmarks' winners do at least.

    The angle comes from torch's generator, which a `DataLoader` seeds anew in each worker and each epoch.
    """
    angle, mirror, scale = (torch.rand(3) * torch.tensor([2 * pi, 1.0, 0.1])).tolist()
    turn = torch.tensor(angle)
    matrix = torch.eye(3)
    matrix[0, 0], matrix[0, 1], matrix[1, 0], matrix[1, 1] = turn.cos(), -turn.sin(), turn.sin(), turn.cos()
    matrix[:, 1] *= -1 if mirror < 0.5 else 1
    return points @ matrix.T * (0.95 + scale)


@dataclass
class Batch:
    """Scans in one `SparseTensor`; rows of points count through the batch."""

    x: sc.SparseTensor
    labels: torch.Tensor
    point_rows: torch.Tensor
    point_labels: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(v.to(device) for v in (self.x, self.labels, self.point_rows, self.point_labels)))


def collate(scans: list[Scan]) -> Batch:
    """The `collate_fn` of a `DataLoader`: it runs in the workers, so the trainer builds no grid from points."""
    x = sc.SparseTensor.from_list([s.coords for s in scans], [s.features for s in scans])
    starts = torch.tensor([0, *(len(s.coords) for s in scans)]).cumsum(0)
    rows = torch.cat([s.point_rows + start for s, start in zip(scans, starts)])
    return Batch(x, torch.cat([s.labels for s in scans]), rows, torch.cat([s.point_labels for s in scans]))


class Confusion:
    """Counts of (label, prediction) over points; rows whose label is IGNORE are left out, as the benchmarks do."""

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, labels: torch.Tensor, predicted: torch.Tensor) -> None:
        known = labels != IGNORE
        pairs = labels[known] * len(self.counts) + predicted[known]
        self.counts += torch.bincount(pairs, minlength=self.counts.numel()).view_as(self.counts).cpu()

    def iou(self) -> torch.Tensor:
        """Intersection over union of each class, NaN for one that was neither seen nor predicted."""
        hit = self.counts.diag().double()
        return hit / (self.counts.sum(0) + self.counts.sum(1) - hit)

    def mean_iou(self) -> float:
        return float(self.iou().nanmean())

    def guessing(self) -> float:
        """The mean IoU of calling everything the most frequent class."""
        seen = self.counts.sum(1).double()
        return float(seen.max() / seen.sum() / (seen > 0).sum())


@torch.no_grad()
def validate(net: torch.nn.Module, loader: DataLoader, classes: int) -> Confusion:
    """Every point of the held-out scans takes its voxel's prediction; the confusion of all of them."""
    device = next(net.parameters()).device
    net.eval()
    found = Confusion(classes)
    for batch in loader:
        batch = batch.to(device)
        predicted = net(batch.x).features.argmax(1)
        found.add(batch.point_labels, predicted[batch.point_rows])
    return found


def train_minkunet(
    output: Path,
    name: str,
    train: Dataset[Scan],
    held_out: Dataset[Scan],
    channels: int,
    classes: int,
    epochs: int,
    batch: int,
    variant: str,
    width: int,
    workers: int = 0,
    seed: int = 0,
    class_weights: torch.Tensor | None = None,
) -> Run:
    """Train MinkUNet with cross-entropy over voxels, validate after each epoch, keep what is needed to continue."""
    device = begin(seed)
    load = {"batch_size": batch, "collate_fn": collate, "num_workers": workers}
    batches, others = DataLoader(train, shuffle=True, **load), DataLoader(held_out, **load)
    planes = tuple(width * m for m in (1, 2, 4, 8, 8, 4, 3, 3))
    net = nn.MinkUNet(channels, classes, variant=variant, planes=planes, init_channels=width).to(device)
    if device.type == "cuda":
        sc.accelerate(net)  # captured as CUDA graphs
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, epochs * len(batches))
    run = Run(output, name, net, optimizer, schedule)
    loss_of = torch.nn.CrossEntropyLoss(
        None if class_weights is None else class_weights.to(device), ignore_index=IGNORE
    )
    for _ in run.epochs(epochs):
        net.train()
        for scans in batches:
            scans = scans.to(device)
            with run.autocast():
                logits = net(scans.x).features
            run.step(loss_of(logits.float(), scans.labels))
        found = validate(net, others, classes)
        run.finish_epoch(mean_iou=found.mean_iou(), guessing=found.guessing())
    return run
