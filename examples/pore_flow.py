"""Predict slow flow through a porous medium: a surrogate of a fluid solver, on the pores alone.

    python examples/pore_flow.py --data DIR
    python examples/pore_flow.py --stand-in

DIR holds ``{train,test}/*.npz`` of a solver of yours, with ``solid`` (Y, X) bool and ``velocity`` (2, Y, X), x then y.
The medium is periodic, and so are the convolutions. Solid cells are absent: no arithmetic is spent on them, and a
missing neighbor is how a voxel knows of its wall. The score is the share of the velocity's variance that the network
explains on media that it has not seen; guessing the mean is 0.

For volumes (not run here) give the layers ``rank=3``, the head a third component, and the items a third axis. A rock
sample of 256^3 cells with 20 % pores has 3.4 million voxels: train on crops, without the torus.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from scipy.ndimage import distance_transform_edt
from stand_ins import pore_flow as stand_in_set
from torch.utils.data import DataLoader, Dataset
from training import Run, begin, data_folder

import sparseconv as sc
from sparseconv import nn

DILATIONS = (1, 2, 4, 8, 4, 2, 1)  # 44 cells to each side are seen


class Media(Dataset):
    """One medium an item: pores (N, 2) ordered y, x, features (N, 2), velocities (N, 2) ordered x, y."""

    def __init__(self, folder: Path, split: str, augment: bool = False) -> None:
        self.files, self.augment = sorted((folder / split).glob("*.npz")), augment
        self.shape = np.load(self.files[0])["solid"].shape

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        file = np.load(self.files[index])
        solid, velocity = torch.from_numpy(file["solid"]), torch.from_numpy(file["velocity"])
        if self.augment:  # a torus has no beginning; mirrored across the flow, the velocity is mirrored
            moves = [int(torch.randint(n, ())) for n in solid.shape]
            solid, velocity = solid.roll(moves, (0, 1)), velocity.roll(moves, (1, 2))
            if torch.rand(()) < 0.5:
                solid, velocity = solid.flip(0), velocity.flip(1) * torch.tensor([1, -1]).view(2, 1, 1)
        pores = (~solid).nonzero()
        wall = distance_transform_edt(np.pad(~solid.numpy(), solid.shape[0] // 2, mode="wrap"))
        wall = torch.from_numpy(wall).float()[tuple((pores + solid.shape[0] // 2).T)]
        features = torch.stack([torch.ones(len(pores)), wall / 4], 1)
        return pores.int(), features, velocity[:, pores[:, 0], pores[:, 1]].T


def collate(items: list[tuple[torch.Tensor, ...]]) -> tuple[sc.SparseTensor, torch.Tensor]:
    """Runs in the workers."""
    coords, features, velocity = zip(*items)
    return sc.SparseTensor.from_list(list(coords), list(features)), torch.cat(velocity)


class Surrogate(nn.SparseModule):
    """Residual blocks of dilated convolutions on a torus of the given shape."""

    def __init__(self, shape: tuple[int, int], width: int = 24) -> None:
        super().__init__()
        torus = sc.Boundary.periodic(shape)

        def layer(c_in: int, dilation: int) -> nn.Sequential:
            conv = nn.SubmanifoldConv(c_in, width, 3, dilation=dilation, boundary=torus, bias=False, rank=2)
            return nn.Sequential(conv, nn.BatchNorm(width), nn.SiLU())

        self.stem = layer(2, 1)
        self.blocks = nn.Sequential(*(nn.Residual(nn.Sequential(layer(width, d), layer(width, d))) for d in DILATIONS))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        """Velocities, less ``mean`` and in units of ``scale``."""
        return self.head(self.blocks(self.stem(x)))


@torch.no_grad()
def explained(net: Surrogate, loader: DataLoader) -> float:
    """1 - (squared error) / (squared deviation from the training set's mean), over all pores and both components."""
    net.eval()
    wrong = spread = 0.0
    for x, velocity in loader:
        velocity = velocity.to(net.mean) - net.mean
        wrong += float((net(x.to(net.mean.device)).features * net.scale - velocity).square().sum())
        spread += float(velocity.square().sum())
    return 1 - wrong / spread


def train(
    folder: Path, output: Path, epochs: int, batch: int = 4, width: int = 24, workers: int = 0, seed: int = 0
) -> Run:
    """Train, score after each epoch, keep what is needed to continue."""
    device = begin(seed)
    loaders = {}
    for split in ("train", "test"):
        media = Media(folder, split, augment=split == "train")
        loaders[split] = DataLoader(media, batch, split == "train", collate_fn=collate, num_workers=workers)
    net = Surrogate(media.shape, width)
    plain = Media(folder, "train")
    known = torch.cat([plain[row][2] for row in range(len(plain))])
    net.mean, net.scale = known.mean(0), known.std()
    net.to(device)
    if device.type == "cuda":
        sc.accelerate(net)  # captured as CUDA graphs
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    steps = epochs * len(loaders["train"])
    run = Run(output, "pore_flow", net, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, steps))
    for _ in run.epochs(epochs):
        net.train()
        for x, velocity in loaders["train"]:
            with run.autocast():
                found = net(x.to(device)).features
            run.step((found.float() - (velocity.to(device) - net.mean) / net.scale).square().mean())
        run.finish_epoch(explained=explained(net, loaders["test"]))
    return run


def main(
    data: Annotated[Path | None, typer.Option(help="The folder with train and test.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    epochs: int = 25,
    batch: int = 4,
    width: int = 24,
    workers: int = 0,
    output: Path = Path("runs"),
    seed: int = 0,
) -> None:
    """Predict flow through pores; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        run = train(folder, output, epochs, batch, width, workers, seed)
    print(run.summary("explained", 0.0, "explained variance"))


if __name__ == "__main__":
    typer.run(main)
