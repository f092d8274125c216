"""What the other libraries' layers share: checks of sizes, coordinates and features, classes, maps in a trace."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import Any

import numpy as np
import torch

from sparseconv.checks import (
    INT32,
    INTEGERS,
    bounds,
    check_indices,
    check_kind,
    check_tensor,
    check_values,
    described,
    row,
    shortened,
)
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange
from sparseconv.torch_private import exporting, surely
from sparseconv.transforms import tracing


def integers(values: Any, name: str, minimum: int | None = None) -> list[int]:
    """Integers, and floats without a fraction, as numpy's arithmetic makes of shapes; nothing is rounded.

    Raises:
        TypeError: a value that is no whole number.
        ValueError: one below ``minimum``, or past 32 bits.
    """
    made = []
    try:
        wrong = type(values) is not list and isinstance(values, (str, bytes, Set, Mapping))
        several: list[Any] = [None] if wrong else list(values)
    except (TypeError, RuntimeError):  # torch's, of a tensor without axes
        raise TypeError(f"{name} must be whole numbers, but it is {described(values)}") from None
    for value in several:
        if not isinstance(value, int):
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            else:
                try:
                    value = element(value) if tracing() else operator.index(value)
                except (TypeError, RuntimeError, NotImplementedError):  # torch's, of a tensor of several
                    raise TypeError(f"{name} must be whole numbers; got {shortened(values)}") from None
        if minimum is not None and surely(value < minimum):
            raise ValueError(f"{name} must be at least {minimum}; got {shortened(values)}")
        if not tracing() and not INT32.min <= value <= INT32.max:
            raise ValueError(f"{name} must fit in 32 bits; got {shortened(values)}")
        made.append(value)
    return made


def element(value: Any) -> int:
    """The integer of an array's element while torch traces; Dynamo of torch 2.11 gives an array no index."""
    found = value.item() if isinstance(value, (np.ndarray, torch.Tensor)) else operator.index(value)
    if not isinstance(found, int):
        raise TypeError
    return found


def check_rows(name: str, rows: Any, columns: int, what: str) -> None:
    """Raise unless these are numbers (N, columns); ``what`` says which columns there are."""
    check_values(name, rows, f"(N, {columns})")
    if rows.is_complex() or rows.dtype == torch.bool:
        raise TypeError(f"{name} must be numbers; got {rows.dtype}")
    if rows.ndim != 2 or rows.shape[1] != columns:
        raise ValueError(f"{name} must be (N, {columns}), {what}; got {tuple(rows.shape)}")


def check_features(name: str, features: Any, rows: int | None = None, each: str = "voxel") -> None:
    """Raise unless features are (N, C), with so many rows where that is known."""
    check_tensor(name, features, "(N, C)")
    if features.ndim != 2:
        raise ValueError(f"{name} must be (N, C); got {tuple(features.shape)}")
    if rows is not None and surely(features.shape[0] != rows):
        raise ValueError(f"{name} must be ({rows}, C), a row for each {each}; got {tuple(features.shape)}")


def check_inside(name: str, grid: VoxelGrid, shape: Sequence[int], of: str) -> None:
    """Raise ValueError where a voxel lies outside of [0, shape), which is called ``of``."""
    if len(grid) and not IndexRange.of_shape(shape).encloses(grid.extent):
        voxels = grid.coords[:, 1:]
        first = int(((voxels < 0) | (voxels >= row(shape, voxels))).any(1).nonzero()[0])
        raise ValueError(
            f"{name} must lie within {of} {list(shape)}, but they reach over {grid.extent}, first in row {first}, "
            f"{grid.coords[first].tolist()}: pass a larger shape, or leave such rows out"
        )


def check_order(call: str, features: Any, coordinates: Any) -> None:
    """Raise TypeError where integers come first and floating point second: the two are exchanged."""
    both = [rows.dtype.is_floating_point for rows in (features, coordinates) if isinstance(rows, torch.Tensor)]
    if both == [False, True]:
        raise TypeError(
            f"{call} takes features first, but they are {features.dtype} and the coordinates {coordinates.dtype}: "
            "exchange the two"
        )


