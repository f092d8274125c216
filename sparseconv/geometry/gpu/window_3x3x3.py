"""The 27 cells around rows of a table of 4 x 4 x 4 blocks, read from the eight half blocks that they lie in.

Any window can be looked up run by run (`taps`). This one is nearly every map, and a run at a time reads the
same half blocks up to three times: here each is read once, and the rest is arithmetic on known offsets.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from sparseconv.geometry.gpu.taps import look_into_halves, take
from sparseconv.gpu.launcher import has_ptx

#: the window that these functions know, and the block's shifts that they take for granted
CUBE = tuple(itertools.product((-1, 0, 1), repeat=3)), (0, 2, 2, 2)

#: the 32 x 32 bits of a warp are transposed in five exchanges; then each lane counts those of its own bit
_EXCHANGE = (
    "shfl.sync.bfly.b32 other, mine, {0}, 0x1f, 0xffffffff; and.b32 bit, lane, {0}; setp.ne.u32 upper, bit, 0; "
    "@upper shr.u32 other, other, {0}; @!upper shl.b32 other, other, {0}; "
    "selp.b32 kept, 0x{1:08x}, 0x{2:08x}, upper; lop3.b32 mine, mine, other, kept, 0xe4; "
)
_UPPER = {16: 0xFFFF0000, 8: 0xFF00FF00, 4: 0xF0F0F0F0, 2: 0xCCCCCCCC, 1: 0xAAAAAAAA}
COUNT_BITS = tl.constexpr(
    "{ .reg .pred upper; .reg .b32 lane, mine, other, bit, kept; mov.u32 lane, %laneid; mov.b32 mine, $1; "
    + "".join(_EXCHANGE.format(step, mask, mask ^ 0xFFFFFFFF) for step, mask in _UPPER.items())
    + "popc.b32 $0, mine; }"
)

# ---- kernels


@triton.jit
def corners(entry, live, info_ptr, around_ptr):
    """The half blocks around rows: first and second along each axis, packed with their places; 0 where none is.

    A half block has 2 x 4 x 4 cells: three cells along the first axis always lie in two. Along the second axis both
    are one where the row's three cells lie in one block; along the last the second is then not looked at.
    """
    live = live & (entry >= 0)
    bit = (entry & 63).to(tl.int32)
    first = (bit >> 4) - 1
    y = ((bit >> 2) & 3) - 1
    z = (bit & 3) - 1
    side = (first >> 2) * 9 + (y >> 2) * 3 + (z >> 2) + 13
    number_ptr = around_ptr + (entry >> 6) * 27 + side
    far_y = live & ((y & 3) > 1)
    far_z = live & ((z & 3) > 1)
    far_both = far_y & far_z
    block00 = tl.load(number_ptr, mask=live, other=-1)
    block01 = tl.load(number_ptr + 1, mask=far_z, other=-1)
    block10 = tl.load(number_ptr + 3, mask=far_y, other=-1)
    block11 = tl.load(number_ptr + 4, mask=far_both, other=-1)
    half = (first >> 1) & 1
    leaves = half == 1  # the second half lies in the next block
    next00 = tl.load(number_ptr + 9, mask=live & leaves, other=-1)
    next01 = tl.load(number_ptr + 10, mask=far_z & leaves, other=-1)
    next10 = tl.load(number_ptr + 12, mask=far_y & leaves, other=-1)
    next11 = tl.load(number_ptr + 13, mask=far_both & leaves, other=-1)
    word000 = half_at(info_ptr, block00, half)
    word001 = half_at(info_ptr, block01, half)
    word010 = half_at(info_ptr, block10, half)
    word011 = half_at(info_ptr, block11, half)
    word100 = half_at(info_ptr, tl.where(leaves, next00, block00), half ^ 1)
    word101 = half_at(info_ptr, tl.where(leaves, next01, block01), half ^ 1)
    word110 = half_at(info_ptr, tl.where(leaves, next10, block10), half ^ 1)
    word111 = half_at(info_ptr, tl.where(leaves, next11, block11), half ^ 1)
    word010 = tl.where(far_y, word010, word000)
    word011 = tl.where(far_y, word011, word001)
    word110 = tl.where(far_y, word110, word100)
    word111 = tl.where(far_y, word111, word101)
    return bit, word000, word001, word010, word011, word100, word101, word110, word111


@triton.jit
def half_at(info_ptr, block, half):
    """A packed half of a block, 0 where there is no block (-1)."""
    return tl.load(info_ptr + (2 * block.to(tl.int64) + half), mask=block >= 0, other=0)


@triton.jit
def look_along(
    bit, word000, word001, word010, word011, word100, word101, word110, word111, X: tl.constexpr, Y: tl.constexpr
):
    """What the run of three cells at x - 1 + X, y - 1 + Y, z - 1 .. z + 1 sees, as `look_into` returns it."""
    if X == 0:
        near0, far0, near1, far1 = word000, word001, word010, word011
    elif X == 2:
        near0, far0, near1, far1 = word100, word101, word110, word111
    else:
        second = (bit & 16) == 0
        near0, far0 = tl.where(second, word100, word000), tl.where(second, word101, word001)
        near1, far1 = tl.where(second, word110, word010), tl.where(second, word111, word011)
    if Y == 0:
        near, far = near0, far0
    elif Y == 2:
        near, far = near1, far1
    else:
        second = (bit & 12) == 0
        near, far = tl.where(second, near1, near0), tl.where(second, far1, far0)
    line = ((((bit >> 4) + (X - 1)) & 1) << 4) | ((((bit >> 2) + (Y - 1)) & 3) << 2)
    return look_into_halves(near, far, line, (bit - 1) & 3, 3, 4)


@triton.jit
def look_at_run(
    bit, word000, word001, word010, word011, word100, word101, word110, word111, rows_ptr,
    X: tl.constexpr, Y: tl.constexpr,
):  # fmt: skip
    """The rows of the three cells of `look_along`; -1 where a cell is empty."""
    seen, near, far, cell = look_along(
        bit, word000, word001, word010, word011, word100, word101, word110, word111, X, Y
    )  # fmt: skip
    found0, near, far = take(rows_ptr, seen, near, far, cell, 0, 4, True)
    found1, near, far = take(rows_ptr, seen, near, far, cell, 1, 4, True)
    found2, near, far = take(rows_ptr, seen, near, far, cell, 2, 4, True)
    return found0, found1, found2


@triton.jit
def look_at_plane(bit, a, b, c, d, e, f, g, h, rows_ptr, X: tl.constexpr):
    """The rows of the nine cells at x - 1 + X, from `corners`; -1 where a cell is empty."""
    found0, found1, found2 = look_at_run(bit, a, b, c, d, e, f, g, h, rows_ptr, X, 0)
    found3, found4, found5 = look_at_run(bit, a, b, c, d, e, f, g, h, rows_ptr, X, 1)
    found6, found7, found8 = look_at_run(bit, a, b, c, d, e, f, g, h, rows_ptr, X, 2)
    return found0, found1, found2, found3, found4, found5, found6, found7, found8


@triton.jit
def mask_of_cube(entry, live, info_ptr, around_ptr):
    """A bit for each of the 27 cells around rows."""
    bit, a, b, c, d, e, f, g, h = corners(entry, live, info_ptr, around_ptr)
    mask = bit & 0
    for run in tl.static_range(9):
        seen, _near, _far, _cell = look_along(bit, a, b, c, d, e, f, g, h, run // 3, run % 3)
        mask |= seen << (3 * run)
    return mask


@triton.jit
def count_in_warps(mask, WARPS: tl.constexpr):
    """(32,) int32: how many of 32 * WARPS masks, one per thread, have each bit."""
    if not has_ptx():
        lane = tl.arange(0, 32)
        return tl.sum((mask[None, :] >> lane[:, None]) & 1, 1)
    else:
        counts = tl.inline_asm_elementwise(COUNT_BITS, "=r,r", [mask], dtype=tl.int32, is_pure=False, pack=1)
        return tl.sum(tl.reshape(counts, (WARPS, 32)), 0)
