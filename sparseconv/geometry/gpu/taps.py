"""Windows as the GPU's kernels read them, and the look-up of one run of taps for many rows at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_probe import (
    add_axis,
    axis_blocks,
    axis_range,
    bits_of_few,
    count_blocks,
    find,
    rank_in_half,
)

Ints = tuple[int, ...]
#: bits of a row's tap mask that a narrow sort key holds
KEY_BITS = 31
#: in place of the number of blocks around a block: the edges are given as a table (in the place of coordinates)
GIVEN = -1
#: taps of a run at most: with a block's edge of 4, a run lies in two blocks
LONGEST_RUN = 4


@dataclass(frozen=True, eq=False)
class TapWindow:
    """Taps as the kernels read them: fine = stride * coarse + offsets[k], folded into a torus if there is one.

    Taps that follow one another in number and along the last axis make a run, which lies in at most two blocks: the 27
    taps of a 3 x 3 x 3 window are 9 runs of 3.

        data = [stride, start, size] of each axis (size 0: no torus),
               [first tap, length, offset of the first tap on each axis] of each run
    """

    data: torch.Tensor  # int32 on the device
    stride: Ints
    offsets: tuple[Ints, ...]
    run_lengths: Ints
    periodic: bool
    reach: int  # the largest offset along any axis; -1 where the window is no neighborhood (stride or torus)

    @cached_property
    def num_runs(self) -> int:
        return len(self.run_lengths)

    @cached_property
    def run_length(self) -> int:
        """Taps of the longest run."""
        return max(self.run_lengths, default=1)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether tap K - 1 - k is the mirror image of tap k: edges between the rows of one grid come in pairs."""
        mirrored = all(
            all(a == -b for a, b in zip(one, other)) for one, other in zip(self.offsets, reversed(self.offsets))
        )
        return mirrored and self.reach >= 0

    @cached_property
    def is_cube(self) -> bool:
        """Whether the taps are the 27 cells around a voxel, in their usual order."""
        return self.reach == 1 and self.offsets == tuple(itertools.product((-1, 0, 1), repeat=3))

    @cached_property
    def meets_once(self) -> bool:
        """Whether a fine row meets one tap at most: no two offsets are a multiple of the stride apart."""
        places = {tuple(o % s for o, s in zip(offset, self.stride)) for offset in self.offsets}
        return len(places) == self.num_taps

    @cached_property
    def runs_of_half(self) -> int:
        """Runs with a tap in the first half of the window or in its center."""
        middle, seen = (self.num_taps + 1) // 2, 0
        runs = self.run_lengths
        for count, length in enumerate(runs):
            if seen >= middle:
                return count
            seen += length
        return len(runs)

    @cached_property
    def num_taps(self) -> int:
        return len(self.offsets)

    @cached_property
    def all_taps(self) -> tuple[Ints]:
        """All taps in one group."""
        return (tuple(range(self.num_taps)),)

    @cached_property
    def key_bits(self) -> int:
        """Bits of a sort key that tell rows apart: one more than taps, for rows without a tap.

        A row of the cube has its center, so that no rank is all ones but that of rows without a tap.
        """
        return self.num_taps if self.is_cube else min(KEY_BITS, self.num_taps + 1)

    @cached_property
    def key_words(self) -> torch.Tensor:
        """The `key_words` of the taps, of which there are at most 31."""
        return key_words(self.offsets, self.data.device)


@lru_cache(maxsize=512)
def encode_window(
    offsets: tuple[Ints, ...],
    stride: Ints,
    torus: tuple[Ints, Ints] | None,
    device: torch.device,
    single: bool = False,
) -> TapWindow:
    """The taps ``offsets`` (K, D) for a device; ``torus`` is (start, size) an axis; ``single``: every tap a run."""
    rank = len(stride)
    longest = 1 if single or torus is not None else LONGEST_RUN
    runs: list[list[int]] = []
    for tap, offset in enumerate(offsets):
        if runs and runs[-1][1] < longest:
            before = offsets[tap - 1]
            if before[:-1] == offset[:-1] and before[-1] + 1 == offset[-1]:
                runs[-1][1] += 1
                continue
        runs.append([tap, 1, *offset])
    start, size = torus or ((0,) * rank, (0,) * rank)
    data = [v for axis in zip(stride, start, size) for v in axis] + [v for run in runs for v in run]
    if max(map(abs, data), default=0) >= 2**31:
        raise ValueError(f"strides, offsets and extents must fit in 32 bits; got {max(map(abs, data))}")
    plain = torus is None and all(s == 1 for s in stride)
    return TapWindow(
        torch.tensor(data, dtype=torch.int32).to(device),
        stride,
        offsets,
        tuple(run[1] for run in runs),
        torus is not None,
        max((abs(v) for offset in offsets for v in offset), default=0) if plain else -1,
    )