def axes(value: Any, rank: int, name: str, minimum: int | None = None) -> list[int]:
    """One whole number per axis, from one for all or a sequence of them.

    >>> axes(3, 2, "stride"), axes(np.array([1.0, 2.0]), 2, "stride")
    ([3, 3], [1, 2])
    """
    if isinstance(value, torch.Tensor):
        check_values(name, value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.reshape(-1).tolist() if value.ndim else value.item()
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if several and len(value) != rank:
        raise ValueError(f"{name} must be one whole number or {rank} of them; got {shortened(value)}")
    return integers(value if several else [value] * rank, name, minimum)


def trace_constants(values: Sequence[Any]) -> tuple[int, ...]:
    """Numbers of a layer. While torch traces they are constants of the program, and other ones are for another."""
    return tuple([operator.index(n) for n in values]) if tracing() else tuple(values)


def floor_to_int32(name: str, points: torch.Tensor) -> torch.Tensor:
    """Integers, and the whole numbers below others, as int32.

    Raises:
        TypeError: no numbers of one kind.
        ValueError: a number that is not finite, or past 32 bits.

    >>> floor_to_int32("coords", torch.tensor([[1.5, -0.5]])).tolist()
    [[1, -1]]
    """
    check_values(name, points)
    if points.dtype == torch.int32:
        return points
    if not points.is_floating_point() and points.dtype not in INTEGERS:
        raise TypeError(f"{name} must be numbers, integers or floating point; got {points.dtype}")
    if points.is_floating_point():
        if not bool(points.isfinite().all()):
            raise ValueError(f"{name} must be finite; some are infinite or not a number")
        points = points.double().floor()
    low, high = bounds(points.reshape(-1, 1))
    if low and (low[0] < INT32.min or high[0] > INT32.max):
        raise ValueError(f"{name} must fit in 32 bits; got values from {low[0]} to {high[0]}")
    return points.int()


def first_rows(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of each distinct row of coords (N, C), ascending, and the number of each row among them.

    Returns:
        (rows (M,), numbers (N,)), int64: ``coords[rows][numbers] == coords``.
    """
    low, high = bounds(coords)
    if not low:
        return (torch.zeros(0, dtype=torch.int64, device=coords.device),) * 2
    try:
        keys = KeySpace(IndexRange(low, tuple(h + 1 for h in high))).keys(coords.long())
        distinct, numbers = torch.unique(keys, return_inverse=True)
    except ValueError:  # wider than 63 bits
        distinct, numbers = torch.unique(coords, dim=0, return_inverse=True)
    return by_first_row(numbers, len(distinct))


def by_first_row(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups (N,) renumbered by their first row: the first rows (count,), ascending, and the new numbers."""
    rows = torch.arange(len(numbers), device=numbers.device)
    first = torch.full((count,), len(numbers), device=numbers.device).scatter_reduce_(0, numbers, rows, "amin")
    ordered, order = torch.sort(first)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(count, device=order.device))
    return ordered, place[numbers]


def find_sorted(ordered: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of queries (M,) among ascending numbers (N,), and which of them are there; a place is for those."""
    place = torch.searchsorted(ordered, queries).clamp_max(max(0, len(ordered) - 1))
    if len(ordered) == 0:
        return place, torch.zeros_like(queries, dtype=torch.bool)
    return place, ordered[place] == queries


def scaled_coords(grid: VoxelGrid, steps: Sequence[int]) -> torch.Tensor:
    """The coords (N, 1+D) int32 of a grid, its voxels times ``steps``; ValueError past 32 bits."""
    if not tracing() and len(grid):
        box = grid.extent
        check_indices(*([s * edge for s, edge in zip(steps, ends)] for ends in (box.start, [e - 1 for e in box.end])))
    return (grid.coords * row((1, *steps), grid.coords)).int()


def is_unmodified(coords: torch.Tensor, version: int, kept: torch.Tensor) -> bool:
    """Whether a client's coordinates are still those of that version, which were kept.

    On the CPU values are compared, since numpy and ``.data`` write past torch's counter. On a GPU the counter alone is
    asked: a look at the values would wait for the device in every layer.
    """
    if torch.compiler.is_compiling():
        return True
    return coords._version == version and (coords.is_cuda or exporting() or torch.equal(coords, kept))


def uniform_(fan: int, *parameters: torch.nn.Parameter | None) -> None:
    """Fill a layer's parameters with numbers in +-1/sqrt(fan); None is passed over."""
    bound = 1 / math.sqrt(fan)
    for parameter in parameters:
        if parameter is not None:
            torch.nn.init.uniform_(parameter, -bound, bound)


def check_algorithm(value: Any) -> None:
    """Raise TypeError unless ``value`` names an algorithm of the other library, by one of its enumerations."""
    if value is not None:
        check_kind("algo", value, Enum, "leave it out, or pass a ConvAlgo: sparseconv chooses by itself")


def maps_for_trace(kept: Any, traced: Any) -> Any:
    """The maps that a tensor keeps: those of the trace, a ``traced``, while torch traces, and ordinary ones else.

    ``traced.of`` makes one that stands for ordinary maps, ``after_trace`` the ordinary maps that one has become.
    """
    is_traced = isinstance(kept, traced)
    if not tracing():
        return kept.after_trace() if is_traced else kept
    if is_traced and kept.ordinary is None:
        return kept
    return traced.of(kept.ordinary if is_traced else kept)


#: the default of an argument that must be given
REQUIRED = inspect.Parameter.empty


def specialized(
    base: type, name: str, does: str, arguments: str, defaults: Mapping[str, Any] | None = None, **fixed: Any
) -> Any:
    """The class ``name``: ``base`` with the arguments in ``fixed`` given.

    Args:
        does: its docstring.
        arguments: what it takes, in the other library's order; those of ``base`` that are by name alone come last.
        defaults: where they differ from those of ``base``, `REQUIRED` for none.
    """
    own, *known = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
    by_name = {p.name: p.replace(default=(defaults or {}).get(p.name, p.default)) for p in known}
    by_name_alone = [p for p in known if p.kind is p.KEYWORD_ONLY]
    signature = inspect.Signature([own, *(by_name[argument] for argument in arguments.split()), *by_name_alone])

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        try:
            given = signature.bind(self, *args, **named)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}; it takes {inspect.signature(type(self))}") from None
        given.apply_defaults()
        base.__init__(**given.arguments, **fixed)  # type: ignore[misc]

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return type(name, (base,), {"__init__": __init__, "__doc__": does, "__module__": base.__module__})
