"""Kernels that are compiled ahead beside this process, which meets them in Triton's cache.

Triton holds the interpreter's lock while it compiles, so threads compile one kernel after another. Processes do not
share a lock; what they compile lies in Triton's cache, where a launch finds it within milliseconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from sparseconv.gpu.compiling.job import Job, Target, is_marked
from sparseconv.gpu.compiling.server import FOUND, READY, Settings

logger = logging.getLogger(__name__)
#: processes that compile at most, seconds without work after which they leave, and seconds that one kernel may take
MOST_WORKERS, IDLE, PATIENCE = 32, 20.0, 120.0
_BOOT = "import sys; sys.path[:] = {path!r}; from sparseconv.gpu.compiling.server import serve; serve({at})"


@cache
def worker_count() -> int:
    """Processes that may compile beside this one: a core each, shared by the ranks of this machine.

    The environment variable SPARSECONV_COMPILE_WORKERS sets it; 0: none. One core has none.
    """
    asked = os.environ.get("SPARSECONV_COMPILE_WORKERS")
    if asked is not None and asked.isdigit():
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = cores // max(1, int(ranks) if ranks.isdigit() else 1)
    return 0 if cores < 2 else min(max(1, share), MOST_WORKERS)


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
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: Connection | None = None
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
            server, self._server = self._server, None
            self._lose()
        if server is not None:
            with suppress(OSError):
                server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(5)

    def _start(self) -> bool:
        ours, theirs = socket.socketpair()
        self._starts += 1
        path = [p or os.getcwd() for p in sys.path]
        try:
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-c", _BOOT.format(path=path, at=theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._socket = Connection(ours.detach())
            self._socket.send_bytes(pickle.dumps(Settings(path, self.workers, self.target, self._cache_dir)))
        except OSError as error:
            logger.info("kernels are compiled in this process: %s", error)
            self._starts = 3
            self._lose()
            return False
        arguments = (self._socket, self._server)
        threading.Thread(target=self._listen, args=arguments, name="sparseconv listener", daemon=True).start()
        return True

    def _feed(self) -> None:
        """Send as many jobs as there are workers: others can still be taken back."""
        while self._is_ready and self._socket is not None and self._queue and len(self._running) < self.workers:
            mark, data = self._queue.popitem(last=False)
            try:
                self._socket.send_bytes(mark.encode())
                self._socket.send_bytes(data)
            except OSError:
                return self._lose()
            self._running.add(mark)

    def _listen(self, connection: Connection, server: subprocess.Popen[bytes]) -> None:
        """What the server says, until it ends or has been idle for a while."""
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
                self._server = None
                self._lose()
        with suppress(OSError):
            connection.close()
        server.wait()

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
        self._socket, self._is_ready = None, False
        self._queue.clear()
        self._running.clear()
        self._changed.notify_all()


def can_start() -> bool:
    """Whether a process of Python can be started that writes where Triton keeps its kernels."""
    return (
        sys.platform == "linux"
        and bool(sys.executable)
        and not getattr(sys, "frozen", False)
        and _can_write(cache_dir())
    )


@cache
def _can_write(place: str) -> bool:
    while place and not os.path.exists(place):
        place = os.path.dirname(place)
    return bool(place) and os.access(place, os.W_OK)


def cache_dir() -> str:
    """Where Triton keeps compiled kernels."""
    try:
        from triton import knobs
    except ImportError:  # Triton before 3.4
        return os.environ.get("TRITON_CACHE_DIR", "").strip() or os.path.expanduser("~/.triton/cache")
    return str(knobs.cache.dir or "")


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


def wait_for_pools(timeout: float | None = None) -> bool:
    """Wait until nothing that was given away is left to do; whether that came about."""
    return all([pool.wait(timeout) for pool in _pools])


@cache
def current_target(index: int) -> Target:
    """That of a card by its index."""
    import torch
    from triton.runtime import driver

    with torch.cuda.device(index):
        found: Any = driver.active.get_current_target()
    return Target(found.backend, found.arch, found.warp_size)
