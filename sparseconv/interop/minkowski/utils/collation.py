"""Scenes put together in a batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sparseconv.interop.arguments import lower_corners
from sparseconv.kinds import check_values, described

Rows = np.ndarray | torch.Tensor


def _tensor(rows: Any, name: str) -> torch.Tensor:
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(rows))
    check_values(name, rows, "or a numpy array, one a scene")
    return rows


def batched_coordinates(
    coords: Sequence[Rows], dtype: torch.dtype = torch.int32, device: torch.device | str | None = None
) -> torch.Tensor:
    """Coordinates (N_b, D) of each scene -> (N, 1+D), the number of the scene first; floored where int32 is asked.

    >>> batched_coordinates([torch.tensor([[1.5, 2]]), torch.tensor([[3, 4]])]).tolist()
    [[0, 1, 2], [1, 3, 4]]
    """
    if isinstance(coords, torch.Tensor):
        check_values("coords", coords, "(B, N, D)")
    if isinstance(coords, (np.ndarray, str)) or not isinstance(coords, (Sequence, torch.Tensor)) or not len(coords):
        raise TypeError(f"coords must be a sequence of arrays (N, D), one a scene; got {type(coords).__name__}")
    if dtype not in (torch.int32, torch.float32):
        raise ValueError(f"dtype must be torch.int32 or torch.float32; got {dtype}")
    scenes = [_tensor(c, "coords") for c in coords]
    shapes = {c.shape[1] if c.ndim == 2 else None for c in scenes}
    if None in shapes or len(shapes) > 1:
        raise ValueError(
            f"every scene's coordinates must be (N, D), with one D; got {[tuple(c.shape) for c in scenes]}"
        )
    rows = []
    for number, scene in enumerate(scenes):
        if dtype == torch.int32:
            scene = lower_corners("coords", scene)
        scene = scene.to(device=scene.device if device is None else device, dtype=dtype)
        rows.append(torch.cat([torch.full_like(scene[:, :1], number), scene], 1))
    return torch.cat(rows)


def sparse_collate(
    coords: Sequence[Rows],
    feats: Sequence[Rows],
    labels: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> tuple:
    """Coordinates (N_b, D), features (N_b, C) and labels of each scene -> those of the batch.

    Returns:
        (coordinates (N, 1+D), features (N, C)), and labels where there were any: joined where they are arrays, else a
        list of them.
    """
    if labels is not None and (isinstance(labels, (str, bytes)) or not isinstance(labels, Sequence)):
        raise TypeError(f"labels must be a sequence of arrays, one a scene, but it is {described(labels)}")
    if labels is not None and len(labels) != len(coords):
        raise ValueError(f"there are {len(coords)} scenes and {len(labels)} labels: one a scene each")
    batched = batched_coordinates(coords, dtype, device)
    scenes = [_tensor(f, "feats") for f in feats]
    mine, theirs = ([tuple(rows.shape[:1]) for rows in each] for each in (coords, scenes))
    if mine != theirs:
        raise ValueError(
            f"scenes have {_counts(mine)} coordinates and {_counts(theirs)} features: one row a point each"
        )
    features = _joined("feats", scenes)
    if labels is None:
        return batched, features
    given = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in labels]
    return batched, features, _joined("labels", given) if isinstance(given[0], torch.Tensor) else given


def _counts(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(*shape) if shape else "no rows of" for shape in shapes)


def _joined(name: str, scenes: list[Any]) -> torch.Tensor:
    if not all(isinstance(rows, torch.Tensor) and rows.ndim for rows in scenes):
        raise ValueError(
            f"{name} must be arrays with a row a point, or (1,) a scene; got {[described(r) for r in scenes]}"
        )
    if len({rows.shape[1:] for rows in scenes}) > 1:
        raise ValueError(f"{name} must differ in rows alone; got {[tuple(rows.shape) for rows in scenes]}")
    return torch.cat(scenes)


def batch_sparse_collate(
    data: Sequence[tuple], dtype: torch.dtype = torch.int32, device: torch.device | str | None = None
) -> tuple:
    """`sparse_collate` of (coordinates, features) or (coordinates, features, labels), one tuple a scene."""
    coords, feats, *labels = zip(*data)
    return sparse_collate(coords, feats, labels[0] if labels else None, dtype, device)


class SparseCollation:
    """A ``collate_fn`` for (coordinates, features, labels), one tuple a scene.

    Args:
        limit_numpoints: leave out the scenes from the one on that would exceed so many points; -1 for no limit.
    """

    def __init__(
        self,
        limit_numpoints: int = -1,
        dtype: torch.dtype = torch.int32,
        device: torch.device | str | None = None,
    ) -> None:
        self.limit_numpoints, self.dtype, self.device = limit_numpoints, dtype, device

    def __call__(self, list_data: Sequence[tuple]) -> tuple:
        kept: list[tuple] = []
        points = 0
        for scene in list_data:
            points += len(scene[0])
            if 0 < self.limit_numpoints < points:
                logging.getLogger(__name__).warning(
                    "%d of %d scenes fit in %d points: the others are left out of the batch",
                    len(kept), len(list_data), self.limit_numpoints,
                )  # fmt: skip
                break
            kept.append(scene)
        return batch_sparse_collate(kept, dtype=self.dtype, device=self.device)
