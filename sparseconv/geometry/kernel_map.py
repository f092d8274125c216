"""The edges of a sparse convolution: which input row meets which output row through which tap."""

from __future__ import annotations

from functools import cached_property

import torch


class KernelMap:
    """Edges (tap, input row, output row), in the orders that execution needs.

        y[out] = sum over edges (k, in, out) of x[in] @ weight[k]

    Within one tap every input row and every output row occurs at most once, so a tap is a partial injection and
    its scatter needs no atomics. One of the two forms is given, the other is derived on first use and kept:

    - ``neighbors`` (K, N_out) int32: the input row that output row meets through tap k, -1 where there is none;
    - ``pairs``: ``in_rows`` (P,) and ``out_rows`` (P,) int32, ordered by tap and then by output row, with
      ``tap_offsets`` (K+1,) int64 on the map's device and ``tap_counts``, a tuple on the host.

    Example with two voxels side by side on a line and three taps::

        neighbors = [[-1, 0],     # tap 0: the left neighbour
                     [ 0, 1],     # tap 1: the voxel itself, so identity_tap = 1
                     [ 1, -1]]    # tap 2: the right neighbour
        in_rows = [0, 0, 1, 1]; out_rows = [1, 0, 1, 0]; tap_offsets = [0, 1, 3, 4]
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        num_taps: int,
        *,
        neighbors: torch.Tensor | None = None,
        pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        identity_tap: int | None = None,
        mirror: tuple[int, ...] | None = None,
    ) -> None:
        if (neighbors is None) == (pairs is None):
            raise ValueError("a KernelMap is made from either neighbors or pairs: give exactly one of them")
        self.num_in, self.num_out, self.num_taps = num_in, num_out, num_taps
        #: the tap that maps every row to itself, known from the geometry and never guessed from sizes; or None
        self.identity_tap = identity_tap
        #: mirror[k] is the tap whose edges are tap k's reversed (same grid on both sides); None if there is no such symmetry
        self.mirror = mirror
        if neighbors is not None:
            self.neighbors = neighbors  # shadows the cached property
        if pairs is not None:
            self._pairs = pairs
        #: what backends derive from the edges and want to keep (schedules, int64 indices), keyed by them
        self.prepared: dict[object, object] = {}
        self._reverse: KernelMap | None = None

    def reverse(self) -> KernelMap:
        """The same edges with input and output exchanged, in O(1); ``reverse().reverse()`` is this map."""
        raise NotImplementedError
