"""What the rest of a call may still read: variables of functions that run, and entries of dicts among the arguments.

A graph that begins in the middle of a call holds what Python read of these as it was. So calls are told apart by them.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from sparseconv.nn.capturing.values.read_dict import EVERY
from sparseconv.nn.capturing.values.telling import MISSING, told

#: where this library's files are; torch's functions, too, read nothing of a call but what clients give them
HERE = f"{Path(__file__).parents[2]}/"
LIBRARIES = HERE, f"{Path(torch.__file__).parent}/"
#: places in functions of which is kept what they read later, with their code
MOST_KNOWN = 2**12
_found_read: dict[tuple[int, int], tuple[CodeType, tuple[str, ...]]] = {}


def variables_ahead(end: CodeType) -> Iterator[tuple[str, Any]]:
    """Variables that the running functions of clients may still read, up to the function of code ``end``.

    What an expression holds so far, such as the first factor of a product, has no name and is left out.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not end:
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            names = _read_from(frame.f_code, frame.f_lasti)
            held = frame.f_locals if names else {}
            yield from ((name, held[name]) for name in names if name in held)
        frame = frame.f_back


def _read_from(code: CodeType, place: int) -> tuple[str, ...]:
    """`_find_read`, kept by the code's address: its hash looks at all of it."""
    known = _found_read.get((id(code), place))
    if known is None:
        if len(_found_read) > MOST_KNOWN:
            _found_read.clear()
        known = _found_read[id(code), place] = code, _find_read(code, place)
    return known[1]


def _find_read(code: CodeType, place: int) -> tuple[str, ...]:
    """Variables that a function may read after the instruction at ``place``, before it gives them other values.

    Variables that inner functions see, or that handlers of errors read, are always among them.
    """
    steps = list(dis.get_instructions(code))
    numbers = {step.offset: i for i, step in enumerate(steps)}
    after = [_numbers_after(step, i, numbers) for i, step in enumerate(steps)]
    reads = [_variables_read(step) for step in steps]
    ahead: list[set[str]] = [set() for _ in steps]  # read from an instruction on
    changes = True
    while changes:
        changes = False
        for i, step in reversed(list(enumerate(steps))):
            later = set().union(*(ahead[j] for j in after[i]))
            found = reads[i] | (later - {step.argval} if step.opname == "STORE_FAST" else later)
            changes |= found != ahead[i]
            ahead[i] = found
    reached, left = set(), [0]
    while left:
        i = left.pop()
        if i not in reached:
            reached.add(i)
            left += after[i]
    now = max(i for offset, i in numbers.items() if offset <= place)
    always = set(code.co_cellvars).union(*(read for i, read in enumerate(reads) if i not in reached))
    return tuple(sorted(always.union(*(ahead[j] for j in after[now]))))


def _numbers_after(step: dis.Instruction, number: int, numbers: dict[int, int]) -> list[int]:
    """Which instructions may follow one."""
    jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
    ends = step.opname.startswith(("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE", "JUMP"))
    found = [numbers[step.argval]] if jumps else []
    return found if ends or number + 1 == len(numbers) else [*found, number + 1]


def _variables_read(step: dis.Instruction) -> set[str]:
    if "LOAD" not in step.opname or not any(kind in step.opname for kind in ("FAST", "DEREF", "CLOSURE")):
        return set()
    return {step.argval} if isinstance(step.argval, str) else set(step.argval)


class Reads:
    """What the rest of a call reads of what came before it, but for variables; `told` of it tells calls apart."""

    def __init__(self) -> None:
        #: entries of dicts among the arguments, by their paths
        self.entries: dict[tuple[Any, ...], None] = {}
        #: attributes of modules, which the call sets
        self.attributes: dict[tuple[weakref.ref[torch.nn.Module], str], None] = {}

    def __le__(self, other: Reads) -> bool:
        return self.entries.keys() <= other.entries.keys() and self.attributes.keys() <= other.attributes.keys()

    def add(self, other: Reads) -> None:
        self.entries |= other.entries
        self.attributes |= other.attributes

    def told(self, entry_at: Callable[[tuple[Any, ...]], Any]) -> tuple[Any, ...]:
        """What calls are told apart by of this, as it is now; ``entry_at`` finds the entry of a path."""
        entries = (entry_at(path[:-1] if path[-1] is EVERY else path) for path in self.entries)
        attributes = (getattr(m(), "__dict__", {}).get(name, MISSING) for m, name in self.attributes)
        return tuple(map(told, (*entries, *attributes)))


class Reading:
    """Within it, what the rest of a call reads from `begin` on is put into ``found``.

    Args:
        modules: those whose attributes are looked at.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], found: Reads) -> None:
        self._classes = [(m, type(m)) for m in modules]
        self._found, self._has_begun = found, False
        self._set: set[tuple[int, str]] = set()

    def begin(self) -> None:
        self._has_begun = True

    def entry(self, path: tuple[Any, ...]) -> None:
        """Somebody reads this entry of a dict among the arguments."""
        if self._has_begun:
            self._found.entries[path] = None

    def attribute(self, m: torch.nn.Module, name: str) -> None:
        """Somebody reads an attribute."""
        if self._has_begun and (id(m), name) in self._set:
            self._found.attributes[weakref.ref(m), name] = None

    def attribute_set(self, m: torch.nn.Module, name: str) -> None:
        """Somebody sets an attribute."""
        if not self._has_begun:
            self._set.add((id(m), name))

    def __enter__(self) -> None:
        made: dict[type, type] = {}
        for kind in {kind for _, kind in self._classes}:
            with suppress(Exception):  # some classes allow no others of theirs
                made[kind] = _watched_class(kind, self)
        for m, kind in self._classes:
            m.__class__ = made.get(kind, kind)

    def __exit__(self, *error: Any) -> None:
        for m, kind in self._classes:
            m.__class__ = kind
        self._classes = []  # the classes made here are in circles, and hold this


def _watched_class(kind: Any, reading: Reading) -> Any:
    """A class of modules whose attributes are looked at."""

    def get(m: torch.nn.Module, name: str) -> Any:
        reading.attribute(m, name)
        return kind.__getattribute__(m, name)

    def put(m: torch.nn.Module, name: str, value: Any) -> None:
        reading.attribute_set(m, name)
        kind.__setattr__(m, name, value)

    return type(kind)(
        kind.__name__, (kind,), {"__getattribute__": get, "__setattr__": put, "__module__": kind.__module__}
    )
