"""The numbers that the README states, measured anew: ``claims.json`` names each with its job, figure and tolerance.

A claim has its ``text``; ``stated``, as it stands in the README, and ``figure``, that in its ``unit``; ``measure``
(implementation, case, channels, dtype, device, quantity); ``tolerance``, the share by which ours may now be worse, or
a peer better. Times that are later than stated, ours and peers', are measured again at the end, and each counts where
it was least: what else a host has to do, for some seconds, adds to times and takes nothing off them. A claim about a
GPU names its ``card`` and the ``record``, the committed file that it was taken from: without that GPU the claim is
compared with its record. ``best other`` is the fastest of the peers that can be imported; where all are slower than
stated, the one that was the fastest may not be installed. A claim that is ``derived`` is the ``least`` or the
``most`` of its cells' quotients, theirs over ours, and follows from them.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.claims import stated
from benchmarks.layers import report, runner, selection, session
from benchmarks.layers.machine import machine
from benchmarks.layers.measure import CAPTURED_MAP
from benchmarks.layers.peers import PEERS
from benchmarks.layers.report import ceilings
from benchmarks.worker import PREFIX
from sparseconv.bench import cases
from sparseconv.bench.measure import FORWARD, MAP, MEMORY, STEP, Job
from sparseconv.bench.timing import clock_of

Claim = dict[str, Any]
CLAIMS = Path(__file__).with_name("claims.json")
KEYS = {"name", "text", "stated", "figure", "unit", "measure", "tolerance"}
#: quantities that are either right or wrong
EXACT = ("voxels", "parameters")
#: what figures of ours are found with; any other implementation is a peer
OURS = ("sparseconv", f"{PREFIX}sparseconv", "demo")
#: seconds of repeats a figure; how often a time is measured that is later than stated by this share
SECONDS, TIMES, LATE = 0.3, 3, 0.15


def claims(file: Path = CLAIMS) -> list[Claim]:
    """The claims of a file. Raises ValueError where one lacks a key, or two have one name."""
    found = json.loads(file.read_text())["claims"]
    for claim in found:
        if not set(claim) >= KEYS:
            raise ValueError(f"claim {claim.get('name')!r} lacks {', '.join(sorted(KEYS - set(claim)))}")
    names = [claim["name"] for claim in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two claims have one name among {names}")
    return found


def verify(
    names: Iterable[str], device: str | None, console: Console, file: Path = CLAIMS, out: Path | None = None
) -> int:
    """Measure each claim that can be measured here, hold the others against their record; 0 if all hold, 1 at the
    first that does not. What was measured of layers and networks is kept in the results file ``out``."""
    wanted, known = set(names), claims(file)
    unknown = wanted - {claim["name"] for claim in known}
    if unknown:
        console.print(f"[red]no claim[/] {', '.join(sorted(unknown))}; there are {', '.join(c['name'] for c in known)}")
        return 1
    asked = [
        claim
        for claim in known
        if (not wanted or claim["name"] in wanted) and (not device or claim["measure"]["device"] == device)
    ]
    counts = {"measured": 0, "recorded": 0, "not checked": 0}
    with Measurements(asked, console, out) as rows:
        for _ in range(TIMES - 1):
            late = [claim for claim in asked if _is_late(claim, rows)]
            if late:
                console.print(f"later than stated, measured again: {len(late)}", highlight=False)
            rows.renew(late)
        for claim in asked:
            how, value, reason = found(claim, rows)
            unit = f" {claim['unit']}" if claim["unit"] else ""
            if value is None:
                console.print(f"[yellow]not checked[/] {claim['text']}: {reason}", highlight=False)
            elif not holds(claim, value, how):
                console.print(
                    f"[red]does not hold[/] {claim['text']}: {reason or f'{how} {value:.5g}{unit}'}, stated "
                    f"{claim['stated']} with a tolerance of {claim['tolerance']:.0%}",
                    highlight=False,
                )
                return 1
            else:
                console.print(
                    f"[green]holds[/] {claim['text']}: stated {claim['stated']}, {how} {value:.5g}{unit}",
                    highlight=False,
                )
            counts["not checked" if value is None else how] += 1
    console.print(
        f"{counts['measured']} claims measured anew, {counts['recorded']} held against their record, "
        f"{counts['not checked']} not checked",
        highlight=False,
    )
    return 0


def _is_late(claim: Claim, rows: Mapping[Job, runner.Row]) -> bool:
    """Whether a time is to be measured again: of networks, which take ten times as long, one that does not hold."""
    if claim["unit"] != "ms" or not _is_measured_here(claim):
        return False
    value, _ = measured(claim["measure"], rows)
    share = claim["tolerance"]
    if not claim["measure"]["implementation"].startswith(PREFIX):
        share = min(LATE, share)
    return value is not None and value > claim["figure"] * (1 + share)


def holds(claim: Claim, value: float, how: str = "measured") -> bool:
    """Whether our value is as good as the claim says, or a peer's no better: a measured one within the tolerance, a
    recorded one when rounded.

    >>> ours = {"implementation": "sparseconv", "quantity": "step"}
    >>> claim = {"stated": "10.0", "figure": 10.0, "tolerance": 0.1, "measure": ours}
    >>> holds(claim, 10.9), holds(claim, 11.1), holds(claim, 10.02, "recorded"), holds(claim, 10.9, "recorded")
    (True, False, True, False)
    >>> claim["measure"] = ours | {"implementation": "best other"}
    >>> holds(claim, 13.0), holds(claim, 9.1), holds(claim, 9.0)
    (True, True, False)
    """
    asked, most = claim["measure"], 1 + claim["tolerance"]
    quantity = asked["quantity"]
    if how == "recorded" or quantity in EXACT:
        return stated.rounds_to(value, claim["stated"])
    if quantity.startswith("dice"):
        return abs(value - claim["figure"]) <= claim["figure"] * claim["tolerance"]
    return value <= claim["figure"] * most if asked["implementation"] in OURS else value * most >= claim["figure"]


def found(claim: Claim, rows: Mapping[Job, runner.Row]) -> tuple[str, float | None, str]:
    """How a claim's value was found, ``measured`` or ``recorded``; the value, None, or infinity where what should have
    been measured broke; why there is none."""
    asked = claim["measure"]
    why = f"no GPU here is an {claim.get('card')}"
    if _is_measured_here(claim):
        value, why = measured(asked, rows)
        if value is not None:
            return "measured", value, ""
        if asked["implementation"] in OURS and any(rows[job]["status"] != "skipped" for job in jobs_of(asked)):
            return "measured", math.inf, why
    if claim.get("record") is None:
        return "measured", None, why
    value = stated.recorded(claim)
    return "recorded", value, f"{why}; {claim['record']} has no such figure"


def _is_measured_here(claim: Claim) -> bool:
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return not claim.get("derived") and (claim["measure"]["device"] == "cpu" or here == claim.get("card"))


class Measurements(session.Kept):
    """A row for every layer and network that the claims need and that can be measured here, kept in ``out``."""

    def __init__(self, asked: Sequence[Claim], console: Console, out: Path | None = None) -> None:
        self._console = console
        self._jobs = {job for claim in asked if _is_measured_here(claim) for job in jobs_of(claim["measure"])}
        self._cards = [job for job in self._jobs if job.device == "cuda" and not _is_network(job)]
        device = "cuda" if self._cards else "cpu"
        super().__init__(out, *((machine(device), ceilings(clock_of(device))) if out is not None else ({}, {})))

    def __enter__(self) -> Measurements:
        self._folder = tempfile.TemporaryDirectory()
        self._caches = Path(self._folder.name)
        if self._cards:
            session.compile_ours(_in_order(self._cards), self._console, os.cpu_count() or 1, self._caches)
        self._measure(self._jobs)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def renew(self, late: Iterable[Claim]) -> None:
        """Measure what these claims are about once more, and keep of each time the least."""
        self._measure({job for claim in late for job in jobs_of(claim["measure"])})

    def _measure(self, jobs: Iterable[Job]) -> None:
        if ordered := _in_order(jobs):
            session.run(ordered, self._console, self._caches, self.keep)


def _is_network(job: Job) -> bool:
    return job.implementation.startswith(PREFIX)


def _in_order(jobs: Iterable[Job]) -> list[Job]:
    return sorted(jobs, key=lambda job: (job.implementation, job.dtype, job.case, job.channels, job.quantities))


def jobs_of(asked: dict[str, Any]) -> list[Job]:
    """The layers and networks that a figure is found with: of ``best other`` one for each peer that is installed."""
    name, quantity = asked["implementation"], asked["quantity"]
    if name == "demo" or quantity in ("voxels", "cold_s", "second_s") or cases.missing(asked["case"]) is not None:
        return []
    # whatever else is claimed about this layer, or about its map, comes of the same process
    channels: int = asked["channels"]
    wanted: tuple[str, ...] = (FORWARD, STEP, MEMORY)
    if quantity in report.MAPS:
        channels, wanted = min(channels, selection.MAP_CHANNELS), (MAP, CAPTURED_MAP)
    several = [k.name for k in PEERS if runner.absent(k.name) is None] if name == "best other" else [name]
    return [Job(k, asked["case"], channels, asked["dtype"], False, wanted, asked["device"], SECONDS) for k in several]


def measured(asked: dict[str, Any], rows: Mapping[Job, runner.Row]) -> tuple[float | None, str]:
    """A figure of the measured rows, of a first start or of the demonstration, made here; or None and why."""
    name, quantity = asked["implementation"], asked["quantity"]
    if name == "demo":
        return _demo(quantity)
    reason = cases.missing(asked["case"])
    if reason is not None:
        return None, reason
    if quantity == "voxels":
        return float(len(cases.coordinates(asked["case"]))), ""
    if quantity in ("cold_s", "second_s"):
        row = _cold(Job(name, asked["case"], asked["channels"], asked["dtype"], device=asked["device"]))
        return row.get(quantity), row.get("reason", "")
    several = [rows[job] for job in jobs_of(asked)]
    if not several:
        return None, "no peer is installed"
    values = [value for row in several if (value := stated.value(row, quantity)) is not None]
    return (min(values), "") if values else (None, "; ".join(filter(None, (_why(row, quantity) for row in several))))


def _why(row: runner.Row, quantity: str) -> str:
    cell = row.get(quantity)
    return row.get("reason") or (cell.get("reason") if isinstance(cell, dict) else "") or ""


@functools.lru_cache
def _cold(job: Job) -> runner.Row:
    return runner.cold_starts(job)


def _demo(what: str) -> tuple[float | None, str]:
    try:
        return _demonstrated()[what], ""
    except ImportError as error:
        return None, str(error)


@functools.lru_cache
def _demonstrated() -> dict[str, float]:
    """The figures of ``sparseconv demo`` on the CPU, trained anew."""
    from sparseconv.demo.segment import segment_brain

    with tempfile.TemporaryDirectory() as folder:
        log = Console(file=(Path(folder) / "log").open("w"), width=200)
        segment_brain(log, torch.device("cpu"), Path(folder) / "demo.png")
        log.file.close()
        return stated.of_demo((Path(folder) / "log").read_text())
