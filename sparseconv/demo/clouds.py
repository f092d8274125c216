"""Point clouds from files: positions (M, 3), in whatever format, within memory that follows from the file's size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from sparseconv.demo import arrays
from sparseconv.demo.foreign import PACKAGES
from sparseconv.files import most_bytes

#: seconds that such a reader may take, and bytes of a file that it may read in one more
PATIENCE, PACE = 30.0, 1 << 20
#: memory of such a reader that does not grow with its file
FIXED = 256 << 20
#: what a process of `_run_apart` runs: a script, under the import path of the process that started it
START = """import sys
try:
    import resource
    most, hard = int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(hard, most), hard))
except ImportError:  # a system without such limits
    pass
sys.path[:] = sys.argv[2].split("\\n")
del sys.argv[:3]
exec(compile(open(sys.argv[0], "rb").read(), sys.argv[0], "exec"))"""

#: how many times longer than it may compute such a process may take: machines are busy
BUSY = 10


def read_cloud(path: str | Path, *, drop_nonfinite: bool = False, columns: int | None = None) -> torch.Tensor:
    """Positions (M, 3) float64 of the points in a file.

    Arrays (.npy, .npz) and text (.xyz, .txt, .csv) are (M, 3) or wider, of which the first three columns are taken; an
    .npz holds one array, or one called points, xyz, positions or coords; a line of names before the numbers says which
    columns are x, y and z. A .bin is float32 without a header, (M, 4) as KITTI's or (M, 5) as nuScenes'. The readers of
    .ply, .pcd, .las and .laz run in a process of their own, under a limit of memory and time.

    Args:
        path: the file.
        drop_nonfinite: leave out points that are NaN or infinite, which are an error else.
        columns: numbers per point in a .bin, 4 or 5; default: told by the size and by what the last column holds.

    Raises:
        ValueError: no such file, an unknown ending, a file that its reader refuses or that asks for more memory than
            a file of its size may, an array of another shape, a .bin of either width, no points, or points that are
            not finite.
        ImportError: the format's reader is not installed.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in READERS:
        raise ValueError(
            f"{path.name!r} has none of the known suffixes {', '.join(READERS)}: convert the cloud to one of them"
        )
    if columns is not None and (ending != ".bin" or columns not in (4, 5)):
        raise ValueError(
            f"columns is the number of values per point of a .bin file, 4 or 5; got {columns} for {path.name}"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        points = arrays.read_binary(path, columns) if ending == ".bin" else READERS[ending](path)
    except ImportError:
        raise
    except Exception as error:  # each reader has its own kinds of error for a broken file
        why = str(error) or type(error).__name__
        raise ValueError(f"{path} could not be read as {path.suffix}: {why}") from error
    return _checked(points, path, drop_nonfinite)


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


def _checked(points: np.ndarray, path: Path, drop_nonfinite: bool) -> torch.Tensor:
    if points.dtype.kind not in "fiu":
        raise ValueError(f"{path} holds {points.dtype}: positions are numbers")
    few_rows = points.ndim == 2 and 3 <= points.shape[0] <= 8 and points.shape[1] > 2 * points.shape[0]
    if points.ndim != 2 or points.shape[1] < 3 or few_rows:
        turned = few_rows or (points.ndim == 2 and points.shape[0] == 3)
        hint = ": transpose it, points.T" if turned else ": one row per point, its x, y and z first"
        raise ValueError(f"{path} holds an array of shape {points.shape}, not (M, 3){hint}")
    if not len(points):
        raise ValueError(f"{path} holds no points")
    points = points[:, :3].astype(np.float64)
    finite = np.isfinite(points).all(1)
    broken = len(points) - int(finite.sum())
    if broken and not drop_nonfinite:
        raise ValueError(
            f"{broken:,} of the {len(points):,} points in {path} are NaN or infinite: drop them with "
            "drop_nonfinite=True (--drop-nonfinite)"
        )
    if broken == len(points):
        raise ValueError(f"all {broken:,} points in {path} are NaN or infinite")
    return torch.from_numpy(np.ascontiguousarray(points[finite] if broken else points))


def _foreign(path: Path) -> np.ndarray:
    """What `foreign.py` reads in a process of its own, whose memory and time follow from the size of the file."""
    ending, size = path.suffix.lower(), path.stat().st_size
    try:
        package = import_module(PACKAGES[ending])
    except ImportError:
        raise ImportError(f"{ending} files need {PACKAGES[ending]}: pip install 'sparseconv[demo]'") from None
    if ending == ".laz" and not package.LazBackend.detect_available():
        raise ImportError(".laz files need a decompressor: pip install 'sparseconv[demo]'")
    script = Path(__file__).with_name("foreign.py")
    with TemporaryDirectory(prefix="sparseconv_cloud_") as folder:
        out = Path(folder) / "points.npy"
        memory = 2 * most_bytes(size) + FIXED
        _run_apart(script, [ending, str(path), str(out), str(memory)], PATIENCE + size / PACE)
        return np.load(out)


def _run_apart(script: Path, arguments: Sequence[str], seconds: float) -> None:
    """Run a script in a process of its own, which sees this one's import path.

    It is ended after ``seconds`` of computing; it may wait longer for its turn on a busy machine, but not for ever.
    The script bounds its own memory, with ``resource``, before it reads. Raises ValueError with what it wrote to stderr
    last, or with how it ended: a reader that crashes or runs out of memory takes nobody along.
    """
    few = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "2"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", START, str(ceil(seconds)), "\n".join(sys.path), str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **few},
            timeout=BUSY * seconds,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"its reader had not finished after {BUSY * seconds:.0f} s") from None
    if done.returncode:
        if hasattr(signal, "SIGXCPU") and done.returncode == -signal.SIGXCPU:
            raise ValueError(f"its reader had not finished after {ceil(seconds)} s of computing")
        said = done.stderr.decode(errors="replace").strip().splitlines()
        if done.returncode < 0 or not said:
            raise ValueError(f"its reader crashed or ran out of memory (exit status {done.returncode})")
        raise ValueError(said[-1][:300])


READERS: dict[str, Callable[[Path], np.ndarray]] = {
    ".npy": arrays.read_npy,
    ".npz": arrays.read_npz,
    ".bin": arrays.read_binary,
    ".xyz": arrays.read_text,
    ".txt": arrays.read_text,
    ".csv": arrays.read_text,
    ".ply": _foreign,
    ".pcd": _foreign,
    ".las": _foreign,
    ".laz": _foreign,
}
