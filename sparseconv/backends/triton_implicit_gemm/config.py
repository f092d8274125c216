"""Tile shapes: what a kernel is compiled for, and the estimate that names the few worth timing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

HALF = (torch.float16, torch.bfloat16)
#: channels of a pack of groups: enough for a matrix instruction and for one 128-byte read of half numbers
PACK_CHANNELS = 64
#: pairs that make a job of the weight gradient worth its start and its partial sum
PAIRS_A_JOB = 2500


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
    split: int = 1


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


@dataclass(frozen=True)
class Work:
    """What the estimate knows of one verb: sizes, and the card it runs on."""

    dtype: torch.dtype
    num_rows: int  # output rows
    num_pairs: int
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
        return min(power_of_two(max(wanted, needed)), power_of_two(self.groups))

    @property
    def gluon(self) -> bool:
        """Whether the Gluon kernels serve this work."""
        return (
            self.capability[0] == 9
            and self.dtype in HALF
            and self.pack == 1
            and self.aligned
            and self.group_in % 8 == 0
            and self.group_out % 8 == 0
            and min(self.group_in, self.group_out) >= 16
        )

    @property
    def density(self) -> float:
        """Pairs over rows times taps: 1 for a dense grid."""
        return self.num_pairs / max(1, self.num_rows * self.num_taps)

    def key(self) -> tuple[object, ...]:
        """What a timed choice depends on: sizes by their order of magnitude, never the exact number of rows."""
        return (
            str(self.dtype),
            self.group_in,
            self.group_out,
            self.groups,
            self.num_taps,
            round(math.log2(max(1, self.num_rows))),
            round(8 * self.density),
            self.aligned,
            self.transposed,
            self.precision,
            self.processors,
            self.capability,
        )


def power_of_two(number: int) -> int:
    """The least power of two that is not less than ``number``."""
    return 1 << max(0, number - 1).bit_length()


def conv_candidates(work: Work) -> list[ConvConfig]:
    """At most four configurations for the forward or input-gradient kernel, the expected best first."""
    c_in, c_out = work.pack * work.group_in, work.pack * work.group_out
    if work.dtype not in HALF:
        block_n = min(max(16, power_of_two(c_out)), 128)
        block_k = min(max(16, power_of_two(c_in)), 32)
        warps = 8 if block_n == 128 else 4
        return [
            ConvConfig(128, block_n, block_k, warps, 3),
            ConvConfig(64, min(block_n, 64), block_k, 8, 3),
            ConvConfig(128, min(block_n, 64), block_k, 4, 3),
        ]
    block_k = min(max(16, power_of_two(c_in)), 64)
    if c_in > 16 and c_in % block_k and c_in % (block_k // 2) == 0:
        block_k //= 2
    block_n = min(max(16, power_of_two(c_out)), 256)
    if block_n > 32 and c_out % block_n and c_out % (block_n // 2) == 0:
        block_n //= 2
    wide = block_n == 256
    warps = 8 if wide else 4
    tile = ConvConfig(128, block_n, block_k, warps, 3, gluon=work.gluon)
    narrow = replace(tile, block_m=64, block_n=min(block_n, 128), warps=4)
    if few_programs(work, tile):
        split = min(3, work.num_taps)
        return [narrow, replace(narrow, split=split), replace(tile, split=split), tile]
    if not work.gluon:
        return [tile, narrow] if wide else [replace(tile, stages=2), tile, narrow]
    if wide:
        return [tile, replace(tile, block_n=128, warps=4)]
    return [replace(tile, stages=2), tile, replace(narrow, stages=2)]


def few_programs(work: Work, config: ConvConfig) -> bool:
    """Whether tiles of this size leave half of the card without work."""
    tiles = -(-work.num_rows // config.block_m)
    columns = -(-work.pack * work.group_out // config.block_n) * -(-work.groups // work.pack)
    return 2 * tiles * columns <= work.processors


def weight_grad_candidates(work: Work) -> list[WeightGradConfig]:
    """At most four configurations for the weight-gradient kernel, the expected best first."""
    c_in, c_out = work.pack * work.group_in, work.pack * work.group_out
    channels = max(c_in, c_out)
    waves = 8 if channels <= 32 else 4 if channels <= 128 else 16
    programs = waves * work.processors
    if channels <= 128:  # a job has a fixed cost: no more of them than pairs to share
        programs = min(programs, max(2 * work.processors, work.num_pairs // PAIRS_A_JOB))
    if work.dtype not in HALF:
        block_i = min(max(16, power_of_two(c_in)), 64)
        block_o = min(max(16, power_of_two(c_out)), 64)
        tile = WeightGradConfig(block_i, block_o, 32, 4, 3, programs)
        return [tile, replace(tile, stages=2), replace(tile, programs=2 * programs)]
    block_i = min(max(16, power_of_two(c_in)), 128)
    block_o = min(max(16, power_of_two(c_out)), 128)
    large = block_i * block_o >= 128 * 128
    tile = WeightGradConfig(block_i, block_o, 64 if large else 128, 8 if large else 4, 3 if large else 2, programs)
    if not work.gluon:
        return [tile, replace(tile, block_i=min(block_i, 64), block_o=min(block_o, 64)), replace(tile, stages=3)]
    tile = replace(tile, block_i=max(block_i, 64), gluon=True)  # wgmma takes 64 rows of the product at least
    return [tile, replace(tile, programs=2 * programs), replace(tile, stages=3 if tile.stages == 2 else 2)]


def conv_shared_bytes(config: ConvConfig, itemsize: int) -> int:
    """Shared memory of the operand buffers of the forward kernel."""
    return config.stages * config.block_k * (config.block_m + config.block_n) * itemsize


def weight_grad_shared_bytes(config: WeightGradConfig, itemsize: int) -> int:
    """Shared memory of the operand buffers of the weight-gradient kernel."""
    return config.stages * config.block_p * (config.block_i + config.block_o) * itemsize
