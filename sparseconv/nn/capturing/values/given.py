"""The arguments of a call, with places for the tensors that a replay writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_, is_not
from types import MappingProxyType
from typing import Any

import torch

from sparseconv.nn.capturing.region import kind_of
from sparseconv.nn.capturing.values.containers import fields_of, is_container, is_record, item_at, items_of, rebuilt
from sparseconv.nn.capturing.values.read_dict import ReadDict
from sparseconv.nn.capturing.values.snapshots import copied, is_same
from sparseconv.nn.capturing.values.telling import ALONE, DEEPEST, MISSING, MOST_HELD, PLAIN, form_of, told


class CannotCapture(Exception):
    """Why a call cannot become a graph, in words for the user."""

    @classmethod
    def told(cls, error: BaseException) -> CannotCapture:
        """By an error's first line. A frame that named the error, which holds that frame, would not be freed."""
        return cls(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


class DoesNotFit(Exception):
    """The scene at hand has more rows or edges than there are places for."""


class Given:
    """The arguments of a call: what they are made of, and copies of their containers.

    Args:
        objects: those that the module holds, by their ``id``: they are not copied, since the call sees them there, too.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], objects: Mapping[int, Any] = MappingProxyType({})
    ) -> None:
        self.whole = (args, kwargs)
        self.objects = objects
        #: arguments that may be written to, with what they held, or the version of a tensor
        self._kept: list[tuple[tuple[Any, ...], Any, Any]] = []
        self._versions: list[tuple[tuple[Any, ...], torch.Tensor, int]] = []
        self._values: list[tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]] = []
        self._paths: dict[int, tuple[Any, ...]] = {}
        self._note_read: Callable[[tuple[Any, ...]], None] | None = None
        self._copies: dict[int, tuple[Any, ...]] = {}
        #: the copy of each container, by its ``id``
        self._made: dict[int, Any] = {}
        #: dicts that the call may fill in: the caller's, or the copies made last; and what they held before the call
        self._dicts: dict[tuple[Any, ...], dict[Any, Any]] = {}
        self._before: dict[tuple[Any, ...], dict[Any, Any]] = {}
        self._lists: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
        self._sets: dict[tuple[Any, ...], tuple[set[Any], int]] = {}
        #: containers that are looked into, by their ``id``; items that objects among them may still hold
        self._opened = set[int]()
        self._left = MOST_HELD
        #: every argument that is not looked into, and where it is; classes of the containers
        self.leaves: list[tuple[tuple[Any, ...], Any]] = []
        self._classes: list[Any] = []
        self._note(self.whole, (), False)

    def _note(self, value: Any, path: tuple[Any, ...], within: bool) -> None:
        """What lies ``within`` objects is looked into as far as `MOST_HELD` items, and so deep."""
        if isinstance(value, ALONE) or not self._is_opened(value, path, within):
            self.leaves.append((path, value))
            if isinstance(value, set):
                self._sets[path] = value, len(value)
            if not isinstance(value, PLAIN):
                self._paths.setdefault(id(value), path)
            return
        if id(value) in self._paths:  # once more, or within itself
            self._classes.append((path, self._paths[id(value)]))
            return
        self._paths[id(value)] = path
        self._classes.append((path, type(value)))
        self._opened.add(id(value))
        within = within or is_record(value)
        if (isinstance(value, dict) and len(path) > 1) or is_record(value):
            self._dicts[path] = fields_of(value)
            self._before[path] = dict(self._dicts[path])
        elif isinstance(value, list):
            self._lists[path] = value, list(value)
        for key, item in items_of(value):
            self._note(item, (*path, key), within)

    def _is_opened(self, value: Any, path: tuple[Any, ...], within: bool) -> bool:
        if not is_container(value) or id(value) in self.objects:
            return False
        is_object = is_record(value)
        if not within and not is_object:
            return True
        if id(value) not in self._paths:
            self._left -= 1 if isinstance(value, slice) else len(vars(value) if is_object else value)
        return self._left >= 0 and len(path) <= DEEPEST

    def scenes(self, opens: bool) -> list[tuple[tuple[Any, ...], Any]]:
        """The sparse tensors among the arguments, and where they are.

        One within an object counts where it is the only one, and one ``opens`` objects.
        """
        found = [(path, leaf) for path, leaf in self.leaves if kind_of(leaf) is not None]
        if opens and len(found) == 1:
            return found
        return [(path, leaf) for path, leaf in found if not self.is_within_object(path)]

    def is_within_object(self, path: tuple[Any, ...]) -> bool:
        """Whether an argument is what an object of a client's own class holds."""
        return any(is_record(self.at(path[:depth])) for depth in range(len(path)))

    def forms(self, rows: int, device: torch.device) -> tuple[Any, ...]:
        """What calls are told apart by: of a tensor its form, of others what is `spelled`; sparse tensors are left out.

        Only the number of rows of a tensor on ``device`` is left out, unless that is 0, for which code often has a way
        of its own. One elsewhere is told by its values, since a graph holds what it was. Which of them are one and the
        same counts, too.
        """
        leaves = [(path, leaf) for path, leaf in self.leaves if kind_of(leaf) is None]
        forms = ((path, self._paths.get(id(leaf)), self._form(leaf, rows, device)) for path, leaf in leaves)
        return *self._classes, *forms

    def _form(self, leaf: Any, rows: int, device: torch.device) -> Any:
        return (id(leaf), told(leaf)) if id(leaf) in self.objects else form_of(leaf, rows, device)

    def keep(self, is_all: bool) -> None:
        """Note how tensors among the arguments are, and where ``is_all`` other arguments that may be written to.

        Of tensors made in ``torch.inference_mode()``, which have no version, it notes the values, there too.
        """
        tensors = [(path, leaf) for path, leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self._versions = [(path, leaf, leaf._version) for path, leaf in tensors if not leaf.is_inference()]
        if is_all:
            self._values = [(path, leaf, leaf.clone()) for path, leaf in tensors if leaf.is_inference()]
            others = ((path, leaf) for path, leaf in self.leaves if not isinstance(leaf, (torch.Tensor, *PLAIN)))
            self._kept = [(path, leaf, copied(leaf)) for path, leaf in others if id(leaf) not in self.objects]

    def rewritten(self) -> str | None:
        """That an argument was written to in place since `keep`, which calls that are tried would do again."""
        found = [path for path, leaf, was in self._versions if leaf._version != was]
        found += [path for path, leaf, was in self._values if not _equal(leaf, was)]
        found += [path for path, leaf, was in self._kept if not is_same(leaf, was)]
        name = ".".join(map(str, found[0][1:])) if found else ""
        return f"it changes an argument in place, {name}: write to a copy" if found else None

    def entry(self, path: tuple[Any, ...]) -> Any:
        """What a dict among the arguments holds at a path now: the call may have changed it."""
        try:
            return self.at(path)
        except (KeyError, IndexError, TypeError):
            return MISSING

    def written(self) -> Iterator[tuple[str, Any]]:
        """Entries of dicts and attributes of objects among the arguments that are others now, with their names."""
        for path, now in self._dicts.items():
            before = self._before[path]
            if dict.keys(now) == before.keys() and all(map(is_, dict.values(now), before.values())):
                continue
            for key in {**before, **now}:
                value = dict.get(now, key, MISSING)
                if value is not before.get(key, MISSING):
                    yield ".".join(map(str, (*path[1:], key))), value

    def is_dict(self, value: Any) -> bool:
        """Whether it is a dict among the arguments of which `copied` can tell what is read."""
        return type(value) is dict and id(value) in self._paths

    def lengths(self, rows: int, device: torch.device) -> tuple[int, ...]:
        """Rows of each tensor on a device that are not one a voxel, whose number is ``rows``."""
        return tuple(len(leaf) for _, leaf in self.leaves if is_there(leaf, device) and has_own_rows(leaf, rows))

    def put_back(self) -> None:
        """Make the caller's dicts what they were before the call."""
        for path, into in self._dicts.items():
            into.clear()
            into.update(self._before[path])

    def copied(
        self,
        replaced: Mapping[tuple[Any, ...], Any] | None = None,
        note: Callable[[tuple[Any, ...]], None] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in new containers, some leaves ``replaced`` by their path.

        ``note`` is called with the path of every entry of a dict that is read; it ends in EVERY for all entries.
        """
        self._copies, self._note_read, self._made = {}, note, {}
        made: tuple[tuple[Any, ...], dict[str, Any]] = self._copied(self.whole, (), replaced or {})
        self._made = {}
        return made

    def _copied(self, value: Any, path: tuple[Any, ...], replaced: Mapping[tuple[Any, ...], Any]) -> Any:
        """A method, since a function that calls itself would keep what it sees in a circle."""
        if path in replaced:
            self._copies[id(replaced[path])] = path
            return replaced[path]
        if self._sets and path in self._sets:
            self._sets[path] = set(value), len(value)
            return self._sets[path][0]
        if id(value) not in self._opened:
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        is_object = is_record(value)
        if is_object:  # which may hold itself
            self._made[id(value)] = made = rebuilt(value, [None] * len(vars(value)))
        items = [self._copied(item, (*path, key), replaced) for key, item in items_of(value)]
        if is_object:
            vars(made).update(zip(vars(value), items))
        else:
            made = rebuilt(value, items)
        note = self._note_read
        if note is not None and self.is_dict(value):
            made = ReadDict(made, lambda key: note((*path, key)))
        self._made[id(value)] = made
        self._copies[id(made)] = path
        if path in self._dicts:
            self._dicts[path] = fields_of(made)
        elif path in self._lists:
            self._lists[path] = made, list(made)
        return made

    def is_held(self, value: Any) -> bool:
        """Whether it is an object that the module holds."""
        return id(value) in self.objects

    def path_of(self, value: Any) -> tuple[Any, ...] | None:
        """Where a value is among the arguments or their copies; None for a new one."""
        if isinstance(value, PLAIN):
            return None
        path = self._copies.get(id(value))
        return self._paths.get(id(value)) if path is None else path

    def changed(self) -> list[tuple[tuple[Any, ...], list[Any], dict[Any, Any]]]:
        """Of each dict that the call changed: its path, the keys that went, and the items that are new or others."""
        if any(len(now) != len(was) or any(map(is_not, now, was)) for now, was in self._lists.values()):
            raise CannotCapture("it changes a list that it is given, which a replay would leave as it was")
        if any(len(now) != was for now, was in self._sets.values()):
            raise CannotCapture("it changes a set that it is given, which a replay would leave as it was")
        why = self.rewritten()
        if why is not None:
            raise CannotCapture(why)
        found = []
        for path, now in self._dicts.items():
            before = self._before[path]
            gone = [key for key in before if not dict.__contains__(now, key)]
            new = {k: v for k, v in dict.items(now) if k not in before or not self._same(v, before[k])}
            if gone or new:
                found.append((path, gone, new))
        return found

    def _same(self, value: Any, before: Any) -> bool:
        if value is before:
            return True
        if isinstance(value, PLAIN):
            return type(value) is type(before) and value == before
        path = self._copies.get(id(value))
        return path is not None and path == self._paths.get(id(before))

    def at(self, path: Sequence[Any]) -> Any:
        value: Any = self.whole
        for key in path:
            value = item_at(value, key)
        return value


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they hold the same values; NaNs are the same."""
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def is_there(leaf: Any, device: torch.device) -> bool:
    """Whether an argument is a tensor, not a sparse one, on a device."""
    return isinstance(leaf, torch.Tensor) and leaf.device == device and kind_of(leaf) is None


def has_own_rows(leaf: torch.Tensor, rows: int) -> bool:
    """Whether it has rows, and not ``rows`` of them."""
    return leaf.ndim > 0 and len(leaf) != rows
