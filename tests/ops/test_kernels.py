"""The kernels of curves and maxima against torch's operations; on a card, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

import sparseconv as sc
from sparseconv.ops import pooling
from sparseconv.ops.serialization import ORDERS, _codes
from tests.backends.test_triton_ahead_of_time import PLAIN
from tests.cases import Case, build, operands

triton = pytest.importorskip("triton")
from sparseconv.gpu.launcher import INTERPRETED  # noqa: E402
from sparseconv.ops.gpu.curves import codes  # noqa: E402
from sparseconv.ops.gpu.pooling import chosen_sum, largest  # noqa: E402
from tests.forked import printed  # noqa: E402

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("Triton was imported before its interpreter was asked for", allow_module_level=True)
DEVICE = "cpu" if INTERPRETED else "cuda"


def drawn(rank, depth, signed=False):
    """(200, 1+D) int32 on a curve."""
    coords = torch.randint(0, 1 << depth, (200, rank + 1), generator=torch.Generator().manual_seed(depth))
    coords[:, 1:] -= 1 << depth >> 1 if signed else 0
    coords[:, 0] &= 1
    return coords.int()


@pytest.mark.parametrize(
    ("rank", "depth"), [(1, 5), (1, 31), (2, 0), (2, 1), (2, 31), (3, 7), (3, 20), (4, 2), (4, 15)]
)
def test_codes_of_all_curves(rank, depth):
    orders = ORDERS if rank > 1 else ("hilbert", "z")
    for signed in (False, True) if depth else (False,):
        coords = drawn(rank, depth, signed)
        want = torch.stack([_codes(coords, order, depth, depth, signed) for order in orders])
        assert torch.equal(codes(coords.to(DEVICE), orders, depth, signed).cpu(), want)
        coords[-9:] = -1
        told = torch.tensor(depth), torch.tensor(signed)
        want = torch.stack([_codes(coords, order, told[0], min(32, 63 // rank), told[1]) for order in orders])
        assert torch.equal(codes(coords.to(DEVICE), orders, *(t.to(DEVICE) for t in told)).cpu(), want)


def test_no_voxel():
    assert codes(torch.zeros(0, 4).int().to(DEVICE), ORDERS, 3, False).shape == (4, 0)
    plan = build(Case("no_voxels", voxels=0))
    values, winners = largest(torch.zeros(0, 3).to(DEVICE), plan.kernel_map.neighbors.to(DEVICE), torch.int16)
    assert values.shape == winners.shape == (0, 3)


@pytest.mark.parametrize("channels", [1, 5, 8, 72])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [2, 3])
def test_maxima_and_the_sums_behind_them(kernel, dtype, channels):
    case = Case("strided", voxels=60, kernel=kernel, options={"stride": 2})
    plan = build(case)
    edges = plan.kernel_map
    gen = torch.Generator().manual_seed(channels)
    x = torch.randint(-3, 4, (edges.num_in, channels), generator=gen).to(dtype)  # with many equal ones
    x[3], x[5], x[7] = torch.nan, -torch.inf, torch.inf
    want, taps = pooling._Max.forward(x, edges)
    values, winners = largest(x.to(DEVICE), edges.neighbors.to(DEVICE), torch.int16)
    torch.testing.assert_close(values.cpu(), want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(winners.cpu(), taps)
    grad = torch.randint(-8, 9, want.shape, generator=gen).to(dtype)  # whose sums are exact
    for adjoint, at_target in ((True, False), (False, True), (True, True), (False, False)):
        there = edges.reverse() if adjoint else edges
        given = grad if adjoint else x.nan_to_num(posinf=2, neginf=3)
        named = taps if at_target != adjoint else torch.randint(-1, edges.num_taps, x.shape, generator=gen)
        want = pooling._WinnerSum.forward(given, named, edges, adjoint, at_target)
        got = chosen_sum(*(t.to(DEVICE) for t in (given, named, there.neighbors)), at_target)
        assert torch.equal(got.cpu(), want)
        got = chosen_sum(given.to(DEVICE), None, there.neighbors.to(DEVICE), at_target)
        assert torch.equal(got.cpu(), pooling.edge_sum(given, there))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_pooling_launches_once_each_way(dtype):
    case = Case("tiling", voxels=400, options={"stride": 2})
    plan = build(case, "cuda")
    x = operands(plan, case, dtype)[0].requires_grad_()
    plan.kernel_map.neighbors, plan.kernel_map.reverse().neighbors
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y = sc.ops.max_pool(x, plan)[0]
        torch.autograd.grad(y, x, torch.ones_like(y))
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert sum("largest" in name for name in names) == sum("chosen" in name for name in names) == 1


SCRIPT = """
import torch, triton
from triton.compiler import ASTSource

from sparseconv.ops.gpu import curves, pooling
from tests.backends.aot import spill_bytes, target_of

NAMES = {torch.float16: "*fp16", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64"}
NAMES |= {torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", int: "i32"}
jobs = [(curves.CODES, (rank, rank != 2, 256), False) for rank in (1, 2, 3, 4)[-FORMS:]]
for dtype in (torch.float16, torch.float64, torch.bfloat16, torch.float32)[:FORMS]:
    blocks = (dtype == torch.float64, 8, 16, 64)
    jobs.append((pooling._largest(dtype, torch.int16), blocks, True))
    for all_count, at in ((False, True), (False, False), (True, False)):
        jobs.append((pooling._chosen(dtype, torch.int16), (all_count, at, *blocks), True))
for launcher, constants, by_16 in jobs:
    names, types = launcher.function.arg_names, launcher.types
    signature = {n: NAMES[t] for n, t in zip(names, types)}
    signature.update({n: "constexpr" for n in names[len(types):]})
    given = {(len(types) + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if isinstance(t, torch.dtype)}
    source = ASTSource(launcher.function, signature, given, aligned)
    for arch in ARCHS:
        target = target_of(arch)
        options = {"num_warps": max(1, launcher.num_warps * 32 // target.warp_size)}
        kernel = triton.compile(source, target=target, options=options)
        text = kernel.asm.get("ptx", ".v4")
        if ".local" in text or spill_bytes(kernel) or (by_16 and ".v2" not in text and ".v4" not in text):
            raise SystemExit(f"{launcher.function.__name__} on {arch} spills, or reads less than 16 bytes")
print(len(jobs) * len(ARCHS))
"""


@pytest.mark.parametrize(
    ("archs", "forms"),
    [
        ((90,), 1),
        pytest.param((80, 86, 89, 90, 100, 120), 4, marks=pytest.mark.slow),
        pytest.param(tuple(PLAIN), 4, marks=pytest.mark.slow),
    ],
    ids=["hopper", "all", "plain"],
)
def test_kernels_compile(archs, forms):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = printed("-c", f"ARCHS, FORMS = {archs}, {forms}\n{SCRIPT}", env=environment)
    assert said.strip() == str(5 * forms * len(archs))
