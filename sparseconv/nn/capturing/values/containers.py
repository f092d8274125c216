"""Containers, whose items a capture looks at: dicts, lists, tuples, slices, and objects of clients' own classes."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

#: packages whose objects are no records
OTHERS = {"torch", "sparseconv", "numpy", *sys.stdlib_module_names}
#: classes of Python's own that hold nothing but their attributes
NAMESPACES: tuple[Any, ...] = (Namespace, SimpleNamespace)
#: packages of parents that keep nothing
PLAIN_PARENTS = {"abc", "typing", "argparse"}
#: methods of classes whose objects are more than their attributes: a second one would be copied or ended otherwise
OWN_WAYS = {"__copy__", "__getstate__", "__reduce__", "__reduce_ex__", "__del__"}


def is_container(value: Any) -> bool:
    """Whether it is a dict, list, tuple or slice, whose items are looked at, or a `record`, whose attributes are."""
    of: Any = type(value)
    return _is_of_containers(of)


def is_record(value: Any) -> bool:
    """Whether it is an object of a client's own class that holds nothing but its attributes."""
    of: Any = type(value)
    return _is_of_records(of)


@lru_cache(2**12)
def _is_of_containers(kind: Any) -> bool:
    return (issubclass(kind, (dict, list, tuple, slice)) and kind is not torch.Size) or _is_of_records(kind)


@lru_cache(2**12)
def _is_of_records(kind: Any) -> bool:
    """Whether copies of objects of this class may be made of their attributes alone.

    Not of classes of C, of torch, of this library or of Python's own, which keep more than one sees, nor of such as
    have `OWN_WAYS` or slots.
    """
    if kind in NAMESPACES:
        return True
    if _home(kind) in OTHERS or kind.__new__ is not object.__new__:
        return False
    if any(_home(parent) in OTHERS - PLAIN_PARENTS for parent in kind.__mro__[1:-1]):
        return False
    own = {name for parent in kind.__mro__[:-1] for name in vars(parent)}
    return (
        "__dict__" in dir(kind)
        and not own & OWN_WAYS
        and all(not vars(parent).get("__slots__") for parent in kind.__mro__)
    )


def _home(kind: Any) -> str:
    """The package of a class."""
    package: str = kind.__module__.partition(".")[0]
    return package


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
        of: Any = type(like)
        made = of.__new__(of)
        vars(made).update(zip(vars(like), items))
        return made
    if isinstance(like, slice):
        return slice(*items)
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*items)
    return type(like)(items)
