"""Points -> the cells that hold them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from sparseconv.geometry import arguments
from sparseconv.interop.arguments import lower_corners
from sparseconv.interop.minkowski.coordinate_map import CoordinateMap, first_rows
from sparseconv.interop.minkowski.kinds import Axes, positive
from sparseconv.kinds import as_device, as_tensor, check_values, described

Rows: TypeAlias = np.ndarray | torch.Tensor


def _matrix(name: str, rows: Any) -> Any:
    if not isinstance(rows, (np.ndarray, torch.Tensor)) or rows.ndim != 2:
        raise ValueError(f"{name} must be a matrix (N, D), but it is {described(rows)}")
    return rows


def _holds(dtype: torch.dtype, value: int) -> bool:
    """Whether a label is a number of this kind: uint8 has no -100."""
    return dtype is not torch.bool and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def fnv_hash_vec(arr: np.ndarray) -> np.ndarray:
    """FNV-1 hashes (N,) uint64 of rows (N, D)."""
    words = _matrix("arr", np.asarray(arr)).astype(np.uint64)
    hashed = np.full(len(words), 14695981039346656037, np.uint64)
    for column in words.T:
        hashed *= np.uint64(1099511628211)
        hashed ^= column
    return hashed


def ravel_hash_vec(arr: np.ndarray) -> np.ndarray:
    """Numbers (N,) uint64 of rows (N, D) in a box around them: equal rows alone have equal numbers."""
    given = _matrix("arr", np.asarray(arr))
    words = (given - given.min(0)).astype(np.uint64)
    sizes = words.max(0) + np.uint64(1)
    keys = np.zeros(len(words), np.uint64)
    for column, size in zip(words.T, sizes):
        keys = keys * size + column
    return keys


def quantize(coords: Rows) -> tuple[Any, Any]:
    """The first row of each cell, and the number of each row's cell, of integer coords (N, D)."""
    first, numbers = first_rows(torch.as_tensor(_matrix("coords", coords)))
    return (first.numpy(), numbers.numpy()) if isinstance(coords, np.ndarray) else (first, numbers)


def quantize_label(coords: Rows, labels: Rows, ignore_label: int) -> tuple[Any, Any, Any]:
    """`quantize`, and the label of each cell (M,): ``ignore_label`` where its rows have different ones."""
    first, numbers = first_rows(torch.as_tensor(_matrix("coords", coords)))
    given = torch.as_tensor(labels)
    if given.shape not in ((len(coords),), (len(coords), 1)):
        raise ValueError(f"labels must be ({len(coords)},), one a row of coords; got {tuple(given.shape)}")
    if given.is_floating_point() or given.is_complex() or not _holds(given.dtype, ignore_label):
        given = given.to(torch.int64)
    given = given.flatten()
    cell_labels = given[first]
    differs = torch.zeros(len(first), dtype=torch.int32, device=first.device)
    differs.index_add_(0, numbers, (given != cell_labels[numbers]).int())
    made = torch.where(differs > 0, ignore_label, cell_labels)
    if isinstance(coords, np.ndarray):
        return first.numpy(), numbers.numpy(), made.numpy()
    return first, numbers, made


def sparse_quantize(
    coordinates: Rows,
    features: Rows | None = None,
    labels: Rows | None = None,
    ignore_label: int = -100,
    return_index: bool = False,
    return_inverse: bool = False,
    return_maps_only: bool = False,
    quantization_size: Any = None,
    device: torch.device | str = "cpu",
) -> Any:
    """The cells floor(c / quantization_size) that hold points, and the first point of each.

    Args:
        coordinates: (N, D) numbers.
        features: (N, C); those of the first point of a cell are returned.
        labels: (N,) integers, or (N, 1); a cell whose points have different ones gets ``ignore_label``.
        return_index, return_inverse: return the rows that were kept, and the cell of each point.
        return_maps_only: return those alone.
        quantization_size: edge of a cell, one number or one an axis; default 1.
        device: where cells are found, and tensors returned.

    Returns:
        What was asked for, in this order: cells (M, D) int32, features, labels, index (M,), inverse (N,). Cells come in
        the order of their first point. One result comes by itself. As in MinkowskiEngine, numpy arrays with labels
        give numpy arrays; without labels, tensors, but for features.

    >>> cells, index = sparse_quantize(np.array([[0.1], [0.2], [1.7]]), return_index=True)
    >>> cells.tolist(), index.tolist()
    ([[0], [1]], [0, 2])
    """
    if not isinstance(coordinates, (np.ndarray, torch.Tensor)) or coordinates.ndim != 2:
        raise TypeError("coordinates must be a tensor or a numpy array (N, D)")
    for name, rows in (("features", features), ("labels", labels)):
        if rows is not None and not isinstance(rows, np.ndarray):
            check_values(name, rows, "or a numpy array")
        if rows is None:
            continue
        if rows.ndim < 1 or len(rows) != len(coordinates):
            raise ValueError(f"{name} are {tuple(rows.shape)}, coordinates {len(coordinates)}: one row a point each")
    if features is not None and features.ndim != 2:
        raise ValueError(f"features must be (N, C); got {tuple(features.shape)}")
    if return_inverse and not (return_index or return_maps_only):
        raise ValueError("return_inverse goes with return_index=True")
    points, device = as_tensor("coordinates", coordinates), as_device(device)
    if quantization_size is not None:
        sizes = arguments.numbers(quantization_size, points.shape[1], "quantization_size", positive=True)
        edges = torch.tensor(sizes, dtype=torch.float64, device=points.device)
        is_wide = isinstance(coordinates, np.ndarray) and not np.isscalar(quantization_size)  # as numpy divides
        points = points / edges.to(points.dtype if points.is_floating_point() and not is_wide else torch.float64)
    cells = lower_corners("cells", points).to(device)
    made: list[Any] = []
    if labels is None:
        first, numbers = quantize(cells)
    else:
        first, numbers, *made = quantize_label(cells, as_tensor("labels", labels).to(device), ignore_label)
    if return_maps_only:
        return (first, numbers) if return_inverse else first
    results: list[Any] = [cells[first]]
    if features is not None:
        rows = first.cpu().numpy() if isinstance(features, np.ndarray) else first.to(features.device)
        results.append(features[rows])
    results += made + [first] * return_index + [numbers] * return_inverse
    if labels is not None and isinstance(coordinates, np.ndarray):
        results = [r.cpu().numpy() if isinstance(r, torch.Tensor) else r for r in results]
    return results[0] if len(results) == 1 else tuple(results)


def unique_coordinate_map(coordinates: torch.Tensor, tensor_stride: Axes = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of each voxel of coordinates (N, 1+D), and the number of each row's voxel, int64."""
    check_values("coordinates", coordinates, "(N, 1+D) integers")
    stride = positive("tensor_stride", tensor_stride, _matrix("coordinates", coordinates).shape[1] - 1)
    return CoordinateMap.of(coordinates, tuple(reversed(stride)))[1:]
