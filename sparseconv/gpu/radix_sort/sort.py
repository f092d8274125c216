"""The order that sorts rows by their keys on the GPU: a stable radix sort, a launch for each digit."""

from __future__ import annotations

from functools import cache

import torch

from sparseconv.gpu.cooperative import programs_at_once
from sparseconv.gpu.launcher import INTERPRETED, Launcher, Pointer, ceil_div, pointer
from sparseconv.gpu.radix_sort.kernels import digits_kernel, move_kernel
from sparseconv.gpu.warp_asm import LOOK, MOST_ROWS, ROOM

#: bits of a digit: the fewest with which there are as few digits as with the most
DIGIT_BITS = 8, 9
#: warps of a program, and lines that each of its threads moves, for each of them
WARPS, STEPS = 8, (16, 12)
#: warps of a program that counts all digits, and keys that each of its threads asks for at once
COUNT_WARPS, COUNT_STEPS = 16, 8
#: the same of programs of a cooperative launch, and keys that one of them counts
COOPERATIVE_WARPS, COOPERATIVE_STEPS, COOPERATIVE_KEYS = 4, 8, 4096


def sort_rows(keys: torch.Tensor, bits: int = 31) -> torch.Tensor:
    """The rows in a stable order of ``keys`` (G, N) int32 or int64, not negative, in each group: (G, N).

    int32 for one group of int32 keys, which are compared by their last ``bits`` bits; int64 for others.
    """
    groups, n = keys.shape
    if groups != 1 or keys.dtype != torch.int32 or not 0 < n <= MOST_ROWS:
        return torch.sort(keys, dim=-1, stable=True).indices
    order, passes = torch.empty(1, n, dtype=torch.int32, device=keys.device), Passes(n, bits)
    scratch = torch.empty(passes.words, dtype=torch.int64, device=keys.device)
    passes.launch(pointer(keys), pointer(scratch), pointer(order), keys.device)
    return order


def unique_keys(keys: torch.Tensor, bits: int = 31) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each distinct key (N,) int32 or int64, not negative, occurs first, (M,) int64 in the order of the keys, and
    the number of each key among them, (N,) int64. Waits once, for M.

    >>> [found.tolist() for found in unique_keys(torch.tensor([4, 2, 4]))]
    [[1, 0], [1, 0, 1]]
    """
    order = sort_rows(keys.view(1, -1), bits)[0].long()
    ordered = keys.index_select(0, order)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
    return order[begins], torch.empty_like(order).scatter_(0, order, begins.cumsum(0) - 1)


class Passes:
    """How the last ``bits`` bits of ``n`` keys are cut into digits, and keys into tiles, for a sort.

    ``programs``: the programs of a cooperative launch that has written the keys, and counts their digits too; by 0, a
    launch of its own does.
    """

    def __init__(self, n: int, bits: int, programs: int = 0) -> None:
        self.n = n
        self.passes, self.bits, self._steps = digits_of(bits)
        self.tiles = ceil_div(n, 32 * WARPS * self._steps)
        self.states = LOOK + self.passes * (self.tiles + 1)
        self.counting = ceil_div(n, COOPERATIVE_KEYS if programs else 32 * COUNT_WARPS * COUNT_STEPS)
        self._is_counted = programs > 0
        if programs:
            self.counting = min(self.counting, programs)
        lists = self.states + self.passes * min(self.counting, programs or 1024)
        #: words of 64 bits of its scratch memory: two lists of lines, then states of tiles and lists of counts
        self.words = 2 * n + (lists << self.bits) // 2 + INTERPRETED * ROOM // 8

    def launch(self, keys: Pointer, scratch: Pointer, order: Pointer, device: torch.device) -> None:
        """The order of ``keys`` (N,) int32, not negative, in ``order`` (N,) int32; ``scratch`` has `words`."""
        passes, states, counting = self.passes, self.states, self.counting
        if not self._is_counted:
            # COUNT_WARPS warps each: one on a multiprocessor
            counting = max(1, min(programs_at_once(device, counting, 1), 1024))
            counted = (keys, scratch, self.n, states, counting)
            DIGITS(device, (counting,), counted, (self.bits, passes, COUNT_WARPS, COUNT_STEPS))
        constants, tiles = (self.bits, WARPS, self._steps, LOOK), self.tiles
        for turn in range(passes):
            args = (keys, scratch, order, self.n, states, counting, turn, passes, tiles)
            MOVE(device, (tiles if turn else tiles + passes,), args, constants)


@cache
def digits_of(bits: int) -> tuple[int, int, int]:
    """Passes, bits of a digit, and lines that a thread moves, for keys of so many bits."""
    passes = ceil_div(bits, max(DIGIT_BITS))
    each, steps = next((each, steps) for each, steps in zip(DIGIT_BITS, STEPS) if each * passes >= bits)
    return passes, each, steps


_I32, _I64 = torch.int32, torch.int64
DIGITS = Launcher(digits_kernel, (_I32, _I64, *(int,) * 3), num_warps=COUNT_WARPS)
MOVE = Launcher(move_kernel, (_I32, _I64, _I32, *(int,) * 6), num_warps=WARPS)
