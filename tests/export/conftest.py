"""What tests of packages share: the C++ program that runs them, built once."""

import pytest
import torch

from sparseconv import export
from tests.export.running import ROOT, run


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder with `run_package` and the library of operators."""
    folder = tmp_path_factory.mktemp("cpp")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    run("cmake", "-S", ROOT / "examples" / "cpp", "-B", folder, prefix, f"-DSPARSECONV_CPP={export.CPP}")
    run("cmake", "--build", folder, "-j", 2)
    return folder
