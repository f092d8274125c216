"""A worker process that measures one checkout, and what can be asked of it."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from benchmarks.layers.machine import revision
from benchmarks.layers.runner import environment

WORKER = Path(__file__).with_name("worker.py")
#: seconds that one order may take, compilation included
PATIENCE = 150.0
Answer = dict[str, Any]


class Side:
    """One checkout, and its worker, which starts with the first order and anew after an error.

    Args:
        name: ``"old"`` or ``"new"``.
        checkout: a folder that holds the package ``sparseconv``.
        caches: folder for what it compiles; each side has its own.
    """

    def __init__(self, name: str, checkout: Path, caches: Path) -> None:
        if not (checkout / "sparseconv" / "__init__.py").is_file():
            raise SystemExit(f"--{name} {checkout} holds no package sparseconv: give the root of a checkout")
        self.name, self.checkout, self._caches = name, Path(os.path.abspath(checkout)), caches
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def facts(self) -> dict[str, str | None]:
        """The commit, where the folder is a repository's root, and a digest of the package's sources."""
        found = hashlib.sha256()
        for file in sorted((self.checkout / "sparseconv").rglob("*.py")):
            found.update(file.relative_to(self.checkout).as_posix().encode() + file.read_bytes())
        known = (self.checkout / ".git").exists()
        return {"revision": revision(self.checkout) if known else None, "sources": found.hexdigest()[:12]}

    def tell(self, order: dict[str, Any]) -> None:
        """Send an order; `hear` has its answer."""
        process = self._process or self._start(self._caches)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return  # `hear` meets the end of its answers

    def hear(self, end: float) -> Answer:
        """The answer to the last order; ``{"error": ...}`` where none comes until ``end`` (of `time.monotonic`)."""
        left = min(PATIENCE, max(0.1, end - time.monotonic()))
        try:
            line = self._answers.get(timeout=left)
            found = json.loads(line) if line else {"error": "the process ended"}
        except queue.Empty:
            found = {"error": "took longer than there was time for"}
        if "error" in found:
            self.stop()  # a context that met an error is of no more use
        return found

    def ask(self, order: dict[str, Any], end: float) -> Answer:
        self.tell(order)
        return self.hear(end)

    def first_gradient(self, order: dict[str, Any], end: float, caches: Path) -> Answer:
        """Seconds to the first gradients of a new process, which finds compiled kernels in ``caches``, if any."""
        self.stop()
        self._start(caches)
        found = self.ask(order | {"do": "first_gradient"}, end)
        self.stop()
        return found

    def _start(self, caches: Path) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(self.checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(caches, self.checkout)
            | {"SPARSECONV_AUTOTUNE": "0", "SPARSECONV_CACHE_DIR": str(caches / "own")}
            | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self._caches / "bytecode")},
        )
        self._answers = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()
        return self._process

    def stop(self) -> None:
        """End the worker, if there is one."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None


def _read(lines: TextIO, answers: queue.Queue[str]) -> None:
    for line in lines:
        answers.put(line)
    answers.put("")
