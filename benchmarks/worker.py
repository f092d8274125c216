"""The worker of the tables: ``python -m benchmarks.worker JOBS.json ROWS.jsonl``, one process an implementation.

Each job leaves a line when it begins and one when it is done, so that whoever waits knows which job a crash befell.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import network
from benchmarks.layers import measure
from sparseconv.bench.measure import Job, attempt

#: how the jobs of whole networks are named: ``unet:sparseconv``
PREFIX = "unet:"


def run(job: Job) -> dict[str, Any]:
    """A layer's row, or a network's."""
    if not job.implementation.startswith(PREFIX):
        return measure.run(job)
    name = job.implementation.removeprefix(PREFIX)
    return job.as_dict() | network.measure(name, job.case, job.device, job.seconds)


def main(jobs_file: str, rows_file: str, run: Callable[[Job], dict[str, Any]] = run) -> None:
    """Run every job of the file; a job that raises leaves its reason."""
    with Path(rows_file).open("a") as out:

        def say(line: dict[str, object]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        for data in json.loads(Path(jobs_file).read_text()):
            job = Job.of(data)
            say({"begun": job.as_dict()})
            say({"row": attempt(job, run)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
