"""Find cars, people and cyclists in KITTI: the encoder of SECOND, and a small head of CenterPoint's kind.

    python examples/kitti_boxes.py --data DIR --workers 8
    python examples/kitti_boxes.py --stand-in

DIR holds ``training/{velodyne,label_2,calib}`` and the usual lists ``ImageSets/{train,val}.txt``. Only what the camera
sees is labelled, so points outside of its image are left out. The score is the average precision at a center distance
of 1 m, as nuScenes matches boxes, mean over the classes; KITTI's own score matches by overlap, with its own program.

The real set (not run here) has 3,712 training and 3,769 validation sweeps; 80 epochs are usual. A detector for a
leaderboard also pastes boxes of other sweeps and has a deeper head.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from stand_ins import kitti as stand_in_set
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from training import Run, begin, data_folder

import sparseconv as sc
from sparseconv import nn

CLASSES = ["Car", "Pedestrian", "Cyclist"]
IMAGE = (1242, 375)  # pixels; the real images differ by a few
STRIDE = 8


@dataclass(frozen=True)
class Space:
    """What the network looks at: x ahead, y left, z up [m], and the size of a voxel."""

    low: tuple[float, float, float] = (0, -40, -3)
    high: tuple[float, float, float] = (70.4, 40, 1)
    voxel: tuple[float, float, float] = (0.05, 0.05, 0.1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Cells along (z, y, x), one more along z, as SECOND has."""
        x, y, z = (round((b - a) / v) for a, b, v in zip(self.low, self.high, self.voxel))
        return z + 1, y, x


