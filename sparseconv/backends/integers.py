"""The arithmetic of integer layers: sums of int8 products in int32, and their way back to int8.

    sums[o, c] = bias[c] + sum over edges (k, i, o) of x[i] @ w[k]                     exact, in int32
    t = sums * multiplier[c] + residual[o, c] * residual_multiplier + 2^(shift - 1)    exact, in int64
    v = t >> shift                                                                     rounds half up
    v = v if v >= 0 else (v * slope + 2^15) >> 16                                      where there is a slope
    y = min(max(v, low), 127)

``>>`` is the arithmetic shift, which rounds down. So ties go up, towards plus infinity: one addition and one shift, the
same on every machine, without a look at the sign. A residual is added before the one rounding. int8 values lie in
-127 to 127: scales are symmetric, and an absent voxel is the integer 0. No sum depends on the order of its terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from sparseconv.geometry.kernel_map import KernelMap

if TYPE_CHECKING:
    from jaxtyping import Int8, Int32

#: the largest int8 value that a layer makes; -128 is none, so that signs are symmetric
LARGEST = 127
#: sums stay below 2^31 in magnitude
LIMIT = 2**31 - 1
#: what multipliers stay below; where int8 values alone are rescaled, so that 32 bits hold all
MULTIPLIERS, NARROW_MULTIPLIERS = 2**31, 2**22
SHIFTS = range(16, 63)
SLOPE_BITS = 16


@dataclass(frozen=True, eq=False)
class Rescale:
    """How int32 sums become int8: a multiplication and a shift.

    Attributes:
        multiplier: (C_out,) int32, not negative.
        shift: 16 to 62.
        residual_multiplier: of an int8 residual, 0 to 2^31 - 1.
        slope: of negative values, in parts of 2^16; 65536 leaves them as they are.
        low: the least result, -127, or 0 after a ReLU.

    Example:
        >>> half = Rescale(torch.tensor([1 << 19], dtype=torch.int32), shift=20)
        >>> half.apply(torch.tensor([[3], [-3], [1000]], dtype=torch.int32)).flatten().tolist()
        [2, -1, 127]
    """

    multiplier: Int32[torch.Tensor, " C_out"]
    shift: int
    residual_multiplier: int = 0
    slope: int = 1 << SLOPE_BITS
    low: int = -LARGEST

    @property
    def has_slope(self) -> bool:
        """Whether negative values are scaled, and stay."""
        return self.slope != 1 << SLOPE_BITS and self.low < 0

    def check(self, channels: int, device: torch.device) -> None:
        """Raise before a launch where the arithmetic would be another."""
        m = self.multiplier
        if m.dtype != torch.int32:
            raise TypeError(f"a multiplier is int32, one per channel; got {m.dtype}")
        if tuple(m.shape) != (channels,) or m.device != device:
            raise ValueError(f"need {channels} multipliers on {device}; got {tuple(m.shape)} on {m.device}")
        if self.shift not in SHIFTS:
            raise ValueError(f"a shift is {SHIFTS.start} to {SHIFTS.stop - 1} bits; got {self.shift}")
        if not 0 <= self.residual_multiplier < MULTIPLIERS:
            raise ValueError(f"a residual's multiplier is 0 to 2^31 - 1; got {self.residual_multiplier}")
        if not 0 <= self.slope <= 1 << SLOPE_BITS or self.low not in (-LARGEST, 0):
            raise ValueError(f"a slope is 0 to 65536 and low is -127 or 0; got {self.slope} and {self.low}")

    def packed(self, bias: Int32[torch.Tensor, " C_out"] | None) -> Int32[torch.Tensor, " 2*C_out+4"]:
        """(2 C_out + 4,) int32: bias, multipliers, and the four numbers, as kernels read them."""
        kept = on_device((self.shift, self.residual_multiplier, self.slope, self.low), self.multiplier)
        start = torch.zeros_like(self.multiplier) if bias is None else bias
        return torch.cat([start, self.multiplier, kept])

    def apply(
        self, sums: Int32[torch.Tensor, "N_out C_out"], residual: Int8[torch.Tensor, "N_out C_out"] | None = None
    ) -> Int8[torch.Tensor, "N_out C_out"]:
        """y (N, C) int8 from sums (N, C) int32 and an int8 residual: by torch, on any device."""
        total = sums.long() * self.multiplier.long()
        if residual is not None:
            total += residual.long() * self.residual_multiplier
        return self._rounded(total)

    def _rounded(self, total: torch.Tensor) -> torch.Tensor:
        value = total.add_(1 << (self.shift - 1)).bitwise_right_shift_(self.shift)
        if self.has_slope:
            below = (value * self.slope).add_(1 << (SLOPE_BITS - 1)).bitwise_right_shift_(SLOPE_BITS)
            value = torch.where(value < 0, below, value)
        return value.clamp_(self.low, LARGEST).to(torch.int8)


def on_device(numbers: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    """Some numbers of a tensor's dtype, brought to its device once."""
    return _brought(numbers, like.dtype, like.device)


