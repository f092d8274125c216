"""Complete shapes that were seen from one side: a generative network, with ModelNet40's meshes.

    python examples/completion.py --data DIR --workers 8 --epochs 100
    python examples/completion.py --stand-in

DIR is the folder ``ModelNet40``. A mesh becomes voxels; the input keeps those that a camera at a random side sees
first along its rays. The network goes down to a coarse shape. On the way up, each voxel is cut into eight by a
generative transposed convolution, and voxels that a classifier takes for empty are pruned. The score is the
intersection over union with the whole shape's voxels; handing back the input is the chance level.

The real set (not run here) has 9,843 training meshes; 64 cells per axis and four halvings are a start.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from modelnet40 import in_unit_ball, read_off, sample
from stand_ins import modelnet40 as stand_in_set
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from training import Run, begin, data_folder

import sparseconv as sc
from sparseconv import nn


def seen_from(coords: torch.Tensor, axis: int, sign: int) -> torch.Tensor:
    """Mask (N,) of the voxels (N, 3) that are first along one axis, from one side."""
    others = [a for a in range(3) if a != axis]
    size = int(coords.max()) + 1
    ray = coords[:, others[0]] * size + coords[:, others[1]]
    depth = coords[:, axis] * sign
    first = torch.full((size * size,), torch.iinfo(coords.dtype).max, dtype=coords.dtype)
    first.scatter_reduce_(0, ray.long(), depth, "amin")
    return depth <= first[ray.long()] + 1


class Shapes(Dataset):
    """One mesh an item: the voxels of the whole (N, 3), and a mask (N,) of what is seen."""

    def __init__(self, folder: Path, split: str, resolution: int, points: int) -> None:
        self.files, self.split = sorted(folder.glob(f"*/{split}/*.off")), split
        self.resolution, self.points = resolution, points

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        test = self.split == "test"
        with torch.random.fork_rng(devices=[], enabled=test):
            if test:
                torch.manual_seed(index)  # the same side in every epoch
            points = in_unit_ball(sample(*read_off(self.files[index]), self.points))
            side = int(torch.randint(4, ()))  # x or y, from either end
        grid, _ = sc.voxelize((points + 1) * (self.resolution - 1) / 2, 1.0)
        coords = grid.coords[:, 1:]
        return coords, seen_from(coords, side // 2, 1 - 2 * (side % 2))


def collate(items: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[sc.SparseTensor, sc.VoxelGrid]:
    """What is seen, with a feature of ones, and the grid of the whole shapes. Runs in the workers."""
    partial = [coords[mask] for coords, mask in items]
    whole = sc.SparseTensor.from_list([coords for coords, _ in items], [torch.ones(len(c), 1) for c, _ in items])
    return sc.SparseTensor.from_list(partial, [torch.ones(len(c), 1) for c in partial]), whole.grid


class Completion(nn.SparseModule):
    """Down by strided convolutions, up by generative ones; what the way down has seen is added where it lies."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(pairwise(channels))
        self.stem = nn.ConvBlock(1, channels[0])
        self.down = torch.nn.ModuleList(self._down(a, b) for a, b in pairs)
        self.up = torch.nn.ModuleList(self._up(b, a) for a, b in reversed(pairs))
        self.spread = nn.Sequential(
            nn.Conv(channels[-1], channels[-1], 5, target="full"), nn.BatchNorm(channels[-1]), nn.ReLU()
        )
        self.keep = torch.nn.ModuleList(nn.Linear(a, 1) for a in reversed(channels))

    @staticmethod
    def _down(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv(a, b, 2, stride=2, bias=False), nn.BatchNorm(b), nn.ReLU(), nn.ResidualBlock(b, b))

    @staticmethod
    def _up(b: int, a: int) -> nn.Sequential:
        return nn.Sequential(
            nn.ConvTranspose(b, a, 2, stride=2, bias=False), nn.BatchNorm(a), nn.ReLU(), nn.ResidualBlock(a, a)
        )

    def forward(self, x: sc.SparseTensor, whole: sc.VoxelGrid | None = None) -> tuple[sc.SparseTensor, list]:
        """The completed shape, and (logits, truth) of each level, coarsest first, where ``whole`` is given."""
        x = self.stem(x)
        skips = [x]
        for down in self.down:
            skips.append(down(skips[-1]))
        x, levels = self.spread(skips[-1]), []
        for level in range(len(self.keep)):
            if level > 0:
                x = with_added(self.up[level - 1](x), skips[-1 - level])
            logits = self.keep[level](x).features[:, 0]
            mask = logits > 0
            if whole is not None:
                scale = 2 ** (len(self.down) - level)
                truth = (whole if scale == 1 else whole.coarsen(scale)).lookup(x.grid.coords) >= 0
                levels.append((logits, truth))
                mask = mask | truth if self.training else mask
            if level < len(self.keep) - 1 and not mask.any():
                mask = logits == logits.max()  # a shape is never empty
            x = pruned(x, mask)
        return x, levels


