"""What the recordings of a module share, of which one is replayed at a time: memory, streams, arrays for gradients."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from sparseconv.gpu import graphs
from sparseconv.gpu.streams import SideStreams
from sparseconv.nn.capturing.values.given import CannotCapture
from sparseconv.plan.weights import gradients_into
from sparseconv.torch_private import copy_each, pieces

LOOSE = "a tensor that is no parameter of it, nor the scene's features, wants a gradient"


class SharedMemory:
    """Memory and streams of recordings of which one is replayed at a time: it overwrites what another one left there.

    Results leave as copies. What a gradient is found from stays there until that was taken, so nobody else is replayed.
    """

    def __init__(self) -> None:
        #: what tells whether a gradient may still be asked for, and of whose replay it is
        self._is_pending: Callable[[], bool] = lambda: False
        self._awaited: Callable[[], Any] = lambda: None
        self._stream: torch.cuda.Stream | None = None
        self._sides: SideStreams | None = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._flat: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    @property
    def is_pending(self) -> bool:
        """Whether a gradient may still be asked for."""
        return self._is_pending()

    def wait_for(self, recording: Any, is_pending: Callable[[], bool]) -> None:
        """Note that a replay's gradient may be asked for, as long as ``is_pending``."""
        self._awaited, self._is_pending = weakref.ref(recording), is_pending

    def awaits(self, recording: Any) -> bool:
        """Whether the last gradient that could be asked for is that of a replay of this recording."""
        return self._awaited() is recording

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream that graphs are captured on: torch's allocator keeps memory for each apart."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)
        return self._stream

    def sides(self, summed: bool = True) -> SideStreams:
        """Side streams of a run on the current stream, the same ones for every run."""
        assert self._stream is not None
        made = SideStreams(self._stream.device, summed, like=self._sides)
        self._sides = self._sides or made
        return made

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """A graph whose memory later ones share."""
        self._graphs.add(graph)

    def pool(self) -> Any:
        """The pool of its graphs; None where there is none any more."""
        return next((graph.pool() for graph in self._graphs), None)

    def held_bytes(self) -> int:
        """Bytes of the card that its graphs hold."""
        return next((graphs.held_bytes(graph) for graph in self._graphs), 0)

    def flat(self, dtype: torch.dtype, count: int, device: torch.device) -> torch.Tensor:
        """An array for gradients that are copied at once."""
        if (dtype, count) not in self._flat:
            self._flat[dtype, count] = torch.empty(count, dtype=dtype, device=device)
        return self._flat[dtype, count]


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors without a gradient, by one kernel: a launch for each takes the host longer than the card."""
    if len(tensors) == 1:
        return [tensors[0].clone()]
    made = [torch.empty_like(tensor) for tensor in tensors]
    copy_each(made, tensors)
    return made


def reached(result: torch.Tensor, parameters: Sequence[torch.Tensor], features: torch.Tensor) -> list[bool]:
    """Which parameters get a gradient from a result.

    Raises:
        CannotCapture: something else gets one, too, which the graphs would not find.
    """
    found, seen, left = set[int](), set[Any](), [result.grad_fn]
    while left:
        node: Any = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [after for after, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            found |= set() if leaf is None else {id(leaf)}
    if found - {id(features), *map(id, parameters)}:
        raise CannotCapture(LOOSE)
    return [id(p) in found for p in parameters]


class Gathered:
    """Gradients of parameters, gathered by a graph in one array a dtype, so that a call copies them at once.

    Such gradients as were ``found`` once of ``parameters``, with None for those that have none.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None], memory: SharedMemory
    ) -> None:
        self._count = len(parameters)
        #: of each dtype: which parameters have a gradient of it
        self._numbers: dict[torch.dtype, list[int]] = {}
        for number, grad in enumerate(found):
            if grad is not None:
                self._numbers.setdefault(grad.dtype, []).append(number)
        self._like = {dtype: [parameters[i] for i in numbers] for dtype, numbers in self._numbers.items()}
        self._flat = {
            dtype: memory.flat(dtype, sum(p.numel() for p in like), like[0].device)
            for dtype, like in self._like.items()
        }
        #: where each gradient belongs, by the parameters' numbers
        self._places = self._split(self._flat)

    def _split(self, flat: dict[torch.dtype, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {
            number: piece
            for dtype, numbers in self._numbers.items()
            for number, piece in zip(numbers, pieces(flat[dtype], self._like[dtype]))
        }

    def at_once(self) -> AbstractContextManager[None]:
        """Within it, what can write a gradient into its place does."""
        like = {n: p for dtype, numbers in self._numbers.items() for n, p in zip(numbers, self._like[dtype])}
        owners = Counter(p.data_ptr() for p in like.values())  # two may share their memory
        whole = {n: p.data_ptr() for n, p in like.items() if p.is_contiguous() and owners[p.data_ptr()] == 1}
        return gradients_into({at: self._places[n] for n, at in whole.items()})

    def fill(self, found: Sequence[torch.Tensor | None]) -> None:
        """Put the gradients that are not there into their places.

        Raises:
            CannotCapture: other parameters have a gradient than before, or one of another dtype.
        """
        dtypes = {n: dtype for dtype, numbers in self._numbers.items() for n in numbers}
        if dtypes != {n: grad.dtype for n, grad in enumerate(found) if grad is not None}:
            raise CannotCapture("which parameters have a gradient changes from call to call")
        for numbers in self._numbers.values():
            pairs = [(self._places[n], grad) for n in numbers if (grad := found[n]) is not None]
            pairs = [(place, grad) for place, grad in pairs if grad.data_ptr() != place.data_ptr()]
            with torch.no_grad():
                copy_each([place for place, _ in pairs], [grad for _, grad in pairs])

    def taken(self, from_results: Sequence[Sequence[bool]]) -> list[torch.Tensor | None]:
        """The gradients in new tensors, by parameter; None where none of the results has one for it."""
        found = self._split({dtype: flat.clone() for dtype, flat in self._flat.items()})
        return [found.get(n) if any(has[n] for has in from_results) else None for n in range(self._count)]