@lru_cache(4096)
def _brought(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def rescaled(
    tensors: Sequence[torch.Tensor], multipliers: Sequence[int], shift: int, slope: int, low: int
) -> torch.Tensor:
    """The sum of int8 tensors of one shape, each times its multiplier, as `Rescale` rounds it; in 32 bits.

    >>> x = torch.tensor([3, -3], dtype=torch.int8)
    >>> rescaled([x, x], [1 << 17, 1 << 18], 20, 1 << 16, -127).tolist()
    [1, -1]
    """
    if sum(multipliers) >= NARROW_MULTIPLIERS << 1 or shift not in range(16, 24):
        raise ValueError(f"multipliers are below 2^22 and a shift is 16 to 23; got {list(multipliers)} and {shift}")
    total = tensors[0].int() * multipliers[0]
    for tensor, multiplier in zip(tensors[1:], multipliers[1:]):
        total.add_(tensor, alpha=multiplier)
    none = torch.empty(0, dtype=torch.int32)
    return Rescale(none, shift, slope=slope, low=low)._rounded(total)


def check_bound(num_taps: int, group_in: int, bias: torch.Tensor | None = None) -> None:
    """Raise ValueError for a layer whose sums could pass 2^31, in the worst case of all bytes."""
    most = num_taps * group_in * 128 * 128
    if bias is not None and bias.numel():
        most += int(bias.long().abs().max())
    if most > LIMIT:
        raise ValueError(
            f"{num_taps} taps of {group_in} channels per group could sum up to {most}, past 2^31 - 1: keep this layer "
            "wide, or give it more groups"
        )


def check_integers(
    kernel_map: KernelMap,
    groups: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rescale: Rescale | None,
    residual: torch.Tensor | None,
) -> None:
    """Raise for operands that an integer convolution cannot take: before anything is launched."""
    device = kernel_map.device
    for name, tensor, dtype in (
        ("x", x, torch.int8),
        ("weight", weight, torch.int8),
        ("bias", bias, torch.int32),
        ("residual", residual, torch.int8),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"an integer convolution takes {name} in {dtype}; got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"the plan is on {device} but {name} is on {tensor.device}: move it there")
    if x.ndim != 2 or weight.ndim != 3 or x.shape[0] != kernel_map.num_in or weight.shape[0] != kernel_map.num_taps:
        raise ValueError(
            f"need x ({kernel_map.num_in}, C_in) and weight ({kernel_map.num_taps}, C_in/G, C_out); got "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    c_out = weight.shape[2]
    if weight.shape[1] * groups != x.shape[1] or c_out % groups:
        raise ValueError(f"{groups} groups of weight {tuple(weight.shape)} do not take {x.shape[1]} channels")
    if bias is not None and tuple(bias.shape) != (c_out,):
        raise ValueError(f"need a bias ({c_out},); got {tuple(bias.shape)}")
    if residual is not None and (rescale is None or tuple(residual.shape) != (kernel_map.num_out, c_out)):
        raise ValueError(
            f"a residual is ({kernel_map.num_out}, {c_out}) and needs a rescale; got {tuple(residual.shape)}"
        )
    if rescale is not None:
        rescale.check(c_out, device)
    check_bound(kernel_map.num_taps, weight.shape[1], bias if device.type == "cpu" else None)  # a GPU is not read
