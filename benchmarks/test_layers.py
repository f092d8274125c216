"""Host work and CPU kernels under pytest-benchmark: ``pytest benchmarks/``."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
from benchmarks.layers.measure import EVERYONE
from sparseconv.bench import cases, check, measure
from sparseconv.bench.implementations import Convolution

pytest.importorskip("pytest_benchmark")
NAMES = ("sparseconv", "spconv", "dense conv3d")
CASES = ("shell_32", "rings_16_256")


def ready(name: str, case: str, channels: int) -> tuple[Convolution, torch.Tensor, torch.Tensor]:
    """An implementation whose results are right, with its operands."""
    kind = EVERYONE[name]
    reason = kind.missing("cpu", "fp32")
    if reason is not None:
        pytest.skip(reason)
    coords = cases.coordinates(case)
    x, weight, grad = measure.operands(len(coords), channels, "fp32", "cpu")
    convolution = kind(coords, channels, "fp32")
    convolution.set_weight(weight)
    try:
        convolution.prepare()
    except MemoryError as error:
        pytest.skip(str(error))
    with torch.no_grad():
        y = convolution.forward(x)
    verdict = check.judge(check.Neighbours(coords), x, weight, grad, {"forward": y}, "fp32")
    assert verdict.fault is None, verdict.fault
    return convolution, x.requires_grad_(), grad


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_forward(benchmark, name, case):
    convolution, x, _ = ready(name, case, 32)
    with torch.no_grad():
        y = benchmark(convolution.forward, x)
    assert y.shape == x.shape


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_step(benchmark, name, case):
    convolution, x, grad = ready(name, case, 32)

    def step():
        x.grad = convolution.weight.grad = None
        convolution.forward(x).backward(grad)

    benchmark(step)
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("case", CASES)
def test_grid_and_plan(benchmark, case):
    coords = cases.coordinates(case)
    plan = benchmark(lambda: sc.ConvolutionPlan(sc.VoxelGrid(coords), 3))
    assert plan.kernel_map.num_pairs == check.Neighbours(coords).count_pairs()


def test_host_work_of_a_small_call(benchmark):
    """Python's share of a call: one voxel, one channel."""
    plan = sc.ConvolutionPlan(sc.VoxelGrid(torch.zeros(1, 4, dtype=torch.int32)), 3)
    x, weight = torch.ones(1, 1), torch.ones(27, 1, 1)
    with torch.no_grad():
        y = benchmark(plan.execute, x, weight)
    assert y.item() == 1.0
