"""The examples run, resume to the same bits, and draw their curves; their scores are those of full runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"), [("brain_tissues", "nilearn"), ("cortex_folds", "nilearn"), ("frog_tissues", "pyvista")]
)
def test_an_example_resumes_and_draws(name, package, tmp_path):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    paths = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(FOLDER / "packaged" / f"{name}.py"), "--steps", "4", "--output", str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False, capture_output=True)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["resumed_equals"]
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["autzen_ground", "brain_tissues", "cortex_folds", "frog_tissues"])
def test_kept_results_reach_their_targets(name):
    found = json.loads((FOLDER / "results" / f"{name}.json").read_text())
    assert found["held_out_miou"] >= found["target"]
    assert found["resumed_equals"]
    assert (FOLDER / "results" / f"{name}.png").exists()


def test_the_brain_is_not_tested_on_the_mirror_image_of_what_it_learnt(monkeypatch):
    pytest.importorskip("nilearn")
    monkeypatch.syspath_prepend(str(FOLDER / "packaged"))
    import brain_tissues

    task = brain_tissues.task(8)
    learnt, held_out = ([tile.x.grid.coords[:, 1:] for tile in tiles] for tiles in (task.train, task.held_out))
    middle = torch.cat(learnt)[:, 0].double().mean()
    for slab in (*learnt, *held_out):  # both hemispheres of each
        assert bool((slab[:, 0] < middle).any() and (slab[:, 0] > middle).any())
    rows = [set(torch.cat(slabs)[:, 1].tolist()) for slabs in (learnt, held_out)]
    assert rows[0].isdisjoint(rows[1])  # a mirrored voxel lies in its own slab
