"""The stages of a kernel map in plain torch and numpy, slow and obvious: what the kernels are compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from sparseconv.geometry.gpu.lists import HALF_BIT, LOOKAHEAD, SLOT_ALIGNMENT, Jobs, Schedule, tap_significance
from sparseconv.geometry.gpu.row_order import CELL_BITS, LEAST_SHIFT

#: bits of a row's tap mask that one sort key holds
WORD_BITS = 62


def lookup_torch(source: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    """What `lookup` finds, by comparing every row with every row."""
    same = (coords[:, None] == source[None]).all(-1)
    return torch.where(same.any(1), same.int().argmax(1), -1).int()


def find_neighbors_torch(
    source: torch.Tensor,
    coords: torch.Tensor,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
    torus: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.Tensor:
    """(K, N_out): `neighbor_table`, by comparing every row with every row."""
    found = torch.empty(len(offsets), len(coords), dtype=torch.int32)
    for tap, offset in enumerate(offsets):
        fine = coords.long() * torch.tensor([1, *stride]) + torch.tensor([0, *offset])
        if torus is not None:
            start, size = (torch.tensor(v) for v in torus)
            fine[:, 1:] = (fine[:, 1:] - start) % size + start
        same = (fine[:, None] == source[None].long()).all(-1)
        found[tap] = torch.where(same.any(1), same.int().argmax(1), -1).int()
    return found


def chunks_torch(coords: torch.Tensor, chunk_rows: int) -> torch.Tensor:
    """(N,) int64: the run of each row, as `chunk_keys` numbers them."""
    q = coords.long() - coords.amin(0)
    batches, longest, rank = int(q[:, 0].max()) + 1, int(q[:, 1:].max()) + 1, coords.shape[1] - 1
    each = (CELL_BITS - (batches - 1).bit_length()) // rank
    coarse = q[:, 1:] >> max((longest - 1).bit_length() - each, LEAST_SHIFT)
    cell = q[:, 0] << (rank * each)
    for axis in range(rank):
        for bit in range(CELL_BITS // rank):
            cell |= ((coarse[:, axis] >> bit) & 1) << (rank * bit + rank - 1 - axis)
    cell.clamp_(max=2**CELL_BITS - 1)
    rows = torch.bincount(cell, minlength=2**CELL_BITS)
    return ((rows.cumsum(0) - rows) // chunk_rows)[cell]


def pairs_torch(neighbors: torch.Tensor, mirrored: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """in_rows, out_rows and tap offsets of a table (K, N_out), as `pairs_of` orders them.

    ``mirrored``: the table is one of a symmetric window between the rows of one grid.
    """
    live = neighbors >= 0
    offsets = torch.nn.functional.pad(live.sum(1).cumsum(0), (1, 0))
    in_rows, out_rows = neighbors[live], live.nonzero()[:, 1].int()
    if mirrored:
        taps = len(neighbors)
        parts = [(in_rows[a:b], out_rows[a:b]) for a, b in itertools.pairwise(offsets.tolist())]
        turned = [parts[taps - 1 - tap][::-1] if tap >= (taps + 1) // 2 else parts[tap] for tap in range(taps)]
        in_rows, out_rows = (torch.cat(side) for side in zip(*turned))
    return in_rows, out_rows, offsets


def gray_rank(neighbors: torch.Tensor, taps: Sequence[int]) -> list[torch.Tensor]:
    """The rank in the Gray sequence of each row's tap mask, as int64 words, most significant first.

    ``taps`` are given from the most to the least significant bit. Two masks next to each other in the sequence differ
    in one bit, so sorted rows change their taps one at a time. Rows without a live tap come last.
    """
    words: list[torch.Tensor] = []
    carry: torch.Tensor | None = None
    alive = torch.zeros(neighbors.shape[1], dtype=torch.bool, device=neighbors.device)
    for start in range(0, len(taps), WORD_BITS):
        part = taps[start : start + WORD_BITS]
        word = torch.zeros(neighbors.shape[1], dtype=torch.int64, device=neighbors.device)
        for bit, tap in enumerate(reversed(part)):
            live = neighbors[tap] >= 0
            word |= live.to(torch.int64) << bit
            alive |= live
        for shift in (1, 2, 4, 8, 16, 32):  # prefix xor: Gray code to its rank
            word = word ^ (word >> shift)
        if carry is not None:
            word = word ^ (-carry & ((1 << len(part)) - 1))
        carry = word & 1
        words.append(word)
    if words:
        words[0] = torch.where(alive, words[0], 1 << WORD_BITS)
    return words


def row_order(
    neighbors: torch.Tensor,
    taps: Sequence[int],
    base_order: torch.Tensor | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Rows sorted by the Gray rank of their masks, inside chunks of ``chunk_rows`` rows of the base order if given."""
    num_rows = neighbors.shape[1]
    order = torch.arange(num_rows, device=neighbors.device) if base_order is None else base_order.long()
    keys = gray_rank(neighbors, taps)
    if chunk_rows is not None and num_rows > chunk_rows:
        chunk = torch.empty_like(order)
        chunk[order] = torch.arange(num_rows, device=neighbors.device) // chunk_rows
        if len(keys) == 1 and len(taps) + 1 + math.ceil(math.log2(num_rows / chunk_rows + 1)) < 63:
            keys = [(chunk << (len(taps) + 1)) | keys[0].clamp(max=1 << len(taps))]
        else:
            keys = [chunk, *keys]
    for key in reversed(keys):
        order = order[torch.sort(key[order], stable=True).indices]
    return order


