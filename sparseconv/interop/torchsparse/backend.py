"""``torchsparse.backend``: the hash table that code for version 2.1 uses by itself, and switches without effect."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.checks import row
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.interop.arguments import check_rows
from sparseconv.interop.torchsparse.conventions import make_ntuple
from sparseconv.interop.torchsparse.nn.functional import sphashquery
from sparseconv.interop.torchsparse.nn.modules import get_kernel_offsets


class GPUHashTable:
    """Rows by coordinates or by hash; arguments (keys, values, or a size) are accepted, without effect.

    Look-ups return rows counted from 1, and 0 for what is absent.
    """

    def __init__(self, *memory: Any) -> None:
        self._grid: VoxelGrid | None = None
        self._references: torch.Tensor | None = None

    def insert_coords(self, coords: torch.Tensor) -> None:
        """Coordinates (N, 4) int32, (x, y, z, batch)."""
        check_rows("coords", coords, 4, "(x, y, z, batch)")
        self._grid = VoxelGrid(torch.cat([coords[:, 3:], coords[:, :3]], 1))

    def lookup_coords(self, coords: torch.Tensor, kernel_size: Any, stride: Any, kernel_volume: Any) -> torch.Tensor:
        """(N, V) int32: rows at stride * c + tap - (kernel_size - 1) // 2; taps in the order of a layer's weight."""
        if self._grid is None:
            raise ValueError("insert coordinates first")
        check_rows("coords", coords, 4, "(x, y, z, batch)")
        taps = get_kernel_offsets(kernel_size, device=coords.device)
        at = coords[:, None, :3].long() * row(make_ntuple(stride, 3), coords) + taps
        items = coords[:, None, 3:].long().expand(-1, len(taps), -1)
        rows = self._grid.lookup(torch.cat([items, at], 2).flatten(0, 1).int())
        return (rows + 1).view(len(coords), len(taps)).int()

    def insert_vals(self, references: torch.Tensor) -> None:
        """Hashes (N,) int64."""
        self._references = references

    def lookup_vals(self, queries: torch.Tensor) -> torch.Tensor:
        """(M,) int32: the row of each hash."""
        if self._references is None:
            raise ValueError("insert hashes first")
        return (sphashquery(queries, self._references) + 1).int()


# ---- ``torchsparse.backends`` and tuning; nothing here has an effect


benchmark = False
allow_tf32 = True
allow_fp16 = True
hash_rsv_ratio = 2


def init() -> None:
    """Accepted, without effect."""


def tune(*args: Any, **kwargs: Any) -> None:
    """Accepted, without effect: the backend is chosen by sparseconv."""
