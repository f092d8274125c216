"""Convolutions on lines and tori as small as their windows and smaller, on every backend, against the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import sparseconv as sc
from sparseconv.backends.registry import BACKENDS
from sparseconv.geometry.edges import Window
from sparseconv.geometry.kernel_map import KernelMap
from tests import oracle
from tests.cases import TOLERANCE, error

CPU = ("numpy_gather_scatter", "llvm_implicit_gemm")
SIZES = range(1, 7)
#: where kernels of Triton run: in its interpreter where there is no card
TRITONS = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody wrote holds NaN."""
    plain = np.empty

    def empty(*args, **kwargs):
        made = plain(*args, **kwargs)
        made.view(np.uint8).fill(255) if made.dtype == np.uint8 else None
        return made

    monkeypatch.setattr(np, "empty", empty)
    before = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)  # torch then fills what `torch.empty` gives
    torch.set_num_threads(1)  # so little work is not worth a second one
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


def scene(shape: tuple[int, ...], every: int = 1, device: str = "cpu") -> sc.VoxelGrid:
    """Every voxel of a box in two batch items, or every third and so on, in no order."""
    voxels = [(b, *v) for b in range(2) for v in np.ndindex(*shape)][::every]
    order = torch.randperm(len(voxels), generator=torch.Generator().manual_seed(len(voxels)))
    return sc.VoxelGrid(torch.tensor(voxels)[order].to(device), 2)


def boundary(kind: str, shape: tuple[int, ...]) -> sc.Boundary:
    return {"absent": sc.Boundary.absent, "forbid": sc.Boundary.forbid, "periodic": sc.Boundary.periodic}[kind](
        *(() if kind == "absent" else (shape,))
    )


def compare(
    plan: sc.ConvolutionPlan,
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    padding: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """A plan's values and gradients are the oracle's."""
    pad = oracle.default_padding(kernel, (1,) * len(kernel)) if padding is None else padding
    torus = ((0,) * len(shape), shape) if plan.boundary.kind == "periodic" else None
    taps = oracle.window_taps(kernel)
    edges = oracle.edges(plan.source.coords.tolist(), plan.target.coords.tolist(), taps, plan.window.stride, pad, torus)
    gen = torch.Generator().manual_seed(1)
    x, weight, grad = (
        torch.randn(*size, generator=gen, dtype=dtype)
        for size in ((plan.num_in, 2), (len(taps), 2, 3), (plan.kernel_map.num_out, 3))
    )
    leaves = [t.clone().to(plan.kernel_map.device).requires_grad_() for t in (x, weight)]
    y = plan.execute(*leaves)
    got = [t.cpu() for t in (y, *torch.autograd.grad(y, leaves, grad.to(y.device)))]
    want = (
        oracle.convolve(x, weight, edges, plan.kernel_map.num_out),
        oracle.input_grad(grad, weight, edges, plan.num_in),
        oracle.weight_grad(x, grad, edges, len(taps)),
    )
    for name, one, other in zip(("y", "input gradient", "weight gradient"), got, want):
        assert error(one, other) < TOLERANCE[dtype], name


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("kind", ["absent", "forbid", "periodic"])
def test_every_kernel_on_every_line(kind: str, backend: str, poisoned: None) -> None:
    for extent, kernel in itertools.product(SIZES, SIZES):
        edge = boundary(kind, (extent,))
        compare(sc.ConvolutionPlan(scene((extent,)), kernel, boundary=edge, backend=backend), (extent,), (kernel,))
        grid = scene((extent,), every=2)
        plan = sc.ConvolutionPlan(grid, kernel, padding=0, target="full", boundary=edge, backend=backend)
        compare(plan, (extent,), (kernel,), padding=(0,))


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("kind", ["absent", "forbid", "periodic"])
def test_derivatives_are_those_of_the_values(kind: str, backend: str, poisoned: None) -> None:
    for extent, kernel in itertools.product(SIZES, SIZES):
        plan = sc.ConvolutionPlan(scene((extent,)), kernel, boundary=boundary(kind, (extent,)), backend=backend)
        leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((plan.num_in, 2), (kernel, 2, 2))]
        assert torch.autograd.gradcheck(plan.execute, leaves)


