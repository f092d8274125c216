"""Numbers of spconv that a checkout of spconv-triton lacks, made by spconv's CPU wheel with the checkout's own script.

    python -m benchmarks.suites.recorded CHECKOUT FOLDER

The wheel computes with one algorithm, has no average pools and no biases in evaluation: such cases are left out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.layers.peers import load_spconv
from benchmarks.suites.on_a_cpu import rename_devices


def make(tests: Path, folder: Path) -> None:
    """Writes golden_conv.pt and golden_pool.pt."""
    os.environ["SPCONV_TEST_IMPL"] = "spconv"
    rename_devices(tests)
    load_spconv()
    torch.set_num_threads(1)  # with more, spconv's results on a CPU change from run to run
    sys.path.insert(0, str(tests))
    helpers: Any = importlib.import_module("helpers")
    helpers.DATA_DIR = folder
    helpers.resolve_algo = lambda *_: None
    script: Any = importlib.import_module("gen_golden")
    compute = script.finalize_case

    def where_it_can(case: Any, *_: Any, **__: Any) -> Any:
        try:
            return compute(case, (), 1)
        except (AssertionError, RuntimeError):
            case.update(missing=True, expect={"out_features": torch.zeros(0), "atol_out": 0.0})
            return case

    script.finalize_case = where_it_can
    for family in ("conv", "pool"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            cases = [case for case in getattr(script, f"{family}_cases")() if "missing" not in case]
        torch.save({"cases": cases}, folder / f"golden_{family}.pt")


if __name__ == "__main__":
    make(Path(sys.argv[1]) / "tests", Path(sys.argv[2]))
