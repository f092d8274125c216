"""Whether two results of one network agree: in every number, or as far as sums in another order allow."""

from __future__ import annotations

import math
from typing import Any

import torch

from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import pytree

#: the part of its norm by which sums in another order may change a result, by the bits of a number
NOISE = {16: 0.05, 32: 0.01, 64: 1e-6}


def same(a: Any, b: Any) -> bool:
    """Whether two results, or arguments, are equal in structure and in every number; one NaN is like another.

    >>> same({"x": torch.tensor([1.0, float("nan")])}, {"x": torch.tensor([1.0, float("nan")])}), same([1], (1,))
    (True, False)
    """
    if isinstance(a, torch.Tensor):
        if a is b or not isinstance(b, torch.Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
            return a is b
        has_nan = a.is_floating_point() or a.is_complex()
        if has_nan and torch.equal(a.isnan(), b.isnan()):
            a, b = (t.nan_to_num(0.0, math.inf, -math.inf) for t in (a, b))
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def gap_of(a: torch.Tensor, b: torch.Tensor) -> float:
    """By how much ``a`` differs from ``b``, as a part of its norm, NaNs being alike; of integers 1 where any does."""
    if not b.is_floating_point():
        return float(not torch.equal(a, b))
    a, b = a.detach().double(), b.double()
    off = torch.where(a.isnan() & b.isnan(), 0.0, a - b)
    return float(off.norm() / b.nan_to_num().norm().clamp_min(1e-12)) if b.numel() else 0.0


def largest_gap(found: Any, wanted: Any) -> float:
    """The largest gap (`gap_of`) between floating-point tensors of two results, where it is more than noise; else 0."""
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        a, b = (v.features if isinstance(v, SparseTensor) else v for v in (a, b))
        if isinstance(b, torch.Tensor) and a.shape != b.shape:
            raise ValueError(f"the size of a result depends on the scene: {tuple(a.shape)}, and alone {tuple(b.shape)}")
        if isinstance(b, torch.Tensor) and b.is_floating_point():
            off, noise = gap_of(a, b), NOISE[8 * min(a.itemsize, b.itemsize)]
            worst = max(worst, off) if off > noise else math.inf if off != off else worst
    return worst