@lru_cache(maxsize=512)
def tap_order(offsets: tuple[Ints, ...]) -> Ints:
    """Taps from the farthest from the window's center to the nearest: a far tap (a corner) is the rarest."""
    if not offsets:
        return ()
    centre = [min(column) + max(column) for column in zip(*offsets)]
    distance = [sum(abs(2 * o - c) for o, c in zip(offset, centre)) for offset in offsets]
    return tuple(sorted(range(len(offsets)), key=lambda tap: -distance[tap]))


@lru_cache(maxsize=512)
def key_words(offsets: tuple[Ints, ...], device: torch.device) -> torch.Tensor:
    """(1024,) int32: 256 words for each byte of a mask of up to 31 taps, the xor of whose four words is its Gray rank.

    Putting bits in the `tap_order`, from the most to the least significant one, and the rank are linear over xor.
    """
    flips = {tap: (1 << (len(offsets) - place)) - 1 for place, tap in enumerate(tap_order(offsets))}
    table = []
    for byte in range(4):
        words = [0]
        for bit in range(8):  # the words of the values with this bit are those without it, with its flips
            words += [word ^ flips.get(8 * byte + bit, 0) for word in words]
        table += words
    return torch.tensor(table, dtype=torch.int32).to(device)


@cache
def bit_places(shifts: Ints) -> int:
    """Where each axis's bits begin in a cell's bit number, four bits per axis."""
    return sum(sum(shifts[axis + 1 :]) << (4 * axis) for axis in range(len(shifts)))


# ---- kernels


@triton.jit
def look_around(
    entry, live, run_ptr, length, info_ptr, around_ptr,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, SIDES: tl.constexpr,
):  # fmt: skip
    """The cells of a run near rows of the table itself, by the numbers of the blocks around each block.

    Returns ``seen``, a bit for each tap of the run; ``near`` and ``far``, where the rows of its cells in the first and
    in the second block begin (the latter less the cells found in the first); and the run's first ``cell`` in its line.
    """
    SHIFT: tl.constexpr = (SHIFTS >> (4 * RANK)) & 15
    EDGE: tl.constexpr = 1 << SHIFT
    bit = (entry & 63).to(tl.int32)
    side = bit & 0
    line = bit & 0
    cell = bit & 0
    last = bit & 0
    for axis in tl.static_range(RANK):
        shift = (SHIFTS >> (4 * (axis + 1))) & 15
        place = (PLACES >> (4 * (axis + 1))) & 15
        moved = ((bit >> place) & ((1 << shift) - 1)) + tl.load(run_ptr + 2 + axis)
        last = moved >> shift
        side = side * 3 + last + 1
        cell = moved & ((1 << shift) - 1)
        if axis < RANK - 1:
            line |= cell << place
    blocks_ptr = around_ptr + (entry >> 6) * SIDES + side
    block = tl.load(blocks_ptr, mask=live, other=-1)
    following = tl.load(blocks_ptr + 1, mask=live & (cell + length > EDGE) & (last < 1), other=-1)
    return look_into(block, following, line, cell, length, info_ptr, EDGE)


@triton.jit
def look_into(block, following, line, cell, length, info_ptr, EDGE: tl.constexpr):
    """The cells of a run in a block and in the one that follows it along the last axis; -1 is no block."""
    near_half = tl.load(info_ptr + 2 * block + (line >> 5), mask=block >= 0, other=0)
    far_half = tl.load(info_ptr + 2 * following + (line >> 5), mask=following >= 0, other=0)
    return look_into_halves(near_half, far_half, line & 31, cell, length, EDGE)


@triton.jit
def look_into_halves(near_half, far_half, line, cell, length, EDGE: tl.constexpr):
    """`look_into` for the packed halves of the two blocks; ``line`` is the first bit of the run's line in a half."""
    cells = (near_half.to(tl.int32) >> line) & ((1 << EDGE) - 1)
    next_cells = (far_half.to(tl.int32) >> line) & ((1 << EDGE) - 1)
    seen = ((cells | (next_cells << EDGE)) >> cell) & ((1 << length) - 1)
    far = rank_in_half(far_half, line) - bits_of_few(seen & ~(-1 << (EDGE - cell)))
    return seen, rank_in_half(near_half, line + cell), far, cell


