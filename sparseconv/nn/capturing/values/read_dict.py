"""A dict among the arguments of a call that tells what is read of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: stands for all keys of a dict
EVERY = object()


class ReadDict(dict):
    """A dict that tells ``note`` which of its keys are read before they are written; EVERY for all of them."""

    def __init__(self, items: dict[Any, Any], note: Callable[[Any], None]) -> None:
        super().__init__(items)
        self._note, self._written = note, set[Any]()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._written.add(key)
        super().__setitem__(key, value)

    def update(self, *others: Any, **items: Any) -> None:
        for key, value in dict(*others, **items).items():
            self[key] = value


def _noting_one(method: Any) -> Any:
    def of_key(self: ReadDict, key: Any, *more: Any) -> Any:
        if key not in self._written:
            self._note(key)
        return method(self, key, *more)

    return of_key


def _noting_every(method: Any) -> Any:
    def of_all(self: ReadDict, *args: Any) -> Any:
        self._note(EVERY)
        return method(self, *args)

    return of_all


for _name in ("__getitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(ReadDict, _name, _noting_one(getattr(dict, _name)))
for _name in (
    "__iter__",
    "__len__",
    "__eq__",
    "__or__",
    "__ror__",
    "__reversed__",
    "keys",
    "values",
    "items",
    "copy",
    "popitem",
):
    setattr(ReadDict, _name, _noting_every(getattr(dict, _name)))
