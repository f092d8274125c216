"""Steps that the choice does not reach at test sizes: split taps, runs of rows, copies, several jobs, epilogues."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from sparseconv.backends.base import Request  # noqa: E402
from sparseconv.backends.triton_implicit_gemm import recipe  # noqa: E402
from sparseconv.backends.triton_implicit_gemm.backend import TritonImplicitGemm, problem_size  # noqa: E402
from sparseconv.backends.triton_implicit_gemm.config import (  # noqa: E402
    ConvConfig,
    ProblemSize,
    WeightGradConfig,
    conv_candidates,
    weight_grad_candidates,
)
from sparseconv.backends.triton_implicit_gemm.recipe import (  # noqa: E402
    ConvSpec,
    WeightGradSpec,
    interpreted,
)
from sparseconv.geometry.gpu import work_lists  # noqa: E402
from sparseconv.geometry.kernel_map import KernelMap  # noqa: E402
from sparseconv.pointwise import relu  # noqa: E402
from sparseconv.pointwise.epilogue import Epilogue  # noqa: E402
from tests import oracle  # noqa: E402
from tests.backends.test_every_backend import edges_of  # noqa: E402
from tests.cases import TOLERANCE, Case, build, error, operands  # noqa: E402

needs_interpreter = pytest.mark.skipif(not interpreted(), reason="a GPU is present, or Triton cannot interpret")
SMALL = ConvConfig(16, 16, 16, 4, 2)


@triton.jit
def halved_relu(x):
    return tl.maximum(x, 0.0) * 0.5


class HalvedRelu:
    """As much of an epilogue as a kernel needs."""

    scalar = halved_relu


@needs_interpreter
@pytest.mark.parametrize("case", [Case("cube", c_in=20, c_out=24), Case("grouped", c_in=6, c_out=4, groups=2)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"tap_groups": 3},
        {"morton_runs": True},
        {"weight_copy": True},
        {"index64": True},
        pytest.param({"tap_groups": 2, "index64": True}, marks=pytest.mark.slow),
        pytest.param({"tap_groups": 3, "weight_copy": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_variants_agree_with_the_oracle(case, options, monkeypatch):
    monkeypatch.setattr(work_lists, "CHUNK_ROWS", 20)
    options = dict(options)
    index64 = options.pop("index64", False)
    config = ConvConfig(**{**SMALL.__dict__, **options})
    plan = build(case)
    x, w, g = operands(plan, case, torch.float32)
    edges = edges_of(plan)
    kernel_map = plan.kernel_map
    request = Request(kernel_map, x.device, x.dtype, case.c_in, case.c_out, case.groups)
    wants = (
        oracle.convolve(x, w, edges, kernel_map.num_out, case.groups),
        oracle.input_grad(g, w, edges, kernel_map.num_in, case.groups),
    )
    for transposed, source, want in ((False, x, wants[0]), (True, g, wants[1])):
        out = torch.full(want.shape, float("nan"))
        spec = ConvSpec(config, problem_size(request, False, transposed), source, w, transposed, index64=index64)
        step = spec.bind(kernel_map)
        step(source, w, out, source, source)
        assert error(out, want) < TOLERANCE[torch.float32]


@needs_interpreter
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_bias_residual_and_activation_in_the_store(split, transposed):
    case = Case("cube", c_in=12, c_out=12)
    plan = build(case)
    kernel_map, edges = plan.kernel_map, edges_of(plan)
    x, w, residual = operands(plan, case, torch.float32)
    bias = torch.linspace(-1, 1, 12)
    if transposed:
        want = oracle.input_grad(x, w, edges, kernel_map.num_in, 1) + bias.double().numpy()
    else:
        want = oracle.convolve(x, w, edges, kernel_map.num_out, 1, bias)
    want = torch.from_numpy(want + residual.double().numpy()).clamp(min=0) * 0.5
    request = Request(kernel_map, x.device, x.dtype, case.c_in, case.c_out)
    config = ConvConfig(**{**SMALL.__dict__, "tap_groups": split})
    out = torch.full(want.shape, float("nan"))
    spec = ConvSpec(config, problem_size(request, False, transposed), x, w, transposed, bias, residual, HalvedRelu())
    step = spec.bind(kernel_map)
    step(x, w, out, bias, residual)
    assert error(out, want) < TOLERANCE[torch.float32]
    if not transposed:
        got = TritonImplicitGemm().forward_fused(x, w, kernel_map, 1, bias, residual, Epilogue(relu))
        assert error(got, want * 2) < TOLERANCE[torch.float32]


@needs_interpreter
@pytest.mark.parametrize(
    "case", [Case("cube", voxels=200, extent=6), Case("depthwise", voxels=200, c_in=6, c_out=6, groups=6)], ids=str
)
def test_several_jobs_a_tap_are_added(case, monkeypatch):
    monkeypatch.setattr("sparseconv.geometry.gpu.lists.JOB_QUANTUM", 16)
    plan = build(case)
    x, w, g = operands(plan, case, torch.float32)
    request = Request(plan.kernel_map, x.device, x.dtype, case.c_in, case.c_out, case.groups)
    results = []
    for programs in (27, 90):
        out = torch.full(w.shape, float("nan"))
        config = WeightGradConfig(16, 16, 16, 4, 2, programs)
        WeightGradSpec(config, problem_size(request, False), x, g, plan.num_taps).bind(plan.kernel_map)(x, g, out)
        results.append(out)
    want = oracle.weight_grad(x, g, edges_of(plan), plan.num_taps, case.groups)
    assert all(error(out, want) < TOLERANCE[torch.float32] for out in results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("channels", [(1, 1), (4, 32), (16, 16), (48, 96), (64, 64), (256, 256), (1024, 512)])
@pytest.mark.parametrize("rows", [10, 5000, 300_000, 5_000_000])
@pytest.mark.parametrize("groups", [1, 8])
def test_at_most_four_candidates_that_fit_the_card(dtype, channels, rows, groups):
    work = ProblemSize(dtype, rows, 27, *channels, groups, True)
    for found in (conv_candidates(work), weight_grad_candidates(work)):
        assert 1 <= len(found) <= 4
        assert len(set(found)) == len(found)
    for config in conv_candidates(work):
        operand = config.block_k * (config.block_m + config.block_n) * dtype.itemsize
        assert config.stages * operand <= 227 << 10
        assert config.block_n >= 16
        assert config.block_k >= 16


@pytest.mark.parametrize(
    ("channels", "rows", "groups", "wanted"),
    [
        ((128, 128), 300_000, 1, True),
        ((128, 128), 50_000, 1, False),  # the host would take longer than the card gains
        ((128, 128), 300_000, 2, False),
        ((72, 128), 300_000, 1, False),  # not in whole tiles
        ((64, 64), 300_000, 1, False),
        ((64, 64), 4_000_000, 1, True),
        ((32, 32), 4_000_000, 1, False),
        ((256, 256), 50_000, 1, True),
    ],
)
def test_whole_tiles_of_wide_weights_come_by_the_copy_engine(channels, rows, groups, wanted):
    work = ProblemSize(torch.float16, rows, 27, channels[0] // groups, channels[1] // groups, groups, True)
    assert conv_candidates(work)[0].tma_weights is wanted


@needs_interpreter
def test_a_recipe_serves_every_map_of_a_size():
    """A second scene finds what the first one made ready; one of another size makes its own, with the same numbers."""
    backend = TritonImplicitGemm()
    recipes = []
    for voxels in (100, 103, 30):
        case = Case("cube", voxels=voxels)
        plan = build(case)
        x, w, g = operands(plan, case, torch.float32)
        edges, kernel_map = edges_of(plan), plan.kernel_map
        got = (
            backend.forward(x, w, kernel_map, 1),
            backend.input_grad(g, w, kernel_map, 1),
            backend.weight_grad(x, g, kernel_map, 1),
        )
        want = (
            oracle.convolve(x, w, edges, kernel_map.num_out, 1),
            oracle.input_grad(g, w, edges, kernel_map.num_in, 1),
            oracle.weight_grad(x, g, edges, plan.num_taps, 1),
        )
        assert all(error(a, b) < TOLERANCE[torch.float32] for a, b in zip(got, want))
        recipes.append(len(backend._specs))
    assert recipes == [3, 3, 6]


def test_a_choice_depends_on_the_size_of_a_map_and_not_on_its_rows():
    def request(rows: int, pairs: int) -> Request:
        ends = torch.arange(pairs, dtype=torch.int32)
        kernel_map = KernelMap(rows, rows, 1, pairs=(ends, ends, torch.tensor([0, pairs])))
        return Request(kernel_map, torch.device("cpu"), torch.float16, 64, 64)

    assert problem_size(request(1000, 500), True) == problem_size(request(1010, 505), True)
    assert problem_size(request(1000, 500), True) != problem_size(request(1400, 700), True)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_explanation_names_tiles_and_the_workspace_that_is_taken(dtype, monkeypatch):
    taken = [0]

    def recorded(*shape, dtype, device):
        taken.append(torch.Size(shape).numel() * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(recipe, "scratch", recorded)
    kernel_map = build(Case("two voxels", voxels=2)).kernel_map
    backend, request = TritonImplicitGemm(), Request(kernel_map, torch.device("cpu"), dtype, 32, 16)
    x, w, grad = (torch.randn(*shape).to(dtype) for shape in ((2, 32), (27, 32, 16), (2, 16)))
    backend.forward(x, w, kernel_map, 1)
    backend.gradients(x, w, grad, kernel_map, 1)
    most = backend.workspace_bytes(request)
    assert max(taken) <= most <= 1 << 20
    forward, waste, input_gradient, weight_gradient = backend.describe(request)
    config = conv_candidates(problem_size(request, True))[0]
    assert f"tiles of {config.block_m} rows x {config.block_n} channels, {config.block_k} contracted" in forward
    assert f"for {kernel_map.num_pairs} pairs" in waste
    assert input_gradient.startswith("input gradient: ")
    assert weight_gradient.startswith("weight gradient: ")
    assert backend.describe(Request(kernel_map, torch.device("cpu"), dtype, 0, 16)) == ["there is nothing to multiply"]
    assert backend.workspace_bytes(Request(kernel_map, torch.device("cpu"), dtype, 0, 16)) == 0
