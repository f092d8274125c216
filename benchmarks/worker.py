"""The worker of jobs that are whole networks: ``python -m benchmarks.worker JOBS.json ROWS.jsonl``."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import network
from sparseconv.bench import worker
from sparseconv.bench.measure import Job

#: how a network's jobs are named: ``unet:sparseconv``
PREFIX = "unet:"


def run(job: Job) -> dict[str, Any]:
    """A network's row."""
    name = job.implementation.removeprefix(PREFIX)
    return job.as_dict() | network.measure(name, job.case, job.device, job.seconds)


if __name__ == "__main__":
    worker.main(sys.argv[1], sys.argv[2], run)
