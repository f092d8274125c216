"""What an argument must be: each question asked in one place, each wrong kind answered with what to do.

Tensors, devices and numbers come first, then what grids are given: coordinates, sizes, masks."""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import numpy as np
import torch


def check_tensor(name: str, value: object, wanted: str = "", several: str = "") -> None:
    """Raise TypeError unless ``value`` is a plain tensor: dense in memory, neither sparse, nested nor quantized.

    ``wanted`` says its shape and dtype in the message, ``several`` what to do with a list of tensors or arrays.

    >>> check_tensor("x", [1.0, 2.0])
    Traceback (most recent call last):
    TypeError: x must be a torch.Tensor, but it is a list: torch.tensor(x) makes one
    """
    if (
        not isinstance(value, torch.Tensor)
        or value.layout is not torch.strided
        or value.is_quantized
        or value.is_nested
    ):
        raise TypeError(_not_a_plain_tensor(name, value, wanted, several))


def check_values(name: str, value: torch.Tensor, wanted: str = "", several: str = "") -> None:
    """Raise TypeError unless ``value`` is a plain tensor, ValueError where it keeps no values, on the device meta."""
    check_tensor(name, value, wanted, several)
    if value.is_meta:
        raise ValueError(
            f"{name} must hold values, but it is on the device meta, which keeps none: make it on another device"
        )


def as_tensor(name: str, value: Any, device: torch.device | None = None) -> torch.Tensor:
    """A plain tensor of a tensor, an array or a nested list of numbers; TypeError for what holds no numbers."""
    if isinstance(value, np.ndarray) and any(step < 0 for step in value.strides):
        value = value.copy()  # which torch does not do by itself
    try:
        tensor = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"{name} must be a tensor, an array or a list of numbers, but it is {described(value)} "
            f"({shortened(value)}), and torch could not convert it: {error}"
        ) from None
    check_tensor(name, tensor)
    return tensor


def _not_a_plain_tensor(name: str, value: Any, wanted: str, several: str) -> str:
    if not isinstance(value, torch.Tensor):
        kind = f"torch.Tensor, {wanted}" if wanted else "torch.Tensor"
        return f"{name} must be a {kind}, but it is {described(value)}: {_instead(name, value, several)}"
    if value.is_nested:
        return f"{name} must be one tensor, but it is a nested one: torch.cat({name}.unbind()) puts its items together"
    if value.is_quantized:
        return f"{name} must not be quantized, but its dtype is {value.dtype}: pass {name}.dequantize()"
    return (
        f"{name} must be dense in memory, but its layout is {value.layout}: pass {name}.to_dense(), or the values of "
        "its entries as features of a VoxelGrid of their indices"
    )


def _instead(name: str, value: object, several: str) -> str:
    if value is None:
        return "it cannot be left out here, so pass one"
    if hasattr(value, "grid") and hasattr(value, "features"):
        return f"pass its features, {name}.features, or give the whole to a module of sparseconv.nn"
    if hasattr(value, "__array__"):
        return f"torch.as_tensor({name}) makes one"
    if is_several(value):
        joined = joining(name, value)
        return several.format(joined=joined) if several else f"{joined} puts their rows together"
    if isinstance(value, (list, tuple, int, float, bool, range)):
        return f"torch.tensor({name}) makes one"
    return "pass a tensor instead"


def is_several(value: object) -> bool:
    """Whether a value is a list or tuple of tensors or arrays, such as the scenes of a batch."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(getattr(item, "ndim", 0) for item in value)


def joining(name: str, value: Any) -> str:
    """The call that puts the rows of several tensors or arrays together."""
    tensors = isinstance(value[0], torch.Tensor)
    return f"torch.cat({name})" if tensors else f"torch.from_numpy(numpy.concatenate({name}))"


def described(value: object) -> str:
    """The kind of a value in words: ``None``, ``a list``, ``a numpy.ndarray``."""
    if value is None:
        return "None"
    kind = type(value)
    text = (
        kind.__name__
        if kind.__module__ in ("builtins", "torch")
        else f"{kind.__module__.split('.')[0]}.{kind.__name__}"
    )
    return f"{'an' if text[0] in 'aeiouAEIOU' else 'a'} {text}"


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], advice: str) -> None:
    """Raise TypeError unless ``value`` is one of ``kinds``; ``advice`` says how to come by one."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise TypeError(f"{name} must be a {wanted}, but it is {described(value)}: {advice}")


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raise TypeError unless ``value`` is an integer (a bool is none), ValueError where it is below ``least``."""
    if (type(value) is int and least <= value < 2**63) or isinstance(value, torch.SymInt):
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, but it is {described(value)} ({shortened(value)}): pass an int")
    if int(value) < least:
        raise ValueError(f"{name} must be at least {least}, but it is {value}: pass a larger one")
    if int(value) >= 2**63:
        raise ValueError(f"{name} must fit in 64 bits, but it is {value}: pass a smaller one")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of the names: TypeError for another kind, ValueError for another name."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(map(repr, choices))}, but it is {described(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, but it is {value!r}")


def warn(message: str) -> None:
    """A UserWarning at the line that called this library, so that Python shows it once for each such line."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "sparseconv":
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)


def as_device(value: object) -> torch.device:
    """The device of this name, with its number: TypeError for what names none, ValueError for one that torch lacks.

    >>> as_device("banana")
    Traceback (most recent call last):
    ValueError: 'banana' names no device of torch: pass 'cpu', 'cuda' or 'cuda:1'
    """
    if isinstance(value, torch.dtype):
        raise TypeError(
            f"device must name a device, but it is the dtype {value}: pass a dtype as dtype= where there is one"
        )
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise TypeError(
            f"device must be a torch.device or its name, but it is {described(value)}: pass 'cpu' or 'cuda'"
        )
    try:
        device = torch.device(value)
    except RuntimeError:
        raise ValueError(f"{value!r} names no device of torch: pass 'cpu', 'cuda' or 'cuda:1'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{value!r} asks for a GPU, but torch.cuda.is_available() is False here: stay on 'cpu'")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"no memory can be had on {value!r}: {str(error).splitlines()[0]}") from None


def shortened(value: object) -> str:
    """A value as text that fits into a message."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


# ---- what grids are given

INT32 = torch.iinfo(torch.int32)
Ints = tuple[int, ...]
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
            f"coords name {high[0] + 1} batch items in column 0, and their last column {seen}. {BATCH_LAST}. If it "
            "comes first, pass batch_size="
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
    """Raise ValueError unless these are several grids of which the CPU knows all voxels."""
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
