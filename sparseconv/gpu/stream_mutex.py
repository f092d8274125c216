"""A mutex for calls that use the same memory, as replays of a CUDA graph do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StreamMutex:
    """One thread at a time has its turn, and its stream goes on after that of the turn before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._last: torch.cuda.Stream | None = None

    def __reduce__(self) -> tuple[type[StreamMutex], tuple[()]]:
        """A copy is of other memory: its turns are its own."""
        return StreamMutex, ()

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """A turn on the current stream of a device; a thread may take one within its own.

        >>> mutex, here = StreamMutex(), torch.device("cpu")
        >>> with mutex.on(here), mutex.on(here):
        ...     "alone"
        'alone'
        """
        with self._lock:
            if device.type == "cuda":
                now = torch.cuda.current_stream(device)
                if self._last is not None and self._last != now:
                    now.wait_stream(self._last)
                self._last = now
            yield
