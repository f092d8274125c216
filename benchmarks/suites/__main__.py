"""The command: ``python -m benchmarks.suites``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import benchmarks.suites
from benchmarks.clients.__main__ import machine
from benchmarks.layers.machine import revision
from benchmarks.suites.reasons import reason
from benchmarks.suites.stand_ins import SUITES

ROOT = Path(__file__).parents[2]


def run(name: str, checkout: Path, limit: int) -> dict[str, dict[str, str]]:
    """What came of each test of a suite, in a process and a folder of its own."""
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        told = {"SUITE_FOLDER": str(checkout), "SUITE_NAME": name, "SUITE_RESULTS": str(results)}
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.suites.plugin", "-p", "no:cacheprovider"]
        command += ["-q", "--assert=plain", "--tb=short", "--continue-on-collection-errors", f"--timeout={limit}"]
        command += [*suite.options, *(str(checkout / part) for part in suite.run)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **told}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if not results.is_file():
            raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
        found: dict[str, dict[str, str]] = json.loads(results.read_text())
        return found


def counted(name: str, found: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Numbers of a suite, and the tests under each reason."""
    numbers = Counter(test["outcome"] for test in found.values())
    why: dict[str, list[str]] = {}
    for test, came in found.items():
        if came["outcome"] != "passed":
            why.setdefault(reason(name, test, came["said"]) or "UNEXPLAINED", []).append(test)
    files = numbers.pop("not collected", 0)
    return {"suite": name, "collected": numbers.total(), **numbers, "files_not_collected": files, "why": why}


def main() -> int:
    about = benchmarks.suites.__doc__
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--limit", type=int, default=500, metavar="SECONDS", help="of one test")
    parser.add_argument("--json", type=Path, help="rows of other suites in the file stay")
    args = parser.parse_args()
    facts = {**machine("cpu"), "threads": 1, "torch": torch.__version__}
    facts["command"] = "python -m benchmarks.suites --checkouts DIR"
    facts["spconv"] = version("spconv") if find_spec("spconv") else "none"
    facts["checkouts"] = {name: (revision(args.checkouts / name) or "none").partition("-")[0] for name in SUITES}
    unexplained = False
    for name in args.suite:
        row = counted(name, run(name, (args.checkouts / name).resolve(), args.limit))
        print(json.dumps(row, indent=1), flush=True)
        unexplained |= "UNEXPLAINED" in row["why"]
        if args.json is not None:
            kept = json.loads(args.json.read_text())["rows"] if args.json.is_file() else []
            rows = {known["suite"]: known for known in [*kept, row]}
            record = {"facts": facts, "rows": [rows[suite] for suite in SUITES if suite in rows]}
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(unexplained)


if __name__ == "__main__":
    sys.exit(main())
