"""The benchmark frame itself: cases, the judge, clocks, workers, results, claims."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
import typer

import benchmarks
from benchmarks.claims import stated, verify
from benchmarks.layers import machine, measure, report, runner, selection, session
from benchmarks.layers.measure import EVERYONE
from benchmarks.layers.options import begun_in
from benchmarks.layers.scenes import SCANS
from sparseconv.bench import cases, check
from sparseconv.bench import measure as package
from sparseconv.bench.measure import Job
from sparseconv.bench.report import reasons, wide_console, write
from sparseconv.bench.timing import Clock, Samples, Spread
from tests import oracle

TINY = {"device": "cpu", "dtype": "fp32", "seconds": 0.01}


# ---- cases


@pytest.mark.parametrize(
    ("name", "voxels", "pairs"), [("shell_64", 15192, 0.19e6), ("shell_128", 64160, 0.83e6)]
)  # as the first table of the targets states
def test_a_shell_has_the_stated_voxels_and_pairs(name, voxels, pairs):
    coords = cases.coordinates(name)
    assert len(coords) == voxels
    assert check.Neighbours(coords).count_pairs() == pytest.approx(pairs, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("cell", report.targets()["layers"], ids=lambda c: f"{c['case']}-{c['channels']}")
def test_every_cell_of_the_first_table_is_what_it_states(cell):
    if cases.missing(cell["case"]) or cell["case"] == "shell_1024":
        pytest.skip(cases.missing(cell["case"]) or "as much as a card's memory likes")
    coords = cases.coordinates(cell["case"])
    assert len(coords) == pytest.approx(cell["voxels"], rel=0.006)
    assert check.Neighbours(coords).count_pairs() == pytest.approx(cell["pairs_millions"] * 1e6, rel=0.02)


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_is_read_whole(name):
    if cases.missing(name):
        pytest.skip(cases.missing(name))
    stated = {c["case"]: c["voxels"] for c in report.targets()["layers"]}
    coords = cases.coordinates(name)
    assert coords.dtype == torch.int32
    assert not coords[:, 0].any()
    assert len(coords) == stated.get(name, len(coords))


@pytest.mark.parametrize("name", ["shell_16", "uniform_30_12", "plane_9", "rings_8_64"])
def test_rules_make_unique_voxels_and_a_fixed_shuffle(name):
    coords, mixed = cases.coordinates(name), cases.coordinates(name, "cpu", True)
    assert len(torch.unique(coords, dim=0)) == len(coords) > 0
    assert not torch.equal(coords, mixed)
    assert torch.equal(torch.unique(mixed, dim=0), torch.unique(coords, dim=0))
    assert torch.equal(mixed, cases.coordinates(name, "cpu", True))


def test_uniform_occupancy_is_the_asked_share():
    assert len(cases.uniform(100, 8)) == 512
    assert len(cases.uniform(30, 40)) == pytest.approx(0.3 * 40**3, rel=0.03)


@pytest.mark.parametrize("name", ["cube_7", "shell", "shell_a", "shell_3_4", "uniform_5"])
def test_an_unknown_case_says_so(name):
    assert "no case" in cases.missing(name)
    with pytest.raises(ValueError, match="no case"):
        cases.coordinates(name)


# ---- the judge


def exact(seed: int = 0):
    """A small scene with its convolution by the oracle."""
    coords = cases.coordinates("uniform_20_6", "cpu", True)
    x, weight, grad = package.operands(len(coords), 4, "fp64", "cpu")
    edges = oracle.edges(coords.numpy(), coords.numpy(), oracle.window_taps((3, 3, 3)), (1,) * 3, (1,) * 3)
    results = {
        "forward": oracle.convolve(x, weight, edges, len(coords)),
        "input_grad": oracle.input_grad(grad, weight, edges, len(coords)),
        "weight_grad": oracle.weight_grad(x, grad, edges, 27),
    }
    return coords, x, weight, grad, {k: torch.from_numpy(v) for k, v in results.items()}, len(edges)


def test_the_judge_agrees_with_the_oracle():
    coords, x, weight, grad, results, pairs = exact()
    neighbours = check.Neighbours(coords)
    assert neighbours.count_pairs() == pairs
    verdict = check.judge(neighbours, x, weight, grad, results, "fp64")
    assert verdict.fault is None
    assert set(verdict.errors) == set(results)


@pytest.mark.parametrize("quantity", ["forward", "input_grad", "weight_grad"])
@pytest.mark.parametrize("dtype", check.LIMITS)
def test_the_judge_sees_one_lost_pair_in_every_dtype(quantity, dtype):
    coords, x, weight, grad, results, _ = exact()
    neighbours = check.Neighbours(coords)
    out = int((neighbours.rows(check.offsets(3)[13]) >= 0).nonzero()[0])
    if quantity == "weight_grad":
        results[quantity][13] -= torch.outer(x[out], grad[out])
    else:
        results[quantity][out] -= x[out] @ weight[13] if quantity == "forward" else grad[out] @ weight[13].t()
    verdict = check.judge(neighbours, x, weight, grad, results, dtype)
    assert verdict.fault is not None
    assert quantity in verdict.fault


def test_the_judge_refuses_nan():
    coords, x, weight, grad, results, _ = exact()
    results["forward"][:] = math.nan
    assert "forward" in (check.judge(check.Neighbours(coords), x, weight, grad, results, "bf16").fault or "")


# ---- implementations


@pytest.mark.parametrize("name", EVERYONE)
def test_every_implementation_runs_or_says_why_not(name):
    row = measure.run(Job(name, "shell_16", 8, quantities=("forward", "step"), **TINY))
    assert row["status"] in ("measured", "skipped"), row.get("reason")
    if row["status"] == "skipped":
        assert row["reason"]
        assert "forward" not in row
    else:
        assert row["forward"]["median"] > 0
        assert set(row["errors"]) == {"forward", "input_grad", "weight_grad"}


def test_ours_is_measured_in_every_quantity():
    row = measure.run(Job("sparseconv", "shell_16", 8, shuffled=True, **TINY))
    assert row["status"] == "measured", row.get("reason")
    assert row["pairs"] == check.Neighbours(cases.coordinates("shell_16")).count_pairs()
    for quantity in ("map", "forward", "input_grad", "weight_grad", "step"):
        assert row[quantity]["median"] >= 0
    assert row["step"]["p10"] <= row["step"]["median"] <= row["step"]["p90"]
    assert row["details"]["backend"]


def test_a_wrong_result_is_not_timed(monkeypatch):
    kind = EVERYONE["sparseconv"]
    honest = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: honest(self, x) * 1.01)
    row = measure.run(Job("sparseconv", "shell_16", 8, **TINY))
    assert row["status"] == "wrong"
    assert "is wrong" in row["reason"]
    assert not {"forward", "step", "map"} & set(row)


def test_a_peer_that_is_not_there_is_skipped_without_a_process(monkeypatch):
    monkeypatch.setattr(runner.subprocess, "Popen", None)
    if runner.absent("MinkowskiEngine") is None:
        pytest.skip("it is installed here")
    rows = runner.run_all([Job("MinkowskiEngine", "shell_16", 8, **TINY)], lambda row: None)
    assert [row["reason"] for row in rows] == ["MinkowskiEngine is not installed"]


# ---- workers


def falling(*names: str, budget: float | None = None):
    seen = []
    jobs = [Job("sparseconv", name, 8, **TINY) for name in names]
    rows = runner.run_all(jobs, seen.append, None, budget, "tests.benchmarks.falling_worker")
    assert rows == seen
    return [(row["case"], row["status"]) for row in rows], rows


def test_a_crash_costs_one_row():
    found, rows = falling("a", "dies", "b")
    assert found == [("a", "measured"), ("dies", "crashed"), ("b", "measured")]
    assert "code 139: the kernel took the process with it" in rows[1]["reason"]


def test_a_hang_costs_one_row(monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE", 5.0)
    found, rows = falling("hangs", "b")
    assert found == [("hangs", "crashed"), ("b", "measured")]
    assert "longer than 5 s" in rows[0]["reason"]


@pytest.mark.slow
def test_every_way_to_fail_costs_its_own_rows_and_no_other(monkeypatch):
    """Each in a process: one calls abort, one cannot be imported, one is wrong, one raises; the rest is measured."""
    names = ["aborts", "sparseconv", "broken", "wrong", "raises", "MinkowskiEngine"]
    if runner.absent("MinkowskiEngine") is None:
        names.remove("MinkowskiEngine")
    jobs = [Job(name, "shell_16", 4, quantities=("forward",), **TINY) for name in names]
    rows = runner.run_all(jobs, lambda row: None, None, None, "tests.benchmarks.aborting")
    assert [(row["implementation"], row["case"]) for row in rows] == [(job.implementation, job.case) for job in jobs]
    found = {(row["implementation"], row["status"]) for row in rows}
    wanted = {("aborts", "crashed"), ("sparseconv", "measured"), ("broken", "skipped"), ("wrong", "wrong")}
    assert found - {("MinkowskiEngine", "skipped")} == wanted | {("raises", "failed")}
    said = {row["implementation"]: row.get("reason", "") for row in rows}
    assert "ended with code -6" in said["aborts"]
    assert "libcudart.so.11" in said["broken"]
    assert "forward is wrong" in said["wrong"]
    assert said["raises"] == "RuntimeError: no kernel image is available"
    assert all(("forward" in row) == (row["status"] == "measured") for row in rows)
    sentences = reasons(report.joined(rows))
    assert [s for s in sentences if s.startswith("aborts")] != []


# ---- clocks


def test_the_clock_counts_every_repeat():
    calls = []
    spread = Clock().time(lambda: calls.append(0), 0.001)
    assert spread.repeats + 3 == len(calls)
    assert 0 <= spread.p10 <= spread.median <= spread.p90


def test_spread_is_of_the_samples():
    spread = Spread.of(Samples([1.0, 2.0], [7.0, 40.0]) + Samples([3.0], [6.0]))
    assert (spread.median, spread.repeats, spread.pace) == (2.0, 3, 7.0)


# ---- what is asked for, kept and shown


def test_the_first_table_is_asked_for_whole():
    jobs = selection.layer_jobs(selection.first_table(), ["sparseconv"], ["fp16", "bf16"], "cuda", 0.6, True)
    cells = {(c["case"], c["channels"]) for c in report.targets()["layers"]}
    for shuffled in (False, True):
        asked = {(j.case, j.channels) for j in jobs if "step" in j.quantities and j.shuffled == shuffled}
        assert asked == cells
        assert {j.case for j in jobs if "map" in j.quantities and j.shuffled == shuffled} == {c for c, _ in cells}
    assert {(j.case, j.channels) for j in jobs if j.dtype == "bf16"} == cells


def test_targets_are_in_order():
    for row in report.targets()["layers"] + report.targets()["networks"]:
        for name, cell in row.items():
            if isinstance(cell, dict) and "goal" in cell:
                assert cell["goal"] <= cell["must"] <= cell["best_other"], (row["case"], name)


def fake(implementation: str, ms: float, **more):
    row = Job(implementation, "shell_64", 1024, quantities=("forward", "step")).as_dict()
    row |= {"status": "measured", "voxels": 15192, "pairs": 194_000, "forward": {"median": ms, "p10": ms, "p90": ms}}
    return row | more


def test_results_come_back_as_written(tmp_path):
    rows = [report.with_rates(fake("sparseconv", 0.5), {"fp16": 760.0, "fp32": 50.0, "copy": 4.0})]
    write(tmp_path / "a.json", {"cpu": "x"}, rows, ceilings={"copy": 4.0})
    found = report.read(tmp_path / "a.json")
    assert found["machine"] == {"cpu": "x"}
    assert found["ceilings"] == {"copy": 4.0}
    rate = found["rows"][0]["rates"]["forward"]
    assert rate["tflops"] == pytest.approx(2 * 194_000 * 1024**2 / 0.5e-3 / 1e12, rel=1e-3)
    assert 0 < rate["of_matmul"] <= rate["of_bound"] <= 2
    (tmp_path / "b.json").write_text(json.dumps({"version": 0, "rows": []}))
    with pytest.raises(ValueError, match="no results file"):
        report.read(tmp_path / "b.json")


def test_an_unmet_must_is_named_and_a_met_one_is_not():
    assert report.unmet([fake("sparseconv", 0.5)]) == []
    (sentence,) = report.unmet([fake("sparseconv", 1.8)])
    assert "shell_64 C 1024 forward" in sentence
    assert "2.00 times" in sentence
    assert report.unmet([fake("spconv", 9.0), fake("sparseconv", 9.0, shuffled=True)]) == []
    (sentence,) = report.unmet([fake("sparseconv", 0.5, channels=32, captured_map={"median": 0.26})])
    assert "shell_64 C 32 captured_map: 0.26 ms, 2.00 times" in sentence


def test_tables_print(capsys):
    wide_console().print(report.layer_table([fake("sparseconv", 0.5), fake("spconv", 1.0)], "title"))
    assert "0.500" in capsys.readouterr().out


def test_pictures_are_drawn_of_what_a_file_has(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.claims import plots

    rows = [fake(name, ms) for name, ms in (("sparseconv", 0.5), ("spconv", 1.9))]
    write(tmp_path / "card.json", {"card": {"name": "card"}}, rows)
    written = plots.draw([tmp_path / "card.json"], tmp_path / "pictures")
    assert [p.name for p in written] == ["card_relative.png"]
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in written)
    write(tmp_path / "empty.json", {"cpu": "x"}, [])
    assert plots.draw([tmp_path / "empty.json"], tmp_path / "pictures") == []


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_was_stopped_goes_on(monkeypatch, tmp_path, stop):
    file = tmp_path / "a.json"
    jobs = [Job("sparseconv", case, 4, "fp32", device="cpu", quantities=("step",)) for case in ("a", "b")]
    times, said, cold = iter([3.0, 5.0, 4.0, 2.0]), [], []

    def run(several, console, caches, keep, budget):
        for job in several:
            if len(said) == stop and begun is None:
                raise KeyboardInterrupt
            said.append(job.case)
            keep(job.as_dict() | {"status": "measured", "voxels": 9, "pairs": 99, "step": {"median": next(times)}})

    def started(job):
        cold.append(job)
        return measure.with_quantities(job, measure.COLD).as_dict() | {"status": "measured", "cold_s": 1.0}

    monkeypatch.setattr(session, "run", run)
    monkeypatch.setattr(session.runner, "cold_starts", started)
    monkeypatch.setattr(session, "ceilings", lambda clock: {"fp32": float(len(said) + 1), "copy": 1.0})
    for begun in (None, True, True):
        begun = begun_in(file, "cpu") if begun else None
        rows = session.measured(jobs, wide_console(), file, first=jobs[:1], rounds=2, begun=begun)
        assert report.read(file)["ceilings"]["fp32"] == 1.0
    assert said == ["a", "b", "a", "b"], "what was measured counts, and nothing is measured a third time"
    assert [(row["step"]["median"], row["times"]) for row in rows] == [(3.0, 2), (2.0, 2)]
    assert len(cold) == 1
    kept = report.read(file)["rows"]
    assert [row.get("cold_s", row.get("step", {}).get("median")) for row in kept] == [3.0, 2.0, 1.0]


# ---- networks


def test_the_networks_are_one_network():
    network = pytest.importorskip("benchmarks.network")
    sizes = []
    for kind in network.NETWORKS.values():
        try:
            net = kind("cpu", torch.float32)
        except ImportError:
            continue
        sizes.append(sum(p.numel() for p in net.network.parameters()))
    assert sizes
    assert set(sizes) == {7_181_460}


def test_a_small_network_is_measured():
    from benchmarks import network

    row = network.measure("sparseconv", "shell_16", "cpu", 0.01, (4, 8))
    assert row["status"] == "measured", row.get("reason")
    assert min(row[q]["median"] for q in ("step", "inference", "fixed")) > 0
    assert all("GPU" in row[q]["reason"] for q in ("replay", "captured_step", "captured_inference"))


def a_network(case: str, device: str = "cpu") -> dict:
    times = {q: {"median": 900.0} for q in ("step", "inference", "fixed", "replay")}
    row = {"implementation": "unet:sparseconv", "case": case, "device": device, "status": "measured", "voxels": 7}
    return row | times | {"memory": {"peak_mib": 9000.0}, "first_s": 1.0}


def test_networks_measured_before_a_stop_are_kept(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from benchmarks import __main__ as command

    def run(jobs, console, caches, keep, **named):
        for case in ("first", "second"):
            keep(a_network(case))
        raise KeyboardInterrupt

    monkeypatch.setattr(command.session, "run", run)
    file = tmp_path / "networks.json"
    done = CliRunner().invoke(command.app, ["network", "--device", "cpu", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert [row["case"] for row in report.read(file)["rows"]] == ["first", "second"]
    assert "stopped" in done.output
    assert "second" in done.output


# ---- other kernels


@pytest.mark.parametrize(
    ("name", "kernel"), [("sparseconv", 5), ("spconv", 3), ("dense conv3d", 1), ("dense conv3d", 3)]
)
def test_other_kernels_are_judged_and_measured(name, kernel):
    row = measure.run(Job(name, "uniform_30_12", 8, quantities=("forward", "step"), kernel=kernel, **TINY))
    if row["status"] == "skipped":
        pytest.skip(row["reason"])
    assert row["status"] == "measured", row.get("reason")
    taps, coords = check.offsets(kernel), cases.coordinates("uniform_30_12")
    there = {tuple(c) for c in coords[:, 1:].tolist()}
    assert row["pairs"] == sum(tuple(a + b for a, b in zip(c, t)) in there for c in there for t in taps)


def test_a_peer_that_knows_one_kernel_says_so():
    assert "kernel 3 only" in EVERYONE["WarpConvNet"].missing("cuda", "fp16", 5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lines_go_along_voxels_channels_taps_and_occupancy(device):
    jobs = selection.scaling_jobs(["sparseconv", "spconv"], "fp32", device, 0.1)
    assert len(set(jobs)) == len(jobs)
    known = selection.layer_jobs((("shell_64", (64,)),), ["sparseconv"], ["fp32"], device, 0.1, False)
    both = selection.with_lines(known, ["sparseconv", "spconv"], "fp32", device, 0.1)
    assert len(both) == len(known) + len(jobs) - 1  # shell_64 at 64 channels is on a line, and measured already
    threes = [job for job in jobs if job.kernel == 3]
    assert {job.case.partition("_")[0] for job in threes} >= {"shell", "uniform"}
    assert len({job.channels for job in threes}) > 2
    assert {job.kernel for job in jobs} == set(selection.KERNELS)


# ---- the command


def bench(*arguments):
    from typer.testing import CliRunner

    from sparseconv.cli import app

    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.split())


def test_the_command_measures_and_writes(tmp_path):
    options = ["--case", "shell_16", "--case", "uniform_30_8", "--channels", 8, "--seconds", 0.01]
    code, said = bench(*options, "--compare", "--shuffled", "--json", tmp_path / "a.json")
    assert code == 0, said
    for word in ("shell_16", "sparseconv:llvm_implicit_gemm", "fp32", "shuffled", "a.json"):
        assert word in said
    rows = report.read(tmp_path / "a.json")["rows"]
    assert {"sparseconv", "sparseconv:numpy_gather_scatter"} <= {row["implementation"] for row in rows}
    assert {row["status"] for row in rows} <= {"measured", "skipped"}
    shown = {quantity for row in rows for quantity in row if quantity in package.QUANTITIES}
    assert shown == set(package.QUANTITIES)


def test_the_command_keeps_what_was_done_before_a_stop(tmp_path, monkeypatch):
    def attempt(job):
        if job.case == "b":
            raise KeyboardInterrupt
        return job.as_dict() | {"status": "measured", "step": {"median": 1.0}}

    monkeypatch.setattr(package, "attempt", attempt)
    code, said = bench("--case", "a", "--case", "b", "--json", tmp_path / "a.json")
    assert (code, "stopped" in said) == (0, True)
    assert [row["case"] for row in report.read(tmp_path / "a.json")["rows"]] == ["a"]


def test_an_interrupted_write_leaves_the_file_of_before(tmp_path, monkeypatch):
    from sparseconv.bench.report import write

    def replace(self, target):
        raise KeyboardInterrupt

    (tmp_path / "a.json").write_text("of before")
    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.json", {}, [])
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "of before")]


def test_an_implementation_that_raises_costs_its_row():
    def run(job):
        raise RuntimeError("no kernel image is available\nand more")

    row = package.attempt(Job("sparseconv", "shell_16", 8, **TINY), run)
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: no kernel image is available")


def test_a_folder_of_scenes_of_ones_own_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSECONV_BENCH_DATA", str(tmp_path))
    assert "attic.npz" in cases.missing("attic")
    np.savez(tmp_path / "attic.npz", coords=np.array([[0, 0, 0], [0, 1, 2], [7, 7, 7]]))
    assert cases.coordinates("attic").tolist() == [[0, 0, 0, 0], [0, 0, 1, 2], [0, 7, 7, 7]]


@pytest.mark.slow
def test_a_table_of_the_repository_is_measured_written_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    from benchmarks import __main__ as command

    options = ["--case", "shell_16", "--channels", 8, "--seconds", 0.01, "--json", tmp_path / "a.json", "--plot"]
    options += ["--backend", "sparseconv", "--backend", "dense conv3d"]
    done = CliRunner().invoke(command.app, ["cpu", *map(str, options)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for word in ("shell_16", "dense conv3d", "fp32", "ceilings", "a.json", "a_relative.png", "of bound"):
        assert word in " ".join(done.output.split())
    rows = report.read(tmp_path / "a.json")["rows"]
    assert {row["implementation"] for row in rows} == {"sparseconv", "dense conv3d"}
    assert (tmp_path / "a_relative.png").is_file()


@pytest.mark.parametrize("file", sorted(benchmarks.RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_the_commands_of_a_results_file_are_understood(file):
    """A command that stands in a results file names a table and options that there are."""
    import shlex

    from benchmarks import __main__ as command

    found = json.loads(file.read_text())
    tables = typer.main.get_command(command.app)
    for line in found.get("commands", []) if isinstance(found, dict) else []:
        words = shlex.split(line.partition("  (")[0])
        while "=" in words[0]:
            words.pop(0)
        assert words[:3] == ["python", "-m", "benchmarks"]
        table = tables.commands[words[3]]
        table.make_context(words[3], words[4:])


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--backend", "cudnn", "sparseconv:numpy_gather_scatter"),
        ("--dtype", "int8", "bf16"),
        ("--quantity", "joy", "forward"),
    ],
)
def test_the_command_names_what_there_is(option, value, word):
    code, said = bench(option, value)
    assert code == 2
    assert value in said
    assert word in said


def test_the_command_refuses_a_time_below_nothing():
    code, said = bench("--seconds", -1)
    assert (code, "--seconds" in said) == (2, True)


def test_a_case_that_is_not_there_is_a_row_with_its_reason():
    code, said = bench("--case", "cube_7", "--channels", 8)
    assert code == 0
    assert "no case 'cube_7'" in said


# ---- claims


def test_the_committed_claims_are_well_formed():
    for claim in verify.claims():
        assert claim["tolerance"] < 1
        asked = claim["measure"]
        assert set(asked) == {"implementation", "case", "channels", "dtype", "device", "quantity"}
        if asked["device"] == "cuda":
            assert claim["card"]
            assert (benchmarks.RESULTS / claim["record"]).exists() or claim["record"] == "targets.json"


def test_claims_about_a_card_are_what_their_records_say():
    """The others are measured where they are checked."""
    recorded = [claim for claim in verify.claims() if "record" in claim]
    assert [c["name"] for c in recorded if not verify.holds(c, stated.recorded(c), "recorded")] == []


def test_the_readme_states_its_claims_and_no_other_number():
    kept = json.loads(verify.CLAIMS.read_text())
    figures = {number for claim in kept["claims"] for number in stated.numbers(claim["stated"])}
    said, more = (
        set(stated.numbers((benchmarks.ROOT / name).read_text())) for name in ("README.md", "docs/benchmarks.md")
    )
    assert said - figures - set(kept["settings"]) == set(), "in the README, and no claim"
    assert figures - said - more == set(), "a claim, and neither in the README nor in docs/benchmarks.md"


def test_the_readme_is_in_step_with_the_results(tmp_path):
    from benchmarks.claims import readme

    pages = {tmp_path / "README.md": readme.README, tmp_path / "benchmarks.md": readme.PAGE}
    for file, kept in {**pages, tmp_path / "claims.json": verify.CLAIMS}.items():
        file.write_text(kept.read_text())
    readme.write(tmp_path / "README.md", tmp_path / "claims.json", tmp_path / "benchmarks.md")
    for file, kept in pages.items():
        assert file.read_text() == kept.read_text(), "run `python -m benchmarks readme`"
    assert json.loads((tmp_path / "claims.json").read_text()) == json.loads(verify.CLAIMS.read_text())


def test_each_record_is_quoted_and_each_quoted_record_is_there():
    pages = [benchmarks.ROOT / "README.md", *(benchmarks.ROOT / "docs").rglob("*.md"), verify.CLAIMS]
    texts = [page.read_text() for page in pages]
    quoted = {name for text in texts for name in re.findall(r"benchmarks/results/([\w-]+\.json)", text)}
    quoted |= {claim["record"] for claim in verify.claims() if "record" in claim} - {"targets.json"}
    assert quoted == {file.name for file in benchmarks.RESULTS.iterdir()}


def test_a_readme_without_marks_is_refused():
    from benchmarks.claims import readme

    with pytest.raises(ValueError, match="needs the lines"):
        readme.written("# a readme\n", [])


@pytest.mark.slow
def test_claims_are_measured_anew_until_one_does_not_hold(tmp_path, capsys):
    asked = {"implementation": "sparseconv", "case": "shell_16", "channels": 4, "dtype": "fp32", "device": "cpu"}
    claim = {"text": "a step", "measure": asked | {"quantity": "step"}, "unit": "ms", "tolerance": 0.1}
    figures = {"slow": 1e6, "fast": 1e-9, "unheard of": 1.0}
    several = [claim | {"name": name, "figure": ms, "stated": f"{ms:g}"} for name, ms in figures.items()]
    (tmp_path / "claims.json").write_text(json.dumps({"claims": several}))
    kept = tmp_path / "kept.json"
    assert verify.verify([], "cpu", wide_console(), tmp_path / "claims.json", kept) == 1
    assert [row["case"] for row in report.read(kept)["rows"]] == ["shell_16"], "one layer, whatever is claimed of it"
    said = filter(None, capsys.readouterr().out.splitlines())
    again = ["later than stated, measured again: 1"] * (verify.TIMES - 1)
    assert [line.partition(" a step")[0] for line in said] == [*again, "holds", "does not hold"]


@pytest.mark.parametrize(("theirs", "code"), [(2.0, 0), (1.4, 0), (1.2, 1)])
def test_the_best_other_is_a_peer_and_must_not_be_faster_than_stated(monkeypatch, tmp_path, theirs, code):
    asked = {"implementation": "best other", "case": "shell_16", "channels": 4, "dtype": "fp16", "device": "cuda"}
    claim = {"name": "a", "text": "a step", "measure": asked | {"quantity": "step"}, "unit": "ms", "tolerance": 0.1}
    claim |= {"figure": 1.45, "stated": "1.45", "card": "NVIDIA Abacus", "record": "targets.json"}
    (tmp_path / "claims.json").write_text(json.dumps({"claims": [claim]}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Abacus")
    monkeypatch.setattr(runner, "absent", lambda name: None)
    measured = []

    def run(jobs, console, caches, keep, **named):
        measured.extend(job.implementation for job in jobs)
        for i, job in enumerate(jobs):
            keep(job.as_dict() | {"status": "measured", "step": {"median": theirs + i}})

    monkeypatch.setattr(verify.session, "run", run)
    monkeypatch.setattr(verify.session, "compile_ours", lambda *rest: None)
    assert verify.verify([], None, wide_console(), tmp_path / "claims.json") == code
    assert "spconv" in measured
    assert not {"sparseconv", "cupy_gather_scatter", "triton_implicit_gemm", "dense conv3d"} & set(measured)


@pytest.mark.parametrize(
    ("status", "code"), [("crashed", 1), ("failed", 1), ("wrong", 1), ("measured", 1), ("skipped", 0)]
)
def test_a_figure_of_ours_that_breaks_is_not_covered_by_its_record(monkeypatch, tmp_path, capsys, status, code):
    asked = {"implementation": "sparseconv", "case": "shell_64", "channels": 1024, "dtype": "fp16", "device": "cuda"}
    claim = {"name": "a", "text": "forward", "measure": asked | {"quantity": "forward"}, "figure": 1.45, "unit": "ms"}
    claim |= {"tolerance": 0.1, "stated": "1.45", "record": "card.json", "card": "NVIDIA Abacus"}
    (tmp_path / "claims.json").write_text(json.dumps({"claims": [claim]}))
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path)
    write(tmp_path / "card.json", {}, [fake("sparseconv", 1.4513)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Abacus")
    broken = {"status": status, "reason": "a bead came off"}

    def run(jobs, console, caches, keep, **named):
        for job in jobs:
            keep(job.as_dict() | broken)

    monkeypatch.setattr(verify.session, "run", run)
    monkeypatch.setattr(verify.session, "compile_ours", lambda *rest: None)
    assert verify.verify([], None, wide_console(), tmp_path / "claims.json") == code
    assert code == 0 or "a bead came off" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "code"), [("1.45", 0), ("1.40", 1)])
def test_without_the_card_a_claim_is_held_against_its_record(tmp_path, monkeypatch, words, code):
    asked = {"implementation": "sparseconv", "case": "shell_64", "channels": 1024, "dtype": "fp16", "device": "cuda"}
    claim = {"name": "a", "text": "forward", "measure": asked | {"quantity": "forward"}, "figure": 1.45, "unit": "ms"}
    claim |= {"tolerance": 0.1, "stated": words, "record": "card.json", "card": "NVIDIA Abacus"}
    (tmp_path / "claims.json").write_text(json.dumps({"claims": [claim]}))
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path)
    write(tmp_path / "card.json", {}, [fake("sparseconv", 1.4513)])
    assert verify.verify([], None, wide_console(), tmp_path / "claims.json") == code


def test_an_unknown_claim_is_named(capsys):
    assert verify.verify(["a claim of nobody"], None, wide_console()) == 1
    assert "a claim of nobody" in capsys.readouterr().out


def test_every_benchmark_can_be_imported_without_a_card():
    for file in sorted((benchmarks.ROOT / "benchmarks").rglob("[a-z]*.py")):
        __import__(".".join(file.relative_to(benchmarks.ROOT).with_suffix("").parts))


def test_a_revision_says_whether_files_differ_from_it(tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True).stdout

    assert machine.revision(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    commit = git("rev-parse", "--short", "HEAD").strip()
    assert machine.revision(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert machine.revision(tmp_path) == f"{commit}-dirty"
