"""Reads a .las, .laz, .pcd or .ply in a process of its own: a script, which imports nothing of the package.

    foreign.py KIND IN OUT BYTES

reads IN under a limit of BYTES of memory beyond what it takes to start, and writes positions (M, 3) float64 to OUT as
.npy. What is wrong becomes the last line on stderr and exit status 1.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = {".ply": "plyfile", ".pcd": "pypcd4", ".las": "laspy", ".laz": "laspy"}


def read(kind: str, path: str, package: Any) -> tuple[np.ndarray, int]:
    """Positions (M, 3), and how many of them the header counts."""
    if kind == ".ply":
        data = package.PlyData.read(path)
        if "vertex" not in data or not {"x", "y", "z"} <= {p.name for p in data["vertex"].properties}:
            raise ValueError("it has no vertices with x, y and z")
        return np.stack([np.asarray(data["vertex"][axis], np.float64) for axis in "xyz"], 1), data["vertex"].count
    if kind == ".pcd":
        cloud = package.PointCloud.from_path(path)
        if not {"x", "y", "z"} <= set(cloud.fields):
            raise ValueError(f"it has no x, y and z, only {', '.join(cloud.fields)}")
        return np.asarray(cloud.numpy(("x", "y", "z")), np.float64), cloud.points
    with Path(path).open("rb") as file:
        records = int.from_bytes(file.read(104)[100:], "little")
    if 54 * records > Path(path).stat().st_size:  # laspy would go through them all
        raise ValueError(f"its header announces {records:,} variable length records, more than the file can contain")
    found = package.read(path)
    return np.asarray(found.xyz, np.float64), found.header.point_count


def main(kind: str, path: str, out: str, memory: str) -> int:
    """Read one file; 0, or 1 after a line on stderr."""
    package = import_module(PACKAGES[kind])
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + int(memory)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(hard, limit), hard))
    except (ImportError, OSError):  # a system without such limits
        pass
    try:
        points, count = read(kind, path, package)
        if len(points) != count:
            raise ValueError(f"its header announces {count:,} points; it contains {len(points):,}")
        np.save(out, points)
    except BaseException as error:
        said = (str(error).strip().splitlines() or [""])[-1] or type(error).__name__
        if isinstance(error, MemoryError):
            said = f"it asks for more than {int(memory):,} bytes of memory"
        sys.stderr.write(f"\n{said}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
