"""The work list of the implicit GEMM: rows in tiles of like taps, and for each tile the taps that live in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Schedule:
    """A kernel map's rows cut into T tiles of ``block_m`` rows; NP = T * block_m slots, R tap rows in the table.

    Rows are permuted so that the rows of a tile share most of their taps; a tile then runs over its own list of live
    taps only. Where taps are split in groups, a row has a slot in each group in which it has a live tap.
    """

    block_m: int
    neighbors: (
        torch.Tensor
    )  # (R + 1, NP) int32: input row of a slot through a table row; -1 absent; the last row is all -1
    out_rows: torch.Tensor  # (NP,) int32: the output row of a slot; -1 for padding
    tile_counts: torch.Tensor  # (T,) int32: live taps of a tile
    tile_rows: torch.Tensor  # (T, S) int32: the table rows of a tile's live taps; R beyond tile_counts; S >= R + 4
    tile_taps: torch.Tensor  # (T, S) int32: the weight tap of each of them; 0 beyond tile_counts
    tile_order: torch.Tensor  # (T,) int32: the order of launch, most taps first

    @property
    def num_tiles(self) -> int:
        return self.tile_counts.shape[0]
