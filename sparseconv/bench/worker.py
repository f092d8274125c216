"""A process of its own for one implementation's jobs: ``python -m sparseconv.bench.worker JOBS.json ROWS.jsonl``.

Each job leaves a line when it begins and one when it is done, so that whoever waits knows which job a crash befell.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparseconv.bench import measure
from sparseconv.bench.measure import Job


def main(jobs_file: str, rows_file: str, run: Callable[[Job], dict[str, Any]] = measure.run) -> None:
    """Run every job of the file; a job that raises leaves its reason."""
    jobs = [Job.of(data) for data in json.loads(Path(jobs_file).read_text())]
    with Path(rows_file).open("a") as out:

        def say(line: dict[str, object]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        for job in jobs:
            say({"begun": job.as_dict()})
            try:
                say({"row": run(job)})
            except Exception as error:
                traceback.print_exc()
                words = str(error).strip().splitlines()
                reason = f"{type(error).__name__}: {words[0] if words else ''}"[:300]
                say({"row": job.as_dict() | {"status": "failed", "reason": reason}})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
