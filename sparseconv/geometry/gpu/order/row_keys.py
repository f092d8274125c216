"""Sort keys of rows: the Gray ranks of their masks, below the numbers of runs of rows that lie side by side.

    in:  a `WindowSearch`, taps in groups, and their significance: far taps first
    out: keys (G, N_out), int32 or int64

Of three taps, far ones first (0, 2, 1), a row with taps 1 and 2 has the code 0b011, the third of the Gray sequence
000, 001, 011, 010, 110, 111, 101, 100: its key is 2. Taps 0 and 1 are 0b101, key 6; tap 1 alone is 0b001, key 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from sparseconv.geometry.gpu.order.morton_runs import chunk_keys
from sparseconv.geometry.gpu.window.found import SORT_KEYS, WindowSearch
from sparseconv.geometry.gpu.window.neighbor_table import PLANE_KEYS, PLANE_KEYS_WIDE, neighbor_table
from sparseconv.geometry.gpu.window.passes import launch_masks
from sparseconv.geometry.gpu.window.taps import KEY_BITS, key_words, tap_order
from sparseconv.gpu.launcher import ceil_div, pointer

#: key bits of windows with more than 31 taps: the most significant taps
WIDE_KEY_BITS = 62


def row_keys(
    search: WindowSearch,
    parts: tuple[tuple[int, ...], ...],
    significance: Sequence[int] | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """(G, N_out) sort keys, not negative: the Gray rank of each row's mask of the taps of a group.

    Rows sorted by them change taps one at a time; rows without a tap come last. ``chunk_rows`` puts the number of the
    row's run of about so many rows above the rank, which then loses its last bits: runs of neighbours in space, see
    `chunk_keys`; of rows as they come where the target rows are not the table's. int64 for groups of more than 31 taps.
    """
    n, taps = search.coords.shape[0], search.window.num_taps
    device = search.coords.device
    wide = max(map(len, parts), default=0) > KEY_BITS
    key_bits = WIDE_KEY_BITS if wide else KEY_BITS
    chunk, room, lost = key_room(n, max(map(len, parts), default=0), chunk_rows, key_bits)
    plain = significance is None and parts == (tuple(range(taps)),)
    if room < key_bits and plain and not wide and search.is_local and search.table is not None:
        return chunk_keys(search.table, search.found[1][SORT_KEYS], chunk, room, lost)
    ranked = tap_order(search.window.offsets) if significance is None else tuple(significance)
    keys = torch.empty(len(parts), n, dtype=torch.int64 if wide else torch.int32, device=device)
    if n and taps and taps <= KEY_BITS and search.table is not None:
        search.kept.append(words := key_words(ranked, parts, device))
        launch_masks(search, words, pointer(keys), None, chunk, room, lost, len(parts))
    elif n and taps:
        neighbors = neighbor_table(search)
        search.kept.append(bits := _key_bits(ranked, parts, WIDE_KEY_BITS if wide else KEY_BITS, device))
        args = (pointer(neighbors), pointer(bits), pointer(keys), n, taps, chunk, room, lost)
        launcher = PLANE_KEYS_WIDE if wide else PLANE_KEYS
        launcher(device, (ceil_div(n, 128), len(parts)), args, (wide, 128))
    return keys


def key_room(n: int, taps: int, chunk_rows: int | None, key_bits: int) -> tuple[int, int, int]:
    """Rows of a run, the bits that its number leaves the Gray rank of so many taps, and how many that one loses."""
    if chunk_rows is None or n <= chunk_rows:
        return max(n, 1), key_bits, max(0, min(taps, WIDE_KEY_BITS) - key_bits)
    room = key_bits - (-(-n // chunk_rows) - 1).bit_length()
    return chunk_rows, room, max(0, min(taps, WIDE_KEY_BITS) - room)


@lru_cache(maxsize=512)
def _key_bits(
    ranked: tuple[int, ...], parts: tuple[tuple[int, ...], ...], most: int, device: torch.device
) -> torch.Tensor:
    """(G, K) int32: the bit of each tap in the keys of each group, -1 for none; of ``most`` taps of a group."""
    bits = torch.full((len(parts), len(ranked)), -1, dtype=torch.int32)
    for index, part in enumerate(parts):
        kept = [tap for tap in ranked if tap in part][:most]
        for place, tap in enumerate(kept):
            bits[index, tap] = len(kept) - 1 - place
    return bits.to(device)
