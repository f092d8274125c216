"""Pictures of results files: the speed of each peer beside ours, by case."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.claims import stated
from benchmarks.layers import report, scenes
from sparseconv.bench.report import figure as value

Row = dict[str, Any]
OURS = "sparseconv"
#: the least of all peers' figures on the GPU of the targets, whichever file has it
BEST = "best other (Nov 2026)"
#: one colour a name everywhere; ours is the strong one (Okabe and Ito's set, which the colour-blind can tell apart)
COLOURS = {OURS: "#0072B2", "spconv": "#E69F00", "spconv-triton": "#56B4E9", BEST: "#999999"}
COLOURS |= {"FlexGEMM": "#009E73", "FlexGEMM split-K": "#66C2A5", "WarpConvNet": "#CC79A7", "torchsparse": "#D55E00"}
COLOURS |= {"MinkowskiEngine": "#F0E442", "fVDB": "#8C6D31", "dense conv3d": "#444444"}
QUANTITIES = {"forward": "forward", "step": "training step", "map": "map build"}


def draw(files: Iterable[Path], folder: Path) -> list[Path]:
    """A picture for each file that has rows of a peer, named after the file; returns the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for file in files:
        found = report.read(file)
        rows = [r for r in report.joined(found["rows"]) if r.get("status") == "measured" and "channels" in r]
        layers = [r for r in rows if "pairs" in r]
        under = found["machine"].get("card", {}).get("name") or found["machine"].get("cpu", "")
        figure = relative(layers, found)
        if figure is None:
            continue
        figure.suptitle(under, x=0.995, ha="right", fontsize=7, color="#666666")
        path = folder / f"{file.stem}_relative.png"
        figure.savefig(path, dpi=130, metadata={"Source": source(file)})
        written.append(path)
    return written


def source(file: Path) -> str:
    """What a picture says of the results it shows: the file, and the beginning of the hash of its text."""
    return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


def label(row: Row) -> str:
    """Case and channels, short enough for an axis."""
    return f"{scenes.title(row['case'])}, C {row['channels']}"


def given(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of the coordinates' file and in the first dtype that the file has."""
    first = rows[0]["dtype"] if rows else ""
    return [r for r in rows if not r.get("shuffled") and r["dtype"] == first and ":" not in r["implementation"]]


def cubes(rows: Sequence[Row]) -> list[Row]:
    """`given` rows of a 3x3x3 kernel; on a GPU those of the first table of the targets, if there are any."""
    rows = [r for r in given(rows) if r.get("kernel", 3) == 3]
    cells = {(c["case"], c["channels"]) for c in report.targets()["layers"]}
    if rows and rows[0]["device"] == "cuda":
        return [r for r in rows if (r["case"], r["channels"]) in cells] or rows
    scenes = {r["case"] for r in rows if value(r, "map") or value(r, "memory")}  # lines have neither
    return [r for r in rows if r["case"] in scenes] or rows


def with_best(rows: Sequence[Row], found: dict[str, Any]) -> list[Row]:
    """The rows and, on the GPU of the targets, the least that any of the others took there as rows of their own."""
    more = []
    for row in rows if report.is_aimed_at(found["machine"]) else ():
        if row["implementation"] == OURS and row["dtype"] == "fp16":
            figures = {q: stated.best_other(row["case"], row["channels"], q) for q in QUANTITIES}
            times = {quantity: {"median": figure} for quantity, figure in figures.items()}
            more.append({**row, "implementation": BEST, **times})
    return [*rows, *more]


def relative(rows: Sequence[Row], found: dict[str, Any]) -> Figure | None:
    """How many times faster we are than each other one, by case; one panel a quantity."""
    rows = cubes(rows)
    if not rows:
        return None
    rows = with_best(rows, found)
    ours = {(r["case"], r["channels"]): r for r in rows if r["implementation"] == OURS}
    others = list(dict.fromkeys(r["implementation"] for r in rows if r["implementation"] != OURS))
    keys = [k for k in ours if any((r["case"], r["channels"]) == k for r in rows if r["implementation"] != OURS)]
    known = [quantity for quantity in QUANTITIES if any(value(row, quantity) for row in ours.values())]
    if not others or not keys or not known:
        return None
    height = 1.6 + 0.16 * len(keys) * (len(others) + 1)
    figure = Figure(figsize=(2 + 3 * len(known), height), layout="constrained")
    panels = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
    thick = 0.8 / len(others)
    measured = {(r["case"], r["channels"], r["implementation"]) for r in rows}
    beside = {key: [name for name in others if (*key, name) in measured] for key in keys}
    for axes, quantity in zip(panels, known):
        for name in others:
            theirs = {(r["case"], r["channels"]): r for r in rows if r["implementation"] == name}
            seen: set[str] = set()
            for y, key in enumerate(keys):
                # a map knows no channels: once a case; a dense volume has none
                if quantity == "map" and (key[0] in seen or name == "dense conv3d"):
                    continue
                seen.add(key[0])
                a, b = value(ours[key], quantity), value(theirs.get(key, {}), quantity)
                if not a or not b:
                    continue
                at = y + (beside[key].index(name) - (len(beside[key]) - 1) / 2) * thick
                axes.barh(at, b / a, thick * 0.9, color=_colour(name), label=name)
                axes.text(b / a, at, " " + f"{b / a:#.2g}".rstrip("."), va="center", fontsize=7)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(f"{QUANTITIES[quantity]}: their time over ours")
        axes.margins(x=0.15)
        _plain(axes)
    panels[0].set_yticks(range(len(keys)), [label(ours[key]) for key in keys], fontsize=8)
    panels[0].set_ylim(len(keys) - 0.4, -0.6)
    figure.legend(*_legend(panels), loc="outside upper center", ncols=min(5, len(others)), frameon=False, fontsize=8)
    return figure


def _colour(name: str) -> str:
    return COLOURS.get(name, "#AA4499")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)


def _legend(panels: Iterable[Axes]) -> tuple[list[Any], list[str]]:
    """Each name once, over all panels."""
    known: dict[str, Any] = {}
    for axes in panels:
        for handle, words in zip(*axes.get_legend_handles_labels()):
            known.setdefault(words, handle)
    return list(known.values()), list(known)
