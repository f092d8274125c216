"""The process that compiles: it imports what kernels need once, and forks workers that compile one kernel at a time.

It has no CUDA context, is no child of `multiprocessing`, and ends with the process that started it: when the socket
between them closes.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pickle
import socket
import sys
import tempfile
from collections import deque
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparseconv.gpu.compiling.job import Target

#: what the first workers of a server will be asked for
PRELOADED = (
    "sparseconv.backends.triton_implicit_gemm.kernels",
    "sparseconv.backends.triton_implicit_gemm.gluon_kernels",
    "sparseconv.backends.triton_implicit_gemm.gluon_weight_grad",
    "sparseconv.geometry.gpu.fused",
    "sparseconv.geometry.gpu.prefetch",
)
#: priority that workers leave to whoever waits for them, and seconds that a server waits for what it will be asked
NICE, PATIENCE = 5, 300.0
READY = b"ready"
#: what a worker answers where another rank's had compiled the kernel
FOUND = b"found"


class Settings(NamedTuple):
    """What a server is told first."""

    path: list[str]
    workers: int
    target: Target
    cache: str | None


class NoCard:
    """Stands for Triton's driver where there is no card: it knows the target alone."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def aim_at(target: Target) -> None:
    """Let Triton compile for a card that need not be here, in this whole process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(NoCard(GPUTarget(*target)))


def serve(descriptor: int) -> None:
    """Compile what comes through a socket until it closes: (mark, job) in, (mark, error or None) out."""
    parent = Connection(descriptor)
    os.environ.pop("TRITON_INTERPRET", None)
    with suppress(OSError):
        os.nice(NICE)
    for name in PRELOADED:
        importlib.import_module(name)
    _read_triton()
    try:
        if not parent.poll(PATIENCE):
            return
        settings: Settings = pickle.loads(parent.recv_bytes())
    except EOFError:
        return
    sys.path[:] = settings.path
    if settings.cache:
        os.environ["TRITON_CACHE_DIR"] = settings.cache
    aim_at(settings.target)
    parent.send_bytes(READY)
    idle: list[Connection] = []
    busy: dict[Connection, bytes] = {}
    waiting: deque[tuple[bytes, bytes]] = deque()
    count = 0
    while True:
        while waiting and (idle or count < settings.workers):
            if not idle:
                idle.append(_fork(parent, [*busy]))
                count += 1
            worker, (mark, data) = idle.pop(), waiting.popleft()
            try:
                worker.send_bytes(mark)
                worker.send_bytes(data)
            except OSError:
                count -= 1
                waiting.appendleft((mark, data))
                continue
            busy[worker] = mark
        for ready in wait([parent, *busy]):
            if ready is parent:
                try:
                    waiting.append((parent.recv_bytes(), parent.recv_bytes()))
                except EOFError:
                    return
                continue
            worker = ready  # type: ignore[assignment]
            mark = busy.pop(worker)
            try:
                answer = worker.recv_bytes()
                idle.append(worker)
            except (EOFError, OSError):  # it crashed: whoever needs the kernel compiles it
                answer, count = b"the process that compiled it died", count - 1
                worker.close()
            parent.send_bytes(mark)
            parent.send_bytes(answer)


def _read_triton() -> None:
    """The digest of Triton's files, which all workers then have."""
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def _fork(parent: Connection, others: list[Connection]) -> Connection:
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return Connection(ours.detach())
    ours.close()
    for connection in (parent, *others):
        connection.close()  # a worker that kept it would not see the end of its server, nor others theirs
    _work(Connection(theirs.detach()))


def _work(server: Connection) -> NoReturn:
    """A worker: (mark, job) in, an error or nothing out; ends with its server."""
    from sparseconv.gpu.compiling.job import compile_job, is_marked, put_mark

    status = 0
    try:
        while True:
            mark, data = server.recv_bytes().decode(), server.recv_bytes()
            try:
                answer = FOUND
                with _alone(mark):
                    if not is_marked(mark):
                        compile_job(data)
                        put_mark(mark)
                        answer = b""
            except Exception as error:
                answer = repr(error)[:2000].encode()
            server.send_bytes(answer)
    except (EOFError, OSError, KeyboardInterrupt):
        status = 1
    os._exit(status)


@contextmanager
def _alone(mark: str) -> Iterator[None]:
    """One process of this machine at a time for a kernel: of several ranks one compiles, the others find it."""
    try:
        folder = os.path.join(tempfile.gettempdir(), f"sparseconv-compiling-{os.getuid()}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        file = open(os.path.join(folder, mark[:32]), "wb")  # noqa: SIM115
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        with suppress(OSError):
            os.unlink(file.name)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
