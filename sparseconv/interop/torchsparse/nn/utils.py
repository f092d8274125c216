"""A function of features, and the taps of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparseconv.interop.torchsparse.conventions import make_ntuple
from sparseconv.interop.torchsparse.tensor import SparseTensor, checked


def fapply(input: SparseTensor, fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> SparseTensor:
    """The tensor with ``fn`` of its features."""
    return checked(input).like(fn(input.feats, *args, **kwargs))


def get_kernel_offsets(size: Any, stride: Any = 1, dilation: Any = 1, device: Any = "cpu") -> torch.Tensor:
    """(V, 3) int32: the taps of a kernel in the order of a layer's weight, from -(k - 1) // 2 on every axis.

    >>> get_kernel_offsets((1, 1, 2)).tolist()
    [[0, 0, 0], [0, 0, 1]]
    """
    kernel, steps, gaps = (make_ntuple(v, 3) for v in (size, stride, dilation))
    axes = [(torch.arange(k) - (k - 1) // 2) * s * d for k, s, d in zip(kernel, steps, gaps)]
    odd = kernel[0] * kernel[1] * kernel[2] % 2
    taps = torch.cartesian_prod(*axes[::-1]).flip(1) if odd else torch.cartesian_prod(*axes)
    return taps.int().to(device)
