"""Clouds that numpy reads: arrays, text, and the plain numbers of KITTI and nuScenes."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from sparseconv.files import check_members

#: names under which an .npz keeps its points, in the order in which they are looked for
KEYS = ("points", "xyz", "positions", "coords")
#: rings of a lidar: the fifth number of a point of nuScenes is a whole one below this
RINGS = 256
FLOAT = 4


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file; a header that asks for more than the file holds is an error."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


def read_npz(path: Path) -> np.ndarray:
    """The one array of an .npz file, or the one under a name of `KEYS`."""
    with zipfile.ZipFile(path) as archive:
        check_members(archive, path.stat().st_size)
        names = [n.removesuffix(".npy") for n in archive.namelist()]
        found = next((name for name in KEYS if name in names), names[0] if len(names) == 1 else None)
        if found is None:
            raise ValueError(f"it contains {', '.join(names) or 'nothing'}; name the positions {' or '.join(KEYS)}")
        data = archive.read(archive.namelist()[names.index(found)])  # whole, so that its checksum is compared
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def read_binary(path: Path, columns: int | None = None) -> np.ndarray:
    """Points (M, 4) of KITTI or (M, 5) of nuScenes, float32 without a header."""
    size = path.stat().st_size
    fits = [c for c in (4, 5) if size % (c * FLOAT) == 0]
    if columns is not None:
        if columns not in fits:
            raise ValueError(f"{size:,} bytes are not a multiple of {columns} float32 numbers per point")
        fits = [columns]
    if not fits:
        raise ValueError(f"{size:,} bytes are not a multiple of 4 (KITTI) or 5 (nuScenes) float32 numbers per point")
    numbers = np.fromfile(path, "<f4")
    if len(fits) == 2 and len(numbers):
        fits = [c for c in fits if _is_width(numbers, c)]
        if len(fits) != 1:
            raise ValueError(
                f"{size:,} bytes fit 4 (KITTI) and 5 (nuScenes) float32 numbers per point, and the values do "
                "not tell which: pass columns=4 or columns=5 (--columns)"
            )
    return numbers.reshape(-1, fits[0])


def _is_width(numbers: np.ndarray, columns: int) -> bool:
    """Whether the last column is a reflectance within 0 and 1 (4 columns) or the number of a ring (5)."""
    last = numbers.reshape(-1, columns)[:, -1]
    if columns == 4:
        return bool(((last >= 0) & (last <= 1)).all())
    return bool(((last >= 0) & (last < RINGS) & (last == np.floor(last))).all())


def read_text(path: Path) -> np.ndarray:
    """Columns of numbers, (M, 3) or wider, between commas, semicolons or blanks; # and // begin remarks."""
    text = path.read_text(encoding="utf-8-sig")
    first = next((n for n, line in enumerate(text.splitlines()) if _plain(line)), None)
    if first is None:
        return np.empty((0, 3))
    head = _plain(text.splitlines()[first])
    delimiter = next((mark for mark in ",;" if mark in head), None)
    names = [name.strip().strip("\"'").lower() for name in head.split(delimiter)]
    wanted: list[int] | None = None
    if not all(map(_is_number, names)):
        if any(map(_is_number, names)) or any(names.count(axis) != 1 for axis in "xyz"):
            raise ValueError(f"its first line {head[:80]!r} holds neither numbers nor the names x, y and z")
        wanted, first = [names.index(axis) for axis in "xyz"], first + 1
    return np.loadtxt(
        io.StringIO(text), comments=("#", "//"), delimiter=delimiter, skiprows=first, usecols=wanted, ndmin=2
    )


def _plain(line: str) -> str:
    return line.split("#")[0].split("//")[0].strip()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
