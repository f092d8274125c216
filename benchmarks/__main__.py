"""``python -m benchmarks gpu | cpu | network | golden | verify | plot | readme``: the tables that the repository keeps.

Cases, judge, clocks and our implementations are those of ``sparseconv bench``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks import PICTURES, RESULTS
from benchmarks.layers import measure, report, runner, selection, session
from benchmarks.layers.machine import machine as facts
from benchmarks.layers.options import Compare, Quick, Resume, Rounds, Scaling, begun_in
from sparseconv.bench.command import CaseNames, Channels, Dtypes, Names, Out, Quantities, Seconds, Shuffled
from sparseconv.bench.measure import FORWARD, MAP, MEMORY, STEP, Job
from sparseconv.bench.report import wide_console, write

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = wide_console()

Caches = Annotated[Path | None, typer.Option(help="Folder of compiled kernels; default: one that goes.")]
Picture = Annotated[bool, typer.Option(help="Draw the results, too.")]
Device = Annotated[str, typer.Option(help="'cpu' runs the same flow without a GPU.")]


@app.callback()
def timed_choices() -> None:
    """Tables of single layers time the choice of kernels, as the peers' are timed; SPARSECONV_AUTOTUNE=0 does not."""
    os.environ.setdefault("SPARSECONV_AUTOTUNE", "1")


@app.command()
def gpu(
    case: CaseNames = None,
    channels: Channels = None,
    backend: Names = None,
    dtype: Dtypes = None,
    quantity: Quantities = None,
    compare: Compare = False,
    seconds: Seconds = 0.6,
    rounds: Rounds = 1,
    shuffled: Shuffled = True,
    scaling: Scaling = False,
    cold: Annotated[bool, typer.Option(help="First gradients of a fresh process, and of a second.")] = True,
    processes: Annotated[int, typer.Option(help="Processes that compile at once, before anything is timed.")] = 8,
    caches: Caches = None,
    out: Out = None,
    resume: Resume = False,
    plot: Picture = False,
    quick: Quick = False,
    device: Device = "cuda",
) -> None:
    """The first table of the targets on a GPU, beside its 'must' and 'goal'."""
    grid = selection.chosen(selection.GPU_QUICK if quick else selection.first_table(), case or [], channels or [])
    names = selection.named(backend or [], compare, device)
    kinds = dtype or (["fp16"] if quick else ["fp16", "bf16", "tf32", "fp32"])
    jobs = selection.layer_jobs(grid, names, kinds, device, seconds, shuffled, quantity or measure.ASKED)
    if scaling:
        jobs = selection.with_lines(jobs, names, kinds[0], device, seconds / 2)
    first = [Job(name, "shell_256", 64, kinds[0], False, (measure.COLD,), device, seconds) for name in names]
    out = out or _file("gpu", device, quick)
    rows = session.measured(
        jobs,
        console,
        out,
        first=first if cold else [],
        processes=processes,
        caches=caches,
        pictures=_pictures(out) if plot else None,
        rounds=rounds,
        begun=begun_in(out, device) if resume else None,
    )
    if not report.is_aimed_at(facts(device)):
        return
    missed = report.unmet(rows)
    for sentence in missed:
        console.print(f"[red]not met[/] {sentence}", highlight=False)
    console.print(f"{len(missed)} of the musts measured are not met", highlight=False)


@app.command()
def cpu(
    case: CaseNames = None,
    channels: Channels = None,
    backend: Names = None,
    dtype: Dtypes = None,
    quantity: Quantities = None,
    compare: Annotated[bool, typer.Option(help="Measure every peer that can be imported, too.")] = True,
    seconds: Seconds = 0.6,
    shuffled: Shuffled = False,
    scaling: Scaling = False,
    out: Out = None,
    plot: Picture = True,
    quick: Quick = False,
) -> None:
    """Layers on this machine's CPU, beside spconv's CPU wheel and dense convolution."""
    grid = selection.chosen(selection.CPU_QUICK if quick else selection.CPU_CASES, case or [], channels or [])
    names = selection.named(backend or [], compare and not backend, "cpu")
    wanted = quantity or [MAP, FORWARD, STEP, MEMORY]
    seconds = min(seconds, 0.3) if quick else seconds
    jobs = selection.layer_jobs(grid, names, dtype or ["fp32"], "cpu", seconds, shuffled, wanted)
    if scaling:
        jobs = selection.with_lines(jobs, names, (dtype or ["fp32"])[0], "cpu", seconds / 2)
    out = out or _file("cpu", "cpu", quick)
    budget = selection.QUICK_BUDGET if quick and not scaling else None
    session.measured(jobs, console, out, budget=budget, pictures=_pictures(out) if plot else None)


