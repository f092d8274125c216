"""The site builds without a warning, and asks nobody for anything when it is read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import sparseconv

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


@pytest.mark.parametrize("module", ["", *sparseconv.MODULES, "plan"])
def test_public_names_are_in_the_reference(site, module):
    """Each has a heading and words of its own: mkdocstrings leaves out what it finds no docstring of."""
    found = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    headings = set(re.findall(r'<h\d id="([\w.]+)" class="doc', found))
    names = {heading.rpartition(".")[2] for heading in headings}
    room = import_module(f"sparseconv.{module}".rstrip("."))
    assert [name for name in room.__all__ if name not in names] == []


@pytest.mark.parametrize("library", ["spconv.pytorch", "minkowski", "torchsparse", "torchsparse.nn", "fvdb"])
def test_names_of_other_libraries_are_found(site, library):
    """By the site's search, whose index holds whole words."""
    pages = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    words = set(re.findall(r"\w+", " ".join(f"{page['title']} {page['text']}" for page in pages)))
    names = import_module(f"sparseconv.interop.{library}").__all__
    assert [name for name in names if name not in words] == []


def test_examples_in_docstrings_are_code(site):
    for page in (site / "api").glob("*.html"):
        assert "<blockquote>" not in page.read_text(), page
