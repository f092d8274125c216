"""Kernels that the first plan of a process will need, compiled beside the first grid's own."""

from __future__ import annotations

import torch

from sparseconv.geometry.triton_cube import CUBE
from sparseconv.geometry.triton_cube_pairs import CUBE_PAIRS
from sparseconv.geometry.triton_launch import read_triton
from sparseconv.geometry.triton_search import SEARCH, search_constants, search_programs
from sparseconv.geometry.triton_table import FUSED_ROWS, pack_shifts, rows_per_chunk
from sparseconv.geometry.triton_window import bit_places

_seen: set[int | None] = set()


def expect_plans(coords: torch.Tensor) -> None:
    """Start to compile what the 3 x 3 x 3 map of ``coords`` (N, 4) takes, if they are the first on their device.

    Nearly every grid gets that map. Where the kernels lie in Triton's cache, this costs some milliseconds once.
    """
    device = coords.device
    if device.index in _seen:
        return
    n, columns = coords.shape
    offsets, shifts = CUBE
    if columns != len(shifts) or not 0 < n <= FUSED_ROWS:
        return
    _seen.add(device.index)
    read_triton()
    looks = (columns - 1, pack_shifts(shifts), bit_places(shifts), True, False, 27, 3)
    taps = len(offsets)
    SEARCH.ahead(device, search_constants(looks, taps, n, search_programs(device, taps, n), True, taps))
    CUBE_PAIRS.ahead(device, (rows_per_chunk(n),))
