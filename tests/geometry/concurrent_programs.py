"""Programs that wait for each other, in the interpreter: it would begin with the second when the first has ended."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

#: where a program waits for what others write
WAITS = "create_masked_load", "create_atomic_rmw"


class Turns:
    """Threads of which one runs at a time; whose turn it is next is drawn when one is about to read memory."""

    def __init__(self, count: int, seed: int) -> None:
        self._left, self._random, self._change = list(range(count)), random.Random(seed), threading.Condition()
        self._turn, self._mine, self._has_failed = 0, threading.local(), False

    def run(self, me: int, work: Callable[[int], object]) -> None:
        self._mine.number = me
        try:
            self._await()
            work(me)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._change:
                self._left.remove(me)
                self._draw()

    def pass_on(self) -> None:
        with self._change:
            self._draw()
        self._await()

    def _draw(self) -> None:
        if self._left:
            self._turn = self._random.choice(self._left)
        self._change.notify_all()

    def _await(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self._has_failed or self._turn == self._mine.number)
        if self._has_failed:
            raise RuntimeError("another program has failed")


def beside(programs: int, work: Callable[[int], object], seed: int = 0) -> None:
    """Call ``work`` with the number of each program, from within an interpreted kernel."""
    from triton.runtime.interpreter import interpreter_builder

    turns = Turns(programs, seed)

    def passing(function: Callable) -> Callable:
        def call(*args: object) -> object:
            turns.pass_on()
            return function(*args)

        return call

    found = {name: passing(getattr(interpreter_builder, name)) for name in WAITS}
    with patch.multiple(interpreter_builder, **found), ThreadPoolExecutor(programs) as threads:
        for done in [threads.submit(turns.run, me, work) for me in range(programs)]:
            done.result()
