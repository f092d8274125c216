"""How kernels are compiled: once, whichever threads ask, and beside one another."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from sparseconv.gpu import launcher as launching
from sparseconv.gpu import triton_private
from sparseconv.gpu.launcher import Launcher


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
