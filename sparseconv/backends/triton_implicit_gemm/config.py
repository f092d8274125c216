"""Tile shapes: what a kernel is compiled for, and the estimate that names the few worth timing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

HALF = (torch.float16, torch.bfloat16)
#: channels of a pack of groups: enough for a matrix instruction and for one 128-byte read of half numbers
PACK_CHANNELS = 64


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
            ConvConfig(64, block_n, block_k, 4, 3),
            ConvConfig(128, min(block_n, 64), block_k, 4, 3),
        ]
    block_k = min(max(16, power_of_two(c_in)), 64)
    if c_in > 16 and c_in % block_k and c_in % (block_k // 2) == 0:
        block_k //= 2
    block_n = min(max(16, power_of_two(c_out)), 256)
    if block_n > 32 and c_out % block_n and c_out % (block_n // 2) == 0:
        block_n //= 2
    copy = work.transposed and min(c_in, c_out) >= 256
    wide = block_n == 256
    warps = 8 if wide else 4
    plain = ConvConfig(128, block_n, block_k, warps, 3 if wide else 2, weight_copy=copy)
    if not work.gluon:
        narrow = min(block_n, 128)
        return [plain, ConvConfig(64, narrow, block_k, 4, 3, weight_copy=copy), ConvConfig(128, narrow, block_k, 8, 3)]
    found = [ConvConfig(128, block_n, block_k, warps, 3, gluon=True, weight_copy=copy)]
    if wide:
        found.append(ConvConfig(128, 128, block_k, 4, 3, gluon=True, weight_copy=copy))
        if copy:
            found.append(ConvConfig(128, block_n, block_k, warps, 3, gluon=True))
        else:
            found.append(ConvConfig(64, block_n, block_k, 4, 3, gluon=True))
    else:
        found.append(ConvConfig(128, block_n, block_k, warps, 2, gluon=True))
        found.append(ConvConfig(64, block_n, block_k, 4, 3, gluon=True))
    found.append(plain)
    return found


def weight_grad_candidates(work: Work) -> list[WeightGradConfig]:
    """At most four configurations for the weight-gradient kernel, the expected best first."""
    c_in, c_out = work.pack * work.group_in, work.pack * work.group_out
    programs = 16 * work.processors
    if work.dtype not in HALF:
        block_i = min(max(16, power_of_two(c_in)), 64)
        block_o = min(max(16, power_of_two(c_out)), 64)
        return [
            WeightGradConfig(block_i, block_o, 32, 4, 3, programs),
            WeightGradConfig(block_i, block_o, 64, 4, 2, programs),
        ]
    block_i = min(max(16, power_of_two(c_in)), 128)
    block_o = min(max(16, power_of_two(c_out)), 128)
    large = block_i * block_o >= 128 * 128
    plain = WeightGradConfig(block_i, block_o, 64 if large else 128, 8 if large else 4, 3, programs)
    if not work.gluon:
        return [plain, WeightGradConfig(min(block_i, 64), min(block_o, 64), 64, 4, 3, programs)]
    block_i = max(block_i, 64)
    tall = WeightGradConfig(block_i, block_o, 64 if large else 128, 8 if large else 4, 3, programs, gluon=True)
    found = [tall, plain] if c_in >= 64 else [plain, tall]
    found.append(WeightGradConfig(block_i, block_o, tall.block_p, tall.warps, 3, programs // 2, gluon=True))
    found.append(WeightGradConfig(block_i, block_o, 64, tall.warps, 4, programs, gluon=True))
    return found


def conv_shared_bytes(config: ConvConfig, itemsize: int) -> int:
    """Shared memory of the operand buffers of the forward kernel."""
    return config.stages * config.block_k * (config.block_m + config.block_n) * itemsize


def weight_grad_shared_bytes(config: WeightGradConfig, itemsize: int) -> int:
    """Shared memory of the operand buffers of the weight-gradient kernel."""
    return config.stages * config.block_p * (config.block_i + config.block_o) * itemsize
