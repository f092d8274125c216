"""What runs over one map: launches that have their addresses and sizes, called with operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sparseconv.backends.base import turned
from sparseconv.gpu.program import Launch
from sparseconv.gpu.streams import scratch


class Step:
    """Launches over one map: ``sums`` writes the result, or fp32 partial sums that ``last`` then adds.

    The first two tensors of a call are operands of the sums, the third is the result, and the others (bias and
    residual; any tensor for none) are for whichever launch writes it. ``exchange``: groups of a weight to copy first.
    """

    __slots__ = ("_exchange", "_last", "_partial_shape", "_sums")

    def __init__(
        self, sums: Launch, last: Launch | None, partial_shape: tuple[int, int] = (0, 0), exchange: int = 0
    ) -> None:
        self._sums, self._last = sums, last
        self._partial_shape, self._exchange = partial_shape, exchange

    def compile(self) -> None:
        """Compile what this step launches without running it."""
        self._sums.compile()
        if self._last is not None:
            self._last.compile()

    def __call__(self, x: torch.Tensor, other: torch.Tensor, out: torch.Tensor, *more: torch.Tensor) -> None:
        if self._exchange:
            other = turned(other, self._exchange).contiguous()
        if self._last is None:
            self._sums(x, other, out, *more)
            return
        partial = scratch(*self._partial_shape, dtype=torch.float32, device=x.device)
        self._sums(x, other, partial, *more)
        self._last(partial, out, *more)


class Part(NamedTuple):
    """What one launch of a forward or input gradient has to do with the others."""

    #: fp32 sums of groups of taps side by side, for a launch behind it to add
    to_slots: bool = False
    #: fp32 sums, for the launch of the next group of taps to add to
    leads: bool = False
    #: it adds to the sums of the launch before it
    follows: bool = False

    @property
    def begins(self) -> bool:
        """Whether it adds bias and residual."""
        return not self.to_slots and not self.follows

    @property
    def ends(self) -> bool:
        """Whether it writes the result."""
        return not self.to_slots and not self.leads


class Chain:
    """Launches for groups of taps, one after another: each adds to the sums before it, the last writes the result.

    The first begins with bias and residual. Some output channels at a time: ``sums_shape`` is (N_out, how many), and
    they are the weight's last axis, ``transposed`` its middle one; ``more`` says which of bias and residual there are.
    """

    __slots__ = ("_links", "_more", "_sums_shape", "_transposed")

    def __init__(
        self, links: Sequence[Launch], sums_shape: tuple[int, int], transposed: bool, more: tuple[bool, ...]
    ) -> None:
        self._links, self._sums_shape, self._more = links, sums_shape, more
        self._transposed = transposed

    def compile(self) -> None:
        """Compile what this step launches without running it."""
        for link in self._links:
            link.compile()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *more: torch.Tensor) -> None:
        sums = torch.empty(self._sums_shape, dtype=torch.float32, device=x.device)
        width = self._sums_shape[1]
        first, *between, last = self._links
        for start in range(0, out.shape[1], width):
            part = slice(start, start + width)
            mine = weight[:, part] if self._transposed else weight[..., part]
            first(x, mine, sums, *(t[..., part] if there else t for t, there in zip(more, self._more)))
            for link in between:
                link(x, mine, sums, x, sums)
            last(x, mine, out[:, part], x, sums)
