"""What of a module a run moves, and the leaves that gradients are taken of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from sparseconv.torch_private import copy_each


class ModuleState:
    """Buffers of a module with a copy, and its parameters.

    Args:
        parameters: those of the module whose gradients are taken.
    """

    def __init__(self, module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        #: what gradients are taken of: the parameters, or while recording other leaves over their memory
        self.starts: list[torch.Tensor] = self._parameters
        #: tensors that are the same in every call, by ``id``
        self.constants = {id(t) for t in (*module.parameters(), *module.buffers())}
        self._buffers = _by_dtype(b for b in module.buffers() if not b.is_inference())
        self._kept = [[b.clone() for b in some] for some in self._buffers]
        self._moves = any(m.training for m in module.modules())
        self._cards = {t.device for t in (*module.parameters(), *module.buffers()) if t.is_cuda}

    def keep(self) -> None:
        """Copy the buffers, before a run in training moves them."""
        if self._moves:
            with torch.no_grad():
                for into, now in zip(self._kept, self._buffers):
                    copy_each(into, now)

    def put_back(self) -> None:
        """Make the buffers what they were when they were kept."""
        if self._moves:
            with torch.no_grad():
                for now, before in zip(self._buffers, self._kept):
                    copy_each(now, before)

    def count_writes(self) -> None:
        """Tell autograd that a graph wrote to the buffers."""
        if self._moves:
            torch.autograd.graph.increment_version([b for some in self._buffers for b in some])

    @contextmanager
    def as_leaves(self, module: torch.nn.Module) -> Iterator[None]:
        """Within it, the module of this state has other parameters over the same memory.

        A parameter's end of a gradient's graph belongs to the stream on which it was made, and lives as long as any
        graph does, such as that of a loss from the step before. A capture may not wait for that stream.
        """
        others: dict[int, torch.nn.Parameter] = {}
        held = [m._parameters for m in module.modules() if m._parameters]
        before = [dict(parameters) for parameters in held]
        for parameters in held:
            for name, p in parameters.items():
                if p is not None:
                    other = others.setdefault(id(p), torch.nn.Parameter(p.detach(), p.requires_grad))
                    parameters[name] = other
        known = self.constants
        self.constants = known | {id(other) for other in others.values()}
        self.starts = [others.get(id(p), p) for p in self._parameters]
        try:
            yield
        finally:
            for parameters, kept in zip(held, before):
                parameters.update(kept)
            self.starts, self.constants = self._parameters, known

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Within it, running statistics and random numbers may move; afterwards they are what they were."""
        buffers = [b for some in self._buffers for b in some]
        kept = [b.clone() for b in buffers]
        try:
            with torch.random.fork_rng(list(self._cards)):
                yield
        finally:
            with torch.no_grad():
                for buffer, before in zip(buffers, kept):
                    buffer.copy_(before)


def _by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for t in tensors:
        found.setdefault(t.dtype, []).append(t)
    return list(found.values())
