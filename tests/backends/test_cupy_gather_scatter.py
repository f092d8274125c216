"""The gather/scatter backend through its torch twin, and its CUDA texts through the compiler where there is one."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from sparseconv.backends.cupy_gather_scatter import kernels
from sparseconv.backends.cupy_gather_scatter.backend import CupyGatherScatter
from tests import oracle
from tests.backends.test_every_backend import edges_of
from tests.cases import CASES, TOLERANCE, build, error, operands

PRODUCTS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class TorchRowKernels:
    """The readable twin."""

    def gather(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = x[rows[i]]; zeros where rows[i] is negative."""
        present = rows >= 0
        out.zero_()
        out[present] = x[rows[present].long()]

    def scatter_add(self, product: torch.Tensor, rows: torch.Tensor, total: torch.Tensor) -> None:
        """total[rows[i]] += product[i]; nothing where rows[i] is negative; no row occurs twice."""
        present = rows >= 0
        total[rows[present].long()] += product[present].to(total.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_three_verbs(case, dtype):
    backend = CupyGatherScatter(TorchRowKernels())
    plan = build(case)
    x, w, g = operands(plan, case, dtype)
    bias = torch.linspace(-1, 1, case.c_out).to(dtype)
    edges = edges_of(plan)
    xs, ws, gs = (t.double().numpy() for t in (x, w, g))
    limit = TOLERANCE[dtype]
    n_in, n_out = plan.kernel_map.num_in, plan.kernel_map.num_out
    got = backend.forward(x, w, plan.kernel_map, case.groups, bias)
    assert error(got, oracle.convolve(xs, ws, edges, n_out, case.groups, bias.double().numpy())) < limit
    got = backend.input_grad(g, w, plan.kernel_map, case.groups)
    assert error(got, oracle.input_grad(gs, ws, edges, n_in, case.groups)) < limit
    got = backend.weight_grad(x, g, plan.kernel_map, case.groups)
    assert error(got, oracle.weight_grad(xs, gs, edges, plan.num_taps, case.groups)) < limit


def test_common_width_is_the_widest_that_divides():
    assert [kernels.common_width(n) for n in (0, 1, 6, 8, 24, 48, 64)] == [16, 1, 2, 8, 8, 16, 16]
    assert kernels.common_width(64, 36) == 4


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100"))]
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gather", kernels.gather_options(16)),
        ("gather", kernels.gather_options(2)),
        ("scatter_add", kernels.scatter_options(torch.float32, torch.float32, 4)),
        ("scatter_add", kernels.scatter_options(torch.float16, torch.float32, 4)),
        ("scatter_add", kernels.scatter_options(torch.bfloat16, torch.float32, 1)),
        ("scatter_add", kernels.scatter_options(torch.float64, torch.float64, 2)),
    ],
)
def test_cuda_texts_compile(name, options, arch, tmp_path):
    text = tmp_path / f"{name}.cu"
    text.write_text(kernels.source(name))
    command = ["nvcc", "-cubin", f"-arch={arch}", *options, "-Xptxas", "-v", "-o", str(tmp_path / "out"), str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(kernels.CUDA_NAMES), ids=str)
@pytest.mark.parametrize("channels", [1, 3, 8, 64, 130])
@pytest.mark.parametrize("strided", [False, True])
def test_kernels_match_their_twin(dtype, channels, strided):
    pytest.importorskip("cupy")
    gen = torch.Generator("cuda").manual_seed(channels)
    x = torch.randn(500, channels + 5 * strided, generator=gen, device="cuda").to(dtype)[:, :channels]
    rows = torch.randperm(500, generator=gen, device="cuda")[:301].int()
    rows[::7] = -1
    if strided:
        rows = torch.stack([rows, rows + 1], 1)[:, 0]
    results = []
    for row_kernels in (kernels.CupyRowKernels(), TorchRowKernels()):
        out = torch.full((301, channels), float("nan"), dtype=dtype, device="cuda")
        row_kernels.gather(x, rows, out)
        total = torch.ones(500, channels, dtype=PRODUCTS.get(dtype, dtype), device="cuda")
        row_kernels.scatter_add(out, rows, total)
        results.append((out, total))
    for got, want in zip(*results):
        assert torch.equal(got, want)
