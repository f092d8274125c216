"""Pages of new memory, which the kernel clears one by one, there before rows are written to them."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

#: of Linux 5.14 and later: map pages that can be written, and leave what is in them
POPULATE_WRITE = 23
#: threads that ask for pages, and bytes that each asks for at a time
THREADS, PIECE = 8, 2**26
PAGE = 2**21


class Pages:
    """Threads that ask for the pages of arrays in host memory, while a GPU works. Where the kernel does not know the
    call, pages come as they are written to."""

    def __init__(self, device: torch.device) -> None:
        has_call = device.type == "cuda" and sys.platform == "linux"
        self._pool = ThreadPoolExecutor(THREADS, "stream-pages") if has_call else None

    def ask(self, array: torch.Tensor) -> torch.Tensor:
        """For all whole pages of a contiguous array, which is returned. Nothing waits for them."""
        first, end = (array.data_ptr() + PAGE - 1) // PAGE * PAGE, (array.data_ptr() + array.nbytes) // PAGE * PAGE
        if self._pool is not None:
            for at in range(first, end, PIECE):
                self._pool.submit(_populate, array, at, min(PIECE, end - at))
        return array

    def close(self) -> None:
        """Ask for no more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _populate(array: torch.Tensor, at: int, size: int) -> None:
    """Pages of ``array``, which is kept meanwhile. The call lets other threads of Python run."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), POPULATE_WRITE)
