"""What grids of fixed size ask of the example that they are made like: found once, and kept with it."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from sparseconv.geometry.ranges import Boundary, IndexRange

Grid = TypeVar("Grid")

#: places at which the programs of a launch meet, and one more
BARRIERS = 16
#: grids of one example in graphs whose barriers need no launch
CAPTURES = 256


@dataclass(eq=False)
class ExampleSizes(Generic[Grid]):
    """Grids, numbers of pairs and constants of one example."""

    #: what a window reaches: by (window, boundary, box or None, whether to fine voxels)
    reached: dict[tuple[Hashable, Boundary, IndexRange | None, bool], Grid] = field(default_factory=dict)
    #: pairs that a window joins: by (another example whose voxels are the coarse ones or None, window, boundary)
    pairs: dict[tuple[Hashable, Hashable, Boundary], int] = field(default_factory=dict)
    ranges: dict[IndexRange, torch.Tensor] = field(default_factory=dict)  # extents on the device
    zeros: list[torch.Tensor] = field(default_factory=list)  # for graphs: a grid's barriers and fault flag each


def zeros_for(coords: torch.Tensor, sizes: ExampleSizes[Any]) -> torch.Tensor:
    """(BARRIERS + 4,) int32 zeros for a grid's barriers and, behind them, its fault flag.

    Barriers are left at zero, and the launch that fills a table begins by setting the flag back. So a graph's
    can be zeros that lay with its example when the step was run before the capture; no two graphs have the same.
    """
    if coords.is_cuda:
        kept = sizes.zeros
        if torch.cuda.is_current_stream_capturing():
            with suppress(IndexError):  # none lay there, or another thread's capture has the last
                return kept.pop()
        elif not kept:
            kept.extend(coords.new_zeros(CAPTURES, BARRIERS + 4))
    return coords.new_zeros(BARRIERS + 4)
