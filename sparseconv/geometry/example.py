"""What grids of fixed size ask of the example that they are made like: found once, and kept with it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from sparseconv.geometry.ranges import Boundary, IndexRange

Grid = TypeVar("Grid")


@dataclass(frozen=True)
class Reach:
    """Which voxels were asked for: those that a window reaches from the example's, within a box or anywhere."""

    window: Hashable
    boundary: Boundary
    within: IndexRange | None
    to_fine: bool


@dataclass(frozen=True)
class Join:
    """Which pairs were asked for: those that a window joins with another example's voxels, or with its own (None)."""

    other: Hashable | None
    window: Hashable
    boundary: Boundary


@dataclass(eq=False)
class ExampleSizes(Generic[Grid]):
    """Grids, numbers of pairs and constants of one example."""

    reached: dict[Reach, Grid] = field(default_factory=dict)
    pairs: dict[Join, int] = field(default_factory=dict)
    ranges: dict[IndexRange, torch.Tensor] = field(default_factory=dict)  # extents on the device
    zeros: list[torch.Tensor] = field(default_factory=list)  # for graphs: a grid's barriers and fault flag each
