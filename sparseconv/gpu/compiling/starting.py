"""Starting the process that compiles, if need be before it is known what for.

Its imports take seconds. So whoever makes a layer calls `start_early`: the imports are done by the time that the first
layer runs. It starts nothing without a card, nor where Triton's cache has kernels of this library already.
"""

from __future__ import annotations

import base64
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import NamedTuple

from sparseconv.gpu.compiling.job import MARKS

#: processes that compile at most
MOST_WORKERS = 32
#: files that the driver of a card makes
DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
_BOOT = "import sys; sys.path[:] = {path!r}; from sparseconv.gpu.compiling.server import serve; serve({at})"


class Server(NamedTuple):
    """A process that compiles, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def end(self) -> None:
        """Its work is not done; whoever listens to it sees that it ended."""
        with suppress(OSError):
            self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


class _Early:
    """The server that was started before anything asked for it, of the process that started it."""

    is_tried = False
    server: Server | None = None
    pid = 0
    lock = threading.Lock()


def start_early() -> None:
    """Start a server for kernels that will be asked for, unless this process has tried; returns at once."""
    if _Early.is_tried:
        return
    with _Early.lock:
        if not _Early.is_tried and _is_worth_it():
            with suppress(OSError):
                _Early.server, _Early.pid = start(), os.getpid()
        _Early.is_tried = True


def started() -> Server:
    """The server that `start_early` started, or a new one. Raises OSError where none can be started."""
    with _Early.lock:
        server, _Early.server = _Early.server, None
    if server is not None and _Early.pid == os.getpid() and server.process.poll() is None:
        return server
    return start()


def start() -> Server:
    """A new server. Raises OSError where none can be started."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(path=import_path(), at=theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    except OSError:
        ours.close()
        raise
    return Server(process, Connection(ours.detach()))


def import_path() -> list[str]:
    """Where this process finds modules."""
    return [p or os.getcwd() for p in sys.path]


def _is_worth_it() -> bool:
    """Whether kernels will be compiled here, as far as can be known without Triton and without the card."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0") or multiprocessing.parent_process() is not None:
        return False
    if not any(os.path.exists(file) for file in DRIVER) or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return worker_count() > 0 and can_start() and not os.path.isdir(os.path.join(cache_dir(), folder_of(MARKS)))


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


def can_start() -> bool:
    """Whether a process of Python can be started that writes where Triton keeps its kernels."""
    has_python = bool(sys.executable) and not getattr(sys, "frozen", False)
    return sys.platform == "linux" and has_python and _can_write(cache_dir())


@cache
def _can_write(place: str) -> bool:
    while place and not os.path.exists(place):
        place = os.path.dirname(place)
    return bool(place) and os.access(place, os.W_OK)


def cache_dir() -> str:
    """Where Triton keeps compiled kernels; does not load it."""
    if "triton" in sys.modules:
        from triton import knobs

        return str(knobs.cache.dir or "")
    given = os.environ.get("TRITON_CACHE_DIR", "").strip()
    home = os.environ.get("TRITON_HOME", "").strip() or os.path.expanduser("~")
    return given or os.path.join(home, ".triton", "cache")


def folder_of(key: str) -> str:
    """The name of a key's folder in Triton's cache."""
    return base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")
