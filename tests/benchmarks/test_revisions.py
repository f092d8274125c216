"""Two revisions in turns: the same package twice on the CPU, sides that fail, and what is made of figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rich")

import benchmarks
from benchmarks.layers.report import targets
from benchmarks.network import CASES
from benchmarks.revisions.__main__ import Match
from benchmarks.revisions.cells import FIRST, SECOND, Cell, chosen, every, joined, sentence, summary
from benchmarks.revisions.side import Side
from benchmarks.revisions.worker import Network, Worker, on_the_quickest_core
from sparseconv import SparseTensor, VoxelGrid
from sparseconv.bench import cases


def checkout_of(folder, text: str | None = None):
    """A checkout that holds this package, or one of a single file."""
    folder.mkdir()
    if text is None:
        (folder / "sparseconv").symlink_to(benchmarks.ROOT / "sparseconv")
    else:
        (folder / "sparseconv").mkdir()
        (folder / "sparseconv" / "__init__.py").write_text(text)
    return folder


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.revisions", "--device", "cpu", "--repeat", "0.01", *options]
    return subprocess.run(command, cwd=benchmarks.ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_two_copies_of_one_checkout_are_measured_in_turns(tmp_path):
    out = tmp_path / "found.json"
    old = checkout_of(tmp_path / "old")
    done = run("--old", str(old), "--out", str(out), "--cells", "forward:shell_6:1", "step:no_such_case:1")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["machine"]["packages"]["torch"]
    assert found["revisions"]["old"]["sources"] == found["revisions"]["new"]["sources"]
    measured, missing = found["rows"]
    assert "no case" in missing["reason"]
    assert measured["same_bits"] is True
    for side in ("old", "new"):
        assert 3 <= len(measured[side]["rounds"]) <= 12
        assert min(measured[side]["rounds"]) <= measured[side]["median"] <= max(measured[side]["rounds"])
    assert measured["ratios"][0] <= measured["ratios"][1]
    assert "same bits" in done.stdout


@pytest.mark.slow
def test_a_side_that_fails_leaves_its_reason_and_starts_anew(tmp_path):
    side = Side("old", checkout_of(tmp_path / "old", "raise ValueError('not today')"), tmp_path)
    try:
        assert side.ask({"do": "hello"}, time.monotonic() + 60) == {"error": "ValueError: not today"}
        (side.checkout / "sparseconv" / "__init__.py").write_text("print('no answer'); import os; os._exit(3)")
        assert side.ask({"do": "hello"}, time.monotonic() + 60) == {"error": "the process ended"}
    finally:
        side.stop()


@pytest.mark.parametrize("quantity", ["forward", "step", "eager_map"])
def test_a_worker_prepares_a_cell_and_times_it(tmp_path, quantity):
    np.save(tmp_path / "coords.npy", cases.coordinates("shell_6").numpy())
    cell = Cell(quantity, "shell_6", 2)
    order = {**cell._asdict(), "kind": cell.kind, "file": str(tmp_path / "coords.npy"), "dtype": "fp32"}
    order |= {"device": "cpu", "seconds": 0.01}
    worker = Worker()
    said = worker.answer(order | {"do": "prepare"})
    assert "error" not in said
    if quantity != "eager_map":
        assert said["bits"] == Worker().answer(order | {"do": "prepare"})["bits"]
    found = worker.answer(order | {"do": "time"})
    assert 0 < found["p10"] <= found["median"] <= found["p90"]
    assert worker.answer(order | {"do": "first_gradient"})["seconds"] > 0
    assert "no_such" in worker.answer(order | {"do": "prepare", "quantity": "no_such"})["error"]


def test_a_network_answers_the_same_however_many_steps_were_timed_before(monkeypatch):
    order = {"device": "cpu", "dtype": "fp32", "widths": [2, 2, 2]}
    network = Network(order, cases.coordinates("shell_6"))

    class Eager:
        def __init__(self, net, scene):
            self.net = net

        def __call__(self, given):
            return self.net(SparseTensor(VoxelGrid(given[0]), given[1]))

        def check(self):
            pass

    monkeypatch.setattr(network, "capture", Eager)
    _, said = network.call("captured_inference")
    network.network.train()(network.scene())
    assert network.call("captured_inference")[1] == said


def answers(paces, figures):
    """A side's answers, one a turn."""
    found = zip(paces, figures)
    return lambda: dict(zip(("pace", "median"), next(found)))


def test_turns_on_a_loud_host_do_not_count_and_are_made_again(monkeypatch):
    by_side = {
        "old": answers([40, 90, 41, 40, 40], [1.0, 9.0, 1.0, 1.1, 7.0]),
        "new": answers([80, 85, 42, 43, 44], [5.0, 6.0, 1.0, 1.02, 1.01]),
    }
    sides = tuple(SimpleNamespace(name=name, ask=lambda order, end, name=name: by_side[name]()) for name in by_side)
    match = Match(sides, "cuda", math.inf, 3, 0.1)
    monkeypatch.setattr(match, "_both", lambda order: [{}, {}])
    row = match.measure(Cell("eager_map", "shell_8", 4), "nowhere")
    assert row["counted"] == {"old": [0, 2, 3, 4], "new": [2, 3, 4]}
    assert row["old"]["rounds"] == [1.0, 9.0, 1.0, 1.1, 7.0]
    assert (row["old"]["median"], row["new"]["median"]) == (1.05, 1.01)
    assert row["holds"]


