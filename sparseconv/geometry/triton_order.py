"""The order that sorts rows by their keys on the GPU; of few rows in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_launch import (
    INTERPRETED,
    IS_INTERPRETED,
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
    power_of_2,
    wait_for_all,
)
from sparseconv.geometry.triton_radix import MOST_ROWS, Passes

#: up to this many rows they are sorted in one launch, whatever it takes the card: the host's launches cost more
SORTED_ROWS = 600_000
#: up to this many rows they are in a graph, where the host counts for nothing
GRAPH_ROWS = 160_000
#: counts that a program sums at once
SUMMED = tl.constexpr(2048)
#: bits of a digit at most, parts that the rows are cut into at most, rows of a part at least
DIGIT_BITS, PARTS, LEAST_ROWS = 9, 1024, 128

# Each of a program's four warps counts digits in 2 KB of shared memory of its own, which Triton knows nothing of: in
# the cache of global memory, a store for every row would cost as much as the rest of a pass.
OPEN = tl.constexpr(".shared .align 16 .b32 digit_counters[2048]; mov.b32 $0, 0;")
PUT = tl.constexpr(
    "{ .reg .b32 at; mov.u32 at, digit_counters; add.u32 at, at, $1; st.shared.b32 [at], $2; mov.b32 $0, 0; }"
)
TAKE = tl.constexpr("{ .reg .b32 at; mov.u32 at, digit_counters; add.u32 at, at, $1; ld.shared.b32 $0, [at]; }")
# The place of a lane's row: its warp's counter of the digit, and its rank among the lanes with the same digit, of those
# whose flag is set; the counter moves on by all of them. In: digit, flag. A vote a bit finds the like lanes.
_VOTE = (
    "and.b32 bit, $1, {0}; setp.ne.u32 set, bit, 0; vote.sync.ballot.b32 all, set, 0xffffffff; "
    "@!set not.b32 all, all; and.b32 same, same, all; "
)
COUNT = tl.constexpr(
    "{ .reg .pred set, live, last; .reg .b32 bit, all, same, at, before; "
    "setp.ne.u32 live, $2, 0; vote.sync.ballot.b32 same, live, 0xffffffff; "
    + "".join(_VOTE.format(1 << bit) for bit in range(DIGIT_BITS))
    + "mov.u32 at, %tid.x; shr.u32 at, at, 5; shl.b32 at, at, 9; add.u32 at, at, $1; shl.b32 at, at, 2; "
    "mov.u32 bit, digit_counters; add.u32 at, at, bit; ld.shared.b32 before, [at]; bar.warp.sync 0xffffffff; "
    "mov.u32 all, %lanemask_lt; and.b32 all, all, same; popc.b32 all, all; popc.b32 same, same; "
    "sub.u32 bit, same, 1; setp.eq.and.u32 last, all, bit, live; add.u32 same, same, before; "
    "@last st.shared.b32 [at], same; bar.warp.sync 0xffffffff; add.u32 $0, before, all; }"
)


def sort_rows(keys: torch.Tensor, unseen: Unseen | None = None, bits: int = 31) -> torch.Tensor:
    """The rows in a stable order of ``keys`` (G, N) int32 or int64, not negative, in each group: (G, N).

    int32 for one group of int32 keys, which are compared by their last ``bits`` bits; int64 for others.
    """
    groups, n = keys.shape
    if groups != 1 or keys.dtype != torch.int32:
        return torch.sort(keys, dim=-1, stable=True).indices
    if not 0 < n <= MOST_ROWS:
        return torch.sort(keys, dim=-1, stable=True).indices.int()
    cut: Cut | Passes = Cut(n, bits) if sorts_at_once(n, unseen) else Passes(n, bits)
    order = torch.empty(1, n, dtype=torch.int32, device=keys.device)
    scratch = torch.empty(cut.words, dtype=torch.int64, device=keys.device)
    cut.launch(pointer(keys), pointer(scratch), pointer(order), keys.device, unseen)
    return order


def sorts_at_once(n: int, unseen: Unseen | None) -> bool:
    """Whether n rows are sorted in one launch, whose programs wait for one another."""
    return 0 < n <= (SORTED_ROWS if unseen is None else GRAPH_ROWS)


class Cut:
    """How ``n`` rows are cut into parts, and the last ``bits`` bits of their keys into digits, for a sort."""

    def __init__(self, n: int, bits: int) -> None:
        self.n = n
        self._shift = max(LEAST_ROWS.bit_length(), (ceil_div(n, PARTS) - 1).bit_length() + 1) - 1
        self._parts = ceil_div(n, 1 << self._shift)
        self._passes = ceil_div(bits, DIGIT_BITS)
        self._digit_bits = ceil_div(bits, self._passes)
        #: words of 64 bits of its scratch memory: two lists of lines, and counts
        self.words = 2 * n + (((2 * self._parts + 1) << self._digit_bits) + 2048 * INTERPRETED) // 2 + 1
        #: of the kernel
        self.constants = self._digit_bits, max(32, power_of_2(self._parts)), NUM_GATES

    def launch(
        self, keys: Pointer, scratch: Pointer, order: Pointer, device: torch.device, unseen: Unseen | None = None
    ) -> None:
        """The order of ``keys`` (N,) int32, not negative, in ``order`` (N,) int32; ``scratch`` has `words`."""
        sums = (self.constants[1] << self._digit_bits) // SUMMED.value
        programs = crew_of(device, max(ceil_div(self._parts, 4), sums))
        gates = gates_of(device, unseen)
        args = (keys, scratch, order, gates, self.n, self._shift, self._parts, self._passes, programs)
        with on_device(device):
            SORT(device, (programs,), args, self.constants)


# ---- kernels


@triton.jit
def order_kernel(
    keys_ptr, lines_ptr, order_ptr, gates_ptr, n, shift, parts, passes, programs,
    BITS: tl.constexpr, WIDE: tl.constexpr, NUM_GATES: tl.constexpr,
):  # fmt: skip
    """A radix sort, BITS bits a pass, the last ones first; a warp moves a part of 2^shift neighbouring lines.

    Lines are keys with their rows below them. In each pass: how many lines of each part have a digit (of the first,
    counted by its warp; of others, by whoever put the lines there); the sums over parts before a part, and over digits
    before a digit; then each line goes to its place, a row of 32 after another.
    """
    BINS: tl.constexpr = 1 << BITS
    program = tl.program_id(0)
    lane = tl.arange(0, 128)
    digit_of = tl.arange(0, BINS)
    four = tl.arange(0, 4)
    here_ptr = lines_ptr + n  # of the pass before; the first reads keys
    there_ptr = lines_ptr
    counts_ptr = (lines_ptr + 2 * n.to(tl.int64)).to(tl.pointer_type(tl.int32))  # (BINS, parts)
    next_ptr = counts_ptr + parts * BINS
    totals_ptr = next_ptr + parts * BINS  # (BINS,)
    own_ptr = totals_ptr + BINS  # (4, BINS): counters by warp, where there is no shared memory
    open_counters()
    counter = four[None, :] * 512 + digit_of[:, None]
    steps = 1 << (shift - 7)
    for first in range(4 * program, parts, 4 * programs):
        part = first + four
        put_counters(own_ptr, counter, tl.zeros((BINS, 4), tl.int32))
        tl.debug_barrier()
        row = ((first + lane // 32) << shift) + lane % 32
        for _step in range(steps):
            key0 = tl.load(keys_ptr + row, mask=row < n, other=0)
            key1 = tl.load(keys_ptr + row + 32, mask=row + 32 < n, other=0)
            key2 = tl.load(keys_ptr + row + 64, mask=row + 64 < n, other=0)
            key3 = tl.load(keys_ptr + row + 96, mask=row + 96 < n, other=0)
            count_digits(own_ptr, key0 & (BINS - 1), row < n)
            count_digits(own_ptr, key1 & (BINS - 1), row + 32 < n)
            count_digits(own_ptr, key2 & (BINS - 1), row + 64 < n)
            count_digits(own_ptr, key3 & (BINS - 1), row + 96 < n)
            row += 128
        tl.debug_barrier()
        counts = take_counters(own_ptr, counter)
        tl.store(counts_ptr + digit_of[:, None] * parts + part[None, :], counts, mask=(part < parts)[None, :])
        tl.debug_barrier()
    waits = programs
    wait_for_all(gates_ptr, waits)
    last = passes - 1
    for turn in range(passes):
        sum_counts(counts_ptr, next_ptr, totals_ptr, program, programs, parts, BINS, WIDE)
        waits += programs
        wait_for_all(gates_ptr, waits)
        total = tl.load(totals_ptr + digit_of)
        begin = tl.cumsum(total, 0) - total
        low = 32 + turn * BITS
        for first in range(4 * program, parts, 4 * programs):
            part = first + four
            before = tl.load(
                counts_ptr + digit_of[:, None] * parts + part[None, :], mask=(part < parts)[None, :], other=0
            )
            tl.debug_barrier()
            put_counters(own_ptr, counter, before + begin[:, None])
            tl.debug_barrier()
            row = ((first + lane // 32) << shift) + lane % 32
            for _step in range(steps):  # four loads are on their way together
                line0 = line_of(keys_ptr, here_ptr, row, n, turn)
                line1 = line_of(keys_ptr, here_ptr, row + 32, n, turn)
                line2 = line_of(keys_ptr, here_ptr, row + 64, n, turn)
                line3 = line_of(keys_ptr, here_ptr, row + 96, n, turn)
                for part_of in tl.static_range(4):
                    line = line0 if part_of == 0 else line1 if part_of == 1 else line2 if part_of == 2 else line3
                    live = row + 32 * part_of < n
                    place = count_digits(own_ptr, (line >> low).to(tl.int32) & (BINS - 1), live)
                    if turn == last:
                        tl.store(order_ptr + place, (line & 0xFFFFFFFF).to(tl.int32), mask=live)
                    else:
                        tl.store(there_ptr + place, line, mask=live)
                        digit = (line >> (low + BITS)).to(tl.int32) & (BINS - 1)
                        tl.atomic_add(next_ptr + digit * parts + (place >> shift), 1, mask=live, sem="relaxed")
                row += 128
        if turn < last:
            waits += programs
            wait_for_all(gates_ptr, waits)
        swap = here_ptr
        here_ptr = there_ptr
        there_ptr = swap
        counted = counts_ptr
        counts_ptr = next_ptr
        next_ptr = counted
    leave(gates_ptr, programs, NUM_GATES)


@triton.jit
def line_of(keys_ptr, here_ptr, row, n, turn):
    """A key with its row below it: in the first pass as it comes, later where the pass before has put it."""
    if turn == 0:
        line = (tl.load(keys_ptr + row, mask=row < n, other=0).to(tl.int64) << 32) | row
    else:
        line = tl.load(here_ptr + row, mask=row < n, other=0)
    return line


@triton.jit
def open_counters():
    """Declare the counters in shared memory."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(OPEN, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put_counters(own_ptr, counter, value):
    """Set counters, whose numbers are 512 warp + digit."""
    if IS_INTERPRETED:
        tl.store(own_ptr + counter, value)
    else:
        tl.inline_asm_elementwise(PUT, "=r,r,r", [counter * 4, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take_counters(own_ptr, counter):
    """Read counters."""
    if IS_INTERPRETED:
        return tl.load(own_ptr + counter)
    else:
        return tl.inline_asm_elementwise(TAKE, "=r,r", [counter * 4], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count_digits(own_ptr, digit, live):
    """For 128 lanes, a thread each: the counter of a lane's digit in its warp, up to the lane; counters move on."""
    if IS_INTERPRETED:
        lane = tl.arange(0, 128)
        like = (digit[None, :] == digit[:, None]) & (lane[None, :] // 32 == lane[:, None] // 32) & live[None, :]
        before = tl.load(own_ptr + lane // 32 * 512 + digit)
        rank = tl.sum((like & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
        after = before + tl.sum(like.to(tl.int32), 1)
        tl.store(own_ptr + lane // 32 * 512 + digit, after, mask=live & (before + rank == after - 1))
        return before + rank
    else:
        return tl.inline_asm_elementwise(
            COUNT, "=r,r,r", [digit, live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def sum_counts(counts_ptr, next_ptr, totals_ptr, program, programs, parts, BINS: tl.constexpr, WIDE: tl.constexpr):
    """counts[digit, part] = lines of the digit in the parts before; totals[digit]: in all; the next counts are 0."""
    EACH: tl.constexpr = max(1, min(BINS, SUMMED // WIDE))
    part = tl.arange(0, WIDE)[None, :]
    for first in range(program * EACH, BINS, programs * EACH):
        digit = first + tl.arange(0, EACH)
        at = digit[:, None] * parts + part
        counts = tl.load(counts_ptr + at, mask=part < parts, other=0)
        tl.store(next_ptr + at, 0, mask=part < parts)
        tl.store(counts_ptr + at, tl.cumsum(counts, 1) - counts, mask=part < parts)
        tl.store(totals_ptr + digit, tl.sum(counts, 1))


_I32, _I64 = torch.int32, torch.int64
SORT = Launcher(order_kernel, (_I32, _I64, _I32, _I32, *(int,) * 5), cooperative=True)
