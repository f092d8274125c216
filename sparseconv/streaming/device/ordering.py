"""Rows grouped by their owners, piece by piece: each group in its old order, where the order lies."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import torch

#: rows of one owner one after another, on average, from which on they are ordered together
RUN = 8
#: threads that put rows in their places where a card sorts, and pieces that wait for them
PLACERS = 8


class OnHost:
    """Groups of each piece, put into an order in host memory from ``starts`` on; beside a GPU by threads.

    On a CPU a thread's stack would count in the budget.
    """

    def __init__(self, into: torch.Tensor, starts: list[int], device: torch.device) -> None:
        self.into, self.starts = into.numpy(), starts
        self._pool = None if device.type == "cpu" else ThreadPoolExecutor(PLACERS)
        self._placing: list[Future[None]] = []

    def __enter__(self) -> OnHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self._pool is not None:
            try:
                for one in self._placing:
                    one.result()
            finally:
                self._pool.shutdown()

    def put(self, owners: torch.Tensor, source: torch.Tensor | int) -> None:
        """A piece's rows, by the owner of each: rows of ``source``, or from that number on one after another."""
        order = grouped(owners, len(self.starts))
        if isinstance(source, int):
            rows = on_host(order.to(torch.from_numpy(self.into[:0]).dtype).add_(source))
        else:
            rows = torch.index_select(source, 0, on_host(order.to(torch.int32)))
        counts = torch.bincount(owners, minlength=len(self.starts)).tolist()
        if self._pool is None:
            _place(rows.numpy(), counts, self.into, self.starts)
        else:
            self._placing.append(self._pool.submit(_place, rows.numpy(), counts, self.into, self.starts))
        self.starts = [to + count for to, count in zip(self.starts, counts)]
        if len(self._placing) >= PLACERS:
            self._placing.pop(0).result()


class OnCard:
    """The same where the order lies on the card: nothing is read back."""

    def __init__(self, into: torch.Tensor, starts: list[int]) -> None:
        self.into, self.starts = into, torch.tensor(starts, device=into.device)

    def put(self, owners: torch.Tensor, source: torch.Tensor | int) -> None:
        """A piece's rows, by the owner of each: rows of ``source``, or from that number on one after another."""
        own, order = owners.sort(stable=True)
        counts = torch.bincount(owners, minlength=len(self.starts))
        shifts = self.starts - (counts.cumsum(0) - counts)
        places = torch.index_select(shifts, 0, own.int()).add_(torch.arange(len(own), device=own.device))
        rows = order.add_(source) if isinstance(source, int) else torch.index_select(source, 0, order)
        self.into[places] = rows.to(self.into.dtype)
        self.starts += counts


def on_host(values: torch.Tensor) -> torch.Tensor:
    """Values of a GPU in pinned memory, which the card writes to in one go; others as they are."""
    if not values.is_cuda:
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return pinned


def _place(rows: np.ndarray, counts: list[int], into: np.ndarray, starts: list[int]) -> None:
    """Put groups of so many rows, one after another, where each of them starts."""
    taken = 0
    for to, count in zip(starts, counts):
        if count:
            into[to : to + count] = rows[taken : taken + count]
            taken += count


def grouped(owners: torch.Tensor, count: int) -> torch.Tensor:
    """The order that groups rows by their owners, numbers below ``count``, each group in its old order.

    On a CPU, where few owners follow one another, runs of rows are ordered. Else rows follow their owners' bits in one
    number: such numbers are distinct, so any sort will do, and numpy has a fast one for plain numbers.

    >>> grouped(torch.tensor([2, 0, 2, 1]), 3).tolist()
    [1, 3, 0, 2]
    """
    if owners.device.type != "cpu" or not len(owners):
        return owners.sort(stable=True).indices
    of, places = owners.numpy(), np.arange(len(owners), dtype=np.int32)
    starts = np.concatenate([[0], (of[1:] != of[:-1]).nonzero()[0] + 1]).astype(np.int32)
    if len(starts) < len(of) // RUN:
        by, lengths = of[starts].argsort(kind="stable"), np.diff(starts, append=np.int32(len(of)))
        ends = lengths[by].cumsum(dtype=np.int32)
        return torch.from_numpy(places + (starts[by] + lengths[by] - ends).repeat(lengths[by]))
    bits = (len(of) - 1).bit_length()
    kind = np.uint32 if bits + (count - 1).bit_length() <= 32 else np.uint64
    packed = (of.astype(kind) << kind(bits)) | places.astype(kind)
    packed.sort()
    return torch.from_numpy((packed & kind((1 << bits) - 1)).astype(np.int32))
