"""What docs/extending.md adds to the package: its diffs, applied to a copy, do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.forked import printed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
if not PAGE.exists() or shutil.which("git") is None:
    pytest.skip("needs the documents, and git to apply a diff", allow_module_level=True)
TEXT = PAGE.read_text()
BACKEND, BOUNDARY, COUNTER = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
ADDED = {"sparseconv/backends/edge_by_edge.py": re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]}

BEHAVES = {
    "a backend": """
import torch, sparseconv as sc
grid = sc.VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1]]))
x, w = torch.randn(3, 4), torch.randn(9, 4, 5)
y = sc.ConvolutionPlan(grid, 3, backend="edge_by_edge").execute(x, w)
torch.testing.assert_close(y, sc.ConvolutionPlan(grid, 3, backend="numpy_gather_scatter").execute(x, w))
assert "edge_by_edge" in str(sc.ConvolutionPlan(grid, 3).explain(x, w))
""",
    "a boundary policy": """
import torch, sparseconv as sc
from sparseconv.geometry import Boundary
index, real = Boundary("nearest").resolve(torch.tensor([-2, 0, 3, 9]), 4)
assert (index.tolist(), real.all()) == ([0, 0, 3, 3], True)
for kind, said in (("nearest", "dense arrays"), ("farthest", "'negative', 'nearest'; got 'farthest'")):
    try:
        sc.ConvolutionPlan(sc.VoxelGrid(torch.tensor([[0, 0, 0]])), 3, boundary=Boundary(kind))
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(kind)
""",
    "a counter of a map's stage": """
import torch
from sparseconv.geometry.gpu.wgrad_splits import cut_jobs_on_device
jobs = cut_jobs_on_device(torch.tensor([0, 1, 4, 5]), 4, 2)  # taps of 1, 3 and 1 pairs, in jobs of 2 pairs at most
assert ((jobs.end - jobs.begin).tolist(), jobs.longest) == ([1, 2, 1, 1], 2)
""",
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all three additions."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "sparseconv", folder / "sparseconv", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in ADDED.items():
        (folder / path).write_text(text)
    for diff in (BACKEND, BOUNDARY, COUNTER):
        command = ["git", "apply", "--whitespace=error", "-"]
        subprocess.run(command, cwd=folder, input=diff, text=True, check=True, env=os.environ | {"GIT_DIR": "none"})
    return folder


def test_the_additions_behave_as_the_page_says(extended: Path) -> None:
    program = "import sparseconv\n" + "\n".join(BEHAVES.values()) + "\nprint(sparseconv.__file__)"
    here = os.environ | {"PYTHONPATH": str(extended), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    assert printed("-c", program, folder=extended, env=here).split() == [str(extended / "sparseconv" / "__init__.py")]


def test_the_package_does_not_do_it_already() -> None:
    here = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = f"""
for name, code in {BEHAVES!r}.items():
    try:
        exec(code, {{}})
    except Exception:
        continue
    raise SystemExit(f"the package has {{name}} without the diff")
"""
    printed("-c", program, folder=ROOT, env=here)


def test_a_backend_is_one_file_and_one_line() -> None:
    changed = [line for line in BACKEND.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert len(changed) == len(ADDED) == 1
