"""Pictures of results files: speed beside each peer, roofline, scaling, memory; each where a file has its rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import Bbox

from benchmarks.claims import stated
from benchmarks.layers import report, scenes
from sparseconv.bench.report import figure as value

Row = dict[str, Any]
OURS = "sparseconv"
#: the least of all peers' figures on the card of the targets, whichever file has it
BEST = "best other (Nov 2026)"
#: one colour a name everywhere; ours is the strong one (Okabe and Ito's set, which the colour-blind can tell apart)
COLOURS = {OURS: "#0072B2", "spconv": "#E69F00", "spconv-triton": "#56B4E9", BEST: "#999999"}
COLOURS |= {"FlexGEMM": "#009E73", "FlexGEMM split-K": "#66C2A5", "WarpConvNet": "#CC79A7", "torchsparse": "#D55E00"}
COLOURS |= {"MinkowskiEngine": "#F0E442", "fVDB": "#8C6D31", "dense conv3d": "#444444"}
QUANTITIES = {"forward": "forward", "step": "training step", "map": "map build"}
UNITS = {"forward": "forward (ms)", "step": "training step (ms)", "map": "map build (ms)"}


def draw(files: Iterable[Path], folder: Path) -> list[Path]:
    """Every picture that the files' rows allow, named after the file; returns the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for file in files:
        found = report.read(file)
        rows = [r for r in report.joined(found["rows"]) if r.get("status") == "measured" and "channels" in r]
        layers = [r for r in rows if "pairs" in r]
        under = found["machine"].get("card", {}).get("name") or found["machine"].get("cpu", "")
        for kind, painter in PAINTERS.items():
            figure = painter(layers, found)
            if figure is None:
                continue
            figure.suptitle(under, x=0.995, ha="right", fontsize=7, color="#666666")
            path = folder / f"{file.stem}_{kind}.png"
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
    """`given` rows of a 3x3x3 kernel; on a card those of the first table of the targets, if there are any."""
    rows = [r for r in given(rows) if r.get("kernel", 3) == 3]
    cells = {(c["case"], c["channels"]) for c in report.targets()["layers"]}
    if rows and rows[0]["device"] == "cuda":  # what else a card's file has is drawn as lines, in `scaling`
        return [r for r in rows if (r["case"], r["channels"]) in cells] or rows
    scenes = {r["case"] for r in rows if value(r, "map") or value(r, "memory")}  # lines have neither
    return [r for r in rows if r["case"] in scenes] or rows


def with_best(rows: Sequence[Row], found: dict[str, Any]) -> list[Row]:
    """The rows and, on the card of the targets, the least that any of the others took there as rows of their own."""
    more = []
    for row in rows if report.is_aimed_at(found["machine"]) else ():
        if row["implementation"] == OURS and row["dtype"] == "fp16":
            figures = {q: stated.best_other(row["case"], row["channels"], q) for q in QUANTITIES}
            memory = {"peak_mib": stated.best_other(row["case"], row["channels"], "memory")}
            times = {quantity: {"median": figure} for quantity, figure in figures.items()}
            more.append({**row, "implementation": BEST, **times, "memory": memory})
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
                axes.text(b / a, at, f" {b / a:.2g}", va="center", fontsize=7)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(f"{QUANTITIES[quantity]}: their time over ours")
        axes.margins(x=0.15)
        _plain(axes)
    panels[0].set_yticks(range(len(keys)), [label(ours[key]) for key in keys], fontsize=8)
    panels[0].set_ylim(len(keys) - 0.4, -0.6)
    figure.legend(*_legend(panels), loc="outside upper center", ncols=min(5, len(others)), frameon=False, fontsize=8)
    return figure


