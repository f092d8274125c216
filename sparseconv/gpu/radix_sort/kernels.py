"""The kernels of the radix sort: digits counted, lines moved, a launch for each digit."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseconv.gpu.warp_asm import (
    OF_ALL,
    OF_TILE,
    OPEN,
    add_one,
    look_back,
    numbers,
    open_room,
    put,
    put_line,
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
    room_ptr = counts_ptr + PASSES * programs * BINS
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
    room_ptr = counts_ptr + passes * counting * BINS
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
