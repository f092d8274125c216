"""What of a module a run moves, and the leaves that gradients are taken of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sparseconv.torch_private import copy_each

#: attributes that every module of torch has, and a captured one's forward
_TORCHS = {*vars(torch.nn.Module()), "forward"}
#: values that are the same where they are equal
_PLAIN = (int, float, complex, str, bytes, set, frozenset, torch.Size, torch.dtype, torch.device)
_MISSING = object()


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


class Settings:
    """Plain attributes of modules, such as a norm's momentum: Python reads them once, and a graph keeps them."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        #: weakly: a captured module holds who holds this
        self._read = [
            (weakref.ref(m), [(name, value) for name, value in _own(m) if isinstance(value, (*_PLAIN, type(None)))])
            for m in modules
        ]

    def changed(self) -> bool:
        """Whether one is another now."""
        for seen, read in self._read:
            held = vars(seen())
            for name, value in read:
                now = held.get(name)
                if now is not value and (type(now) is not type(value) or now != value):
                    return True
        return False


class Attributes:
    """What modules of clients hold now, to see what a run of them keeps: a replay would leave that as it was.

    Parameters, buffers and parts are looked at elsewhere; modules of this library and of torch keep nothing of a call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        theirs = [m for m in module.modules() if not type(m).__module__.startswith(("sparseconv.", "torch."))]
        self._before = [(m, {name: _copied(value) for name, value in _own(m)}) for m in theirs]

    def changed(self) -> str | None:
        """The first one that is another now, by name."""
        for m, before in self._before:
            for name, value in _own(m):
                if not _is_same(value, before.get(name, _MISSING)):
                    return f"{type(m).__name__}.{name}"
        return None


def _own(m: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(m).items() if name not in _TORCHS]


def _copied(value: Any) -> Any:
    """Containers as they are now."""
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if type(value) is list else value


def _is_same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_same(value, before[key]) for key, value in now.items())
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return isinstance(now, _PLAIN) and bool(now == before)
