"""Cooperative launches: how many programs a device holds at once, and how they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from sparseconv.gpu.launcher import INTERPRETED, RESIDENT, Pointer, pointer
from sparseconv.torch_private import current_stream

#: times that the programs of a cooperative launch may wait for each other
NUM_BARRIERS = 10


@dataclass(frozen=True, eq=False)
class DeviceCount:
    """What belongs to rows whose number the CPU does not know: those past ``count`` have a negative batch item."""

    count: torch.Tensor  # (1,) int32
    fault: torch.Tensor  # (1,) int32: the bits of what did not fit since the grid's first table
    barriers: torch.Tensor  # for cooperative launches; not the stream's, since a graph may be replayed on another one


def programs_at_once(device: torch.device, most: int, each: int = RESIDENT) -> int:
    """How many programs a device holds at once, ``each`` on a multiprocessor and ``most`` at most.

    By default, of a cooperative launch of four warps.

    The interpreter runs programs one after another: one alone waits for nobody.
    """
    return 1 if INTERPRETED else min(most, each * _processors(device.index))


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def barriers_of(device: torch.device, device_count: DeviceCount | None = None) -> Pointer:
    """Counters at which the programs of a cooperative launch meet, all zero between the launches of a stream."""
    if device_count is not None:
        return pointer(device_count.barriers)
    if INTERPRETED:
        return torch.zeros(NUM_BARRIERS + 1, dtype=torch.int32)
    kept = _barriers(device.index, current_stream(device.index))
    return kept.data_ptr()


@cache
def _barriers(index: int, stream: int) -> torch.Tensor:
    return torch.zeros(NUM_BARRIERS + 1, dtype=torch.int32, device=torch.device("cuda", index))


@triton.jit
def wait_for_all(barrier_ptr, programs):
    """Wait until all programs of a cooperative launch are here and what they wrote can be read.

    A barrier serves once, or again for twice, three times the number of programs and so on.
    """
    tl.debug_barrier()
    here = tl.atomic_add(barrier_ptr, 1, sem="acq_rel") + 1
    while here < programs:
        here = tl.atomic_add(barrier_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def leave(barriers_ptr, programs, NUM_BARRIERS: tl.constexpr):
    """The last act of a program of a cooperative launch: whoever is the last sets all barriers back."""
    if tl.atomic_add(barriers_ptr + NUM_BARRIERS, 1, sem="acq_rel") == programs - 1:
        for barrier in tl.static_range(NUM_BARRIERS + 1):
            tl.store(barriers_ptr + barrier, 0)
