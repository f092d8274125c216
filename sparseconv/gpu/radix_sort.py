"""The order that sorts rows by their keys on the GPU: a stable radix sort, a launch for each digit."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from sparseconv.gpu.cooperative import programs_at_once
from sparseconv.gpu.cuda_capability import uses_ptx
from sparseconv.gpu.launcher import Launcher, Pointer, ceil_div, pointer
from sparseconv.gpu.warp_ptx import (
    LOOK,
    MOST_ROWS,
    OF_ALL,
    OF_TILE,
    OPEN,
    ROOM,
    add_one,
    look_back,
    numbers,
    open_room,
    put,
    put_line,
    room_of,
    take,
    take_line,
    take_place,
    tell,
)


@triton.jit
def digits_kernel(
    keys_ptr, lines_ptr, n, states, programs,
    BITS: tl.constexpr, PASSES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """counts[pass, program, digit] = keys with the digit, of those that the program counts; states of tiles are 0."""
    open_room(OPEN)
    count_digits(tl.program_id(0), programs, keys_ptr, lines_ptr, n, states, BITS, PASSES, WARPS, STEPS)


@triton.jit
def count_digits(
    program, programs, keys_ptr, lines_ptr, n, states,
    BITS: tl.constexpr, PASSES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """`digits_kernel` for one of ``programs`` programs."""
    BINS: tl.constexpr = 1 << BITS
    THREADS: tl.constexpr = 32 * WARPS
    lane = tl.arange(0, THREADS)
    digit_of = tl.arange(0, BINS)
    states_ptr = (lines_ptr + 2 * n.to(tl.int64)).to(tl.pointer_type(tl.int32))
    counts_ptr = states_ptr + states * BINS
    room_ptr = room_of(counts_ptr + PASSES * programs * BINS, program)
    for turn in tl.static_range(PASSES):
        put(room_ptr, turn * BINS + digit_of, digit_of & 0)
    tl.debug_barrier()
    for first in range(program * THREADS * STEPS, n, programs * THREADS * STEPS):
        keys = ()  # type: tuple
        for step in tl.static_range(STEPS):
            row = first + step * THREADS + lane
            keys = keys + (tl.load(keys_ptr + row, mask=row < n, other=-1),)
        for step in tl.static_range(STEPS):
            for turn in tl.static_range(PASSES):
                counter = turn * BINS + ((keys[step] >> (turn * BITS)) & (BINS - 1))
                # a key that is none is counted where nobody looks
                add_one(room_ptr, tl.where(keys[step] < 0, PASSES * BINS, counter))
    for first in range(program * THREADS, states * BINS, programs * THREADS):
        tl.store(states_ptr + first + lane, 0, mask=first + lane < states * BINS)
    tl.debug_barrier()
    for turn in tl.static_range(PASSES):
        count = take(room_ptr, turn * BINS + digit_of)
        tl.store(counts_ptr + (turn * programs + program) * BINS + digit_of, count)


@triton.jit
def move_kernel(
    keys_ptr, lines_ptr, order_ptr, n, states, counting, turn, passes, tiles,
    BITS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Lines, which are keys with their rows below them, in the order of a digit; of the first pass the rows are new.

    A program counts the digits of its tile, tells them to the programs behind it, puts its lines in order where it has
    them, and writes them behind those of the tiles before it, whose counts it waits for: these have begun earlier.
    Programs of their own sum the lines with a lesser digit, for all passes, in the first of them: what stands for the
    count of all tiles before the first.
    """
    BINS: tl.constexpr = 1 << BITS
    digit_of = tl.arange(0, BINS)
    open_room(OPEN)
    tile = tl.program_id(0)
    if turn == 0:
        tile -= passes
    states_ptr = (lines_ptr + 2 * n.to(tl.int64)).to(tl.pointer_type(tl.int32))
    counts_ptr = states_ptr + states * BINS
    room_ptr = room_of(counts_ptr + passes * counting * BINS, tl.program_id(0))
    state_ptr = states_ptr + LOOK * BINS + digit_of  # of the first pass, for what comes before its tiles
    if tile < 0:
        of_pass = tile + passes
        total = sum_counts(counts_ptr + of_pass * counting * BINS, counting, BINS)
        tell(state_ptr + of_pass * (tiles + 1) * BINS, tl.cumsum(total, 0) - total, OF_ALL)
    else:
        state_ptr += (turn * (tiles + 1) + tile) * BINS  # of the tile before
        first = tile * (32 * WARPS * STEPS)
        lines = load_lines(keys_ptr, lines_ptr, first, n, turn, WARPS, STEPS)
        low = turn * BITS
        total = count_lines(room_ptr, lines, low, BITS, WARPS, STEPS)
        tell(state_ptr + BINS, total, OF_TILE)
        begin = tl.cumsum(total, 0) - total
        order_lines(room_ptr, lines, begin, low, BITS, WARPS, STEPS)
        before = look_back(state_ptr, BINS)
        tell(state_ptr + BINS, before + total, OF_ALL)
        write_lines(
            room_ptr, lines_ptr, order_ptr, before - begin, first, n, turn, turn == passes - 1, BITS, WARPS, STEPS
        )  # fmt: skip


# ---- the lines of a program, STEPS for each thread: counted, put in order, written


