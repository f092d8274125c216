"""Real volumes that packages on the index carry: a human brain and a frog, with their labels."""

from __future__ import annotations

import base64
import zlib
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np


def package_folder(name: str) -> Path:
    """Where a package lies, without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"this example reads a file of the package {name}: pip install {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def brain() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The MNI152 template at 1 mm, (197, 233, 189) uint8: T1 image, probability of grey and of white matter (0-255)."""
    import nibabel

    folder = package_folder("nilearn") / "datasets" / "data"
    names = [f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz" for kind in ("t1", "gm", "wm")]
    t1, gm, wm = (np.asarray(nibabel.load(folder / name).dataobj) for name in names)
    return t1, gm, wm


def frog() -> np.ndarray:
    """The tissues of a frog, (136, 470, 500) uint8, z first: 0 outside, 1-15 tissues; voxels 1.5 x 1 x 1."""
    return read_vti(package_folder("pyvista") / "examples" / "frog_tissues.vti")


def read_vti(path: Path) -> np.ndarray:
    """The one uint8 array of a VTK image file with zlib blocks in base64, (z, y, x)."""
    image = ElementTree.parse(path).getroot().find("ImageData")
    array = image.find(".//DataArray") if image is not None else None
    if image is None or array is None or array.get("type") != "UInt8":
        raise ValueError(f"{path} is not an image of uint8")
    text = "".join((array.text or "").split())
    blocks = int(np.frombuffer(base64.b64decode(text[:16]), "<u4")[0])
    header = 4 * (3 + blocks)  # number of blocks, their size, the size of the last, compressed sizes
    chars = -(-header // 3) * 4
    sizes = np.frombuffer(base64.b64decode(text[:chars])[:header], "<u4")[3:]
    body, parts, at = base64.b64decode(text[chars:]), [], 0
    for size in sizes:
        parts.append(zlib.decompress(body[at : at + int(size)]))
        at += int(size)
    ends = [int(v) for v in (image.get("WholeExtent") or "").split()]
    shape = [ends[i + 1] - ends[i] + 1 for i in (4, 2, 0)]
    return np.frombuffer(b"".join(parts), np.uint8).reshape(shape)


def pooled(volume: np.ndarray, size: int) -> np.ndarray:
    """(..., size^3) blocks of a volume, cut to a multiple of the size."""
    cut = volume[tuple(slice(0, n - n % size) for n in volume.shape)]
    a, b, c = (n // size for n in cut.shape)
    return cut.reshape(a, size, b, size, c, size).transpose(0, 2, 4, 1, 3, 5).reshape(a, b, c, size**3)
