"""The floors of the house, and what importing it may cost."""

from __future__ import annotations

import ast
import doctest
import os
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import sparseconv
from tests.forked import printed

ROOT = Path(sparseconv.__file__).parent
FLOORS = {
    "memory": 0,
    "torch_private": -1,
    "files": -1,
    "autograd_function": 0,
    "transforms": 0,
    "checks": 0,
    "other_names": 0,
    "device_mixin": 0,
    "row_functions": 1,
    "products": 1,
    "pointwise": 1,
    "gpu": 0,
    "llvm": 0,
    "geometry": 1,
    "backends": 2,
    "tensor": 2,
    "autograd": 3,
    "operators": 3.5,
    "plan": 4,
    "ops": 5,
    "distributed": 5,
    "info": 5,
    "compiler": 5.5,
    "export": 6,
    "nn": 6,
    "trace": 6,
    "quantization": 7,
    "streaming": 7,
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


@cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Within functions and under TYPE_CHECKING too."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in imports(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module] if node.module != "sparseconv" else [f"sparseconv.{a.name}" for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("sparseconv.")}
    return {name for name in found if name in FLOORS}


def test_a_room_imports_only_from_floors_below():
    for path in FILES:
        own = room(path)
        assert own in FLOORS, f"{own} has no floor: give it one here and in CONTRIBUTING.md"
        for other in imported_rooms(path) - {own}:
            allowed = FLOORS[other] < FLOORS[own] or (own, other) in SIDEWAYS
            assert allowed, f"{path.relative_to(ROOT)}: {own} must not import {other}"


def test_public_names_exist():
    for name in (*sparseconv.__all__, *sparseconv.MODULES):
        assert getattr(sparseconv, name).__doc__
        assert name in dir(sparseconv)
    with pytest.raises(AttributeError, match="module 'sparseconv' has no attribute 'convolve'"):
        sparseconv.convolve


def test_modules_are_loaded_when_they_are_used():
    """Importing loads nothing heavy, and dir() shows the public names alone; a type checker sees each module."""
    code = (
        "import sys, sparseconv as sc;"
        "unused = [m for m in sc.MODULES if m not in ('export', 'geometry', 'plan')];"
        "print([m for m in unused if f'sparseconv.{m}' in sys.modules]);"
        "sc.nn;"
        "print([m for m in ('triton', 'cupy', 'matplotlib', 'typer', 'rich', 'nilearn') if m in sys.modules]);"
        "there = [getattr(sc, m).__name__ for m in sc.MODULES];"
        "print(there == [f'sparseconv.{m}' for m in sc.MODULES], 'triton' in sys.modules);"
        "print([n for n in dir(sc) if n.startswith('_')], 'nn' in dir(sc), 'autograd' in dir(sc));"
        "print(dir(sc.pointwise) == sorted(sc.pointwise.__all__))"
    )
    assert printed("-c", code).splitlines() == ["[]", "[]", "True False", "['__version__'] True False", "True"]
    seen = [line.split()[-1] for line in (ROOT / "__init__.py").read_text().splitlines() if " as " in line]
    assert [name for name in seen if name in sparseconv.MODULES] == list(sparseconv.MODULES)


#: what Windows and macOS lack of Python's modules, taken away behind the backs of those that know where they run
ELSEWHERE = """
import ctypes, io, mmap, os, signal, sys, tempfile
import numpy, torch, torch._dynamo, llvmlite.binding
missing = {
    "darwin": {os: "sched_getaffinity sched_setaffinity", mmap: "MADV_HUGEPAGE"},
    "win32": {
        os: "getuid geteuid getgid getegid getpgid killpg fork wait waitpid sched_getaffinity sched_setaffinity "
            "sysconf chown fchmod mkfifo O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY O_SYNC",
        mmap: "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED MADV_HUGEPAGE MADV_FREE",
        signal: "SIGXCPU SIGKILL SIGALRM SIGHUP SIGUSR1 alarm setitimer",
    },
}
for module, names in missing[SYSTEM].items():
    for name in filter(lambda name: hasattr(module, name), names.split()):
        delattr(module, name)
modules = ("triton", "fcntl", "resource", "pwd", "grp", "termios")
sys.modules.update(dict.fromkeys(modules if SYSTEM == "win32" else modules[:1]))
open_file, load = io.open, ctypes.CDLL

def open_there(file, *more, **options):
    if str(file).startswith(("/proc", "/dev/shm", "/sys")):
        raise FileNotFoundError(file)
    return open_file(file, *more, **options)

def load_there(name, *more, **options):
    if name is None and SYSTEM == "win32":
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return load(name, *more, **options)

io.open, ctypes.CDLL, sys.platform = open_there, load_there, SYSTEM
import sparseconv as sc
from sparseconv import files, info, nn

grid, _ = sc.voxelize(torch.rand(4000, 3), voxel_size=0.1)
x, w = torch.randn(len(grid), 16), torch.randn(27, 16, 8, requires_grad=True)
plan = sc.ConvolutionPlan(grid, 3)
assert "llvm_implicit_gemm: chosen" in str(plan.explain(x, w))
plan.execute(x, w).square().mean().backward()
net = nn.UNet(16, 4, channels=(16, 32))
optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
for _ in range(3):
    losses.append(net(sc.SparseTensor(grid, x)).features.square().mean())
    optimizer.zero_grad()
    losses[-1].backward()
    optimizer.step()
assert losses[-1] < losses[0]
sc.memory.empty((40 << 20,), torch.uint8).zero_()
net.eval()
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    folder = files.Path(folder)
    for _ in range(2):  # and resumed
        y = sc.stream(net, sc.SparseTensor(grid, x), 4_000_000, resume=folder / "run")
    assert torch.equal(y.features, net(sc.SparseTensor(grid, x)).features)
    with files.written_whole(folder / "a") as part:
        part.write_text("a")
    (folder / "b").symlink_to(folder / "a")
    for path in ("b", "."):
        try:
            files.open_plain(folder / path, "ab")
        except ValueError as error:
            print(str(error).split()[-1])
print("backends for a plan" in info.text())
"""


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_plan_and_a_training_step_need_nothing_of_linux(system, tmp_path):
    environment = os.environ | {"SPARSECONV_CACHE_DIR": str(tmp_path)}
    said = printed("-c", f"SYSTEM = {system!r}\n{ELSEWHERE}", env=environment)
    assert said.split() == ["it", "it", "True"]
    assert (tmp_path / "llvm").exists() == (system == "darwin")


def documented() -> list[str]:
    """Modules with examples, but for those that `tests/docs/test_shapes.py` runs while it watches their calls."""
    from tests.docs.test_shapes import watched_modules

    names, elsewhere = [], watched_modules()
    for path in FILES:
        if ">>>" in path.read_text():
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if name not in elsewhere]


