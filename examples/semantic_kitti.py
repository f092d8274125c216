"""Segment SemanticKITTI with MinkUNet.

    python examples/semantic_kitti.py --data DIR --workers 8
    python examples/semantic_kitti.py --stand-in

DIR is the benchmark's ``dataset`` folder: ``sequences/NN/velodyne/*.bin`` and ``sequences/NN/labels/*.label``.
Learning map, class weights and splits are those of the benchmark's ``semantic-kitti.yaml``. The score is the mean IoU
of 19 classes over the points of sequence 08; unlabelled points do not count.

The real set (not run here) has 19,130 training scans of about 120,000 points; 15 epochs at 5 cm are a start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from scans import IGNORE, Scan, augmented, to_voxels, train_minkunet
from stand_ins import semantic_kitti as stand_in_set
from torch.utils.data import Dataset
from training import Run, data_folder

CLASSES = ["car", "bicycle", "motorcycle", "truck", "other-vehicle", "person", "bicyclist", "motorcyclist", "road",
           "parking", "sidewalk", "other-ground", "building", "fence", "vegetation", "trunk", "terrain", "pole",
           "traffic-sign"]  # fmt: skip
SPLITS = {"train": [0, 1, 2, 3, 4, 5, 6, 7, 9, 10], "valid": [8]}
#: raw label -> class of the benchmark, 0 is "unlabeled"; moving things count with their kind
LEARNING_MAP = {
    0: 0, 1: 0, 10: 1, 11: 2, 13: 5, 15: 3, 16: 5, 18: 4, 20: 5, 30: 6, 31: 7, 32: 8, 40: 9, 44: 10, 48: 11, 49: 12,
    50: 13, 51: 14, 52: 0, 60: 9, 70: 15, 71: 16, 72: 17, 80: 18, 81: 19, 99: 0, 252: 1, 253: 7, 254: 6, 255: 8, 256: 5,
    257: 5, 258: 4, 259: 5,
}  # fmt: skip
#: share of each raw label among all points
CONTENT = {
    0: 0.018889854628292943, 1: 0.0002937197336781505, 10: 0.040818519255974316, 11: 0.00016609538710764618,
    13: 2.7879693665067774e-05, 15: 0.00039838616015114444, 16: 0.0, 18: 0.0020633612104619787,
    20: 0.0016218197275284021, 30: 0.00017698551338515307, 31: 1.1065903904919655e-08, 32: 5.532951952459828e-09,
    40: 0.1987493871255525, 44: 0.014717169549888214, 48: 0.14392298360372, 49: 0.0039048553037472045,
    50: 0.1326861944777486, 51: 0.0723592229456223, 52: 0.002395131480328884, 60: 4.7084144280367186e-05,
    70: 0.26681502148037506, 71: 0.006035012012626033, 72: 0.07814222006271769, 80: 0.002855498193863172,
    81: 0.0006155958086189918, 99: 0.009923127583046915, 252: 0.001789309418528068, 253: 0.00012709999297008662,
    254: 0.00016059776092534436, 255: 3.745553104802113e-05, 256: 0.0, 257: 0.00011351574470342043,
    258: 0.00010157861367183268, 259: 4.3840131989471124e-05,
}  # fmt: skip


def class_weights() -> torch.Tensor:
    """1 / (share of the class + 0.001), as RangeNet++ weighs the loss; (19,)."""
    share = torch.zeros(len(CLASSES) + 1)
    for raw, part in CONTENT.items():
        share[LEARNING_MAP[raw]] += part
    return 1 / (share[1:] + 1e-3)


def read_points(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions (M, 3) [m], x ahead, y left, z up; remission (M, 1), 0 to 1."""
    values = torch.from_numpy(np.fromfile(path, "<f4").reshape(-1, 4))
    return values[:, :3], values[:, 3:]


def read_labels(path: Path) -> torch.Tensor:
    """Classes (M,) from 0 to 18, IGNORE for unlabelled points: of the lower 16 bits; the upper name an instance."""
    lookup = np.full(1 << 16, -1, np.int64)  # a label that the map lacks is an error below
    lookup[list(LEARNING_MAP)] = list(LEARNING_MAP.values())
    classes = lookup[np.fromfile(path, "<u4") & 0xFFFF]
    if (classes < 0).any():
        raise ValueError(f"{path} has labels that are not of SemanticKITTI")
    return torch.from_numpy(np.where(classes == 0, IGNORE, classes - 1))


class SemanticKITTI(Dataset):
    """One sweep an item, as voxels: x, y, z [m] and remission, means over the points of a voxel."""

    def __init__(self, folder: Path, split: str, voxel_size: float = 0.05, augment: bool = False) -> None:
        self.voxel_size, self.augment = voxel_size, augment
        names = [f"{number:02d}" for number in SPLITS[split]]
        self.files = [p for name in names for p in sorted((folder / "sequences" / name / "velodyne").glob("*.bin"))]
        if not self.files:
            raise FileNotFoundError(f"{folder} has no sequences/{names[0]}/velodyne/*.bin: is it the dataset folder?")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Scan:
        path = self.files[index]
        points, remission = read_points(path)
        labels = read_labels(path.parent.parent / "labels" / f"{path.stem}.label")
        if self.augment:
            points = augmented(points)
        return to_voxels(points, torch.cat([points / 20, remission], 1), labels, self.voxel_size, len(CLASSES))


def train(
    folder: Path,
    output: Path,
    epochs: int,
    batch: int = 2,
    variant: str = "18",
    width: int = 32,
    voxel_size: float = 0.05,
    workers: int = 0,
    seed: int = 0,
) -> Run:
    """Train, validate after each epoch, keep what is needed to continue."""
    sets = [SemanticKITTI(folder, split, voxel_size, augment=split == "train") for split in ("train", "valid")]
    size = (epochs, batch, variant, width, workers, seed, class_weights())
    return train_minkunet(output, "semantic_kitti", *sets, 4, len(CLASSES), *size)


def main(
    data: Annotated[Path | None, typer.Option(help="The folder 'dataset' of SemanticKITTI.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    epochs: int = 15,
    batch: int = 2,
    variant: str = typer.Option(None, help="Of MinkUNet: 18, and 14 for the stand-in."),
    width: int = typer.Option(None, help="Channels of the finest level: 32, and 8 for the stand-in."),
    voxel_size: float = typer.Option(None, help="[m]: 0.05, and 0.2 for the stand-in."),
    workers: int = 0,
    output: Path = Path("runs"),
    seed: int = 0,
) -> None:
    """Segment SemanticKITTI with MinkUNet; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        size = ("14", 8, 0.2) if stand_in else ("18", 32, 0.05)
        size = [given or default for given, default in zip((variant, width, voxel_size), size)]
        run = train(folder, output, epochs, batch, *size, workers, seed)
    print(run.summary("mean_iou", run.history[-1]["guessing"]))


if __name__ == "__main__":
    typer.run(main)