def pruned(x: sc.SparseTensor, mask: torch.Tensor) -> sc.SparseTensor:
    """The voxels where mask (N,) is true."""
    return sc.SparseTensor(x.grid.subset(mask), x.features[mask])


def with_added(x: sc.SparseTensor, other: sc.SparseTensor) -> sc.SparseTensor:
    """``x`` plus the features of ``other`` where both have a voxel."""
    rows = other.grid.lookup(x.grid.coords)
    there = (rows >= 0)[:, None]
    return x.with_features(x.features + torch.where(there, other.features[rows.clamp_min(0)], 0))


@torch.no_grad()
def validate(net: Completion, loader: DataLoader) -> tuple[float, float]:
    """The mean intersection over union of completed shapes, and of the inputs."""
    device = next(net.parameters()).device
    net.eval()
    scores = []
    for x, whole in loader:
        x, whole = x.to(device), whole.to(device)
        done, _ = net(x)
        for found in (done.grid, x.grid):
            hits = torch.zeros(whole.batch_size, device=device)
            both = whole.lookup(found.coords) >= 0
            hits.index_add_(0, found.coords[:, 0].long(), both.float())
            scores.append(hits / (found.batch_counts + whole.batch_counts - hits))
    return float(torch.cat(scores[::2]).mean()), float(torch.cat(scores[1::2]).mean())


def train(
    folder: Path,
    output: Path,
    epochs: int,
    batch: int = 16,
    channels: tuple[int, ...] = (32, 64, 128, 256, 256),
    resolution: int = 64,
    points: int = 50_000,
    workers: int = 0,
    seed: int = 0,
) -> Run:
    """Train, score after each epoch, keep what is needed to continue."""
    device = begin(seed)
    loaders = {}
    for split in ("train", "test"):
        shapes = Shapes(folder, split, resolution, points)
        loaders[split] = DataLoader(shapes, batch, split == "train", collate_fn=collate, num_workers=workers)
    net = Completion(channels).to(device)  # its voxels depend on its values, so it is not captured as a graph
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    steps = epochs * len(loaders["train"])
    run = Run(output, "completion", net, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, steps))
    for _ in run.epochs(epochs):
        net.train()
        for x, whole in loaders["train"]:
            with run.autocast():
                _, levels = net(x.to(device), whole.to(device))
            losses = [F.binary_cross_entropy_with_logits(y.float(), truth.float()) for y, truth in levels]
            run.step(torch.stack(losses).mean())
        completed, given = validate(net, loaders["test"])
        run.finish_epoch(iou=completed, given=given)
    return run


def main(
    data: Annotated[Path | None, typer.Option(help="The folder ModelNet40.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    epochs: int = 20,
    batch: int = 16,
    workers: int = 0,
    output: Path = Path("runs"),
    seed: int = 0,
) -> None:
    """Complete shapes seen from one side; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        size = ((16, 32, 48, 48), 24, 4000) if stand_in else ((32, 64, 128, 256, 256), 64, 50_000)
        run = train(folder, output, epochs, batch, *size, workers, seed)
    print(run.summary("iou", run.history[-1]["given"]))


if __name__ == "__main__":
    typer.run(main)
