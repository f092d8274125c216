"""Gather, multiply, scatter: NumPy's rows on a CPU, CuPy's on a GPU, and what tests of other backends share."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import sparseconv as sc
from sparseconv.backends import cupy_gather_scatter as cupy_rows
from sparseconv.backends.gather_scatter import NumpyGatherScatter
from sparseconv.geometry.kernel_map import KernelMap
from tests import forked

BACKEND = NumpyGatherScatter()
SUMS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def random_map(seed: int, num_in: int, num_out: int, taps: int, identity: int | None = None) -> KernelMap:
    """Each tap a random partial injection, in no order of rows; tap 0 is dead where there are several."""
    rng = np.random.default_rng(seed)
    ins, outs, counts = [], [], [0]
    for tap in range(taps):
        count = int(rng.integers(0, min(num_in, num_out) + 1)) if tap or taps == 1 else 0
        a, b = rng.permutation(num_in)[:count], rng.permutation(num_out)[:count]
        if tap == identity:
            a = b = np.arange(num_out)
        ins.append(a), outs.append(b), counts.append(len(a))
    rows = (torch.from_numpy(np.concatenate(r).astype(np.int32)) for r in (ins, outs))
    pairs = (*rows, torch.tensor(counts).cumsum(0))
    return KernelMap(num_in, num_out, taps, pairs=pairs, identity_tap=identity)


def plain(x: torch.Tensor, w: torch.Tensor, kernel_map: KernelMap) -> torch.Tensor:
    """The definition, an edge at a time, in fp64."""
    y = torch.zeros(kernel_map.num_out, w.shape[2], dtype=torch.float64)
    for tap, i, o in zip(*(t.tolist() for t in (kernel_map.pair_taps, kernel_map.in_rows, kernel_map.out_rows))):
        y[o] += x[i].double() @ w[tap].double()
    return y


@pytest.mark.parametrize(("c_in", "c_out"), [(3, 5), (16, 16), (40, 24)])
@pytest.mark.parametrize("identity", [None, 2])
def test_integers_to_the_bit(identity, c_in, c_out):
    kernel_map = random_map(3, 90, 90, 5, identity)
    x, g = torch.randint(-2, 3, (90, c_in)).float(), torch.randint(-2, 3, (90, c_out)).float()
    w, bias = torch.randint(-2, 3, (5, c_in, c_out)).float(), torch.randint(-2, 3, (c_out,)).float()
    assert torch.equal(BACKEND.forward(x, w, kernel_map, 1, bias).double(), plain(x, w, kernel_map) + bias)
    dx, dw = BACKEND.gradients(x, w, g, kernel_map, 1)
    assert torch.equal(dx.double(), plain(g, w.transpose(1, 2), kernel_map.reverse()))
    want = torch.zeros_like(w)
    for tap, i, o in zip(*(t.tolist() for t in (kernel_map.pair_taps, kernel_map.in_rows, kernel_map.out_rows))):
        want[tap] += x[i][:, None] * g[o]
    assert torch.equal(dw, want)


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_gradients_of_a_mirrored_map(groups):
    rows = torch.randperm(60)[:40].sort().values
    grid = sc.VoxelGrid(torch.nn.functional.pad(rows[:, None], (1, 0)))
    kernel_map = sc.ConvolutionPlan(grid, 3).kernel_map
    assert kernel_map.mirror is not None
    x, g = torch.randint(-2, 3, (40, 16)).float(), torch.randint(-2, 3, (40, 32 if groups == 1 else 16)).float()
    w = torch.randint(-2, 3, (3, 16 // groups, g.shape[1])).float()
    grad_x, grad_w = BACKEND.gradients(x, w, g, kernel_map, groups)
    y = BACKEND.forward(x, w, kernel_map, groups)
    assert float((grad_x * x).sum()) == float((grad_w * w).sum()) == float((y * g).sum())
    assert grad_x.is_contiguous()
    assert grad_w.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_in", "num_out", "c_in", "c_out"), [(0, 0, 4, 4), (5, 0, 4, 4), (5, 5, 0, 4), (5, 5, 4, 0)]
)
def test_empty_in_every_way(dtype, num_in, num_out, c_in, c_out):
    kernel_map = random_map(1, num_in, num_out, 3)
    bias = torch.arange(c_out).to(dtype)
    x, w = torch.ones(num_in, c_in, dtype=dtype), torch.ones(3, c_in, c_out, dtype=dtype)
    y = BACKEND.forward(x, w, kernel_map, 1, bias)
    assert (y.shape, y.dtype) == ((num_out, c_out), dtype)
    if c_in == 0:
        assert torch.equal(y, bias.expand(num_out, c_out))
    both = BACKEND.gradients(x, w, torch.ones_like(y), kernel_map, 1)
    assert [(t.shape, t.dtype) for t in both] == [((num_in, c_in), dtype), ((3, c_in, c_out), dtype)]
    assert not any(t.any() for t in both)


def test_common_width_is_the_widest_that_divides():
    assert [cupy_rows.common_width(n) for n in (0, 1, 6, 8, 24, 48, 64)] == [16, 1, 2, 8, 8, 16, 16]
    assert cupy_rows.common_width(64, 36) == 4


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100"))]
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gather", cupy_rows.gather_options(16)),
        ("gather", cupy_rows.gather_options(2)),
        ("scatter_add", cupy_rows.scatter_options(torch.float32, torch.float32, 4)),
        ("scatter_add", cupy_rows.scatter_options(torch.float16, torch.float32, 4)),
        ("scatter_add", cupy_rows.scatter_options(torch.bfloat16, torch.float32, 1)),
        ("scatter_add", cupy_rows.scatter_options(torch.float64, torch.float64, 2)),
    ],
)
def test_cuda_texts_compile(name, options, arch, tmp_path):
    text = tmp_path / f"{name}.cu"
    text.write_text(cupy_rows.source(name))
    command = ["nvcc", "-cubin", f"-arch={arch}", *options, "-Xptxas", "-v", "-o", str(tmp_path / "out"), str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(cupy_rows.CUDA_NAMES), ids=str)
@pytest.mark.parametrize("channels", [1, 3, 8, 64, 130])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_are_moved_by_cupy(dtype, channels, strided):
    pytest.importorskip("cupy")
    gen = torch.Generator("cuda").manual_seed(channels)
    x = torch.randn(500, channels + 5 * strided, generator=gen, device="cuda").to(dtype)[:, :channels]
    rows = torch.randperm(500, generator=gen, device="cuda")[:301].int()
    backend, out = cupy_rows.CupyGatherScatter(), torch.full((301, channels), float("nan"), dtype=dtype, device="cuda")
    backend.gather(x, rows, out)
    assert torch.equal(out, x[rows])
    total = torch.ones(500, channels, dtype=SUMS.get(dtype, dtype), device="cuda")
    want = total.index_add(0, rows, out.to(total.dtype))
    backend.scatter_add(out, rows, total)
    assert torch.equal(total, want)


@pytest.mark.parametrize("chosen", [" and integers", pytest.param("", marks=pytest.mark.slow)])
def test_cases_without_triton_and_llvmlite(chosen):
    """Values and derivatives of the backend of PyTorch alone, over the table of all backends."""
    table = Path(__file__).with_name("test_every_backend.py")
    words = ("-m", "pytest", "-q", "-n", "0", "-p", "tests.bare", "-p", "no:cacheprovider", table)
    done = forked.run(*words, "-k", f"torch_gather_scatter{chosen}", folder=table.parents[2])
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout
