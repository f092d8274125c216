"""Jobs handed to worker processes: one after another where figures are taken, side by side where kernels are compiled.

A worker that crashes or hangs costs the job it was at; the rest go to a fresh one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.layers.measure import COLD, COMPILE, EVERYONE, with_quantities
from sparseconv.bench.measure import Job

#: seconds that one job may take, compilation included
PATIENCE = 240.0
#: signs after which a CUDA context is of no more use to the jobs that follow
BROKEN = ("CUDA error", "illegal memory access", "device-side assert", "AcceleratorError")

Row = dict[str, Any]


def run_all(
    jobs: Iterable[Job],
    done: Callable[[Row], None],
    caches: Path | None = None,
    budget: float | None = None,
    worker: str = "benchmarks.worker",
) -> list[Row]:
    """Every job's row, one worker an implementation and dtype; ``done`` is called with each as it comes.

    A worker has one dtype, for spconv keeps in fp32 what it chose for the same channels in tf32. ``worker`` is the
    module that its process runs. Of ``budget`` seconds every worker gets its share; jobs that it does not reach are
    skipped.
    """
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        done(row)

    groups = [list(group) for _, group in groupby(jobs, key=lambda job: (job.implementation, job.dtype))]
    left, present = budget, sum(absent(group[0].implementation) is None for group in groups)
    for waiting in groups:
        begin = time.monotonic()
        reason = absent(waiting[0].implementation)
        share = None if left is None else left / max(1, present)
        present -= reason is None
        while waiting and reason is None:
            rest = None if share is None else share - (time.monotonic() - begin)
            if rest is not None and rest <= 0:
                reason = "no time left for it"
                break
            found = 0
            for row in _worker(waiting, worker, caches, rest):
                keep(row)
                found += 1
            waiting = waiting[found:]
        for job in waiting:
            keep(job.as_dict() | {"status": "skipped", "reason": reason})
        if left is not None:
            left -= time.monotonic() - begin
    return rows


def absent(implementation: str) -> str | None:
    """Why an implementation cannot be asked at all, found without importing anything; else None."""
    kind = EVERYONE.get(implementation)
    for module in kind.needs if kind else ():
        if find_spec(module.partition(".")[0]) is None:
            return f"{module.partition('.')[0]} is not installed"
    return None


def _worker(jobs: list[Job], module: str, caches: Path | None, budget: float | None) -> Iterator[Row]:
    """Rows of a worker until it ends, at least one: if it dies, the last row says how."""
    patience = PATIENCE if budget is None else min(PATIENCE, budget)
    end = None if budget is None else time.monotonic() + budget
    with tempfile.TemporaryDirectory() as folder:
        todo, rows, log = (Path(folder) / name for name in ("jobs.json", "rows.jsonl", "log"))
        todo.write_text(json.dumps([job.as_dict() for job in jobs]))
        rows.touch()
        with log.open("w") as output, rows.open() as lines:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(todo), str(rows)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(caches),
            )
            count = 0
            try:
                for row in _lines(process, lines, patience):
                    count += 1
                    yield row
                    if any(sign in str(row.get("reason")) for sign in BROKEN):
                        return
                    if end is not None and time.monotonic() > end:
                        return
            finally:
                process.kill()
                process.wait()
        if count < len(jobs):
            code, tail = process.returncode, log.read_text(errors="replace").strip().splitlines()[-1:]
            how = f"took longer than {patience:.0f} s" if code == -9 else f"the process ended with code {code}"
            said = f": {tail[0][:200]}" if tail else ""
            yield jobs[count].as_dict() | {"status": "crashed", "reason": how + said}


def _lines(process: subprocess.Popen, lines: Any, patience: float) -> Iterator[Row]:
    """Finished rows as the worker writes them, until it ends or sits at one job for too long."""
    since, partial = time.monotonic(), ""
    while True:
        ended = process.poll() is not None
        partial += lines.read()
        *whole, partial = partial.split("\n")
        for line in whole:
            since = time.monotonic()
            found = json.loads(line)
            if "row" in found:
                yield found["row"]
        if ended or time.monotonic() - since > patience:
            return
        time.sleep(0.02)


def compile_all(jobs: Iterable[Job], processes: int, caches: Path) -> list[Row]:
    """Compile what jobs need in ``processes`` at once, and forget what was tuned while they disturbed each other."""
    wanted: dict[tuple, Job] = {}
    for job in jobs:
        wanted.setdefault(
            (job.implementation, job.case, job.channels, job.dtype, job.kernel), with_quantities(job, COMPILE)
        )
    several = list(wanted.values())
    parts = [part for part in (several[i::processes] for i in range(processes)) if part]
    rows: list[Row] = []
    with ThreadPoolExecutor(len(parts) or 1) as pool:
        for found in pool.map(lambda part: run_all(part, lambda row: None, caches), parts):
            rows += found
    for choice in caches.rglob("choice.json"):
        choice.unlink()
    return rows


def cold_starts(job: Job) -> Row:
    """The first gradients of a process with empty caches, and of a second process after it."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (run_all([with_quantities(job, COLD)], lambda row: None, Path(folder))[0] for _ in range(2))
    return first | {"second_s": second.get("cold_s")}


@contextmanager
def compiled_kernels(given: Path | None) -> Iterator[Path]:
    """A folder for compiled kernels: the given one, or one that goes at the end."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def environment(caches: Path | None, checkout: Path = ROOT) -> dict[str, str]:
    """Of a process that imports a checkout's package, and keeps what it compiles in ``caches``."""
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if caches is not None:
        named = {"TRITON_CACHE_DIR": "triton", "CUPY_CACHE_DIR": "cupy", "CUDA_CACHE_PATH": "cuda"}
        found |= {name: str(caches / folder) for name, folder in named.items()}
        found["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    return found