def read_calibration(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """LiDAR to the rectified camera (4, 4), and that to the image (3, 4)."""
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    values = {name: np.array(text.split(), float) for name, text in lines.items()}
    turn, move = np.eye(4), np.eye(4)
    turn[:3, :3], move[:3] = values["R0_rect"].reshape(3, 3), values["Tr_velo_to_cam"].reshape(3, 4)
    return turn @ move, values["P2"].reshape(3, 4)


def read_boxes(path: Path, camera: np.ndarray) -> torch.Tensor:
    """(B, 8) fp32 in the LiDAR's axes: class, center x y z, length, width, height [m], yaw from x towards y."""
    found = []
    for line in path.read_text().splitlines():
        name, *words = line.split()
        if name in CLASSES:
            height, width, length, x, y, z, rotation = (float(w) for w in words[7:14])
            place = np.linalg.solve(camera, [x, y, z, 1])[:3] + [0, 0, height / 2]  # the file has the bottom's center
            yaw = (-rotation - pi / 2 + pi) % (2 * pi) - pi
            found.append([CLASSES.index(name), *place, length, width, height, yaw])
    return torch.tensor(found, dtype=torch.float32).view(-1, 8)


class Kitti(Dataset):
    """One sweep an item: voxels (N, 3) ordered z, y, x, features (N, 4), boxes (B, 8)."""

    def __init__(self, folder: Path, split: str, space: Space, augment: bool = False) -> None:
        self.folder, self.space, self.augment = folder / "training", space, augment
        self.names = (folder / "ImageSets" / f"{split}.txt").read_text().split()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        name = self.names[index]
        camera, image = read_calibration(self.folder / "calib" / f"{name}.txt")
        points = np.fromfile(self.folder / "velodyne" / f"{name}.bin", "<f4").reshape(-1, 4)
        u, v, depth = image @ camera @ np.concatenate([points[:, :3], np.ones((len(points), 1))], 1).T
        seen = (depth > 0) & (u >= 0) & (u < depth * IMAGE[0]) & (v >= 0) & (v < depth * IMAGE[1])
        points = torch.from_numpy(points[seen])
        boxes = read_boxes(self.folder / "label_2" / f"{name}.txt", camera)
        if self.augment:
            points, boxes = augmented(points, boxes)
        low, high = torch.tensor(self.space.low), torch.tensor(self.space.high)
        points = points[((points[:, :3] >= low) & (points[:, :3] < high)).all(1)]
        boxes = boxes[((boxes[:, 1:4] >= low) & (boxes[:, 1:4] < high)).all(1)]
        grid, rows = sc.voxelize(points[:, [2, 1, 0]], self.space.voxel[::-1], origin=self.space.low[::-1])
        scale = torch.tensor([20.0, 20.0, 2.0, 1.0])
        return grid.coords[:, 1:], sc.ops.voxelize_features(points / scale, rows, len(grid)), boxes


def augmented(points: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mirrored left and right, turned about z by up to 45 degrees, scaled by up to 5 %."""
    points, boxes = points.clone(), boxes.clone()
    mirror, turn, scale = (torch.rand(3) * torch.tensor([1.0, pi / 2, 0.1])).tolist()
    turn, scale = turn - pi / 4, scale + 0.95
    if mirror < 0.5:
        points[:, 1], boxes[:, 2], boxes[:, 7] = -points[:, 1], -boxes[:, 2], -boxes[:, 7]
    angle = torch.tensor(turn)
    matrix = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    points[:, :2], boxes[:, 1:3], boxes[:, 7] = points[:, :2] @ matrix.T, boxes[:, 1:3] @ matrix.T, boxes[:, 7] + turn
    points[:, :3], boxes[:, 1:7] = points[:, :3] * scale, boxes[:, 1:7] * scale
    return points, boxes


def collate(items: list[tuple]) -> tuple[sc.SparseTensor, list[torch.Tensor]]:
    """Runs in the workers."""
    coords, features, boxes = zip(*items)
    return sc.SparseTensor.from_list(list(coords), list(features)), list(boxes)


class Detector(torch.nn.Module):
    """A heat map of centers for each class, and at each cell: x, y within it, z, log sizes, sine and cosine of yaw."""

    def __init__(self, space: Space, width: int = 64) -> None:
        super().__init__()
        self.space = space
        self.encoder = nn.SecondEncoder(4, space.shape)

        def block(c_in: int) -> list[torch.nn.Module]:
            conv = torch.nn.Conv2d(c_in, width, 3, padding=1, bias=False)
            return [conv, torch.nn.BatchNorm2d(width), torch.nn.ReLU()]

        bev = 128 * self.encoder.out_shape[0]
        self.head = torch.nn.Sequential(*block(bev), *block(width), torch.nn.Conv2d(width, len(CLASSES) + 8, 1))
        torch.nn.init.constant_(self.head[-1].bias[: len(CLASSES)], log(0.05 / 0.95))  # rare at first

    def forward(self, x: sc.SparseTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, classes, y, x) logits, (B, 8, y, x) boxes."""
        y = self.head(self.encoder.to_bev(self.encoder(x)))
        return y[:, : len(CLASSES)], y[:, len(CLASSES) :]

    def loss(self, heat: torch.Tensor, values: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        """CenterPoint's: a focal loss of the heat map, with discs of 2 cells around centers, and L1 at the centers."""
        heat, values = heat.float(), values.float()
        target, off = torch.zeros_like(heat), heat.new_zeros(())
        y, x = torch.meshgrid(*(torch.arange(n, device=heat.device) for n in heat.shape[2:]), indexing="ij")
        low, cell = (torch.tensor(v[:2]) for v in (self.space.low, self.space.voxel))
        for item, found in enumerate(boxes):
            for place, box in zip((found[:, 1:3] - low) / (cell * STRIDE), found):
                column, row = place.long().clamp_min(0).tolist()
                row, column = min(row, heat.shape[2] - 1), min(column, heat.shape[3] - 1)
                disc = torch.exp(-((x - column) ** 2 + (y - row) ** 2) / 1.5).to(target)
                kind = int(box[0])
                target[item, kind] = torch.maximum(target[item, kind], disc)
                wanted = [*(place - torch.tensor([column, row])), box[3], *box[4:7].log(), box[7].sin(), box[7].cos()]
                off = off + (values[item, :, row, column] - torch.stack(wanted).to(heat.device)).abs().sum()
        centre, p = target == 1, heat.sigmoid()
        hit = ((1 - p) ** 2 * F.logsigmoid(heat))[centre].sum()
        miss = ((1 - target) ** 4 * p**2 * F.logsigmoid(-heat))[~centre].sum()
        return (0.25 * off - hit - miss) / max(1, sum(len(found) for found in boxes))

    @torch.no_grad()
    def boxes(self, heat: torch.Tensor, values: torch.Tensor, most: int = 40) -> list[torch.Tensor]:
        """The highest peaks of each item, (most, 9): as `read_boxes`, and the score."""
        p = heat.float().sigmoid()
        p = torch.where(p == F.max_pool2d(p, 3, 1, 1), p, 0)
        score, at = p.flatten(1).topk(min(most, p[0].numel()), 1)
        kind, cell = at // p[0, 0].numel(), at % p[0, 0].numel()
        row, column = cell // p.shape[3], cell % p.shape[3]
        found = []
        for item, v in enumerate(values.float().flatten(2)):
            v = v[:, cell[item]]
            x = (v[0] + column[item]) * self.space.voxel[0] * STRIDE + self.space.low[0]
            y = (v[1] + row[item]) * self.space.voxel[1] * STRIDE + self.space.low[1]
            yaw = torch.atan2(v[6], v[7])
            found.append(torch.stack([kind[item], x, y, v[2], *v[3:6].exp(), yaw, score[item]], 1))
        return found


def average_precision(found: list[torch.Tensor], boxes: list[torch.Tensor], reach: float = 1.0) -> float:
    """The precision at 40 recalls, mean over the classes that occur.

    A box is right within ``reach`` [m] of one that no better box has taken.
    """
    scores = []
    for kind in {int(k) for b in boxes for k in b[:, 0]}:
        free = [b[b[:, 0] == kind] for b in boxes]
        total, right = sum(map(len, free)), []
        mine = [(item, box) for item, boxes_of in enumerate(found) for box in boxes_of if box[0] == kind]
        for item, box in sorted(mine, key=lambda m: -float(m[1][8])):
            distance = (free[item][:, 1:3] - box[1:3]).norm(dim=1)
            hit = len(distance) > 0 and float(distance.min()) < reach
            right.append(hit)
            if hit:
                free[item] = free[item][torch.arange(len(distance)) != distance.argmin()]
        hits = np.cumsum(right) if right else np.zeros(0)
        precision, recall = hits / np.arange(1, len(hits) + 1), hits / total
        scores.append(np.mean([max(precision[recall >= r - 1e-9], default=0.0) for r in np.arange(1, 41) / 40]))
    return float(np.mean(scores))


@torch.no_grad()
def validate(net: Detector, loader: DataLoader) -> float:
    device = next(net.parameters()).device
    net.eval()
    found, boxes = [], []
    for x, wanted in loader:
        found += [f.cpu() for f in net.boxes(*net(x.to(device)))]
        boxes += wanted
    return average_precision(found, boxes)


def train(
    folder: Path, output: Path, epochs: int, space: Space, batch: int = 4, workers: int = 0, seed: int = 0
) -> Run:
    """Train, score after each epoch, keep what is needed to continue."""
    device = begin(seed)
    loaders = {}
    for split in ("train", "val"):
        sweeps = Kitti(folder, split, space, augment=split == "train")
        loaders[split] = DataLoader(sweeps, batch, split == "train", collate_fn=collate, num_workers=workers)
    net = Detector(space).to(device)
    if device.type == "cuda":
        sc.accelerate(net)  # the encoder as CUDA graphs
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    steps = epochs * len(loaders["train"])
    run = Run(output, "kitti_boxes", net, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.004, steps))
    for _ in run.epochs(epochs):
        net.train()
        for x, boxes in loaders["train"]:
            with run.autocast():
                heat, values = net(x.to(device))
            run.step(net.loss(heat, values, boxes))
        run.finish_epoch(average_precision=validate(net, loaders["val"]))
    return run


def main(
    data: Annotated[Path | None, typer.Option(help="The folder with training and ImageSets.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    epochs: int = typer.Option(None, help="80, and 12 for the stand-in."),
    batch: int = typer.Option(None, help="Sweeps per batch: 4, and 2 for the stand-in."),
    workers: int = 0,
    output: Path = Path("runs"),
    seed: int = 0,
) -> None:
    """Find boxes in KITTI with SECOND's encoder; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        space = Space((0, -12.8, -3), (32, 12.8, 1), (0.1, 0.1, 0.1)) if stand_in else Space()
        epochs, batch = epochs or (12 if stand_in else 80), batch or (2 if stand_in else 4)
        run = train(folder, output, epochs, space, batch, workers, seed)
    print(run.summary("average_precision", 0.0))


if __name__ == "__main__":
    typer.run(main)
