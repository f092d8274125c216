"""Padded scenes: rows that are put into them, and results, cut to the voxels, compared, apart in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import multiply_each, pytree

#: a scene: a sparse tensor, or coords (N, 1+D) int32 and features (N, C)
Scene = SparseTensor | tuple[torch.Tensor, torch.Tensor]


def rows_of(
    results: Any, scene: Scene, rows: int, grid: VoxelGrid | None = None, bad: torch.Tensor | None = None
) -> Any:
    """Results over ``rows`` rows, of which the first are the scene's voxels -> those of the voxels.

    ``grid`` is what the network was given; None where it was looked at before. With ``bad`` (1,) bool, tensors are new
    ones, and NaN where it is true.
    """
    whole = scene if isinstance(scene, SparseTensor) else None
    voxels = len(scene.grid) if isinstance(scene, SparseTensor) else len(scene[0])

    def own(value: Any) -> Any:
        if isinstance(value, SparseTensor):
            if grid is not None and value.grid is not grid:
                raise ValueError(
                    f"the network's result is on {value.grid}, whose number of voxels only the GPU knows: "
                    "return a tensor on the input's grid"
                )
            features = spoilt(value.features[:voxels])
            return features if whole is None else SparseTensor(whole.grid, features)
        if isinstance(value, torch.Tensor):
            return spoilt(value[:voxels] if value.ndim and len(value) == rows else value)
        return value

    def spoilt(value: torch.Tensor) -> torch.Tensor:
        if bad is None:
            return value
        if value.dtype in (torch.bool, torch.uint8):
            return value.clone()
        return torch.where(bad if value.ndim else bad[0], float("nan") if value.is_floating_point() else -1, value)

    return pytree.tree_map(own, results, is_leaf=lambda value: isinstance(value, SparseTensor))


def put_rows(rows: torch.Tensor, into: torch.Tensor, filled: int, dead: float = 0) -> None:
    """Put rows first into an array, of which ``filled`` rows were written before: ``dead`` ones follow them."""
    count = len(rows)
    into[:count].copy_(rows)
    if count < filled:
        into[count:filled].fill_(dead)


def has_others(results: Any, rows: int) -> bool:
    """Whether there is a tensor among results that has not ``rows`` rows."""
    leaves: list[Any] = []
    pytree.tree_map(leaves.append, results, is_leaf=lambda value: isinstance(value, SparseTensor))
    return any(isinstance(t, torch.Tensor) and not (t.ndim and len(t) == rows) for t in leaves)


def clear_where(grads: Sequence[torch.Tensor | None], is_bad: torch.Tensor) -> None:
    """Set gradients to 0 where ``is_bad`` (1,) bool holds: by their bits, since 0 times NaN is NaN."""
    for dtype in (torch.int16, torch.int32, torch.int64):
        some = [g.view(dtype) for g in grads if g is not None and g.element_size() == dtype.itemsize]
        if some:
            multiply_each(some, (~is_bad[0]).to(dtype))


def apart_in_memory(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients that an optimizer may change one by one: contiguous, and none where another one is."""
    seen: set[int] = set()
    made: list[torch.Tensor | None] = []
    for grad in grads:
        if grad is not None and (not grad.is_contiguous() or grad.data_ptr() in seen):
            grad = grad.clone(memory_format=torch.contiguous_format)
        if grad is not None:
            seen.add(grad.data_ptr())
        made.append(grad)
    return made
