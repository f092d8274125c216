"""Rows of results against the targets and the device's ceilings, and the files that they come from."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import ROOT
from sparseconv.bench import report
from sparseconv.bench.report import VERSION, figure
from sparseconv.bench.timing import DTYPES, Clock, precision

Row = dict[str, Any]
#: quantities and the heads of their columns
HEADS = {"map": "map", "captured_map": "captured map", **report.HEADS}
#: those that a case has once, whatever its channels; both against what was set for a map
MAPS = ("map", "captured_map")


def targets() -> dict[str, Any]:
    """What this library sets itself, and the best of the others: ``targets.json``."""
    return json.loads((ROOT / "benchmarks" / "targets.json").read_text())


def least(before: Row, now: Row) -> Row:
    """The row measured now, with those times of the ones before that were less, and how often that makes.

    Each says the CPU's pace where that was quickest: the CPU is not what a time waits for that came to no less then.
    """
    now = now | {"times": before.get("times", 1) + 1}
    if {before["status"], now["status"]} != {"measured"}:
        return now
    for name in now["quantities"]:
        one, other = before.get(name), now.get(name)
        if not isinstance(one, dict) or not isinstance(other, dict):
            continue
        if one.get("median", math.inf) < other.get("median", math.inf):
            now[name] = one
        if "pace" in one and "pace" in other:
            now[name] = now[name] | {"pace": min(one["pace"], other["pace"])}
    return now


def pace(row: Row) -> float | None:
    """The CPU's slowest pace, in microseconds, while the row's times were taken; None where none says."""
    found = [cell["pace"] for cell in row.values() if isinstance(cell, dict) and "pace" in cell]
    return max(found, default=None)


def is_aimed_at(machine: dict[str, Any]) -> bool:
    """Whether the targets were set for this machine's GPU: they say nothing of another."""
    return machine.get("card", {}).get("name") == targets()["card"]


def read(file: Path) -> dict[str, Any]:
    """A results file; raises ValueError where it is none of this version."""
    if not is_results(file):
        raise ValueError(f"{file} is no results file of version {VERSION}")
    return json.loads(file.read_text())


def is_results(file: Path) -> bool:
    """Whether a file was written by `write`; other benchmarks keep files of their own beside these."""
    found = json.loads(file.read_text())
    return isinstance(found, dict) and found.get("version") == VERSION and isinstance(found.get("rows"), list)


def ceilings(clock: Clock, seconds: float = 0.3) -> dict[str, float]:
    """What this device reaches at best: matrix products in TFLOP/s by dtype, and a copy in TB/s (read and written)."""
    on_card = clock.device == "cuda"
    side, elements = (8192, 1 << 29) if on_card else (1024, 1 << 25)
    found: dict[str, float] = {}
    for name in ("fp16", "bf16", "tf32", "fp32") if on_card else ("fp32",):
        with precision(name):
            a, b = (torch.randn(side, side, device=clock.device, dtype=DTYPES[name]) for _ in range(2))
            out = torch.empty_like(a)
            ms = clock.time(functools.partial(torch.mm, a, b, out=out), seconds).p10
            found[name] = 2e-9 * side**3 / ms
    source = torch.ones(elements, dtype=torch.float16, device=clock.device)
    target = torch.empty_like(source)
    found["copy"] = 4e-9 * elements / clock.time(lambda: target.copy_(source), seconds).median
    return found


def flops(row: Row) -> float:
    """Of a forward, on real pairs: 2 P C^2; a step does three times that."""
    return 2.0 * row["pairs"] * row["channels"] ** 2


def moved(row: Row) -> float:
    """The fewest bytes of a forward: features, weight and neighbour indices once."""
    size = {"fp16": 2, "bf16": 2, "fp64": 8}.get(row["dtype"], 4)
    taps = row.get("kernel", 3) ** 3
    return size * (2 * row["voxels"] * row["channels"] + taps * row["channels"] ** 2) + 4 * row["pairs"]


def bound_ms(row: Row, ceilings: dict[str, float]) -> float:
    """The least a forward could take: its FLOPs at the ceiling of matrix products, or its fewest bytes at that of a
    copy, whichever is longer."""
    peak = ceilings.get(row["dtype"]) or ceilings["fp32"]
    return 1e3 * max(flops(row) / (1e12 * peak), moved(row) / (1e12 * ceilings["copy"]))


