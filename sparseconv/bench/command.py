"""The ``bench`` command: layers measured on this machine, beside whichever peers can be imported."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

CaseNames = Annotated[
    list[str] | None,
    typer.Option("--case", help="shell_64, uniform_10_64, plane_256, rings_64_1024, brain_mni152_2mm, ..; repeatable."),
]
Channels = Annotated[list[int] | None, typer.Option("--channels", help="Channels in and out; repeatable.")]
Names = Annotated[
    list[str] | None, typer.Option("--backend", help="Implementation by name, 'sparseconv' or a peer; repeatable.")
]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="fp16, bf16, tf32, fp32, fp64; repeatable.")]
Quantities = Annotated[
    list[str] | None,
    typer.Option("--quantity", help="map, forward, input_grad, weight_grad, step, memory; repeatable."),
]
Compare = Annotated[bool, typer.Option("--compare", help="Measure every peer that can be imported, too.")]
Seconds = Annotated[float, typer.Option(help="Seconds of repeats a figure.")]
Rounds = Annotated[
    int, typer.Option(min=1, help="Measure up to so often while the host is slow; the least of each time counts.")
]
Out = Annotated[Path | None, typer.Option("--json", help="Results file to write.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the results file: measure what a run that was stopped left out.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A few cases, a minute or three.")]
Shuffled = Annotated[bool, typer.Option(help="Measure shuffled rows beside the given order.")]
Scaling = Annotated[bool, typer.Option("--scaling", help="Lines along voxels, channels, taps and occupancy, too.")]


def bench(
    case: CaseNames = None,
    backend: Names = None,
    dtype: Dtypes = None,
    channels: Channels = None,
    quantity: Quantities = None,
    compare: Compare = False,
    scaling: Scaling = False,
    shuffled: Shuffled = False,
    seconds: Seconds = 0.3,
    rounds: Rounds = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    out: Out = None,
    resume: Resume = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Folder for pictures of the results.")] = None,
    verify_claims: Annotated[
        bool, typer.Option("--verify-claims", help="Measure the README's numbers anew; fail on the first that is off.")
    ] = False,
) -> None:
    """Measure layers here: values are checked first, then map, forward, each gradient, a step, its memory.

    Without a choice: a few scenes made by rule, and the brain where nilearn is installed.
    """
    from sparseconv.bench import measure, report, selection, session
    from sparseconv.bench.implementations import registry
    from sparseconv.bench.timing import DTYPES
    from sparseconv.bench.verify import verify

    console = report.wide_console()
    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if verify_claims:
        raise typer.Exit(verify([], None if device == "auto" else where, console, out=out))
    if where not in ("cpu", "cuda") or (where == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device must be cpu, cuda (where torch sees a GPU) or auto; got {device!r}")
    for option, given, known in (
        ("--backend", backend, list(registry())),
        ("--dtype", dtype, list(DTYPES)),
        ("--quantity", quantity, list(measure.QUANTITIES)),
    ):
        for name in given or []:
            if name not in known:
                raise typer.BadParameter(f"{option} must be one of {', '.join(known)}; got {name!r}")
    grid = selection.chosen(selection.CPU_QUICK if where == "cpu" else selection.GPU_HERE, case or [], channels or [])
    names = selection.named(backend or [], compare, where)
    kinds = dtype or ["fp32" if where == "cpu" else "fp16"]
    jobs = selection.layer_jobs(grid, names, kinds, where, seconds, shuffled, quantity or measure.QUANTITIES)
    if scaling:
        jobs = selection.with_lines(jobs, names, kinds[0], where, seconds)
    begun = begun_in(out, where) if resume else None
    with tempfile.TemporaryDirectory() as folder:
        kept = out or (Path(folder) / "bench.json" if plot else None)
        processes = 4 if where == "cuda" else 0
        session.measured(jobs, console, kept, processes=processes, pictures=plot, rounds=rounds, begun=begun)


def begun_in(file: Path | None, device: str) -> dict[str, Any] | None:
    """What a run that was stopped has written, to go on with; None where there is no such file yet.

    Raises typer.BadParameter where it is of another machine, of other versions, or no results file.
    """
    from sparseconv.bench import report
    from sparseconv.bench.facts import differing, facts

    if file is None:
        raise typer.BadParameter("--resume goes on with a results file: name it by --json")
    if not file.exists():
        return None
    try:
        found = report.read(file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    others = differing(found["machine"], facts(device))
    if others:
        raise typer.BadParameter(
            f"{file} was begun on a machine with another {', '.join(others)}: go on there, or name another file"
        )
    return found
