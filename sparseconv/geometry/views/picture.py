"""A small picture of voxels for notebooks, drawn with numpy alone."""

from __future__ import annotations

import base64
import html as text
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import torch

#: the longer side of a picture in pixels, and the most voxels that are drawn
SIDE, MOST = 200, 60_000
#: viridis at even steps
COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]])


def html(coords: torch.Tensor, voxel_size: Sequence[float], words: str, values: torch.Tensor | None = None) -> str:
    """What a notebook shows of voxels (N, 1+D): a picture of the first item, colored by ``values`` (N,), and words.

    Default of ``values``: the last axis, which is the height of a scan. Waits for the device.
    """
    line = f"<div><code>{text.escape(words)}</code></div>"
    rows = (coords[:, 0] == 0).nonzero()[:, 0]
    rows = rows[:: max(1, math.ceil(len(rows) / MOST))]
    cells = coords[rows, 1:].cpu().numpy().astype(np.float64) * np.asarray(voxel_size)
    numbers = cells[:, -1] if values is None else values.detach()[rows].double().cpu().numpy()
    if not len(cells):
        return line
    data = base64.b64encode(png(draw(cells, numbers, min(voxel_size)))).decode()
    image = f'<img alt="voxels" style="image-rendering: pixelated" src="data:image/png;base64,{data}">'
    return f"<div>{image}</div>{line}"


def draw(cells: np.ndarray, values: np.ndarray, size: float) -> np.ndarray:
    """Voxels of edge ``size`` at cells (N, D) in the order far to near -> (height, width, 4) of uint8, see-through
    where there is none.

    Up to two axes are drawn as they are, the first to the right; three from a corner above. A fourth is left out.
    """
    if cells.shape[1] < 3:
        across, up = cells[:, 0], cells[:, 1] if cells.shape[1] == 2 else np.zeros(len(cells))
        depth = np.zeros(len(cells))
    else:
        x, y, z = cells[:, :3].T
        across, up, depth = 0.87 * (x - y), z + 0.5 * (x + y), x + y - z
    spread = max(np.ptp(across), np.ptp(up), size)
    scale = (SIDE - 1) / (spread + size)
    block = max(1, math.ceil(scale * size))
    column = ((across - across.min()) * scale).astype(int)
    row = ((up.max() - up) * scale).astype(int)
    order = np.argsort(-depth, kind="stable")
    picture = np.zeros((row.max() + block, column.max() + block, 4), np.uint8)
    colours = colours_of(values)[order]
    for i in range(block):
        for j in range(block):
            picture[row[order] + i, column[order] + j] = colours
    return picture


def colours_of(values: np.ndarray) -> np.ndarray:
    """Numbers (N,) -> red, green, blue, opacity (N, 4), from dark for the least to yellow for the largest."""
    finite = np.nan_to_num(values, posinf=0, neginf=0)
    low, high = finite.min(), finite.max()
    place = (finite - low) / (high - low or 1) * (len(COLOURS) - 1)
    marks = np.arange(len(COLOURS))
    channels = [np.interp(place, marks, COLOURS[:, c]) for c in range(3)]
    return np.stack([*channels, np.full(len(values), 255)], 1).astype(np.uint8)


def png(picture: np.ndarray) -> bytes:
    """A file of PNG from (height, width, 4) of uint8, see https://www.w3.org/TR/png."""
    height, width, _ = picture.shape
    lines = b"".join(b"\0" + line.tobytes() for line in picture)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