def test_a_host_that_is_never_quiet_ends_the_turns(monkeypatch):
    found = {name: {"pace": pace, "median": 1.0} for name, pace in (("old", 40), ("new", 80))}
    sides = tuple(SimpleNamespace(name=name, ask=lambda order, end, name=name: found[name]) for name in found)
    match = Match(sides, "cuda", math.inf, 2, 0.1)
    monkeypatch.setattr(match, "_both", lambda order: [{}, {}])
    row = match.measure(Cell("step", "shell_8", 4), "nowhere")
    assert len(row["new"]["rounds"]) == 8
    assert "counted" not in row
    replayed = match.measure(Cell("captured_step", "shell_8", 4), "nowhere")
    assert len(replayed["new"]["rounds"]) == 2


@pytest.mark.parametrize(("whole", "kept"), [(3, True), (1, False)], ids=["after those asked for", "before"])
def test_turns_that_the_end_cuts_off_leave_those_before(monkeypatch, whole, kept):
    """On a host that is loud for one side."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def ask(name):
        clock[0] += 1.0
        late = clock[0] > 2 * whole + 1
        return {"error": "no time"} if late else {"pace": 40 if name == "old" else 80, "median": 1.0}

    sides = tuple(SimpleNamespace(name=name, ask=lambda order, end, name=name: ask(name)) for name in ("old", "new"))
    match = Match(sides, "cuda", 2 * whole + 1.5, 2, 0.1)
    monkeypatch.setattr(match, "_both", lambda order: [{}, {}])
    row = match.measure(Cell("step", "shell_8", 4), "nowhere")
    if kept:
        assert len(row["old"]["rounds"]) == len(row["new"]["rounds"]) == whole
        assert row["holds"]
    else:
        assert "no time" in row["reason"]


@pytest.mark.parametrize("quantity", [FIRST, SECOND])
def test_processes_are_started_in_turns_with_the_caches_that_they_should_find(quantity):
    starts = []

    def started(name, caches):
        starts.append((name, caches, any(caches.iterdir()) if caches.is_dir() else False))
        caches.mkdir(exist_ok=True)
        (caches / "kernel").touch()
        return {"seconds": 1.0 if name == "old" else 1.01, "pace": 40}

    sides = tuple(
        SimpleNamespace(name=name, first_gradient=lambda order, end, caches, name=name: started(name, caches))
        for name in ("old", "new")
    )
    row = Match(sides, "cuda", math.inf, 3, 0.1).measure(Cell(quantity, "shell_8", 4), "nowhere")
    assert row["holds"]
    assert (row["old"]["rounds"], row["new"]["rounds"]) == ([1.0] * 3, [1.01] * 3)
    names, folders, filled = zip(*starts)
    if quantity == FIRST:
        assert names == ("old", "new", "new", "old", "old", "new")
        assert len(set(folders)) == 6
        assert not any(filled)
    else:  # the first of each fills its caches, and does not count
        assert names == ("old", "new", "old", "new", "new", "old", "old", "new")
        assert len(set(folders)) == 2
        assert filled == (False, False, *(True,) * 6)


@pytest.mark.slow
def test_a_process_that_is_started_finds_bytecode_and_nobody_elses_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    side = Side("old", checkout_of(tmp_path / "old"), tmp_path / "kept")
    np.save(tmp_path / "coords.npy", cases.coordinates("shell_6").numpy())
    order = {"device": "cpu", "dtype": "fp32", "channels": 2, "file": str(tmp_path / "coords.npy")}
    try:
        said = side.first_gradient(order, time.monotonic() + 100, tmp_path / "kernels")
    finally:
        side.stop()
    assert said["seconds"] > 0
    assert said["pace"] > 0
    assert list((tmp_path / "kept" / "bytecode").rglob("convolution.*.pyc"))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are chosen on Linux")
def test_a_turn_leaves_the_process_where_it_may_run():
    allowed = os.sched_getaffinity(0)
    with on_the_quickest_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == allowed


def test_a_folder_without_the_package_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no package"):
        Side("old", tmp_path, tmp_path)


def test_the_cells_are_the_first_table_and_the_networks():
    cells = every()
    for row in targets()["layers"]:
        for quantity in ("forward", "step"):
            assert Cell(quantity, row["case"], row["channels"]) in cells
        for quantity in ("captured_map", "eager_map"):
            assert sum(cell[:2] == (quantity, row["case"]) for cell in cells) == 1
    assert {cell.case for cell in cells if cell.kind == "network"} == set(CASES)
    assert [cell.quantity for cell in cells if cell.kind == "start"] == [FIRST, SECOND]
    assert len(cells) == len(set(cells))
    assert [cell.name for cell in chosen(["tls", "step:shell_8:4"])][-1] == "step:shell_8:4"
    assert {cell.case for cell in chosen(["tls"])} == {"tls_lonestar_005"}


@pytest.mark.parametrize(
    ("quantity", "new", "holds"),
    [("step", 1.03, True), ("step", 1.04, False), ("eager_map", 1.04, True), ("eager_map", 1.05, False)],
)
def test_a_cell_holds_within_its_limit(quantity, new, holds):
    row = {"cell": "x", "quantity": quantity} | joined(Cell(quantity, "shell_8", 4), [1.0, 1.0, 0.9], [new, new, new])
    assert row["holds"] is holds
    assert ("SLOWER" in sentence(row)) is not holds
    assert summary([row]).startswith(f"{int(holds)} of 1")
