"""What a module holds between calls, as it was: to see whether somebody changed it, and to put it back."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from dataclasses import dataclass, field
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from sparseconv.nn.capturing.values.containers import fields_of, is_container, is_record, is_seen, moves, put_fields
from sparseconv.nn.capturing.values.telling import ALONE, DEEPEST, MOST_BYTES, MOST_ITEMS

#: values that are the same where they are equal
EQUAL: tuple[type, ...] = (int, float, complex, str, bytes, set, frozenset, torch.Size, torch.dtype, torch.device)

#: bytes of the largest array that is copied, to see whether a call writes to it
MOST_COPIED = 2**24


class _Fields(NamedTuple):
    """An object or a dict of a client's own class, and what it held."""

    itself: Any
    fields: dict[Any, Any]


class HeldTensor(NamedTuple):
    """A tensor that a module holds, and what is in it."""

    itself: torch.Tensor
    version: int
    values: torch.Tensor


class _Whole(NamedTuple):
    """What is written to in place, such as a set or an array, and what it held."""

    itself: Any
    values: Any

    def is_same(self, now: Any) -> bool:
        """Whether another one holds the same; by which items, where these may have no equality."""
        was = self.values
        if type(now) is not type(was):
            return False
        if isinstance(now, np.ndarray):
            return now.dtype == was.dtype and now.shape == was.shape and now.tobytes() == was.tobytes()
        if isinstance(now, (list, deque)):
            return len(now) == len(was) and all(map(is_, now, was))
        return bool(now == was)

    def put_back(self) -> Any:
        """Itself, as it was."""
        itself: Any = self.itself
        if self.is_same(itself):
            return itself
        if isinstance(itself, np.ndarray):
            itself[...] = self.values
            return itself
        if isinstance(itself, (bytearray, array)):
            itself[:] = self.values
            return itself
        itself.clear()
        (itself.update if isinstance(itself, set) else itself.extend)(self.values)
        return itself


class _Tuple(NamedTuple):
    """A tuple of what may be written to in place."""

    itself: tuple[Any, ...]
    items: list[Any]


@dataclass
class Walk:
    """Objects that were met, once each: one may hold itself. Behind the most items, they are told by who they are."""

    #: objects by their ``id``
    objects: dict[int, Any] = field(default_factory=dict)
    #: what `moves` among them
    moving: list[Any] = field(default_factory=list)
    _met: set[int] = field(default_factory=set)
    _items: int = 0
    _wholes: int = 0

    def goes_into(self, value: Any, depth: int) -> bool:
        """Whether it is an object, or a dict of a client's own class, that is looked into."""
        if not is_seen(value) and (type(value) is dict or not isinstance(value, dict)):
            return False
        if isinstance(value, FunctionType) and value.__closure__ is None:
            return False
        self._items += len(fields_of(value))
        if id(value) in self._met or self._items > MOST_ITEMS or not depth:
            return False
        self._met.add(id(value))
        if is_record(value):
            self.objects[id(value)] = value
        return True

    def is_open(self, value: Any, kind: Any, depth: int) -> bool:
        """Whether it is a list, tuple or dict that is looked into; of those within objects not many items are."""
        if not isinstance(value, kind):
            return False
        if self._met:
            self._items += len(value)
        return self._items <= MOST_ITEMS and depth > 0

    def kept(self, value: Any, most: int) -> Any:
        """What is neither: sets, and arrays of so many bytes, are kept with a copy, as far as these are not many."""
        is_list = isinstance(value, list) and type(value) is not list
        is_array = isinstance(value, np.ndarray) and value.nbytes <= most
        is_whole = is_list or is_array or isinstance(value, (set, deque, bytearray, array))
        if moves(value):
            self.moving.append(value)
        self._wholes += is_whole
        return _Whole(value, copy.copy(value)) if is_whole and self._wholes <= MOST_ITEMS else value


def snapshot(value: Any, walk: Walk | None = None) -> Any:
    """Containers as they are now, for `is_another`; a tensor is itself, since graphs read what is in it."""
    return _taken(value, walk or Walk(), DEEPEST, MOST_BYTES, False)


def copied(value: Any) -> Any:
    """Containers and tensors as they are now, for `is_same` and `restored`."""
    return _taken(value, Walk(), DEEPEST, MOST_COPIED, True)


def _taken(value: Any, walk: Walk, depth: int, most: int, has_tensors: bool) -> Any:
    """Containers as they are now, arrays of at most so many bytes, and tensors where ``has_tensors``."""
    if has_tensors and isinstance(value, torch.Tensor) and not value.is_inference():
        return HeldTensor(value, value._version, value.detach().clone())
    if isinstance(value, ALONE):
        return value
    more = walk, depth - 1, most, has_tensors
    if walk.goes_into(value, depth):
        return _Fields(value, {key: _taken(one, *more) for key, one in fields_of(value).items()})
    if type(value) is dict and walk.is_open(value, dict, depth):
        return {key: _taken(one, *more) for key, one in value.items()}
    if type(value) is list and walk.is_open(value, list, depth):
        return [_taken(one, *more) for one in value]
    if isinstance(value, tuple) and walk.is_open(value, tuple, depth):
        items = [_taken(one, *more) for one in value]
        return value if all(map(is_, items, value)) else _Tuple(value, items)
    return walk.kept(value, most)


def restored(value: Any, before: Any) -> Any:
    """What was `copied` before: a tensor, list, dict or object itself, with what it held."""
    if isinstance(before, HeldTensor):
        before.itself.data.copy_(before.values)
        return before.itself
    if isinstance(before, _Whole):
        return before.put_back()
    if isinstance(before, _Tuple):
        for item, was in zip(before.itself, before.items):
            restored(item, was)
        return before.itself
    if isinstance(before, _Fields):
        own = fields_of(before.itself)
        held = {key: restored(own.get(key), one) for key, one in before.fields.items()}
        put_fields(before.itself, held)
        return before.itself
    if type(before) is dict:
        own = value if type(value) is dict else {}
        held = {key: restored(own.get(key), one) for key, one in before.items()}
        own.clear()
        own.update(held)
        return own
    if type(before) is list:
        kept = value if type(value) is list else []
        kept[:] = [restored(None, one) for one in before]
        return kept
    return before


def is_same(now: Any, before: Any) -> bool:
    """Whether a value is the one that was `copied`, as it was then."""
    return _is_kept(now, before, True)


def is_another(now: Any, before: Any) -> bool:
    """Whether a value is not what it was at its `snapshot`, nor another object that holds the same."""
    return now is not before and not _is_kept(now, before, False)


def _is_kept(now: Any, before: Any, is_itself: bool) -> bool:
    """Whether a value holds what it held; where ``is_itself``, no other object and nothing that `moves` will do."""
    if now is before:
        return not (is_itself and moves(now))
    if isinstance(before, HeldTensor):
        return now is before.itself and now._version == before.version
    if isinstance(before, _Whole):
        return before.is_same(now)
    if isinstance(before, _Fields):
        is_like = not is_itself and is_container(now) and type(now) is type(before.itself)
        if now is not before.itself and not is_like:
            return False
        now, before = dict(fields_of(now)), before.fields
    if isinstance(before, _Tuple):
        if type(now) is not type(before.itself):
            return False
        now, before = list(now), before.items
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_kept(one, before[key], is_itself) for key, one in now.items())
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(_is_kept(one, was, is_itself) for one, was in zip(now, before))
    return isinstance(now, EQUAL) and bool(now == before)
