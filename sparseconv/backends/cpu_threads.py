"""Threads of a convolution on the CPU: those that each compute alone, and torch's own for a compiled function."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

import torch

Part = TypeVar("Part")


def share(work: Callable[[Part], None], parts: Iterable[Part], threads: int) -> None:
    """Call ``work`` once for every part, on as many threads, which divide torch's number of threads among them.

    torch's own threads meet at the end of every operation, and wait there for the slowest; these meet once, at the end
    of the last part. Which thread takes which part is not fixed, so parts must not touch each other's results.
    Without a gradient, as in the verbs that call this.

    An error or an interrupt is raised once every thread has stopped: parts that nobody has begun are dropped. What
    ``work`` refers to lives until then, so memory that a part still writes is never given away.

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
    asked: list[Future[None]] = []
    try:
        for _ in range(threads):
            asked.append(pool.submit(take))
        for done in asked:
            done.result()
    finally:
        deque(waiting, maxlen=0)
        wait(asked)


@cache
def _pool(threads: int, cores: int, process: int) -> ThreadPoolExecutor:
    """Threads with so many cores each; a forked process, which inherits no threads, makes its own.

    Each thread sets its own number of cores by OpenMP: ``torch.set_num_threads`` would set that of every thread which
    asks for the first time meanwhile.
    """

    def begin() -> None:
        torch.get_num_threads()  # a thread's first question takes torch's setting
        if (limit := _openmp("omp_set_num_threads", ctypes.c_int)) is not None:
            limit(cores)

    return ThreadPoolExecutor(threads, "sparseconv", begin)


def together(function: int, argument: int, threads: int, held: object) -> None:
    """Call a compiled function (its address) with a pointer on as many threads at once, without Python's lock.

    They are torch's own threads where it uses GNU's OpenMP, as its Linux packages do: after an operation those wait
    for the next one awake, in the way of any others. ``held`` owns the memory behind the pointer; every thread's task
    holds it, whatever becomes of the caller.
    """
    call = _FUNCTION(function)
    if threads == 1:
        call(argument)
    elif os.getpid() == _process and (team := _openmp("GOMP_parallel", *_TEAM)) is not None:
        team(function, argument, threads, 0)
    else:  # OpenMP's threads do not survive a fork

        def work(_: int, held: object = held) -> None:
            call(argument)

        share(work, range(threads), threads)


_FUNCTION, _process = ctypes.CFUNCTYPE(None, ctypes.c_void_p), os.getpid()
_TEAM = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)  # function, argument, threads, flags


@cache
def _openmp(name: str, *arguments: type) -> Any:
    """A function of the OpenMP that this process has loaded, or None."""
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = arguments, None
    return found
