"""Jobs measured in front of a reader: a bar while they run, a table of them, their file, their pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.layers import report, runner
from benchmarks.layers.machine import machine
from benchmarks.layers.measure import COLD, with_quantities
from benchmarks.layers.report import ceilings
from sparseconv.bench.measure import Job
from sparseconv.bench.report import reasons, write
from sparseconv.bench.timing import clock_of

Row = dict[str, Any]
STOPPED = "[yellow]stopped[/]: what was done until here follows"
#: a host is slow that takes this much of its quickest time for the same piece of Python
SLOW = 1.1


class Kept(dict[Job, Row]):
    """A row for each job, and the results file ``out``, written anew with every row.

    Of a job that is measured again, each time counts where it was least: what else a host has to do adds to times and
    takes nothing off them.
    """

    def __init__(
        self, out: Path | None, machine: dict[str, Any], peak: dict[str, float], others: Sequence[Row] = ()
    ) -> None:
        self._out, self._machine, self._peak, self._others = out, machine, peak, others

    def times(self, job: Job) -> int:
        """How often it was measured, or skipped for a reason; what failed was not."""
        row = self.get(job, {"status": "failed"})
        return row.get("times", 1) if row["status"] in ("measured", "skipped") else 0

    def is_due(self, job: Job, turn: int) -> bool:
        """Whether it is to be measured in the round of this number: first of all, or while the CPU was slow for it."""
        times = self.times(job)
        if times == 0:
            return True
        return times <= turn and self[job]["status"] == "measured" and self.slowness(job) > SLOW

    def slowness(self, job: Job) -> float:
        """How many times its quickest of this run the CPU took while a job was measured; infinite where none says."""
        paces = [found for row in self.values() if (found := report.pace(row)) is not None]
        mine = report.pace(self[job])
        return math.inf if mine is None else mine / min(paces)

    def keep(self, row: Row) -> None:
        """Take a row that was measured."""
        job = Job.of(row)
        self[job] = report.least(self[job], row) if job in self else row
        if self._out is not None:
            write(self._out, self._machine, [*self.with_rates(), *self._others], ceilings=self._peak)

    def with_rates(self) -> list[Row]:
        """The rows with what they make of the device's ceilings."""
        return [report.with_rates(row, self._peak) for row in self.values()]


def measured(
    jobs: Sequence[Job],
    console: Console,
    out: Path | None = None,
    *,
    first: Sequence[Job] = (),
    processes: int = 0,
    caches: Path | None = None,
    budget: float | None = None,
    pictures: Path | None = None,
    rounds: int = 1,
    begun: dict[str, Any] | None = None,
) -> list[Row]:
    """Cold starts, then everything compiled side by side, then the figures; printed, written, drawn.

    Args:
        jobs: what to measure, all on one device.
        console: where to write.
        out: results file; written anew with every row, so that what is done survives a time limit.
        first: jobs whose first gradients are timed in fresh processes with empty caches.
        processes: how many compile at once, before anything is timed.
        caches: folder of compiled kernels; default: one that goes.
        budget: seconds for all jobs together; those not reached are skipped.
        pictures: folder of pictures of ``out``; default: none.
        rounds: how often a job is measured, one round after another, while the CPU was slow for it; the least of each
            time counts.
        begun: what a run that was stopped has written; its rounds count, and its rows stay.
    """
    device = jobs[0].device
    here, peak, rows = machine(device), {}, []
    if begun is not None:
        here, peak, rows = begun["machine"], begun["ceilings"], begun["rows"]
    starts = [row for row in rows if Job.of(row).quantities == (COLD,)]
    started = {Job.of(row) for row in starts}
    for row in [runner.cold_starts(job) for job in first if with_quantities(job, COLD) not in started]:
        starts.append(row)
        said = row.get("reason") or f"{row.get('cold_s', 0):.1f} s, a second process {row.get('second_s') or 0:.1f} s"
        console.print(f"first gradients of {row['implementation']}, empty caches: {said}", highlight=False)
    with runner.compiled_kernels(caches) as folder:
        if processes > 1:
            compile_ours(jobs, console, processes, folder)
        peak = peak or ceilings(clock_of(device))
        shown = ", ".join(f"{k} {v:.3g} {'TB/s' if k == 'copy' else 'TFLOP/s'}" for k, v in peak.items())
        console.print(f"ceilings: {shown}", highlight=False)
        kept = Kept(out, here, peak, starts)
        kept.update({Job.of(row): row for row in rows if row not in starts})
        try:
            for turn in range(rounds):
                run([job for job in jobs if kept.is_due(job, turn)], console, folder, kept.keep, budget)
        except KeyboardInterrupt:
            console.print(STOPPED)
    rows = kept.with_rates()
    name = here.get("card", {}).get("name")
    aims = report.is_aimed_at(here)
    title = f"{name or here['cpu']}: milliseconds{', (must / goal)' * aims}"
    console.print(report.layer_table(report.joined(rows), title, aims))
    for sentence in reasons(report.joined(rows)):
        console.print(f"[dim]{sentence}[/]", highlight=False)
    late = [found for job in kept if SLOW < (found := kept.slowness(job)) < math.inf]
    if late:
        said = f"the CPU was slow for {len(late)} of {len(kept)} jobs, up to {max(late):.1f} times its quickest"
        console.print(f"[dim]{said}: --rounds measures such ones again[/]", highlight=False)
    if out is not None:
        console.print(f"wrote {out}", highlight=False)
        if pictures is not None:
            from benchmarks.claims import plots

            for picture in plots.draw([out], pictures):
                console.print(f"wrote {picture}", highlight=False)
    return rows


def compile_ours(jobs: Sequence[Job], console: Console, processes: int, caches: Path) -> None:
    """Compile what this library needs for the jobs, side by side, before anything is timed."""
    mine = [job for job in jobs if job.implementation.startswith("sparseconv")]
    with console.status(f"compiling in {processes} processes"):
        compiled = runner.compile_all(mine, processes, caches)
    longest = max((row.get("first_s", 0) for row in compiled), default=0)
    console.print(f"compiled {len(compiled)} shapes, the longest in {longest:.1f} s", highlight=False)


def run(
    jobs: Sequence[Job],
    console: Console,
    caches: Path,
    keep: Callable[[Row], None] | None = None,
    budget: float | None = None,
) -> list[Row]:
    """Every job in its worker, under a bar; what fails is said at once."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(jobs))

        def done(row: Row) -> None:
            name = f"{row['implementation']}: {row['case']}, C {row['channels']}, {row['dtype']}"
            progress.update(task, advance=1, description=name)
            if row["status"] in ("failed", "crashed", "wrong"):
                progress.console.print(f"[red]{row['status']}[/] {name}: {row['reason']}", highlight=False)
            if keep is not None:
                keep(row)

        return runner.run_all(jobs, done, caches, budget)
