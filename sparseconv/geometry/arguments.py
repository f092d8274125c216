"""What grids are given, checked before anything is built: coordinates, sizes, boxes, devices."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from sparseconv.geometry.ranges import IndexRange, Ints
from sparseconv.kinds import as_device, check_values, warn

INT32 = torch.iinfo(torch.int32)
Floats = tuple[float, ...]
#: dtypes that coordinates come in
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
#: batch items at most, and rows that one call may make of each other, some GB
MOST_ITEMS, MOST_ROWS = 2**31, 2**27
#: what to do with a list of scenes
SEVERAL = "SparseTensor.from_list(coords, features) makes a batch of several scenes"


def no_batch(rank: int) -> str:
    """What to do where coords of ``rank`` + 1 columns were meant as voxels of that many axes."""
    return (
        f"coords are (N, 1+D), the batch item first. If these are voxels of one scene in {rank + 1} axes, they "
        "lack the batch column: torch.nn.functional.pad(coords, (1, 0))"
    )


#: what to do with coords whose batch item comes last
BATCH_LAST = "Where the batch item comes last, pass coords.roll(1, 1)"
#: batch items from which on nobody means them without saying batch_size, if the last column looks like the batch
MANY_ITEMS = 9


def items_of(coords: torch.Tensor, low: Ints, high: Ints, batch_size: int | None) -> int:
    """The number of batch items of coords with these bounds: ``batch_size``, or 1 more than the last one present.

    Warns where nobody says ``batch_size``, column 0 names many items, and the last column looks like theirs. It looks
    at no value of a GPU: there the last column is noticed only where it is 0 throughout.

    Raises:
        ValueError: an item below 0, or not below ``batch_size``.
    """
    if not low:
        return 1 if batch_size is None else batch_size
    if low[0] < 0:
        last = f". {BATCH_LAST}" if low[-1] == 0 else ""
        raise ValueError(f"batch items (column 0 of coords) start at 0; got {low[0]}. {no_batch(len(low) - 1)}{last}")
    if batch_size is not None:
        if high[0] >= batch_size:
            last = f". {BATCH_LAST}" if low[-1] >= 0 and high[-1] < batch_size else ""
            advice = f"{no_batch(len(low) - 1)}{last}"
            raise ValueError(f"coords name batch item {high[0]}, but batch_size is {batch_size}. {advice}")
        return batch_size
    is_unlike = high[0] + 1 >= MANY_ITEMS and low[-1] == 0 and high[-1] < high[0]
    if is_unlike and not torch.compiler.is_compiling() and _may_be_last(coords, high[-1]):
        seen = "is 0" if high[-1] == 0 else f"is sorted, from 0 to {high[-1]}"
        warn(
            f"coords name {high[0] + 1} batch items in column 0, and their last column {seen}. {BATCH_LAST}. Where it "
            "comes first, batch_size= says so"
        )
    return high[0] + 1


def _may_be_last(coords: torch.Tensor, last: int) -> bool:
    """Whether the last column, from 0 to ``last``, is ordered by batch item and the first is not."""
    if last == 0 or coords.is_cuda:
        return last == 0
    falls = (coords[1:] < coords[:-1]).any(0).tolist()
    return falls[0] and not falls[-1]


def no_grid(given: object) -> str:
    """What to do where something else was given for a grid."""
    if isinstance(given, tuple) and len(given) == 2 and hasattr(given[0], "coords"):
        return "voxelize returns two things, grid, point_rows = voxelize(points, voxel_size)"
    return "pass VoxelGrid(coords), or the grid of a SparseTensor, x.grid"


def rows_of_points(shape: Sequence[int]) -> str:
    """What to do where features of that shape are no rows of voxels: they may be of points."""
    advice = (
        ": sparseconv.ops.voxelize_features(features, point_rows, len(grid)) makes rows of voxels from rows of points"
    )
    return advice if len(shape) == 2 else ""


def checked_coords(coords: torch.Tensor) -> torch.Tensor:
    """The coords of a grid as contiguous int32."""
    check_values("coords", coords, "(N, 1+D) integers", SEVERAL)
    narrow = coords.dtype is torch.int32
    if not narrow:
        check_integers("coords", coords)
    shape = coords.shape
    if len(shape) != 2 or not 2 <= shape[1] <= 5:
        advice = ""
        if len(shape) == 2 and 2 <= shape[0] <= 5:
            advice = ": pass coords.T where rows and columns are exchanged"
        elif len(shape) == 3:
            advice = ": SparseTensor.from_list(list(coords), list(features)) makes a batch of several scenes"
        raise ValueError(
            f"coords must be (N, 1+D): a batch column and 1 to 4 spatial axes; got shape {tuple(shape)}{advice}"
        )
    if not narrow:
        low, high = bounds(coords)
        if low:
            check_indices(low, high)
        coords = coords.int()
    return coords.contiguous()  # integers have no gradient to be detached from


def check_integers(name: str, coords: torch.Tensor) -> None:
    """Raise TypeError where coords of voxels are of another dtype."""
    if coords.dtype not in INTEGERS:
        advice = "voxelize() turns positions into voxels" if coords.is_floating_point() else "use int32"
        raise TypeError(f"{name} must be integers; got {coords.dtype}: {advice}")


def own(coords: torch.Tensor, filled: bool = True) -> torch.Tensor:
    """A copy that torch counts the writes to, within ``torch.inference_mode()`` too; or the memory for one."""
    make = torch.clone if filled else torch.empty_like
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return make(coords)
    with torch.inference_mode(False):
        return make(coords)


def bounds(coords: torch.Tensor) -> tuple[Ints, Ints]:
    """Smallest and largest value of each column, read from the device at once; empty where there is no row."""
    if coords.shape[0] == 0:
        return (), ()
    low, high = torch.stack(torch.aminmax(coords, dim=0)).tolist()
    return tuple(low), tuple(high)


def check_indices(low: Sequence[int], high: Sequence[int]) -> None:
    """Raise ValueError where indices from ``low`` to ``high`` are past 32 bits; the last is for the end of boxes."""
    if min(low) < INT32.min or max(high) >= INT32.max:
        raise ValueError(
            f"voxel indices must fit in 32 bits and lie from {INT32.min} to {INT32.max - 1}, since a box ends one "
            f"further; got values from {min(low)} to {max(high)}"
        )


def outside(box: IndexRange) -> bool:
    """Whether a box of voxels leaves 32 bits."""
    return box.rank > 0 and (min(box.start) < INT32.min or max(box.end) > INT32.max)


def check_box(box: IndexRange, what: str) -> None:
    """Raise ValueError where a box of voxels leaves 32 bits."""
    if outside(box):
        raise ValueError(f"{what} must lie within 32 bits, from {INT32.min} to {INT32.max}; got {box}")


def check_rows(count: int, what: str) -> None:
    """Raise ValueError for more rows than one call makes."""
    if count > MOST_ROWS:
        raise ValueError(f"{what} would have {count:,} rows, more than {MOST_ROWS:,}: take smaller steps")


def checked_batch_size(batch_size: Any) -> int:
    """A number of batch items."""
    try:
        size = operator.index(batch_size)
    except (TypeError, RuntimeError):
        raise TypeError(f"batch_size must be an integer; got {batch_size!r}") from None
    if not 0 <= size < MOST_ITEMS:
        raise ValueError(f"batch_size must be from 0 to {MOST_ITEMS - 1}; got {size}")
    return size


def numbers(value: Any, rank: int, name: str, positive: bool = False) -> Floats:
    """One finite number for each of ``rank`` axes, from one or a sequence of them."""
    wanted = f"{name} must be one number or {rank}, one for each axis; got {value!r}"
    if isinstance(value, (str, bytes, Set, Mapping)) or value is None:
        raise TypeError(wanted)
    try:
        values = (float(value),) * rank
    except (TypeError, ValueError, RuntimeError, OverflowError):
        try:
            values = tuple(float(v) for v in value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(wanted) from None
    if len(values) != rank:
        raise ValueError(f"{wanted}. {no_batch(rank)}" if len(values) == rank + 1 else wanted)
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name} must be finite; got {value!r}")
    if positive and min(values) <= 0:
        raise ValueError(f"{name} must be positive; got {value!r}")
    return values


def checked_device(device: torch.device | str) -> torch.device:
    """A device that a grid can be on, with its number; as `as_device` raises, and ValueError for the device meta."""
    place = as_device(device)
    if place.type == "meta":
        raise ValueError("the device meta keeps no values, but a grid has to have them: pass 'cpu' or 'cuda'")
    return place


def row(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Integers as a row that coords on a device are compared or moved with, int64."""
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def check_several(grids: Any) -> None:
    """Raise ValueError unless these are several grids of which the host knows all voxels."""
    if not isinstance(grids, (list, tuple)) or not grids:
        raise ValueError(f"cat needs a sequence of at least one grid; got {grids!r}")
    for number, grid in enumerate(grids):
        if getattr(grid, "fault", None) is not None or getattr(grid, "is_shared", False):
            raise ValueError(f"cat needs grids whose voxels are all known here; got {grid!r} at place {number}")


def check_same_space(mine: Any, theirs: Any, batch: bool) -> None:
    """Raise ValueError for grids whose coordinates mean other places; ``batch``: or that have other batch sizes."""
    for name in ("rank", "voxel_size", "origin", "device") + (("batch_size",) if batch else ()):
        a, b = getattr(mine, name), getattr(theirs, name)
        if a != b and not (isinstance(a, tuple) and close(a, b, mine.voxel_size)):
            raise ValueError(f"the grids differ in {name}: {a} and {b}")


def close(these: Sequence[float], those: Sequence[float], size: Sequence[float]) -> bool:
    """Whether lengths are equal up to a millionth of a voxel."""
    return all(abs(a - b) <= 1e-6 * s for a, b, s in zip(these, those, size))


def check_mask(mask: torch.Tensor, rows: int) -> None:
    """mask is (rows,) bool; else an error."""
    check_values("mask", mask, f"({rows},) bool")
    if mask.dtype != torch.bool or mask.shape != (rows,):
        raise ValueError(f"mask must be ({rows},) bool; got {tuple(mask.shape)} {mask.dtype}")
