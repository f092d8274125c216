"""What of a module a run moves, and the leaves that gradients are taken of."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

from sparseconv.gpu import graphs
from sparseconv.nn.capturing.values.given import CannotCapture
from sparseconv.nn.capturing.values.snapshots import EQUAL, Walk, copied, is_another, is_same, restored, snapshot
from sparseconv.torch_private import any_module_hook, copy_each

#: attributes that every module of torch has, and a captured one's forward
_TORCHS = {*vars(torch.nn.Module()), "forward"}
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
        self._named = {name: b for name, b in module.named_buffers() if not b.is_inference()}
        self._buffers = _by_dtype(self._named.values())
        #: those whose version an eager call counts on; torch's batch norm, which saves its statistics, does not
        self._counted: list[torch.Tensor] = []
        self._kept = [[b.clone() for b in some] for some in self._buffers]
        self._moves = any(m.training for m in module.modules())
        #: whether a call draws random numbers
        self.draws = False
        self._cards = {t.device for t in (*module.parameters(), *module.buffers()) if t.is_cuda}

    def keep(self) -> None:
        """Copy the buffers, before a run in training moves them."""
        if self._moves:
            with torch.no_grad():
                for into, now in zip(self._kept, self._buffers):
                    copy_each(into, now)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Within it, a run shows whether it moves buffers, as some do in evaluation, and draws random numbers."""
        random_states = RandomStates(self._cards)
        yield
        pairs = zip(chain(*self._buffers), chain(*self._kept))
        self._moves |= not all(torch.equal(now, was) for now, was in pairs)
        self.draws = random_states.is_drawn_of_torch()

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

    def buffers_now(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Copies of buffers by their names, by default of all where calls move any."""
        names = names if names is not None else self._named if self._moves else ()
        return {name: self._named[name].clone() for name in names}

    @contextmanager
    def restoring(self) -> Iterator[Callable[[], None]]:
        """Within it, running statistics and random numbers may move; afterwards they are what they were.

        Gives what puts the statistics back between two runs.
        """
        buffers = [b for some in self._buffers for b in some]
        kept = [b.clone() for b in buffers]

        def put_back() -> None:
            for buffer, before in zip(_uncounted(buffers), kept):
                buffer.copy_(before)

        try:
            with torch.random.fork_rng(list(self._cards)):
                yield put_back
        finally:
            put_back()


def _uncounted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory, whose writes no graph that saved a tensor hears of: it gets back what it had."""
    return [t.data for t in tensors]


def _by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for t in tensors:
        found.setdefault(t.dtype, []).append(t)
    return list(found.values())


class RandomStates:
    """What the next random numbers depend on: of Python, NumPy and torch, on the host and on cards."""

    def __init__(self, cards: Iterable[torch.device] = ()) -> None:
        self._cards = list(cards)
        self._torchs, self._pythons, self._numpys = self._states(), random.getstate(), np.random.get_state()  # noqa: NPY002

    def _states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._cards)]

    def is_drawn_of_python(self) -> bool:
        """Whether random numbers of Python or NumPy, of the one generator that clients share, were drawn since."""
        (_, keys, *more), (_, now, *others) = self._numpys, np.random.get_state()  # noqa: NPY002
        return self._pythons != random.getstate() or more != others or not np.array_equal(keys, now)

    def is_drawn_of_torch(self) -> bool:
        """Whether random numbers of torch were drawn since."""
        return not all(map(torch.equal, self._torchs, self._states()))

    def is_drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        return self.is_drawn_of_torch() or self.is_drawn_of_python()

    def put_back_of_python(self) -> None:
        """Draw the same ones of Python and NumPy again."""
        random.setstate(self._pythons)
        np.random.set_state(self._numpys)  # noqa: NPY002

    def put_back(self) -> None:
        """Draw the same ones again."""
        self.put_back_of_python()
        on_host, *on_cards = self._torchs
        torch.set_rng_state(on_host)
        for state, card in zip(on_cards, self._cards):
            torch.cuda.set_rng_state(state, card)


class ModuleParts:
    """What graphs depend on: a module's parts and tensors, where these lie, which want a gradient, and settings."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.modules = [m for m in module.modules() if m is not module]
        self.settings = Settings(module.modules())
        self._held: list[dict[str, Any]] = [
            d for m in module.modules() for d in (m._modules, m._parameters, m._buffers) if d
        ]
        self._parameters = list(module.parameters())
        self._tensors = list({id(t): t for t in chain(self._parameters, module.buffers())}.values())
        self._parts = list(chain.from_iterable(map(dict.values, self._held)))
        self._addresses = list(map(_address, self._tensors))
        self._wants = list(map(WANTS, self._parameters))
        self._hooks = [hooks for m in self.modules for hooks in _hooks_of(m)]

    def has_graphs(self) -> bool:
        """Whether it lies on a device that has graphs, by the first tensor that it holds now."""
        held = chain.from_iterable(map(dict.values, self._held))
        first = next((t for t in held if isinstance(t, torch.Tensor)), None)
        return first is not None and graphs.has_graphs(first.device)

    def trains(self) -> bool:
        """Whether a parameter wants a gradient."""
        return any(map(WANTS, self._parameters))

    def hooked(self) -> torch.nn.Module | None:
        """A part with a hook, its own or one of all modules, which a graph would not call."""
        if self.modules and any_module_hook():
            return self.modules[0]
        return next(m for m in self.modules if any(_hooks_of(m))) if any(self._hooks) else None

    def is_moved(self) -> bool:
        """Whether a tensor of the module lies elsewhere: a graph would read memory that is somebody else's."""
        return list(map(_address, self._tensors)) != self._addresses

    def is_changed(self) -> bool:
        """Whether the module has other parts, tensors or settings, or others want a gradient."""
        return (
            sum(map(len, self._held)) != len(self._parts)
            or not all(map(is_, chain.from_iterable(map(dict.values, self._held)), self._parts))
            or list(map(WANTS, self._parameters)) != self._wants
            or self.settings.changed()
        )


