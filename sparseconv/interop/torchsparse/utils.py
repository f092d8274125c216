"""``torchsparse.utils``: batches of scenes, quantization, integers for every axis, dense arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparseconv.checks import as_tensor, bounds, check_kind, numbers
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange
from sparseconv.interop.arguments import floor_to_int32
from sparseconv.interop.torchsparse.conventions import Version, get_version, make_ntuple  # noqa: F401
from sparseconv.interop.torchsparse.tensor import SparseTensor, to_dense  # noqa: F401


def make_tensor(x: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """A tensor of numbers on a device."""
    return torch.as_tensor(x, dtype=dtype, device=device)


def make_divisible(x: int, divisor: int) -> int:
    """The smallest multiple of the divisor that is not below x."""
    return (x + divisor - 1) // divisor * divisor


# ---- batches


def sparse_collate(inputs: list[SparseTensor]) -> SparseTensor:
    """Tensors with coordinates (N_b, 3), one per scene -> one tensor with coordinates (N, 4)."""
    for x in inputs:
        check_kind("each input", x, SparseTensor, "pass tensors of torchsparse's, one per scene")
    if len({x.stride for x in inputs}) != 1:
        raise ValueError(f"the tensors of a batch must have one stride; got {[x.stride for x in inputs]}")
    coords, feats = [], []
    for number, x in enumerate(inputs):
        own, rows = torch.as_tensor(x.coords), torch.as_tensor(x.feats)
        if own.ndim != 2 or own.shape[1] != 3 or rows.ndim != 2 or len(rows) != len(own):
            raise ValueError(
                "each input must have coords (N, 3), without the batch, and feats (N, C); got "
                f"{tuple(own.shape)} and {tuple(rows.shape)}"
            )
        item = torch.full_like(own[:, :1], number)
        joined = torch.cat([item, own] if get_version() is Version.FIRST else [own, item], 1)
        coords.append(floor_to_int32("coords", joined))
        feats.append(rows)
    if len({rows.shape[1] for rows in feats}) != 1:
        raise ValueError(f"the tensors of a batch must have as many channels; got {[tuple(f.shape) for f in feats]}")
    return SparseTensor(torch.cat(feats), torch.cat(coords), inputs[0].stride)


def sparse_collate_fn(inputs: list[Any]) -> Any:
    """A ``collate_fn``: dictionaries of tensors, arrays and others -> one of batches, stacked arrays and lists."""
    if not isinstance(inputs[0], dict):
        return inputs
    batch: dict[str, Any] = {}
    for name, first in inputs[0].items():
        values = [scene[name] for scene in inputs]
        if isinstance(first, dict):
            batch[name] = sparse_collate_fn(values)
        elif isinstance(first, (np.ndarray, torch.Tensor)):
            batch[name] = torch.stack([torch.as_tensor(v) for v in values])
        else:
            batch[name] = sparse_collate(values) if isinstance(first, SparseTensor) else values
    return batch


# ---- quantization


def sparse_quantize(
    coords: Any, voxel_size: Any = 1, *, return_index: bool = False, return_inverse: bool = False
) -> Any:
    """The distinct voxels floor(c / voxel_size) of points (N, 3), numpy arrays, in lexicographic order.

    Returns:
        voxels (M, 3) int32; where asked, a list of them, the first point of each (M,), the voxel of each point (N,).

    >>> sparse_quantize(np.array([[0.1, 0, 0], [0.2, 0, 0]]), 0.5, return_inverse=True)[1].tolist()
    [0, 0]
    """
    points = as_tensor("coords", coords)
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"coords must be (N, 3); got {tuple(points.shape)}")
    size = torch.tensor(numbers(voxel_size, 3, "voxel_size", positive=True), dtype=torch.float64)
    cells = floor_to_int32("coords", points.double() / size).numpy()
    low, high = bounds(torch.from_numpy(cells))
    space = KeySpace(IndexRange(low, tuple(h + 1 for h in high)))
    keys = space.keys(torch.from_numpy(cells)).numpy()
    _, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
    results = [cells[index], *[index] * return_index, *[inverse] * return_inverse]
    return results[0] if len(results) == 1 else results
