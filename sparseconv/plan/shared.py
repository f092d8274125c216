"""One plan for all layers that ask the same of one grid, without names for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.plan.convolution import ConvolutionPlan


def shared_plan(
    source: VoxelGrid, kernel_size: Any = None, *, generative: bool = False, groups: int = 1, **options: Any
) -> ConvolutionPlan:
    """The plan with these arguments on this grid object, built on first use and kept with the grid.

    Arguments are those of `ConvolutionPlan`, or of `ConvolutionPlan.transposed` where ``generative``. Two layers on one
    grid share a kernel map, and a strided layer's target is one grid object for everyone; so a decoder that asks for
    its encoder's plan finds the same edges and can `transpose()` them. Plans of other ``groups`` share the edges.

    >>> grid = VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1]]))
    >>> shared_plan(grid, 2, stride=2).target is shared_plan(grid, (2, 2), stride=2).target
    True
    """
    options = {"kernel_size": kernel_size, **options}
    return plan_under(shared_key(source.rank, generative, options), source, options, groups)


def shared_key(rank: int, generative: bool, options: dict[str, Any]) -> tuple:
    """What `shared_plan` keeps a plan under."""
    return generative, tuple(sorted((name, _hashable(name, value, rank)) for name, value in options.items()))


def plan_under(key: tuple, source: VoxelGrid, options: dict[str, Any], groups: int) -> ConvolutionPlan:
    """`shared_plan` for a `shared_key` that was made before."""
    plan = source.derived.get(key)
    if plan is None:
        kind = source.plan_type or ConvolutionPlan
        plan = (kind.transposed if key[0] else kind)(source, **options)  # type: ignore[attr-defined]
        plan = source.derived.setdefault(key, plan.weak_copy(source))
    return plan.with_groups(groups)


def _hashable(name: str, value: Any, rank: int) -> Any:
    """One spelling for arguments that mean the same: integers for all axes, lists, tensors of taps."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.integer)):
        value = value.tolist()
    if isinstance(value, int) and name in ("kernel_size", "stride", "dilation", "padding"):
        value = (value,) * rank
    if isinstance(value, (list, tuple)):
        return tuple(tuple(v) if isinstance(v, (list, tuple)) else v for v in value)
    return value
