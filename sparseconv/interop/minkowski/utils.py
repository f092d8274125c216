"""``MinkowskiEngine.utils``: batches of scenes, quantization, initialization and summaries."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from sparseconv import checks as arguments
from sparseconv.checks import as_device, as_tensor, check_kind, check_values, described
from sparseconv.interop.arguments import first_rows, floor_to_int32
from sparseconv.interop.minkowski.common import Axes, positive
from sparseconv.interop.minkowski.coordinate_manager import CoordinateMap

Rows: TypeAlias = np.ndarray | torch.Tensor


def _tensor(rows: Any, name: str) -> torch.Tensor:
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(rows))
    check_values(name, rows, "or a numpy array, one per scene")
    return rows


def batched_coordinates(
    coords: Sequence[Rows], dtype: torch.dtype = torch.int32, device: torch.device | str | None = None
) -> torch.Tensor:
    """Coordinates (N_b, D) of each scene -> (N, 1+D), the number of the scene first; floored where int32 is asked.

    >>> batched_coordinates([torch.tensor([[1.5, 2]]), torch.tensor([[3, 4]])]).tolist()
    [[0, 1, 2], [1, 3, 4]]
    """
    if isinstance(coords, torch.Tensor):
        check_values("coords", coords, "(B, N, D)")
    if isinstance(coords, (np.ndarray, str)) or not isinstance(coords, (Sequence, torch.Tensor)) or not len(coords):
        raise TypeError(f"coords must be a sequence of arrays (N, D), one per scene; got {type(coords).__name__}")
    if dtype not in (torch.int32, torch.float32):
        raise ValueError(f"dtype must be torch.int32 or torch.float32; got {dtype}")
    scenes = [_tensor(c, "coords") for c in coords]
    shapes = {c.shape[1] if c.ndim == 2 else None for c in scenes}
    if None in shapes or len(shapes) > 1:
        raise ValueError(
            f"every scene's coordinates must be (N, D), with one D; got {[tuple(c.shape) for c in scenes]}"
        )
    rows = []
    for number, scene in enumerate(scenes):
        if dtype == torch.int32:
            scene = floor_to_int32("coords", scene)
        scene = scene.to(device=scene.device if device is None else device, dtype=dtype)
        rows.append(torch.cat([torch.full_like(scene[:, :1], number), scene], 1))
    return torch.cat(rows)


def sparse_collate(
    coords: Sequence[Rows],
    feats: Sequence[Rows],
    labels: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> tuple:
    """Coordinates (N_b, D), features (N_b, C) and labels of each scene -> those of the batch.

    Returns:
        (coordinates (N, 1+D), features (N, C)), and labels where there were any: joined where they are arrays, else a
        list of them.
    """
    if labels is not None and (isinstance(labels, (str, bytes)) or not isinstance(labels, Sequence)):
        raise TypeError(f"labels must be a sequence of arrays, one per scene, but it is {described(labels)}")
    if labels is not None and len(labels) != len(coords):
        raise ValueError(f"there are {len(coords)} scenes and {len(labels)} labels: one of each per scene")
    batched = batched_coordinates(coords, dtype, device)
    scenes = [_tensor(f, "feats") for f in feats]
    mine, theirs = ([tuple(rows.shape[:1]) for rows in each] for each in (coords, scenes))
    if mine != theirs:
        raise ValueError(
            f"scenes have {_counts(mine)} coordinates and {_counts(theirs)} features: both need one row per point"
        )
    features = _joined("feats", scenes)
    if labels is None:
        return batched, features
    given = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in labels]
    return batched, features, _joined("labels", given) if isinstance(given[0], torch.Tensor) else given


def _counts(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(*shape) if shape else "no rows of" for shape in shapes)


def _joined(name: str, scenes: list[Any]) -> torch.Tensor:
    if not all(isinstance(rows, torch.Tensor) and rows.ndim for rows in scenes):
        raise ValueError(
            f"{name} must be arrays with a row per point, or (1,) per scene; got {[described(r) for r in scenes]}"
        )
    if len({rows.shape[1:] for rows in scenes}) > 1:
        raise ValueError(f"{name} must differ in rows alone; got {[tuple(rows.shape) for rows in scenes]}")
    return torch.cat(scenes)


def batch_sparse_collate(
    data: Sequence[tuple], dtype: torch.dtype = torch.int32, device: torch.device | str | None = None
) -> tuple:
    """`sparse_collate` of (coordinates, features) or (coordinates, features, labels), one tuple a scene."""
    coords, feats, *labels = zip(*data)
    return sparse_collate(coords, feats, labels[0] if labels else None, dtype, device)


class SparseCollation:
    """A ``collate_fn`` for (coordinates, features, labels), one tuple a scene.

    Args:
        limit_numpoints: leave out the scenes from the one on that would exceed so many points; -1 for no limit.
    """

    def __init__(
        self,
        limit_numpoints: int = -1,
        dtype: torch.dtype = torch.int32,
        device: torch.device | str | None = None,
    ) -> None:
        self.limit_numpoints, self.dtype, self.device = limit_numpoints, dtype, device

    def __call__(self, list_data: Sequence[tuple]) -> tuple:
        kept: list[tuple] = []
        points = 0
        for scene in list_data:
            points += len(scene[0])
            if 0 < self.limit_numpoints < points:
                logging.getLogger(__name__).warning(
                    "%d of %d scenes fit in %d points: the others are left out of the batch",
                    len(kept), len(list_data), self.limit_numpoints,
                )  # fmt: skip
                break
            kept.append(scene)
        return batch_sparse_collate(kept, dtype=self.dtype, device=self.device)


# ---- quantization: points -> the cells that hold them


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
        raise ValueError(f"labels must be ({len(coords)},), one per row of coords; got {tuple(given.shape)}")
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
        quantization_size: edge of a cell, one number or one per axis; default 1.
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
            raise ValueError(
                f"{name} are {tuple(rows.shape)}, coordinates {len(coordinates)}: both need one row per point"
            )
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
    cells = floor_to_int32("cells", points).to(device)
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


# ---- initialization


def kaiming_normal_(
    tensor: torch.Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu"
) -> torch.Tensor:
    """Fill a kernel (V, C_in, C_out), or (C_in, C_out), with normal numbers of standard deviation gain / sqrt(fan).

    The fan of a kernel is taps times channels, those of the input for ``"fan_in"``. As in MinkowskiEngine, that of a
    matrix is its second dimension for ``"fan_in"`` and its first for ``"fan_out"``.
    """
    if mode.lower() not in ("fan_in", "fan_out"):
        raise ValueError(f"mode must be 'fan_in' or 'fan_out'; got {mode!r}")
    if tensor.ndim < 2:
        raise ValueError(f"a kernel has two dimensions or more; got {tuple(tensor.shape)}")
    taps, fans = (1, (tensor.shape[1], tensor.shape[0])) if tensor.ndim == 2 else (tensor.shape[0], tensor.shape[1:3])
    fan = taps * fans[mode.lower() == "fan_out"]
    gain = torch.nn.init.calculate_gain(nonlinearity, a)
    with torch.no_grad():
        return tensor.normal_(0, gain / math.sqrt(fan))


# ---- summaries: layers, the shapes that they give, and their parameters


#: a module, the shapes that it gave, its own parameters
Row = tuple[str, str, int]


def summary(model: torch.nn.Module, summary_input: Any) -> tuple[int, int]:
    """Print the modules that a call goes through, in the order of their results, and the numbers of parameters.

    Args:
        model: any module; it is called once, in the mode in which it is.
        summary_input: what it takes.

    Returns:
        (parameters, parameters that are trained), each counted once.
    """
    text, counts = minkowski_summary_string(model, summary_input)
    sys.stdout.write(text)
    return counts


def minkowski_summary_string(model: torch.nn.Module, summary_input: Any) -> tuple[str, tuple[int, int]]:
    """The text of `summary`, and what it returns.

    >>> text, counts = minkowski_summary_string(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.zeros(1, 2))
    >>> counts, text.splitlines()[2].split()
    ((9, 9), ['Linear-1', '(1,', '3)', '9'])
    """
    check_kind("model", model, torch.nn.Module, "pass a module, as torch.nn.Sequential(...)")
    rows: list[Row] = []
    watched = [m for m in model.modules() if not isinstance(m, (torch.nn.Sequential, torch.nn.ModuleList))]
    hooks = [module.register_forward_hook(partial(_seen, rows)) for module in watched]
    try:
        with torch.no_grad():
            model(summary_input)
    finally:
        for hook in hooks:
            hook.remove()
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    lines = [f"{'module':<40} {'output':>24} {'parameters':>12}", "-" * 78]
    lines += [f"{name:<40} {shape:>24} {count:>12,}" for name, shape, count in rows]
    lines += ["-" * 78, f"{total:,} parameters, of which {trained:,} are trained"]
    return "\n".join(lines) + "\n", (total, trained)


def _seen(rows: list[Row], module: torch.nn.Module, _: Any, output: Any) -> None:
    given = output if isinstance(output, (list, tuple)) else [output]
    shapes = [str(tuple(each.shape)) if hasattr(each, "shape") else type(each).__name__ for each in given]
    own = sum(p.numel() for p in module.parameters(recurse=False))
    rows.append((f"{type(module).__name__}-{len(rows) + 1}", ", ".join(shapes), own))
