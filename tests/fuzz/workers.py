"""Cases run in a process beside this one, so that a crash or a hang is an answer like any other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

#: seconds that a case may take, and the first of a process, which imports torch
LIMIT, FIRST = 60.0, 240.0


def answers(run: Callable[[int, int], str], count: int, seed: int) -> list[str]:
    """``run(seed, number)`` of each number below ``count``: what it returned, ``"crash"`` or ``"hang"``."""
    found: list[str] = []
    context = multiprocessing.get_context("spawn")
    while len(found) < count:
        here, there = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(run, seed, len(found), count, there), daemon=True)
        worker.start()
        there.close()
        limit = FIRST
        try:
            while len(found) < count:
                if not here.poll(limit):
                    found.append("hang")
                    break
                found.append(here.recv())
                limit = LIMIT
        except EOFError:
            found.append("crash")
        finally:
            worker.kill()
            worker.join()
            here.close()
    return found


def _work(run: Callable[[int, int], str], seed: int, first: int, count: int, to: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    for number in range(first, count):
        to.send(run(seed, number))
