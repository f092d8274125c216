"""What of a run needs no turn of its own, on streams beside it: where a run is captured, no host sets the order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

_state = threading.local()
_NOTHING: AbstractContextManager[Any] = nullcontext()


class Aside:
    """Streams beside that of one run: maps go ahead of the features, sums of gradients fall behind them.

    In program order a map waits behind the features that were computed before somebody asked for it; on a stream of its
    own it is there when they come to it. Features wait for the maps that were asked for so far, maps for no features.
    So nothing that maps are made from may be written, and no memory that they were given may be taken again, while
    features may read it: everything built aside is kept until the run ends.

    Tables, searches and sorts are one queue, since launches that are cooperative must not meet; the lists made of them
    (tiles, jobs) are another, for which the next map's table does not wait. Edges by tap are a third, which waits for
    their search alone: they fill what sorts and tiles leave of the card.

    Nobody but the caller waits for the sums of gradients, and what they read is kept until the next one's turn.

    Args:
        device: whose current stream is that of the run.
        summed: whether gradients are summed aside.
    """

    def __init__(self, device: torch.device, summed: bool = True) -> None:
        self._features = torch.cuda.current_stream(device)
        # short launches of few programs go first
        self._maps, self._lists = (torch.cuda.Stream(device, priority=-2) for _ in range(2))
        # gradients alone want them: sorts go first
        self._edges = torch.cuda.Stream(device, priority=-1)
        self._sums = torch.cuda.Stream(device) if summed else None
        self._kept: list[Any] = []
        self._operands: tuple[torch.Tensor, ...] = ()
        self._found: list[torch.Tensor] = []
        self._lane: torch.cuda.Stream | None = None
        self._retired: tuple[Any, tuple[torch.cuda.Event, ...]] | None = None
        #: bytes that maps have taken and not given back
        self.memory = 0
        #: whether a sum went into another number before it was waited for
        self.mixed = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Within it, `building` and `summing` on this thread are aside. Ends before later work of the stream."""
        for lane in self._lanes:
            lane.wait_stream(self._features)
        _state.aside = self
        try:
            yield
        finally:
            _state.aside = None
            for lane in self._lanes:
                self._features.wait_stream(lane)
            self._wait()
            self._retired = None
            self._kept.clear()
            self._found.clear()

    def building(self) -> AbstractContextManager[Aside]:
        """Within it, launches and memory belong to the stream of the maps; whoever entered it then waits for them."""
        return self._on(self._maps)

    def listing(self) -> AbstractContextManager[Aside]:
        """`building` of lists, from maps."""
        return self._on(self._lists)

    def appending(self, since: Moment | None) -> AbstractContextManager[Aside]:
        """`building` of edges by tap, from maps of this run until a moment of it; else from all maps so far."""
        return self._on(self._edges, since.event if since is not None and since.of is self else None)

    def moment(self) -> Moment:
        """All maps so far."""
        return Moment(self, self._maps.record_event())

    @property
    def _lanes(self) -> tuple[torch.cuda.Stream, ...]:
        return self._maps, self._lists, self._edges

    @contextmanager
    def _on(self, lane: torch.cuda.Stream, after: torch.cuda.Event | None = None) -> Iterator[Aside]:
        outer, device = self._lane, lane.device
        if outer is lane:
            yield self
            return
        here, before = torch.cuda.current_stream(device), torch.cuda.memory_allocated(device)
        if after is not None:
            lane.wait_event(after)
        elif lane is not self._maps:
            lane.wait_stream(self._maps)
        self._lane = lane
        try:
            with torch.cuda.stream(lane):
                yield self
        finally:
            self._lane = outer
        here.wait_stream(lane)
        if outer is None:
            self._features.wait_stream(lane)
            self.memory += torch.cuda.memory_allocated(device) - before

    def retire(self, used: Any) -> None:
        """Keep what lists were made of until they are there: until the next call, when maps wait for those lists."""
        if self._retired is not None:
            for event in self._retired[1]:
                self._maps.wait_event(event)
        self._retired = used, (self._lists.record_event(), self._edges.record_event())

    def keep(self, built: Any) -> None:
        """Keep what was built aside until the run ends."""
        self._kept.append(built)

    def summed(self, run: Callable[[], torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
        """What ``run`` finds of operands that are there; not to be read before it was `settle`d."""
        if self._sums is None:
            return run()
        self._wait()
        self._sums.wait_stream(self._features)
        with torch.cuda.stream(self._sums):
            found = run()
        self._operands = operands
        self._found.append(found)
        return found

    def settle(self, results: Sequence[torch.Tensor | None]) -> None:
        """Wait for all that was summed; sums that are not among these results were read too early."""
        self._wait()
        there = {t.data_ptr() for t in results if t is not None}
        self.mixed |= any(t.data_ptr() not in there for t in self._found)
        self._found.clear()

    def _wait(self) -> None:
        if self._operands and self._sums is not None:
            self._features.wait_stream(self._sums)
            self._operands = ()


class Moment(NamedTuple):
    """What maps of a run had come to."""

    of: Aside
    event: torch.cuda.Event


def building() -> AbstractContextManager[Aside | None]:
    """A context for launches that maps are made by: on the stream of maps in a run that has one, else where they are.

    What it gives must `keep` what was built, where it is not None.
    """
    aside = current()
    return _NOTHING if aside is None else aside.building()


def listing() -> AbstractContextManager[Aside | None]:
    """`building` of what is made of tables, searches and sorts, none of which is made of it."""
    aside = current()
    return _NOTHING if aside is None else aside.listing()


def appending(since: Moment | None) -> AbstractContextManager[Aside | None]:
    """`building` of edges by tap, from maps that were launched until a moment."""
    aside = current()
    return _NOTHING if aside is None else aside.appending(since)


def current() -> Aside | None:
    """That of the run of this thread."""
    return getattr(_state, "aside", None)