@app.command()
def network(
    case: CaseNames = None,
    backend: Names = None,
    seconds: Seconds = 0.6,
    out: Out = None,
    device: Device = "cuda",
    caches: Caches = None,
) -> None:
    """A U-Net of 7.18 M parameters on four real scans: step and inference, also captured, and fixed geometry."""
    jobs = network_jobs(case or [], backend or ["sparseconv", "spconv"], device, seconds)
    file, machine, rows = out or _file("network", device, False), facts(device), []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        write(file, machine, rows)

    with runner.compiled_kernels(caches) as folder:
        try:
            session.run(jobs, console, folder, keep)
        except KeyboardInterrupt:
            console.print(session.STOPPED)
    console.print(network_table(rows, report.is_aimed_at(machine)))


@app.command()
def verify(
    claim: Annotated[list[str] | None, typer.Option(help="Only the claims of these names; repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="Only the claims about 'cpu' or 'cuda'.")] = None,
    out: Out = None,
) -> None:
    """Measure every number that the README states anew; fail on the first that does not hold."""
    from benchmarks.claims.verify import verify as check

    raise typer.Exit(check(claim or [], device, console, out=out))


@app.command()
def plot(
    files: Annotated[list[Path] | None, typer.Argument(help="Results files; default: all that are committed.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where pictures go; default: docs/pictures.")] = None,
) -> None:
    """Draw the results files: the speed of each peer beside ours."""
    from benchmarks.claims import plots

    mine = files or [file for file in sorted(RESULTS.glob("*.json")) if report.is_results(file)]
    for picture in plots.draw(mine, folder or PICTURES):
        console.print(f"wrote {picture}", highlight=False)


@app.command()
def readme() -> None:
    """Write the figures of the README and of docs/benchmarks.md, and their claims, from the committed results."""
    from benchmarks.claims import readme as section

    section.write()
    console.print(f"wrote {section.README}, {section.PAGE} and {section.verify.CLAIMS}", highlight=False)


def network_jobs(cases: Sequence[str], networks: Sequence[str], device: str, seconds: float) -> list[Job]:
    """Whole networks on their cases."""
    from benchmarks.network import CASES, CHANNELS
    from benchmarks.worker import PREFIX

    dtype = "fp16" if device == "cuda" else "fp32"
    return [
        Job(f"{PREFIX}{name}", case, CHANNELS[0], dtype, False, (STEP,), device, seconds)
        for name in networks
        for case in cases or CASES
    ]


def network_table(rows: Sequence[dict[str, Any]], aims: bool) -> Table:
    """A line a network and case; with ``aims``, against the second table of the targets."""
    cells = {cell["case"]: cell for cell in report.targets()["networks"]} if aims else {}
    table = Table(title=f"U-Net, one scan: milliseconds{', (must / goal)' * aims}", title_justify="left")
    heads = ["step", "captured step", "inference", "captured inference", "fixed", "replay", "step MiB", "captured MiB"]
    heads.append("at room 1")
    for head in ("network", "case", "voxels", *heads, "first step s"):
        table.add_column(head, justify="left" if head in ("network", "case") else "right")
    for row in rows:
        name = [row["implementation"].partition(":")[2], row["case"]]
        if row["status"] != "measured":
            table.add_row(*name, "", f"[dim]{row['status']}: {row.get('reason', '')}[/]", *[""] * len(heads))
            continue
        aim = cells.get(row["case"], {}) if name[0] == "sparseconv" else {}
        shown = []
        for quantity in ("step", "captured_step", "inference", "captured_inference", "fixed", "replay"):
            found = row.get(quantity, {})
            aimed = aim.get(quantity.removeprefix("captured_"))
            shown.append(found.get("reason") or report.judged(found.get("median"), aimed))
        for quantity in ("peak_mib", "captured_mib", "captured_room_1_mib"):
            mib = row["memory"].get(quantity)
            shown.append("-" if mib is None else report.judged(mib, aim.get("memory"), whole=True))
        table.add_row(*name, f"{row['voxels']:,}", *shown, f"{row['first_s']:.1f}")
    return table


def _file(what: str, device: str, quick: bool) -> Path:
    """The committed name of a table, or the same name in SPARSECONV_BENCH_RESULTS."""
    card = "cpu"
    if device == "cuda":
        card = torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "_")
    name = card if what == "cpu" else f"{card}_{what}"
    given = os.environ.get("SPARSECONV_BENCH_RESULTS")
    return (Path(given) if given else RESULTS) / f"{name}{'_quick' if quick else ''}.json"


def _pictures(out: Path) -> Path:
    """Beside a results file, or in the documentation if that is committed."""
    return PICTURES if out.parent == RESULTS else out.parent


@app.command()
def golden(
    json: Annotated[Path | None, typer.Option(help="Write the hashes here.")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with the hashes in this file.")] = None,
    device: Annotated[str | None, typer.Option(help="'cuda' or 'cpu'; default: a GPU, where there is one.")] = None,
    case: CaseNames = None,
    small: Annotated[bool, typer.Option(help="The small scenes alone.")] = False,
) -> None:
    """Hashes of every array of kernel maps, to compare two versions bit by bit; exit 1 where one differs."""
    from benchmarks.golden import run

    raise typer.Exit(run(json, against, device, case, small))


if __name__ == "__main__":
    app()
