"""Results as a table to read and as a file to keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparseconv.bench.measure import Row

#: quantities and the heads of their columns
HEADS = {"map": "map", "forward": "forward", "input_grad": "d input", "weight_grad": "d weight", "step": "step"}
#: written into every file, so that a reader of an older one knows what it reads
VERSION = 1


def figure(row: Row, quantity: str) -> float | None:
    """A row's figure: the median of a time in ms, or MiB of memory; None where it has none."""
    cell = row.get(quantity) or {}
    return cell.get("peak_mib", cell.get("median"))


def shown(row: Row, quantity: str) -> str:
    """A figure in three digits or so.

    >>> shown({"step": {"median": 1.23456}}, "step"), shown({"memory": {"peak_mib": 31.3}}, "memory")
    ('1.235', '31.3')
    """
    value = figure(row, quantity)
    if value is None:
        return ""
    return f"{value:.3f}" if value < 10 and quantity != "memory" else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def layer_table(
    rows: Sequence[Row],
    title: str,
    heads: Mapping[str, str] = HEADS,
    shown: Callable[[Row, str], str] = shown,
    more: Callable[[Row], Mapping[str, str]] = lambda row: {},
) -> Table:
    """One line per row and one column per quantity that was measured; ``more``: further cells by head."""
    lines: list[dict[str, str]] = []
    for row in rows:
        line = {"implementation": row["implementation"], "case": row["case"], "C": str(row["channels"])}
        line |= {"kernel": "" if row.get("kernel", 3) == 3 else str(row["kernel"]), "dtype": row["dtype"]}
        line["rows"] = "shuffled" if row.get("shuffled") else "given"
        lines.append(line)
        if row["status"] != "measured":
            line["map"] = f"[dim]{row['status']}[/]"
            continue
        line |= {head: shown(row, quantity) for quantity, head in heads.items()} | {"MiB": shown(row, "memory")}
        waste = row.get("details", {}).get("waste")
        line |= {"waste": "" if waste is None else f"{waste:.2f}", **more(row)}
    table = Table(title=title, title_justify="left")
    columns = dict.fromkeys(["implementation", "case", "C", "kernel", "dtype", "rows", *heads.values(), "MiB"])
    columns |= dict.fromkeys(head for line in lines for head in line)
    for head in [head for head in columns if any(line.get(head) for line in lines)]:
        table.add_column(head, justify="left" if head in ("implementation", "case") else "right", no_wrap=head == "C")
    for line in lines:
        table.add_row(*(line.get(str(column.header), "") for column in table.columns))
    return table


def reasons(rows: Sequence[Row]) -> list[str]:
    """A sentence for every row without figures."""
    found = []
    for row in rows:
        if row["status"] != "measured":
            of_all = row["status"] == "skipped" and "install" in row["reason"]
            where = "" if of_all else f", {row['case']}, C {row['channels']}"
            found.append(f"{row['implementation']}{where}: {row['status']}: {row['reason']}")
    return list(dict.fromkeys(found))


def write(file: Path, machine: Mapping[str, Any], rows: Sequence[Row], **more: Any) -> None:
    """A results file: version, machine facts, rows, one per line. An interrupted call leaves the file as it was."""
    head = {"version": VERSION, "machine": machine, **more}
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n'
    text += ",\n".join("  " + json.dumps(_rounded(row)) for row in rows) + "\n ]\n}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


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
