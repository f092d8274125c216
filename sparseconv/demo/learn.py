"""Training a small sparse U-Net on one half of a brain, and what brightness alone can do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from sparseconv.demo.volume import CLASSES, Brain
from sparseconv.geometry import VoxelGrid
from sparseconv.nn import UNet
from sparseconv.tensor import SparseTensor

CHANNELS = (16, 16, 32)
LEARNING_RATE = 0.02
#: how many turned copies of the training half are gone through; their plans are built at their first step and kept
TURNS = 12


@dataclass(frozen=True)
class Scan:
    """A brain as a scanner of some noise sees it: brightness (N,), standardised where it enters the network."""

    brain: Brain
    brightness: torch.Tensor


@dataclass
class Course:
    """How a training went: the loss after each step, the seconds of each step, and whether it was interrupted."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    interrupted: bool = False


def scan(brain: Brain, noise: float, generator: torch.Generator) -> Scan:
    """The brain with Gaussian noise of standard deviation ``noise`` (1 is full brightness) added to each voxel."""
    hiss = torch.randn(len(brain), generator=generator).to(brain.intensity)
    return Scan(brain, brain.intensity + noise * hiss)


def turned_grids(grid: VoxelGrid, count: int, generator: torch.Generator) -> list[VoxelGrid]:
    """The grid itself and count - 1 others, the same rows under other rotations and reflections of the cube."""
    turns = list(itertools.product(itertools.permutations(range(3)), itertools.product((1, -1), repeat=3)))
    chosen = 1 + torch.randperm(len(turns) - 1, generator=generator)[: count - 1]
    grids = [grid]
    for axes, signs in (turns[n] for n in chosen.tolist()):
        moved = grid.coords[:, [1 + a for a in axes]] * grid.coords.new_tensor(signs)
        grids.append(VoxelGrid(torch.cat([grid.coords[:, :1], moved], 1), grid.batch_size, grid.voxel_size))
    return grids


class Segmenter(torch.nn.Module):
    """A sparse U-Net from brightness to the classes, for the mean and spread of one scan."""

    def __init__(self, example: Scan) -> None:
        super().__init__()
        self.net = UNet(1, len(CLASSES), CHANNELS, block="plain")
        self.mean, self.spread = float(example.brightness.mean()), float(example.brightness.std())

    def features(self, brightness: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N, 1), standardised."""
        return ((brightness - self.mean) / self.spread)[:, None]

    def forward(self, grid: VoxelGrid, brightness: torch.Tensor) -> torch.Tensor:
        """Scores (N, classes) of each voxel."""
        return self.net(SparseTensor(grid, self.features(brightness))).features

    @torch.no_grad()
    def shares(self, view: Scan) -> torch.Tensor:
        """The share of each class that the network believes in, (N, classes), each row summing to 1."""
        self.eval()
        return self(view.brain.grid, view.brightness).softmax(1)


def train(
    model: Segmenter,
    brain: Brain,
    noise: float,
    steps: int,
    generator: torch.Generator,
    on_step: Callable[[Course], None],
) -> Course:
    """Train on one brain under new noise and another turn at each step; an interruption ends it early.

    Without the turns, and the noise that is never the same, the network learns this one half by heart.
    """
    course = Course()
    try:
        grids = turned_grids(brain.grid, min(TURNS, steps), generator)
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.2)
        model.train()
        for step in range(steps):
            begin = time.perf_counter()
            view = scan(brain, noise, generator)
            loss = F.cross_entropy(model(grids[step % len(grids)], view.brightness), brain.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            course.losses.append(float(loss.detach()))
            course.seconds.append(time.perf_counter() - begin)
            on_step(course)
    except KeyboardInterrupt:
        course.interrupted = True
    return course


def dice(predicted: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """2 |A and B| / (|A| + |B|) of each class, A the voxels predicted (N,) and B those labelled (N,); 0 where empty."""
    scores = []
    for c in range(len(CLASSES)):
        a, b = predicted == c, labels == c
        scores.append(float(2 * (a & b).sum() / (a.sum() + b.sum()).clamp(min=1)))
    return scores


def majority(train: Scan, test: Scan) -> torch.Tensor:
    """The training half's most frequent class, for every voxel of the test half (N,)."""
    return torch.full_like(test.brain.labels, int(train.brain.labels.bincount().argmax()))


def brightness_alone(train: Scan, test: Scan, bins: int = 128) -> torch.Tensor:
    """The best that a voxel's own brightness allows: the most frequent class of each brightness, (N,)."""

    def bin_of(view: Scan) -> torch.Tensor:
        return ((view.brightness + 0.5) / 2 * bins).long().clamp(0, bins - 1)

    counts = F.one_hot(bin_of(train) * len(CLASSES) + train.brain.labels, bins * len(CLASSES)).sum(0)
    return counts.view(bins, -1).argmax(1)[bin_of(test)]
