"""The options of the tables' commands, beside those of ``sparseconv bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.layers import report
from benchmarks.layers.machine import differing, machine

Compare = Annotated[bool, typer.Option("--compare", help="Measure every peer that can be imported, too.")]
Rounds = Annotated[
    int, typer.Option(min=1, help="Measure up to so often while the CPU is slow; the least of each time counts.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the results file: measure what a run that was stopped left out.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A few cases, a minute or three.")]
Scaling = Annotated[bool, typer.Option("--scaling", help="Lines along voxels, channels, taps and occupancy, too.")]


def begun_in(file: Path | None, device: str) -> dict[str, Any] | None:
    """What a run that was stopped has written, to go on with; None where there is no such file yet.

    Raises typer.BadParameter where it is of another machine, of other versions, or no results file.
    """
    if file is None:
        raise typer.BadParameter("--resume goes on with a results file: name it by --json")
    if not file.exists():
        return None
    try:
        found = report.read(file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    others = differing(found["machine"], machine(device))
    if others:
        raise typer.BadParameter(
            f"{file} was begun on a machine with another {', '.join(others)}: go on there, or name another file"
        )
    return found