_address = torch.Tensor.data_ptr
WANTS = attrgetter("requires_grad")


def _hooks_of(m: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks


class Settings:
    """Attributes of modules, such as a norm's momentum: Python reads them once, and a graph keeps them.

    Of modules of clients all, with what lists, tuples, dicts and objects hold; of others such as are plain values.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        #: weakly: a captured module holds who holds this
        self._read: list[tuple[weakref.ref[torch.nn.Module], dict[str, Any]]] = []
        #: of these, the modules of clients
        self._of_clients: list[tuple[weakref.ref[torch.nn.Module], dict[str, Any]]] = []
        #: objects of clients' own classes that they hold, by their ``id``
        self.objects: dict[int, Any] = {}
        for m in modules:
            is_all = is_of_client(m)
            read = {
                name: snapshot(value, Walk(self.objects if is_all else {}))
                for name, value in own_of(m)
                if is_all or isinstance(value, (*EQUAL, type(None)))
            }
            self._read.append((weakref.ref(m), read))
            if is_all:
                self._of_clients.append(self._read[-1])

    def changed(self) -> bool:
        """Whether one is another now."""
        for seen, read in self._read:
            held = vars(seen())
            for name, value in read.items():
                now = held.get(name)
                if now is not value and is_another(now, value):
                    return True
        return False

    @contextmanager
    def of_calls(self) -> Iterator[None]:
        """Within it, an eager call: what a client's module changes itself, such as a counter, is no setting."""
        before = []
        for seen, read in self._of_clients:
            held = vars(seen())
            before.append((held, read, [snapshot(held.get(name)) for name in read]))
        try:
            yield
        finally:
            for held, read, values in before:
                changed = [n for n, v in zip(read, values) if held.get(n) is not v and is_another(held.get(n), v)]
                for name in changed:
                    del read[name]


def is_of_client(m: torch.nn.Module) -> bool:
    """Whether a module is neither this library's nor torch's, which keep nothing of a call."""
    return not type(m).__module__.startswith(("sparseconv.", "torch."))


class Attributes:
    """What modules of clients hold now, and what a call is given: a replay leaves both as they were.

    Parameters, buffers and parts are looked at elsewhere; modules of this library and of torch keep nothing of a call.

    Args:
        module: the module that is captured.
        given: arguments of the call.
    """

    def __init__(self, module: torch.nn.Module, given: Iterable[torch.Tensor] = ()) -> None:
        theirs = modules_of_clients(module)
        self._before = [(m, {name: (value, copied(value)) for name, value in own_of(m)}) for m in theirs]
        self._buffers = [(m, name, b) for m in theirs for name, b in m._buffers.items()]
        self._given = [(t, t._version) for t in given]
        self._random, self._is_on_card = RandomStates(), any(t.is_cuda for t, _ in self._given)

    def check(self) -> None:
        """Raise `CannotCapture` by the name of the first thing that is another now."""
        changed = self._changed()
        if changed is not None:
            raise CannotCapture(
                f"it changes {changed}, which a replay would leave as it was: return it, or set it outside"
            )
        if self._random.is_drawn_of_python():
            raise CannotCapture("it draws random numbers of Python or NumPy, which a replay would not: draw torch's")
        if self._is_on_card and self._random.is_drawn():
            raise CannotCapture("it draws random numbers on the host, which a replay would not: draw them on the card")

    def _changed(self) -> str | None:
        for m, before in self._before:
            for name, value in own_of(m):
                if not is_same(value, before.get(name, (None, _MISSING))[1]):
                    return f"{type(m).__name__}.{name}"
        for m, name, buffer in self._buffers:  # which may be written in place
            if m._buffers.get(name) is not buffer:
                return f"{type(m).__name__}.{name}"
        return None if all(t._version == version for t, version in self._given) else "an argument in place"

    def put_back(self) -> None:
        """Make the attributes what they were: calls that are tried leave no trace."""
        for m, before in self._before:
            own = vars(m)
            for name, _ in own_of(m):
                if name not in before:
                    del own[name]
            for name, (value, copy) in before.items():
                own[name] = value if is_same(value, copy) else restored(value, copy)
        for m, name, buffer in self._buffers:
            m._buffers[name] = buffer
        self._random.put_back_of_python()


@contextmanager
def without_traces(module: torch.nn.Module) -> Iterator[None]:
    """Within it, calls that are tried; afterwards what modules hold is what it was."""
    attributes = Attributes(module)
    try:
        yield
    finally:
        attributes.put_back()


def moving_in(module: torch.nn.Module) -> str | None:
    """What a module holds that gives other values whenever it is asked: no run could be tried without a trace."""
    for m in modules_of_clients(module):
        for name, value in own_of(m):
            snapshot(value, walk := Walk())
            if walk.moving:
                what = f"{type(m).__name__}.{name} holds a {type(walk.moving[0]).__name__}"
                return f"{what}, which a replay would leave as it was: draw torch's random numbers, count in a buffer"
    return None


def modules_of_clients(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module and its parts, but for those of this library and of torch."""
    return [m for m in module.modules() if is_of_client(m)]


def own_of(m: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(m).items() if name not in _TORCHS]
