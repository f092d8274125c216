"""The site builds without a warning, and asks nobody for anything when it is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        sources = re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=[\"']?([^\"'> ]+)", page.read_text())
        assert [s for s in sources if s.startswith(("http:", "https:", "//"))] == [], page


def test_public_names_are_in_the_reference(site):
    import sparseconv

    found = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert [name for name in sparseconv.__all__ if f">{name}</span>" not in found] == []


def test_examples_in_docstrings_are_code(site):
    for page in (site / "api").glob("*.html"):
        assert "<blockquote>" not in page.read_text(), page
