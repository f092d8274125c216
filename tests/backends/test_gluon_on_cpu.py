"""The Gluon kernels' arithmetic and addresses, without a card: bit-exact on small integers."""

from __future__ import annotations

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


def integers(generator: torch.Generator, *shape: int) -> np.ndarray:
    return torch.randint(-2, 3, shape, generator=generator).numpy().astype(np.float16)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "density", "groups", "blocks", "stages", "bulk"),
    [
        (300, 0.3, 1, (64, 64, 32), 3, False),
        (513, 0.02, 1, (128, 32, 64), 2, False),  # tiles without a live tap
        (100, 0.5, 2, (64, 32, 32), 4, False),
        (700, 0.2, 1, (128, 64, 64), 4, False),
        (300, 0.3, 1, (64, 32, 32), 3, True),
        (513, 0.02, 1, (128, 64, 64), 2, True),
    ],
)
def test_conv_kernel(transposed, rows, density, groups, blocks, stages, bulk):
    generator = torch.Generator().manual_seed(rows)
    taps, c = 9, 64
    block_m, block_n, block_k = blocks
    neighbors = torch.randint(0, rows, (taps, rows), generator=generator, dtype=torch.int32)
    neighbors[torch.rand(taps, rows, generator=generator) >= density] = -1
    schedule = build_schedule(neighbors, taps, block_m)
    x, bias = integers(generator, rows, groups * c), integers(generator, groups * c)
    residual, w = integers(generator, rows, groups * c), integers(generator, taps, c, groups * c)
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
        schedule.neighbors.shape[1], schedule.tile_rows.shape[1], groups * c // 8, c * groups * c // 8, groups * c // 8,
        UNIT=8, GROUP_IN=c, GROUP_OUT=c, PACK=1, GROUPS=groups, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        STAGES=stages, TRANSPOSED=transposed, HAS_BIAS=True, HAS_RESIDUAL=True, ACTIVATION=lambda v: v * 2,
        TO_SLOTS=False, WIDE=transposed, HIDDEN=True, PRECISION="tf32", BULK=bulk,
    )  # fmt: skip
    np.testing.assert_array_equal(got.astype(np.float32), 2 * want)
