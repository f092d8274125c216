"""Maps on a stream beside that of the features, where a whole run is captured and so no host sets the order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_state = threading.local()
_NOTHING: AbstractContextManager[Any] = nullcontext()


class Aside:
    """The stream of the maps of one run, and what must not go before the run ends.

    Maps depend on maps and coordinates alone. In program order each waits behind the features that were computed before
    somebody asked for it; on a stream of its own it is there when they come to it. Features wait for what was asked for
    so far, maps wait for no features. So nothing that maps are made from may be written, and no memory that they were
    given may be taken again, while features may read it: everything built aside is kept until the run ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._features = torch.cuda.current_stream(device)
        self._maps = torch.cuda.Stream(device, priority=-2)  # short launches of few programs go first
        self._kept: list[Any] = []
        self._inside = False
        #: bytes that maps have taken and not given back
        self.memory = 0

    @contextmanager
    def building(self) -> Iterator[Aside]:
        """Within it, launches and memory belong to the stream of the maps; afterwards features wait for them."""
        if self._inside:
            yield self
            return
        self._inside = True
        before = torch.cuda.memory_allocated(self._maps.device)
        try:
            with torch.cuda.stream(self._maps):
                yield self
        finally:
            self._inside = False
        self.memory += torch.cuda.memory_allocated(self._maps.device) - before
        self._features.wait_stream(self._maps)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Within it, `building` on this thread is aside. Starts after, and ends before, other work of the stream."""
        self._maps.wait_stream(self._features)
        _state.aside = self
        try:
            yield
        finally:
            _state.aside = None
            self._features.wait_stream(self._maps)
            self._kept.clear()

    def keep(self, built: Any) -> None:
        """Keep what was built aside until the run ends."""
        self._kept.append(built)


def building() -> AbstractContextManager[Aside | None]:
    """A context for launches that maps are made by: on the stream of maps in a run that has one, else where they are.

    What it gives must `keep` what was built, where it is not None.
    """
    aside: Aside | None = getattr(_state, "aside", None)
    return _NOTHING if aside is None else aside.building()
