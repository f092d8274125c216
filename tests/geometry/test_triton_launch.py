"""How kernels are compiled: once, whichever threads ask, and beside one another."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from sparseconv.geometry import triton_launch
from sparseconv.geometry.triton_launch import Launcher


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
    monkeypatch.setattr(triton_launch, "read_triton", lambda: None)


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
    assert function.asked[0] == ((torch.int32, 13, 64), {"grid": (1,), "num_warps": 2})
    assert all(kernel is found[0] for kernel in found)
    assert launcher.compile((128,)) is not found[0]


@pytest.mark.usefixtures("card")
def test_who_asks_for_a_kernel_that_failed_ahead_is_told_why(monkeypatch):
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: triton_launch._NOTHING)
    function = Function(ValueError("no such instruction"))
    launcher = Launcher(function, (int,))
    launcher.ahead(torch.device("cuda", 0), (1,))
    with pytest.raises(ValueError, match="no such instruction"):
        launcher.compile((1,))
    function.error = None
    while launcher._compiled:  # the thread is still at it
        time.sleep(0.01)
    assert launcher.compile((1,)).of == (13, 1)


def test_a_shared_launcher_leaves_tritons_own_kernel_alone():
    kernel = SimpleNamespace(src="its own", module=1, function=2, _run=3)
    shared = triton_launch._with_shared_launcher(kernel)
    assert (kernel.src, kernel.module, kernel.function, kernel._run) == ("its own", 1, 2, 3)
    assert list(shared.src.signature.values()) == ["i64"] * triton_launch.SHARED_ARGUMENTS
    assert shared.module is shared.function is shared._run is None
