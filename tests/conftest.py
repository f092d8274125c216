"""What all tests share: hypothesis without a clock, one thread of torch for each worker, memory that holds NaN until it
is written, names of failures as they come, and Triton's interpreter where there is no GPU, which must be said before
Triton is first imported."""

import gc
import os
import sys

import pytest
import torch
from hypothesis import settings

from sparseconv.torch_private import LEAST_TO_TRACE, VERSION
from tests.cpus import CPUS, hold, is_held
from tests.interpreter import hasten
from tests.uninitialised import fill_uninitialised

settings.register_profile("sparseconv", deadline=None, max_examples=60, print_blob=True, derandomize=True)
settings.load_profile("sparseconv")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    hasten()
fill_uninitialised()
if VERSION < LEAST_TO_TRACE:

    def _too_old(*_, **__):
        pytest.skip(f"torch {torch.__version__} does not trace this package's networks")

    torch.compile = torch.export.export = torch.library.opcheck = _too_old


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", choices=list(CPUS), help="hold the compiled CPU engine to an older CPU than this one")


class FailuresAtOnce:
    """Names each failure when it comes, so that a run that is cut short has named those that it met."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(f"{'FAILED' if report.when == 'call' else 'ERROR'} {report.nodeid}", report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(f"ERROR {report.nodeid}", report)

    def _write(self, what: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:  # a worker's: the process that started it writes
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        terminal.write("\n")
        terminal.write_line(what + (f" - {crash.message.splitlines()[0]}" if crash and crash.message else ""), red=True)
        terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")
    name = config.getoption("--cpu")
    if name is None:
        return
    if not CPUS[name].runs_here():
        raise pytest.UsageError(f"--cpu {name}: this CPU cannot run its kernels; it has not all of {CPUS[name].needs}")
    hold(name)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: Python's garbage collector need not look through it again and again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # and at the end it goes as ever, or Triton's library reports what is left


def pytest_runtest_setup(item: pytest.Item) -> None:
    name = item.config.getoption("--cpu")
    if name is not None and not is_held(name):
        pytest.fail(f"a test before this one let go of --cpu {name}: it replaced the compiled backend")
