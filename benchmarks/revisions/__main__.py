"""Two revisions of the package against each other, in turns in one run.

    python -m benchmarks.revisions --old CHECKOUT --out FILE.json [--cells WORD ...] [--rounds N] [--seconds N]

Each side is a process that imports its checkout. Both prepare a cell side by side: they compile, choose by estimate,
and check. Then each measures it alone, old and new in turns, by `sparseconv.bench.timing`: CUDA events, medians.
A cell holds where the new revision takes at most 3% more; an isolated eager map may take 40 us more.
Other tenants slow a host's cores: each turn runs on the core that is quickest then. Where the CPU sets the pace,
rounds go on until each side had ``--rounds`` quiet ones, at most four times as many; those alone count.
First gradients are those of a process that finds no compiled kernel, and of a second one, which finds all. Python's
own bytecode is there, as installers leave it.
The file is written after every cell. Cells are named ``quantity:case:channels``.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT, network
from benchmarks.layers.machine import machine
from benchmarks.revisions.cells import FIRST, SECOND, STARTS, Cell, chosen, joined, quiet, sentence, summary
from benchmarks.revisions.side import Side
from sparseconv.bench import cases
from sparseconv.bench.report import write

Row = dict[str, Any]
#: rounds at most, times those that were asked for
MOST = 4


class Match:
    """Two sides, and the time that is left for them."""

    def __init__(self, sides: tuple[Side, Side], device: str, end: float, rounds: int, seconds: float) -> None:
        self._sides, self._device, self._end = sides, device, end
        self._rounds, self._seconds = rounds, seconds
        self._turn, self._quickest = 0, math.inf

    def check(self) -> None:
        """Raise SystemExit where a side cannot import its package, or imports another's."""
        for side, said in zip(self._sides, self._both({"do": "hello"})):
            wanted = str(side.checkout / "sparseconv")
            if said.get("package") != wanted:
                raise SystemExit(f"--{side.name} should import {wanted}; got {said}")

    def measure(self, cell: Cell, file: Path) -> Row:
        """The row of a cell; with a reason where it has no figures."""
        order = {"kind": cell.kind, "file": str(file), "device": self._device, "seconds": self._seconds}
        order |= {**cell._asdict(), "dtype": "fp16" if self._device == "cuda" else "fp32", "widths": widths(cell)}
        row: Row = {"cell": cell.name, **cell._asdict()}
        try:
            if cell.quantity in STARTS:
                return row | self._starts(cell, order)
            return row | self._in_turns(cell, order)
        except Failed as error:
            return row | {"reason": str(error)}

    def _in_turns(self, cell: Cell, order: Row) -> Row:
        said = self._both(order | {"do": "prepare"})
        self._stop_at(said)
        bits = [one.pop("bits", None) for one in said]
        told = {"same_bits": None if bits[0] is None else bits[0] == bits[1]}
        told["said"] = {side.name: one for side, one in zip(self._sides, said)}
        return self._rounds_of(cell, lambda side: side.ask(order | {"do": "time"}, self._end), "median") | told

    def _starts(self, cell: Cell, order: Row) -> Row:
        with tempfile.TemporaryDirectory() as folder:

            def ask(side: Side) -> Row:
                caches = tempfile.mkdtemp(dir=folder) if cell.quantity == FIRST else Path(folder) / side.name
                return side.first_gradient(order, self._end, Path(caches))

            if cell.quantity == SECOND:
                self._stop_at([ask(side) for side in self._sides])
            return self._rounds_of(cell, ask, "seconds")

    def _rounds_of(self, cell: Cell, ask: Callable[[Side], Row], figure: str) -> Row:
        """Both sides in turns; every second round the other side begins."""
        rounds, figures = self._rounds, {side.name: list[Row]() for side in self._sides}
        counted = dict[str, list[int]]()
        for done in range(1, 1 + rounds * (MOST if cell.is_launched_by_the_host else 1)):
            said = {side.name: ask(side) for side in self._sides[:: -1 if self._turn % 2 else 1]}
            if done > rounds and time.monotonic() >= self._end:
                break  # with the rounds that were asked for; the last one may have been cut off
            self._stop_at([said[side.name] for side in self._sides])
            for name, one in said.items():
                figures[name].append(one)
            self._turn += 1
            counted = self._quiet(figures) if cell.is_launched_by_the_host else {}
            if done >= rounds and min(map(len, counted.values()), default=rounds) >= rounds:
                break
        old, new = ([one[figure] for one in figures[side.name]] for side in self._sides)
        beside: Row = {"pace": {name: [one["pace"] for one in found] for name, found in figures.items()}}
        if counted and all(counted.values()):
            return joined(cell, old, new, [counted["old"], counted["new"]]) | beside | {"counted": counted}
        return joined(cell, old, new) | beside

    def _quiet(self, figures: dict[str, list[Row]]) -> dict[str, list[int]]:
        """The rounds of each side whose host was as quick as it is in this run."""
        paces = {name: [one["pace"] for one in found] for name, found in figures.items()}
        self._quickest = min(self._quickest, *paces["old"], *paces["new"])
        return {name: quiet(found, self._quickest) for name, found in paces.items()}

    def _both(self, order: Row) -> list[Row]:
        for side in self._sides:
            side.tell(order)
        return [side.hear(self._end) for side in self._sides]

    def _stop_at(self, answers: list[Row]) -> None:
        reasons = [f"{side.name}: {said['error']}" for side, said in zip(self._sides, answers) if "error" in said]
        if reasons:
            raise Failed("; ".join(reasons))


