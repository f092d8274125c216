"""The Gluon kernels' arithmetic and addresses, without a card: bit-exact on small integers."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch

from sparseconv.backends.triton_implicit_gemm.schedule import build_schedule
from tests.backends.gluon_on_cpu import Matrix, Program

pytest.importorskip("triton")
PACKAGE = "sparseconv.backends.triton_implicit_gemm"


@cache
def program() -> Program:
    return Program(f"{PACKAGE}.gluon_kernels")


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
    generator = torch.Generator().manual_seed(rows)
    taps, c = 9, 64
    block_m, block_n, block_k = blocks
    neighbors = torch.randint(0, rows, (taps, rows), generator=generator, dtype=torch.int32)
    neighbors[torch.rand(taps, rows, generator=generator) >= density] = -1
    schedule = build_schedule(neighbors, taps, block_m)
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
    got = np.full_like(x, np.nan)
    lists = (schedule.tile_counts, schedule.tile_rows, schedule.tile_taps, schedule.tile_order)
    work = schedule.num_tiles * groups * (c // block_n)
    program().launch(
        "conv_kernel", work, 4, x, Matrix(w.reshape(-1, c)) if bulk else w, got, bias, residual,
        *(t.numpy() for t in (schedule.neighbors, schedule.out_rows, *lists)),
        schedule.neighbors.shape[1], schedule.tile_rows.shape[1],
        groups * c // unit, c * groups * c // unit, groups * c // unit,
        UNIT=unit, GROUP_IN=c, GROUP_OUT=c, PACK=1, GROUPS=groups, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        STAGES=stages, TRANSPOSED=transposed, HAS_BIAS=True, HAS_RESIDUAL=True, ACTIVATION=lambda v: v * 2,
        TO_SLOTS=False, WIDE=transposed, HIDDEN=True, PRECISION="tf32", BULK=bulk,
    )  # fmt: skip
    np.testing.assert_array_equal(got.astype(np.float32), 2 * want)


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
        BLOCK_P=blocks[2], STAGES=stages, WIDE=groups == 2, HIDDEN=True, PRECISION="tf32",
    )  # fmt: skip
    np.testing.assert_array_equal(got, want)
