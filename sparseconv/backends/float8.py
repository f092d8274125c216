"""The arithmetic of layers in float8 (e4m3): products of 8 bits, sums in fp32, and their way back.

    t = (bias[c] + sums[o, c]) * multiplier[c] + residual[o, c] * residual_multiplier
    y = e4m3(min(max(t if t >= 0 else t * slope, -448), 448))

A backend without matrix units for it computes the same on fp32, which holds every e4m3 number: the sums then differ by
the order of their terms, and by what a GPU's matrix units leave off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparseconv.backends.integers import on_device

FLOAT8 = torch.float8_e4m3fn
#: the largest finite number of e4m3
LARGEST = 448.0


@dataclass(frozen=True, eq=False)
class Float8Rescale:
    """How fp32 sums become e4m3, see the formulas of this file.

    Attributes:
        multiplier: (C_out,) fp32.
        residual_multiplier: of an e4m3 residual.
        slope: of negative values, 0 to 1; 1 leaves them as they are.
    """

    multiplier: torch.Tensor
    residual_multiplier: float = 0.0
    slope: float = 1.0

    def packed(self, bias: torch.Tensor) -> torch.Tensor:
        """(2 C_out + 2,) fp32: bias, multipliers, and the two numbers, as kernels read them."""
        return torch.cat([bias, self.multiplier, on_device((self.residual_multiplier, self.slope), self.multiplier)])

    def apply(self, sums: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """y (N, C) e4m3 from sums (N, C) fp32, the bias in them, and an e4m3 residual."""
        total = sums * self.multiplier
        if residual is not None:
            total += residual.float() * self.residual_multiplier
        if self.slope != 1:
            total = torch.where(total < 0, total * self.slope, total)
        return total.clamp_(-LARGEST, LARGEST).to(FLOAT8)
