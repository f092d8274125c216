"""What of a module a run moves, and the leaves that gradients are taken of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
        #: tensors that are the same in every call, by ``id``, or by that of what stands for them while recording
        self.constants = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self._buffers = _by_dtype(b for b in module.buffers() if not b.is_inference())
        #: those whose version an eager call counts on; torch's batch norm, which saves its statistics, does not
        self._counted: list[torch.Tensor] = []
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
            for now, before in zip(self._buffers, self._kept):
                copy_each(_uncounted(now), before)

    def count_writes(self) -> None:
        """Tell autograd of what a graph wrote, as an eager call would."""
        if self._counted:
            torch.autograd.graph.increment_version(self._counted)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within it, an eager call shows which buffers' versions count on."""
        before = [(b, b._version) for some in self._buffers for b in some]
        yield
        self._counted = [b for b, version in before if b._version != version]

    @contextmanager
    def as_leaves(self, module: torch.nn.Module) -> Iterator[None]:
        """Within it, the module of this state has other parameters and buffers over the same memory.

        A parameter's end of a gradient's graph belongs to the stream on which it was made, and lives as long as any
        graph does, such as that of a loss from the step before. A capture may not wait for that stream. Such a graph
        may have saved a buffer, whose version must stay what it was.
        """
        others: dict[int, torch.Tensor] = {}
        own: dict[int, torch.Tensor] = {}
        held: list[dict[str, Any]] = [d for m in module.modules() for d in (m._parameters, m._buffers) if d]
        before = [dict(tensors) for tensors in held]
        for tensors in held:
            for name, t in tensors.items():
                if t is not None and id(t) not in others:
                    is_parameter = isinstance(t, torch.nn.Parameter)
                    other = torch.nn.Parameter(t.detach(), t.requires_grad) if is_parameter else t.data
                    others[id(t)], own[id(other)] = other, t
                tensors[name] = None if t is None else others[id(t)]
        known = self.constants
        self.constants = known | own
        self.starts = [others.get(id(p), p) for p in self._parameters]
        try:
            yield
        finally:
            for tensors, kept in zip(held, before):
                tensors.update(kept)
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
            for buffer, before in zip(_uncounted(buffers), kept):
                buffer.copy_(before)


def _uncounted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory, whose writes no graph that saved a tensor hears of: it gets back what it had."""
    return [t.data for t in tensors]


def _by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for t in tensors:
        found.setdefault(t.dtype, []).append(t)
    return list(found.values())
