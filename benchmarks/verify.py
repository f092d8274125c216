"""The numbers that the README states, measured anew: ``claims.json`` names each with its job, figure and tolerance.

A claim has its ``text`` as stated; ``measure`` (implementation, case, channels, dtype, device, quantity); ``figure`` in
its ``unit``; ``tolerance``, the share by which the measured value may be worse; where it is a ratio (theirs / ours),
``than``, the other implementation; ``higher`` where more is better.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import measure, report, runner
from benchmarks.measure import Job

CLAIMS = report.HERE / "claims.json"
KEYS = {"name", "text", "measure", "figure", "unit", "tolerance"}


def claims(file: Path = CLAIMS) -> list[dict[str, Any]]:
    """The claims of a file. Raises ValueError where one lacks a key, or two have one name."""
    found = json.loads(file.read_text())["claims"]
    for claim in found:
        if not set(claim) >= KEYS:
            raise ValueError(f"claim {claim.get('name')!r} lacks {', '.join(sorted(KEYS - set(claim)))}")
    names = [claim["name"] for claim in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two claims have one name among {names}")
    return found


def verify(names: list[str], device: str | None, console: Console, file: Path = CLAIMS) -> int:
    """Measure each claim that can be checked here; 0 if all hold, 1 at the first that does not."""
    import torch

    here = {device} if device else {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    known = claims(file)
    unknown = set(names) - {claim["name"] for claim in known}
    if unknown:
        console.print(f"[red]no claim[/] {', '.join(sorted(unknown))}; there are {', '.join(c['name'] for c in known)}")
        return 1
    passed = skipped = 0
    with tempfile.TemporaryDirectory() as folder:
        for claim in known:
            if names and claim["name"] not in names:
                continue
            if claim["measure"]["device"] not in here:
                skipped += 1
                continue
            value, reason = measured(claim, Path(folder))
            if value is None:
                console.print(f"[yellow]not checked[/] {claim['text']}: {reason}", highlight=False)
                skipped += 1
            elif not holds(claim, value):
                console.print(
                    f"[red]does not hold[/] {claim['text']}: measured {value:.4g} {claim['unit']}, stated "
                    f"{claim['figure']:g} with a tolerance of {claim['tolerance']:.0%}",
                    highlight=False,
                )
                return 1
            else:
                console.print(f"[green]holds[/] {claim['text']}: {value:.4g} {claim['unit']}", highlight=False)
                passed += 1
    console.print(f"{passed} claims hold, {skipped} could not be checked here", highlight=False)
    return 0


def holds(claim: dict[str, Any], value: float) -> bool:
    """Whether a measured value is as good as the claim says, within its tolerance.

    >>> holds({"figure": 10.0, "tolerance": 0.1}, 10.9), holds({"figure": 2.0, "tolerance": 0.1, "higher": True}, 1.7)
    (True, False)
    """
    if claim.get("higher") or "than" in claim:
        return value >= claim["figure"] * (1 - claim["tolerance"])
    return value <= claim["figure"] * (1 + claim["tolerance"])


def measured(claim: dict[str, Any], caches: Path) -> tuple[float | None, str]:
    """The claim's value now, or None and why."""
    ours, reason = _value(claim["measure"], caches)
    if ours is None or "than" not in claim:
        return ours, reason
    theirs, reason = _value({**claim["measure"], "implementation": claim["than"]}, caches)
    return (None, reason) if theirs is None else (theirs / ours, "")


def _value(asked: dict[str, Any], caches: Path) -> tuple[float | None, str]:
    quantity = asked["quantity"]
    network = asked["implementation"].startswith("unet:")
    wanted = (measure.STEP,) if network else (quantity,)
    job = Job(asked["implementation"], asked["case"], asked["channels"], asked["dtype"], False, wanted, asked["device"])
    if quantity in ("cold_s", "second_s"):
        row = runner.cold_starts(job)
        return row.get(quantity), row.get("reason", "")
    row = runner.run_all([job], lambda row: None, caches)[0]
    found = row.get(quantity) or {}
    value = found.get("peak_mib") if quantity == measure.MEMORY else found.get("median")
    return value, row.get("reason") or found.get("reason") or ""
