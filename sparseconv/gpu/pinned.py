"""Numbers on their way from a kernel to the host, in pinned memory that is used again and again."""

from __future__ import annotations

import ctypes
import select
from functools import cache
from typing import Any

import torch

from sparseconv.gpu.launcher import INTERPRETED, pointer, power_of_2
from sparseconv.torch_private import current_stream

#: what stands in a report where its kernel has yet to write: no number that any would
UNWRITTEN = int.from_bytes(b"\x80" * 8, "little", signed=True)
#: looks at a report, half a microsecond each, before others have their turn: most maps are not that far behind
LOOKS = 256


class Report:
    """Integers (L,) int64 that a kernel leaves in pinned memory; queue more work before `read`, and nobody waits.

    It is made, and its kernel launched, on one stream. A number has arrived where it is not `UNWRITTEN`, so no event is
    recorded, and nobody waits for the end of the kernel. The memory goes back to a stock of that stream.
    """

    _values: list[int] | None = None

    def __init__(self, length: int, device: torch.device) -> None:
        lease = _lease(length, device)
        self._lease: _Lease | None = lease
        self._span = slice(0, length)
        self.pointer = lease.pinned.pointer

    @property
    def has_arrived(self) -> bool:
        """Whether `read` would wait for nothing."""
        lease = self._lease
        return lease is None or lease.pinned.has(self._span)

    def read(self) -> list[int]:
        """The integers; waits for the kernel. Raises RuntimeError where that failed."""
        lease, over, looks = self._lease, False, 0  # a thread that is faster does not take the memory from this one
        while self._values is None and lease is not None:
            pinned = lease.pinned
            values, looks = pinned.values[self._span], looks + 1
            if UNWRITTEN not in values:
                self._values = values
                self._lease = None
            elif over:
                raise RuntimeError("a report is read whose kernel was not launched")
            elif looks % LOOKS == 0:
                over = pinned.stream is None or pinned.stream.query()  # raises what a kernel failed with
                select.select((), (), (), 0)  # for other threads; time.sleep(0) takes 70 us
        return self._values or []


class KeptReport:
    """A report that stays on the device, where a kernel leaves it: for maps that are built without the host."""

    has_arrived = False

    def __init__(self, length: int, device: torch.device) -> None:
        self._values = torch.empty(length, dtype=torch.int64, device=device)
        self.pointer = pointer(self._values)

    def read(self) -> list[int]:
        """Raises RuntimeError."""
        raise RuntimeError(
            "the edges of a grid of fixed size are counted on the device alone, and layers in float64 ask for their "
            "number: ask a plan of an ordinary grid"
        )


class _Lease:
    """Pinned memory that its stock gets back when nobody holds this any more."""

    __slots__ = ("pinned", "stock")

    def __init__(self, pinned: _Pinned, stock: list[_Pinned]) -> None:
        self.pinned, self.stock = pinned, stock

    def __del__(self) -> None:
        self.stock.append(self.pinned)


def _lease(length: int, device: torch.device) -> _Lease:
    """Pinned memory of the current stream's stock that waits for so many numbers."""
    room = 64 if length <= 64 else power_of_2(length)
    stock = [] if INTERPRETED else _stock(device.index, current_stream(device.index), room)
    pinned = _free(stock) or _Pinned(room, device)
    pinned.clear(length)
    return _Lease(pinned, stock)


class _Pinned:
    """Pinned memory for reports, and the stream whose kernels write it."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.memory = torch.empty(length, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.pointer = pointer(self.memory)
        #: the same integers for Python, at a fraction of what a tensor takes
        self.values = (ctypes.c_int64 * length).from_address(self.memory.data_ptr())
        self._bytes, self._clean = memoryview(self.values).cast("B"), b"\x80" * (8 * length)
        self.stream: Any = None if INTERPRETED else _stream(device.index, current_stream(device.index))
        self.awaited = slice(0)

    def clear(self, length: int) -> None:
        """Wait for so many numbers from now on."""
        self.awaited = slice(0, length)
        self._bytes[: 8 * length] = self._clean[: 8 * length]

    def has(self, span: slice) -> bool:
        """Whether these numbers were written."""
        return UNWRITTEN not in self.values[span]


def _free(stock: list[_Pinned]) -> _Pinned | None:
    """One that no kernel will write any more: some were given back unread."""
    for _ in range(len(stock)):
        try:
            pinned = stock.pop(0)
        except IndexError:  # another thread took the last
            break
        if pinned.has(pinned.awaited):
            return pinned
        stock.append(pinned)
    return None


@cache
def _stock(index: int, stream: int, length: int) -> list[_Pinned]:
    return []


@cache
def _stream(index: int, address: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(index)  # the one at that address
