"""From ranges of numbers to integers: scales, multipliers, shifts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sparseconv.backends.integers import LARGEST, MULTIPLIERS, SHIFTS, SLOPE_BITS, Rescale, check_bound

#: a bias in units of its sums stays below this, so that room for the products is left
BIASES = 2**29


def shift_for(ratios: Sequence[float], below: int, most: int) -> int:
    """The largest shift up to ``most`` at which every ratio, rounded to an integer, stays ``below``."""
    largest = max(ratios, default=0.0)
    shift = most
    if largest > 0:
        shift = min(most, math.floor(math.log2(below / largest)))
        while round(largest * 2.0**shift) >= below:
            shift -= 1
    if shift < SHIFTS.start:
        raise ValueError(f"a layer that scales numbers by {largest:.3g} leaves no bits for rounding")
    return shift


def integer_weight(
    weight: torch.Tensor, bias: torch.Tensor | None, x_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight (K, C, C_out) and bias (C_out,) -> int8, int32 and the scale (C_out,) fp64 of their sums.

    Symmetric, one scale an output channel, as torchao's int8 weights are.
    """
    weight = weight.double()
    c_out = weight.shape[2]
    wide = torch.zeros(c_out, dtype=torch.float64, device=weight.device) if bias is None else bias.double()
    scale = weight.abs().amax((0, 1)) / LARGEST if weight.numel() else torch.zeros_like(wide)
    scale = torch.maximum(scale, wide.abs() / (x_scale * BIASES)).clamp_min(1e-30)
    integers = (weight / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    added = (wide / (scale * x_scale)).round().to(torch.int32)
    check_bound(weight.shape[0], weight.shape[1], added)
    return integers, added, scale * x_scale


def rescale_to(scale: torch.Tensor, y_scale: float, residual_scale: float = 0.0, slope: float | None = None) -> Rescale:
    """From sums of ``scale`` (C_out,) to int8 of ``y_scale``; ``slope`` of an activation, None for none."""
    ratios, residual = (scale / y_scale).tolist(), residual_scale / y_scale
    shift = shift_for([*ratios, residual], MULTIPLIERS, SHIFTS.stop - 1)
    multiplier = torch.tensor([round(ratio * 2.0**shift) for ratio in ratios], dtype=torch.int32, device=scale.device)
    return Rescale(multiplier, shift, round(residual * 2.0**shift), *rounding_of(slope))


def rounding_of(slope: float | None) -> tuple[int, int]:
    """The slope and the least value of a `Rescale` before an activation."""
    if slope is None:
        return 1 << SLOPE_BITS, -LARGEST
    return round(slope * (1 << SLOPE_BITS)), 0 if slope == 0 else -LARGEST
