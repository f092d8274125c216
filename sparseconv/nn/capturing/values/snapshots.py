"""What a module holds between calls, as it was: to see whether somebody changed it, and to put it back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sparseconv.nn.capturing.values.containers import fields_of, is_record
from sparseconv.nn.capturing.values.telling import MOST_ITEMS

#: values that are the same where they are equal
EQUAL = (int, float, complex, str, bytes, set, frozenset, torch.Size, torch.dtype, torch.device)


class _Fields(NamedTuple):
    """An object or a dict of a client's own class, and what it held."""

    itself: Any
    fields: dict[Any, Any]


class HeldTensor(NamedTuple):
    """A tensor that a module holds, and what is in it."""

    itself: torch.Tensor
    version: int
    values: torch.Tensor


@dataclass
class _Walk:
    """Objects that were met, once each: one may hold itself. Behind the most fields, they are told by who they are."""

    met: set[int] = field(default_factory=set)
    fields: int = 0

    def goes_into(self, value: Any) -> bool:
        if not is_record(value) and (type(value) is dict or not isinstance(value, dict)):
            return False
        self.fields += len(fields_of(value))
        if id(value) in self.met or self.fields > MOST_ITEMS:
            return False
        self.met.add(id(value))
        return True


def snapshot(value: Any, walk: _Walk | None = None) -> Any:
    """Containers as they are now, for `is_another`; a tensor is itself, since graphs read what is in it."""
    walk = _Walk() if walk is None else walk
    if walk.goes_into(value):
        return _Fields(value, {key: snapshot(one, walk) for key, one in fields_of(value).items()})
    if type(value) is dict:
        return {key: snapshot(one, walk) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot(one, walk) for one in value)
    return set(value) if type(value) is set else value


def is_another(now: Any, before: Any) -> bool:
    """Whether a value is not what it was at its `snapshot`."""
    if now is before:
        return False
    if isinstance(before, _Fields):
        if type(now) is not type(before.itself):
            return True
        now, before = fields_of(now), before.fields
        return now.keys() != before.keys() or any(is_another(value, before[key]) for key, value in now.items())
    if type(now) is not type(before):
        return True
    if isinstance(now, (list, tuple)):
        return len(now) != len(before) or any(map(is_another, now, before))
    if isinstance(now, dict):
        return now.keys() != before.keys() or any(is_another(value, before[key]) for key, value in now.items())
    return not isinstance(now, EQUAL) or bool(now != before)


def copied(value: Any, walk: _Walk | None = None) -> Any:
    """Containers and tensors as they are now, for `is_same` and `restored`."""
    walk = _Walk() if walk is None else walk
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return HeldTensor(value, value._version, value.detach().clone())
    if walk.goes_into(value):
        return _Fields(value, {key: copied(one, walk) for key, one in fields_of(value).items()})
    if type(value) is dict:
        return {key: copied(one, walk) for key, one in value.items()}
    return [copied(one, walk) for one in value] if type(value) is list else value


def restored(value: Any, copy: Any) -> Any:
    """What was copied: a tensor, list, dict or object itself, with what it held."""
    if isinstance(copy, HeldTensor):
        copy.itself.data.copy_(copy.values)
        return copy.itself
    if isinstance(copy, _Fields):
        own = fields_of(copy.itself)
        held = {key: restored(own.get(key), one) for key, one in copy.fields.items()}
        dict.clear(own)
        dict.update(own, held)
        return copy.itself
    if type(copy) is dict:
        own = value if type(value) is dict else {}
        held = {key: restored(own.get(key), one) for key, one in copy.items()}
        own.clear()
        own.update(held)
        return own
    if type(copy) is list:
        kept = value if type(value) is list else []
        kept[:] = [restored(None, one) for one in copy]
        return kept
    return copy


def is_same(now: Any, before: Any) -> bool:
    """Whether a value is the one that was `copied`, as it was then."""
    if isinstance(before, HeldTensor):
        return now is before.itself and now._version == before.version
    if isinstance(before, _Fields):
        return now is before.itself and is_same(dict(fields_of(now)), before.fields)
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(is_same(value, before[key]) for key, value in now.items())
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(is_same, now, before))
    return isinstance(now, EQUAL) and bool(now == before)
