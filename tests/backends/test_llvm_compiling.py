"""Compiling for the CPU: bounded at every width and for every CPU, once for all processes, never from bad files."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch

import sparseconv as sc
from sparseconv.backends.llvm_implicit_gemm import kernels
from sparseconv.backends.llvm_implicit_gemm.backend import LlvmImplicitGemm
from sparseconv.geometry.cpu import loops
from sparseconv.interop.spconv import point_loop
from sparseconv.llvm import compile as compiler
from sparseconv.llvm import object_cache, target
from sparseconv.llvm.target import Target, host
from tests.backends.test_gather_scatter import plain, random_map
from tests.cpus import CPUS
from tests.forked import printed

SECONDS = 2.0  # of compiling before a first call is answered
WIDTHS = (1, 3, 7, 8, 9, 17, 31, 33, 63, 65, 127, 129, 1000)
KINDS = ("forward", "weight_grad")

Pattern = tuple[tuple[kernels.Shape, ...], bool]


def pattern(channels: int, double: bool, cpu: str) -> Pattern:
    runs = kernels.runs(channels, double, CPUS[cpu].target)
    return tuple(shape for shape, _ in runs), len(runs) == 1 and runs[0][1] == 1


def text(kind: str, shapes: tuple[kernels.Shape, ...], alone: bool, double: bool, cpu: str) -> str:
    sizes = (alone,) if kind == "weight_grad" else ()
    return kernels.Loops(kind, shapes, double, CPUS[cpu].target).text(*sizes)


def patterns(double: bool, cpu: str) -> set[Pattern]:
    """What kernels are made for, over every number of channels: those over 600 repeat what is below."""
    return {pattern(channels, double, cpu) for channels in range(1, 601)}


@pytest.mark.parametrize(
    ("channels", "vector", "most", "runs"),
    [
        (1, 16, 4, [((1,), 1)]),
        (7, 16, 4, [((4, 2, 1), 1)]),
        (64, 16, 4, [((16,) * 4, 1)]),
        (80, 16, 4, [((16,) * 2, 1), ((16,) * 3, 1)]),
        (20, 8, 2, [((8,), 1), ((8, 4), 1)]),
        (4096, 8, 2, [((8, 8), 256)]),
        (0, 8, 2, []),
    ],
)
def test_columns(channels, vector, most, runs):
    assert kernels.columns(channels, vector, most) == runs


@pytest.mark.parametrize(("vector", "most"), [(2, 2), (4, 2), (8, 2), (4, 4), (8, 4), (16, 4)])
def test_columns_cover_all_channels_in_few_runs(vector, most):
    for channels in range(1, 1100):
        runs = kernels.columns(channels, vector, most)
        assert sum(sum(shape) * count for shape, count in runs) == channels
        assert len(runs) <= kernels.RUNS
        assert max(len(shape) for shape, _ in runs) <= most


@pytest.mark.parametrize("double", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("cpu", list(CPUS))
def test_no_width_needs_a_shape_of_its_own(cpu, double):
    few = patterns(double, cpu)
    assert all(pattern(channels, double, cpu) in few for channels in (1000, 1024, 2048, 4095, 4096, 5003, 1 << 16))
    assert len(few) < 160


@pytest.mark.parametrize("double", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("cpu", list(CPUS))
def test_the_longest_kernels_of_each_cpu_compile_in_time_and_are_small(cpu, double):
    """Compiled only, so for CPUs that this machine is not, too. Seconds of this thread, whatever else runs here."""
    for shapes, alone in sorted(patterns(double, cpu), key=lambda found: sum(map(len, found[0])))[-2:]:
        for kind in KINDS:
            start = time.thread_time()
            code = compiler.object_code(text(kind, shapes, alone, double, cpu), CPUS[cpu].target)
            assert time.thread_time() - start < SECONDS
            assert len(code) < 64 << 10


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("cpu", list(CPUS))
def test_every_kernel_of_each_cpu_compiles_in_time_and_is_small(cpu, double):
    for shapes, alone in patterns(double, cpu):
        for kind in KINDS:
            start = time.thread_time()
            code = compiler.object_code(text(kind, shapes, alone, double, cpu), CPUS[cpu].target)
            assert time.thread_time() - start < SECONDS
            assert len(code) < 64 << 10


@pytest.mark.parametrize("cpu", ["host", *CPUS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_widths_about_the_edges_of_blocks(dtype, cpu):
    if cpu != "host" and not CPUS[cpu].runs_here():
        pytest.skip(f"this CPU has no {cpu}")
    backend = LlvmImplicitGemm(None if cpu == "host" else CPUS[cpu].target)
    kernel_map, other = random_map(3, 30, 40, 4), sc.backends.registry.backend("numpy_gather_scatter")
    for width in WIDTHS:
        torch.manual_seed(width)
        for c_in, c_out, groups in ((3, width, 1), (width, 5, 1), (8, 2 * width, 2)):
            if groups > 1 and width < 4:
                continue
            x = torch.randint(-2, 3, (kernel_map.num_in, c_in)).to(dtype)
            w = torch.randint(-1, 2, (kernel_map.num_taps, c_in // groups, c_out)).to(dtype)
            g = torch.randint(-2, 3, (kernel_map.num_out, c_out)).to(dtype)
            bias = torch.arange(c_out).remainder(7).to(dtype)
            for verb, args in (
                ("forward", (x, w, kernel_map, groups, bias)),
                ("weight_grad", (x, g, kernel_map, groups)),
            ):
                assert torch.equal(getattr(backend, verb)(*args), getattr(other, verb)(*args)), (verb, c_in, c_out)
            assert torch.equal(
                backend.input_grad(g, w, kernel_map, groups), other.input_grad(g, w, kernel_map, groups)
            ), (c_in, c_out)


def test_a_wide_first_call_compiles_no_longer_than_a_narrow_one(tmp_path, monkeypatch):
    """Nothing on disk, no kernel in memory: what is left of a call's time is compiling."""
    monkeypatch.setenv("SPARSECONV_CACHE_DIR", str(tmp_path))
    kernels.kernel.cache_clear()
    kernel_map, backend = random_map(1, 8, 8, 2), LlvmImplicitGemm()
    for c_out, groups, dtype in ((4096, 1, torch.float32), (1000, 1, torch.float64), (4000, 1000, torch.float64)):
        x, w = torch.ones(8, 4 * groups, dtype=dtype), torch.ones(2, 4, c_out, dtype=dtype)
        start = time.thread_time()
        y = backend.forward(x, w, kernel_map, groups)
        assert time.thread_time() - start < SECONDS
        if groups == 1:
            assert torch.equal(y.double(), plain(x, w, kernel_map).double())


