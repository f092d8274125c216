"""Threads of a convolution on the CPU: those that each compute alone, and torch's own for a compiled function."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import Any, TypeVar

import torch

Part = TypeVar("Part")


def share(work: Callable[[Part], None], parts: Iterable[Part], threads: int) -> None:
    """Call ``work`` once for every part, on as many threads, which divide torch's number of threads among them.

    torch's own threads meet at the end of every operation, and wait there for the slowest; these meet once, at the end
    of the last part. Which thread takes which part is not fixed, so parts must not touch each other's results.
    Without a gradient, as in the verbs that call this.

    >>> found = []
    >>> share(found.append, [1, 2, 3], threads=1)
    >>> found
    [1, 2, 3]
    """
    if threads == 1:
        for part in parts:
            work(part)
        return
    waiting = iter(list(parts))

    @torch.no_grad()
    def take() -> None:
        for part in waiting:  # an iterator over a list hands each item to one thread only
            work(part)

    pool = _pool(threads, max(1, torch.get_num_threads() // threads), os.getpid())
    for done in [pool.submit(take) for _ in range(threads)]:
        done.result()


@cache
def _pool(threads: int, cores: int, process: int) -> ThreadPoolExecutor:
    """Threads with so many cores each. A child process after fork has no threads and makes its own."""
    kept, ready = torch.get_num_threads(), Barrier(threads + 1)

    def begin() -> None:
        torch.set_num_threads(cores)
        torch.get_num_threads()  # a thread's first question takes the setting that was made last, by whichever thread
        ready.wait()

    pool = ThreadPoolExecutor(threads, "sparseconv", begin)
    for _ in range(threads):
        pool.submit(int)  # each of which starts a thread, since none is idle yet
    ready.wait()
    torch.set_num_threads(kept)
    return pool


def together(function: int, argument: int, threads: int) -> None:
    """Call a compiled function (its address) with a pointer on as many threads at once, without Python's lock.

    They are torch's own threads where it uses GNU's OpenMP, as its Linux packages do: after an operation those wait
    for the next one awake, in the way of any others.
    """
    call = _FUNCTION(function)
    if threads == 1:
        call(argument)
    elif os.getpid() == _process and _team() is not None:
        _team()(function, argument, threads, 0)
    else:  # OpenMP's threads do not survive a fork
        share(lambda _: call(argument), range(threads), threads)


_FUNCTION, _process = ctypes.CFUNCTYPE(None, ctypes.c_void_p), os.getpid()


@cache
def _team() -> Any:
    """OpenMP's ``GOMP_parallel(function, argument, threads, flags)`` in this process, or None."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return found
