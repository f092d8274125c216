"""The floors of the house, and what importing it may cost."""

from __future__ import annotations

import ast
import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import sparseconv

ROOT = Path(sparseconv.__file__).parent
FLOORS = {
    "memory": 0,
    "autograd_function": 0,
    "transforms": 0,
    "products": 1,
    "pointwise": 1,
    "gpu": 0,
    "geometry": 1,
    "backends": 2,
    "tensor": 2,
    "autograd": 3,
    "plan": 4,
    "ops": 5,
    "distributed": 5,
    "info": 5,
    "nn": 6,
    "interop": 7,
    "cli": 7,
    "viz": 7,
    "demo": 7,
    "bench": 7,
    "__main__": 7,
    "__init__": 8,
}
#: arrows between rooms of one floor that are allowed, one way each
SIDEWAYS = {("geometry", "products"), ("backends", "pointwise"), ("cli", "bench"), ("cli", "demo"), ("cli", "interop"),
            ("cli", "viz"), ("demo", "viz"), ("bench", "demo"), ("__main__", "cli")}  # fmt: skip
FILES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module] if node.module != "sparseconv" else [f"sparseconv.{a.name}" for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("sparseconv.")}
    return {name for name in found if name in FLOORS}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_from_floors_below(path):
    own = room(path)
    assert own in FLOORS, f"{own} has no floor: give it one here and in CONTRIBUTING.md"
    for other in imported_rooms(path) - {own}:
        assert FLOORS[other] < FLOORS[own] or (own, other) in SIDEWAYS, f"{own} must not import {other}"


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, sparseconv, sparseconv.nn;"
        "print([m for m in ('triton', 'cupy', 'matplotlib', 'typer', 'rich', 'nilearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist():
    for name in (*sparseconv.__all__, *sparseconv.MODULES):
        assert getattr(sparseconv, name).__doc__
        assert name in dir(sparseconv)


def test_public_modules_are_loaded_when_they_are_used():
    """And dir() shows the public names alone; a type checker sees each module."""
    code = (
        "import sys, sparseconv as sc;"
        "unused = [m for m in sc.MODULES if m not in ('geometry', 'products', 'pointwise')];"
        "before = [m for m in unused if f'sparseconv.{m}' in sys.modules];"
        "there = [getattr(sc, m).__name__ for m in sc.MODULES];"
        "print(before, there == [f'sparseconv.{m}' for m in sc.MODULES], 'triton' in sys.modules);"
        "print([n for n in dir(sc) if n.startswith('_')], 'nn' in dir(sc), 'autograd' in dir(sc))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] True False", "['__version__'] True False"]
    seen = [line.split()[-1] for line in (ROOT / "__init__.py").read_text().splitlines() if " as " in line]
    assert [name for name in seen if name in sparseconv.MODULES] == list(sparseconv.MODULES)
    with pytest.raises(AttributeError, match="module 'sparseconv' has no attribute 'convolve'"):
        sparseconv.convolve


def documented() -> list[str]:
    names = []
    for path in FILES:
        if ">>>" in path.read_text():
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.mark.parametrize("module", documented())
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
