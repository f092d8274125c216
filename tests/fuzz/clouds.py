"""Changed files of every format that `read_cloud` reads."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import torch

from sparseconv.demo.clouds import READERS, read_cloud
from tests.demo.test_clouds import write
from tests.fuzz import _files as files

#: formats that come in several kinds
PCD = ("ascii", "binary", "binary_compressed")


def originals(folder: Path) -> list[tuple[str, bytes]]:
    """(ending, bytes) of one small cloud in every format and in the kinds of it."""
    import pypcd4

    points = np.random.default_rng(0).uniform(-50, 50, (60, 3)).round(3)
    made = []
    for ending in READERS:
        path = folder / f"original{ending}"
        write(path, points)
        made.append((ending, path.read_bytes()))
    for kind in PCD:
        path = folder / "original.pcd"
        pypcd4.PointCloud.from_xyz_points(points.astype(np.float32)).save(str(path), pypcd4.Encoding(kind))
        made.append((".pcd", path.read_bytes()))
    np.savez_compressed(folder / "original.npz", xyz=points)
    made.append((".npz", (folder / "original.npz").read_bytes()))
    head = (
        "ply\nformat ascii 1.0\nelement vertex 60\nproperty float x\nproperty float y\nproperty float z\nend_header\n"
    )
    made.append((".ply", (head + "".join(f"{x} {y} {z}\n" for x, y, z in points)).encode()))
    return made


def make(seed: int, folder: Path):
    """The cases of a seed."""
    made = originals(folder)
    wanted = {}
    for number, (ending, data) in enumerate(made):
        path = folder / f"whole{number}{ending}"
        path.write_bytes(data)
        wanted[number] = read_cloud(path)

    def case(number: int) -> files.Case:
        rng = random.Random(f"{seed} {number}")
        which = rng.randrange(len(made))
        ending, data = made[which]

        def read() -> str:
            changed = files.mutated(data, rng)
            path = folder / f"case{number}{ending}"
            path.write_bytes(changed)
            try:
                return verdict(read_cloud(path), wanted[which], ending, changed)
            finally:
                path.unlink()

        return f"a changed {ending}", read

    return case


def verdict(points: torch.Tensor, wanted: torch.Tensor, ending: str, data: bytes) -> str:
    """What is to be said of points that were read from changed bytes."""
    if points.dtype != torch.float64 or points.ndim != 2 or points.shape[1] != 3 or not len(points):
        return f"SILENT {points.dtype} {tuple(points.shape)}"
    if not bool(points.isfinite().all()):
        return "SILENT points that are not finite"
    if points.shape == wanted.shape and torch.equal(points, wanted):
        return "equal"
    if ending == ".npz":
        return "SILENT difference in an archive with checksums"
    told = counted(ending, data)
    if told is not None and told != len(points):
        return f"SILENT loss: {len(points)} points of {told} in the header"
    if ending == ".bin" and not any(
        np.array_equal(points.numpy(), np.frombuffer(data, "<f4").reshape(-1, c)[:, :3])
        for c in (4, 5)
        if not len(data) % (4 * c)
    ):
        return "SILENT difference from the numbers in the file"
    return "another cloud"


def counted(ending: str, data: bytes) -> int | None:
    """Points that a header counts, read apart from the package."""
    if ending in (".las", ".laz") and len(data) > 255:
        old, new = struct.unpack_from("<I", data, 107)[0], struct.unpack_from("<Q", data, 247)[0]
        return new if data[25] >= 4 else old
    if ending == ".ply" and b"element vertex " in data:
        return int(data.split(b"element vertex ")[1].split()[0])
    if ending == ".npy":
        text = data.split(b"'shape': (")[1].split(b",")[0] if b"'shape': (" in data else b""
        return int(text) if text.strip().isdigit() else None
    return None


def main(count: int, seed: int) -> list[str]:
    """Failures, in words; ``python -m tests.fuzz clouds --count N --seed S``."""
    return files.failures_of("clouds", count, seed, make)
