"""What is the compiled CPU engine's own: every width of vectors, parts and threads, the same bits, no read too far."""

from __future__ import annotations

import ctypes
import multiprocessing
from itertools import pairwise

import numpy as np
import pytest
import torch

import sparseconv as sc
from sparseconv.backends.base import Request
from sparseconv.backends.llvm_implicit_gemm import backend as engine
from sparseconv.backends.llvm_implicit_gemm import kernels
from sparseconv.backends.llvm_implicit_gemm.backend import LlvmImplicitGemm
from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.llvm import compile as compiler
from sparseconv.llvm.target import Target, host
from tests.backends.test_gather_scatter import plain, random_map
from tests.cpus import CPUS

BACKEND = LlvmImplicitGemm()
#: registers (bytes, how many) that this CPU runs too: LLVM cuts vectors that are too long, and spills what does not fit
REGISTERS = [(64, 32), (32, 16), (16, 32), (16, 16)]


@pytest.fixture(autouse=True, params=["host", *CPUS])
def _cpu(request, monkeypatch):
    """Every test runs as generated for each CPU that this machine can stand for."""
    if request.param != "host":
        if not CPUS[request.param].runs_here():
            pytest.skip(f"this CPU has no {request.param}: test_llvm_compiling compiles for it")
        monkeypatch.setattr(BACKEND, "target", CPUS[request.param].target)


def with_registers(monkeypatch, registers) -> None:
    monkeypatch.setattr(BACKEND, "target", Target(host().cpu, host().features, *registers))


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def all_three(kernel_map, c_in, c_out, groups=1, dtype=torch.float32):
    """Results of the verbs on integers, and what they must be to the bit."""
    torch.manual_seed(c_in * 1000 + c_out)
    x, w, g = (
        integers(*shape, dtype=dtype)
        for shape in (
            (kernel_map.num_in, c_in),
            (kernel_map.num_taps, c_in // groups, c_out),
            (kernel_map.num_out, c_out),
        )
    )
    bias = integers(c_out, dtype=dtype)
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    y = torch.zeros(kernel_map.num_out, c_out, dtype=torch.float64)
    terms = []
    for part, taps in zip(x64.chunk(groups, 1), w64.chunk(groups, 2)):
        picked = torch.einsum("ea,eab->eb", part[kernel_map.in_rows.long()], taps[kernel_map.pair_taps.long()])
        terms.append(picked)
    y = y.index_add(0, kernel_map.out_rows.long(), torch.cat(terms, 1))
    want = torch.autograd.grad(y, (x64, w64), g.double()) if len(kernel_map.in_rows) else (x64 * 0, w64 * 0)
    found = (
        BACKEND.forward(x, w, kernel_map, groups, bias),
        BACKEND.input_grad(g, w, kernel_map, groups),
        BACKEND.weight_grad(x, g, kernel_map, groups),
    )
    return found, (y.detach() + bias.double(), *(t.detach() for t in want))


def assert_equal(found, want):
    for a, b in zip(found, want):
        assert torch.equal(a.double(), b)


@pytest.mark.parametrize("registers", REGISTERS, ids=str)
@pytest.mark.parametrize(("c_in", "c_out", "groups"), [(1, 1, 1), (5, 37, 1), (70, 66, 1), (12, 40, 2)])
def test_integers_to_the_bit_with_the_registers_of_any_cpu(monkeypatch, registers, c_in, c_out, groups):
    with_registers(monkeypatch, registers)
    kernel_map = random_map(3, 70, 90, 5)
    assert_equal(*all_three(kernel_map, c_in, c_out, groups))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("identity", [None, 2])
def test_integers_to_the_bit_in_every_dtype(dtype, identity):
    found, want = all_three(random_map(1, 50, 50, 4, identity), 4, 8, dtype=dtype)
    assert {t.dtype for t in found} == {dtype}
    for a, b in zip(found, want):
        assert torch.equal(a, b.to(dtype))


@pytest.mark.parametrize("registers", [(64, 32), (16, 16)], ids=str)
@pytest.mark.parametrize(("c_in", "c_out", "groups"), [(3, 5, 1), (140, 130, 1), (12, 40, 2), (0, 7, 1)])
@pytest.mark.parametrize("identity", [1, 4])
def test_an_identity_tap_begins_rows_that_hold_anything(monkeypatch, registers, c_in, c_out, groups, identity):
    """In several steps of depth, blocks of columns, groups and regions of engine."""
    with_registers(monkeypatch, registers)
    monkeypatch.setattr(engine, "empty", lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype))
    monkeypatch.setattr(engine, "_threads", lambda multiplications: 3)
    monkeypatch.setattr(engine, "CHUNK", 1 << 10)
    assert_equal(*all_three(random_map(8, 300, 300, 5, identity), c_in, c_out, groups))