@triton.jit
def look_up(
    row, live, run_ptr, length, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, window_ptr, capacity, volume,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PERIODIC: tl.constexpr,
):  # fmt: skip
    """The cells of a run near target rows with any coordinates, by their keys; returns what `look_around` does."""
    SHIFT: tl.constexpr = (SHIFTS >> (4 * RANK)) & 15
    EDGE: tl.constexpr = 1 << SHIFT
    place = coords_ptr + row.to(tl.int64) * (RANK + 1)
    key = row.to(tl.int64) * 0
    bit = row * 0
    inside = live
    batch = tl.load(place, mask=live, other=0).to(tl.int64)
    key, bit, inside = add_axis(key, bit, inside, batch, ranges_ptr, 0, 0)
    fine = key
    for axis in tl.static_range(RANK):
        stride = tl.load(window_ptr + 3 * axis).to(tl.int64)
        offset = tl.load(run_ptr + 2 + axis).to(tl.int64)
        fine = tl.load(place + 1 + axis, mask=live, other=0).to(tl.int64) * stride + offset
        if PERIODIC:
            low = tl.load(window_ptr + 3 * axis + 1).to(tl.int64)
            size = tl.load(window_ptr + 3 * axis + 2).to(tl.int64)
            turned = (fine - low) % size
            fine = low + tl.where(turned < 0, turned + size, turned)
        if axis < RANK - 1:
            key, bit, inside = add_axis(key, bit, inside, fine, ranges_ptr, axis + 1, (SHIFTS >> (4 * (axis + 1))) & 15)
    low, extent = axis_range(ranges_ptr, RANK)
    q = fine - low
    block = q >> SHIFT
    count = axis_blocks(extent, SHIFT)
    key = key * count + block
    slot, hit = find(table_ptr, key, inside & (block >= 0) & (block < count - 1), capacity, volume)
    cell = (q & (EDGE - 1)).to(tl.int32)
    crosses = inside & (block >= -1) & (block < count - 2) & (cell + length > EDGE)
    next_slot, next_hit = find(table_ptr, key + 1, crosses, capacity, volume)
    number = tl.load(ids_ptr + slot, mask=hit, other=-1)
    following = tl.load(ids_ptr + next_slot, mask=next_hit, other=-1)
    return look_into(number.to(tl.int64), following.to(tl.int64), bit << SHIFT, cell, length, info_ptr, EDGE)


@triton.jit
def entry_of(row, live, entries_ptr, SIDES: tl.constexpr):
    """64 block + bit of rows of the table itself; what stands for it elsewhere is not looked at."""
    if SIDES > 0:
        return tl.load(entries_ptr + row, mask=live, other=-1)
    else:
        return row


@triton.jit
def look(
    row, entry, live, run_ptr, length,
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, around_ptr, window_ptr, capacity,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr,
):  # fmt: skip
    """What a run of taps sees from rows: around their own blocks (SIDES > 0), by keys, or in a given table (< 0)."""
    if SIDES > 0:
        return look_around(
            entry, live & (entry >= 0), run_ptr, length, info_ptr, around_ptr, RANK, SHIFTS, PLACES, SIDES
        )
    elif SIDES < 0:
        found = tl.load(coords_ptr + tl.load(run_ptr).to(tl.int64) * capacity + row, mask=live, other=-1)
        return (found >= 0).to(tl.int32) & length, found, found, row
    else:
        volume = count_blocks(ranges_ptr, RANK + 1, SHIFTS)
        return look_up(
            row, live, run_ptr, length, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, window_ptr, capacity,
            volume, RANK, SHIFTS, PERIODIC,
        )  # fmt: skip


@triton.jit
def take(rows_ptr, seen, near, far, cell, INDEX: tl.constexpr, EDGE: tl.constexpr, SIDES: tl.constexpr):
    """The row of one cell of a run, -1 if it is empty; both cursors move on past it."""
    there = ((seen >> INDEX) & 1) != 0
    if SIDES >= 0:  # else in a given table
        found = tl.load(rows_ptr + tl.where(cell + INDEX < EDGE, near, far), mask=there, other=-1)
    else:
        found = tl.where(there, near, -1)
    return found, near + there.to(tl.int32), far + there.to(tl.int32)