class Failed(Exception):
    """Why a cell has no figures."""


def widths(cell: Cell) -> list[int]:
    """Channels of a network's levels: those of `benchmarks.network`, or as many from narrower ones."""
    return [cell.channels * width // network.CHANNELS[0] for width in network.CHANNELS]


def scenes(cells: list[Cell], device: str, folder: Path) -> dict[str, Path | str]:
    """The files of the cells' coordinates, (N, 4) int32; for a case that cannot be made, the reason."""
    found: dict[str, Path | str] = {}
    for case in dict.fromkeys(cell.case for cell in cells):
        found[case] = cases.missing(case) or folder / f"{case}.npy"
        if isinstance(found[case], Path):
            np.save(folder / f"{case}.npy", cases.coordinates(case, device).cpu().numpy())
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.revisions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path, required=True, help="checkout of the older revision")
    parser.add_argument("--new", type=Path, default=ROOT, help="checkout of the newer one; default: this")
    parser.add_argument("--out", type=Path, required=True, help="results file")
    parser.add_argument("--cells", nargs="*", default=[], help="words that cells' names hold, or whole names")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side a cell")
    parser.add_argument("--repeat", type=float, default=0.3, help="seconds of repeats in a turn")
    parser.add_argument("--seconds", type=float, default=460, help="when all ends, finished or not")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    end, cells, rows = time.monotonic() + args.seconds, chosen(args.cells), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sides = Side("old", args.old, place / "old"), Side("new", args.new, place / "new")
        head = {"revisions": {side.name: side.facts() for side in sides}, "rounds": args.rounds, "repeat": args.repeat}
        match = Match(sides, args.device, end, args.rounds, args.repeat)
        try:
            match.check()
            here = machine(args.device)
            files = scenes(cells, args.device, place)
            for cell in cells:
                file = files[cell.case]
                if isinstance(file, str) or time.monotonic() > end:
                    row = {"cell": cell.name, **cell._asdict(), "reason": file if isinstance(file, str) else "no time"}
                else:
                    row = match.measure(cell, file)
                rows.append(row)
                print(sentence(row), flush=True)
                write(args.out, here, rows, version="revisions", **head)
        finally:
            for side in sides:
                side.stop()
    print(summary(rows))


if __name__ == "__main__":
    main()
