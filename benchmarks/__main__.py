"""``python -m benchmarks gpu | cpu | network | verify | plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import measure, report, runner, selection
from benchmarks.facts import facts
from benchmarks.measure import Job
from benchmarks.timing import ceilings, clock_of

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = report.wide_console()

Cases = Annotated[list[str] | None, typer.Option("--case", help="Case by name (benchmarks/cases.py); repeatable.")]
Channels = Annotated[list[int] | None, typer.Option("--channels", help="Channels in and out; repeatable.")]
Names = Annotated[
    list[str] | None, typer.Option("--backend", help="Implementation by name, 'sparseconv' or a peer; repeatable.")
]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="fp16, bf16, tf32, fp32, fp64; repeatable.")]
Quantities = Annotated[list[str] | None, typer.Option("--quantity", help=f"Of {', '.join(measure.QUANTITIES)}.")]
Compare = Annotated[bool, typer.Option("--compare", help="Measure every peer that can be imported, too.")]
Seconds = Annotated[float, typer.Option(help="Seconds of repeats a figure.")]
Out = Annotated[Path | None, typer.Option("--json", help="Results file to write.")]
Picture = Annotated[bool, typer.Option("--plot", help="Draw the results, too.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few cases, a minute or three.")]
Shuffled = Annotated[bool, typer.Option(help="Measure shuffled rows beside the given order.")]


@app.command()
def gpu(
    case: Cases = None,
    channels: Channels = None,
    backend: Names = None,
    dtype: Dtypes = None,
    quantity: Quantities = None,
    compare: Compare = False,
    seconds: Seconds = 0.6,
    shuffled: Shuffled = True,
    scaling: Annotated[bool, typer.Option("--scaling", help="Lines along N, C and occupancy, too.")] = False,
    cold: Annotated[bool, typer.Option(help="First gradients of a fresh process, and of a second.")] = True,
    processes: Annotated[int, typer.Option(help="Processes that compile at once, before anything is timed.")] = 8,
    caches: Annotated[Path | None, typer.Option(help="Folder of compiled kernels; default: one that goes.")] = None,
    out: Out = None,
    plot: Picture = False,
    quick: Quick = False,
    device: Annotated[str, typer.Option(help="'cpu' runs the same flow without a card.")] = "cuda",
) -> None:
    """The first table of the targets on a card, beside its 'must' and 'goal'."""
    grid = selection.GPU_QUICK if quick else selection.first_table()
    if scaling:
        grid = (*grid, *selection.SCALING)
    grid = selection.chosen(grid, case or [], channels or [])
    names = selection.named(backend or [], compare, device)
    kinds = dtype or (["fp16"] if quick else ["fp16", "bf16", "tf32", "fp32"])
    jobs = selection.layer_jobs(grid, names, kinds, device, seconds, shuffled, quantity or measure.QUANTITIES)
    first = [Job(name, "shell_256", 64, kinds[0], False, (measure.COLD,), device, seconds) for name in names]
    rows = _measured(jobs, first if cold else [], device, processes, caches, out or _file("gpu", device, quick), plot)
    missed = report.unmet(rows) if device == "cuda" else []
    for sentence in missed:
        console.print(f"[red]not met[/] {sentence}", highlight=False)
    console.print(f"{len(missed)} of the musts measured are not met", highlight=False)


@app.command()
def cpu(
    case: Cases = None,
    channels: Channels = None,
    backend: Names = None,
    dtype: Dtypes = None,
    quantity: Quantities = None,
    compare: Annotated[bool, typer.Option(help="Measure every peer that can be imported, too.")] = True,
    seconds: Seconds = 0.6,
    shuffled: Shuffled = False,
    out: Out = None,
    plot: Annotated[bool, typer.Option(help="Draw the results, too.")] = True,
    quick: Quick = False,
) -> None:
    """Layers on this machine's CPU, beside spconv's CPU wheel and dense convolution."""
    grid = selection.chosen(selection.CPU_QUICK if quick else selection.CPU_CASES, case or [], channels or [])
    names = selection.named(backend or [], compare and not backend, "cpu")
    wanted = quantity or [measure.MAP, measure.FORWARD, measure.STEP, measure.MEMORY]
    seconds = min(seconds, 0.3) if quick else seconds
    jobs = selection.layer_jobs(grid, names, dtype or ["fp32"], "cpu", seconds, shuffled, wanted)
    budget = selection.QUICK_BUDGET if quick else None
    _measured(jobs, [], "cpu", 0, None, out or _file("cpu", "cpu", quick), plot, budget)


@app.command()
def network(
    case: Cases = None,
    backend: Names = None,
    seconds: Seconds = 0.6,
    out: Out = None,
    device: Annotated[str, typer.Option(help="'cpu' runs the same flow without a card.")] = "cuda",
    caches: Annotated[Path | None, typer.Option(help="Folder of compiled kernels; default: one that goes.")] = None,
) -> None:
    """A U-Net of 7.18 M parameters on four real scans: step, inference, and inference at fixed geometry."""
    jobs = selection.network_jobs(case or [], backend or ["sparseconv", "spconv"], device, seconds)
    with runner.compiled_kernels(caches) as folder:
        rows = _run(jobs, folder)
    report.write(out or _file("network", device, False), facts(device), rows)
    console.print(network_table(rows))


@app.command()
def verify(
    claim: Annotated[list[str] | None, typer.Option(help="Only the claims of these names; repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="'cpu' or 'cuda'; default: both, where there are.")] = None,
) -> None:
    """Measure every number that the README states anew; fail on the first that does not hold."""
    from benchmarks.verify import verify as check

    raise typer.Exit(check(claim or [], device, console))


@app.command()
def plot(
    files: Annotated[list[Path] | None, typer.Argument(help="Results files; default: all that are committed.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where pictures go; default: docs/pictures.")] = None,
) -> None:
    """Draw the results files: speed beside each peer, roofline, scaling, memory."""
    from benchmarks import plots

    mine = files or [file for file in sorted(report.RESULTS.glob("*.json")) if report.is_results(file)]
    for picture in plots.draw(mine, folder or plots.PICTURES):
        console.print(f"wrote {picture}", highlight=False)


def _measured(
    jobs: Sequence[Job],
    first: Sequence[Job],
    device: str,
    processes: int,
    caches: Path | None,
    out: Path,
    plot: bool,
    budget: float | None = None,
) -> list[dict[str, Any]]:
    """Cold starts, then everything compiled side by side, then the figures; printed, written, drawn."""
    machine = facts(device)
    starts = [runner.cold_starts(job) for job in first]
    for row in starts:
        said = row.get("reason") or f"{row.get('cold_s', 0):.1f} s, a second process {row.get('second_s') or 0:.1f} s"
        console.print(f"first gradients of {row['implementation']}, empty caches: {said}", highlight=False)
    with runner.compiled_kernels(caches) as folder:
        if processes > 1:
            mine = [job for job in jobs if job.implementation.startswith("sparseconv")]
            with console.status(f"compiling in {processes} processes"):
                compiled = runner.compile_all(mine, processes, folder)
            longest = max((row.get("first_s", 0) for row in compiled), default=0)
            console.print(f"compiled {len(compiled)} shapes, the longest in {longest:.1f} s", highlight=False)
        peak = ceilings(clock_of(device))
        shown = ", ".join(f"{k} {v:.3g} {'TB/s' if k == 'copy' else 'TFLOP/s'}" for k, v in peak.items())
        console.print(f"ceilings: {shown}", highlight=False)
        # kept as they come, so that what is done survives a time limit
        rows: list[dict[str, Any]] = []

        def keep(row: dict[str, Any]) -> None:
            rows.append(report.with_rates(row, peak))
            report.write(out, machine, [*rows, *starts], ceilings=peak)

        try:
            _run(jobs, folder, keep, budget)
        except KeyboardInterrupt:
            console.print("[yellow]stopped[/]: what was done until here follows")
    aims = ", (must / goal)" if device == "cuda" else ""
    console.print(report.layer_table(report.joined(rows), f"{device}: milliseconds{aims}"))
    for sentence in report.reasons(report.joined(rows)):
        console.print(f"[dim]{sentence}[/]", highlight=False)
    console.print(f"wrote {out}", highlight=False)
    if plot:
        from benchmarks import plots

        for picture in plots.draw([out], out.parent if out.parent != report.RESULTS else plots.PICTURES):
            console.print(f"wrote {picture}", highlight=False)
    return rows


def _run(jobs: Sequence[Job], caches: Path, keep: Any = None, budget: float | None = None) -> list[dict[str, Any]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(jobs))

        def done(row: dict[str, Any]) -> None:
            name = f"{row['implementation']}: {row['case']}, C {row['channels']}, {row['dtype']}"
            progress.update(task, advance=1, description=name)
            if row["status"] in ("failed", "crashed", "wrong"):
                progress.console.print(f"[red]{row['status']}[/] {name}: {row['reason']}", highlight=False)
            if keep is not None:
                keep(row)

        return runner.run_all(jobs, done, caches, budget)


def network_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line a network and case, against the second table of the targets."""
    aims = {cell["case"]: cell for cell in report.targets()["networks"]}
    table = Table(title="U-Net, one scan: milliseconds, (must / goal)", title_justify="left")
    for head in ("network", "case", "voxels", "step", "inference", "fixed", "replay", "step MiB", "first step s"):
        table.add_column(head, justify="left" if head in ("network", "case") else "right")
    for row in rows:
        name = [row["implementation"].partition(":")[2], row["case"]]
        if row["status"] != "measured":
            table.add_row(*name, "", f"[dim]{row['status']}: {row.get('reason', '')}[/]", *[""] * 5)
            continue
        aim = aims.get(row["case"], {}) if name[0] == "sparseconv" and row["device"] == "cuda" else {}
        cells = []
        for quantity in ("step", "inference", "fixed", "replay"):
            found = row.get(quantity, {})
            cells.append(found.get("reason") or report.judged(found.get("median"), aim.get(quantity)))
        peak = row["memory"]["peak_mib"]
        cells.append("-" if peak is None else report.judged(peak, aim.get("memory"), whole=True))
        table.add_row(*name, f"{row['voxels']:,}", *cells, f"{row['first_s']:.1f}")
    return table


def _file(what: str, device: str, quick: bool) -> Path:
    import os

    card = "cpu"
    if device == "cuda":
        import torch

        card = torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "_")
    name = card if what == "cpu" else f"{card}_{what}"
    given = os.environ.get("SPARSECONV_BENCH_RESULTS")
    return (Path(given) if given else report.RESULTS) / f"{name}{'_quick' if quick else ''}.json"


if __name__ == "__main__":
    app()
