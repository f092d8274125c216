"""What is measured of two revisions, and what is made of the figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks import network
from benchmarks.layers.report import targets

#: channels of the layer whose map is timed: its step is short beside the map
MAP_CHANNELS = 32
MAPS, LAYERS = ("captured_map", "eager_map"), ("forward", "step")
NETWORKS = ("captured_step", "captured_inference")
#: seconds to the first gradients of a process that finds no compiled kernel, and of one that finds all
STARTS = FIRST, SECOND = "first_gradient", "second_process"
#: times the old revision's that the new one's may take; and what an isolated eager map may take more, in milliseconds
RATIO, EAGER_MS = 1.03, 0.040
#: a turn counts whose host took at most this much of its quickest pace in the run: other tenants of a host double it
QUIET = 1.25


class Cell(NamedTuple):
    """One figure."""

    quantity: str
    case: str
    channels: int

    @property
    def name(self) -> str:
        return ":".join(map(str, self))

    @property
    def kind(self) -> str:
        return "network" if self.quantity in NETWORKS else "start" if self.quantity in STARTS else "layer"

    @property
    def is_launched_by_the_host(self) -> bool:
        """Whether the CPU sets the pace: each repeat runs Python, which a graph's replay does not.

        A first start spends most of its time in compilers, in many processes, so no core's pace is that of the CPU.
        """
        return self.quantity in ("eager_map", *LAYERS, SECOND)


def every() -> list[Cell]:
    """First gradients; maps, forward and step of the first table of the targets; the networks, captured."""
    aims = targets()
    found = [Cell(quantity, aims["cold"]["case"], aims["cold"]["channels"]) for quantity in STARTS]
    seen = set()
    for row in aims["layers"]:
        case = row["case"]
        found += [Cell(quantity, case, MAP_CHANNELS) for quantity in MAPS if case not in seen]
        found += [Cell(quantity, case, row["channels"]) for quantity in LAYERS]
        seen.add(case)
    found.sort(key=lambda cell: (cell.kind != "start", cell.case.startswith("shell_1024")))  # the largest last
    return found + [Cell(quantity, case, network.CHANNELS[0]) for case in network.CASES for quantity in NETWORKS]


def chosen(words: Sequence[str]) -> list[Cell]:
    """Cells whose names hold one of the words; a whole name, ``forward:shell_32:16``, is a cell of its own.

    >>> [cell.name for cell in chosen(["map:shell_512", "step:shell_8:4"])]
    ['captured_map:shell_512:32', 'eager_map:shell_512:32', 'step:shell_8:4']
    """
    if not words:
        return every()
    quantities = {*MAPS, *LAYERS, *NETWORKS, *STARTS}
    given = [word.split(":") for word in words]
    whole = [Cell(w[0], w[1], int(w[2])) for w in given if len(w) == 3 and w[0] in quantities and w[2].isdecimal()]
    named = {cell.name for cell in whole}
    parts = [word for word in words if word not in named]
    return [*(cell for cell in every() if any(word in cell.name for word in parts)), *whole]


def quiet(paces: Sequence[float], quickest: float) -> list[int]:
    """The rounds in which a side's host was quiet, by `sparseconv.bench.timing.pace`.

    >>> quiet([40.0, 82.0, 44.0], quickest=39.0)
    [0, 2]
    """
    return [i for i, pace in enumerate(paces) if pace <= QUIET * quickest]


def joined(
    cell: Cell, old: Sequence[float], new: Sequence[float], counted: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """The row of a cell: a figure a round and side, in the order in which they were taken.

    Args:
        cell: what was measured.
        old: figures of the old revision, one a round.
        new: figures of the new revision.
        counted: the rounds of each side that count; all where it is empty.

    >>> row = joined(Cell("eager_map", "shell_64", 32), [1.0, 1.1, 1.0], [1.02, 1.1, 1.03])
    >>> row["ratio"], row["ratios"], row["difference"], row["holds"]
    (1.02, [1.0, 1.03], 0.02, True)
    """
    old_counted, new_counted = ([r[i] for i in c] for r, c in zip((old, new), counted)) if counted else (old, new)
    a, b = statistics.median(old_counted), statistics.median(new_counted)
    ratios = [n / o for o, n in zip(old_counted, new_counted)]
    allowed = a + EAGER_MS if cell.quantity == "eager_map" else RATIO * a
    return {
        "old": {"median": a, "rounds": list(old)},
        "new": {"median": b, "rounds": list(new)},
        "ratio": round(b / a, 4),
        "ratios": [round(min(ratios), 4), round(max(ratios), 4)],
        "difference": round(b - a, 4),
        "holds": b <= allowed,
    }


def sentence(row: dict[str, Any]) -> str:
    """A row as a line of text."""
    if "reason" in row:
        return f"{row['cell']:48} {row['reason']}"
    unit = "s" if row["quantity"] in STARTS else "ms"
    same = {None: "", True: "  same bits", False: "  OTHER BITS"}[row.get("same_bits")]
    low, high = row["ratios"]
    return (
        f"{row['cell']:48} {row['old']['median']:9.4f} {row['new']['median']:9.4f} {unit:2} "
        f"{row['ratio']:6.3f} ({low:.3f} to {high:.3f}){'' if row['holds'] else '  SLOWER'}{same}"
    )


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """How many cells hold, and the names of those that do not."""
    measured = [row for row in rows if "reason" not in row]
    late = [row["cell"] for row in measured if not row["holds"]]
    others = [row["cell"] for row in measured if row.get("same_bits") is False]
    said = f"{len(measured) - len(late)} of {len(measured)} cells hold"
    said += f"; slower: {', '.join(late)}" if late else ""
    return said + (f"; other bits: {', '.join(others)}" if others else "")
