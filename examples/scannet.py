"""Segment ScanNet v2 with MinkUNet.

    python examples/scannet.py --data DIR --workers 8 --epochs 600
    python examples/scannet.py --stand-in

DIR holds ``scans/sceneNNNN_NN/sceneNNNN_NN_vh_clean_2.ply`` and ``..._vh_clean_2.labels.ply``, and the benchmark's
lists ``scannetv2_train.txt`` and ``scannetv2_val.txt``. Labels are NYU40's; the 20 of the benchmark count. The score
is the mean IoU over the vertices of the validation scenes.

The real set (not run here) has 1,201 training and 312 validation scenes of about 150,000 vertices; 2 cm and
several hundred epochs are a start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from plyfile import PlyData
from scans import IGNORE, Scan, augmented, to_voxels, train_minkunet
from stand_ins import scannet as stand_in_set
from torch.utils.data import Dataset
from training import Run, data_folder

#: the 20 labels of the benchmark, of NYU40's
LABELS = {
    1: "wall", 2: "floor", 3: "cabinet", 4: "bed", 5: "chair", 6: "sofa", 7: "table", 8: "door", 9: "window",
    10: "bookshelf", 11: "picture", 12: "counter", 14: "desk", 16: "curtain", 24: "refrigerator", 28: "shower curtain",
    33: "toilet", 34: "sink", 36: "bathtub", 39: "otherfurniture",
}  # fmt: skip
CLASSES = list(LABELS.values())


def read_points(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Vertices (M, 3) [m], z up; colors (M, 3), 0 to 255 in the file and -1 to 1 here."""
    vertex = PlyData.read(path)["vertex"]
    points = np.stack([vertex[axis] for axis in "xyz"], 1)
    colours = np.stack([vertex[name] for name in ("red", "green", "blue")], 1)
    return torch.from_numpy(points), torch.from_numpy(colours.astype(np.float32) / 127.5 - 1)


def read_labels(path: Path) -> torch.Tensor:
    """Classes (M,) from 0 to 19; IGNORE for vertices that are unlabelled, or of NYU40's other classes."""
    lookup = np.full(1 << 16, IGNORE, np.int64)
    lookup[list(LABELS)] = np.arange(len(LABELS))
    return torch.from_numpy(lookup[PlyData.read(path)["vertex"]["label"]])


class ScanNet(Dataset):
    """One scene an item, as voxels: the color, the mean over the vertices of a voxel."""

    def __init__(self, folder: Path, split: str, voxel_size: float = 0.02, augment: bool = False) -> None:
        self.voxel_size, self.augment = voxel_size, augment
        names = (folder / f"scannetv2_{split}.txt").read_text().split()
        self.scenes = [folder / "scans" / name / f"{name}_vh_clean_2" for name in names]

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Scan:
        scene = self.scenes[index]
        points, colours = read_points(scene.with_name(f"{scene.name}.ply"))
        labels = read_labels(scene.with_name(f"{scene.name}.labels.ply"))
        if self.augment:
            points = augmented(points)
            colours = (colours + 0.05 * torch.randn_like(colours)).clamp(-1, 1)
        return to_voxels(points, colours, labels, self.voxel_size, len(CLASSES))


def train(
    folder: Path,
    output: Path,
    epochs: int,
    batch: int = 4,
    variant: str = "34C",
    width: int = 32,
    voxel_size: float = 0.02,
    workers: int = 0,
    seed: int = 0,
) -> Run:
    """Train, validate after each epoch, keep what is needed to continue."""
    sets = [ScanNet(folder, split, voxel_size, augment=split == "train") for split in ("train", "val")]
    size = (epochs, batch, variant, width, workers, seed)
    return train_minkunet(output, "scannet", *sets, 3, len(CLASSES), *size)


def main(
    data: Annotated[Path | None, typer.Option(help="The folder with scans and the lists of scenes.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    epochs: int = 20,
    batch: int = typer.Option(None, help="Scenes per batch: 4, and 2 for the stand-in."),
    variant: str = typer.Option(None, help="Of MinkUNet: 34C, and 14 for the stand-in."),
    width: int = typer.Option(None, help="Channels of the finest level: 32, and 8 for the stand-in."),
    voxel_size: float = typer.Option(None, help="[m]: 0.02, and 0.12 for the stand-in."),
    workers: int = 0,
    output: Path = Path("runs"),
    seed: int = 0,
) -> None:
    """Segment ScanNet v2 with MinkUNet; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        size = (2, "14", 8, 0.12) if stand_in else (4, "34C", 32, 0.02)
        size = [given or default for given, default in zip((batch, variant, width, voxel_size), size)]
        run = train(folder, output, epochs, *size, workers, seed)
    print(run.summary("mean_iou", run.history[-1]["guessing"]))


if __name__ == "__main__":
    typer.run(main)