def test_more_groups_compile_nothing(monkeypatch):
    kernel_map, backend = random_map(1, 8, 8, 2), LlvmImplicitGemm()

    def run(groups):
        backend.forward(torch.ones(8, 4 * groups), torch.ones(2, 4, 4 * groups), kernel_map, groups)

    run(2)
    monkeypatch.setattr(kernels, "compiled", lambda *args: pytest.fail("compiled again"))
    for groups in (3, 100, 1000):
        run(groups)


CHILD = """
import sys, torch
from sparseconv.llvm import compile as compiler
from sparseconv.backends.llvm_implicit_gemm.backend import LlvmImplicitGemm
from sparseconv.llvm.function import Function
from tests.backends.test_gather_scatter import random_map
made, written = [], []
plain, write = compiler.object_code, Function.text
compiler.object_code = lambda *args: made.append(1) or plain(*args)
Function.text = lambda *args: written.append(1) or write(*args)
y = LlvmImplicitGemm().forward(torch.ones(8, 4), torch.ones(2, 4, 9), random_map(1, 8, 8, 2), 1)
assert len(made) == len(written)
print(len(made), float(y.sum()))
"""


def child(prelude: str = "", **environment: str) -> list[str]:
    """How many functions a process compiled, and what it computed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "SPARSECONV_CACHE_DIR")}
    return printed("-c", prelude + CHILD, folder=Path(__file__).parents[2], env={**clean, **environment}).split()


def test_a_second_process_compiles_nothing(tmp_path):
    first, second = (child(SPARSECONV_CACHE_DIR=str(tmp_path)) for _ in range(2))
    kept = list((tmp_path / "llvm").iterdir())
    assert (int(first[0]), second[0]) == (len(kept), "0")
    assert first[1] == second[1]
    assert kept
    assert [(path.stat().st_mode & 0o777) for path in (tmp_path / "llvm", *kept)] == [0o700, *[0o600] * len(kept)]


def test_without_a_home_it_compiles_in_memory():
    nobody = "import os, pwd\ndef missing(*a): raise KeyError('no entry')\npwd.getpwuid = missing\n"
    assert int(child(nobody)[0]) > 0


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSECONV_CACHE_DIR", str(tmp_path))
    object_cache.store("key", b"object")
    (path,) = (tmp_path / "llvm").iterdir()
    return path


def test_what_was_stored_is_loaded(cache):
    assert object_cache.load("key") == b"object"
    assert object_cache.load("another") is None


@pytest.mark.parametrize("place", [0, 25, -1])
def test_a_changed_file_is_not_loaded(cache, place):
    text = bytearray(cache.read_bytes())
    text[place] ^= 1
    cache.write_bytes(text)
    assert object_cache.load("key") is None


@pytest.mark.parametrize("length", [0, 10, 40, 56])
def test_a_file_cut_short_is_not_loaded(cache, length):
    cache.write_bytes(cache.read_bytes()[:length])
    assert object_cache.load("key") is None


def test_a_file_of_another_key_is_not_loaded(cache):
    cache.rename(cache.with_name(object_cache._name("another")))
    assert object_cache.load("another") is None


def test_a_link_and_files_that_others_may_write_are_not_loaded(cache):
    cache.chmod(0o666)
    assert object_cache.load("key") is None
    cache.chmod(0o600)
    moved = cache.rename(cache.with_name("moved"))
    cache.symlink_to(moved)
    assert object_cache.load("key") is None


def test_a_folder_that_others_may_write_is_not_used(cache):
    cache.parent.chmod(0o777)
    assert object_cache.folder() is None
    assert object_cache.load("key") is None
    object_cache.store("more", b"object")
    assert list(cache.parent.iterdir()) == [cache]


def test_a_relative_folder_is_not_used(monkeypatch):
    monkeypatch.setenv("SPARSECONV_CACHE_DIR", "somewhere")
    assert object_cache.folder() is None


def test_the_least_recently_used_go_first(cache, monkeypatch):
    monkeypatch.setattr(object_cache, "BOUND", 4000)
    for number in range(3):
        object_cache.store(f"key {number}", bytes(1000))
        os.utime(cache.with_name(object_cache._name(f"key {number}")), (number + 1, number + 1))
    object_cache.load("key 0")  # now it is the most recently used
    object_cache.store("last", bytes(1500))
    found = [object_cache.load(key) is not None for key in ("key 0", "key 1", "key 2", "last")]
    assert found == [True, False, False, True]
    assert sum(path.stat().st_size for path in cache.parent.iterdir()) <= 4000


#: (a class that writes functions, what one of its functions is made of, their sizes)
WRITTEN = [
    (kernels.Loops, ("forward", ((8, 8), (8,)), False, host()), ()),
    (kernels.Loops, ("weight_grad", ((8, 8), (8,)), True, host()), (False,)),
    (kernels._Integers, ("quads_rescaled", ((8,),), False, host()), ()),
    (kernels._Find, (), ()),
    (kernels._Sort, (), ()),
    (loops._Loop, ("keys", 1, 3), (4,)),
    (loops._Loop, ("edges", 5, 12), ()),
    (loops._Loop, ("mark", 3, 3), (3,)),
    (loops._Loop, ("collect", 2, 4), (3,)),
    (point_loop._Loop, ("find", 5, 9, False), (3,)),
    (point_loop._Loop, ("fill", 4, 4, True), ()),
]


#: a vector's and a number's product added to others, in the words of each assembler
FUSED = {
    "aarch64": (r"fmla\s+v\d+\.(?:4s|2d)", r"fmadd"),
    "arm64": (r"fmla\.(?:4s|2d)", r"fmadd"),
    "x86_64": (r"vfmadd\d+p[sd]\s.*%ymm", r"vfmadd\d+s[sd]"),
}
#: CPUs of other machines, which nothing here can run: Graviton, Grace, Jetson, Apple's, and Windows
ABROAD = [
    ("aarch64-unknown-linux-gnu", Target("neoverse-n1", "+neon", register=16, registers=32)),
    ("aarch64-unknown-linux-gnu", Target("neoverse-v2", "+sve2", register=16, registers=32)),
    ("aarch64-unknown-linux-gnu", Target("cortex-a78ae", "+neon", register=16, registers=32)),
    ("arm64-apple-darwin", Target("apple-m1", "+neon", register=16, registers=32)),
    ("x86_64-pc-windows-msvc", Target("x86-64-v3", "+avx2", register=32, registers=16)),
]


@pytest.mark.parametrize(("triple", "cpu"), ABROAD, ids=[f"{triple}-{cpu.cpu}" for triple, cpu in ABROAD])
def test_other_machines_get_vectors_and_call_nobody(triple, cpu, monkeypatch):
    """Compiled only, to the assembler's text. What a loop over whole vectors multiplies is multiplied in vectors."""
    llvm = target.binding()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    monkeypatch.setattr(llvm, "get_default_triple", lambda: triple)
    monkeypatch.setattr(llvm.Target, "from_default_triple", classmethod(lambda cls: cls.from_triple(triple)))
    texts, emit = [], llvm.TargetMachine.emit_object

    def emit_both(machine, module):
        texts.append(machine.emit_assembly(module))
        return emit(machine, module)

    monkeypatch.setattr(llvm.TargetMachine, "emit_object", emit_both)

    def assembled(kind, given, sizes):
        written = kind(*(cpu if part is host() else part for part in given)).text(*sizes)
        start = time.thread_time()
        assert len(compiler.object_code(written, cpu)) < 64 << 10
        assert time.thread_time() - start < SECONDS
        return texts.pop()

    for written in WRITTEN:
        assert not re.search(r"^\s+(bl|call\w*)\s", assembled(*written), re.MULTILINE), written
    vector, number = FUSED[triple.split("-")[0]]
    for double in (False, True):
        ((shape, _),) = kernels.runs(64, double, cpu)
        for kind in KINDS:
            found = assembled(kernels.Loops, (kind, (shape,), double, cpu), (True,) if kind == "weight_grad" else ())
            assert len(re.findall(vector, found)) >= len(shape), kind
            assert not re.search(rf"\s{number}\s", found), kind


