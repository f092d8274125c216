"""Codes of voxels along z-order and Hilbert curves, and voxels of codes."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.checks import INT32, check_choice, check_values
from sparseconv.interop.arguments import check_rows
from sparseconv.interop.flex_gemm.geometry import bits, sizes
from sparseconv.ops.serialization import serial_codes

CURVES = {"z_order": "z", "hilbert": "hilbert"}


@torch.no_grad()
def encode_seq(coords: torch.Tensor, shape: Any, mode: str = "z_order") -> torch.Tensor:
    """The code of each voxel: (N,) int32 where 32 bits hold batch and axes, else int64; the top bit may be the sign.

    Args:
        coords: (N, 4) integers, the batch item first.
        shape: batch size, channels, W, H, D.
        mode: ``"z_order"`` or ``"hilbert"``.

    Raises:
        ValueError: another mode, coords outside of the curve, or more than 64 bits.

    >>> encode_seq(torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]), (2, 3, 2, 2, 2)).tolist()
    [5, 8]
    """
    check_choice("mode", mode, tuple(CURVES))
    check_rows("coords", coords, 4, "the batch item and three axes")
    depth, total = _depth(shape)
    items = coords[:, 0].long()
    if len(coords) and not 0 <= int(items.min()) <= int(items.max()) < shape[0]:
        raise ValueError(
            f"batch items must lie within 0 .. {shape[0] - 1}; got {int(items.min())} .. {int(items.max())}"
        )
    places = torch.cat([torch.zeros_like(coords[:, :1]), coords[:, 1:]], 1)
    codes = serial_codes(places, CURVES[mode], depth=depth) | items << 3 * depth
    return codes.int() if total <= 32 else codes


def decode_seq(code: torch.Tensor, shape: Any, mode: str = "z_order") -> torch.Tensor:
    """The voxels (N, 4) int32 of codes (N,) int32 or int64 that `encode_seq` made with this shape and mode.

    >>> decode_seq(torch.tensor([5, 8]), (2, 3, 2, 2, 2)).tolist()
    [[0, 1, 0, 1], [1, 0, 0, 0]]
    """
    check_choice("mode", mode, tuple(CURVES))
    check_values("code", code, "(N,) int32 or int64")
    if code.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"code must be int32 or int64; got {code.dtype}")
    if code.ndim != 1:
        raise ValueError(f"code must be (N,); got {tuple(code.shape)}")
    depth, _ = _depth(shape)
    words = code.long()
    if code.dtype == torch.int32:
        words = words & 0xFFFFFFFF
    items = words >> 3 * depth & (1 << 64 - 3 * depth) - 1 if depth else words
    words = words & (1 << 3 * depth) - 1
    if mode == "hilbert":
        words = words ^ words >> 1
    axes = [torch.zeros_like(words) for _ in range(3)]
    for level in range(depth):
        for number in range(3):
            axes[number] |= (words >> 3 * level + 2 - number & 1) << level
    if mode == "hilbert":
        for level in range(1, depth):
            _turn_back(axes, level)
    return torch.stack([items, *axes], 1).clamp_max(INT32.max).int()


def _turn_back(axes: list[torch.Tensor], level: int) -> None:
    """Undo what the curve did below a level: mirror the first axis where an axis has its bit, else exchange both."""
    below = (1 << level) - 1
    for number in (2, 1, 0):
        on = -(axes[number] >> level & 1)
        exchanged = (axes[0] ^ axes[number]) & ~on & below
        axes[number] = axes[number] ^ exchanged
        axes[0] = axes[0] ^ (exchanged | on & below)


def _depth(shape: Any) -> tuple[int, int]:
    """Bits an axis, and those of a code."""
    items, _, *edges = sizes(shape)
    depth = bits(*edges)
    total = 3 * depth + bits(items)
    if depth > 21 or total > 64:
        raise ValueError(f"a code of shape {tuple(shape)} needs {total} bits, of which there are 64, 21 an axis")
    return depth, total
