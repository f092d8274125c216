"""What the compiler has no words for: shared memory, votes, and words that other programs wait for.

Without PTX, a program's shared memory is a part of global memory, ``room_ptr``, and every wait is for the whole block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparseconv.gpu.launcher import has_ptx

#: tiles before its own that a thread asks for their counts at once
LOOK = 8
#: bytes of shared memory of which Triton knows nothing: counters by warp, then the lines of a tile; and counters alone
ROOM, COUNTERS_ROOM = 40960, 18432

ROOM_BYTES = tl.constexpr(ROOM)
OPEN, OPEN_COUNTERS = (
    tl.constexpr(f".shared .align 16 .b8 sort_room[{room}]; mov.b32 $0, 0;") for room in (ROOM, COUNTERS_ROOM)
)
COPY = tl.constexpr("mov.b32 $0, $1;")
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


@triton.jit
def open_room(OPEN: tl.constexpr):
    """Declare the shared memory, once in a kernel."""
    if has_ptx():
        tl.inline_asm_elementwise(OPEN, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def room_of(rooms_ptr, program):
    """A program's part of the memory that stands for shared memory without PTX."""
    return rooms_ptr + program.to(tl.int64) * (ROOM_BYTES // 4)


@triton.jit
def numbers(COUNT: tl.constexpr):
    """0, 1, 2 and so on, which the compiler does not know: all that it works out ahead of a loop fills registers."""
    number = tl.arange(0, COUNT)
    if not has_ptx():
        return number
    else:
        return tl.inline_asm_elementwise(COPY, "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put(room_ptr, at, value):
    """Set 32-bit words."""
    if not has_ptx():
        tl.store(room_ptr + at, value)
    else:
        tl.inline_asm_elementwise(PUT, "=r,r,r", [at * 4, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take(room_ptr, at):
    """Read 32-bit words."""
    if not has_ptx():
        return tl.load(room_ptr + at)
    else:
        return tl.inline_asm_elementwise(TAKE, "=r,r", [at * 4], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def add_one(room_ptr, at):
    """Count up 32-bit words, for each thread that has one."""
    if not has_ptx():
        tl.atomic_add(room_ptr + at, 1, sem="relaxed")
    else:
        tl.inline_asm_elementwise(ADD_ONE, "=r,r", [at * 4], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put_line(room_ptr, lines, at, line):
    """Set 64-bit words behind the first ``lines`` bytes."""
    if not has_ptx():
        tl.store((room_ptr + lines // 4).to(tl.pointer_type(tl.int64)) + at, line)
    else:
        tl.inline_asm_elementwise(PUT_LINE, "=r,r,l", [at * 8 + lines, line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take_line(room_ptr, lines, at):
    """Read 64-bit words behind the first ``lines`` bytes."""
    if not has_ptx():
        return tl.load((room_ptr + lines // 4).to(tl.pointer_type(tl.int64)) + at)
    else:
        return tl.inline_asm_elementwise(TAKE_LINE, "=l,r", [at * 8 + lines], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def take_place(room_ptr, own, digit, BITS: tl.constexpr):
    """For rows of 32 lanes, a thread each: the counter of a lane's digit in its warp, up to the lane; it moves on."""
    if not has_ptx():
        lane = tl.arange(0, 32)
        of_warp = tl.reshape(digit, (own.shape[0] // 32, 32))
        before = (of_warp[:, None, :] == of_warp[:, :, None]) & (lane[None, :] < lane[:, None])[None, :, :]
        rank = tl.reshape(tl.sum(before.to(tl.int32), 2), own.shape)
        place = tl.load(room_ptr + own + digit) + rank
        tl.debug_barrier()
        tl.atomic_add(room_ptr + own + digit, 1, sem="relaxed")
        tl.debug_barrier()
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
    if not has_ptx():
        tl.atomic_xchg(state_ptr, count | flag, sem="relaxed")
    else:
        tl.inline_asm_elementwise(
            TELL, "=r,l,r,r", [state_ptr.to(tl.int64), count, flag], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def look_back(state_ptr, BINS: tl.constexpr):
    """The counts of all tiles before one; the state of the last of them is given."""
    if not has_ptx():
        total = tl.zeros(state_ptr.shape, tl.int32)
        going = total == 0
        while tl.max(going.to(tl.int32), 0) > 0:
            word = tl.load(state_ptr, volatile=True)
            is_known = going & ((word < 0) | (word >= OF_TILE))
            total += tl.where(is_known, word & (OF_TILE - 1), 0)
            going = going & (word >= 0)
            state_ptr -= tl.where(is_known & going, BINS, 0)
        return total
    else:
        step = tl.full((), BINS * 4, tl.int64)
        return tl.inline_asm_elementwise(
            LOOK_BACK, "=r,l,l", [state_ptr.to(tl.int64), step], dtype=tl.int32, is_pure=False, pack=1
        )
