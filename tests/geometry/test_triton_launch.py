"""How kernels are compiled: once, whichever threads ask, and beside one another."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from sparseconv.gpu import launcher as launching
from sparseconv.gpu import pinned, triton_private
from sparseconv.gpu.launcher import Launcher
from sparseconv.gpu.pinned import UNWRITTEN, Report


class Function:
    """Stands for a jitted function that takes its time to compile, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked, self.error = [], error

    def warmup(self, *args, **options):
        self.asked.append((args, options))
        time.sleep(0.05)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(of=args)


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("card")
def test_many_threads_compile_a_kernel_once():
    function, found = Function(), []
    launcher = Launcher(function, (torch.int32, int), num_warps=2)
    threads = [threading.Thread(target=lambda: found.append(launcher.compile((64,)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(function.asked) == 1
    assert function.asked[0] == ((torch.int32, 13, 64), {"grid": (1,), "num_warps": 2, "enable_fp_fusion": True})
    assert all(kernel is found[0] for kernel in found)
    assert launcher.compile((128,)) is not found[0]


def test_a_shared_launcher_leaves_tritons_own_kernel_alone():
    kernel = SimpleNamespace(src="its own", module=1, function=2, _run=3)
    shared = triton_private.with_shared_launcher(kernel)
    assert (kernel.src, kernel.module, kernel.function, kernel._run) == ("its own", 1, 2, 3)
    assert list(shared.src.signature.values()) == ["i64"] * triton_private.SHARED_ARGUMENTS
    assert shared.module is shared.function is shared._run is None


def test_a_launch_goes_to_its_device_whichever_is_current(card, monkeypatch):
    now, launched = [0], []

    @contextmanager
    def device(index):
        before, now[0] = now[0], index
        yield
        now[0] = before

    def run(*args):
        launched.append((now[0], args))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launching, "current_device", lambda: now[0])
    streams = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: 10 + index))
    monkeypatch.setattr(launching, "driver", streams)
    for room in (launching, triton_private):
        monkeypatch.setattr(room, "entry_of", lambda run: None)
    launcher = Launcher(Function(), ("*fp32", int))
    monkeypatch.setattr(
        launcher, "compile", lambda constants: SimpleNamespace(run=run, function=7, packed_metadata="told", asm={})
    )
    for index in (0, 1):
        launcher.on(index, (64,))(3, 1, (1000, 5))
    rest = (7, "told", None, None, None, 1000, 5, 64)
    assert launched == [(0, (3, 1, 1, 10, *rest)), (1, (3, 1, 1, 11, *rest))]
    assert now == [0]


class Run:
    """Stands for a launcher of Triton."""

    launch_pdl = False

    def __init__(self) -> None:
        self.early: list[bool] = []

    def __call__(self, *args) -> None:
        self.early.append(self.launch_pdl)


@pytest.mark.parametrize(
    ("ptx", "early"), [("griddepcontrol.wait; ld.global.b32", True), ("ld.global.b32", False), (None, False)]
)
def test_a_kernel_that_waits_for_the_launch_ahead_is_launched_early_but_not_in_graphs(ptx, early, card, monkeypatch):
    run, capturing, stream = Run(), [False], [10]
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(launching, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "is_capturing", lambda: capturing[0])
    streams = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: stream[0]))
    monkeypatch.setattr(launching, "driver", streams)
    for room in (launching, triton_private):
        monkeypatch.setattr(room, "entry_of", lambda run: None)
    launcher = Launcher(Function(), ("*fp32", int))
    asm = {} if ptx is None else {"ptx": ptx}
    kernel = SimpleNamespace(run=run, function=7, packed_metadata="told", asm=asm)
    monkeypatch.setattr(launcher, "compile", lambda constants: kernel)
    launch = launcher.on(0, ())
    for capturing[0] in (False, True, False):
        launch(1, 1, (1000, 5))
    assert run.early == [early, False, early]
    stream[0] = 0
    monkeypatch.setattr(launching, "is_capturing", lambda: pytest.fail("CUDA captures no default stream"))
    launch(1, 1, (1000, 5))
    assert run.early[3:] == [early]
    assert not Run.launch_pdl


class Stream:
    """Stands for a stream; ``work`` is done at the second question."""

    def __init__(self, work=lambda: None):
        self.work, self.asked = work, 0

    def query(self):
        self.asked += 1
        if self.asked == 2:
            self.work()
        return self.asked >= 2


@pytest.fixture
def stream(monkeypatch):
    """The one stream of a card whose kernels a test stands for."""
    found, stock = Stream(), []
    for room in (launching, pinned):
        monkeypatch.setattr(room, "INTERPRETED", False)
    monkeypatch.setattr(pinned, "current_stream", lambda index: 0)
    monkeypatch.setattr(pinned, "_stream", lambda index, address: found)
    monkeypatch.setattr(pinned, "_stock", lambda index, address, length: stock)
    return found


def pinned_of(report):
    return report._lease.pinned


def write(report, *numbers):
    pinned_of(report).values[: len(numbers)] = numbers


def test_a_report_is_read_when_all_of_its_numbers_are_there(stream):
    report = Report(3, torch.device("cpu"))
    write(report, 5, 6)
    assert not report.has_arrived
    stream.work = lambda: write(report, 5, 6, -1)
    assert report.read() == [5, 6, -1]
    assert stream.asked == 2
    assert report.has_arrived
    assert report.read() == [5, 6, -1]


def test_a_report_whose_kernel_failed_or_was_not_launched_is_an_error(stream):
    with pytest.raises(RuntimeError, match="not launched"):
        Report(2, torch.device("cpu")).read()

    def fail():
        raise RuntimeError("an illegal memory access")

    stream.asked, stream.work = 0, fail
    with pytest.raises(RuntimeError, match="illegal"):
        Report(2, torch.device("cpu")).read()


def test_the_memory_of_a_report_that_nobody_read_waits_for_its_kernel(stream):
    device = torch.device("cpu")
    first = Report(2, device)
    late = pinned_of(first)
    del first
    second = Report(2, device)
    assert pinned_of(second) is not late
    late.values[:2] = [1, 2]  # the kernel of the first, at last
    assert not second.has_arrived
    third = Report(2, device)
    assert pinned_of(third) is late
    assert pinned_of(third).values[:2] == [UNWRITTEN] * 2
    write(second, 3, 4)
    pinned = pinned_of(second)
    assert second.read() == [3, 4]
    assert pinned_of(Report(1, device)) is pinned


def test_a_report_whose_kernel_never_runs_keeps_no_other_memory_from_use(stream):
    device = torch.device("cpu")
    Report(1, device)
    slips = set()
    for _ in range(5):
        report = Report(1, device)
        slips.add(id(pinned_of(report)))
        write(report, 7)
        assert report.read() == [7]
    assert len(slips) == 1