def test_the_key_holds_what_an_object_depends_on(monkeypatch):
    kind, given, _ = WRITTEN[0]
    keys = [compiler._key(kind, given, host(), *sizes) for kind, given, sizes in WRITTEN]
    keys += [compiler._key(loops._Loop, ("keys", 1, 3), host(), 3)]
    keys += [compiler._key(kind, given, cpu.target) for cpu in CPUS.values()]
    for name, value in (
        ("llvmlite.__version__", "0"),
        ("sparseconv.backends.llvm_implicit_gemm.kernels.DEPTH", 32),
        ("sparseconv.backends.llvm_implicit_gemm.kernels.PLACES", {"arrived": 1}),
        ("sparseconv.backends.llvm_implicit_gemm.kernels.Loops.sources", ("another",)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(name, value)
            keys.append(compiler._key(kind, given, host()))
    assert len(set(keys)) == len(keys)


def test_without_sources_the_text_is_the_key(monkeypatch):
    kind, given, sizes = WRITTEN[0]
    known = compiler._key(kind, given, host(), *sizes)
    monkeypatch.setattr(kind, "sources", (None,))
    found = compiler._key(kind, given, host(), *sizes)
    assert found != known
    monkeypatch.setattr(kind, "text", lambda self, *sizes: "another")
    assert compiler._key(kind, given, host(), *sizes) != found


@pytest.mark.parametrize(("kind", "given", "sizes"), WRITTEN)
def test_nothing_writes_a_text_but_what_its_key_holds(kind, given, sizes):
    """Of this package: functions of the modules of its classes, and what asks llvmlite for its binding."""
    files = {sys.modules[base.__module__].__file__ for base in kind.__mro__[:-1]}
    assert len(kind.sources) == len(kind.__mro__[:-1])
    assert None not in kind.sources
    called = set()
    sys.setprofile(lambda frame, event, value: called.add(frame.f_code.co_filename))
    try:
        kind(*given).text(*sizes)
    finally:
        sys.setprofile(None)
    ours = {file for file in called if file.startswith(str(Path(sc.__file__).parent))}
    assert kernels.__file__ in ours or kind not in (kernels.Loops, kernels._Integers)
    assert ours - {target.__file__} <= files