def roofline(rows: Sequence[Row], found: dict[str, Any]) -> Figure | None:
    """TFLOP/s of a forward over its arithmetic intensity, under the measured ceilings."""
    rows, ceilings = cubes(rows), found.get("ceilings")
    points = [r for r in rows if value(r, "forward")]
    named: list[tuple[float, float, str]] = []
    if not points or not ceilings:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    peak = ceilings.get(points[0]["dtype"]) or ceilings["fp32"]
    spans = [_intensity(r) for r in points]
    corner = peak / ceilings["copy"]
    low, high = min(min(spans) / 3, corner / 8), max(max(spans) * 3, 2 * corner)
    axes.plot([low, corner, high], [low * ceilings["copy"], peak, peak], color="black", linewidth=1)
    axes.text(high, peak, f"matrix product {peak:.3g} TFLOP/s ", ha="right", va="bottom", fontsize=8)
    turn = math.sqrt(low * corner)
    axes.text(turn, turn * ceilings["copy"], f"copy {ceilings['copy']:.3g} TB/s ", ha="right", va="bottom", fontsize=8)
    for name in dict.fromkeys(r["implementation"] for r in points):
        mine = sorted((_intensity(r), 1e-9 * report.flops(r) / (value(r, "forward") or 1), label(r)) for r in points
                      if r["implementation"] == name)  # fmt: skip
        ours = name == OURS
        mark, size, above = ("o", 40, 3) if ours else ("x", 25, 2)
        axes.scatter(
            [x for x, _, _ in mine],
            [y for _, y, _ in mine],
            s=size,
            c=_colour(name),
            marker=mark,
            label=name,
            zorder=above,
        )
        named = mine if ours else named
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(top=1.6 * peak)
    axes.set_xlabel("FLOP a byte: real pairs over features, weight and indices, each moved once")
    axes.set_ylabel("forward (TFLOP/s on real pairs)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    _decades(axes)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _plain(axes)
    _name(axes, named, [(_intensity(r), 1e-9 * report.flops(r) / (value(r, "forward") or 1)) for r in points])
    return figure


def _name(axes: Axes, named: Sequence[tuple[float, float, str]], points: Sequence[tuple[float, float]]) -> None:
    """Write each point's words at one of its sides, where they lie over the fewest others and points."""
    figure: Any = axes.figure
    figure.draw_without_rendering()
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in axes.transData.transform(points)]
    sides = [
        (7, -3, "left"),
        (-7, -3, "right"),
        (0, 7, "center"),
        (0, -12, "center"),
        (7, 6, "left"),
        (-7, -11, "right"),
    ]
    for x, y, words in named:
        boxes = []
        for right, up, anchor in sides:
            text = axes.annotate(words, (x, y), (right, up), textcoords="offset points", fontsize=6, ha=anchor)
            boxes.append((sum(text.get_window_extent().overlaps(box) for box in taken), text))
        _, kept = min(boxes, key=lambda found: found[0])
        taken.append(kept.get_window_extent())
        for _, text in boxes:
            if text is not kept:
                text.remove()


