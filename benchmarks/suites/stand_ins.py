"""What each suite needs besides the library's names: its own helpers, and packages or files that are not here."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.clients.standing_in import module, unless_installed
from sparseconv.interop import flex_gemm, fvdb, minkowski, spconv, torchsparse


def _room(_: str) -> Any:
    """In place of a scan from a file: points of a floor and two walls, in metres, with colours."""
    rng = np.random.default_rng(0)
    points = rng.random((30000, 3)) * (4, 3, 2)
    points[:10000, 2] = points[10000:20000, 0] = points[20000:, 1] = 0
    return SimpleNamespace(points=points, colors=rng.random((30000, 3)))


def _gradcheck(*given: Any, check_sparse_nnz: bool = False, **options: Any) -> bool:
    """torch's, without an argument that it once had."""
    return torch.autograd.gradcheck(*given, **options)


def of_minkowski(folder: Path) -> None:
    """Its folder is on the path under its own name, so its modules are also found alone."""
    minkowski.install()
    engine: Any = importlib.import_module("MinkowskiEngine")
    engine.is_cuda_available = lambda: True
    for name in ("Common", "Convolution", "Nonlinearity", "Normalization", "Ops", "Tensor", "TensorField"):
        sys.modules[f"Minkowski{name}"] = engine
    module("tests").__path__ = [str(folder / "tests")]
    module("utils")
    checks = module("utils.gradcheck", folder / "MinkowskiEngine" / "utils" / "gradcheck.py")
    checks._gradcheck = _gradcheck
    module("open3d", io=SimpleNamespace(read_point_cloud=_room))
    Path("1.ply").touch()  # the file that is read by the line above
    sys.path.insert(0, str(folder))
    sys.modules["tests.common"] = importlib.import_module("tests.python.common")  # its former name, in two files


def of_torchsparse(folder: Path) -> None:
    torchsparse.install()


def of_spconv(folder: Path) -> None:
    spconv.install()
    module("spconv.test_utils", folder / "spconv" / "test_utils.py")


def of_spconv_triton(folder: Path) -> None:
    """With spconv's pools; recorded numbers that are missing are made by spconv's CPU wheel, where it can."""
    os.environ["SPCONV_TEST_IMPL"] = "spconv"
    missing = [name for name in ("golden_conv.pt", "golden_pool.pt") if not (folder / "tests" / "data" / name).exists()]
    made = Path("recorded")
    if missing and not made.is_dir():
        made.mkdir()
        command = [sys.executable, "-m", "benchmarks.suites.recorded", str(folder), str(made)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    load = torch.load

    def found(file: Any, **options: Any) -> Any:
        name = file.name if isinstance(file, Path) else ""
        return load(made / name if name in missing else file, **options)

    vars(torch).update(load=found)
    spconv.install()
    spconv.constants.POOL_AS_SPCONV = True


def of_flex_gemm(folder: Path) -> None:
    """Its files compare with its own tables made by torch, which are of its files here, too."""
    flex_gemm.install()
    spconv.install()
    unless_installed("tqdm", tqdm=lambda rows, **_: rows)
    module("flex_gemm.kernels")
    module("flex_gemm.ops.utils", folder / "flex_gemm" / "ops" / "utils.py")
    ours: Any = importlib.import_module("flex_gemm.ops.spconv")
    own = folder / "flex_gemm" / "ops" / "spconv"
    for name, kind in (("submanifold_conv3d", ours.SubMConv3dFunction), ("sparse_conv3d", ours.SparseConv3dFunction)):
        theirs = module(f"flex_gemm.ops.spconv.{name}", own / f"{name}.py")
        slow = vars(getattr(theirs, kind.__name__))
        for step in ("_compute_neighbor_cache_torch", "_get_output_coords_torch"):
            if step in slow:
                setattr(kind, step, slow[step])


def of_fvdb(folder: Path) -> None:
    """Empty classes have the private names that its files import."""
    fvdb.install()
    own: Any = importlib.import_module("fvdb")
    plans: Any = importlib.import_module("fvdb.convolution_plan")
    own.Grid = type("Grid", (), {})
    own._fvdb_cpp = module("fvdb._fvdb_cpp", GatherScatterDefaultTopology=None)
    for name in ("_GatherScatterBackend", "_MatmulBackend", "_PredGatherIGemmBackend", "_GatherScatterConvFn"):
        setattr(plans, name, type(name, (), {}))
    module("fvdb.types", folder / "fvdb" / "types.py")
    module("fvdb.utils").__path__ = [str(folder / "fvdb" / "utils")]
    module("fvdb.utils._data_repo", fetch_data_repo=None)


class Suite(NamedTuple):
    """What is run of a checkout, and what it needs."""

    run: tuple[str, ...]
    needs: Callable[[Path], None]
    options: tuple[str, ...] = ()


SUITES = {
    "minkowski": Suite(("tests/python",), of_minkowski, ("-o", "python_files=*.py")),
    "torchsparse": Suite(("tests/test.py",), of_torchsparse),
    "flex_gemm": Suite(("tests",), of_flex_gemm),
    "spconv": Suite(("test/test_conv.py",), of_spconv),
    "spconv_triton": Suite(("tests",), of_spconv_triton),
    "fvdb": Suite(("tests/unit/test_conv_semantics.py", "tests/unit/test_conv_semantics_integration.py"), of_fvdb),
}
