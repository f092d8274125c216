"""Dropout whose choice is a function of a seed and the position alone, so that no mask is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparseconv.pointwise.decorator import pointwise_dynamic
from sparseconv.pointwise.function import PointwiseDynamicFunction
from sparseconv.pointwise.scalar import Deferred
from sparseconv.pointwise.schema import Derivative

if TYPE_CHECKING:
    from jaxtyping import Float

_WORD = 0xFFFFFFFF


def _scramble(h: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser on 32-bit words held in int64."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _WORD
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def uniform(index: torch.Tensor, seed: int) -> torch.Tensor:
    """fp32 numbers in [0, 1] that depend on (index, seed) alone: index (any shape) int64 -> the same shape."""
    low = _scramble((index & _WORD) ^ (seed & _WORD))
    high = ((index >> 32) + ((seed >> 32) & _WORD)) & _WORD
    word = _scramble((low + _scramble((high + 0x9E3779B9) & _WORD)) & _WORD)
    return word.to(torch.float32) * 2.3283064365386963e-10


def _twin(x: torch.Tensor, probability: float, seed: int, index: torch.Tensor) -> torch.Tensor:
    if probability >= 1:
        return torch.zeros_like(x)
    threshold = torch.tensor(probability, dtype=torch.float32, device=x.device)
    rate = torch.tensor(probability, dtype=x.dtype if x.is_floating_point() else torch.float32, device=x.device)
    kept = uniform(index, seed) >= threshold
    return torch.where(kept, x * (1 / (1 - rate)), torch.zeros_like(x))


seeded_dropout: PointwiseDynamicFunction = pointwise_dynamic(
    Deferred("sparseconv.pointwise.scalars.arithmetic", "dropout"),
    is_tensor=[True, False, False],
    dtypes=[None, float, int],
    promotion_methods=[(0, "DEFAULT")],
    reference=_twin,
    derivative={0: Derivative(lambda grad, p, seed: seeded_dropout(grad, p, seed), "grad0", "in1", "in2")},
    index=True,
    doc="dropout(x, probability, seed), the choice a hash of seed and row-major index.",
)


def dropout(
    x: Float[torch.Tensor, "*shape"], p: float = 0.5, *, seed: int, training: bool = True
) -> Float[torch.Tensor, "*shape"]:
    """Zeroes elements at random and scales the others: out = x / (1 - p) with probability 1 - p, else 0.

    Which elements are kept depends on the seed and their row-major position alone: not on strides, device or launch
    geometry. The gradient makes the same choice again, so nothing is kept for it.

    Args:
        x: tensor of any shape and floating dtype.
        p: the probability of zero.
        seed: a 64-bit integer.
        training: x itself is returned if false.

    Returns:
        tensor of the shape and dtype of x.

    Raises:
        ValueError: if p is no probability.
        TypeError: if x is not of a floating dtype.

    Example:
        >>> bool((dropout(torch.ones(1000), 0.25, seed=7) == dropout(torch.ones(1000), 0.25, seed=7)).all())
        True
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p is a probability, between 0 and 1, but got {p!r}")
    if not x.is_floating_point():
        raise TypeError(f"dropout: x is of a floating dtype, but got {x.dtype}")
    return seeded_dropout(x, float(p), seed) if training and p > 0 else x
