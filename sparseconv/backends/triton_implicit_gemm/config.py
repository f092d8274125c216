"""Tile shapes: what a kernel is compiled for, and the estimate that names the few worth timing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from sparseconv.backends.float8 import FLOAT8
from sparseconv.gpu.program import power_of_2

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32)
#: channels of a pack of groups: enough for a matrix instruction and for one 128-byte read of half numbers
PACK_CHANNELS = 64
#: maps whose rows are so many parts of a power of two apart are of one size: a choice made for one holds for all
SIZES_AN_OCTAVE = 4
#: the largest power of two of rows for which choices are compared
MOST_OCTAVES = 28
#: rows from which features no longer fit in the second-level cache together
FAR_ROWS = 500_000
#: programs on each multiprocessor from which a launch may take the CPU longer
MANY_PROGRAMS = 10
#: bytes of shared memory that the blocks on one multiprocessor share
SHARED_BYTES = 227 << 10
#: bytes of fp32 partial sums of a weight gradient at once: fewer jobs for more
PARTIAL_BYTES = 48 << 20


@dataclass(frozen=True)
class ConvConfig:
    """Tile and pipeline of the forward and input-gradient kernel."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    gluon: bool = False
    #: input gradient: read the weight through a transposed copy instead of transposing each tile
    weight_copy: bool = False
    #: groups of taps computed apart and added in a fixed order: more programs where rows are few
    tap_groups: int = 1
    #: rows sorted inside runs of neighboring rows, tiles launched in that order: more waste, fewer reads from memory
    morton_runs: bool = False
    #: weight tiles brought by the copy engine (Gluon only; channels in whole tiles, one group)
    tma_weights: bool = False

    @property
    def kernels(self) -> str:
        """The module of its kernel."""
        return "gluon" if self.gluon else "kernels"


@dataclass(frozen=True)
class WeightGradConfig:
    """Tile and pipeline of the weight-gradient kernel, and the number of programs that share its pairs."""

    block_i: int
    block_o: int
    block_p: int
    warps: int
    stages: int
    programs: int
    gluon: bool = False

    @property
    def kernels(self) -> str:
        """The module of its kernel."""
        return "gluon" if self.gluon else "kernels"


