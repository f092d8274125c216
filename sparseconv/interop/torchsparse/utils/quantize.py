"""Points -> the voxels that hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparseconv.geometry.arguments import bounds, numbers
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange
from sparseconv.interop.arguments import lower_corners
from sparseconv.kinds import as_tensor


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
    cells = lower_corners("coords", points.double() / size).numpy()
    low, high = bounds(torch.from_numpy(cells))
    space = KeySpace(IndexRange(low, tuple(h + 1 for h in high)))
    keys = space.keys(torch.from_numpy(cells)).numpy()
    _, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
    results = [cells[index], *[index] * return_index, *[inverse] * return_inverse]
    return results[0] if len(results) == 1 else results
