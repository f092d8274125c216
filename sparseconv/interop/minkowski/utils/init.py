"""How kernels are initialised."""

from __future__ import annotations

import math
from typing import Any

import torch


def kaiming_normal_(
    tensor: torch.Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu"
) -> torch.Tensor:
    """Fill a kernel (V, C_in, C_out), or (C_in, C_out), with normal numbers of standard deviation gain / sqrt(fan).

    The fan of a kernel is taps times channels, those of the input for ``"fan_in"``. As in MinkowskiEngine, that of a
    matrix is its second dimension for ``"fan_in"`` and its first for ``"fan_out"``.
    """
    if mode.lower() not in ("fan_in", "fan_out"):
        raise ValueError(f"mode must be 'fan_in' or 'fan_out'; got {mode!r}")
    if tensor.ndim < 2:
        raise ValueError(f"a kernel has two dimensions or more; got {tuple(tensor.shape)}")
    taps, fans = (1, (tensor.shape[1], tensor.shape[0])) if tensor.ndim == 2 else (tensor.shape[0], tensor.shape[1:3])
    fan = taps * fans[mode.lower() == "fan_out"]
    gain = torch.nn.init.calculate_gain(nonlinearity, a)
    with torch.no_grad():
        return tensor.normal_(0, gain / math.sqrt(fan))
