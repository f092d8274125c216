"""Names of algorithms, kept so that code which chooses one still runs; the backend is chosen by sparseconv."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum


class ConvAlgo(Enum):
    """What spconv lets a layer ask for. Every value gives the same numbers here."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


def default_algo(kernel_size: Sequence[int], most: int) -> ConvAlgo:
    """What spconv, built for GPUs, chooses where a layer does not say: implicit GEMM up to so many taps."""
    return ConvAlgo.MaskImplicitGemm if math.prod(kernel_size) <= most else ConvAlgo.Native


class AlgoHint(Enum):
    """Passes of a layer, as flags."""

    NoHint = 0b000
    Fowrard = 0b001  # spelled as in spconv
    BackwardInput = 0b010
    BackwardWeight = 0b100
