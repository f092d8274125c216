"""The ``bench`` command: layers measured on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sparseconv.bench.measure import Job

CaseNames = Annotated[
    list[str] | None,
    typer.Option("--case", help="shell_64, uniform_10_64, plane_256, rings_64_1024, brain_mni152_2mm, ..; repeatable."),
]
Channels = Annotated[list[int] | None, typer.Option("--channels", help="Channels in and out; repeatable.", min=1)]
Names = Annotated[list[str] | None, typer.Option("--backend", help="Implementation by name; repeatable.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="fp16, bf16, tf32, fp32, fp64; repeatable.")]
Quantities = Annotated[
    list[str] | None,
    typer.Option("--quantity", help="map, forward, input_grad, weight_grad, step, memory; repeatable."),
]
Seconds = Annotated[float, typer.Option(help="Seconds of repeats per figure.", min=0)]
Out = Annotated[Path | None, typer.Option("--json", help="Results file to write.", dir_okay=False, writable=True)]
Shuffled = Annotated[bool, typer.Option(help="Also measure with shuffled rows.")]

#: cases and channels without a choice
HERE = {
    "cpu": {"shell_64": (16, 64), "rings_64_1024": (32,), "uniform_10_64": (32,), "brain_mni152_2mm": (16,)},
    "cuda": {"shell_64": (64, 256), "shell_256": (64,), "rings_128_4096": (32,), "brain_mni152_2mm": (64,)},
}


def bench(
    case: CaseNames = None,
    backend: Names = None,
    dtype: Dtypes = None,
    channels: Channels = None,
    quantity: Quantities = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also measure every backend by name.")] = False,
    shuffled: Shuffled = False,
    seconds: Seconds = 0.3,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto, which uses a GPU if there is one.")] = "auto",
    out: Out = None,
) -> None:
    """Benchmark layers on this machine: kernel map, forward, each gradient, a training step, and its memory.

    Values are checked first. By default a few synthetic scenes are measured, and a brain if nilearn is installed.
    """
    import torch

    from sparseconv.bench import measure, report
    from sparseconv.bench.implementations import IMPLEMENTATIONS
    from sparseconv.bench.timing import DTYPES
    from sparseconv.info import facts

    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if where not in ("cpu", "cuda") or (where == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device must be cpu, cuda (if PyTorch sees a GPU) or auto; got {device!r}")
    check("--backend", backend, IMPLEMENTATIONS)
    check("--dtype", dtype, DTYPES)
    check("--quantity", quantity, measure.QUANTITIES)
    everyone = [name for name, kind in IMPLEMENTATIONS.items() if compare and where in kind.devices]
    names = dict.fromkeys([*(backend or ["sparseconv"]), *everyone])
    known = HERE[where]
    console, machine, rows = report.wide_console(), facts(where), []

    def jobs() -> Iterator[Job]:
        kinds, orders = dtype or ["fp32" if where == "cpu" else "fp16"], (False, True) if shuffled else (False,)
        for name, scene, kind, order in product(names, case or known, kinds, orders):
            for c in channels or known.get(scene, (64,)):
                asked = tuple(quantity or measure.QUANTITIES)
                yield measure.Job(name, scene, c, kind, order, asked, where, seconds)

    try:
        for job in jobs():
            with console.status(f"{job.implementation}: {job.case}, C {job.channels}, {job.dtype}"):
                rows.append(measure.attempt(job))
    except KeyboardInterrupt:
        if not rows:
            console.print("stopped before anything was measured; nothing was written")
            raise typer.Exit(130) from None
        console.print("[yellow]stopped[/]: these are the results so far")
    console.print(report.layer_table(rows, f"{machine.get('card', {}).get('name') or machine['cpu']}: milliseconds"))
    for sentence in report.reasons(rows):
        console.print(f"[dim]{sentence}[/]", highlight=False)
    if out is not None:
        report.write(out, machine, rows)
        console.print(f"wrote {out}", highlight=False)


def check(option: str, given: list[str] | None, known: Iterable[str]) -> None:
    """Raise typer.BadParameter for a name that is not among ``known``."""
    names = list(known)
    for name in given or []:
        if name not in names:
            raise typer.BadParameter(f"{option} must be one of {', '.join(names)}; got {name!r}")
