"""Readers of .las, .laz, .pcd and .ply that run apart: a script, which imports nothing of the package.

    foreign.py KIND IN OUT BYTES

reads IN under a limit of BYTES of memory beyond what it takes to start, and writes positions (M, 3) float64 to OUT as
.npy. What is wrong becomes the last line on stderr and exit status 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def _ply(path: str) -> np.ndarray:
    import plyfile

    data = plyfile.PlyData.read(path)
    if "vertex" not in data or not {"x", "y", "z"} <= {p.name for p in data["vertex"].properties}:
        raise ValueError("it has no vertices with x, y and z")
    return np.stack([np.asarray(data["vertex"][axis], np.float64) for axis in "xyz"], 1)


def _pcd(path: str) -> np.ndarray:
    import pypcd4

    cloud = pypcd4.PointCloud.from_path(path)
    if not {"x", "y", "z"} <= set(cloud.fields):
        raise ValueError(f"it has no x, y and z, only {', '.join(cloud.fields)}")
    return np.asarray(cloud.numpy(("x", "y", "z")), np.float64)


def _las(path: str) -> np.ndarray:
    import laspy

    return np.asarray(laspy.read(path).xyz, np.float64)


READERS = {".ply": _ply, ".pcd": _pcd, ".las": _las, ".laz": _las}
PACKAGES = {".ply": "plyfile", ".pcd": "pypcd4", ".las": "laspy", ".laz": "laspy"}


def _bound(memory: int) -> None:
    """Limit the address space to what is used now and ``memory`` more, where the system keeps such a limit."""
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + memory if hard == resource.RLIM_INFINITY else min(hard, used + memory)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError):
        return


def main(kind: str, path: str, out: str, memory: str) -> int:
    """Read one file; 0, or 1 after a line on stderr."""
    __import__(PACKAGES[kind])
    _bound(int(memory))
    try:
        np.save(out, READERS[kind](path))
    except MemoryError:
        sys.stderr.write(f"\nit asks for more than {int(memory):,} bytes of memory\n")
        return 1
    except BaseException as error:
        said = (str(error).strip().splitlines() or [""])[-1]
        sys.stderr.write(f"\n{said or type(error).__name__}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
