"""The scenes that are convolved, as data: shapes made by rule anywhere, a real volume, and files of yours.

A case is a name. ``shell_256`` is a sphere's surface in a 256^3 cube, ``uniform_5_64`` 5 % of a 64^3 cube filled at
random, ``plane_512`` one flat layer, ``rings_64_1024`` a spinning 64-beam scanner between walls. ``brain_mni152_2mm``
is the volume that nilearn carries. Every other name is ``NAME.npz``, with ``coords`` (N, 3) of whole numbers, in the
folder that the environment variable SPARSECONV_BENCH_DATA names.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

#: a volume that nilearn carries, halved to 2 mm
BRAIN = "brain_mni152_2mm"
#: the names of the rules, with an example of each
EXAMPLES = {"shell": "shell_64", "uniform": "uniform_10_64", "plane": "plane_256", "rings": "rings_64_1024"}
#: half the vertical field of view of the scanner that ``rings`` imitates (radians), and its walls' half distance (m)
RING_ANGLE, RING_WALL, RING_VOXEL = 0.3, 20.0, 0.05


def numbers(name: str) -> tuple[str, list[int]] | None:
    """The rule of a case and its numbers; None for a name that no rule has.

    >>> numbers("uniform_5_64"), numbers("uniform_5")
    (('uniform', [5, 64]), None)
    """
    rule, *words = name.split("_")
    fits = rule in EXAMPLES and len(words) == EXAMPLES[rule].count("_") and all(word.isdecimal() for word in words)
    return (rule, [int(word) for word in words]) if fits else None


def missing(name: str) -> str | None:
    """Why a case cannot be made here, or None."""
    if numbers(name) is not None or _file(name) is not None:
        return None
    if name == BRAIN:
        return None if find_spec("nilearn") else "nilearn, which carries this volume, is not installed"
    rules = ", ".join(EXAMPLES.values())
    return f"no case {name!r}: neither a rule ({rules}) nor a file {name}.npz in the folder SPARSECONV_BENCH_DATA"


@functools.lru_cache(maxsize=2)
def coordinates(name: str, device: str = "cpu", shuffled: bool = False) -> torch.Tensor:
    """(N, 4) int32 on ``device``, batch first; in lexicographic order, or with its rows shuffled by a fixed seed.

    Raises ValueError with the reason where the case cannot be made.
    """
    reason = missing(name)
    if reason is not None:
        raise ValueError(reason)
    if shuffled:
        coords = coordinates(name, device)
        order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(0))
        return coords[order.to(device)].contiguous()
    made, file = numbers(name), _file(name)
    if made is not None:
        points = RULES[made[0]](*made[1], device=device)
    else:
        found = np.load(file)["coords"] if file is not None else np.argwhere(_brain() > 0)
        points = torch.from_numpy(found.astype(np.int32)).to(device)
    return torch.nn.functional.pad(points.int(), (1, 0)).contiguous()


def shell(res: int, device: str = "cpu") -> torch.Tensor:
    """Voxels of a res^3 cube whose center lies between res/2 - 1.25 and res/2 from the cube's center.

    >>> len(shell(64))
    15192
    """
    axis = torch.arange(res, device=device).float() - res / 2 + 0.5
    parts = []
    for start in range(0, res, 16):
        x = axis[start : start + 16]
        d = (x[:, None, None] ** 2 + axis[None, :, None] ** 2 + axis[None, None, :] ** 2).sqrt()
        part = torch.nonzero((d <= res / 2) & (d >= res / 2 - 1.25)).int()
        part[:, 0] += start
        parts.append(part)
    return torch.cat(parts)


def uniform(percent: int, res: int, device: str = "cpu") -> torch.Tensor:
    """``percent`` of the voxels of a res^3 cube, drawn at random by a fixed seed; 100 is a dense cube."""
    chosen = torch.rand(res, res, res, generator=torch.Generator().manual_seed(res)) < percent / 100
    return torch.nonzero(chosen).to(device)


def plane(res: int, device: str = "cpu") -> torch.Tensor:
    """One layer of res x res voxels: nine neighbors for nearly every voxel.

    >>> plane(4).shape, int(plane(4)[:, 2].max())
    (torch.Size([16, 3]), 0)
    """
    return torch.nonzero(torch.ones(res, res, 1, device=device))


def rings(beams: int, steps: int, device: str = "cpu") -> torch.Tensor:
    """A spinning scanner 1.8 m above ground between four walls: ``beams`` rings of ``steps`` points, in 5 cm voxels."""
    elevation = torch.linspace(-RING_ANGLE, RING_ANGLE / 4, beams, dtype=torch.float64)
    azimuth = torch.arange(steps, dtype=torch.float64) * (2 * math.pi / steps)
    ray = torch.stack(
        [
            (elevation.cos()[:, None] * azimuth.cos()).flatten(),
            (elevation.cos()[:, None] * azimuth.sin()).flatten(),
            elevation.sin()[:, None].expand(beams, steps).flatten(),
        ],
        1,
    )
    to_wall = RING_WALL / ray[:, :2].abs().amax(1)
    to_ground = torch.where(ray[:, 2] < 0, -1.8 / ray[:, 2].clamp(max=-1e-9), torch.inf)
    points = ray * torch.minimum(to_wall, to_ground)[:, None]
    voxels = torch.unique((points / RING_VOXEL).floor().int(), dim=0)
    return (voxels - voxels.amin(0)).to(device)  # as several libraries want no negative coordinate


RULES: dict[str, Callable[..., torch.Tensor]] = {"shell": shell, "uniform": uniform, "plane": plane, "rings": rings}


def _file(name: str) -> Path | None:
    folder = os.environ.get("SPARSECONV_BENCH_DATA")
    file = Path(folder or ".") / f"{name}.npz"
    return file if folder and file.is_file() else None


def _brain() -> np.ndarray:
    """The template at 1 mm, each 2 x 2 x 2 voxels as their brightest."""
    from sparseconv.demo.volume import template

    volume, _ = template("t1")
    x, y, z = (n // 2 for n in volume.shape)
    return volume[: 2 * x, : 2 * y, : 2 * z].reshape(x, 2, y, 2, z, 2).max((1, 3, 5))
