"""The kernels of norms and of the loss compile for the cards they may meet; in a process apart from the interpreter."""

from __future__ import annotations

import os

import pytest

from tests.backends.test_triton_ahead_of_time import PLAIN
from tests.forked import printed

SCRIPT = """
import torch, triton
from triton.compiler import ASTSource

from sparseconv.nn.fused.normalize import _folds, kernels
from tests.backends.aot import spill_bytes, target_of

NAMES = {torch.float16: "*fp16", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64"}
NAMES |= {torch.int32: "*i32", int: "i32"}
cpu, done = torch.device("cpu"), 0
single, half, wide = torch.float32, torch.float16, torch.bfloat16
jobs = []
for dtype, weight, running in ((wide, single, single), (half, half, half), (single, None, None))[:FORMS]:
    run = kernels(1000, 32, cpu, dtype, weight, running)
    jobs += [(one, run.constants, True) for one in (run.statistics, run.normalize, run.reduce, run.input_grad)]
jobs += [
    (_folds(to, *types)[0], (out_first, 8, 64, 32), not out_first)
    for to, types in (
        (half, (half, None, wide, wide, single, single)), (half, (single,) * 6), (single, (single,) * 6),
    )[:FORMS]
    for out_first in (False, True)
]
for launcher, constants, by_16 in jobs:
    names, types = launcher.function.arg_names, launcher.types
    signature = {n: "fp32" if isinstance(t, float) else NAMES[t] for n, t in zip(names, types)}
    signature.update({n: "constexpr" for n in names[len(types):]})
    given = {(len(types) + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if isinstance(t, torch.dtype)}
    source = ASTSource(launcher.function, signature, given, aligned)
    for arch in ARCHS:
        target = target_of(arch)
        options = {"num_warps": max(1, launcher.num_warps * 32 // target.warp_size)}
        kernel = triton.compile(source, target=target, options=options)
        text = kernel.asm.get("ptx", ".v4")
        spills = ".local" in text or spill_bytes(kernel)
        if kernel.metadata.shared > 48 * 1024 or spills or (by_16 and ".v4" not in text):
            raise SystemExit(f"{launcher.function.__name__} on {arch} spills, or reads less than 16 bytes")
        done += 1
print(done)
"""


@pytest.mark.parametrize(
    ("archs", "forms"),
    [
        ((90,), 1),
        pytest.param((80, 86, 89, 90, 100, 120), 3, marks=pytest.mark.slow),
        pytest.param(tuple(PLAIN), 3, marks=pytest.mark.slow),
    ],
    ids=["hopper", "all", "plain"],
)
def test_kernels_compile_whole_and_read_16_bytes_at_once(archs, forms):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = printed("-c", f"ARCHS, FORMS = {archs}, {forms}\n{SCRIPT}", env=environment)
    assert said.strip() == str(6 * forms * len(archs))
