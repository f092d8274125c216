"""Tensors joined and added."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseconv.interop.torchsparse.tensor import SparseTensor, check_coords, checked, is_at
from sparseconv.torch_private import surely


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Channels side by side; all at one set of coordinates."""
    if not inputs:
        raise ValueError("cat takes one tensor or more; got none")
    counts = [checked(x).feats.shape[0] for x in inputs]
    # a set of them would be one for each scene, in a trace
    if any([surely(count != counts[0]) for count in counts]) or not all([is_at(inputs[0], x) for x in inputs]):
        raise ValueError(
            f"cat takes tensors at the same coordinates, in one order; got {[tuple(x.feats.shape) for x in inputs]}"
        )
    return inputs[0].like(torch.cat([x.feats for x in inputs], 1))


def generative_add(a: SparseTensor, b: SparseTensor) -> SparseTensor:
    """The sum over all voxels of two tensors, absent ones counting as 0; voxels in lexicographic order."""
    if checked(a).feats.shape[1] != checked(b).feats.shape[1]:
        raise ValueError(f"tensors must agree in channels; got {tuple(a.feats.shape)} and {tuple(b.feats.shape)}")
    for x in (a, b):
        check_coords(x.coords)
    first, second = (a, b) if len(a.feats) >= len(b.feats) else (b, a)
    coords, rows = torch.unique(torch.cat([first.coords, second.coords]), dim=0, return_inverse=True)
    zeros = first.feats.new_zeros(len(coords), first.feats.shape[1])
    at = rows.split([len(first.feats), len(second.feats)])
    feats = zeros.index_copy(0, at[0], first.feats) + zeros.index_copy(0, at[1], second.feats)
    made = SparseTensor(feats, coords, first.stride, first.spatial_range)
    made._caches = first._caches
    return made