def test_rows_of_a_fixed_grid_that_are_dead_are_begun_too(monkeypatch):
    """Its identity tap has an edge for each live row alone."""
    monkeypatch.setattr(engine, "empty", lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype))
    place = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 3, 3], [0, 3, 4]], dtype=torch.int32)
    grid = sc.VoxelGrid(place)
    rows = torch.cat([place, torch.full((5, 3), -1, dtype=torch.int32)])
    fixed = sc.ConvolutionPlan(FixedGrid(rows, torch.tensor([4], dtype=torch.int32), grid), 3)
    x, weight, bias = torch.randn(9, 8), torch.randn(9, 8, 8), torch.randn(8)
    x[4:] = torch.nan
    got = BACKEND.forward(x, weight, fixed.kernel_map, 1, bias)
    want = sc.ConvolutionPlan(grid, 3, backend="numpy_gather_scatter").execute(x[:4], weight, bias)
    torch.testing.assert_close(got[:4], want)
    torch.testing.assert_close(got[4:], bias.expand(5, 8))


def test_more_threads_than_parts(monkeypatch):
    monkeypatch.setattr(engine, "_threads", lambda multiplications: 7)
    assert_equal(*all_three(random_map(9, 40, 40, 3, 1), 8, 8))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("teams", [True, False])
def test_any_number_of_threads_gives_the_same_integers(monkeypatch, threads, teams):
    monkeypatch.setattr(engine, "_threads", lambda multiplications: threads)
    monkeypatch.setattr(engine, "CHUNK", 1 << 10)
    if not teams:
        monkeypatch.setattr(engine, "_openmp", lambda: None)
    assert_equal(*all_three(random_map(5, 400, 300, 6), 24, 40))