def scaling(rows: Sequence[Row], found: dict[str, Any]) -> Figure | None:
    """Milliseconds over N at one C, over C on one case, over K on one case, over occupancy in one cube."""
    rows = given(rows)
    threes = [r for r in rows if r.get("kernel", 3) == 3]
    shells = [r for r in threes if r["case"].startswith("shell_")]
    usual = _usual(shells)
    widest = _most([(r["case"], r["channels"]) for r in shells])
    windows = _most([((r["case"], r["channels"]), r.get("kernel", 3)) for r in rows])
    fills = [r for r in threes if r["case"].startswith("uniform_")]
    edge = _most([(r["case"].split("_")[2], _position("occupied (%)", r)) for r in fills])
    lines = {
        "voxels": [r for r in shells if r["channels"] == usual],
        "channels": [r for r in shells if r["case"] == widest],
        "taps": [r for r in rows if (r["case"], r["channels"]) == windows],
        "occupied (%)": [r for r in fills if r["case"].split("_")[2] == edge],
    }
    lines = {axis: many for axis, many in lines.items() if len({_position(axis, r) for r in many}) > 2}
    if not lines:
        return None
    columns = min(2, len(lines))
    figure = Figure(figsize=(4 * columns, 0.8 + 2.7 * math.ceil(len(lines) / 2)), layout="constrained")
    panels = figure.subplots(math.ceil(len(lines) / 2), columns, squeeze=False).ravel()
    for axes in panels[len(lines) :]:
        axes.set_visible(False)
    for axes, (axis, many) in zip(panels, lines.items()):
        for name in dict.fromkeys(r["implementation"] for r in many):
            for quantity, style in (("forward", "-o"), ("step", "--s")):
                mine = [r for r in many if r["implementation"] == name and value(r, quantity)]
                points = sorted((_position(axis, r), value(r, quantity)) for r in mine)
                if points:
                    words = f"{name}, {QUANTITIES[quantity]}"
                    axes.plot(*zip(*points), style, color=_colour(name), markersize=4, linewidth=1.2, label=words)
        first = many[0]
        shown = {"voxels": f"shells, C {usual}", "taps": label(first), "channels": scenes.title(first["case"])}
        title = shown.get(axis) or f"{edge}³ cells filled at random, C {first['channels']}"
        axes.set(xscale="log", yscale="log", xlabel=axis)
        axes.set_title(title, fontsize=9)
        places = sorted({_position(axis, r) for r in many})
        if axis != "voxels":
            axes.set_xticks(places)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        _decades(axes)
        _plain(axes)
    for axes in panels[::columns]:
        axes.set_ylabel("milliseconds")
    figure.legend(*_legend(panels), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def memory(rows: Sequence[Row], found: dict[str, Any]) -> Figure | None:
    """Peak extra memory of a training step, by case."""
    rows = cubes(rows)
    if not rows:
        return None
    rows = [r for r in with_best(rows, found) if value(r, "memory")]
    keys = list(dict.fromkeys((r["case"], r["channels"]) for r in rows if r["implementation"] == OURS))
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    if not keys:
        return None
    figure = Figure(figsize=(8, 1.4 + 0.17 * len(keys) * (len(names) + 1)), layout="constrained")
    axes = figure.subplots()
    thick = 0.8 / len(names)
    for i, name in enumerate(names):
        mine = {(r["case"], r["channels"]): value(r, "memory") or 0.0 for r in rows if r["implementation"] == name}
        at = [y + (i - (len(names) - 1) / 2) * thick for y, key in enumerate(keys) if key in mine]
        sizes = [mine[key] for key in keys if key in mine]
        axes.barh(at, sizes, thick * 0.9, color=_colour(name), label=name)
    texts = {(r["case"], r["channels"]): label(r) for r in rows}
    axes.set_yticks(range(len(keys)), [texts[key] for key in keys], fontsize=8)
    axes.set_ylim(len(keys) - 0.4, -0.6)
    axes.set_xlabel("most memory of a training step beyond what is held between steps (MiB)")
    axes.legend(frameon=False, fontsize=8)
    _plain(axes)
    return figure


PAINTERS = {"relative": relative, "roofline": roofline, "scaling": scaling, "memory": memory}


def _intensity(row: Row) -> float:
    """FLOP a byte, each byte moved once, as in `report.bound_ms`."""
    return report.flops(row) / report.moved(row)


def _most(pairs: Iterable[tuple[Any, float]]) -> Any:
    """The first of a pair that was seen with the most different seconds."""
    seen: dict[Any, set[float]] = {}
    for key, number in pairs:
        seen.setdefault(key, set()).add(number)
    return max(seen, key=lambda key: len(seen[key])) if seen else None


def _usual(rows: Sequence[Row]) -> int | None:
    """The channels at which most cases were measured."""
    return _most([(r["channels"], r["voxels"]) for r in rows])


def _short(number: float, _: Any = None) -> str:
    """A tick of an axis: 10 k, 1 M.

    >>> _short(20_000), _short(1_500_000), _short(64)
    ('20 k', '1.5 M', '64')
    """
    for size, letter in ((1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def _position(axis: str, row: Row) -> float:
    if axis == "voxels":
        return row["voxels"]
    if axis == "taps":
        return row.get("kernel", 3) ** 3
    return row["channels"] if axis == "channels" else int(row["case"].split("_")[1])


def _colour(name: str) -> str:
    return COLOURS.get(name, "#AA4499")


def _decades(axes: Axes) -> None:
    """Plain numbers on a logarithmic y axis: 1, 2, 5, 10."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:g}" if f"{v:.0e}"[0] in "25" else ""))


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
