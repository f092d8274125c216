"""Point clouds from files: positions, read by a well-kept reader of each format."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

#: names under which an .npz keeps its points, in the order in which they are looked for
KEYS = ("points", "xyz", "positions", "coords")


def read_cloud(path: str | Path) -> torch.Tensor:
    """Positions (M, 3) float64 of the points in a .npy, .npz, .ply, .pcd, .las or .laz file.

    Arrays are (M, 3) or wider, of which the first three columns are taken; an .npz holds one array, or one called
    points, xyz, positions or coords.

    Raises:
        ValueError: no such file, an unknown ending, a file that its reader refuses, an array of another shape, no
            points, or points that are not finite. ImportError: the format's reader is not installed.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path.name!r} does not end in one of {', '.join(READERS)}: convert the cloud to one of them")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        points = reader(path)
    except ImportError:
        raise
    except Exception as error:  # each reader has its own kinds of error for a broken file
        raise ValueError(f"{path} could not be read as {path.suffix}: {error}") from error
    return _checked(points, path)


def default_voxel_size(points: torch.Tensor) -> float:
    """1, 2 or 5 times a power of ten, near 1/250 of the widest axis that holds 98% of the points.

    >>> default_voxel_size(torch.tensor([[0.0, 0.0, 0.0], [60.0, 10.0, 2.0]]))
    0.2
    """
    ordered = points.sort(0).values
    margin = len(points) // 100
    width = float((ordered[len(points) - 1 - margin] - ordered[margin]).max())
    if width <= 0:
        return 1.0
    wanted = width / 250
    power = 10.0 ** np.floor(np.log10(wanted))
    steps = np.array([1.0, 2.0, 5.0, 10.0])
    return float(f"{steps[np.abs(np.log(steps * power / wanted)).argmin()] * power:.6g}")


def _checked(points: np.ndarray, path: Path) -> torch.Tensor:
    if points.dtype.kind not in "fiu":
        raise ValueError(f"{path} holds {points.dtype}: positions are numbers")
    if points.ndim != 2 or points.shape[1] < 3:
        turned = points.ndim == 2 and points.shape[0] == 3
        hint = ": transpose it" if turned else ": one row a point, its x, y and z first"
        raise ValueError(f"{path} holds an array of shape {points.shape}, not (M, 3){hint}")
    if not len(points):
        raise ValueError(f"{path} holds no points")
    points = points[:, :3].astype(np.float64)
    broken = int((~np.isfinite(points)).any(1).sum())
    if broken:
        raise ValueError(
            f"{broken:,} of the {len(points):,} points in {path} are NaN or infinite: drop them, for instance "
            "points[numpy.isfinite(points).all(1)], and save the cloud again"
        )
    return torch.from_numpy(np.ascontiguousarray(points))


def _package(name: str, what: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"{what} files are read with {name}: pip install 'sparseconv[demo]'") from None


def _npy(path: Path) -> np.ndarray:
    return np.load(path, allow_pickle=False)


def _npz(path: Path) -> np.ndarray:
    with np.load(path, allow_pickle=False) as archive:
        names = list(archive)
        found = next((name for name in KEYS if name in names), names[0] if len(names) == 1 else None)
        if found is None:
            raise ValueError(f"it holds {', '.join(names) or 'nothing'}; call the positions {' or '.join(KEYS)}")
        return archive[found]


def _ply(path: Path) -> np.ndarray:
    data = _package("plyfile", ".ply").PlyData.read(str(path))
    if "vertex" not in data or not {"x", "y", "z"} <= {p.name for p in data["vertex"].properties}:
        raise ValueError("it has no vertices with x, y and z")
    return np.stack([np.asarray(data["vertex"][axis], np.float64) for axis in "xyz"], 1)


def _pcd(path: Path) -> np.ndarray:
    cloud = _package("pypcd4", ".pcd").PointCloud.from_path(str(path))
    if not {"x", "y", "z"} <= set(cloud.fields):
        raise ValueError(f"it has no x, y and z, only {', '.join(cloud.fields)}")
    return np.asarray(cloud.numpy(("x", "y", "z")), np.float64)


def _las(path: Path) -> np.ndarray:
    laspy = _package("laspy", path.suffix)
    if path.suffix.lower() == ".laz" and not laspy.LazBackend.detect_available():
        raise ImportError(".laz files need a decompressor: pip install 'sparseconv[demo]'")
    return np.asarray(laspy.read(path).xyz, np.float64)


READERS: dict[str, Callable[[Path], np.ndarray]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".ply": _ply,
    ".pcd": _pcd,
    ".las": _las,
    ".laz": _las,
}
