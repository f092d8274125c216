"""Results as a table to read and as a file to keep."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
#: quantities and the heads of their columns
HEADS = {"map": "map", "captured_map": "captured map", "forward": "forward", "input_grad": "d input"}
HEADS |= {"weight_grad": "d weight", "step": "step"}
#: those that a case has once, whatever its channels; both against what was set for a map
MAPS = ("map", "captured_map")
HERE = Path(__file__).resolve().parent
#: the repository's folders, where this is a checkout
RESULTS, PICTURES = (HERE.parents[1] / folder for folder in ("benchmarks/results", "docs/pictures"))
#: written into every file, so that a reader of an older one knows what it reads
VERSION = 1


def targets() -> dict[str, Any]:
    """What this library sets itself, and the best of the others: ``targets.json``."""
    return json.loads((HERE / "targets.json").read_text())


def least(before: Row, now: Row) -> Row:
    """The row measured now, with those times of the ones before that were less, and how often that makes.

    Each says the host's pace where that was quickest: the host is not what a time waits for that came to no less then.
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
    """The host's slowest pace, in microseconds, while the row's times were taken; None where none says."""
    found = [cell["pace"] for cell in row.values() if isinstance(cell, dict) and "pace" in cell]
    return max(found, default=None)


def is_aimed_at(machine: dict[str, Any]) -> bool:
    """Whether the targets were set for this machine's card: they say nothing of another."""
    return machine.get("card", {}).get("name") == targets()["card"]


def write(file: Path, machine: dict[str, Any], rows: Sequence[Row], **more: Any) -> None:
    """A results file: version, machine facts, rows, one a line."""
    head = {"version": VERSION, "machine": machine, **more}
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n'
    text += ",\n".join("  " + json.dumps(_rounded(row)) for row in rows) + "\n ]\n}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def read(file: Path) -> dict[str, Any]:
    """A results file; raises ValueError where it is none of this version."""
    if not is_results(file):
        raise ValueError(f"{file} is no results file of version {VERSION}")
    return json.loads(file.read_text())


def is_results(file: Path) -> bool:
    """Whether a file was written by `write`; other benchmarks keep files of their own beside these."""
    found = json.loads(file.read_text())
    return isinstance(found, dict) and found.get("version") == VERSION and isinstance(found.get("rows"), list)


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


def judged(ms: float | None, target: dict[str, float] | None, whole: bool = False) -> str:
    """A figure with its colour: green where the goal is met, yellow where only the must is, red where not that."""
    if ms is None:
        return "-"
    text = f"{ms:.1f}" if (whole or ms >= 10) and ms < 100 else f"{ms:.3f}" if ms < 10 else f"{ms:.0f}"
    if not target:
        return text
    colour = "green" if ms <= target.get("goal", -1.0) else "yellow" if ms <= target["must"] else "red"
    goal = f" / {target['goal']:g}" if "goal" in target else ""
    return f"[{colour}]{text}[/] ({target['must']:g}{goal})"


def layer_table(rows: Sequence[Row], title: str, aims: bool = False) -> Table:
    """A line a row and a column a quantity that was measured; with ``aims``, against must and goal where the first
    table of the targets has that cell."""
    cells = {(c["case"], c["channels"]): c for c in targets()["layers"]}
    maps = {c["case"]: c["map"] for c in targets()["layers"] if "map" in c}
    lines: list[dict[str, str]] = []
    for row in rows:
        kernel = row.get("kernel", 3)
        line = {"implementation": row["implementation"], "case": row["case"], "C": str(row["channels"])}
        line |= {"kernel": str(kernel), "dtype": row["dtype"], "rows": "shuffled" if row.get("shuffled") else "given"}
        lines.append(line)
        if row["status"] != "measured":
            line["map"] = f"[dim]{row['status']}[/]"
            continue
        mine = row["implementation"].startswith("sparseconv") and row["dtype"] in ("fp16", "bf16") and kernel == 3
        target = cells.get((row["case"], row["channels"]), {}) if aims and mine else {}
        if aims and mine:
            target = target | dict.fromkeys(MAPS, maps.get(row["case"]))
        for quantity, head in HEADS.items():
            ms = row.get(quantity, {}).get("median")
            line[head] = "" if ms is None else judged(ms, target.get(quantity))
        peak = row.get("memory", {}).get("peak_mib")
        line["MiB"] = "" if peak is None else judged(peak, target.get("memory"), whole=True)
        rates = row.get("rates", {}).get("forward", {})
        line["TFLOP/s"] = f"{rates['tflops']:.3g}" if rates else ""
        line["of bound"] = f"{100 * rates['of_bound']:.0f} %" if "of_bound" in rates else ""
        waste = row.get("details", {}).get("waste")
        line["waste"] = "" if waste is None else f"{waste:.2f}"
    one_kernel = {line["kernel"] for line in lines} <= {"3"}
    table = Table(title=title, title_justify="left")
    heads = ["implementation", "case", "C", *([] if one_kernel else ["kernel"]), "dtype", "rows", *HEADS.values()]
    heads = [h for h in (*heads, "MiB", "TFLOP/s", "of bound", "waste") if any(line.get(h) for line in lines)]
    for head in heads:
        table.add_column(head, justify="left" if head in ("implementation", "case") else "right", no_wrap=head == "C")
    for line in lines:
        table.add_row(*(line.get(head, "") for head in heads))
    return table


def reasons(rows: Sequence[Row]) -> list[str]:
    """A sentence for every row without figures."""
    found = []
    for row in rows:
        if row["status"] != "measured":
            where = (
                ""
                if row["status"] == "skipped" and "install" in row["reason"]
                else f", {row['case']}, C {row['channels']}"
            )
            found.append(f"{row['implementation']}{where}: {row['status']}: {row['reason']}")
    return list(dict.fromkeys(found))


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
                value = row.get(quantity, {}).get("median", row.get(quantity, {}).get("peak_mib"))
                aim = cell.get("map" if quantity in MAPS else quantity)
                if aim is not None and value is not None and value > aim["must"]:
                    unit = "MiB" if quantity == "memory" else "ms"
                    missed.append(
                        f"{cell['case']} C {row['channels']} {quantity}: {value:.3g} {unit}, "
                        f"{value / aim['must']:.2f} times the must of {aim['must']:g}"
                    )
    return list(dict.fromkeys(missed))


def wide_console() -> Console:
    """A console that a table of fifteen columns fits, also where the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=190)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


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
