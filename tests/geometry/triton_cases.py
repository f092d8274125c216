"""Rows and windows that the kernels of the GPU geometry are tested with, on the CPU's interpreter and on a card."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

Ints = tuple[int, ...]


def box(low: int, high: int, rank: int) -> tuple[Ints, ...]:
    return tuple(itertools.product(range(low, high), repeat=rank))


@dataclass(frozen=True)
class Case:
    name: str
    rank: int
    offsets: tuple[Ints, ...]
    stride: int = 1
    torus: tuple[Ints, Ints] | None = None
    rows: int = 60
    spread: int = 4

    def source(self, seed: int = 0, device: str = "cpu") -> torch.Tensor:
        """Distinct rows in a random order, some coordinates negative, three batch items of which one is empty."""
        generator = torch.Generator().manual_seed(seed)
        coords = torch.randint(-self.spread, self.spread, (4 * self.rows, 1 + self.rank), generator=generator)
        coords[:, 0] = 2 * (coords[:, 0] > 0)
        coords = torch.unique(coords, dim=0)
        return coords[torch.randperm(len(coords), generator=generator)][: self.rows].int().to(device)

    def target(self, source: torch.Tensor) -> torch.Tensor:
        """The source itself at stride 1, else the coarse rows that hold it and one that sees nothing."""
        if self.stride == 1:
            return source
        coarse = torch.cat([source[:, :1], source[:, 1:] // self.stride], 1)
        return torch.unique(torch.cat([coarse, coarse.new_full((1, coarse.shape[1]), 99)]), dim=0).contiguous()


CASES = [
    Case("line of 3", 1, box(-1, 2, 1)),
    Case("even plane", 2, box(0, 2, 2)),
    Case("strided plane", 2, box(-1, 2, 2), stride=2),
    Case("cube of 3", 3, box(-1, 2, 3), rows=150),
    Case("strided cube of 2", 3, box(0, 2, 3), stride=2),
    Case("cross with far arms", 3, ((0, 0, 0), (0, 0, 5), (0, -5, 0), (3, 0, 0), (0, 0, 1))),
    Case("torus", 3, box(-1, 2, 3), torus=((-4, -4, -4), (8, 8, 8))),
    Case("rank 4", 4, box(0, 2, 4), spread=3),
    Case("wide apart", 3, ((0, 0, 0), (0, 0, 1), (-1, 0, 0)), spread=2**18),
    Case("one row", 3, box(-1, 2, 3), rows=1),
]
SLOW_CASES = [Case("cube of 5", 3, box(-2, 3, 3), rows=300), Case("window of 81", 4, box(-1, 2, 4), rows=100)]
