"""The plugin of pytest: a library's names before its tests are imported, and what came of each test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suites.on_a_cpu import rename_devices
from benchmarks.suites.scripts import Script
from benchmarks.suites.stand_ins import SUITES

#: the suite that runs, by its name in `SUITES`
SUITE = os.environ.get("SUITE_NAME", "")
found: dict[str, dict[str, str]] = {}


@pytest.hookimpl(tryfirst=True)  # a conftest of the suite may ask for a GPU
def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ["SUITE_FOLDER"])
    torch.set_num_threads(1)
    rename_devices(folder)
    SUITES[SUITE].needs(folder)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Script | None:
    """FlexGEMM's tests are scripts; those that time other libraries are left out, and so is what they share."""
    timing = file_path.stem.endswith(("_ablation", "_benchmark")) or file_path.stem == "utils"
    alone = SUITE == "flex_gemm" and file_path.suffix == ".py" and not timing
    return Script.from_parent(parent, path=file_path) if alone else None


def _few(*given: int) -> range:
    """``range``, but for a loop that looks for leaks."""
    return range(3) if given[0] >= 1000 else range(*given)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module: Any = getattr(item, "module", None)
        if SUITE == "minkowski" and module is not None:
            vars(module).update(LEAK_TEST_ITER=3, range=_few)


def _of(nodeid: str) -> str:
    return nodeid.rpartition("tests/")[2] if SUITE != "spconv" else nodeid.rpartition("test/")[2]


def _why(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash is not None else str(report.longrepr)
    if isinstance(report.longrepr, tuple):
        said = report.longrepr[2]
    return said.strip()


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        found[_of(report.nodeid)] = {"outcome": "not collected", "said": _why(report).splitlines()[-1]}


def pytest_runtest_logreport(report: Any) -> None:
    name = _of(report.nodeid)
    if report.failed or report.skipped:
        found[name] = {"outcome": report.outcome, "said": _why(report)[:2000]}
    elif report.when == "call" and found.get(name, {}).get("outcome") != "failed":
        found[name] = {"outcome": "passed"}


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ["SUITE_RESULTS"]).write_text(json.dumps(found, indent=1))