def with_rates(row: Row, ceilings: dict[str, float] | None) -> Row:
    """A measured row with TFLOP/s on real pairs and its share of the ceilings, by quantity."""
    if row.get("status") != "measured" or "pairs" not in row:
        return row
    rates: dict[str, Any] = {}
    for quantity, times in (("forward", 1), ("input_grad", 1), ("weight_grad", 1), ("step", 3)):
        ms = row.get(quantity, {}).get("median")
        if not ms:
            continue
        rates[quantity] = {"tflops": 1e-9 * times * flops(row) / ms}
        if ceilings:
            peak = ceilings.get(row["dtype"]) or ceilings["fp32"]
            rates[quantity] |= {"of_matmul": rates[quantity]["tflops"] / peak}
            rates[quantity] |= {"of_bound": times * bound_ms(row, ceilings) / ms}
    return row | {"rates": rates}


def judged(value: float | None, target: dict[str, float] | None, whole: bool = False) -> str:
    """A figure with its colour: green where the goal is met, yellow where only the must is, red where not that."""
    if value is None:
        return "-"
    text = (
        f"{value:.1f}" if (whole or value >= 10) and value < 100 else f"{value:.3f}" if value < 10 else f"{value:.0f}"
    )
    if not target:
        return text
    colour = "green" if value <= target.get("goal", -1.0) else "yellow" if value <= target["must"] else "red"
    goal = f" / {target['goal']:g}" if "goal" in target else ""
    return f"[{colour}]{text}[/] ({target['must']:g}{goal})"


def layer_table(rows: Sequence[Row], title: str, aims: bool = False) -> Table:
    """A line a row and a column a quantity that was measured; with ``aims``, against must and goal where the first
    table of the targets has that cell."""
    cells = {(c["case"], c["channels"]): c for c in targets()["layers"]}
    maps = {c["case"]: c["map"] for c in targets()["layers"] if "map" in c}

    def shown(row: Row, quantity: str) -> str:
        mine = row["implementation"].startswith("sparseconv") and row["dtype"] in ("fp16", "bf16")
        aim = None
        if aims and mine and row.get("kernel", 3) == 3:
            cell = cells.get((row["case"], row["channels"]), {})
            aim = maps.get(row["case"]) if quantity in MAPS else cell.get(quantity)
        value = figure(row, quantity)
        return "" if value is None else judged(value, aim, whole=quantity == "memory")

    def rates(row: Row) -> dict[str, str]:
        found = row.get("rates", {}).get("forward", {})
        bound = f"{100 * found['of_bound']:.0f} %" if "of_bound" in found else ""
        return {"TFLOP/s": f"{found['tflops']:.3g}" if found else "", "of bound": bound}

    return report.layer_table(rows, title, HEADS, shown, rates)


def unmet(rows: Sequence[Row]) -> list[str]:
    """A sentence for every 'must' of the first table that this library's fp16 rows in given order miss."""
    missed = []
    for cell in targets()["layers"]:
        for row in rows:
            mine = row["implementation"] == "sparseconv" and row["dtype"] == "fp16" and not row.get("shuffled")
            if not mine or row["case"] != cell["case"] or row["status"] != "measured":
                continue
            for quantity in (*MAPS, "forward", "step", "memory"):
                if quantity not in MAPS and row["channels"] != cell["channels"]:
                    continue
                value = figure(row, quantity)
                aim = cell.get("map" if quantity in MAPS else quantity)
                if aim is not None and value is not None and value > aim["must"]:
                    unit = "MiB" if quantity == "memory" else "ms"
                    missed.append(
                        f"{cell['case']} C {row['channels']} {quantity}: {value:.3g} {unit}, "
                        f"{value / aim['must']:.2f} times the must of {aim['must']:g}"
                    )
    return list(dict.fromkeys(missed))


def joined(rows: Sequence[Row]) -> list[Row]:
    """Rows for reading: a case's maps, timed in a row of its own, put on every row of that case and order."""
    maps = {_of_case(row): {q: row[q] for q in MAPS if row.get(q)} for row in rows if any(map(row.get, MAPS))}
    found = []
    silent: set[tuple[str, str]] = set()
    for row in rows:
        if row["status"] == "skipped":  # an implementation that is not there says so once
            if (row["implementation"], row["reason"]) in silent:
                continue
            silent.add((row["implementation"], row["reason"]))
        alone = row["status"] == "measured" and 0 < len(row["quantities"]) == sum(q in MAPS for q in row["quantities"])
        same = (other for other in rows if other is not row and other["dtype"] == row["dtype"])
        if alone and any(_of_case(other) == _of_case(row) for other in same):
            continue
        known = maps.get(_of_case(row))
        found.append(row | known if known and row["status"] == "measured" else row)
    return found


def _of_case(row: Row) -> tuple[Any, ...]:
    return row["implementation"], row["case"], row.get("shuffled"), row["device"], row.get("kernel", 3)
