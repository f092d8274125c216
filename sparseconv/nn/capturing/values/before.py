"""What a call moves before its region begins, to be put back where the call is made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from sparseconv.nn.capturing.module_state import RandomStates, modules_of_clients, own_of
from sparseconv.nn.capturing.values.given import Given
from sparseconv.nn.capturing.values.snapshots import HeldTensor, copied, is_same, restored

#: eager calls of a kind before the first capture, and of a mode in which all that may move before a region is compared
EXAMPLES = 2


class Ahead:
    """What calls move before their regions begin: buffers, such as a norm's, and attributes of modules of clients."""

    def __init__(self) -> None:
        #: by mode: calls that were compared; names of parts, and of what is theirs, that a call moved
        self.compared: Counter[Any] = Counter()
        self.moved: dict[Any, set[tuple[str, str]]] = {}
        #: modes in which random numbers are drawn
        self.draws = set[Any]()
        self.cards = set[torch.device]()


class Before:
    """What a call may move before its region begins, as it was: a call that no replay answers is made anew from there.

    The first calls of a mode show what that is; others keep that alone.
    """

    def __init__(self, ahead: Ahead, module: torch.nn.Module, mode: Any, given: Given) -> None:
        self._ahead, self._mode, self._given = ahead, mode, given
        self._is_compared = ahead.compared[mode] < EXAMPLES
        #: part, name, what holds it, and a copy of it
        self._kept: list[tuple[str, str, dict[str, Any], Any]] = []
        given.keep(self._is_compared)
        if self._is_compared:
            clients = set(modules_of_clients(module))
            for part, m in module.named_modules():
                names = [*m._buffers, *(name for name, _ in own_of(m) if m in clients)]
                self._keep(part, m, names)
            ahead.cards = {t.device for t in (*module.parameters(), *module.buffers()) if t.is_cuda}
        else:
            for part, name in ahead.moved.get(mode, ()):
                self._keep(part, module.get_submodule(part), [name])
        self._random = RandomStates(ahead.cards) if self._is_compared or mode in ahead.draws else None

    def _keep(self, part: str, m: torch.nn.Module, names: Iterable[str]) -> None:
        for name in names:
            held: dict[str, Any] = m._buffers if name in m._buffers else m.__dict__
            if name in held:
                self._kept.append((part, name, held, copied(held[name])))

    def compare(self) -> str | None:
        """The region begins: learn what is another now. Returns what of the arguments is, which cannot be put back."""
        if self._is_compared:
            self._ahead.compared[self._mode] += 1
            moved = {(part, name) for part, name, held, copy in self._kept if _is_moved(held.get(name), copy)}
            self._ahead.moved.setdefault(self._mode, set()).update(moved)
            if self._random is not None and self._random.is_drawn():
                self._ahead.draws.add(self._mode)
        return self._given.rewritten()

    def put_back(self) -> None:
        """Make it what it was."""
        for _, name, held, copy in self._kept:
            held[name] = restored(held.get(name), copy)
        if self._random is not None:
            self._random.put_back()


def _is_moved(now: Any, copy: Any) -> bool:
    """By values, too: torch's batch norm writes its statistics without a version."""
    return not is_same(now, copy) or (isinstance(copy, HeldTensor) and not torch.equal(copy.itself, copy.values))
