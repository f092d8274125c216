"""Threads that each compute alone: independent parts of a convolution, one core for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Part = TypeVar("Part")


def share(work: Callable[[Part], None], parts: Iterable[Part], threads: int) -> None:
    """Call ``work`` once for every part, on as many threads, each of which computes with one core.

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

    for done in [_pool(threads, os.getpid()).submit(take) for _ in range(threads)]:
        done.result()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads with one core each; a forked process, which inherits no threads, makes its own."""
    kept = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "sparseconv", lambda: torch.set_num_threads(1))
    try:
        # torch's setting is a thread's own, and also what threads begin with that ask for the first time
        for ready in [pool.submit(torch.get_num_threads) for _ in range(threads)]:
            ready.result()
    finally:
        torch.set_num_threads(kept)
    return pool
