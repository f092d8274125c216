"""Memory of results on the CPU: what a large result gave up serves the next one."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from queue import Empty, SimpleQueue
from weakref import finalize

import numpy as np
import torch

LARGE = 32 << 20  # bytes from which malloc asks the system for every piece, and gives it back at once
KEPT = 512 << 20  # bytes of pieces without a result that are kept at most
HUGE = 2 << 20  # bytes of a huge page

_returned: SimpleQueue[mmap.mmap] = SimpleQueue()  # no lock: a destructor may interrupt its holder
_free: list[mmap.mmap] = []  # in the order in which they came back
_lock = threading.Lock()  # of the list; a caller that does not get it at once allocates anew


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor on the CPU of ``shape``, which begins where a line of 64 bytes does.

    It lies in huge pages, whose first writes cost a third or less. numpy and this module ask for them, torch does not.
    On Linux a tensor of 32 MB or more takes over the pages of a freed one, which may be a quarter larger. Otherwise
    the system would clear new pages. At most 512 MB of such pages are kept, and the system may take them at any time
    (``MADV_FREE``).

    >>> y = empty((3, 2), torch.bfloat16)
    >>> y.shape, y.dtype, y.data_ptr() % 64
    (torch.Size([3, 2]), torch.bfloat16, 0)
    """
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = _piece(size) if size >= LARGE and sys.platform == "linux" else np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    # a tensor of its own: what a custom function returns as a view may not be changed in place under autograd
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start).resize_(tuple(shape))


def release() -> None:
    """Give the system back what is kept for results to come."""
    with _lock:
        _settle(0)


def _piece(size: int) -> np.ndarray:
    """Uninitialized bytes, at least ``size``, that come back when the last array or tensor over them is gone."""
    found = None
    if _lock.acquire(blocking=False):
        try:
            _settle(KEPT)
            fitting = [piece for piece in _free if size <= len(piece) <= size + size // 4]
            if fitting:
                found = min(fitting, key=len)
                _free.remove(found)
        finally:
            _lock.release()
    if found is None:
        try:
            found = mmap.mmap(-1, -(-size // HUGE) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # too little is left: numpy finds less than whole pages, or says what was asked for
            return np.empty(size + 64, np.uint8)
        with suppress(OSError):  # a system without huge pages
            found.madvise(mmap.MADV_HUGEPAGE)
    bytes_ = np.frombuffer(found, np.uint8)
    finalize(bytes_, _give_up, found).atexit = False
    return bytes_


def _give_up(piece: mmap.mmap) -> None:
    with suppress(OSError):
        piece.madvise(mmap.MADV_FREE)
    _returned.put(piece)
    if _lock.acquire(blocking=False):
        try:
            _settle(KEPT)
        finally:
            _lock.release()


def _settle(kept: int) -> None:
    """What came back joins the list, whose first ones go until no more than ``kept`` bytes are left."""
    with suppress(Empty):
        while True:
            _free.append(_returned.get_nowait())
    while sum(map(len, _free)) > kept:
        del _free[0]
