"""The scenes that are convolved, as data: real scans and volumes where they are present, shapes made by rule anywhere.

A case is a name. ``shell_256`` is a sphere's surface in a 256^3 cube, ``uniform_5_64`` 5 % of a 64^3 cube filled at
random, ``plane_512`` one flat layer, ``rings_64_1024`` a spinning 64-beam scanner between walls; every other name is a
scan or a volume (`SCANS`, `VOLUMES`), read from a file or from a package that carries it.
"""

from __future__ import annotations

import base64
import functools
import math
import os
import re
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

#: scans (N, 3) in .npz files beside a checkout
SCANS = (
    "lidar_ouster_os1_3sweeps_005",
    "lidar_ouster_os2_010",
    "tls_lonestar_005",
    "indoor_rooms_pcl_002",
    "als_ign_lidarhd_100",
    "shape_spot_256",
)
#: volumes that a package on the index carries: name -> package
VOLUMES = {"brain_mni152_2mm": "nilearn", "frog_tissues": "pyvista"}
#: what they are called, see `title`
TITLES = {
    "lidar_ouster_os1_3sweeps_005": "LiDAR, three sweeps",
    "lidar_ouster_os2_010": "LiDAR, one sweep",
    "tls_lonestar_005": "terrestrial scan",
    "indoor_rooms_pcl_002": "indoor scan",
    "als_ign_lidarhd_100": "aerial scan",
    "shape_spot_256": "mesh surface",
    "brain_mni152_2mm": "brain, 2 mm",
    "frog_tissues": "frog",
}
#: the names of the rules, with an example of each
RULES = {"shell": "shell_64", "uniform": "uniform_10_64", "plane": "plane_256", "rings": "rings_64_1024"}

#: half the vertical field of view of the scanner that ``rings`` imitates (radians), and its walls' half distance (m)
RING_ANGLE, RING_WALL, RING_VOXEL = 0.3, 20.0, 0.05


def folder() -> Path:
    """Where .npz cases lie: SPARSECONV_BENCH_DATA, else ``shared/data`` beside the checkout."""
    given = os.environ.get("SPARSECONV_BENCH_DATA")
    return Path(given) if given else Path(__file__).resolve().parents[3] / "shared" / "data"


def title(name: str) -> str:
    """What a case is called in tables and pictures.

    >>> title("uniform_10_64"), title("rings_64_1024"), title("shell_256"), title("frog_tissues")
    ('10 % of 64³', '64 rings of 1024', 'shell 256³', 'frog')
    """
    rule, *numbers = name.split("_")
    if rule not in RULES or not all(n.isdecimal() for n in numbers):
        return TITLES.get(name, name)
    words = {"shell": "shell {0}³", "uniform": "{0} % of {1}³", "plane": "plane {0}²", "rings": "{0} rings of {1}"}
    return words[rule].format(*numbers)


def missing(name: str) -> str | None:
    """Why a case cannot be made here, or None.

    >>> missing("shell_32") is None, missing("cube_7")
    (True, "no case 'cube_7': see sparseconv/bench/cases.py for the names")
    """
    if name in SCANS or name in VOLUMES:
        if (folder() / f"{name}.npz").exists():
            return None
        if name in SCANS:
            return f"{name}.npz is not in the data folder (SPARSECONV_BENCH_DATA)"
        package = VOLUMES[name]
        return None if find_spec(package) else f"{package}, which carries this volume, is not installed"
    rule, *numbers = name.split("_")
    fits = rule in RULES and len(numbers) == RULES[rule].count("_") and all(n.isdecimal() for n in numbers)
    return None if fits else f"no case {name!r}: see sparseconv/bench/cases.py for the names"


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
    if name in SCANS or name in VOLUMES:
        file = folder() / f"{name}.npz"
        found = np.load(file)["coords"] if file.exists() else np.argwhere(_volume(name) > 0)
        points = torch.from_numpy(found.astype(np.int32)).to(device)
    else:
        rule, *numbers = name.split("_")
        rules: dict[str, Callable[..., torch.Tensor]]
        rules = {"shell": shell, "uniform": uniform, "plane": plane, "rings": rings}
        points = rules[rule](*(int(n) for n in numbers), device=device)
    return torch.nn.functional.pad(points.int(), (1, 0)).contiguous()


def shell(res: int, device: str = "cpu") -> torch.Tensor:
    """Voxels of a res^3 cube whose centre lies between res/2 - 1.25 and res/2 from the cube's centre.

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
    """One layer of res x res voxels: nine neighbours for nearly every voxel.

    >>> plane(4).shape, int(plane(4)[:, 2].max())
    (torch.Size([16, 3]), 0)
    """
    flat = torch.ones(res, res, 1, device=device)
    return torch.nonzero(flat)


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
    return (voxels - voxels.amin(0)).to(device)  # as several peers want no negative coordinate


def _volume(name: str) -> np.ndarray:
    package = VOLUMES[name]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"{package}, which carries {name}, is not installed")
    root = Path(spec.origin).parent
    if name == "frog_tissues":
        return _read_vti(root / "examples" / "frog_tissues.vti")
    import nibabel

    file = root / "datasets" / "data" / "mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
    volume = np.asarray(nibabel.load(file).dataobj)  # type: ignore[attr-defined]
    x, y, z = (n // 2 for n in volume.shape)
    return volume[: 2 * x, : 2 * y, : 2 * z].reshape(x, 2, y, 2, z, 2).max((1, 3, 5))


def _read_vti(file: Path) -> np.ndarray:
    """The one array of bytes in an image file of VTK's XML format, its blocks compressed by zlib and in base64."""
    text = file.read_text(encoding="latin-1")
    head, _, rest = text.partition("<AppendedData")
    if rest:
        payload = rest.partition("_")[2].partition("</AppendedData>")[0].strip()
        root = ElementTree.fromstring(head + "</VTKFile>")
    else:
        root = ElementTree.fromstring(text)
        payload = "".join((root.find(".//DataArray").text or "").split())  # type: ignore[union-attr]
    extent = [int(n) for n in re.split(r"\s+", root.find("ImageData").attrib["WholeExtent"].strip())]  # type: ignore[union-attr]
    word = np.dtype("<u8" if root.attrib.get("header_type") == "UInt64" else "<u4")

    def decoded(start: int, count: int) -> bytes:
        return base64.b64decode(payload[start : start + 4 * -(-count // 3)])[:count]

    blocks = int(np.frombuffer(decoded(0, word.itemsize), word)[0])
    header = (3 + blocks) * word.itemsize
    sizes = np.frombuffer(decoded(0, header), word)[3:]
    packed = decoded(4 * -(-header // 3), int(sizes.sum()))
    ends = np.cumsum(sizes)
    data = b"".join(zlib.decompress(packed[int(e - s) : int(e)]) for s, e in zip(sizes, ends))
    shape = [extent[2 * i + 1] - extent[2 * i] + 1 for i in range(3)]
    return np.frombuffer(data, np.uint8).reshape(shape[::-1]).transpose(2, 1, 0)
