"""The order that sorts rows by their keys on the GPU: a stable radix sort, a launch for each digit or in another's."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_launch import (
    INTERPRETED,
    IS_INTERPRETED,
    Launcher,
    Pointer,
    ceil_div,
    crew_of,
    pointer,
    wait_for_all,
)

#: bits of a digit: the fewest with which there are as few digits as with the most
DIGIT_BITS = 8, 9
#: warps of a program, and lines that each of its threads moves, for each of them
WARPS, STEPS = 8, (16, 12)
#: tiles before its own that a thread asks for their counts at once
LOOK = 8
#: warps of a program that counts all digits, and keys that each of its threads asks for at once
COUNT_WARPS, COUNT_STEPS = 16, 8
#: the same of programs that are all there at once, several on a multiprocessor, and keys that one counts
CREW_WARPS, CREW_STEPS, CREW_KEYS = 4, 8, 4096
#: bytes of shared memory of which Triton knows nothing: counters by warp, then the lines of a tile
ROOM, CREW_ROOM = 40960, 16384

OPEN, OPEN_CREW = (
    tl.constexpr(f".shared .align 16 .b8 sort_room[{room}]; mov.b32 $0, 0;") for room in (ROOM, CREW_ROOM)
)
_AT = "{ .reg .b32 at; mov.u32 at, sort_room; add.u32 at, at, $1; "
PUT = tl.constexpr(_AT + "st.shared.b32 [at], $2; mov.b32 $0, 0; }")
PUT_LINE = tl.constexpr(_AT + "st.shared.b64 [at], $2; mov.b32 $0, 0; }")
TAKE = tl.constexpr(_AT + "ld.shared.b32 $0, [at]; }")
TAKE_LINE = tl.constexpr(_AT + "ld.shared.b64 $0, [at]; }")
ADD_ONE = tl.constexpr(_AT + "red.shared.add.u32 [at], 1; mov.b32 $0, 0; }")
# Of the lanes $3, those whose bit $2 of $1 is that of this lane.
VOTE = tl.constexpr(
    "{ .reg .pred set; .reg .b32 all; and.b32 all, $1, $2; setp.ne.u32 set, all, 0; "
    "vote.sync.ballot.b32 all, set, 0xffffffff; @!set not.b32 all, all; and.b32 $0, $3, all; }"
)
# The counter at $1, and how many of the lanes $2 come before this one; it moves on by all of them.
TAKE_PLACE = tl.constexpr(
    _AT + ".reg .pred last; .reg .b32 other, next; ld.shared.b32 $0, [at]; bar.warp.sync 0xffffffff; "
    "mov.u32 other, %lanemask_gt; and.b32 other, other, $2; setp.eq.u32 last, other, 0; "
    "mov.u32 other, %lanemask_lt; and.b32 other, other, $2; popc.b32 other, other; add.u32 $0, $0, other; "
    "add.u32 next, $0, 1; @last st.shared.b32 [at], next; bar.warp.sync 0xffffffff; }"
)
# A count has two bits above it, of a tile alone or of all up to it: whoever reads it needs nothing else of its writer.
OF_TILE, OF_ALL = tl.constexpr(1 << 30), tl.constexpr(-1 << 31)
#: so that there cannot be more rows
MOST_ROWS = (1 << 30) - 1
TELL = tl.constexpr("{ .reg .b32 word; or.b32 word, $2, $3; st.relaxed.gpu.global.b32 [$1], word; mov.b32 $0, 0; }")


def _look_back(ahead: int) -> str:
    """The sum of the counts at $1 and, $2 bytes before each other, of the tiles before it, up to one of all."""
    words = [f"word{i}" for i in range(ahead)]
    code = "{ .reg .pred p; .reg .b64 at, far; .reg .b32 count, " + ", ".join(words) + "; "
    code += "mov.b64 at, $1; mov.b32 $0, 0; AGAIN: mov.b64 far, at; "
    for word in words:
        code += f"ld.relaxed.gpu.global.b32 {word}, [far]; sub.s64 far, far, $2; "
    for word in words:
        code += f"setp.lt.u32 p, {word}, {OF_TILE.value}; @p bra AGAIN; "
        code += f"and.b32 count, {word}, {OF_TILE.value - 1}; add.u32 $0, $0, count; sub.s64 at, at, $2; "
        code += f"setp.lt.s32 p, {word}, 0; @p bra DONE; "
    return code + "bra AGAIN; DONE: }"


LOOK_BACK = tl.constexpr(_look_back(LOOK))


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


class Passes:
    """How the last ``bits`` bits of ``n`` keys are cut into digits, and keys into tiles, for a sort.

    ``crew``: the programs of a cooperative launch that has written the keys, and counts their digits too; by 0, a
    launch of its own does. ``together``: it moves the lines, too.
    """

    def __init__(self, n: int, bits: int, crew: int = 0, together: bool = False) -> None:
        self.n = n
        self._passes, self._bits, self._steps = _digits(bits)
        self.tiles = ceil_div(n, 32 * CREW_WARPS * CREW_STEPS if together else 32 * WARPS * self._steps)
        self.states = LOOK + self._passes * (self.tiles + 1)
        self.counting = ceil_div(n, CREW_KEYS if crew else 32 * COUNT_WARPS * COUNT_STEPS)
        self._is_counted, lists = crew > 0, min(self.counting, crew or 1024)
        if crew:
            self.counting = lists
        #: words of 64 bits of its scratch memory: two lists of lines, states of tiles, and lists of counts
        self.words = 2 * n + (((self.states + self._passes * lists) << self._bits) + 1) // 2 + INTERPRETED * ROOM // 8

    def launch(self, keys: Pointer, scratch: Pointer, order: Pointer, device: torch.device) -> None:
        """The order of ``keys`` (N,) int32, not negative, in ``order`` (N,) int32; ``scratch`` has `words`."""
        passes, states, counting = self._passes, self.states, self.counting
        if not self._is_counted:
            counting = min(crew_of(device, counting, 1), 1024)
            counted = (keys, scratch, self.n, states, counting)
            DIGITS(device, (counting,), counted, (self._bits, passes, COUNT_WARPS, COUNT_STEPS))
        for turn in range(passes):
            args = (keys, scratch, order, self.n, states, counting, turn, passes, self.tiles)
            MOVE(device, (self.tiles + (turn == 0) * passes,), args, (self._bits, WARPS, self._steps, LOOK))


def ticket_behind(n: int) -> int:
    """Where `sort_together` leaves a zero behind the order of n rows: at a multiple of 16 bytes."""
    return (n + 3) & -4


def crew_constants(bits: int, together: bool) -> tuple[int, ...]:
    """The constants of `sort_together` for keys of so many bits; all 0 for none."""
    return (*_digits(bits)[:2], CREW_WARPS, CREW_STEPS, LOOK, int(together)) if bits else (0,) * 6


@cache
def _digits(bits: int) -> tuple[int, int, int]:
    """Passes, bits of a digit, and lines that a thread moves, for keys of so many bits."""
    passes = ceil_div(bits, max(DIGIT_BITS))
    each, steps = next((each, steps) for each, steps in zip(DIGIT_BITS, STEPS) if each * passes >= bits)
    return passes, each, steps


# ---- kernels


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
    open_room(OPEN)
    tile = tl.program_id(0)
    if turn == 0:
        tile -= passes
    move_tile(tile, keys_ptr, lines_ptr, order_ptr, n, states, counting, turn, passes, tiles, BITS, WARPS, STEPS, LOOK)


@triton.jit
def move_tile(
    tile, keys_ptr, lines_ptr, order_ptr, n, states, counting, turn, passes, tiles,
    BITS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """`move_kernel` for one tile; before the first there is one for each pass, where lesser digits are summed."""
    BINS: tl.constexpr = 1 << BITS
    THREADS: tl.constexpr = 32 * WARPS
    TILE: tl.constexpr = THREADS * STEPS
    LINES: tl.constexpr = WARPS * BINS * 4  # where they are put, behind the counters
    lane = tl.arange(0, THREADS)
    digit_of = tl.arange(0, BINS)
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
        first = tile * TILE
        row = first + lane // 32 * (32 * STEPS) + lane % 32
        if turn == 0:
            lines = new_lines(keys_ptr, row, n, STEPS)
        else:
            lines = lines_at(lines_ptr + tl.where(turn % 2 == 1, 0, n), row, n, STEPS)
        low = turn * BITS
        own = lane // 32 * BINS  # the counters of a lane's warp
        for warp in tl.static_range(WARPS):
            put(room_ptr, warp * BINS + digit_of, digit_of & 0)
        tl.debug_barrier()
        for step in tl.static_range(STEPS):
            add_one(room_ptr, own + digit_in(lines[step], low, BINS))
        tl.debug_barrier()
        counts = ()  # type: tuple
        total = digit_of & 0
        for warp in tl.static_range(WARPS):
            counts = counts + (take(room_ptr, warp * BINS + digit_of),)
            total += counts[warp]
        tell(state_ptr + BINS, total, OF_TILE)
        begin = tl.cumsum(total, 0) - total
        if BINS < THREADS:  # some digits have two threads
            tl.debug_barrier()
        place = begin
        for warp in tl.static_range(WARPS):
            put(room_ptr, warp * BINS + digit_of, place)
            place += counts[warp]
        tl.debug_barrier()
        for step in tl.static_range(STEPS):  # lines that are none have the last digit, and come last of all
            digit = digit_in(lines[step], low, BINS)
            put_line(room_ptr, LINES, take_place(room_ptr, own, digit, BITS), lines[step])
        before = look_back(state_ptr, BINS)
        tell(state_ptr + BINS, before + total, OF_ALL)
        tl.debug_barrier()
        put(room_ptr, digit_of, before - begin)
        tl.debug_barrier()
        if turn == passes - 1:
            for step in tl.static_range(STEPS):
                at = step * THREADS + lane
                line = take_line(room_ptr, LINES, at)
                to = take(room_ptr, digit_in(line, low, BINS)) + at
                tl.store(order_ptr + to, (line & 0xFFFFFFFF).to(tl.int32), mask=first + at < n)
        else:
            there_ptr = lines_ptr + tl.where(turn % 2 == 1, n, 0)
            for step in tl.static_range(STEPS):
                at = step * THREADS + lane
                line = take_line(room_ptr, LINES, at)
                to = take(room_ptr, digit_in(line, low, BINS)) + at
                tl.store(there_ptr + to, line, mask=first + at < n)


@triton.jit
def sort_together(
    keys_ptr, lines_ptr, order_ptr, gates_ptr, n, states, counting, tiles, programs,
    PASSES: tl.constexpr, BITS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, LOOK: tl.constexpr,
    MOVES: tl.constexpr,
):  # fmt: skip
    """Count the digits of keys that all programs of a cooperative launch know, by the last ``counting`` of them: the
    first ones may have been kept busy.

    MOVES: their order, too, and a zero behind it; the programs meet at PASSES gates from here on.
    """
    open_room(OPEN_CREW)
    program = tl.program_id(0)
    if MOVES and program == 0:
        tl.store(order_ptr + (n + 3) // 4 * 4, 0)
    if program >= programs - counting:
        count_digits(programs - 1 - program, counting, keys_ptr, lines_ptr, n, states, BITS, PASSES, WARPS, STEPS)
    for turn in range(PASSES if MOVES else 0):
        wait_for_all(gates_ptr + turn, programs)
        first = program
        if turn == 0:
            first -= PASSES
        for tile in range(first, tiles, programs):
            tl.debug_barrier()  # the tile before has been read out of shared memory
            move_tile(
                tile, keys_ptr, lines_ptr, order_ptr, n, states, counting, turn, PASSES, tiles,
                BITS, WARPS, STEPS, LOOK,
            )  # fmt: skip


@triton.jit
def new_lines(keys_ptr, row, n, STEPS: tl.constexpr):
    """STEPS times 32 keys of each warp with their rows below them."""
    lines = ()  # type: tuple
    for step in tl.static_range(STEPS):
        at = row + 32 * step
        lines = lines + ((tl.load(keys_ptr + at, mask=at < n, other=-1).to(tl.int64) << 32) | at,)
    return lines


@triton.jit
def lines_at(lines_ptr, row, n, STEPS: tl.constexpr):
    """STEPS times 32 lines of each warp."""
    lines = ()  # type: tuple
    for step in tl.static_range(STEPS):
        at = row + 32 * step
        lines = lines + (tl.load(lines_ptr + at, mask=at < n, other=-1),)
    return lines


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
    """The digit of a line above its ``low`` lowest bits of the key."""
    return ((line >> 32).to(tl.int32) >> low) & (BINS - 1)


# ---- what the compiler has no words for: shared memory, votes, and words that other programs wait for


@triton.jit
def open_room(OPEN: tl.constexpr):
    """Declare the shared memory, once in a kernel."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(OPEN, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put(room_ptr, at, value):
    """Set 32-bit words."""
    if IS_INTERPRETED:
        tl.store(room_ptr + at, value)
    else:
        tl.inline_asm_elementwise(PUT, "=r,r,r", [at * 4, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take(room_ptr, at):
    """Read 32-bit words."""
    if IS_INTERPRETED:
        return tl.load(room_ptr + at)
    else:
        return tl.inline_asm_elementwise(TAKE, "=r,r", [at * 4], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def add_one(room_ptr, at):
    """Count up 32-bit words, for each thread that has one."""
    if IS_INTERPRETED:
        tl.atomic_add(room_ptr + at, 1)
    else:
        tl.inline_asm_elementwise(ADD_ONE, "=r,r", [at * 4], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put_line(room_ptr, lines, at, line):
    """Set 64-bit words behind the first ``lines`` bytes."""
    if IS_INTERPRETED:
        tl.store((room_ptr + lines // 4).to(tl.pointer_type(tl.int64)) + at, line)
    else:
        tl.inline_asm_elementwise(PUT_LINE, "=r,r,l", [at * 8 + lines, line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take_line(room_ptr, lines, at):
    """Read 64-bit words behind the first ``lines`` bytes."""
    if IS_INTERPRETED:
        return tl.load((room_ptr + lines // 4).to(tl.pointer_type(tl.int64)) + at)
    else:
        return tl.inline_asm_elementwise(TAKE_LINE, "=l,r", [at * 8 + lines], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def take_place(room_ptr, own, digit, BITS: tl.constexpr):
    """For rows of 32 lanes, a thread each: the counter of a lane's digit in its warp, up to the lane; it moves on."""
    if IS_INTERPRETED:
        lane = tl.arange(0, own.shape[0])
        like = (digit[None, :] == digit[:, None]) & (own[None, :] == own[:, None])
        place = tl.load(room_ptr + own + digit) + tl.sum((like & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
        tl.atomic_add(room_ptr + own + digit, 1)
        return place
    else:
        like = digit | -1
        for bit in tl.static_range(BITS):
            like = tl.inline_asm_elementwise(
                VOTE, "=r,r,r,r", [digit, 1 << bit, like], dtype=tl.int32, is_pure=False, pack=1
            )
        return tl.inline_asm_elementwise(
            TAKE_PLACE, "=r,r,r", [(own + digit) * 4, like], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def tell(state_ptr, count, flag):
    """Let other programs know a count."""
    if IS_INTERPRETED:
        tl.store(state_ptr, count | flag)
    else:
        tl.inline_asm_elementwise(
            TELL, "=r,l,r,r", [state_ptr.to(tl.int64), count, flag], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def look_back(state_ptr, BINS: tl.constexpr):
    """The counts of all tiles before one; the state of the last of them is given."""
    if IS_INTERPRETED:
        return tl.load(state_ptr) & (OF_TILE - 1)
    else:
        step = tl.full((), BINS * 4, tl.int64)
        return tl.inline_asm_elementwise(
            LOOK_BACK, "=r,l,l", [state_ptr.to(tl.int64), step], dtype=tl.int32, is_pure=False, pack=1
        )


_I32, _I64 = torch.int32, torch.int64
DIGITS = Launcher(digits_kernel, (_I32, _I64, *(int,) * 3), num_warps=COUNT_WARPS)
MOVE = Launcher(move_kernel, (_I32, _I64, _I32, *(int,) * 6), num_warps=WARPS)
