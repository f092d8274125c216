"""What one process writes with one backend, another reads with another: equal bytes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("constriction") is None, reason="constriction is not installed"
)


def coder(*words: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, "integer_coder.py", *map(str, words)]
    done = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_file_is_read_by_another_backend_with_other_threads(tmp_path: Path):
    coords = torch.randint(0, 24, (400, 3), generator=torch.Generator().manual_seed(0)).unique(dim=0)
    net, points = tmp_path / "net.pt", tmp_path / "points.npy"
    np.save(points, coords.int().numpy())
    coder("train", net, "--steps", 3)
    ways = [("llvm_implicit_gemm", 1), ("numpy_gather_scatter", 2)]
    written = []
    for number, (backend, threads) in enumerate(ways):
        file = tmp_path / f"{number}.bin"
        want = coder("encode", net, points, file, "--backend", backend, "--threads", threads).split()[0]
        written.append(file.read_bytes())
    assert written[0] == written[1]
    for backend, threads in ways[::-1]:
        back = tmp_path / "back.npy"
        found = coder("decode", net, tmp_path / "0.bin", back, "--backend", backend, "--threads", threads).split()[0]
        assert found == want
        assert np.array_equal(np.load(back), np.load(points))
