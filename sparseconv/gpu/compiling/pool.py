"""Kernels that are compiled ahead beside this process, which meets them in Triton's cache.

Triton holds the interpreter's lock while it compiles, so threads compile one kernel after another. Processes do not
share a lock; what they compile lies in Triton's cache, where a launch finds it within milliseconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import cache
from typing import Any

from sparseconv.gpu.compiling.job import Job, Target, is_marked
from sparseconv.gpu.compiling.server import FOUND, READY, Settings
from sparseconv.gpu.compiling.starting import Server, cache_dir, can_start, import_path, started, worker_count

logger = logging.getLogger(__name__)
#: seconds without work after which processes that compile leave, and seconds that one kernel may take
IDLE, PATIENCE = 20.0, 120.0


class Pool:
    """Jobs of one target, and the processes that do them, which are started by the first that Triton's cache lacks."""

    def __init__(self, target: Target, workers: int | None = None, cache_dir: str | None = None) -> None:
        self.target, self.workers = target, worker_count() if workers is None else workers
        self._cache_dir, self._pid = cache_dir, os.getpid()
        self._changed = threading.Condition()
        self._queue: OrderedDict[str, bytes] = OrderedDict()
        self._running: set[str] = set()
        #: marks that are done, and what others failed with
        self.done: set[str] = set()
        self.failed: dict[str, str] = {}
        #: kernels that the processes compiled
        self.compiled = 0
        self._server: Server | None = None
        self._is_ready = False
        self._starts = 0

    @property
    def is_usable(self) -> bool:
        """Whether jobs can be given away here: not in a process forked off, nor after the server failed twice."""
        return self.workers > 0 and self._pid == os.getpid() and self._starts < 3 and can_start()

    def submit(self, job: Job) -> bool:
        """Have a job done unless it is; whether somebody does it."""
        mark = job.mark
        if not self.is_usable:
            return False
        with self._changed:
            if mark in self.done or mark in self._running or mark in self._queue:
                return True
            if mark in self.failed:
                return False
        if is_marked(mark):
            self.done.add(mark)
            return True
        with self._changed:
            self._queue[mark] = job.data
            if self._server is None and not self._start():
                self._queue.clear()
                return False
            self._feed()
        return True

    def take(self, mark: str) -> None:
        """Before a kernel is compiled here: wait for whoever is at it, or take the job back that nobody began."""
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._queue.pop(mark, None) is not None:
                self.done.add(mark)
                self._feed()
            elif mark in self._running and not self._changed.wait_for(lambda: mark not in self._running, PATIENCE):
                self._running.discard(mark)
                self.failed[mark] = f"not done within {PATIENCE:g} s"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; whether that came about."""
        if self._pid != os.getpid():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._running, timeout)

    def drop(self) -> None:
        """Forget what nobody began."""
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """End the processes; what they were at is not done."""
        if self._pid != os.getpid():
            return
        with self._changed:
            server = self._server
            self._lose()
        if server is not None:
            server.end()

    def _start(self) -> bool:
        self._starts += 1
        try:
            self._server = server = started()
            settings = Settings(import_path(), self.workers, self.target, self._cache_dir)
            server.connection.send_bytes(pickle.dumps(settings))
        except OSError as error:
            logger.info("kernels are compiled in this process: %s", error)
            self._starts = 3
            self._lose()
            return False
        threading.Thread(target=self._listen, args=(server,), name="sparseconv listener", daemon=True).start()
        return True

    def _feed(self) -> None:
        """Send as many jobs as there are workers: others can still be taken back."""
        while self._is_ready and self._server is not None and self._queue and len(self._running) < self.workers:
            mark, data = self._queue.popitem(last=False)
            try:
                self._server.connection.send_bytes(mark.encode())
                self._server.connection.send_bytes(data)
            except OSError:
                return self._lose()
            self._running.add(mark)

    def _listen(self, server: Server) -> None:
        """What the server says, until it ends or has been idle for a while."""
        connection = server.connection
        with suppress(EOFError, OSError):
            while connection.poll(IDLE) or self._queue or self._running or not self._is_ready:
                if not connection.poll(0):
                    continue
                said = connection.recv_bytes()
                if said == READY:
                    with self._changed:
                        self._is_ready = True
                        self._feed()
                    continue
                error = connection.recv_bytes().decode(errors="replace")
                with self._changed:
                    self._settle(said.decode(), error)
        with self._changed:
            if self._server is server:
                self._lose()
        with suppress(OSError):
            connection.close()
        server.process.wait()

    def _settle(self, mark: str, error: str) -> None:
        self._running.discard(mark)
        if error and error != FOUND.decode():
            logger.info("a kernel that was compiled ahead failed: %s", error)
            self.failed[mark] = error
        else:
            self.done.add(mark)
            self.compiled += not error
            self._starts = min(self._starts, 1)
        self._feed()
        self._changed.notify_all()

    def _lose(self) -> None:
        """There is no server: nobody is at anything."""
        self._server, self._is_ready = None, False
        self._queue.clear()
        self._running.clear()
        self._changed.notify_all()


def pool_of(target: Target) -> Pool:
    """The pool of this process for a target, whose kernels lie where Triton keeps them now."""
    return _pool_in(target, cache_dir())


@cache
def _pool_in(target: Target, folder: str) -> Pool:
    pool = Pool(target, cache_dir=folder)
    atexit.register(pool.close)
    _pools.append(pool)
    return pool


_pools: list[Pool] = []


def wait_for_pools() -> None:
    """Wait until nothing that was given away is left to do."""
    for pool in _pools:
        pool.wait()


@cache
def current_target(index: int) -> Target:
    """That of a card by its index."""
    import torch
    from triton.runtime import driver

    with torch.cuda.device(index):
        found: Any = driver.active.get_current_target()
    return Target(found.backend, found.arch, found.warp_size)
