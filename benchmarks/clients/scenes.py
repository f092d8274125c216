"""Scenes of the clients: rotated scans, and what a client is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

#: cells of a detector's grid on each side of the sensor, and above and below it
REACH, HEIGHT = 752, 20


class Client(NamedTuple):
    """A network, its scenes, and how it is called on one: with features first and cells second."""

    net: torch.nn.Module
    scenes: list[Any]
    call: Callable[[torch.nn.Module, Any], Any]


class Setting(NamedTuple):
    """Where files lie, where networks run, and how large scenes are."""

    clients: Path
    data: Path
    device: str
    scans: int = 8
    reach: int | None = None  # cells that are kept on each side of the middle; None: all


def rotated(setting: Setting, file: str, crop: tuple[np.ndarray, np.ndarray] | None) -> list[torch.Tensor]:
    """Eight rotations of a scan about the vertical axis, voxels (N, 3) int32 in shuffled order."""
    points = np.load(setting.data / file)["coords"].astype(np.float64)
    points -= np.median(points, 0)
    found = []
    for turn in range(setting.scans):
        angle = 2 * np.pi * turn / setting.scans
        cos, sin = np.cos(angle), np.sin(angle)
        cells = np.floor(points @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]).T).astype(np.int64)
        if crop is None:
            cells -= cells.min(0)
        else:
            low, high = crop
            cells = cells[((cells >= low) & (cells < high)).all(1)] - low
        cells = np.unique(cells, axis=0)
        cells = cells[np.random.default_rng(turn).permutation(len(cells))]
        found.append(torch.from_numpy(cells).int().to(setting.device))
    return found


def lidar(setting: Setting, channels: int, items: int = 2) -> tuple[list[Any], np.ndarray]:
    """Batches (features, coords with z first) of a LiDAR scan, and the grid's size (x, y, z)."""
    reach = min(REACH, setting.reach or REACH)
    high = np.array([reach, reach, HEIGHT])
    scans = [s.flip(1) for s in rotated(setting, "lidar_ouster_os2_010.npz", (-high, high))]
    scenes: list[Any] = []
    for turn in range(len(scans)):
        coords = batched([scans[(turn + 3 * item) % len(scans)] for item in range(items)])
        scenes.append((torch.randn(len(coords), channels, device=setting.device), coords))
    return scenes, 2 * high


def indoor(setting: Setting, items: int = 1) -> list[list[torch.Tensor]]:
    """Cells of an indoor scan, a list of items for each scene."""
    high = None if setting.reach is None else np.full(3, setting.reach)
    scans = rotated(setting, "indoor_rooms_pcl_002.npz", None if high is None else (-high, high))
    return [[scans[(turn + item) % len(scans)] for item in range(items)] for turn in range(len(scans))]


def indoor_rows(setting: Setting, items: int = 1) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Indoor scenes as Pointcept has them: features (N, 6), cells (N, 3), and where each item ends."""
    found = []
    for parts in indoor(setting, items):
        ends = torch.tensor([len(p) for p in parts], device=setting.device).cumsum(0)
        cells = torch.cat(parts)
        found.append((torch.randn(len(cells), 6, device=setting.device), cells, ends))
    return found


def batched(parts: list[torch.Tensor]) -> torch.Tensor:
    """Cells of several items as coords (N, 4), the item first."""
    return torch.cat([torch.cat([torch.full_like(p[:, :1], b), p], 1) for b, p in enumerate(parts)]).contiguous()


def tensors(answer: Any) -> list[torch.Tensor]:
    """What a client answers, as tensors: features of a sparse tensor, the parts of a tuple."""
    if isinstance(answer, tuple):
        return [tensor for part in answer for tensor in tensors(part)]
    return [answer if isinstance(answer, torch.Tensor) else answer.features]


def loss_of(answer: Any) -> torch.Tensor:
    losses = [y.float().square().mean() * 100 for y in tensors(answer)]
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]
