"""Coordinates -> 64-bit keys -> rows."""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from sparseconv.geometry.ranges import IndexRange, Ints

KEY_LIMIT = 2**63


class KeySpace:
    """Row-major numbers for the points of a box of coordinate columns, batch first: coordinates <-> int64 keys.

        key(c) = ((c0 - low0) * size1 + (c1 - low1)) * size2 + ...

    Keys order points lexicographically. An empty axis counts as one of size 1.

    Raises:
        ValueError: the box has 2^63 points or more.
    """

    def __init__(self, box: IndexRange) -> None:
        self.low: Ints = box.start
        self.size: Ints = tuple([max(1, end - start) for start, end in zip(box.start, box.end)])
        volume = math.prod(self.size)
        if volume >= KEY_LIMIT:
            raise ValueError(
                f"the extent {' x '.join(map(str, self.size))} (batch first) has {volume:.3g} cells, but 64-bit keys "
                "number fewer than 2^63: remove far-off outliers, use larger voxels, or split the scene"
            )
        #: by how much a step along each axis changes a key, the batch first
        self.factors: Ints = tuple(accumulate(self.size[:0:-1], int.__mul__, initial=1))[::-1]

    def contains(self, coords: torch.Tensor) -> torch.Tensor:
        """Which rows of coords (M, 1+D) have a key, (M,) bool."""
        inside = torch.ones(coords.shape[0], dtype=torch.bool, device=coords.device)
        for axis, (low, size) in enumerate(zip(self.low, self.size)):
            column = coords[:, axis].long()  # a narrow one is compared with a bound that wraps round
            inside &= (column >= low) & (column < low + size)
        return inside

    def keys(self, coords: torch.Tensor, narrow: bool = False) -> torch.Tensor:
        """Coords (M, 1+D) that lie inside -> keys (M,) int64; ``narrow``: int32 where that is enough.

        Of coords with fewer columns, those before have the value of their lows. What overflows on the way comes back
        when the lows are taken off: sums wrap, and the key fits.
        """
        bits = 32 if narrow and math.prod(self.size) < 2**31 else 64
        count = coords.shape[1]
        first, *others = (coords.int() if bits == 32 else coords).unbind(1)
        keys, lowest = first.to(torch.int32 if bits == 32 else torch.int64, copy=True), self.low[-count]
        for column, low, size in zip(others, self.low[1 - count :], self.size[1 - count :]):
            keys = torch.add(column, keys, alpha=size)
            lowest = lowest * size + low
        return keys.sub_((lowest + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1))

    def coords(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys (M,) -> coords (M, 1+D) int32."""
        columns = []
        for low, size in zip(reversed(self.low), reversed(self.size)):
            columns.append((keys % size + low).int())
            keys = torch.div(keys, size, rounding_mode="floor")
        return torch.stack(columns[::-1], 1)


class SortedTable:
    """Keys -> rows by binary search in the sorted keys; works on every torch device.

    ``keys`` (N,) int64 in any order, unique: see `first_duplicate`.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.rows = torch.sort(keys, stable=True)

    def first_duplicate(self) -> tuple[int, int] | None:
        """The two rows of the first key that occurs twice, or None."""
        same = self.keys[1:] == self.keys[:-1]
        if not bool(same.any()):
            return None
        at = int(same.int().argmax())
        return int(self.rows[at]), int(self.rows[at + 1])

    def first_rows(self) -> torch.Tensor:
        """The first row of each key, ascending."""
        first = torch.ones_like(self.keys, dtype=torch.bool)
        first[1:] = self.keys[1:] != self.keys[:-1]
        return self.rows[first].sort().values

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Rows (M,) int64 of keys (M,), -1 where absent."""
        if self.keys.numel() == 0:
            return torch.full_like(keys, -1)
        at = torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)
        return torch.where(self.keys[at] == keys, self.rows[at], -1)