@triton.jit
def load_lines(
    keys_ptr, lines_ptr, first, n, turn, WARPS: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """The lines from ``first`` on, a run of them for each warp; new ones in the first pass."""
    lane = numbers(32 * WARPS)
    row = first + lane // 32 * (32 * STEPS)
    end = tl.minimum(row + 32 * STEPS, n)
    row += lane % 32
    if turn == 0:
        lines = new_lines(keys_ptr, row, end, STEPS)
    else:
        lines = lines_at(lines_ptr + tl.where(turn % 2 == 1, 0, n), row, end, STEPS)
    return lines


@triton.jit
def new_lines(keys_ptr, row, end, STEPS: tl.constexpr):
    """Keys with their rows below them."""
    lines = ()  # type: tuple
    for step in tl.static_range(STEPS):
        at = row + 32 * step
        key = tl.load(keys_ptr + at, mask=at < end, other=-1)
        lines = lines + ((key.to(tl.int64) << 32) | at,)
    return lines


@triton.jit
def lines_at(lines_ptr, row, end, STEPS: tl.constexpr):
    """Lines as they are."""
    lines = ()  # type: tuple
    for step in tl.static_range(STEPS):
        at = row + 32 * step
        lines = lines + (tl.load(lines_ptr + at, mask=at < end, other=-1),)
    return lines


@triton.jit
def count_lines(
    room_ptr, lines, low, BITS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """How often each digit occurs, in all and, in shared memory, in each warp."""
    BINS: tl.constexpr = 1 << BITS
    digit_of = numbers(BINS)
    own = numbers(32 * WARPS) // 32 * BINS  # the counters of a lane's warp
    for warp in tl.static_range(WARPS):
        put(room_ptr, warp * BINS + digit_of, digit_of & 0)
    tl.debug_barrier()
    for step in tl.static_range(STEPS):
        add_one(room_ptr, own + digit_in(lines[step], low, BINS))
    tl.debug_barrier()
    total = digit_of & 0
    for warp in tl.static_range(WARPS):
        total += take(room_ptr, warp * BINS + digit_of)
    return total


@triton.jit
def order_lines(
    room_ptr, lines, begin, low, BITS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """Counted lines go to shared memory, behind the counters, in the order of a digit; where each of them begins."""
    BINS: tl.constexpr = 1 << BITS
    digit_of = numbers(BINS)
    own = numbers(32 * WARPS) // 32 * BINS
    places = ()  # type: tuple
    place = begin
    for warp in tl.static_range(WARPS):
        places = places + (place,)
        place += take(room_ptr, warp * BINS + digit_of)
    tl.debug_barrier()
    for warp in tl.static_range(WARPS):
        put(room_ptr, warp * BINS + digit_of, places[warp])
    tl.debug_barrier()
    for step in tl.static_range(STEPS):  # lines that are none have the last digit, and come last of all
        digit = digit_in(lines[step], low, BINS)
        put_line(room_ptr, WARPS * BINS * 4, take_place(room_ptr, own, digit, BITS), lines[step])


@triton.jit
def write_lines(
    room_ptr, lines_ptr, order_ptr, shift, first, n, turn, last,
    BITS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The lines of shared memory, of the ``last`` pass their rows, to where they belong: ``shift`` by their digit."""
    BINS: tl.constexpr = 1 << BITS
    THREADS: tl.constexpr = 32 * WARPS
    lane = numbers(THREADS)
    low = turn * BITS
    tl.debug_barrier()
    put(room_ptr, numbers(BINS), shift)
    tl.debug_barrier()
    if last:
        for step in tl.static_range(STEPS):
            at = step * THREADS + lane
            line = take_line(room_ptr, WARPS * BINS * 4, at)
            to = take(room_ptr, digit_in(line, low, BINS)) + at
            tl.store(order_ptr + to, (line & ((1 << 32) - 1)).to(tl.int32), mask=first + at < n)
    else:
        there_ptr = lines_ptr + tl.where(turn % 2 == 1, n, 0)
        for step in tl.static_range(STEPS):
            at = step * THREADS + lane
            line = take_line(room_ptr, WARPS * BINS * 4, at)
            to = take(room_ptr, digit_in(line, low, BINS)) + at
            tl.store(there_ptr + to, line, mask=first + at < n)


@triton.jit
def sum_counts(counts_ptr, counting, BINS: tl.constexpr):
    """The sum of ``counting`` lists of counts, sixteen of which are on their way together."""
    digit = tl.arange(0, BINS)
    total = digit & 0
    for first in range(0, counting, 16):
        for one in tl.static_range(16):
            at = (first + one) * BINS + digit
            total += tl.load(counts_ptr + at, mask=at < counting * BINS, other=0)
    return total


@triton.jit
def digit_in(line, low, BINS: tl.constexpr):
    """The digit of a line above its ``low`` lowest bits of the key: of the upper register."""
    return ((line >> 32).to(tl.int32) >> low) & (BINS - 1)


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
    order, passes = torch.empty(1, n, dtype=torch.int32, device=keys.device), Passes(n, bits, keys.device)
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

    def __init__(self, n: int, bits: int, device: torch.device, programs: int = 0) -> None:
        self.n = n
        self.passes, self.bits, self._steps = digits_of(bits)
        self.tiles = ceil_div(n, 32 * WARPS * self._steps)
        self.states = LOOK + self.passes * (self.tiles + 1)
        self.counting = ceil_div(n, COOPERATIVE_KEYS if programs else 32 * COUNT_WARPS * COUNT_STEPS)
        self._is_counted = programs > 0
        if programs:
            self.counting = min(self.counting, programs)
        lists = self.states + self.passes * min(self.counting, programs or 1024)
        rooms = 0 if uses_ptx(device) else max(self.counting, self.tiles + self.passes)
        #: words of 64 bits of its scratch memory: two lists of lines, then states of tiles, lists of counts, and what
        #: stands for shared memory without PTX
        self.words = 2 * n + (lists << self.bits) // 2 + rooms * ROOM // 8

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