@pytest.mark.parametrize("module", documented())
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in FILES}


def arrows(path: Path) -> set[str]:
    found = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        else:
            continue
        found |= {name.removeprefix("sparseconv.") for name in names if name.startswith("sparseconv.")}
    return {name for name in found if name in MODULES and MODULES[name].name != "__init__.py"} - {dotted(path)}


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen, left = set(), [start]
    while left:
        for name in graph[left.pop()] - seen:
            seen.add(name)
            left.append(name)
    return seen


def test_no_circle_of_imports():
    graph = {name: arrows(path) for name, path in MODULES.items()}
    assert [name for name in graph if name in reachable(name, graph)] == []


def addresses_of_passing_tensors(source: str) -> list[int]:
    """Lines that take the address of a tensor that nothing holds: its memory goes before the launch that is given it.

    >>> addresses_of_passing_tensors("args = (*map(pointer, (x, y.contiguous())),)"), addresses_of_passing_tensors(
    ...     "a, b = map(pointer, kept.split(2)); seen = t.untyped_storage().data_ptr(), pointer(x)"
    ... )
    ([1], [])
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        of, called = node.args, getattr(node.func, "id", "")
        if called == "map" and len(of) == 2 and ast.unparse(of[0]) == "pointer":
            of = of[1].elts if isinstance(of[1], (ast.Tuple, ast.List)) else []
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "data_ptr":
            of = [node.func.value]
        elif called != "pointer":
            continue
        if any(isinstance(one, ast.Call) and "storage" not in ast.unparse(one) for one in of):
            found.append(node.lineno)
    return found


def test_launches_are_given_tensors_that_something_holds():
    texts = {dotted(path): path.read_text() for path in FILES}
    found = {
        name: addresses_of_passing_tensors(text) for name, text in texts.items() if "pointer" in text or "_ptr" in text
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
