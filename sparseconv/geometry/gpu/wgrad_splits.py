"""The work list of the weight gradient, cut where the counts of the taps are: on the device, without a wait.

    in:  tap offsets (K+1,) int64, and the number of jobs
    out: `Jobs`

Offsets (0, 1, 4, 5) in four jobs of at most two pairs: begin (0, 1, 3, 4), end (1, 3, 4, 5), the jobs of a tap from
(0, 1, 3, 4) on. Jobs that begin early in their tap are launched first: (0, 1, 3, 2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.lists import Jobs
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.launcher import Launcher, ceil_div, pointer
from sparseconv.gpu.program import power_of_2

#: pairs of a job and a tap that one program compares
CELLS = 512
_I32, _I64 = torch.int32, torch.int64
#: the arrays of `Jobs`
_DTYPES = (_I64, _I64, _I32, _I32)


def cut_jobs_on_device(tap_offsets: torch.Tensor, count: int, quantum: int, halved: bool = False) -> Jobs:
    """Cut the pairs of K taps into ``count`` jobs that are as short as that allows, without waiting for the device.

    Args:
        tap_offsets: (K+1,) int64: tap k owns the pairs [tap_offsets[k], tap_offsets[k+1]).
        count: J, the number of jobs; no fewer than taps.
        quantum: lengths of jobs are multiples of it.
        halved: the pairs of tap K - 1 - k are those of tap k turned round.

    Returns:
        The jobs, on the device of the offsets.
    """
    taps, device = tap_offsets.shape[0] - 1, tap_offsets.device
    arena = Arena(device, _DTYPES, (count, count, count, taps + 1))
    lanes = power_of_2(max(taps, 1))
    block = max(1, min(128, CELLS // lanes))  # jobs that a program writes
    args = (pointer(tap_offsets), *arena, taps, count, quantum)
    _JOBS(device, (ceil_div(count, block),), args, (lanes, block, halved))
    return Jobs(*map(arena.tensor, range(4)))


@triton.jit
def jobs_kernel(
    offsets_ptr, begin_ptr, end_ptr, order_ptr, tap_jobs_ptr, num_taps, count, quantum,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, HALVED: tl.constexpr,
):  # fmt: skip
    """Each program finds the length of the jobs anew, then writes BLOCK of them."""
    run = tl.program_id(0)
    tap = tl.arange(0, TAPS)
    start = tl.load(offsets_ptr + tap, mask=tap < num_taps, other=0)
    stop = tl.load(offsets_ptr + tap + 1, mask=tap < num_taps, other=0)
    quanta = ((stop - start + quantum - 1) // quantum).to(tl.int32)
    least = (tap < num_taps).to(tl.int32)  # jobs of a tap: one at least
    # no shorter than all quanta spread over all jobs; long enough where each tap's last job is for nothing
    total = tl.sum(quanta, 0)
    spare = count - num_taps
    high = tl.maximum(tl.max(quanta, 0), 1)
    low = tl.minimum(tl.maximum((total + count - 1) // tl.maximum(count, 1), 1), high)
    if spare > 0:
        high = tl.maximum(tl.minimum((total + spare - 1) // spare, high), low)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.maximum((quanta + middle - 1) // middle, least), 0) <= count
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    parts = tl.maximum((quanta + high - 1) // high, least)
    last = tl.cumsum(parts, 0)
    first = last - parts
    share = (quanta + tl.maximum(parts, 1) - 1) // tl.maximum(parts, 1) * quantum
    if run == 0:
        tl.store(tap_jobs_ptr, 0)
        tl.store(tap_jobs_ptr + tap + 1, last, mask=tap < num_taps)
    job = run * BLOCK + tl.arange(0, BLOCK)
    mine = (job[:, None] >= first[None, :]) & (job[:, None] < last[None, :])
    owned = tl.sum(mine.to(tl.int32), 1)  # 0 for jobs beyond the last
    my_tap = tl.sum(tl.where(mine, tap[None, :], 0), 1)
    my_parts = tl.maximum(tl.sum(tl.where(mine, parts[None, :], 0), 1), 1)
    my_share = tl.sum(tl.where(mine, share[None, :], 0), 1)
    my_start = tl.sum(tl.where(mine, start[None, :], 0), 1)
    my_stop = tl.sum(tl.where(mine, stop[None, :], 0), 1)
    index = tl.where(owned > 0, job - tl.sum(tl.where(mine, first[None, :], 0), 1), 0)
    begin = tl.minimum(my_start + index.to(tl.int64) * my_share, my_stop)
    end = tl.minimum(begin + my_share, my_stop)
    if HALVED:  # pairs of the tap that mirrors this one, to be read turned round
        twin = tl.load(offsets_ptr + num_taps - 1 - tap, mask=tap < num_taps, other=0)
        moved = tl.sum(tl.where(mine, (twin - start)[None, :], 0), 1)
        is_turned = my_tap > (num_taps - 1) // 2
        begin = tl.where(is_turned, -1 - (begin + moved), begin)
        end = tl.where(is_turned, -1 - (end + moved), end)
    tl.store(begin_ptr + job, begin, mask=job < count)
    tl.store(end_ptr + job, end, mask=job < count)
    # jobs of each tap that begin less far into it than this one does into its own; equals in the order of taps
    whole = index[:, None] * parts[None, :] // my_parts[:, None]
    rest = index[:, None] * parts[None, :] - whole * my_parts[:, None]
    earlier = tl.where(tap[None, :] < my_tap[:, None], whole + 1, whole + (rest > 0).to(tl.int32))
    rank = tl.where(owned > 0, tl.sum(tl.where(mine, index[:, None], earlier), 1), job)
    tl.store(order_ptr + rank, job, mask=job < count)


_JOBS = Launcher(jobs_kernel, (_I64, _I64, _I64, _I32, _I32, int, int, int))
