"""The public surface: names that modules list in ``__all__`` and what the pages of the API reference show."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import sparseconv

ROOT = Path(__file__).parents[2]
ROOMS = ("", *(f".{name}" for name in sparseconv.MODULES))
#: methods with two underscores that a user calls without naming them
CALLED = ("__init__", "__call__")
#: names of other libraries, whose signatures are theirs
FOREIGN = ("sparseconv.interop.",)
SHOWN = re.compile(r"^::: (\S+)", re.MULTILINE)
#: what follows is described in a sentence, its constructors and members are private
NAMED = "## Types of arguments and results"


def found(path: str) -> Any:
    """What a dotted path names."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            thing = getattr(thing, name)
        return thing
    raise LookupError(path)


def public_things() -> Iterator[Any]:
    for room in ROOMS:
        module = import_module("sparseconv" + room)
        yield from (getattr(module, name) for name in module.__all__)
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for path in SHOWN.findall(page.read_text().partition(NAMED)[0]):
            thing = found(path)
            if not inspect.ismodule(thing):
                yield thing
            elif not path.startswith(FOREIGN):
                own = [value for name, value in vars(thing).items() if not name.startswith("_")]
                yield from (value for value in own if getattr(value, "__module__", "") == path)


def plain(member: Any) -> Any:
    """The function behind a method, a property or a decorator."""
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    return inspect.unwrap(getattr(member, "func", member))


def classes(kind: type) -> list[type]:
    return [part for part in kind.__mro__ if part.__module__.startswith("sparseconv")]


@cache
def public_functions() -> dict[str, FunctionType]:
    """Public functions, and methods of public classes, by a name that a reader can find."""
    functions = {}
    for thing in public_things():
        members = [("", thing)]
        if inspect.isclass(thing):
            members = [
                (name, member)
                for part in classes(thing)
                for name, member in vars(part).items()
                if not name.startswith("_") or name in CALLED
            ]
        for _, member in members:
            function = plain(member)
            if isinstance(function, FunctionType) and function.__module__.startswith("sparseconv"):
                functions[f"{function.__module__}.{function.__qualname__}"] = function
    return functions


@cache
def public_fields() -> dict[str, str]:
    """The annotated fields of public classes: name -> annotation."""
    return {
        f"{part.__module__}.{part.__qualname__}.{name}": annotation
        for thing in public_things()
        if inspect.isclass(thing)
        for part in classes(thing)
        for name, annotation in inspect.get_annotations(part).items()
        if not name.startswith("_")
    }