def tile_lists(
    table: torch.Tensor, block_m: int, row_taps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, table rows, weight taps and launch order of the tiles of a table; ``row_taps`` (G, R), -1 for none."""
    num_rows, num_slots = table.shape[0] - 1, table.shape[1]
    num_tiles = num_slots // block_m
    slots = table[:-1].view(num_rows, num_tiles, block_m) >= 0
    first, second = (half.any(dim=2).t() for half in (slots[..., : block_m // 2], slots[..., block_m // 2 :]))  # (T, R)
    live = first | second
    counts = live.sum(dim=1, dtype=torch.int32)
    width = num_rows + LOOKAHEAD
    position = torch.where(live, live.cumsum(dim=1) - 1, width - 1)  # dead taps meet in the last column
    rows = torch.arange(num_rows, dtype=torch.int32, device=table.device) | (first.int() + 2 * second.int()) << HALF_BIT
    taps = row_taps.clamp(min=0).repeat_interleave(num_tiles // row_taps.shape[0], dim=0)
    tile_rows = torch.full((num_tiles, width), num_rows, dtype=torch.int32, device=table.device)
    tile_taps = torch.zeros((num_tiles, width), dtype=torch.int32, device=table.device)
    tile_rows.scatter_(1, position, rows)
    tile_taps.scatter_(1, position, taps)
    tile_rows[:, -1] = num_rows
    tile_taps[:, -1] = 0
    order = torch.sort(counts, descending=True, stable=True).indices.to(torch.int32)
    return counts, tile_rows, tile_taps, order


def build_schedule(
    neighbors: torch.Tensor,
    num_taps: int,
    block_m: int,
    *,
    base_order: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    significance: Sequence[int] | None = None,
) -> Schedule:
    """Build a schedule in plain torch operations, without waiting for the device.

    Args:
        neighbors: (K, N_out) int32, the map's table.
        num_taps: K.
        block_m: rows of a tile; a power of two that divides 256.
        base_order: (N_out,) a permutation of the rows that keeps neighbours close (a Morton order); equal masks stay
            in this order. Default: the rows as they come.
        chunk_rows: sort by mask only inside runs of this many rows of the base order, for locality.
        groups: taps cut into groups with a row order of their own each; each row then has one slot a group.
        significance: taps from the most to the least significant bit of the mask; default ``tap_significance``.

    Returns:
        The schedule. Slots are padded to a multiple of 256 in each group.

    Example::

        schedule = build_schedule(kernel_map.neighbors, kernel_map.num_taps, block_m=128)
    """
    if block_m < 1 or SLOT_ALIGNMENT % block_m:
        raise ValueError(f"block_m must divide {SLOT_ALIGNMENT}, got {block_m}")
    if neighbors.ndim != 2 or neighbors.shape[0] != num_taps:
        raise ValueError(f"neighbors must have shape (K={num_taps}, N_out), got {tuple(neighbors.shape)}")
    device = neighbors.device
    num_out = neighbors.shape[1]
    ranking = tuple(significance) if significance is not None else tap_significance(num_taps)
    parts = [tuple(range(num_taps))] if groups is None else [tuple(group) for group in groups]
    if sorted(tap for part in parts for tap in part) != list(range(num_taps)):
        raise ValueError(f"groups must hold each of the {num_taps} taps exactly once, got {parts}")
    num_rows = max(map(len, parts), default=0)
    padded = -(-num_out // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    table = torch.full((num_rows + 1, len(parts) * padded), -1, dtype=torch.int32, device=device)
    out_rows = torch.full((len(parts) * padded,), -1, dtype=torch.int32, device=device)
    row_taps = torch.full((len(parts), num_rows), -1, dtype=torch.int32)
    slots = torch.full((len(parts), num_out), -1, dtype=torch.int32, device=device) if len(parts) > 1 else None
    for index, part in enumerate(parts):
        order = row_order(neighbors, [tap for tap in ranking if tap in part], base_order, chunk_rows)
        begin = index * padded
        alive = torch.zeros(num_out, dtype=torch.bool, device=device)
        for row, tap in enumerate(part):
            torch.index_select(neighbors[tap], 0, order, out=table[row, begin : begin + num_out])
            alive |= table[row, begin : begin + num_out] >= 0
        row_taps[index, : len(part)] = torch.tensor(part, dtype=torch.int32)
        span = out_rows[begin : begin + num_out]
        span.copy_(order)
        if slots is not None:
            place = torch.arange(begin, begin + num_out, dtype=torch.int32, device=device)
            slots[index, order] = torch.where(alive, place, -1)
    if device.type == "cuda":
        row_taps = row_taps.pin_memory()
    lists = tile_lists(table, block_m, row_taps.to(device, non_blocking=True))
    return Schedule(block_m, table, out_rows, *lists, slots=slots)


def cut_jobs(tap_counts: Sequence[int], count: int, quantum: int, halved: bool = False) -> Jobs:
    """Cut pairs ordered by tap into ``count`` jobs, the longest of them as short as that allows.

    Every tap has at least one job, empty if the tap is (its gradient is then written as zero), so there are at least
    as many jobs as taps. Lengths are multiples of ``quantum``: all programs of a launch finish together. Jobs run in
    the order of how far into their tap they begin.
    """
    counts = np.asarray(tap_counts, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    low, high = 1, max(1, -(-int(counts.max(initial=0)) // quantum))  # in quanta: too short or just right, long enough
    while low < high:
        middle = (low + high) // 2
        if np.maximum(1, -(-counts // (middle * quantum))).sum() <= count:
            high = middle
        else:
            low = middle + 1
    parts = np.maximum(1, -(-counts // (high * quantum)))
    tap_jobs = np.concatenate([[0], np.cumsum(parts)])
    tap = np.repeat(np.arange(len(counts)), parts)
    index = np.arange(tap_jobs[-1]) - tap_jobs[tap]
    share = -(-counts // (parts * quantum)) * quantum  # a tap's pairs spread evenly over its jobs
    begin = np.minimum(starts[tap] + index * share[tap], starts[tap + 1])
    end = np.minimum(begin + share[tap], starts[tap + 1])
    order = np.lexsort((tap, index / parts[tap]))
    if halved:
        moved, turned = starts[len(counts) - 1 - tap] - starts[tap], tap > (len(counts) - 1) // 2
        begin, end = (np.where(turned, -1 - (side + moved), side) for side in (begin, end))
    empty = count - len(tap)
    return Jobs(
        torch.from_numpy(np.pad(begin, (0, empty))),
        torch.from_numpy(np.pad(end, (0, empty))),
        torch.from_numpy(np.concatenate([order, np.arange(len(tap), count)])).int(),
        torch.from_numpy(tap_jobs).int(),
    )
