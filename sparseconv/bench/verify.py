"""The numbers that the README states, measured anew: ``claims.json`` names each with its job, figure and tolerance.

A claim has its ``text``; ``stated``, as it stands in the README, and ``figure``, that in its ``unit``; ``measure``
(implementation, case, channels, dtype, device, quantity); ``tolerance``, the share by which what is measured may be
worse. A claim about a card names the ``card`` and the ``record``, the committed file that it was taken from: without
that card the claim is held against its record. ``best other`` is the fastest of the peers that can be imported. A claim
that is ``derived`` is the ``least`` or the ``most`` of its cells' quotients, theirs over ours, and follows from them.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sparseconv.bench import cases, measure, report, runner, selection, stated
from sparseconv.bench.implementations import registry
from sparseconv.bench.measure import Job

Claim = dict[str, Any]
CLAIMS = report.HERE / "claims.json"
KEYS = {"name", "text", "stated", "figure", "unit", "measure", "tolerance"}
#: quantities that are either right or wrong
EXACT = ("voxels", "parameters")


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


def verify(names: Iterable[str], device: str | None, console: Console, file: Path = CLAIMS) -> int:
    """Measure each claim that can be measured here, hold the others against their record; 0 if all hold, 1 at the
    first that does not."""
    wanted, known = set(names), claims(file)
    unknown = wanted - {claim["name"] for claim in known}
    if unknown:
        console.print(f"[red]no claim[/] {', '.join(sorted(unknown))}; there are {', '.join(c['name'] for c in known)}")
        return 1
    counts = {"measured": 0, "recorded": 0, "not checked": 0}
    with tempfile.TemporaryDirectory() as folder:
        for claim in known:
            asked_device = claim["measure"]["device"]
            if (wanted and claim["name"] not in wanted) or (device and asked_device != device):
                continue
            how, value, reason = found(claim, Path(folder))
            unit = f" {claim['unit']}" if claim["unit"] else ""
            if value is None:
                console.print(f"[yellow]not checked[/] {claim['text']}: {reason}", highlight=False)
            elif not holds(claim, value, how):
                console.print(
                    f"[red]does not hold[/] {claim['text']}: {how} {value:.5g}{unit}, stated {claim['stated']} with a "
                    f"tolerance of {claim['tolerance']:.0%}",
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


def holds(claim: Claim, value: float, how: str = "measured") -> bool:
    """Whether a value is as good as the claim says: a measured one within the tolerance, a recorded one when rounded.

    >>> claim = {"stated": "10.0", "figure": 10.0, "tolerance": 0.1, "measure": {"quantity": "step"}}
    >>> holds(claim, 10.9), holds(claim, 11.1), holds(claim, 10.02, "recorded"), holds(claim, 10.9, "recorded")
    (True, False, True, False)
    """
    quantity = claim["measure"]["quantity"]
    if how == "recorded" or quantity in EXACT:
        return stated.rounds_to(value, claim["stated"])
    if quantity.startswith("dice"):
        return abs(value - claim["figure"]) <= claim["figure"] * claim["tolerance"]
    return value <= claim["figure"] * (1 + claim["tolerance"])


def found(claim: Claim, caches: Path) -> tuple[str, float | None, str]:
    """How a claim's value was found, ``measured`` or ``recorded``; the value, or None; why there is none."""
    asked = claim["measure"]
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    why = "" if asked["device"] == "cpu" else f"no card here is an {claim.get('card')}"
    if not claim.get("derived") and (asked["device"] == "cpu" or here == claim.get("card")):
        value, why = measured(asked, caches)
        if value is not None:
            return "measured", value, ""
    if claim.get("record") is None:
        return "measured", None, why
    value = stated.recorded(claim)
    there = (report.RESULTS / claim["record"]).is_file()
    why += f"; {claim['record']} has no such figure" if there else f"; {claim['record']} is in the repository"
    return "recorded", value, why


def measured(asked: dict[str, Any], caches: Path) -> tuple[float | None, str]:
    """A figure measured now, or None and why."""
    name, quantity = asked["implementation"], asked["quantity"]
    if name == "demo":
        return _demo(quantity)
    reason = cases.missing(asked["case"])
    if reason is not None:
        return None, reason
    if quantity == "voxels":
        return float(len(cases.coordinates(asked["case"]))), ""
    if name.startswith("unet:"):
        return _network(name, asked, caches)
    if name == "best other":
        peers = [k for k, kind in registry().items() if "sparseconv" not in k and k != "dense conv3d" and kind.needs]
        several = [measured({**asked, "implementation": k}, caches)[0] for k in peers if runner.absent(k) is None]
        values = [value for value in several if value is not None]
        return (min(values), "") if values else (None, "no peer is installed")
    # whatever else is claimed about this layer, or about its map, comes of the same process
    channels: int = asked["channels"]
    wanted: tuple[str, ...] = (measure.FORWARD, measure.STEP, measure.MEMORY)
    if quantity in report.MAPS:
        channels, wanted = min(channels, selection.MAP_CHANNELS), (measure.MAP, measure.CAPTURED_MAP)
    job = Job(name, asked["case"], channels, asked["dtype"], False, wanted, asked["device"])
    if quantity in ("cold_s", "second_s"):
        row = _cold(job)
        return row.get(quantity), row.get("reason", "")
    row = _layer(job, caches)
    return stated.value(row, quantity), row.get("reason") or (row.get(quantity) or {}).get("reason") or ""


@functools.lru_cache
def _cold(job: Job) -> dict[str, Any]:
    return runner.cold_starts(job)


@functools.lru_cache
def _layer(job: Job, caches: Path) -> dict[str, Any]:
    return runner.run_all([job], lambda row: None, caches)[0]


def _network(name: str, asked: dict[str, Any], caches: Path) -> tuple[float | None, str]:
    if not report.RESULTS.is_dir():
        return None, "whole networks are measured in the repository"
    job = Job(name, asked["case"], asked["channels"], asked["dtype"], False, (measure.STEP,), asked["device"])
    row = _network_row(job, caches)
    return stated.value(row, asked["quantity"]), row.get("reason", "")


@functools.lru_cache
def _network_row(job: Job, caches: Path) -> dict[str, Any]:
    return runner.run_all([job], lambda row: None, caches, None, "benchmarks.worker")[0]


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
