"""Every python block of every page runs: the blocks of a page in order, as one program, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: a reader's environment has no interpreter of Triton, which the tests may have
READER = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Where pages keep compiled kernels: the first that needs one compiles it for all."""
    return tmp_path_factory.mktemp("cache")


def run(page: Path, tmp_path: Path, cache: Path) -> str:
    """What a page prints. From a file, since Triton reads the source of its functions; where a page says torchrun, in
    two processes."""
    text = page.read_text()
    program = tmp_path / f"{page.stem}_page.py"
    program.write_text("\n".join(BLOCK.findall(text)))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if "torchrun" in text else []
    done = subprocess.run(
        [sys.executable, *launcher, program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=READER | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SPARSECONV_CACHE_DIR": str(cache)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=name)
def test_a_page_runs(page, tmp_path, cache):
    printed = run(page, tmp_path, cache)
    if page.name == "how-it-works.md":  # it shows all that it prints
        assert printed == "".join(SHOWN.findall(page.read_text()))


def test_no_block_of_python_is_left_out():
    """Blocks are found by their fence, so a fence that is indented or spelled otherwise would not be run."""
    for page in PAGES:
        fences = re.findall(r"^\s*[`~]{3,}\s*\{?\.?(?:py|python3?)\b", page.read_text(), re.MULTILINE)
        assert len(fences) == len(BLOCK.findall(page.read_text())), page


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL))
    missing = [link for link in links if "://" not in link and not (page.parent / link.partition("#")[0]).exists()]
    assert missing == []