@dataclass(frozen=True)
class ProblemSize:
    """What the estimate knows of one verb: sizes, and the GPU it runs on."""

    dtype: torch.dtype
    num_rows: int  # output rows
    num_taps: int
    group_in: int  # channels contracted in one group
    group_out: int  # channels produced in one group
    groups: int
    aligned: bool  # rows of every operand start at multiples of 16 bytes
    processors: int = 132
    capability: tuple[int, int] = (9, 0)
    transposed: bool = False
    precision: str = "tf32"

    @property
    def pack(self) -> int:
        """Groups that one program takes together."""
        if self.groups == 1 or min(self.group_in, self.group_out) >= 16:
            return 1
        wanted = max(1, PACK_CHANNELS // max(self.group_in, self.group_out))
        needed = -(-16 // min(self.group_in, self.group_out))
        return min(power_of_2(max(wanted, needed)), power_of_2(self.groups))

    @property
    def gluon(self) -> bool:
        """Whether the Gluon kernels serve this problem."""
        unit = max(8, 16 // self.dtype.itemsize)
        return (
            self.capability[0] == 9
            and self.dtype in (*FLOATING, FLOAT8)
            and self.precision == "tf32"  # all but single numbers as such
            and self.pack == 1
            and self.aligned
            and self.group_in % unit == 0
            and self.group_out % unit == 0
            and min(self.group_in, self.group_out) >= 16
        )

    @property
    def far(self) -> bool:
        """Whether rows that meet must run close together, because all of them do not fit in the second-level cache."""
        return self.num_rows >= FAR_ROWS and self.group_in * self.groups <= 128


def autotuned() -> bool:
    """Whether candidates are timed: where the environment variable SPARSECONV_AUTOTUNE is not 0."""
    return os.environ.get("SPARSECONV_AUTOTUNE", "0") != "0"


def conv_candidates(problem: ProblemSize) -> list[ConvConfig]:
    """At most four configurations for the forward or input-gradient kernel, the expected best first."""
    return list(dict.fromkeys(_conv_candidates(problem)))


def _conv_candidates(problem: ProblemSize) -> list[ConvConfig]:
    c_in, c_out = problem.pack * problem.group_in, problem.pack * problem.group_out
    if problem.dtype not in FLOATING:
        # matrix units of 8 bits take 32 contracted channels, and Hopper's read both operands along them
        block_n, block_k = min(max(16, power_of_2(c_out)), 128), min(max(32, power_of_2(c_in)), 128)
        if problem.gluon:
            stages = 2 if block_n <= 64 else 3
            tile = ConvConfig(128, block_n, block_k, 4, stages, gluon=True, weight_copy=True, morton_runs=problem.far)
            found = [tile, replace(tile, stages=5 - stages), replace(tile, block_m=64)]
            if problem.far and block_n == 64:  # a weight tile is half of what 128 rows bring
                found.insert(0, replace(tile, block_m=256))
            whole = problem.groups == 1 and c_in % block_k == 0
            widest = replace(tile, block_n=256, warps=8, stages=4, tma_weights=whole)
            return [widest, *found] if c_out % 256 == 0 else found
        tile = ConvConfig(
            128, block_n, block_k, 8 if block_n == 128 else 4, 3, weight_copy=True, morton_runs=problem.far
        )
        return [tile, replace(tile, block_m=64, warps=4), replace(tile, stages=4)]
    if problem.dtype not in HALF and not problem.gluon:
        block_n = min(max(16, power_of_2(c_out)), 128)
        block_k = min(max(16, power_of_2(c_in)), 32)
        if problem.precision == "ieee":
            # multiplications bound it: tiles of few rows waste the fewest
            tile = ConvConfig(
                32, block_n, block_k, max(1, block_n // 32), 3, weight_copy=problem.transposed, morton_runs=problem.far
            )
            # one warp has no registers left for 64 x 32 sums and 64 rows' addresses
            return [tile, replace(tile, block_m=64, warps=2 if block_n == 32 else tile.warps)]
        warps = 8 if block_n == 128 else 4
        # wgmma takes tf32 operands along the contracted channels only
        tile = ConvConfig(128, block_n, block_k, warps, 3, weight_copy=not problem.transposed, morton_runs=problem.far)
        half = replace(tile, block_n=min(block_n, 64), warps=4)
        return [tile, replace(half, block_m=64, warps=8), half]
    block_k = min(max(16, power_of_2(c_in)), 128 // problem.dtype.itemsize)
    if c_in > 16 and c_in % block_k and c_in % (block_k // 2) == 0:
        block_k //= 2
    block_n = min(max(16, power_of_2(c_out)), 256)
    if block_n > 32 and c_out % block_n and c_out % (block_n // 2) == 0:
        block_n //= 2
    wide = block_n == 256
    warps = 8 if wide else 4
    # wgmma takes tf32 operands along the contracted channels only
    copy = problem.dtype not in HALF and not problem.transposed
    tile = ConvConfig(128, block_n, block_k, warps, 3, gluon=problem.gluon, weight_copy=copy, morton_runs=problem.far)
    narrow = replace(tile, block_m=64, block_n=min(block_n, 128), warps=4)
    load = programs(problem, tile) / problem.processors
    if load <= 1.5 and problem.num_taps > 1:
        split = replace(tile, tap_groups=min(3, problem.num_taps))
        few = [
            split,
            replace(split, block_m=64, block_n=narrow.block_n, warps=4),
            replace(narrow, block_n=min(block_n, 64)),
        ]
        return [*few, tile] if load <= 0.6 else [tile, *few]
    if not problem.gluon:
        return [tile, narrow] if wide else [replace(tile, stages=2), tile, narrow]
    whole = problem.groups == 1 and c_in % block_k == 0 and c_out % block_n == 0
    if wide:
        narrower = replace(tile, block_n=128, warps=4)
        return [replace(tile, tma_weights=whole), narrower]
    shallow = replace(tile, stages=2)
    if block_n == 128 and problem.dtype not in HALF:
        return [tile, shallow]  # its registers leave two blocks on a multiprocessor, whatever the stages
    long = load > MANY_PROGRAMS if block_n == 128 else block_n == 64 and problem.far and problem.dtype in HALF
    if whole and long:  # a descriptor takes the CPU 4 us
        shallow = replace(shallow, tma_weights=True)
    return [shallow, tile, replace(narrow, stages=2)]


def order_of_sums(config: ConvConfig) -> ConvConfig:
    """What decides how a row is summed: all but which rows run together, and how their operands are brought.

    In Gluon the number of rows of a tile changes no instruction; plain Triton may take others for it.
    """
    block_m = 0 if config.gluon else config.block_m
    return replace(config, block_m=block_m, stages=0, morton_runs=False, tma_weights=False)


@lru_cache(maxsize=1024)
def steady_rows(problem: ProblemSize) -> float:
    """The number of rows from which on the expected best configuration sums rows in one order, whatever the sizes.

    The size of ``problem`` itself does not matter. 0: for any number.

    >>> layer = ProblemSize(torch.float16, 0, 27, 64, 64, 1, True)
    >>> round(steady_rows(layer)), steady_rows(replace(layer, dtype=torch.float32, precision="ieee"))
    (11585, 0.0)
    """

    def order(octave: int) -> ConvConfig:
        return order_of_sums(conv_candidates(replace(problem, num_rows=round(2 ** (octave / SIZES_AN_OCTAVE))))[0])

    octave = MOST_OCTAVES * SIZES_AN_OCTAVE
    last = order(octave)
    while octave >= 0 and order(octave) == last:
        octave -= 1
    return 0.0 if octave < 0 else 2 ** ((octave + 1) / SIZES_AN_OCTAVE)


def programs(problem: ProblemSize, config: ConvConfig) -> int:
    """Programs of one launch of the forward kernel."""
    tiles = -(-problem.num_rows // config.block_m)
    return tiles * -(-problem.pack * problem.group_out // config.block_n) * -(-problem.groups // problem.pack)


def weight_grad_candidates(problem: ProblemSize) -> list[WeightGradConfig]:
    """At most four configurations for the weight-gradient kernel, the expected best first.

    Jobs are of one length, so the programs are counted to fill the GPU a whole number of times.
    """
    found = list(dict.fromkeys(_weight_grad_candidates(problem)))
    if problem.dtype == torch.float32 and problem.capability == (0, 0):  # AMD's: more stages do not compile, or spill
        found = [replace(each, stages=2) for each in found]
    return found


def _weight_grad_candidates(problem: ProblemSize) -> list[WeightGradConfig]:
    c_in, c_out = problem.pack * problem.group_in, problem.pack * problem.group_out
    if problem.dtype not in HALF and not problem.gluon:
        block_i = min(max(16, power_of_2(c_in)), 64)
        block_o = min(max(16, power_of_2(c_out)), 64)
        tile = WeightGradConfig(block_i, block_o, 32, 4, 3, 8 * problem.processors)
        if problem.precision == "tf32" and problem.capability[0] == 9:
            # wgmma takes fp32 operands along the pairs only; two warps are too few for it: mma reads them as they lie
            return [replace(tile, block_p=16, warps=2), replace(tile, warps=2, stages=2)]
        if problem.precision == "ieee" and min(c_in, c_out) >= 128:
            return [replace(tile, block_o=128, block_p=16, programs=12 * problem.processors), tile]
        if problem.precision == "ieee" and min(c_in, c_out) >= 64:
            return [replace(tile, block_p=16, warps=2, stages=4, programs=6 * problem.processors), tile]
        # tcgen05 keeps the sums elsewhere: ptxas then gives four warps too few registers for the addresses
        warps = 8 if problem.precision == "tf32" and problem.capability[0] == 10 else 4
        return [tile, replace(tile, block_p=16, warps=warps, stages=4)]
    block_i = min(max(16, power_of_2(c_in)), 128)
    block_o = min(max(16, power_of_2(c_out)), 128)
    large = block_i * block_o >= 128 * 128
    tile = WeightGradConfig(block_i, block_o, 64 if large else 128, 8 if large else 4, 2, 0, problem.gluon)
    if problem.gluon and problem.dtype not in HALF:
        # mma wants the most of what each warp reads from shared memory: 64 x 64 of the product
        tile = replace(tile, block_p=32 if large else 64, warps=4)
    elif problem.gluon and block_i == block_o == 32:
        # wgmma takes 64 rows of the product at least: half of them would be zeros, copied and multiplied; mma takes 32
        return [replace(tile, programs=each * problem.processors) for each in (5, 12, 4)]
    elif problem.gluon:
        tile = replace(tile, block_i=max(block_i, 64))
    resident = SHARED_BYTES // (weight_grad_shared_bytes(tile, problem.dtype.itemsize) + 1024)
    resident = max(1, min(2 if large else 6, resident))
    waves = 1 if max(c_in, c_out) <= 128 else 4
    once = replace(tile, programs=waves * resident * problem.processors)
    twice = replace(once, programs=2 * once.programs)
    if problem.gluon and large and waves == 1 and problem.dtype in HALF:
        return [once, twice, replace(tile, warps=4, programs=3 * problem.processors)]
    if problem.gluon:
        return [once, twice]
    return [once, replace(twice, block_i=min(block_i, 64), block_o=min(block_o, 64), warps=4), replace(once, stages=3)]


def weight_grad_shared_bytes(config: WeightGradConfig, itemsize: int) -> int:
    """Shared memory of the operand buffers of the weight-gradient kernel."""
    return config.stages * config.block_p * (config.block_i + config.block_o) * itemsize
