"""Integers for every axis, and dense arrays."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.interop.torchsparse.conventions import make_ntuple
from sparseconv.interop.torchsparse.tensor import to_dense


def make_tensor(x: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """A tensor of numbers on a device."""
    return torch.as_tensor(x, dtype=dtype, device=device)


def make_divisible(x: int, divisor: int) -> int:
    """The smallest multiple of the divisor that is not below x."""
    return (x + divisor - 1) // divisor * divisor


__all__ = ["make_divisible", "make_ntuple", "make_tensor", "to_dense"]