@pytest.mark.parametrize("backend", CPU)
def test_planes(backend: str, poisoned: None) -> None:
    for shape, kernel, kind in itertools.product(
        [(1, 1), (2, 2), (2, 5), (4, 3)], [(3, 3), (2, 5), (1, 6), (4, 3)], ["absent", "forbid", "periodic"]
    ):
        compare(
            sc.ConvolutionPlan(scene(shape), kernel, boundary=boundary(kind, shape), backend=backend), shape, kernel
        )


@pytest.mark.parametrize("backend", CPU)
def test_strides_round_a_torus(backend: str, poisoned: None) -> None:
    for cells, stride, kernel in itertools.product((1, 2, 3), (2, 3), SIZES):
        extent = (cells * stride,)
        plan = sc.ConvolutionPlan(
            scene(extent), kernel, stride=stride, boundary=sc.Boundary.periodic(extent), backend=backend
        )
        compare(plan, extent, (kernel,))


@pytest.mark.parametrize(("extent", "kernel"), [(2, 3), (3, 5), (3, 4), (1, 3), (5, 3)])
def test_small_tori_in_triton(extent: int, kernel: int) -> None:
    assert "triton_implicit_gemm" in BACKENDS
    edge = sc.Boundary.periodic((extent,))
    grid = scene((extent,), device=TRITONS)
    plan = sc.ConvolutionPlan(grid, kernel, boundary=edge, backend="triton_implicit_gemm")
    compare(plan, (extent,), (kernel,), dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["absent", "forbid", "periodic"])
def test_every_kernel_on_every_line_in_triton(kind: str) -> None:
    """Its kernels have no fp64, and so no gradcheck: the oracle's three results in fp32 stand for it."""
    for extent, kernel in itertools.product(SIZES, SIZES):
        edge = boundary(kind, (extent,))
        grid = scene((extent,), device=TRITONS)
        plan = sc.ConvolutionPlan(grid, kernel, boundary=edge, backend="triton_implicit_gemm")
        compare(plan, (extent,), (kernel,), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["absent", "periodic"])
def test_a_mirror_is_a_permutation_that_reverses_every_edge(kind: str) -> None:
    seen = 0
    for shape, kernel in itertools.product([(1,), (2,), (3,), (4,), (2, 3)], range(1, 7)):
        found = sc.ConvolutionPlan(scene(shape), kernel, boundary=boundary(kind, shape)).kernel_map
        if found.mirror is not None:
            seen += 1
            edges = by_tap(found)
            assert sorted(found.mirror) == list(range(found.num_taps))
            assert [edges[tap] for tap in found.mirror] == [
                {(o, i) for i, o in edges[tap]} for tap in range(len(edges))
            ]
    assert seen >= 10


def by_tap(found: KernelMap) -> list[set[tuple[int, int]]]:
    edges: list[set[tuple[int, int]]] = [set() for _ in range(found.num_taps)]
    for tap, i, o in zip(found.pair_taps.tolist(), found.in_rows.tolist(), found.out_rows.tolist()):
        edges[tap].add((i, o))
    return edges


def test_a_symmetric_box_keeps_the_mirror_of_its_taps_in_turn() -> None:
    for kernel in (3, 5):
        mirror = sc.ConvolutionPlan(scene((2, 2)), kernel, boundary=sc.Boundary.periodic((2, 2))).kernel_map.mirror
        assert mirror == tuple(reversed(range(kernel**2)))
    # on a line of 3, tap offsets -1, 0, 1, 2 are 2, 0, 1, 2: one tap goes forth and two go back
    assert sc.ConvolutionPlan(scene((3,)), 4, boundary=sc.Boundary.periodic((3,))).kernel_map.mirror is None
    assert Window.of(1, 4).symmetry == (1, None)
