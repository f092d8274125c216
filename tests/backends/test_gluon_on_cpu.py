"""The Gluon kernels' arithmetic and addresses, without a card: bit-exact on small integers."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch

from sparseconv.geometry.gpu.lists import plane_groups
from tests.backends.gluon_on_cpu import Matrix, Program
from tests.twins import build_schedule

pytest.importorskip("triton")
PACKAGE = "sparseconv.backends.triton_implicit_gemm"


@cache
def program() -> Program:
    return Program(*(f"{PACKAGE}.{name}" for name in ("gluon",)))


def integers(generator: torch.Generator, *shape: int, dtype: type = np.float16) -> np.ndarray:
    return torch.randint(-2, 3, shape, generator=generator).numpy().astype(dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "density", "groups", "blocks", "stages", "bulk", "unit"),
    [
        (300, 0.3, 1, (64, 64, 32), 3, False, 8),
        (513, 0.02, 1, (128, 32, 64), 2, False, 8),  # tiles without a live tap
        (100, 0.5, 2, (64, 32, 32), 4, False, 8),
        (700, 0.2, 1, (128, 64, 64), 4, False, 4),
        (300, 0.3, 1, (64, 32, 32), 3, True, 8),
        (513, 0.02, 1, (128, 64, 64), 2, True, 4),
    ],
)
def test_conv_kernel(transposed, rows, density, groups, blocks, stages, bulk, unit):
    taps, c = 9, 64
    neighbors, x, bias, residual, w, want = layer(rows, density, groups, taps, c, unit, transposed)
    got = np.full_like(x, np.nan)
    schedule = build_schedule(neighbors, taps, blocks[0])
    weight = Matrix(w.reshape(-1, c)) if bulk else w
    launch(
        schedule, schedule.fixed, schedule.num_tiles, (x, weight, got, bias, residual), groups, (c, c), blocks,
        STAGES=stages, UNIT=unit, TRANSPOSED=transposed, HAS_BIAS=True, HAS_RESIDUAL=True,
        ACTIVATION=lambda v: v * 2, TMA_WEIGHTS=bulk, RESCALE=False,
    )  # fmt: skip
    np.testing.assert_array_equal(got.astype(np.float32), 2 * want)


def test_sums_of_groups_side_by_side():
    """In slots of their own; those of a tile without a live tap, which nobody reads, are left as they were."""
    rows, taps, c = 513, 9, 64
    neighbors, x, bias, residual, w, want = layer(rows, 0.02, 1, taps, c, 8, False)
    schedule = build_schedule(neighbors, taps, 64, groups=plane_groups(taps, 3))
    sums = np.full((schedule.out_rows.shape[0], c), np.nan, np.float32)
    operands = x, w, sums, bias, residual
    launch(
        schedule, schedule.fixed, schedule.num_tiles, operands, 1, (c, c), (64, 32, 32), STAGES=3, UNIT=8,
        TRANSPOSED=False, HAS_BIAS=False, HAS_RESIDUAL=False, ACTIVATION=None, TMA_WEIGHTS=False, RESCALE=False,
        TO_SLOTS=True,
    )  # fmt: skip
    idle = schedule.tile_counts.numpy() == 0
    assert idle.any()
    assert (np.isnan(sums).reshape(len(idle), -1).all(1) == idle).all()
    got = bias.astype(np.float32) + residual
    for slots in schedule.slots.numpy():
        got[slots >= 0] += sums[slots[slots >= 0]]
    np.testing.assert_array_equal(got, want)


def layer(rows, density, groups, taps, c, unit, transposed):
    """Neighbours, operands of small integers, and the sum that a convolution with bias and residual is."""
    generator = torch.Generator().manual_seed(rows)
    neighbors = torch.randint(0, rows, (taps, rows), generator=generator, dtype=torch.int32)
    neighbors[torch.rand(taps, rows, generator=generator) >= density] = -1
    shapes = (rows, groups * c), (groups * c,), (rows, groups * c), (taps, c, groups * c)
    x, bias, residual, w = (integers(generator, *shape, dtype={8: np.float16, 4: np.float32}[unit]) for shape in shapes)
    want = bias.astype(np.float32) + residual
    for tap in range(taps):
        live = (neighbors[tap] >= 0).numpy()
        ins = x[neighbors[tap].numpy()[live]].astype(np.float32)
        for group in range(groups):
            part = slice(group * c, (group + 1) * c)
            block = w[tap][:, part].astype(np.float32)
            want[live, part] += ins[:, part] @ (block.T if transposed else block)
    return neighbors, x, bias, residual, w, want


def launch(schedule, fixed, tiles, operands, groups, channels, blocks, **constants):
    """`conv_kernel` over some tiles of a schedule, one program for each where nothing else is said."""
    group_in, group_out = channels
    unit, row = constants["UNIT"], groups * group_in
    arrays = (each.numpy() if isinstance(each, torch.Tensor) else each for each in fixed.arguments)
    constants = {"TO_SLOTS": False, **constants}
    program().launch(
        "conv_kernel", tiles * groups * (group_out // blocks[1]), 4, *operands, *arrays,
        row // unit, group_in * row // unit, row // unit,
        GROUP_IN=group_in, GROUP_OUT=group_out, PACK=1, GROUPS=groups,
        BLOCK_M=blocks[0], BLOCK_N=blocks[1], BLOCK_K=blocks[2],
        INDEX64=constants["TRANSPOSED"], ASM_LOADS=True, PRECISION="tf32", **constants,
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "unit"), [(np.float16, 8), (np.float32, 4)])
@pytest.mark.parametrize(
    ("c_in", "c_out", "groups", "blocks", "stages"),
    [(64, 64, 1, (64, 64, 32), 2), (40, 72, 1, (64, 64, 16), 3), (64, 32, 2, (64, 32, 64), 2)],
)
def test_weight_grad_kernel(dtype, unit, c_in, c_out, groups, blocks, stages):
    """Jobs over runs of pairs of any length, one of them empty."""
    generator = torch.Generator().manual_seed(c_in)
    rows, ends = 200, (0, 70, 70, 101, 256)
    x = integers(generator, rows, groups * c_in, dtype=dtype)
    grad = integers(generator, rows, groups * c_out, dtype=dtype)
    ins, outs = (torch.randint(0, rows, (ends[-1],), generator=generator).numpy().astype(np.int32) for _ in range(2))
    jobs = len(ends) - 1
    want = np.zeros((jobs, c_in, groups * c_out), np.float32)
    for job, group in itertools.product(range(jobs), range(groups)):
        run = slice(ends[job], ends[job + 1])
        a = x[ins[run], group * c_in : (group + 1) * c_in].astype(np.float32)
        part = slice(group * c_out, (group + 1) * c_out)
        want[job, :, part] = a.T @ grad[outs[run], part].astype(np.float32)
    got = np.full_like(want, np.nan)
    bounds = np.array(ends, np.int64)
    tiles = groups * -(-c_in // blocks[0]) * -(-c_out // blocks[1])
    program().launch(
        "weight_grad_kernel", jobs * tiles, 4, x, grad, got, ins, outs, bounds[:-1].copy(), bounds[1:].copy(),
        np.arange(jobs, dtype=np.int32)[::-1].copy(), groups * c_in // unit, groups * c_out // unit,
        UNIT=unit, GROUP_IN=c_in, GROUP_OUT=c_out, PACK=1, GROUPS=groups, BLOCK_I=blocks[0], BLOCK_O=blocks[1],
        BLOCK_P=blocks[2], STAGES=stages, INDEX64=groups == 2, ASM_LOADS=True, PRECISION="tf32",
    )  # fmt: skip
    np.testing.assert_array_equal(got, want)
