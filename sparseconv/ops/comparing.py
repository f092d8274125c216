"""How far two results of one network are apart, where sums may run in another order."""

from __future__ import annotations

import math
from typing import Any

import torch

from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import pytree

#: the part of its rms by which sums in another order may change a result, by the bits of a number
NOISE = {16: 0.05, 32: 0.01, 64: 1e-6}


def apart(found: Any, wanted: Any) -> float:
    """The largest part of its rms by which a tensor of a result is off, where it is more than noise; else 0."""
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        a, b = (v.features if isinstance(v, SparseTensor) else v for v in (a, b))
        if isinstance(b, torch.Tensor) and a.shape != b.shape:
            raise ValueError(f"the size of a result depends on the scene: {tuple(a.shape)}, and alone {tuple(b.shape)}")
        if isinstance(b, torch.Tensor) and b.is_floating_point() and b.numel():
            noise = NOISE[8 * min(a.itemsize, b.itemsize)]
            a, b = a.double(), b.double()
            gap = torch.where(a.isnan() & b.isnan(), 0.0, a - b)
            off = float(gap.square().mean().sqrt() / b.nan_to_num().square().mean().sqrt().clamp_min(1e-12))
            worst = max(worst, off) if off > noise else math.inf if off != off else worst
    return worst
