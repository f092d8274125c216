"""Containers, whose items a capture looks at: dicts, lists, tuples, slices, and objects of clients' own classes."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from functools import lru_cache
from typing import Any

import torch

from sparseconv.nn.capturing.region import kind_of

#: packages whose objects are no records
OTHERS = {"torch", "sparseconv", "numpy", *sys.stdlib_module_names}


def is_container(value: Any) -> bool:
    """Whether it is a dict, list, tuple or slice, whose items are looked at, or a `record`, whose attributes are."""
    return (isinstance(value, (dict, list, tuple, slice)) and type(value) is not torch.Size) or is_record(value)


def is_record(value: Any) -> bool:
    """Whether it is an object of a client's own class that holds nothing but its attributes."""
    of: Any = type(value)
    return _is_of_records(of) and kind_of(value) is None


@lru_cache(2**12)
def _is_of_records(kind: Any) -> bool:
    """Whether copies of objects of this class may be made of their attributes alone.

    Not of classes of C, of torch, of this library or of Python's own, which keep more than one sees, nor of such as
    have a way of their own to be copied or slots.
    """
    home = kind.__module__.partition(".")[0]
    if kind is Namespace:
        return True
    if home in OTHERS or issubclass(kind, torch.nn.Module) or kind.__new__ is not object.__new__:
        return False
    own = {name for parent in kind.__mro__[:-1] for name in vars(parent)}
    return (
        "__dict__" in dir(kind)
        and not own & {"__copy__", "__getstate__", "__reduce__", "__reduce_ex__"}
        and all(not vars(parent).get("__slots__") for parent in kind.__mro__)
    )


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Keys, places or names of a container, with what is there; nothing of anything else."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, slice):
        return [(name, getattr(value, name)) for name in ("start", "stop", "step")]
    if is_record(value):
        return list(vars(value).items())
    return list(enumerate(value)) if is_container(value) else []


def fields_of(value: Any) -> dict[Any, Any]:
    """A dict itself, or the attributes of a record, to be written to."""
    found: dict[Any, Any] = value if isinstance(value, dict) else vars(value)
    return found


def item_at(value: Any, key: Any) -> Any:
    """The item of a container that `items_of` lists by this key."""
    if isinstance(value, slice):
        return getattr(value, key)
    return vars(value)[key] if is_record(value) else value[key]


def rebuilt(like: Any, items: list[Any]) -> Any:
    """A container like this one of other items."""
    if isinstance(like, dict):
        made = copy.copy(like)
        for key, item in zip(list(like), items):
            made[key] = item
        return made
    if is_record(like):
        made = object.__new__(type(like))
        vars(made).update(zip(vars(like), items))
        return made
    if isinstance(like, slice):
        return slice(*items)
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*items)
    return type(like)(items)
