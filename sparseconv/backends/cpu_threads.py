"""One compiled function on many threads at once, without Python's lock."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

_FUNCTION, _process = ctypes.CFUNCTYPE(None, ctypes.c_void_p), os.getpid()


def run_on_threads(function: int, argument: int, threads: int, owner: object) -> None:
    """Call a compiled function (its address) with a pointer on as many threads.

    They are torch's own threads where it uses GNU's OpenMP, as its Linux packages do: after an operation those wait
    for the next one awake, in the way of any others. ``owner`` owns the memory behind the pointer; every thread's task
    refers to it, so that memory that a thread still writes is never given away.
    """
    call = _FUNCTION(function)
    if threads == 1:
        call(argument)
    elif os.getpid() == _process and (team := _openmp()) is not None:
        team(function, argument, threads, 0)
    else:  # OpenMP's threads do not survive a fork

        def work(_: int, owner: object = owner) -> None:
            call(argument)

        for done in [_pool(threads, os.getpid()).submit(work, number) for number in range(threads)]:
            done.result()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """A forked process, which inherits no threads, makes its own."""
    return ThreadPoolExecutor(threads, "sparseconv")


@cache
def _openmp() -> Any:
    """``GOMP_parallel(function, argument, threads, flags)`` of the OpenMP that this process has loaded, or None."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return found
