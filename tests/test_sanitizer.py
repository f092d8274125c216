"""No kernel reads or writes past an array: the small run of `tests.sanitized` under NVIDIA's memory checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest


@pytest.mark.gpu
def test_kernels_stay_inside_their_arrays():
    checker = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if checker is None:
        pytest.skip("compute-sanitizer, which comes with CUDA's toolkit, is not installed")
    told = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SPARSECONV_AUTOTUNE": "0"}
    ran = subprocess.run(
        [checker, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "tests.sanitized", "cuda"],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
    )
    if "Device not supported" in ran.stdout + ran.stderr:
        pytest.skip("compute-sanitizer does not know this device")
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "all kernels ran" in ran.stdout
    assert "ERROR SUMMARY: 0 errors" in ran.stdout
