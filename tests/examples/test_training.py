"""Each recipe learns, and an interrupted run goes on to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest
import torch

from tests.examples.conftest import FOLDER

TINY = {"beams": 8, "around": 60}
#: recipe: packages that it needs, the stand-in's size, the size of the training
SIZES = {
    "semantic_kitti": (
        (),
        {"train": 4, "valid": 1, **TINY},
        {"batch": 2, "variant": "14", "width": 4, "voxel_size": 1.0},
    ),
    "nuscenes_lidarseg": (
        (),
        {"train": 4, "valid": 1, **TINY},
        {"batch": 2, "variant": "14", "width": 4, "voxel_size": 1.0},
    ),
    "scannet": (
        ("plyfile",),
        {"train": 4, "valid": 1, "step": 0.5},
        {"batch": 2, "variant": "14", "width": 4, "voxel_size": 0.5},
    ),
    "modelnet40": ((), {"train": 2, "test": 1}, {"batch": 8, "width": 4, "points": 200, "resolution": 20}),
    "kitti_boxes": ((), {"train": 2, "val": 1, "beams": 8, "around": 200}, {"batch": 1}),
    "completion": ((), {"train": 2, "test": 1}, {"batch": 8, "channels": (4, 8, 8), "resolution": 12, "points": 300}),
    "molecules": ((), {"train": 20, "test": 10}, {"batch": 5}),
    "pore_flow": (("scipy",), {"train": 8, "test": 1, "size": 16, "steps": 40}, {"batch": 2, "width": 8}),
    "occupancy_coder": (
        ("constriction",),
        {"train": 4, "valid": 1, **TINY},
        {"batch": 2, "width": 8, "voxel_size": 1.0},
    ),
}
QUICK = ("semantic_kitti", "molecules", "pore_flow")


def prepared(name, folder):
    """The recipe's `train` on a tiny stand-in, but for its output."""
    packages, data, size = SIZES[name]
    for package in packages:
        pytest.importorskip(package)
    recipe = import_module(name)
    folder.mkdir(exist_ok=True)
    recipe.stand_in_set.write(folder, **data)
    if name == "kitti_boxes":
        size = {**size, "space": recipe.Space((0, -12.8, -3), (32, 12.8, 1), (0.4, 0.4, 0.1))}

    def train(output, epochs=2):
        found = recipe.train(folder, output, epochs, **size)
        return found[0] if isinstance(found, tuple) else found

    return train


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SIZES])
def test_training_lowers_the_loss_and_resumes_to_the_same_bits(name, tmp_path, monkeypatch):
    from training import Run

    train = prepared(name, tmp_path / "data")
    whole = train(tmp_path / "whole")
    assert len(whole.history) == 2
    half = len(whole.losses) // 2
    assert sum(whole.losses[half:]) < sum(whole.losses[:half])

    step, taken = Run.step, []

    def interrupted(run, loss):
        if len(taken) == half + 1:  # within the second epoch
            raise KeyboardInterrupt
        taken.append(step(run, loss))

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut")
    torch.rand(7)  # whatever happens between
    again = train(tmp_path / "cut")
    assert again.losses == whole.losses
    assert [{**epoch, "cpu_seconds": 0} for epoch in again.history] == [
        {**epoch, "cpu_seconds": 0} for epoch in whole.history
    ]
    for (key, a), b in zip(whole.net.state_dict().items(), again.net.state_dict().values()):
        assert torch.equal(a, b), key
    moments = [[s for state in run.optimizer.state.values() for s in state.values()] for run in (whole, again)]
    assert all(torch.equal(a, b) for a, b in zip(*moments))
    assert train(tmp_path / "cut").history == again.history  # nothing is left to do
    with pytest.raises(ValueError, match="of a run of 2 epochs, whose schedule ends there; got 3"):
        train(tmp_path / "cut", 3)


def test_a_run_is_drawn_and_summed_up(tmp_path):
    train = prepared("molecules", tmp_path / "data")
    run = train(tmp_path / "out", 1)
    pytest.importorskip("matplotlib")
    found = run.summary("force_error", 3.0)
    assert json.loads((tmp_path / "out" / "molecules.json").read_text()) == found
    assert 5_000 < (tmp_path / "out" / "molecules.png").stat().st_size < 60_000
    assert found["chance"] == 3.0
    assert found["last"] == pytest.approx(run.history[-1]["force_error"], abs=1e-4)


@pytest.mark.slow
def test_workers_make_the_same_voxels_again(tmp_path):
    """Chance in the workers is seeded by the loader, from the state that a checkpoint holds."""
    import semantic_kitti

    train = prepared("semantic_kitti", tmp_path / "data")
    assert train(tmp_path / "none").losses != []
    size = SIZES["semantic_kitti"][2]
    runs = [partial(semantic_kitti.train, tmp_path / "data", tmp_path / name, workers=1, **size) for name in "ab"]
    runs[0](1)
    state = torch.load(tmp_path / "a" / "semantic_kitti.pt", weights_only=True)
    assert runs[1](1).losses == state["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_lightning_continues(tmp_path, monkeypatch, workers):
    pytest.importorskip("lightning")
    import semantic_kitti_lightning as recipe
    from stand_ins import semantic_kitti as stand_in

    stand_in.write(tmp_path / "data", **SIZES["semantic_kitti"][1])
    size = {**SIZES["semantic_kitti"][2], "workers": workers}

    class Stop(Exception):
        pass

    whole = recipe.train(tmp_path / "data", tmp_path / "whole", 2, **size)
    start = recipe.Segmenter.on_train_epoch_start

    def stop(model):
        if model.current_epoch == 1:
            raise Stop
        start(model)

    with monkeypatch.context() as patched:
        patched.setattr(recipe.Segmenter, "on_train_epoch_start", stop)
        with pytest.raises(Stop):
            recipe.train(tmp_path / "data", tmp_path / "cut", 2, **size)
    again = recipe.train(tmp_path / "data", tmp_path / "cut", 2, **size)
    assert again.current_epoch == whole.current_epoch == 2
    for a, b in zip(whole.model.state_dict().values(), again.model.state_dict().values()):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_command_lines_say_what_they_need(name):
    for package in SIZES[name][0]:
        pytest.importorskip(package)
    paths = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--stand-in" in done.stderr


KEPT = [name for name in SIZES if (FOLDER / "results" / f"{name}.json").exists()]


def test_what_the_table_shows_is_kept():
    text = (FOLDER / "README.md").read_text()
    assert len(KEPT) >= 7
    for name in SIZES:
        assert f"]({name}.py)" in text
        assert (f"(results/{name}.png)" in text) == (name in KEPT)


@pytest.mark.parametrize("name", KEPT)
def test_kept_results_learnt(name):
    """Of `python examples/NAME.py --stand-in`: the score left guessing far behind."""
    folder = FOLDER / "results"
    found = json.loads((folder / f"{name}.json").read_text())
    chance, last = found["chance"], found["last"]
    if name in ("molecules", "occupancy_coder"):  # errors and bits: less is better
        assert last < 0.8 * chance
    else:
        assert last > max(1.25 * chance, 0.3)
    assert (folder / f"{name}.png").stat().st_size < 60_000
