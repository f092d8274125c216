"""Every shipped configuration compiles for cards that are not here: no spill, shared memory that fits, matrix units."""

from __future__ import annotations

import importlib.util
import json
import os
from importlib.metadata import version

import pytest

from tests.forked import printed

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
#: bytes of shared memory that one block may take
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: the same of those whose kernels hold no PTX, and what a thread keeps in local memory at most
PLAIN = {
    75: (64 << 10, 0), "gfx942": (64 << 10, 0), "gfx950": (160 << 10, 0), "gfx1100": (64 << 10, 1724),
    "gfx1201": (64 << 10, 1724),
}  # fmt: skip
#: the cards that have kernels of their own; all others are slow
QUICK = {90}
#: bytes a thread may keep in local memory: a few words set aside before the loop, no accumulator; before Triton 3.9,
#: fp32 with a bias keeps up to 28 words
STACK, STACK_BEFORE = 16, 112


def compiled(arch: int | str, *more: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = printed("-m", "tests.backends.aot", arch, *more, env=environment)
    return [json.loads(line) for line in said.splitlines()]


def check(arch: int, kernels: list[dict]) -> None:
    assert kernels
    before = tuple(map(int, version("triton").split(".")[:2])) < (3, 9)
    for kernel in kernels:
        half = kernel["dtype"] != "torch.float32"
        assert kernel["spill"] <= (STACK if half or not before else STACK_BEFORE), kernel
        assert kernel["shared"] <= SHARED[arch], kernel
        if half and kernel["aligned"] and min(kernel["channels"][:2]) >= 16:
            assert kernel["copies"] > 0, kernel  # the rows come asynchronously, 16 bytes at a time
        if half and arch == 90 and (kernel["gluon"] or kernel["kernel"] == "conv_kernel"):
            # wgmma takes 64 rows of a product at least; of 32, mma multiplies no zeros
            assert kernel["mma" if kernel["config"].get("block_i") == 32 else "wgmma"], kernel
        if half and arch == 80:
            assert kernel["mma"], kernel
    if arch == 90:
        assert any(kernel["gluon"] for kernel in kernels)


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in QUICK else pytest.mark.slow) for arch in sorted(SHARED)]
)
def test_a_few_configurations(arch):
    check(arch, compiled(arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PLAIN)
def test_gpus_without_ptx(arch):
    kernels, (shared, spill) = compiled(arch), PLAIN[arch]
    for kernel in kernels:
        assert kernel["shared"] <= shared, kernel
        assert kernel["spill"] <= spill, kernel
        assert kernel["mma"] or kernel["dtype"] != "torch.float16", kernel
    assert kernels


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arch", sorted(SHARED))
def test_every_configuration(arch):
    check(arch, compiled(arch, "all"))
