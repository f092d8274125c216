"""The machine of a results file, and whether another one is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import ROOT
from sparseconv.info import facts, output

#: facts that are another at each look
CHANGING = ("when", "load", "clocks.sm", "clocks.mem", "temperature.gpu")


def machine(device: str) -> dict[str, Any]:
    """Facts about this machine for a device ``"cpu"`` or ``"cuda"``, and the repository's commit."""
    return facts(device) | {"revision": revision(ROOT)}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The facts in which two machines differ, but for those that change while one works.

    >>> differing({"cpu": "a", "load": 0.1, "card": {"name": "x"}}, {"cpu": "a", "load": 3.0, "card": {"name": "y"}})
    ['name']
    """
    flat = [{k: v for part in (found, found.get("card", {})) for k, v in part.items()} for found in (one, other)]
    names = dict.fromkeys(name for found in flat for name in found if name != "card" and name not in CHANGING)
    return [name for name in names if flat[0].get(name) != flat[1].get(name)]


def revision(folder: Path) -> str | None:
    """The commit of a folder's repository, with "-dirty" behind it where files differ from it; None without one."""
    return output("git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*")
