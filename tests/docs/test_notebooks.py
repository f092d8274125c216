"""Notebooks run from top to bottom, and what is kept of them is what their texts say."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
PAIRS = sorted(FOLDER.glob("[0-9]*.ipynb"))
#: those that take longest
LONG = {
    "2_projections_and_maps",
    "5_pointwise",
    "6_brain_unet",
    "8_two_processes",
    "9_captured_training",
    "10_deploying",
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in LONG else ()) for path in PAIRS],
)
def test_a_notebook_runs(path, monkeypatch):
    pytest.importorskip("ipykernel")
    pytest.importorskip("k3d")
    run = pytest.importorskip("nbmake.nb_run")
    # of a kernel on a busy machine; 60 s are too few
    monkeypatch.setattr(pytest.importorskip("nbclient").NotebookClient.startup_timeout, "default_value", 500)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # others run beside it
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a reader has no interpreter
    result = run.NotebookRun(path, default_timeout=500, kernel="python3").execute()
    assert result.error is None, result.error


def test_each_text_has_its_notebook():
    assert [p.stem for p in PAIRS] == sorted(p.stem for p in FOLDER.glob("[0-9]*.py"))
    assert len(PAIRS) == 10


@pytest.mark.parametrize("path", PAIRS, ids=lambda p: p.stem)
def test_what_is_kept_is_what_the_text_says(path):
    jupytext = pytest.importorskip("jupytext")
    kept, text = jupytext.read(path), jupytext.read(path.with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in kept.cells] == [(c.cell_type, c.source) for c in text.cells]
    outputs = [o for c in kept.cells for o in c.get("outputs", [])]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert not any(o.get("name") == "stderr" or o.output_type == "error" for o in outputs)
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("path", PAIRS, ids=lambda p: p.stem)
def test_no_cell_is_long(path):
    text = path.with_suffix(".py").read_text()
    ast.parse(text)
    assert max(cell.count("\n") for cell in text.split("# %%")) < 55
    assert [line for line in text.splitlines() if len(line) > 96 and not line.startswith("# ")] == []  # a page's width


@pytest.mark.parametrize("path", PAIRS, ids=lambda p: p.stem)
def test_colours_are_those_of_the_palette(path):
    text = path.with_suffix(".py").read_text()
    assert re.findall(r"[\"']#[0-9a-fA-F]{6}", text) == []
    maps = set(re.findall(r"cmap[(\"=: ]+\"(\w+)\"", text))
    assert maps <= {"gray", "Blues"}  # of a scan, and of one quantity from zero on


@pytest.mark.parametrize("path", PAIRS, ids=lambda p: p.stem)
def test_outputs_say_nothing_of_the_machine_they_ran_on(path):
    jupytext = pytest.importorskip("jupytext")
    said = [str(output) for cell in jupytext.read(path).cells for output in cell.get("outputs", [])]
    found = [re.search(r"(/(?:home|root|tmp|work|Users)/|Traceback|Warning: )", text) for text in said]
    assert [match[0] for match in found if match] == []


@pytest.mark.parametrize("path", PAIRS, ids=lambda p: p.stem)
def test_axes_of_curves_are_named(path):
    for cell in path.with_suffix(".py").read_text().split("# %%"):
        if re.search(r"axes\.(plot|bar|barh)\(", cell) and "draw_cells" not in cell:
            assert "set_xlabel(" in cell
            assert "set_ylabel(" in cell or "barh(" in cell
