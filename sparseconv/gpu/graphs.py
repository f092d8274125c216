"""A run as one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch

from sparseconv.gpu.streams import SideStreams, forget_workspaces
from sparseconv.torch_private import end_pool
from sparseconv.torch_private import is_capturing as _is_capturing

#: captures by which the memory of each stream is made smaller; bytes that pieces of it are multiples of, and from which
#: torch takes no more than was asked for
TRIES, PIECE, WHOLE = 5, 2 << 20, 10 << 20
#: a recorder that records nothing
NOBODY: AbstractContextManager[Any] = nullcontext()
#: bytes, by the stream that they are for
Pieces = dict[torch.cuda.Stream, int]
Made = TypeVar("Made")


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def is_capturing() -> bool:
    """Whether the current stream is captured, where torch has set up CUDA."""
    return torch.cuda.is_initialized() and _is_capturing()


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graph_of(
    run: Callable[[], Any],
    device: torch.device,
    recorder: AbstractContextManager[Any] = NOBODY,
    tries: int = TRIES,
    worth: int = 0,
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The CUDA graph of a run, and what the run returned: tensors that every replay writes anew.

    On streams of its own. The peak that torch keeps of its memory starts anew. ``recorder`` is entered for each
    capture, of which the last one counts; ``tries`` and ``worth`` are those of `least_memory`.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(priority=-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # alone: what is timed on first use is timed here
            forget_workspaces()
            torch.cuda.reset_peak_memory_stats()
            before, streams = torch.cuda.memory_allocated(), SideStreams(device)
            with streams.run():
                run()
            again = SideStreams(device, summed=not streams.mixed)
            most = max(0, torch.cuda.max_memory_allocated() - before - streams.memory)
        torch.cuda.current_stream().wait_stream(stream)
        forget_workspaces()  # the graph has its own, where its other memory is

        def capture(pieces: Pieces) -> tuple[torch.cuda.CUDAGraph, Any]:
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, stream, again, pieces, recorder=recorder):
                return graph, run()

        return least_memory(capture, {stream: most, **dict.fromkeys(again.streams, 0)}, tries, worth)


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
    sides: SideStreams,
    pieces: Pieces,
    *,
    pool: Any = None,
    recorder: AbstractContextManager[Any] = NOBODY,
) -> Iterator[None]:
    """Within it, what is launched becomes the graph. Streams begin with pieces of memory.

    ``pool`` is that of another graph, which then shares its memory. Cyclic garbage waits meanwhile: a CUDA graph in it,
    whose end CUDA refuses during a capture, would break the capture off.
    """
    mode = "thread_local"  # what other threads ask of the device, such as pinned memory, is no part of the capture
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode), recorder, sides.run():
            for owner, piece in pieces.items():
                with torch.cuda.stream(owner):
                    torch.empty(piece, dtype=torch.uint8, device=owner.device)
            yield
            forget_workspaces()
    except RuntimeError:
        _end_broken(stream.device, pool)
        raise
    finally:
        if collects:
            gc.enable()


def _end_broken(device: torch.device, pool: tuple[int, int]) -> None:
    """End for torch a capture that CUDA may have broken off, as where something in it waited for the device.

    torch then leaves out the end of its own: random numbers would be an error from there on, and memory that another
    stream has read would not come back.
    """
    with suppress(RuntimeError):  # it was ended
        end_pool(device.index, pool)
    with suppress(RuntimeError), torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            torch.zeros(1, device=device)  # random numbers are those of no capture after the next one


def least_memory(
    capture: Callable[[Pieces], tuple[torch.cuda.CUDAGraph, Made]], known: Pieces, tries: int = TRIES, worth: int = 0
) -> tuple[torch.cuda.CUDAGraph, Made]:
    """The capture whose pool holds least of several that begin with other pieces of memory.

    Args:
        capture: given the bytes that each stream begins with, makes a graph, and whatever else; it drops the last one.
        known: by stream, bytes that its arrays have at one moment, where that is known; else 0.
        tries: captures to try; another follows where the best was not the last.
        worth: bytes of a pool from which on more than one is tried.
    """
    cuts = {stream: _Cut(least) for stream, least in known.items()}
    for left in reversed(range(tries)):
        pieces = {stream: cut.piece for stream, cut in cuts.items()}
        try:
            made = capture(pieces)
        except torch.cuda.OutOfMemoryError:
            if left == tries - 1:
                raise
            break  # an earlier one had room
        held = _held(made[0])
        for stream, cut in cuts.items():
            cut.seen(held.get(stream.cuda_stream, 0))
        is_best = all(cut.best == pieces[stream] for stream, cut in cuts.items())
        if all(cut.settled for cut in cuts.values()) or (not left and is_best) or sum(held.values()) < worth:
            return made
        del made  # its memory is the next one's
    return capture({stream: cut.best for stream, cut in cuts.items()})


def memory_of(graph: torch.cuda.CUDAGraph) -> int:
    """Bytes that a graph reserves on the GPU."""
    return sum(segment["total_size"] for segment in _segments(graph))


def _held(graph: torch.cuda.CUDAGraph) -> dict[int, int]:
    """Bytes of large arrays that a graph holds for each stream."""
    held: dict[int, int] = {}
    for segment in _segments(graph):
        if segment["segment_type"] == "large":
            held[segment["stream"]] = held.get(segment["stream"], 0) + segment["total_size"]
    return held


def _segments(graph: torch.cuda.CUDAGraph) -> list[dict[str, Any]]:
    """What torch's allocator has taken from the GPU for a graph's pool."""
    pool = tuple(graph.pool())
    return [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == pool]


class _Cut:
    """The search for the piece of memory that all arrays of a stream can be cut from, as small as may be.

    Pieces that torch takes as it goes along are of the wrong sizes. A run takes the same arrays in the same order every
    time, so a piece that was enough is so again.

    Args:
        least: bytes that the arrays have at one moment, where that is known; else 0.
    """

    def __init__(self, least: int) -> None:
        self._low, self._high = least, 0
        #: the next one to try, and the best of those tried
        self.piece = self.best = _up(least) if least >= WHOLE else 0
        self._fewest: int | None = None
        #: whether the last one tried is the best, and no smaller one worth a try
        self.settled = False

    def seen(self, held: int) -> None:
        """Bytes that were held beginning with `piece`."""
        if self._fewest is None or held <= self._fewest:
            self._fewest, self.best = held, self.piece
        if held <= self.piece:
            self._high = min(self._high or self.piece, self.piece)
        else:
            self._low, self._high = max(self._low, self.piece, held // 2), self._high or held
        close = self._high - self._low <= PIECE
        self.settled = close and self.piece == self.best
        self.piece = self.best if close else _up((self._low + self._high) // 2)


def _up(count: int) -> int:
    return -(-count // PIECE) * PIECE
