"""Side streams of one run: maps are built ahead of the features, weight gradients are summed behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from sparseconv.torch_private import clear_workspaces


class _State(threading.local):
    side: SideStreams | None = None


_state = _State()
_NOTHING: AbstractContextManager[Any] = nullcontext()


class SideStreams:
    """Side streams of one run: maps go ahead of the features, sums of gradients fall behind them.

    In program order a map waits behind the features that were computed before somebody asked for it; on a stream of its
    own it is there when they come to it. Features wait for the maps that were asked for so far, maps for no features.
    So nothing that maps are made from may be written, and no memory that they were given may be taken again, while
    features may read it: everything built on side streams is kept until the run ends.

    Tables and searches, whose launches are cooperative and must not meet, are one queue, with the sorts between them;
    the lists made of them (tiles, jobs) are another, for which the next map's table does not wait. Edges by tap are a
    third, which waits for their search alone: they fill what sorts and tiles leave of the GPU.

    Nobody but the caller waits for the sums of gradients, and what they read is kept until the next one's turn. They
    begin after the features so far, so their memory is that of the features (`scratch`).

    Args:
        device: whose current stream is that of the run.
        summed: whether gradients are summed on a side stream.
        like: those of another run, whose streams these are, too; that run has ended, or is launched before this one.
    """

    def __init__(self, device: torch.device, summed: bool = True, like: SideStreams | None = None) -> None:
        self._features = torch.cuda.current_stream(device)
        if like is None:
            # short launches of few programs go first; edges, which gradients alone want, after sorts
            self._maps, self._lists = (torch.cuda.Stream(device, priority=-2) for _ in range(2))
            self._edges = torch.cuda.Stream(device, priority=-1)
        else:
            self._maps, self._lists, self._edges = like.streams
        sums: torch.cuda.Stream | None = None if like is None else like._sums
        self._sums: torch.cuda.Stream | None = (sums or torch.cuda.Stream(device)) if summed else None
        self._kept: list[Any] = []
        self._operands: list[torch.Tensor] = []
        self._summing = False
        self._found: list[torch.Tensor] = []
        self._current: torch.cuda.Stream | None = None
        self._retired: tuple[Any, tuple[torch.cuda.Event, ...]] | None = None
        #: bytes that maps have taken and not given back
        self.memory = 0
        #: whether a sum went into another number before it was waited for
        self.mixed = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Within it, this thread builds and sums on side streams. It ends before later work of the current stream."""
        for stream in self.streams:
            stream.wait_stream(self._features)
        _state.side = self
        try:
            yield
        finally:
            _state.side = None
            for stream in self.streams:
                self._features.wait_stream(stream)
            self.catch_up()
            self._retired = None
            self._kept.clear()
            self._found.clear()

    def map_stream(self) -> AbstractContextManager[SideStreams]:
        """Within it, launches and memory belong to the stream of the maps; whoever entered it then waits for them."""
        return self._on(self._maps)

    def list_stream(self) -> AbstractContextManager[SideStreams]:
        """`map_stream` of lists, from maps."""
        return self._on(self._lists)

    def edge_stream(self, since: StreamEvent | None) -> AbstractContextManager[SideStreams]:
        """`map_stream` of edges by tap, from maps of this run until a moment of it; else from all maps so far."""
        return self._on(self._edges, since.event if since is not None and since.of is self else None)

    def reporting(self) -> AbstractContextManager[SideStreams]:
        """`map_stream` after all maps, lists and edges so far."""
        for stream in self.streams[1:]:
            self._maps.wait_stream(stream)
        return self._on(self._maps)

    def following(self) -> AbstractContextManager[SideStreams]:
        """`map_stream` after all features so far, which say what rows there are."""
        self._maps.wait_stream(self._features)
        return self.map_stream()

    def moment(self) -> StreamEvent:
        """All maps so far."""
        return StreamEvent(self, self._maps.record_event())

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """The streams that keep their memory until the run ends: of maps, of lists and of edges."""
        return self._maps, self._lists, self._edges

    @contextmanager
    def _on(self, stream: torch.cuda.Stream, after: torch.cuda.Event | None = None) -> Iterator[SideStreams]:
        outer, device = self._current, stream.device
        if outer is stream:
            yield self
            return
        here, before = torch.cuda.current_stream(device), torch.cuda.memory_allocated(device)
        if after is not None:
            stream.wait_event(after)
        elif stream is not self._maps:
            stream.wait_stream(self._maps)
        self._current = stream
        try:
            with torch.cuda.stream(stream):
                yield self
        finally:
            self._current = outer
        here.wait_stream(stream)
        if outer is None:
            self._features.wait_stream(stream)
            self.memory += torch.cuda.memory_allocated(device) - before

    def retire(self, used: Any) -> None:
        """Keep what lists were made of until they are there: until the next call, when maps wait for those lists."""
        if self._retired is not None:
            for event in self._retired[1]:
                self._maps.wait_event(event)
        self._retired = used, (self._lists.record_event(), self._edges.record_event())

    def keep(self, built: Any) -> None:
        """Keep what was built on a side stream until the run ends."""
        self._kept.append(built)

    def summed(self, run: Callable[[], torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
        """What ``run`` finds of operands that are there; not to be read before it was `settle`d."""
        if self._sums is None:
            return run()
        self.catch_up()
        self._operands += operands
        self._sums.wait_stream(self._features)
        self._summing = True
        try:
            with torch.cuda.stream(self._sums):
                found = run()
        finally:
            self._summing = False
        self._found.append(found)
        return found

    def scratch(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for launches here and now; of sums on a side stream, taken from the features' until these wait."""
        device = self._features.device
        if not self._summing:
            return torch.empty(size, dtype=dtype, device=device)
        with torch.cuda.stream(self._features):
            memory = torch.empty(size, dtype=dtype, device=device)
        self._operands.append(memory)
        return memory

    def settle(self, results: Sequence[torch.Tensor | None]) -> None:
        """Wait for all that was summed; sums that are not among these results were read too early."""
        self.catch_up()
        there = {t.data_ptr() for t in results if t is not None}
        self.mixed |= any(t.data_ptr() not in there for t in self._found)
        self._found.clear()

    def catch_up(self) -> None:
        """Wait for all that was summed, and let go of what was read."""
        if self._operands and self._sums is not None:
            self._features.wait_stream(self._sums)
            self._operands = []


class StreamEvent(NamedTuple):
    """What maps of a run had come to."""

    of: SideStreams
    event: torch.cuda.Event


def map_stream() -> AbstractContextManager[SideStreams | None]:
    """A context for launches that maps are made by: on the stream of maps in a run that has one, else where they are.

    What it gives must `keep` what was built, where it is not None.
    """
    side = current()
    return _NOTHING if side is None else side.map_stream()


def following() -> AbstractContextManager[SideStreams | None]:
    """`map_stream` of grids that features decide."""
    side = current()
    return _NOTHING if side is None else side.following()


def reporting() -> AbstractContextManager[SideStreams | None]:
    """`map_stream` of what tells the CPU of all that was built."""
    side = current()
    return _NOTHING if side is None else side.reporting()


def list_stream() -> AbstractContextManager[SideStreams | None]:
    """`map_stream` of what is made of tables, searches and sorts, none of which is made of it."""
    side = current()
    return _NOTHING if side is None else side.list_stream()


def edge_stream(since: StreamEvent | None) -> AbstractContextManager[SideStreams | None]:
    """`map_stream` of edges by tap, from maps that were launched until a moment."""
    side = current()
    return _NOTHING if side is None else side.edge_stream(since)


def keep(built: Any) -> None:
    """Keep what was built until the run of this thread ends, where it has streams of its own."""
    side = current()
    if side is not None:
        side.keep(built)


def forget_workspaces() -> None:
    """Let go of the workspaces that cuBLAS keeps for every stream; it takes one anew where it needs one."""
    clear_workspaces()


def scratch(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An array for launches here and now, as the memory was."""
    side = current()
    return torch.empty(*size, dtype=dtype, device=device) if side is None else side.scratch(*size, dtype=dtype)


def current() -> SideStreams | None:
    """That of the run of this thread."""
    return _state.side
