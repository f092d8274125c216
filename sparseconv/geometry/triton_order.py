"""The order that sorts rows by their keys on the GPU, in one launch where torch's sort would cost the host a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_launch import (
    NUM_GATES,
    Launcher,
    Pointer,
    Unseen,
    ceil_div,
    crew_of,
    gates_of,
    leave,
    on_device,
    pointer,
    wait_for_all,
)

#: rows that one program sorts, and sorted runs that are merged at once
RUN, FAN = 1024, 8
#: up to this many rows the merges (N log N) are faster than torch's radix sort on the card and the host together: at
#: 81 k they take the card 81 us for torch's 43, and the host 5 for 50 to 70
MERGED_ROWS = 100_000
ORDER_CONSTANTS = (RUN, FAN, 128, NUM_GATES)


def sort_rows(keys: torch.Tensor, unseen: Unseen | None = None) -> torch.Tensor:
    """The rows in a stable order of ``keys`` (G, N) int32 or int64, not negative, in each group: (G, N).

    int32 or int64, whichever costs less. Runs of 1024 rows are sorted, then eight neighbouring runs are merged at once
    until one is left: a row's place is the sum of its ranks in the eight, each found by bisection.
    """
    groups, n = keys.shape
    if groups != 1 or not 0 < n <= MERGED_ROWS or keys.dtype != torch.int32:
        return torch.sort(keys, dim=-1, stable=True).indices
    order = torch.empty(1, n, dtype=torch.int32, device=keys.device)
    lines = torch.empty(2 * n, dtype=torch.int64, device=keys.device)
    merge_rows(pointer(keys), pointer(lines), pointer(order), n, keys.device, unseen)
    return order


def merge_rows(
    keys: Pointer, lines: Pointer, order: Pointer, n: int, device: torch.device, unseen: Unseen | None = None
) -> None:
    """The order of ``keys`` (N,) int32, not negative, in ``order`` (N,) int32; ``lines`` (2N,) int64 is scratch."""
    levels, runs = 0, ceil_div(n, RUN)
    while runs > 1:
        runs, levels = ceil_div(runs, FAN), levels + 1
    programs = crew_of(device, ceil_div(n, 128) if levels else 1)
    with on_device(device):
        args = (keys, lines, order, gates_of(device, unseen), n, levels, programs)
        ORDER_ROWS(device, (programs,), args, ORDER_CONSTANTS)


# ---- kernels


@triton.jit
def order_kernel(
    keys_ptr, lines_ptr, order_ptr, gates_ptr, n, levels, programs,
    RUN: tl.constexpr, FAN: tl.constexpr, BLOCK: tl.constexpr, NUM_GATES: tl.constexpr,
):  # fmt: skip
    """Lines are keys with their rows below them, so that no two are equal; each level moves them to the other half."""
    program = tl.program_id(0)
    for first in range(program * RUN, n, programs * RUN):
        row = first + tl.arange(0, RUN)
        key = tl.load(keys_ptr + row, mask=row < n, other=0x7FFFFFFF)
        line = tl.sort((key.to(tl.int64) << 32) | row)
        if levels == 0:
            tl.store(order_ptr + row, (line & 0xFFFFFFFF).to(tl.int32), mask=row < n)
        else:
            tl.store(lines_ptr + row, line, mask=row < n)
    length = RUN
    side = tl.arange(0, FAN)
    here_ptr = lines_ptr
    there_ptr = lines_ptr + n
    for level in range(levels):
        wait_for_all(gates_ptr + level, programs)
        wide = length.to(tl.int64) * FAN
        for first in range(program * BLOCK, n, programs * BLOCK):
            place = first + tl.arange(0, BLOCK)
            line = tl.load(here_ptr + place, mask=place < n, other=0)
            family = (first // wide * wide).to(tl.int32)  # BLOCK divides RUN: one family a block
            begin = tl.minimum(family + side.to(tl.int64) * length, n).to(tl.int32)
            end = tl.minimum(begin.to(tl.int64) + length, n).to(tl.int32)
            low = begin[None, :] + (place * 0)[:, None]
            high = end[None, :] + (place * 0)[:, None]
            left = length
            while left > 0:  # lines below `low` are smaller, lines from `high` on are not
                middle = (low + high) >> 1
                open_ = low < high
                smaller = tl.load(here_ptr + middle, mask=open_, other=0) < line[:, None]
                low = tl.where(open_ & smaller, middle + 1, low)
                high = tl.where(open_ & ~smaller, middle, high)
                left = left >> 1
            target = family + tl.sum(low - begin[None, :], 1)
            if level == levels - 1:
                tl.store(order_ptr + target, (line & 0xFFFFFFFF).to(tl.int32), mask=place < n)
            else:
                tl.store(there_ptr + target, line, mask=place < n)
        swap = here_ptr
        here_ptr = there_ptr
        there_ptr = swap
        length = length * FAN
    leave(gates_ptr, programs, NUM_GATES)


_I32, _I64 = torch.int32, torch.int64
ORDER_ROWS = Launcher(order_kernel, (_I32, _I64, _I32, _I32, int, int, int), cooperative=True)
