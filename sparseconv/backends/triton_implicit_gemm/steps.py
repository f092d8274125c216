"""What runs over one map: launches that have their addresses and sizes, called with operands."""

from __future__ import annotations

import torch

from sparseconv.backends.base import swap_channels
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
            other = swap_channels(other, self._exchange).contiguous()
        if self._last is None:
            self._sums(x, other, out, *more)
            return
        partial = scratch(*self._partial_shape, dtype=torch.float32, device=x.device)
        self._sums(x, other, partial, *more)
        self._last(partial, out, *more)
