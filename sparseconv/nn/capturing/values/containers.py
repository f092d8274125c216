"""Containers, whose items a capture looks at: dicts, lists, tuples, slices, and objects of clients' own classes."""

from __future__ import annotations

import copy
import random
import sys
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from enum import Enum
from functools import lru_cache, partial
from io import IOBase
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch

#: packages whose objects are no records
OTHERS = {"torch", "sparseconv", "numpy", *sys.stdlib_module_names}
#: classes of Python's own that hold nothing but their attributes
NAMESPACES: tuple[Any, ...] = (Namespace, SimpleNamespace, UserDict, UserList)
#: packages of parents that keep nothing
PLAIN_PARENTS = {"abc", "typing", "argparse"}
#: methods of classes whose objects are more than their attributes: a second one would be copied or ended otherwise
OWN_WAYS = {"__copy__", "__getstate__", "__reduce__", "__reduce_ex__", "__del__"}
#: what gives another value whenever it is asked, and cannot be looked into
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
#: what is more, or less, than its attributes
_VALUES: tuple[Any, ...] = (
    Enum,
    type,
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    np.ndarray,
    np.generic,
    torch.Tensor,
)
_NO_OBJECTS = (torch.nn.Module, torch.Tensor, dict, list, tuple, set, frozenset, deque, *_VALUES)
#: what functions read apart from their arguments
_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    FunctionType: ("__code__", "__closure__", "__defaults__", "__kwdefaults__"),
    CellType: ("cell_contents",),
    MethodType: ("__func__", "__self__"),
    partial: ("func", "args", "keywords"),
}


def is_container(value: Any) -> bool:
    """Whether it is a dict, list, tuple or slice, whose items are looked at, or a `record`, whose attributes are."""
    of: Any = type(value)
    return _is_of_containers(of)


def is_record(value: Any) -> bool:
    """Whether it is an object of a client's own class that holds nothing but its attributes."""
    of: Any = type(value)
    return _is_of_records(of)


def is_seen(value: Any) -> bool:
    """Whether it is a record or another object of a client's class, or a function: its `fields_of` show a change."""
    of: Any = type(value)
    return _is_of_seen(of)


def moves(value: Any) -> bool:
    """Whether it gives another value whenever it is asked: an iterator that is no file, or a random generator."""
    return isinstance(value, (Iterator, *_RANDOM)) and not isinstance(value, IOBase)


@lru_cache(2**12)
def _is_of_seen(kind: Any) -> bool:
    is_of_client = _home(kind) not in OTHERS and not issubclass(kind, _NO_OBJECTS)
    is_shown = kind.__dictoffset__ != 0 or bool(_names_of(kind))  # an extension's object may hold what nobody sees
    return kind in _FUNCTIONS or _is_of_records(kind) or (is_of_client and is_shown)


@lru_cache(2**12)
def _names_of(kind: Any) -> tuple[str, ...]:
    """What objects of a class hold that is not in their ``__dict__``."""
    found = ((name, what) for parent in kind.__mro__ for name, what in vars(parent).items())
    return _FUNCTIONS.get(kind) or tuple(name for name, what in found if isinstance(what, MemberDescriptorType))


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
    if is_seen(value):
        return list(fields_of(value).items())
    return list(enumerate(value)) if is_container(value) else []


def fields_of(value: Any) -> dict[Any, Any]:
    """A dict itself, or the attributes of a record, to be written to; of what else is seen, a new one."""
    if isinstance(value, dict):
        return value
    of: Any = type(value)
    names, held = _names_of(of), getattr(value, "__dict__", {})
    return {**held, **{name: getattr(value, name) for name in names if hasattr(value, name)}} if names else held


def put_fields(value: Any, fields: dict[Any, Any]) -> None:
    """Make `fields_of` it these, of which none is new."""
    of: Any = type(value)
    names, own = () if isinstance(value, dict) else _names_of(of), fields_of(value)
    for name in names:
        if own.get(name) is not fields.get(name):
            object.__setattr__(value, name, fields[name])
    own = own if not names else getattr(value, "__dict__", {})
    dict.clear(own)
    dict.update(own, {key: one for key, one in fields.items() if key not in names})


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
