"""Copies in and out beside the compute: the next block comes and the last one goes while this one is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from sparseconv.streaming.device.ordering import on_host
from sparseconv.trace.program import mapped

Item = TypeVar("Item")
Ready = TypeVar("Ready")
#: what the parts of a block leave, by the numbers of steps
Parts = list[dict[int, Any]]
#: bytes of pinned memory that are filled together: locking pages takes long, and torch keeps them for the next
PIECE = 2**27
#: threads that put rows in their places in host memory
PLACERS = 8


class Direct:
    """One after another: for a CPU, where the copies would take the compute's own cores."""

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        pass

    def prefetched(self, items: Iterable[Item], prepare: Callable[[Item], Ready]) -> Iterator[tuple[Item, Ready]]:
        """Each item with what is prepared for it."""
        for item in items:
            yield item, prepare(item)

    def gathered(self, source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor in host memory, on the device."""
        return torch.index_select(source, 0, rows.to(source.device))

    def leave(self, parts: Parts, keep: Callable[[Parts], None], large: Collection[int] = ()) -> None:
        """Give tensors of the device, in host memory, to ``keep``; those of ``large``, it brings by `write`."""
        keep(parts)

    def write(self, into: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor) -> None:
        """Put values of the device into rows of a tensor in host memory; without rows, into all of it."""
        if rows is None:
            into.copy_(values)
        else:
            into[rows.to(into.device)] = values.to(into.device)


class Overlapped:
    """A thread and a stream for the way in, and another of each for the way out, with pinned memory between.

    One item is prepared ahead, and one result is on its way out: `prepare` and `keep` run in these threads. What they
    raise is raised where the next item is asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.current_stream(device)
        self._into, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._into.wait_stream(self._compute)  # what of the scene is there
        self._readers = ThreadPoolExecutor(1, "stream-in")
        self._writers = ThreadPoolExecutor(1, "stream-out")
        self._placers = ThreadPoolExecutor(PLACERS, "stream-rows")
        self._leaving: Future[None] | None = None

    def __enter__(self) -> Overlapped:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            for threads in (self._writers, self._readers, self._placers):
                threads.shutdown(cancel_futures=True)

    def _wait(self) -> None:
        """Until the last block's results are in their places; what that raised is raised here."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.result()

    def prefetched(self, items: Iterable[Item], prepare: Callable[[Item], Ready]) -> Iterator[tuple[Item, Ready]]:
        """Each item with what is prepared for it, on the stream of the way in; the current stream waits for that."""

        def prepared(item: Item) -> tuple[Ready, torch.cuda.Event]:
            with torch.cuda.device(self.device), torch.cuda.stream(self._into):
                made = prepare(item)
                return made, self._into.record_event()

        left = list(items)
        coming = self._readers.submit(prepared, left[0]) if left else None
        for number, item in enumerate(left):
            assert coming is not None
            made, event = coming.result()
            coming = self._readers.submit(prepared, left[number + 1]) if number + 1 < len(left) else None
            torch.cuda.current_stream(self.device).wait_event(event)
            yield item, made

    @torch.no_grad()  # each thread says so for itself, and features may want a gradient
    def gathered(self, source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor in host memory, gathered in pinned memory, on their way to the device; or of one on a card.

        The numbers of rows may lie on either.
        """
        if source.is_cuda:
            numbers = self._used(to_device(rows, len(source), source.device))
            return self._used(torch.index_select(source, 0, numbers).to(self.device))
        made = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype, device=self.device)
        rows = on_host(rows)
        for part in _pieces(made):
            pinned = torch.empty(made[part].shape, dtype=source.dtype, pin_memory=True)
            torch.index_select(source, 0, rows[part], out=pinned)
            made[part].copy_(pinned, non_blocking=True)
        return self._used(made)

    def _used(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor that was made on the way in and is used on the compute's stream, which owns it from then on."""
        values.record_stream(self._compute)
        return values

    def leave(self, parts: Parts, keep: Callable[[Parts], None], large: Collection[int] = ()) -> None:
        """Copy tensors of the device to pinned memory, and give that to ``keep`` once it is there."""
        self._wait()
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            pinned = [
                {n: v if n in large else mapped(v, torch.Tensor, self._copied) for n, v in part.items()}
                for part in parts
            ]
            event = self._out.record_event()

        def kept() -> None:
            event.synchronize()
            keep(pinned)

        self._leaving = self._writers.submit(kept)

    def write(self, into: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor) -> None:
        """By little pinned memory: one piece comes while the one before is put in its place."""
        coming: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.cuda.Event] | None = None
        with torch.cuda.device(self.device), torch.cuda.stream(self._out):
            for part in _pieces(values):
                pinned = self._copied(values[part])
                numbers = None if rows is None else self._copied(rows[part])
                self._put(coming)
                coming = into if rows is not None else into[part], numbers, pinned, self._out.record_event()
            self._put(coming)
        if into.is_cuda:
            self._out.synchronize()

    def _put(self, coming: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.cuda.Event] | None) -> None:
        if coming is None:
            return
        into, rows, pinned, event = coming
        event.synchronize()
        step = max(1, -(-len(pinned) // PLACERS))
        if rows is None:
            list(self._placers.map(torch.Tensor.copy_, into.split(step), pinned.split(step)))
        elif into.is_cuda or not into.is_contiguous():
            into[rows.to(into.device)] = pinned.to(into.device)
        else:
            list(self._placers.map(partial(place, into), rows.split(step), pinned.split(step)))

    def _copied(self, values: torch.Tensor) -> torch.Tensor:
        if not values.is_cuda:
            return values
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        values.record_stream(self._out)
        return pinned


def to_device(rows: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Numbers of rows of so many, by pinned memory, in no more bits than they need; those that are there stay."""
    if rows.device.type == device.type:
        return rows
    kind = torch.int32 if count < 2**31 else torch.int64
    return torch.empty(rows.shape, dtype=kind, pin_memory=True).copy_(rows).to(device, non_blocking=True)


def place(into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Put contiguous rows in their places in host memory: each as one copy of its bytes, which torch does by number."""
    if values.numel():
        kind = f"V{values[0].nbytes}"
        to, of = (t.view(len(t), -1).view(torch.uint8).numpy().view(kind).ravel() for t in (into, values))
        to[rows.numpy()] = of


def _pieces(values: torch.Tensor) -> Iterator[slice]:
    """Parts of at most ``PIECE`` bytes of rows."""
    step = max(1, PIECE // max(1, values[:1].nbytes))
    return (slice(first, first + step) for first in range(0, len(values), step))


def pipeline_of(device: torch.device) -> Direct | Overlapped:
    """The one for a device."""
    return Overlapped(device) if device.type == "cuda" else Direct()
