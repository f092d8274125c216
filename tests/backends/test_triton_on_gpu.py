"""The implicit GEMM on a real card: every configuration against fp64, equal bits, graphs, no waiting, far rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparseconv.backends.base import Request
from sparseconv.backends.triton_implicit_gemm.backend import TritonImplicitGemm, problem_size
from sparseconv.backends.triton_implicit_gemm.config import ConvConfig, conv_candidates, weight_grad_candidates
from sparseconv.backends.triton_implicit_gemm.recipe import ConvSpec, WeightGradSpec
from sparseconv.bench.timing import DTYPES, precision
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.pointwise import relu
from sparseconv.pointwise.epilogue import Epilogue
from tests.waits import nothing_waits

pytestmark = pytest.mark.gpu
#: norm of the error over the norm of the result
LIMIT = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, "tf32": 2e-3}


def scattered_map(rows_in: int, rows_out: int, taps: int, density: float, seed: int = 0) -> KernelMap:
    """A map without geometry: each tap joins a random set of output rows to as many distinct input rows."""
    gen = torch.Generator("cuda").manual_seed(seed)
    table = torch.full((taps, rows_out), -1, dtype=torch.int32, device="cuda")
    for tap in range(taps):
        count = int(min(rows_in, rows_out) * density)
        outs = torch.randperm(rows_out, generator=gen, device="cuda")[:count]
        table[tap, outs] = torch.randperm(rows_in, generator=gen, device="cuda")[:count].int()
    return KernelMap(rows_in, rows_out, taps, neighbors=table)


def operands(kernel_map: KernelMap, c_in: int, c_out: int, groups: int, dtype: torch.dtype, seed: int = 0):
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(kernel_map.num_in, c_in, generator=gen, device="cuda").to(dtype)
    w = torch.randn(kernel_map.num_taps, c_in // groups, c_out, generator=gen, device="cuda").to(dtype)
    g = torch.randn(kernel_map.num_out, c_out, generator=gen, device="cuda").to(dtype)
    return x, w, g


def reference(x, w, g, kernel_map: KernelMap, groups: int):
    y = torch.zeros(g.shape, dtype=torch.float64, device="cuda")
    dx = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    dw = torch.zeros(w.shape, dtype=torch.float64, device="cuda")
    for tap in range(kernel_map.num_taps):
        outs = (kernel_map.neighbors[tap] >= 0).nonzero()[:, 0]
        ins = kernel_map.neighbors[tap][outs].long()
        a = x[ins].double().unflatten(1, (groups, -1))
        b = g[outs].double().unflatten(1, (groups, -1))
        k = w[tap].double().unflatten(1, (groups, -1))
        y[outs] += torch.einsum("pgi,igo->pgo", a, k).flatten(1)
        dx[ins] += torch.einsum("pgo,igo->pgi", b, k).flatten(1)
        dw[tap] = torch.einsum("pgi,pgo->igo", a, b).flatten(1)
    return y, dx, dw


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    tf32 = got.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return float((got.double() - want).norm()) <= LIMIT["tf32" if tf32 else got.dtype] * float(want.norm())


@pytest.fixture
def dtype(request):
    """The dtype of a name; products of single numbers may be in tf32 for that name alone."""
    with precision(request.param):
        yield DTYPES[request.param]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32"], indirect=True)
@pytest.mark.parametrize(
    ("c_in", "c_out", "groups"),
    [
        (64, 64, 1),
        (32, 32, 1),
        (256, 256, 1),
        (40, 72, 1),
        (5, 7, 1),
        (96, 160, 1),
        (64, 64, 2),
        (64, 64, 64),
        (8, 24, 8),
    ],
)
@pytest.mark.parametrize(("rows", "taps"), [(3000, 27), (700, 8), (400, 125)])
def test_every_configuration(dtype, c_in, c_out, groups, rows, taps):
    kernel_map = scattered_map(rows, rows + 77, taps, 0.3)
    x, w, g = operands(kernel_map, c_in, c_out, groups, dtype)
    y, dx, dw = reference(x, w, g, kernel_map, groups)
    bias = torch.linspace(-1, 1, c_out, device="cuda").to(dtype)
    request = Request(kernel_map, x.device, dtype, c_in, c_out, groups)
    aligned = c_in * dtype.itemsize % 16 == 0 and c_out * dtype.itemsize % 16 == 0
    for transposed, source, want in ((False, x, y + bias.double()), (True, g, dx)):
        work = problem_size(request, aligned, transposed)
        for config in conv_candidates(work):
            results = []
            for _ in range(2):
                out = torch.full(want.shape, float("nan"), dtype=dtype, device="cuda")
                recipe = ConvSpec(config, work, source, w, transposed, None if transposed else bias)
                step = recipe.bind(kernel_map)
                step(source, w, out, bias, source)
                results.append(out)
            assert close(results[0], want), config
            assert torch.equal(*results), config
    work = problem_size(request, aligned)
    for config in weight_grad_candidates(work):
        results = []
        for _ in range(2):
            out = torch.full(w.shape, float("nan"), dtype=dtype, device="cuda")
            WeightGradSpec(config, work, x, g, taps).bind(kernel_map)(x, g, out)
            results.append(out)
        assert close(results[0], dw), config
        assert torch.equal(*results), config


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="a copy engine as Hopper's"
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "tf32"], indirect=True)
@pytest.mark.parametrize(
    ("block_n", "warps", "stages"), [(64, 4, 2), (128, 4, 2), (256, 8, 2), (256, 8, 3), (256, 8, 4)]
)
def test_the_copy_engine_brings_the_same_weights(dtype, block_n, warps, stages):
    table = scattered_map(700, 777, 27, 0.1).neighbors
    table[:, 300:600] = -1  # whole tiles without a tap
    kernel_map = KernelMap(700, 777, 27, neighbors=table)
    x, w, g = operands(kernel_map, 512, 1024, 1, dtype)
    half = dtype != torch.float32
    for transposed, source, rows in ((False, x, g), (True, g, x)):
        copy = not half and not transposed
        plain = ConvConfig(128, block_n, 128 // dtype.itemsize, warps, stages, gluon=True, weight_copy=copy)
        work = problem_size(Request(kernel_map, x.device, dtype, 512, 1024), True, transposed)
        for weight in (w, w + 1):  # one step for weights at several addresses
            results = []
            for config in (plain, replace(plain, tma_weights=True)):
                out = torch.full(rows.shape, float("nan"), dtype=dtype, device="cuda")
                step = ConvSpec(config, work, source, weight, transposed).bind(kernel_map)
                step(source, weight, out, source, source)
                step(source, weight, out.fill_(float("nan")), source, source)
                results.append(out)
            assert not results[0].isnan().any()
            assert all(torch.equal(results[0], out) for out in results)
            if half:
                out, bias = torch.empty_like(rows), torch.linspace(-1, 1, rows.shape[1], device="cuda").to(dtype)
                config = replace(plain, tma_weights=True, tap_groups=3)
                step = ConvSpec(config, work, source, weight, transposed, bias, rows).bind(kernel_map)
                step(source, weight, out.fill_(float("nan")), bias, rows)
                assert close(out, results[0].double() + bias.double() + rows.double())


@pytest.mark.parametrize("split", [1, 3])
def test_wide_addresses_change_nothing(split):
    kernel_map = scattered_map(2000, 2000, 27, 0.3)
    x, w, g = operands(kernel_map, 64, 64, 1, torch.float16)
    work = problem_size(Request(kernel_map, x.device, x.dtype, 64, 64), True)
    for config in conv_candidates(work):
        config = replace(config, tap_groups=split)
        results = []
        for index64 in (False, True):
            out = torch.full(g.shape, float("nan"), dtype=x.dtype, device="cuda")
            step = ConvSpec(config, work, x, w, False, index64=index64).bind(kernel_map)
            step(x, w, out, x, x)
            results.append(out)
        assert torch.equal(*results)


@pytest.mark.parametrize(("rows", "channels"), [(3000, 64), (8000, 1024)])
def test_a_graph_replays_the_three_verbs(rows, channels):
    backend = TritonImplicitGemm()
    kernel_map = scattered_map(rows, rows, 27, 0.3)
    x, w, g = operands(kernel_map, channels, channels, 1, torch.float16)

    def run():
        return (
            backend.forward(x, w, kernel_map, 1),
            backend.input_grad(g, w, kernel_map, 1),
            backend.weight_grad(x, g, kernel_map, 1),
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(torch.randn_like(x))
    graph.replay()
    for got, want in zip(captured, run()):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("rows", "channels"), [(3000, 32), (8000, 1024)])
def test_nothing_waits_for_the_device(rows, channels):
    backend = TritonImplicitGemm()
    kernel_map = scattered_map(rows, rows, 27, 0.3)
    x, w, g = operands(kernel_map, channels, channels, 1, torch.float16)
    backend.forward(x, w, kernel_map, 1)
    backend.input_grad(g, w, kernel_map, 1)
    backend.weight_grad(x, g, kernel_map, 1)
    with nothing_waits():
        y = backend.forward(x, w, kernel_map, 1, torch.ones(channels, device="cuda", dtype=x.dtype))
        backend.input_grad(g, w, kernel_map, 1)
        backend.weight_grad(x, g, kernel_map, 1)
    assert bool(torch.isfinite(y).all())


def test_the_first_use_of_a_new_map_waits_for_nothing_either():
    """With the numbers of pairs read, schedules, jobs and steps are made without a look at the device."""
    backend = TritonImplicitGemm()
    gen = torch.Generator("cuda").manual_seed(0)
    for turn in range(3):
        cells = torch.randint(0, 40, (20_000, 3), generator=gen, device="cuda", dtype=torch.int32)
        coords = torch.nn.functional.pad(torch.unique(cells, dim=0), (1, 0))
        grid = VoxelGrid(coords)
        around, down = ConvolutionPlan(grid, 3), ConvolutionPlan(grid, 2, stride=2)
        calls = []
        for kernel_map in (around.kernel_map, down.kernel_map, down.kernel_map.reverse()):
            assert kernel_map.num_pairs == len(kernel_map.in_rows)
            calls.append((kernel_map, operands(kernel_map, 32, 32, 1, torch.float16)))
        torch.cuda.synchronize()
        with nothing_waits("error" if turn else "default"):
            results = [
                (
                    backend.forward(x, w, kernel_map, 1),
                    backend.input_grad(g, w, kernel_map, 1),
                    backend.weight_grad(x, g, kernel_map, 1),
                )
                for kernel_map, (x, w, g) in calls
            ]
        for (kernel_map, (x, w, g)), got in zip(calls, results):
            for a, b in zip(got, reference(x, w, g, kernel_map, 1)):
                assert close(a, b)


def test_estimate_alone_and_explanation(monkeypatch):
    monkeypatch.setenv("SPARSECONV_AUTOTUNE", "0")
    backend = TritonImplicitGemm()
    kernel_map = scattered_map(3000, 3000, 27, 0.3)
    x, w, _ = operands(kernel_map, 64, 64, 1, torch.float16)
    backend.forward(x, w, kernel_map, 1)
    forward, waste, *_ = backend.describe(Request(kernel_map, x.device, x.dtype, 64, 64))
    assert forward.startswith("forward: ")
    assert f"for {kernel_map.num_pairs:,} pairs" in waste


@pytest.mark.parametrize("channels", [64, 256, 5])
@pytest.mark.parametrize("rows", [500, 30_000])
def test_epilogue_in_the_store(channels, rows):
    kernel_map = scattered_map(rows, rows, 27, 0.3)
    x, w, residual = operands(kernel_map, channels, channels, 1, torch.float16)
    bias = torch.linspace(-1, 1, channels, device="cuda").to(x.dtype)
    y = TritonImplicitGemm().forward_fused(x, w, kernel_map, 1, bias, residual, Epilogue(relu))
    want = reference(x, w, residual, kernel_map, 1)[0] + bias.double() + residual.double()
    assert close(y, want.clamp(min=0))


def test_runs_of_rows_for_large_maps(monkeypatch):
    count, run = 40_000, 1024  # rows for more than two tiles on each multiprocessor: taps are not split
    monkeypatch.setattr("sparseconv.backends.triton_implicit_gemm.config.FAR_ROWS", 1000)
    monkeypatch.setattr("sparseconv.geometry.gpu.work_lists.CHUNK_ROWS", run)
    kernel_map = scattered_map(count, count, 27, 0.3)
    x, w, g = operands(kernel_map, 64, 64, 1, torch.float16)
    y, dx, _ = reference(x, w, g, kernel_map, 1)
    backend = TritonImplicitGemm()
    assert close(backend.forward(x, w, kernel_map, 1), y)
    assert close(backend.input_grad(g, w, kernel_map, 1), dx)
    for direction in (kernel_map, kernel_map.reverse()):
        (schedule,) = direction.work_lists.schedules.values()
        rows, slots = schedule.out_rows[:count], torch.arange(count, device="cuda")
        assert torch.equal(rows // run, slots.int() // run)
        assert not torch.equal(rows, slots.int())  # sorted by their taps within each run
        assert torch.equal(schedule.tile_order, torch.arange(schedule.num_tiles, device="cuda").int())


@pytest.mark.slow
@pytest.mark.parametrize("rows_first", [True, False])
def test_rows_beyond_two_billion_elements(rows_first):
    """2^31 elements on the input or the output side: the last rows meet each other."""
    rows, few, channels = (1 << 25) + 5000, 4000, 64
    ins = torch.arange(rows - few, rows, device="cuda", dtype=torch.int32)
    outs = torch.arange(few, device="cuda", dtype=torch.int32)
    offsets = torch.tensor([0, few, few], device="cuda")
    kernel_map = KernelMap(rows, few, 2, pairs=(ins, outs, offsets))
    kernel_map = kernel_map if rows_first else kernel_map.reverse()
    x, w, g = operands(kernel_map, channels, channels, 1, torch.float16)
    backend = TritonImplicitGemm()
    y = backend.forward(x, w, kernel_map, 1)
    dx = backend.input_grad(g, w, kernel_map, 1)
    dw = backend.weight_grad(x, g, kernel_map, 1)
    a, b = kernel_map.in_rows.long(), kernel_map.out_rows.long()
    assert close(y[b], x[a].double() @ w[0].double())
    assert close(dx[a], g[b].double() @ w[0].double().t())
    assert close(dw[0], x[a].double().t() @ g[b].double())
    assert int(y.count_nonzero(dim=1).count_nonzero()) == few
    assert int(dx.count_nonzero(dim=1).count_nonzero()) == few
