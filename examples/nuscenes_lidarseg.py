"""Segment nuScenes-lidarseg with MinkUNet.

    python examples/nuscenes_lidarseg.py --data DIR --workers 8 --epochs 50
    python examples/nuscenes_lidarseg.py --stand-in

DIR holds the tables ``v1.0-trainval/*.json``, the sweeps ``samples/LIDAR_TOP/*.pcd.bin`` and the labels
``lidarseg/v1.0-trainval/*_lidarseg.bin``. Key frames of the 150 validation scenes are held out. The 32 categories
become the challenge's 16 classes; what maps to none does not count. The score is the mean IoU over points.

The real set (not run here) has 28,130 training and 6,019 validation key frames of about 35,000 points; 50
epochs are a start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from scans import IGNORE, Scan, augmented, to_voxels, train_minkunet
from stand_ins import nuscenes as stand_in_set
from torch.utils.data import Dataset
from training import Run, data_folder

VERSION = "v1.0-trainval"
CLASSES = ["barrier", "bicycle", "bus", "car", "construction_vehicle", "motorcycle", "pedestrian", "traffic_cone",
           "trailer", "truck", "driveable_surface", "other_flat", "sidewalk", "terrain", "manmade",
           "vegetation"]  # fmt: skip
#: category -> class of the challenge; categories that are not here are not counted
CLASS_OF = {
    "human.pedestrian.adult": "pedestrian",
    "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian",
    "human.pedestrian.police_officer": "pedestrian",
    "movable_object.barrier": "barrier",
    "movable_object.trafficcone": "traffic_cone",
    "vehicle.bicycle": "bicycle",
    "vehicle.bus.bendy": "bus",
    "vehicle.bus.rigid": "bus",
    "vehicle.car": "car",
    "vehicle.construction": "construction_vehicle",
    "vehicle.motorcycle": "motorcycle",
    "vehicle.trailer": "trailer",
    "vehicle.truck": "truck",
    "flat.driveable_surface": "driveable_surface",
    "flat.other": "other_flat",
    "flat.sidewalk": "sidewalk",
    "flat.terrain": "terrain",
    "static.manmade": "manmade",
    "static.vegetation": "vegetation",
}
#: numbers of the 150 scenes of the validation split, first and last of each stretch
VALIDATION = [
    (3, 3), (12, 18), (35, 36), (38, 39), (92, 110), (221, 221), (268, 278), (329, 332), (344, 346), (519, 524),
    (552, 565), (625, 627), (629, 630), (632, 638), (770, 771), (775, 775), (777, 778), (780, 784), (794, 800),
    (802, 802), (904, 917), (919, 931), (962, 963), (966, 969), (971, 972), (1059, 1073),
]  # fmt: skip
HELD_OUT = {f"scene-{number:04d}" for first, last in VALIDATION for number in range(first, last + 1)}


def read_points(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions (M, 3) [m], x right, y ahead, z up; intensity (M, 1), 0 to 255 in the file and 0 to 1 here."""
    values = torch.from_numpy(np.fromfile(path, "<f4").reshape(-1, 5))  # the fifth is the ring
    return values[:, :3], values[:, 3:4] / 255


def key_frames(folder: Path, split: str) -> list[tuple[Path, Path]]:
    """(sweep, labels) of each key frame of a split, in the order of the tables."""

    def table(name: str) -> list[dict]:
        return json.loads((folder / VERSION / f"{name}.json").read_text())

    scenes = {row["token"] for row in table("scene") if (row["name"] in HELD_OUT) == (split == "valid")}
    samples = {row["token"] for row in table("sample") if row["scene_token"] in scenes}
    labels = {row["sample_data_token"]: folder / row["filename"] for row in table("lidarseg")}
    return [
        (folder / row["filename"], labels[row["token"]])
        for row in table("sample_data")
        if row["token"] in labels and row["is_key_frame"] and row["sample_token"] in samples
    ]


class NuScenes(Dataset):
    """One key frame an item, as voxels: x, y, z [m] and intensity, means over the points of a voxel."""

    def __init__(self, folder: Path, split: str, voxel_size: float = 0.1, augment: bool = False) -> None:
        self.voxel_size, self.augment = voxel_size, augment
        self.frames = key_frames(folder, split)
        categories = json.loads((folder / VERSION / "category.json").read_text())
        self.class_of = torch.full((256,), IGNORE)
        for row in categories:
            if row["name"] in CLASS_OF:
                self.class_of[row["index"]] = CLASSES.index(CLASS_OF[row["name"]])

    def __len__(self) -> int:
        return len(self.frames)

    def read_labels(self, path: Path) -> torch.Tensor:
        """Classes (M,) from 0 to 15, or IGNORE."""
        return self.class_of[torch.from_numpy(np.fromfile(path, np.uint8)).long()]

    def __getitem__(self, index: int) -> Scan:
        sweep, labels = self.frames[index]
        points, intensity = read_points(sweep)
        if self.augment:
            points = augmented(points)
        features = torch.cat([points / 20, intensity], 1)
        return to_voxels(points, features, self.read_labels(labels), self.voxel_size, len(CLASSES))


def train(
    folder: Path,
    output: Path,
    epochs: int,
    batch: int = 2,
    variant: str = "18",
    width: int = 32,
    voxel_size: float = 0.1,
    workers: int = 0,
    seed: int = 0,
) -> Run:
    """Train, validate after each epoch, keep what is needed to continue."""
    sets = [NuScenes(folder, split, voxel_size, augment=split == "train") for split in ("train", "valid")]
    size = (epochs, batch, variant, width, workers, seed)
    return train_minkunet(output, "nuscenes_lidarseg", *sets, 4, len(CLASSES), *size)


def main(
    data: Annotated[Path | None, typer.Option(help="The folder with v1.0-trainval, samples and lidarseg.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    epochs: int = 15,
    batch: int = 2,
    variant: str = typer.Option(None, help="Of MinkUNet: 18, and 14 for the stand-in."),
    width: int = typer.Option(None, help="Channels of the finest level: 32, and 8 for the stand-in."),
    voxel_size: float = typer.Option(None, help="[m]: 0.1, and 0.2 for the stand-in."),
    workers: int = 0,
    output: Path = Path("runs"),
    seed: int = 0,
) -> None:
    """Segment nuScenes-lidarseg with MinkUNet; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        size = ("14", 8, 0.2) if stand_in else ("18", 32, 0.1)
        size = [given or default for given, default in zip((variant, width, voxel_size), size)]
        run = train(folder, output, epochs, batch, *size, workers, seed)
    print(run.summary("mean_iou", run.history[-1]["guessing"]))


if __name__ == "__main__":
    typer.run(main)