@pytest.mark.parametrize(("groups", "dtype"), [(1, torch.float32), (2, torch.float32), (1, torch.bfloat16)])
def test_wide_weights_have_the_same_integers(monkeypatch, groups, dtype):
    """Those whose gradient is torch's product of gathered rows; and what that takes is foreseen."""
    monkeypatch.setattr(engine, "WIDE", 24 * 40 // 2)
    monkeypatch.setattr(engine, "MANY", 1 << 10)
    kernel_map, seen = random_map(5, 400, 300, 6), []
    walk = engine._WITH_TORCH.weight_grad
    monkeypatch.setattr(engine._WITH_TORCH, "weight_grad", lambda *args: seen.append(args) or walk(*args))
    assert_equal(*all_three(kernel_map, 24, 40, groups, dtype))
    assert len(seen) == 1
    request = Request(kernel_map, torch.device("cpu"), dtype, 24, 40, groups)
    assert BACKEND.workspace_bytes(request) >= engine._WITH_TORCH.workspace_bytes(request)


def test_two_runs_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(engine, "_threads", lambda multiplications: 3)
    kernel_map = random_map(2, 500, 500, 8)
    x, w, g = torch.randn(500, 20), torch.randn(8, 20, 36), torch.randn(500, 36)
    runs = [
        (BACKEND.forward(x, w, kernel_map, 1), BACKEND.input_grad(g, w, kernel_map, 1))
        + (BACKEND.weight_grad(x, g, kernel_map, 1),)
        for _ in range(4)
    ]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


def test_nothing_but_its_rows_is_read_or_written():
    kernel_map = random_map(4, 30, 20, 3)
    around = torch.full((40, 17), float("nan"))
    x = around[5:35]
    x.copy_(integers(30, 17))
    w = integers(3, 17, 21)
    assert torch.equal(BACKEND.forward(x, w, kernel_map, 1).double(), plain(x, w, kernel_map))
    assert bool(around[:5].isnan().all())
    assert bool(around[35:].isnan().all())


def test_views_of_any_strides():
    kernel_map = random_map(6, 60, 60, 4)
    x, w, g = integers(24, 60).t(), integers(4, 16, 24).transpose(1, 2), integers(60, 32)[:, ::2]
    dense = [t.contiguous() for t in (x, w, g)]
    for verb, which in (("forward", (0, 1)), ("input_grad", (2, 1)), ("weight_grad", (0, 2))):
        call = getattr(BACKEND, verb)
        a, b = ([several[i] for i in which] for several in ((x, w, g), dense))
        assert torch.equal(call(*a, kernel_map, 1), call(*b, kernel_map, 1))


@pytest.mark.parametrize(
    ("num_in", "num_out", "c_in", "c_out"), [(0, 0, 3, 5), (4, 0, 3, 5), (0, 4, 3, 5), (4, 4, 0, 5), (4, 4, 3, 0)]
)
def test_empty_in_every_way(num_in, num_out, c_in, c_out):
    kernel_map = random_map(0, num_in, num_out, 2)
    x, w, g = torch.ones(num_in, c_in), torch.ones(2, c_in, c_out), torch.ones(num_out, c_out)
    y = BACKEND.forward(x, w, kernel_map, 1, torch.ones(c_out))
    assert y.shape == g.shape
    if 0 in (num_in, c_in):
        assert bool((y == 1).all())
    assert BACKEND.input_grad(g, w, kernel_map, 1).shape == x.shape
    assert BACKEND.weight_grad(x, g, kernel_map, 1).shape == w.shape


def test_a_forked_process_makes_its_own_threads():
    """OpenMP's threads are gone in it, and a call to them would never return."""
    kernel_map = random_map(7, 600, 600, 8)
    x, w = torch.ones(600, 32), torch.ones(8, 32, 32)
    want = BACKEND.forward(x, w, kernel_map, 1)
    nothing = kernels.Operands()  # no parts: threads come and go
    address = kernels.kernel("forward", ((8,),), True, False, BACKEND.target or host())
    engine.run_on_threads(address, ctypes.addressof(nothing), 2, nothing)

    def child(queue):
        engine._threads = lambda multiplications: 2
        queue.put(bool(torch.equal(BACKEND.forward(x, w, kernel_map, 1), want)))

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join(500)
    assert process.exitcode == 0
    assert queue.get()


def request(c_in: int, c_out: int, groups: int = 1, dtype=torch.float32, device: str = "cpu") -> Request:
    return Request(random_map(0, 8, 8, 2), torch.device(device), dtype, c_in, c_out, groups)


def test_refusals_say_what_to_do(monkeypatch):
    assert BACKEND.unsupported(request(8, 8)) is None
    assert "on cuda" in BACKEND.unsupported(request(8, 8, device="cuda"))
    assert "int32" in BACKEND.unsupported(request(8, 8, dtype=torch.int32))
    assert "1 channels per group" in BACKEND.unsupported(request(8, 8, groups=8))

    def broken():
        raise OSError("libLLVM.so: no such file")

    monkeypatch.setattr(compiler, "host", broken)
    compiler.missing.cache_clear()
    try:
        assert "cannot be used here: libLLVM.so" in BACKEND.unsupported(request(8, 8))
        monkeypatch.setattr(compiler, "find_spec", lambda name: None)
        compiler.missing.cache_clear()
        assert "pip install llvmlite" in BACKEND.unsupported(request(8, 8))
    finally:
        compiler.missing.cache_clear()


def test_it_says_what_it_would_do():
    (line,) = BACKEND.describe(request(16, 16))
    assert line.startswith("vectors of ")
    assert "1 chunk of output rows, 1 thread" in line


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("num_out", [0, 1, 50, 20_000])
def test_chunks_are_those_of_sorted_edges(rows, num_out):
    """The few edges of many rows are sorted by torch, others by a table of rows."""
    for seed in range(3):
        kernel_map = random_map(seed, 60, num_out, 5)
        found = engine._cut(kernel_map, rows)
        order = (kernel_map.pair_taps.long() * num_out + kernel_map.out_rows).argsort()
        ins, outs = kernel_map.in_rows[order], kernel_map.out_rows[order]
        cuts = np.append(np.arange(0, num_out, rows), num_out)
        runs = pairwise(np.append(0, np.cumsum(kernel_map.tap_counts)).tolist())
        bounds = [a + outs[a:b].numpy().searchsorted(cuts) for a, b in runs]
        assert torch.equal(found.ins, ins)
        assert torch.equal(found.outs, outs)
        assert found.cuts.tolist() == cuts.tolist()
        assert found.bounds.tolist() == np.stack(bounds, 1).tolist()


def test_arrays_that_a_kernel_reads_by_address_are_never_replaced(monkeypatch):
    """Two threads may begin on one map at once: what the first has kept, and may be reading, stays."""
    kernel_map = random_map(3, 300, 400, 9)
    unpatched, first = engine._cut, []

    def meanwhile(asked, rows):
        monkeypatch.setattr(engine, "_cut", unpatched)
        first.append(engine._chunks(asked, 8, 8, 4))  # another thread's whole call
        return unpatched(asked, rows)

    monkeypatch.setattr(engine, "_cut", meanwhile)
    second = engine._chunks(kernel_map, 8, 8, 4)
    assert len(first) == 1
    assert all(a is b for a, b in zip(first[0], second))
    assert any(kept is second for kept in kernel_map.prepared.values())
