"""Every kernel of the GPU geometry compiles for the cards it may meet, without one; run apart from the interpreter."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import pytest

from tests.backends.test_triton_ahead_of_time import PLAIN
from tests.forked import printed

pytest.importorskip("triton")

SCRIPT = """
import re
from types import SimpleNamespace

import torch, triton
from triton.compiler import ASTSource
from triton.runtime import driver

torch.version.hip = "7" if isinstance(ARCH, str) else None
from sparseconv.geometry.gpu import (
    edge_lists, edge_lists_3x3x3, fixed_grid_io, reached, row_order, schedule, search, table, taps, wgrad_splits
)
from sparseconv.gpu import launcher as launching
from sparseconv.gpu import radix_sort
from tests.backends.aot import spill_bytes, target_of

#: bytes that a thread may set aside; before Ampere, only `jobs_kernel` sets aside more than 16
SPILL = 368 if ARCH == 75 else 16
NAMES = {torch.int32: "*i32", torch.int64: "*i64", int: "i32", torch.float32: "*fp32", torch.float64: "*fp64"}
shifts = table.pack_shifts((0, 2, 2, 2))
places = taps.bit_places((0, 2, 2, 2))
around = (3, shifts, places, False, 27, 3)
by_key = (3, shifts, places, False, 0, 2)
folded = (3, shifts, places, True, 0, 1)
jobs = [
    (table.LOOKUP, (4, shifts, 128)),
    (search.BLOCK_NEIGHBORS, (4, shifts, 27, 32, 8)),
    (row_order.COUNT_CELLS, (4, shifts, 15, 4, 256)), (row_order.NUMBER_CELLS, (15, 32)),
    (row_order.RUN_KEYS, (512,)),
    (search.PLANES, (*folded, 128)),
    (search.PLANE_KEYS, (False, 128)), (search.PLANE_KEYS_WIDE, (True, 128)),
    (table.TABLE, (4, 4, shifts, False, True, False, 128, 128, 10)),
    (table.TABLE, (4, 4, shifts, True, False, True, 128, 128, 10)),
    (radix_sort.DIGITS, (8, 4, 16, 8)), (radix_sort.DIGITS, (9, 3, 16, 8)),
    (radix_sort.MOVE, (8, 8, 16, 8)), (radix_sort.MOVE, (9, 8, 12, 8)),
    (search.SEARCH, (*around[:5], 32, 128, 3, 9)),
    (search.SEARCH, (*by_key[:5], 8, 128, 0, 0)),
    *((reached.MARK, (3, is_box, reached.ROWS, 512, 1024, 10)) for is_box in (True, False)),
    (reached.EMIT, (3, 32)), (reached.EMIT_FIXED, (3, 32)),
    (fixed_grid_io._PUT, (2048,)), (edge_lists.REVERSE, (1024,)),
    (edge_lists.OVERFLOW, (32,)),
    (edge_lists.PAIRS, (*around, True, 512, 128)), (edge_lists.PAIRS, (*by_key, False, 128, 128)),
    (edge_lists_3x3x3.CUBE_PAIRS, (512, False)),
    (schedule.CUBE_TILES, (128, 32, False)),
    (schedule.TILES, (*around, 128, 32, False, True, True, False)),
    (schedule.TILES, (*by_key, 64, 256, True, False, False, False)),
    (schedule.RANKS, (32, 64, 1024)), (schedule.RANKS, (32, 64, 4096)),
]
if MORE:  # second forms
    jobs += [
        (schedule.CUBE_TILES, (64, 32, True)),
        (edge_lists_3x3x3.CUBE_PAIRS, (128, True)),
    ]
jobs += [
    (wgrad_splits._JOBS, (32, 128, False)), (wgrad_splits._JOBS, (32, 16, True)),
    (schedule.ONE_TAP, (8, 256, 128, 2, 5, 8, False)),
    (schedule.ONE_TAP, (16, 256, 256, 1, 5, 8, True)),
]
jobs = jobs[SHARE::SHARES]
target = target_of(ARCH)
driver.set_active(SimpleNamespace(get_current_target=lambda: target))
for launcher, constants in jobs:
    if len(launcher.types) + 2 > launching.SHARED_ARGUMENTS:
        raise SystemExit(f"{launcher.function.__name__} has too many arguments for the launcher that kernels share")
    names = launcher.function.arg_names
    if len(names) != len(launcher.types) + len(constants):
        raise SystemExit(f"{launcher.function.__name__} takes {len(names)} arguments: {launcher.types}, {constants}")
    signature = {n: NAMES[t] for n, t in zip(names, launcher.types)}
    signature.update({n: "constexpr" for n in names[len(launcher.types) :]})
    given = {(len(launcher.types) + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(launcher.types) if t is not int}
    source = ASTSource(launcher.function, signature, given, aligned)
    options = {"num_warps": max(1, launcher.num_warps * 32 // target.warp_size), **launcher.options}
    kernel = triton.compile(source, target=target, options=options)
    ptx = kernel.asm.get("ptx", "")
    declared = sum(map(int, re.findall(r"sort_room\\[(\\d+)\\]", ptx)))  # Triton does not know of it
    shared = kernel.metadata.shared + declared
    if shared > 48 * 1024 or ".local" in ptx:
        raise SystemExit(f"{launcher.function.__name__} on {ARCH}: {shared} bytes shared")
    spill = spill_bytes(kernel)
    if spill > SPILL:
        raise SystemExit(f"{launcher.function.__name__}{constants} on {ARCH} spills {spill} bytes")
print(len(jobs))
"""


#: runs that share the kernels: all of them in one take a minute and more
SHARES = 3


def compile_for(arch: int | str, share: int = 0, shares: int = 1, more: bool = True) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = f"ARCH, SHARE, SHARES, MORE = {arch!r}, {share}, {shares}, {more}\n{SCRIPT}"
    assert int(printed("-c", program, env=environment)) >= 34 // shares


def known_to_spill(arch: int) -> Any:
    """A card, marked where a kernel is known to keep more of a thread in local memory than the bound."""
    is_new = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
    words = {86: "jobs_kernel, 24 bytes", 89: "jobs_kernel, 24 bytes"} if is_new else {}
    return pytest.param(arch, marks=pytest.mark.xfail(reason=words[arch], strict=True) if arch in words else ())


@pytest.mark.parametrize("share", range(SHARES))
def test_kernels_compile_for_hopper(share: int) -> None:
    compile_for(90, share, SHARES, more=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [known_to_spill(arch) for arch in (80, 86, 89, 90, 100, 120)])
def test_all_forms_compile_for_all_cards(arch: int) -> None:
    compile_for(arch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", PLAIN)
def test_plain_forms_compile_for_gpus_without_ptx(arch: int | str) -> None:
    compile_for(arch)
