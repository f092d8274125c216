"""Cells and their blocks in kernels: keys from coordinates, open addressing, and the bits of a block's word."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseconv.gpu.launcher import has_ptx

#: slots of a table that does not fit in the second-level cache
MANY_SLOTS = tl.constexpr(1 << 21)


def _go_on(pack: int, read: str) -> str:
    """Searches that go on, thread by thread: a loop over whole tensors would wait for the longest of all at each step.

    A thread's ``pack`` keys do so together: it waits for the longest of them, not for their sum. In, ``pack`` of each:
    table, key + 1, slot, whether to go on, capacity. Out: slots, and whether the keys were found there.
    """
    out = [[f"${place * pack + key}" for key in range(pack)] for place in range(7)]
    slots, found, tables, keys, begins, going, capacities = out
    each = range(pack)
    names = ", ".join(f"at{i}, seen{i}" for i in each), ", ".join(f"slot{i}" for i in each)
    code = "{ .reg .pred end, any, " + ", ".join(f"go{i}" for i in each) + "; "
    code += f".reg .b64 {names[0]}; .reg .b32 {names[1]}; setp.ne.s32 any, {going[0]}, 0; "
    for i in each:
        code += f"mov.b32 slot{i}, {begins[i]}; mov.b64 seen{i}, 0; setp.ne.s32 go{i}, {going[i]}, 0; "
        code += f"or.pred any, any, go{i}; "
    code += "@!any bra DONE; NEXT: "
    for i in each:
        code += f"@go{i} add.s32 slot{i}, slot{i}, 1; setp.ge.s32 end, slot{i}, {capacities[i]}; "
        code += f"@end mov.b32 slot{i}, 0; mad.wide.s32 at{i}, slot{i}, 16, {tables[i]}; "
        code += f"@go{i} " + read.format(seen=f"seen{i}", at=f"at{i}", key=keys[i])
    for i in each:
        code += f"setp.ne.and.s64 go{i}, seen{i}, 0, go{i}; setp.ne.and.s64 go{i}, seen{i}, {keys[i]}, go{i}; "
    code += "mov.pred any, go0; " + "".join(f"or.pred any, any, go{i}; " for i in each[1:]) + "@any bra NEXT; DONE: "
    for i in each:
        code += f"setp.eq.s64 end, seen{i}, {keys[i]}; selp.b32 {found[i]}, 1, 0, end; mov.b32 {slots[i]}, slot{i}; "
    return code + "}"


def _registers(pack: int) -> str:
    return ",".join(["=&r"] * 2 * pack + ["l"] * 2 * pack + ["r"] * 3 * pack)


_READ = "ld.global.b64 {seen}, [{at}]; "
FIND_ON, FIND_TWO, FIND_FOUR = (tl.constexpr(_go_on(pack, _READ)) for pack in (1, 2, 4))
OF_ONE, OF_TWO, OF_FOUR = (tl.constexpr(_registers(pack)) for pack in (1, 2, 4))
CLAIM_ON = tl.constexpr(_go_on(1, "atom.global.relaxed.gpu.cas.b64 {seen}, [{at}], 0, {key}; "))
# Lanes side by side whose keys are alike claim once: the first of them for all. In: key + 1 (0: no wish), bit of the
# block's word. Out: the first lane, + 32 for that lane itself, and the bits from a lane to the last of its kind, in two
# halves.
_JOIN = (
    "shfl.sync.down.b32 other, low, {0}, 31, 0xffffffff; shfl.sync.down.b32 more, high, {0}, 31, 0xffffffff; "
    "add.u32 at, lane, {0}; setp.le.u32 p, at, last; @p or.b32 low, low, other; @p or.b32 high, high, more; "
)
MEET = tl.constexpr(
    "{ .reg .pred p; .reg .b32 lane, heads, first, last, low, high, other, more, at; .reg .b64 key, word; "
    "mov.u32 lane, %laneid; mov.b64 {low, high}, $3; shfl.sync.up.b32 other, low, 1, 0, 0xffffffff; "
    "shfl.sync.up.b32 more, high, 1, 0, 0xffffffff; mov.b64 key, {other, more}; setp.ne.s64 p, key, $3; "
    "setp.eq.or.u32 p, lane, 0, p; vote.sync.ballot.b32 heads, p, 0xffffffff; selp.b32 first, 32, 0, p; "
    "mov.b64 word, 1; shl.b64 word, word, $4; mov.u32 last, %lanemask_gt; and.b32 last, last, heads; "
    "brev.b32 last, last; clz.b32 last, last; sub.u32 last, last, 1; mov.u32 at, %lanemask_le; and.b32 at, at, heads; "
    "bfind.u32 at, at; add.u32 first, first, at; mov.b64 {low, high}, word; "
    + "".join(map(_JOIN.format, (1, 2, 4, 8, 16)))
    + "mov.b32 $0, first; mov.b32 $1, low; mov.b32 $2, high; }"
)
#: compare and swap of those who claim: table, slot, key + 1, whether to
CLAIM = tl.constexpr(
    "{ .reg .pred go; .reg .b64 at; setp.ne.s32 go, $4, 0; mad.wide.s32 at, $2, 16, $1; mov.b64 $0, 0; "
    "@go atom.global.relaxed.gpu.cas.b64 $0, [at], 0, $3; }"
)
#: what the first lane says
TELL = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;")


@triton.jit
def axis_range(ranges_ptr, axis):
    """Lowest value and number of values of a column, int64."""
    top = tl.load(ranges_ptr + 2 * axis).to(tl.uint32, bitcast=True).to(tl.int64)
    bottom = tl.load(ranges_ptr + 2 * axis + 1).to(tl.uint32, bitcast=True).to(tl.int64)
    low = 0x7FFFFFFF - bottom
    return low, top - 0x80000000 - low + 1


@triton.jit
def axis_blocks(extent, SHIFT: tl.constexpr):
    """Block numbers along an axis, one more than there are blocks: the spare one keeps neighboring lines apart."""
    return ((extent - 1) >> SHIFT) + 2


@triton.jit
def count_blocks(ranges_ptr, COLUMNS: tl.constexpr, SHIFTS: tl.constexpr):
    """Block numbers of the bounding box, 2^62 where there are more."""
    volume = tl.full((), 1, tl.int64)
    size = tl.full((), 1.0, tl.float64)
    for axis in tl.static_range(COLUMNS):
        _low, extent = axis_range(ranges_ptr, axis)
        count = axis_blocks(extent, (SHIFTS >> (4 * axis)) & 15)
        size *= count.to(tl.float64)
        volume *= count
    return tl.where(size < 4.6e18, volume, 0x4000000000000000)


@triton.jit
def spans_of(ranges_ptr, COLUMNS: tl.constexpr, SHIFTS: tl.constexpr):
    """Lowest value, number of values and block numbers of each column."""
    lows = ()  # type: tuple
    extents = ()  # type: tuple
    counts = ()  # type: tuple
    for axis in tl.static_range(COLUMNS):
        low, extent = axis_range(ranges_ptr, axis)
        lows = lows + (low,)
        extents = extents + (extent,)
        counts = counts + (axis_blocks(extent, (SHIFTS >> (4 * axis)) & 15),)
    return lows, extents, counts


@triton.jit
def add_axis(key, bit, inside, value, ranges_ptr, axis, SHIFT: tl.constexpr):
    """Extend a block key and a bit number by one axis; blocks outside of the box are not ``inside``."""
    low, extent = axis_range(ranges_ptr, axis)
    q = value - low
    block = q >> SHIFT
    inside = inside & (block >= 0) & (q < extent)
    key = key * axis_blocks(extent, SHIFT) + block
    return key, (bit << SHIFT) | (q & ((1 << SHIFT) - 1)).to(tl.int32), inside


@triton.jit
def load_rows(coords_ptr, row, live, COLUMNS: tl.constexpr):
    """The coordinates of some rows, column by column; -1 where there is no row."""
    values = ()  # type: tuple
    for axis in tl.static_range(COLUMNS):
        values = values + (tl.load(coords_ptr + row.to(tl.int64) * COLUMNS + axis, mask=live, other=-1),)
    return values


@triton.jit
def cells_of(values, live, lows, extents, counts, COLUMNS: tl.constexpr, SHIFTS: tl.constexpr):
    """Block keys and bit numbers of the cells at some coordinates, and which lie inside the box of `spans_of`."""
    key = values[0].to(tl.int64) * 0
    bit = values[0] * 0
    inside = live
    for axis in tl.static_range(COLUMNS):
        shift = (SHIFTS >> (4 * axis)) & 15
        q = values[axis].to(tl.int64) - lows[axis]
        block = q >> shift
        inside = inside & (block >= 0) & (q < extents[axis])
        key = key * counts[axis] + block
        bit = (bit << shift) | (q & ((1 << shift) - 1)).to(tl.int32)
    return key, bit, inside


@triton.jit
def first_slot(key, capacity, volume):
    """The slot where a block's search begins: its key where every block has a slot of its own, else a hash of it.

    In a table too large for the cache, eight keys that follow one another share a line of 128 bytes: neighbors along
    the last axis are read together.
    """
    shift = tl.where(capacity > MANY_SLOTS, 3, 0)
    mixed = ((key >> shift) * -7046029254386353131).to(tl.uint64, bitcast=True) >> 32
    groups = (capacity >> shift).to(tl.uint64)
    hashed = (((mixed * groups) >> 32).to(tl.int64) << shift) | (key & ((1 << shift) - 1))
    return tl.where(volume <= capacity, key, hashed).to(tl.int32)


@triton.jit
def before_second_slot(key, capacity):
    """The slot before the one where a search goes on whose first slot is another's; from there slot by slot.

    Another hash: rows of taken slots, which make a search long, are not walked along from their middle.
    """
    mixed = (key * -2960836687071854707).to(tl.uint64, bitcast=True) >> 32
    return ((mixed * capacity.to(tl.uint64)) >> 32).to(tl.int32) - 1


@triton.jit
def find(table_ptr, key, wanted, capacity, volume, PACK: tl.constexpr = 1):
    """The slot of each wanted key, and whether it is there; ``PACK`` keys of a thread go on together."""
    slot = tl.where(wanted, first_slot(key, capacity, volume), 0)
    seen = tl.load(table_ptr + 2 * slot, mask=wanted, other=0)
    going = wanted & (seen != 0) & (seen != key + 1)
    slot = tl.where(going, before_second_slot(key, capacity), slot)
    if not has_ptx():
        while tl.max(going.to(tl.int32)) > 0:
            slot = tl.where(going, slot + 1, slot)
            slot = tl.where(slot == capacity, 0, slot)
            seen = tl.where(going, tl.load(table_ptr + 2 * slot, mask=going, other=0), seen)
            going = going & (seen != 0) & (seen != key + 1)
        return slot, wanted & (seen == key + 1)
    else:
        CODE: tl.constexpr = FIND_FOUR if PACK == 4 else FIND_TWO if PACK == 2 else FIND_ON
        KINDS: tl.constexpr = OF_FOUR if PACK == 4 else OF_TWO if PACK == 2 else OF_ONE
        slot, later = tl.inline_asm_elementwise(
            CODE, KINDS, [table_ptr.to(tl.int64), key + 1, slot, going.to(tl.int32), capacity],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=PACK,
        )  # fmt: skip
        return slot, wanted & ((seen == key + 1) | (later != 0))


@triton.jit
def occupy(table_ptr, key, bit, wanted, capacity, volume):
    """Set the bits of rows in the words of their blocks; their slots, and who of them took a slot for its block.

    Neighbors of one block, a thread each, do so together: of sorted rows, two or three at a time.
    """
    if not has_ptx():
        slot = tl.where(wanted, first_slot(key, capacity, volume), 0)
        old = tl.atomic_cas(table_ptr + 2 * slot, tl.where(wanted, 0, -1).to(tl.int64), key + 1, sem="relaxed")
        known = wanted & (old == key + 1)  # -1 is never stored: lanes without a wish only read
        going = wanted & (old != 0) & (old != key + 1)
        slot = tl.where(going, before_second_slot(key, capacity), slot)
        while tl.max(going.to(tl.int32)) > 0:
            slot = tl.where(going, slot + 1, slot)
            slot = tl.where(slot == capacity, 0, slot)
            old = tl.atomic_cas(table_ptr + 2 * slot, tl.where(going, 0, -1).to(tl.int64), key + 1, sem="relaxed")
            known = known | (going & (old == key + 1))
            going = going & (old != 0) & (old != key + 1)
        flag = tl.full(bit.shape, 1, tl.int64) << bit.to(tl.int64)
        tl.atomic_or(table_ptr + 2 * slot + 1, flag, mask=wanted, sem="relaxed")
        return slot, wanted & ~known
    else:
        key += 1
        table = table_ptr.to(tl.int64)
        first, low, high = tl.inline_asm_elementwise(
            MEET, "=&r,=&r,=&r,l,r", [tl.where(wanted, key, 0), bit],
            dtype=(tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        claims = wanted & (first >= 32)
        slot = first_slot(key - 1, capacity, volume)
        old = tl.inline_asm_elementwise(
            CLAIM, "=&l,l,r,l,r", [table, slot, key, claims.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1
        )
        going = claims & (old != 0) & (old != key)
        slot = tl.where(going, before_second_slot(key - 1, capacity), slot)
        slot, later = tl.inline_asm_elementwise(
            CLAIM_ON, OF_ONE, [table, key, slot, going.to(tl.int32), capacity],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        word = (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.atomic_or(table_ptr + 2 * slot + 1, word, mask=claims, sem="relaxed")
        fresh = claims & (old != key) & (later == 0)
        slot = tl.inline_asm_elementwise(TELL, "=r,r,r", [slot, first], dtype=tl.int32, is_pure=False, pack=1)
        return slot, fresh


@triton.jit
def popcount(word):
    """Bits set in int64 words."""
    if not has_ptx():
        v = word.to(tl.uint64, bitcast=True)
        v = v - ((v >> 1) & 0x5555555555555555)
        v = (v & 0x3333333333333333) + ((v >> 2) & 0x3333333333333333)
        v = (v + (v >> 4)) & 0x0F0F0F0F0F0F0F0F
        v = v + (v >> 8)
        v = v + (v >> 16)
        v = v + (v >> 32)
        return (v & 127).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def popcount_low(word):
    """Bits set in int32 words that are not negative."""
    if not has_ptx():
        return popcount(word.to(tl.int64))
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pack_half(word, place):
    """The bits of a half block, from the lower half of int64 words, and its first place in the rows as one word."""
    return (word & 0xFFFFFFFF) | (place << 32)


@triton.jit
def rank_in_half(half, bit):
    """The place of the cell ``bit`` (0 to 31) of a half block: its first place and the number of cells before it."""
    return (half >> 32).to(tl.int32) + popcount_low(half.to(tl.int32) & ~(-1 << bit))


@triton.jit
def place_of(info_ptr, block, bit, live):
    """Where the row of a cell of a block stands in the list of rows."""
    half = tl.load(info_ptr + 2 * block + (bit >> 5), mask=live, other=0)
    return rank_in_half(half, (bit & 31).to(tl.int32))


@triton.jit
def below(bit):
    """The int64 word whose bits under ``bit`` are set."""
    one = tl.full(bit.shape, 1, tl.int64)
    return (one << bit.to(tl.int64)) - 1


@triton.jit
def bits_of_few(word):
    """Bits set in int32 words of four bits at most: cheaper than counting all 32."""
    return word - (word >> 1) - (word >> 2) - (word >> 3)


@triton.jit
def cell_size(ranges_ptr, COLUMNS: tl.constexpr, CELL_BITS: tl.constexpr, LEAST: tl.constexpr):
    """log2 of a cell's edge, and the bits that the batch item's number is moved up by."""
    _low, batches = axis_range(ranges_ptr, 0)
    longest = tl.full((), 1, tl.int64)
    for axis in tl.static_range(1, COLUMNS):
        _low, extent = axis_range(ranges_ptr, axis)
        longest = tl.maximum(longest, extent)
    batch_bits = tl.zeros((), tl.int32)
    shift = tl.zeros((), tl.int32)
    for bit in tl.static_range(CELL_BITS):
        batch_bits += (batches > (1 << bit)).to(tl.int32)
    each = (CELL_BITS - batch_bits) // (COLUMNS - 1)
    for bit in tl.static_range(32):
        shift += (longest > (tl.full((), 1, tl.int64) << (each + bit))).to(tl.int32)
    return tl.maximum(shift, LEAST), each * (COLUMNS - 1)


@triton.jit
def add_to_cell(cell, q, axis, shift, COLUMNS: tl.constexpr, CELL_BITS: tl.constexpr):
    """Put the bits of a place along one axis where the Morton code has them."""
    coarse = (q >> shift).to(tl.int32)
    RANK: tl.constexpr = COLUMNS - 1
    for bit in tl.static_range(CELL_BITS // RANK):
        cell |= ((coarse >> bit) & 1) << (RANK * bit + (RANK - axis))
    return cell


@triton.jit
def cell_of(
    keys_ptr, block, live, ranges_ptr, shift, above, COLUMNS: tl.constexpr, SHIFTS: tl.constexpr,
    CELL_BITS: tl.constexpr,
):  # fmt: skip
    """The cells of blocks, by their keys; ``shift`` and ``above`` are the `cell_size`."""
    key = tl.load(keys_ptr + block, mask=live, other=0)
    cell = block & 0
    for back in tl.static_range(COLUMNS - 1):
        axis = COLUMNS - 1 - back
        _low, extent = axis_range(ranges_ptr, axis)
        step = (SHIFTS >> (4 * axis)) & 15
        count = axis_blocks(extent, step)
        rest = key // count
        cell = add_to_cell(cell, (key - rest * count) << step, axis, shift, COLUMNS, CELL_BITS)
        key = rest
    return tl.minimum(cell | (key << above).to(tl.int32), (1 << CELL_BITS) - 1)
