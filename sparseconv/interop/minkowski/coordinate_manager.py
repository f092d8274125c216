"""`CoordinateManager`: sets of voxels, whose coordinates are multiples of a tensor stride, and the plans between them.

A grid counts in units of the tensor stride and holds the axes backwards: MinkowskiEngine numbers taps with the first
axis fastest, plans with the last one. So a kernel's taps are those of a plan's box, in the plan's own order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from sparseconv.checks import bounds, check_kind, row
from sparseconv.compiler.traced import TracedGrid
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Ints
from sparseconv.interop.arguments import by_first_row, check_rows, floor_to_int32, scaled_coords, trace_constants
from sparseconv.interop.minkowski.common import (
    Axes,
    CoordinateMapKey,
    KernelGenerator,
    Key,
    RegionType,
    convert_to_int_list,
    kernel_of,
    positive,
    rank_of,
)
from sparseconv.ops.interpolation import Interpolation
from sparseconv.ops.points import PointGroups, Reduce
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.transforms import tracing


def backwards(values: Sequence[int]) -> Ints:
    """One integer per axis, in the other order."""
    return tuple(reversed(values))


def flipped(coords: torch.Tensor) -> torch.Tensor:
    """Coords (N, 1+D) with the axes in the other order, the batch still first; a copy."""
    return torch.cat([coords[:, :1], coords[:, 1:].flip(1)], 1)


def divided(stride: Sequence[int], steps: Sequence[int]) -> Ints:
    """The tensor stride of the finer side of a transposed layer, which divides without a remainder."""
    if any(t % s for t, s in zip(stride, steps)):
        raise ValueError(
            "a transposed layer divides the tensor stride, which must be a multiple of its own stride "
            f"{list(steps)} on every axis; got {list(stride)}"
        )
    return tuple(t // s for t, s in zip(stride, steps))


def common_unit(units: Sequence[Ints]) -> Ints:
    """The largest unit that divides all of these, an axis."""
    return tuple(math.gcd(*axis) for axis in zip(*units))


class _Rows:
    """Voxels or points, each in a batch item: ``batch`` (N,), of so many items."""

    batch: torch.Tensor
    batch_size: int

    @property
    def items(self) -> PointGroups | TracedItems:
        """The rows of each batch item."""
        return self._groups

    @cached_property
    def _groups(self) -> PointGroups:
        return PointGroups(self.batch, self.batch_size)

    def item_rows(self) -> list[torch.Tensor]:
        """The rows (N_b,) int64 of each batch item."""
        return list(torch.argsort(self.batch, stable=True).split(self._groups.counts.tolist()))


class TracedItems:
    """The voxels of each batch item while torch traces: what `PointGroups` does with them."""

    def __init__(self, grid: TracedGrid) -> None:
        self.grid, self.num_voxels = grid, grid.batch_size

    def reduce(self, features: torch.Tensor, how: Reduce = "mean") -> torch.Tensor:
        """The mean, sum or maximum of each item's voxels, (N, C) -> (B, C)."""
        return self.grid.pooled(features, "average" if how == "mean" else how)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Each voxel takes the features of its item, (B, C) -> (N, C)."""
        return self.grid.spread(x)


class CoordinateMap(_Rows):
    """The voxels of one key.

    Args:
        grid: the voxels in units, axes backwards.
        unit: cells of the coordinates in one of the grid's, an axis, backwards.
        stride: the tensor stride, backwards; 0 on every axis for the origins of the batch items.

    The unit is the tensor stride, except where coordinates were given that are no multiples of it.
    """

    def __init__(self, grid: VoxelGrid, unit: Ints, stride: Ints) -> None:
        self.grid, self.unit, self.stride = grid, unit, stride
        self._others: dict[tuple[Ints, int], VoxelGrid] = {}

    @property
    def items(self) -> PointGroups | TracedItems:
        return TracedItems(self.grid) if tracing() and isinstance(self.grid, TracedGrid) else self._groups

    @classmethod
    def of(cls, coords: torch.Tensor, stride: Ints) -> tuple[CoordinateMap, torch.Tensor, torch.Tensor]:
        """Coordinates (N, 1+D) int32, repeated ones among them -> their map, and the two results of `first_rows`."""
        turned = flipped(coords)
        unit = stride
        if any(s != 1 for s in stride):
            steps = row((1, *stride), turned)
            if bool((turned % steps == 0).all()):
                turned = torch.div(turned, steps, rounding_mode="floor").int()
            else:
                unit = (1,) * len(stride)
        grid = VoxelGrid(turned, duplicates="first")
        if len(grid) == len(coords):
            rows = torch.arange(len(coords), device=coords.device)
            return cls(grid, unit, stride), rows, rows
        numbers = grid.lookup(turned)
        return cls(grid, unit, stride), *by_first_row(numbers, len(grid))

    def __len__(self) -> int:
        return len(self.grid)

    @property
    def batch(self) -> torch.Tensor:  # type: ignore[override]
        return self.grid.coords[:, 0]

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.grid.batch_size

    def coordinates(self) -> torch.Tensor:
        """(N, 1+D) int32 as a user knows them; the caller's own."""
        return flipped(scaled_coords(self.grid, self.unit))

    def at(self, unit: Ints, batch_size: int) -> VoxelGrid:
        """The same voxels in a unit that divides this one's, in a batch of at least as many items; made once."""
        if unit == self.unit and batch_size == self.grid.batch_size:
            return self.grid
        grid = self._others.get((unit, batch_size))
        if grid is None:
            scale = tuple(a // b for a, b in zip(self.unit, unit))
            grid = VoxelGrid(scaled_coords(self.grid, scale), batch_size)
            self._others[unit, batch_size] = grid
        return grid

    def rows(self, coords: torch.Tensor) -> torch.Tensor:
        """The rows (M,) int64 of coordinates (M, 1+D) of any integer dtype, -1 where there is no such voxel."""
        turned, steps = flipped(coords), row((1, *self.unit), coords)
        if all(u == 1 for u in self.unit):
            return self.grid.lookup(turned)
        whole = (turned % steps == 0).all(1)
        rows = self.grid.lookup(torch.div(turned, steps, rounding_mode="floor").to(coords.dtype))
        return torch.where(whole, rows, -1)


class FieldMap(_Rows):
    """The points of one key: coordinates (N, 1+D) floating point, anywhere."""

    def __init__(self, coords: torch.Tensor, stride: Ints) -> None:
        self.coords, self.stride = coords, stride

    def __len__(self) -> int:
        return len(self.coords)

    @cached_property
    def batch(self) -> torch.Tensor:  # type: ignore[override]
        return self.coords[:, 0].round().long()

    @cached_property
    def batch_size(self) -> int:  # type: ignore[override]
        return int(self.batch.max()) + 1 if len(self) else 1

    def quantized(self, stride: Sequence[int]) -> torch.Tensor:
        """(N, 1+D) int32: the lower corner of the cell of this stride that holds each point."""
        steps = self.coords.new_tensor(stride)
        cells = torch.floor(self.coords[:, 1:] / steps) * steps
        return floor_to_int32("coordinates", torch.cat([self.batch[:, None].to(cells.dtype), cells], 1))


# ---- the manager: sets of voxels and of points under keys, and what leads from one to another

#: whole numbers up to this one are exact in fp32
EXACT_IN_FLOAT = 1 << 24


def _named(key: CoordinateMapKey) -> Key:
    check_kind("the key", key, CoordinateMapKey, "pass the key of a tensor, x.coordinate_map_key")
    return key.key


#: taps of a stride's window up to which the window itself finds the coarse voxels
FEW_TAPS = 27


def _kind(grid: VoxelGrid) -> Any:
    """The class of the plans of a grid."""
    return grid.plan_type or ConvolutionPlan


class CoordinateManager:
    """Sets of voxels and of points under keys, and what leads from one to another.

    Args:
        D: number of axes.
        num_threads, coordinate_map_type, allocator_type, minkowski_algorithm: accepted, without effect.

    >>> manager = CoordinateManager(D=1)
    >>> key, (rows, numbers) = manager.insert_and_map(torch.tensor([[0, -3], [0, 2], [0, 2]]))
    >>> manager.get_coordinates(manager.stride(key, 2)).tolist(), rows.tolist(), numbers.tolist()
    ([[0, -4], [0, 2]], [0, 1], [0, 1, 1])
    """

    #: the class of managers that torch traces
    traced_type: type[CoordinateManager] | None = None

    def __new__(cls, *_: Any, **__: Any) -> CoordinateManager:
        return object.__new__((cls is CoordinateManager and tracing() and cls.traced_type) or cls)

    def __init__(
        self,
        D: int = 0,
        num_threads: int = -1,
        coordinate_map_type: Any = None,
        allocator_type: Any = None,
        minkowski_algorithm: Any = None,
    ) -> None:
        self.D, self.minkowski_algorithm = rank_of(D), minkowski_algorithm
        self._maps: dict[Key, CoordinateMap] = {}
        self._fields: dict[Key, FieldMap] = {}
        self._field_maps: dict[tuple[Key, Key], tuple[torch.Tensor, torch.Tensor]] = {}
        self._groups: dict[tuple[Key, Key], PointGroups] = {}
        self._plans: dict[Any, ConvolutionPlan] = {}

    # ---- keys

    def find(self, key: CoordinateMapKey) -> CoordinateMap:
        """The voxels of a key; raises ValueError where this manager has none."""
        found = self._maps.get(_named(key))
        if found is None:
            raise ValueError(f"{key} is no key of this coordinate manager: it has {self._listed(self._maps)}")
        return found

    def find_field(self, key: CoordinateMapKey) -> FieldMap:
        """The points of a key; raises ValueError where this manager has none."""
        found = self._fields.get(_named(key))
        if found is None:
            raise ValueError(f"{key} is no field key of this coordinate manager: it has {self._listed(self._fields)}")
        return found

    def is_field(self, key: CoordinateMapKey) -> bool:
        """Whether points lie under a key, and no voxels."""
        return _named(key) in self._fields

    def rows_of(self, key: CoordinateMapKey) -> CoordinateMap | FieldMap:
        """The voxels of a key, or its points."""
        return self.find_field(key) if self.is_field(key) else self.find(key)

    @staticmethod
    def _listed(keys: Any) -> str:
        return ", ".join(str(CoordinateMapKey.of(key)) for key in keys) or "none"

    def _free(self, stride: Ints, string_id: str, numbered: bool = False) -> Key:
        """A key that nothing lies under, numbered where the plain one is taken.

        Strided layers pass the string on, so that one other than "" belongs to one set and what was made of it: it is
        new at every tensor stride.
        """
        taken = {*self._maps, *self._fields}
        strings = {name for _, name in taken}
        if not numbered and (string_id not in strings if string_id else (stride, "") not in taken):
            return stride, string_id
        prefix = f"{string_id}-" if string_id else ""
        number = len(taken)
        while f"{prefix}{number}" in strings:
            number += 1
        return stride, f"{prefix}{number}"

    def _insert(self, key: Key, made: CoordinateMap) -> CoordinateMapKey:
        self._maps[key] = made
        return CoordinateMapKey.of(key)

    def insert_and_map(
        self, coordinates: torch.Tensor, tensor_stride: Axes = 1, string_id: str = ""
    ) -> tuple[CoordinateMapKey, tuple[torch.Tensor, torch.Tensor]]:
        """Keep coordinates (N, 1+D), integers, repeated ones once and in the order in which they came.

        Returns:
            (key, (unique rows (M,), inverse rows (N,))), int64: ``coordinates[unique][inverse] == coordinates``.
        """
        check_rows("coordinates", coordinates, self.D + 1, "the batch first")
        if coordinates.is_floating_point():
            raise TypeError(f"coordinates must be integers; got {coordinates.dtype}: take torch.floor(...).int()")
        stride = tuple(positive("tensor_stride", tensor_stride, self.D))
        made, unique, inverse = CoordinateMap.of(coordinates, backwards(stride))
        return self._insert(self._free(stride, string_id), made), (unique, inverse)

    def insert_field(self, coordinates: torch.Tensor, tensor_stride: Axes, string_id: str = "") -> CoordinateMapKey:
        """Keep points (N, 1+D), the batch first."""
        check_rows("coordinates", coordinates, self.D + 1, "the batch first")
        stride = tuple(positive("tensor_stride", tensor_stride, self.D))
        key = self._free(stride, string_id or "field")
        if not coordinates.is_floating_point():
            low, high = bounds(coordinates.reshape(-1, 1))
            is_wide = bool(low) and max(-low[0], high[0]) > EXACT_IN_FLOAT
            coordinates = coordinates.double() if is_wide else coordinates.float()
        self._fields[key] = FieldMap(coordinates, stride)
        return CoordinateMapKey.of(key)

    def size(self, coordinate_map_key: CoordinateMapKey) -> int:
        return len(self.rows_of(coordinate_map_key))

    def get_coordinate_map_keys(self, tensor_stride: Axes) -> list[CoordinateMapKey]:
        """The keys of one tensor stride, the first made first."""
        stride = tuple(convert_to_int_list(tensor_stride, self.D))
        return [CoordinateMapKey.of(key) for key in self._maps if key[0] == stride]

    def _key(self, key_or_stride: CoordinateMapKey | Axes) -> CoordinateMapKey:
        if isinstance(key_or_stride, CoordinateMapKey):
            return key_or_stride
        keys = self.get_coordinate_map_keys(key_or_stride)
        if not keys:
            raise ValueError(f"no voxels of tensor stride {key_or_stride}: there are {self._listed(self._maps)}")
        return keys[0]

    def get_coordinates(self, coords_key_or_tensor_strides: CoordinateMapKey | Axes) -> torch.Tensor:
        """(N, 1+D) int32; the caller's own."""
        return self.find(self._key(coords_key_or_tensor_strides)).coordinates()

    def get_coordinate_field(self, coords_key: CoordinateMapKey) -> torch.Tensor:
        return self.find_field(coords_key).coords

    def get_unique_coordinate_map_key(self, tensor_stride: Axes) -> CoordinateMapKey:
        """A key of this stride that nothing lies under."""
        stride = tuple(convert_to_int_list(tensor_stride, self.D))
        return CoordinateMapKey.of(self._free(stride, "", numbered=True))

    @property
    def batch_size(self) -> int:
        """Items of the largest batch."""
        return max((held.batch_size for held in (*self._maps.values(), *self._fields.values())), default=0)

    def number_of_unique_batch_indices(self) -> int:
        return self.size(self.origin())

    # ---- sets from sets

    def origin(self) -> CoordinateMapKey:
        """A voxel at 0 for each batch item, in their order; items without a voxel have one too."""
        items, zeros = self.batch_size, (0,) * self.D
        if items == 0:
            raise ValueError("the coordinate manager has no coordinates yet")
        key: Key = (zeros, "")
        if key in self._maps and len(self._maps[key]) != items:
            key = (zeros, str(items))
        if key not in self._maps:
            device = next(iter((*self._maps.values(), *self._fields.values()))).batch.device
            coords = torch.zeros(items, self.D + 1, dtype=torch.int32, device=device)
            coords[:, 0] = torch.arange(items, device=device)
            self._maps[key] = CoordinateMap(VoxelGrid(coords, items), (1,) * self.D, zeros)
        return CoordinateMapKey.of(key)

    origin_field = origin

    def origin_map(self, key: CoordinateMapKey) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The batch items (B,) and the rows of each, int64."""
        held = self.rows_of(key)
        rows, device = held.item_rows(), held.batch.device
        rows += [torch.zeros(0, dtype=torch.int64, device=device)] * (self.batch_size - len(rows))
        return torch.arange(len(rows), device=device), rows

    origin_field_map = origin_map

    def prune(self, key: CoordinateMapKey, mask: torch.Tensor) -> CoordinateMapKey:
        """The voxels of a key where mask (N,) bool is true."""
        source = self.find(key)
        grid = source.grid.subset(mask)
        name = self._free(key.key[0], "pruned")
        return self._insert(name, CoordinateMap(grid, source.unit, source.stride))

    def union_map(self, in_keys: list[CoordinateMapKey], out_key: CoordinateMapKey) -> list[torch.Tensor]:
        """Set ``out_key`` to all voxels of some keys, those of the first one first.

        Returns:
            For each key (2, N) int64: its rows, and their rows in the union.
        """
        maps = [self.find(key) for key in in_keys]
        unit, items = common_unit([m.unit for m in maps]), max(m.grid.batch_size for m in maps)
        grids = [m.at(unit, items) for m in maps]
        union = grids[0]
        for grid in grids[1:]:
            new = grid.coords[union.lookup(grid.coords) < 0]
            union = VoxelGrid(torch.cat([union.coords, new]), items) if len(new) else union
        stride = tuple(min(axis) for axis in zip(*(m.stride for m in maps)))
        key = self._free(backwards(stride), "merge", numbered=True)
        self._insert(key, CoordinateMap(union, unit, stride))
        out_key.set_key(key)
        rows = [torch.arange(len(grid), device=grid.device) for grid in grids]
        return [torch.stack([r, union.lookup(grid.coords)]) for r, grid in zip(rows, grids)]

    # ---- from points to voxels

    def field_to_sparse_insert_and_map(
        self, field_map_key: CoordinateMapKey, sparse_tensor_stride: Axes, sparse_tensor_string_id: str = ""
    ) -> tuple[CoordinateMapKey, tuple[torch.Tensor, torch.Tensor]]:
        """Keep the voxels that hold a point; the results of `insert_and_map`."""
        stride = convert_to_int_list(sparse_tensor_stride, self.D)
        coords = self.find_field(field_map_key).quantized(stride)
        key, maps = self.insert_and_map(coords, stride, sparse_tensor_string_id)
        self._field_maps[field_map_key.key, key.key] = maps
        return key, maps

    def exists_field_to_sparse(self, field_map_key: CoordinateMapKey, sparse_map_key: CoordinateMapKey) -> bool:
        return (field_map_key.key, sparse_map_key.key) in self._field_maps

    def field_to_sparse_keys(self, field_map_key: CoordinateMapKey) -> list[CoordinateMapKey]:
        """The keys of the voxels that were made of a field."""
        return [CoordinateMapKey.of(sparse) for field, sparse in self._field_maps if field == field_map_key.key]

    def field_rows(self, field_key: CoordinateMapKey, sparse_key: CoordinateMapKey) -> torch.Tensor:
        """(N,) int64: the row of the voxel that holds each point, -1 where there is none."""
        known = self._field_maps.get((field_key.key, sparse_key.key))
        if known is not None:
            return known[1]
        sparse = self.find(sparse_key)
        return sparse.rows(self.find_field(field_key).quantized(backwards(sparse.stride)))

    def get_field_to_sparse_map(
        self, field_map_key: CoordinateMapKey, sparse_map_key: CoordinateMapKey
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The maps of `field_to_sparse_insert_and_map`."""
        known = self._field_maps.get((field_map_key.key, sparse_map_key.key))
        if known is None:
            raise ValueError(f"{sparse_map_key} was not made of the field {field_map_key}")
        return known

    def first_points(self, field_key: CoordinateMapKey, sparse_key: CoordinateMapKey) -> torch.Tensor:
        """(V,) int64: the first point in each voxel, as many as there are points where a voxel has none."""
        rows = self.field_rows(field_key, sparse_key)
        bins = torch.where(rows < 0, self.size(sparse_key), rows)
        first = torch.full((self.size(sparse_key) + 1,), len(rows), device=rows.device)
        return first.scatter_reduce_(0, bins, torch.arange(len(rows), device=rows.device), "amin")[:-1]

    def field_to_sparse_map(
        self, field_map_key: CoordinateMapKey, sparse_map_key: CoordinateMapKey
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the voxels that hold points, and of those points, int64; points without a voxel are left out."""
        rows = self.field_rows(field_map_key, sparse_map_key)
        held = (rows >= 0).nonzero()[:, 0]
        return rows[held], held

    # ---- other voxels

    def stride(self, coordinate_map_key: CoordinateMapKey, stride: Axes, string_id: str = "") -> CoordinateMapKey:
        """The voxels floor(c / s) * s, s being the new tensor stride; those that lie under its key, if any do."""
        source, key = self.find(coordinate_map_key), coordinate_map_key.key
        steps = trace_constants(positive("stride", stride, self.D))
        new = tuple(t * s for t, s in zip(key[0], steps)), string_id or key[1]
        if new in self._maps:
            return CoordinateMapKey.of(new)
        target = backwards(new[0])
        unit = common_unit([source.unit, target])
        grid = source.at(unit, source.grid.batch_size)
        factors = tuple(t // u for t, u in zip(target, unit))
        if math.prod(factors) > FEW_TAPS and not tracing():
            return self._insert(new, CoordinateMap(grid.coarsen(factors), target, target))
        plan = _kind(grid)(grid, factors, stride=factors, padding=0)
        made = self._insert(new, CoordinateMap(plan.target, target, target))
        if unit == source.unit:
            window = {"kernel_size": factors, "dilation": (1,) * self.D, "padding": (0,) * self.D}
            self._plans[self._plan_key(key, new, window)] = plan
        return made

    def reached(
        self, key: CoordinateMapKey, kernel: KernelGenerator, transposed: bool, expand: bool
    ) -> CoordinateMapKey:
        """The voxels of a layer's output, where it was given none."""
        stride, steps = key.key[0], trace_constants(kernel.kernel_stride)
        if not transposed and not expand:
            return self.stride(key, steps)
        if not transposed:
            return self._reached(key, kernel, tuple(t * s for t, s in zip(stride, steps)), transposed)
        finer = divided(stride, steps)
        for string_id in ("", key.key[1]):  # in MinkowskiEngine's order; of a pruned tensor, what it was made of
            if (finer, string_id) in self._maps and not expand:
                return CoordinateMapKey.of((finer, string_id))
        return self._reached(key, kernel, finer, transposed)

    def _reached(
        self, key: CoordinateMapKey, kernel: KernelGenerator, stride: Ints, transposed: bool
    ) -> CoordinateMapKey:
        """Every voxel of a tensor stride that the kernel reaches."""
        source, new, target = self.find(key), self._free(stride, ""), backwards(stride)
        unit = common_unit([source.unit, target])
        finer, coarser = (target, source.unit) if transposed else (source.stride, target)
        window = kernel.window(tuple(t // u for t, u in zip(finer, unit)))
        steps = tuple(t // u for t, u in zip(coarser, unit))
        if transposed:
            there = _kind(source.grid).transposed(source.grid, stride=steps, **window)
            made, plan, ends = CoordinateMap(there.target, unit, target), there.transpose(), (new, key.key)
        else:
            grid = source.at(unit, source.grid.batch_size)
            plan = _kind(grid)(grid, stride=steps, target="full", **window)
            made, ends = CoordinateMap(plan.target, target, target), (key.key, new)
        self._plans[self._plan_key(*ends, window)] = plan
        return self._insert(new, made)

    # ---- from voxels to voxels

    @staticmethod
    def _plan_key(fine: Key, coarse: Key, window: dict[str, Any]) -> tuple:
        return fine, coarse, tuple(sorted(window.items()))

    def plan(
        self, in_key: CoordinateMapKey, out_key: CoordinateMapKey, kernel: KernelGenerator, transposed: bool = False
    ) -> ConvolutionPlan:
        """The plan of a kernel from the voxels of one key to those of another, made once and reversed where it leads
        from coarse voxels to fine ones."""
        ends = (out_key, in_key) if transposed else (in_key, out_key)
        fine, coarse = (self.find(key) for key in ends)
        if 0 in fine.stride:
            raise ValueError("the voxels of whole batch items have no neighbors: a kernel of one tap alone fits them")
        unit = common_unit([fine.unit, coarse.unit])
        return self._plan(ends, unit, kernel.window(tuple(t // u for t, u in zip(fine.stride, unit))), transposed)

    def cells_plan(
        self, in_key: CoordinateMapKey, out_key: CoordinateMapKey, transposed: bool = False
    ) -> ConvolutionPlan | None:
        """The plan from voxels to the coarser ones that hold them, or back; None where a coarse voxel has so many that
        `groups` serve better."""
        ends = (out_key, in_key) if transposed else (in_key, out_key)
        fine, coarse = (self.find(key) for key in ends)
        unit = common_unit([fine.unit, coarse.unit])
        factors = tuple(t // u for t, u in zip(backwards(coarse.stride), unit))
        if 0 in coarse.stride or (math.prod(factors) > FEW_TAPS and not tracing()):
            return None
        zeros, ones = (0,) * self.D, (1,) * self.D
        return self._plan(ends, unit, {"kernel_size": factors, "dilation": ones, "padding": zeros}, transposed)

    def _plan(
        self, ends: Sequence[CoordinateMapKey], unit: Ints, window: dict[str, Any], back: bool
    ) -> ConvolutionPlan:
        """The plan of a window from fine voxels to coarse ones, or ``back``."""
        fine, coarse = (self.find(key) for key in ends)
        key = self._plan_key(ends[0].key, ends[1].key, window)
        plan = self._plans.get(key)
        if plan is None:
            items = self._items(fine, coarse)
            steps = tuple(a // b for a, b in zip(coarse.unit, unit))
            grid = fine.at(unit, items)
            plan = _kind(grid)(grid, stride=steps, target=coarse.at(coarse.unit, items), **window)
            self._plans[key] = plan
        if not back:
            return plan
        reverse = self._plans.get((key, "back"))
        if reverse is None:
            reverse = self._plans[key, "back"] = plan.transpose()
        return reverse

    def _items(self, *maps: CoordinateMap) -> int:
        """The number of batch items of several sets."""
        return max(made.grid.batch_size for made in maps)

    def stride_rows(self, fine_key: CoordinateMapKey, coarse_key: CoordinateMapKey) -> torch.Tensor:
        """(N_fine,) int64: the row of the coarse voxel that holds each fine one, -1 where there is none."""
        fine, coarse = self.find(fine_key), self.find(coarse_key)
        coords = fine.coordinates()
        steps = torch.tensor([1, *backwards(coarse.stride)], dtype=coords.dtype, device=coords.device).clamp_min(1)
        held = torch.div(coords, steps, rounding_mode="floor") * steps
        if 0 in coarse.stride:
            held[:, 1:] = 0
        return coarse.rows(held)

    def groups(self, fine_key: CoordinateMapKey, coarse_key: CoordinateMapKey) -> PointGroups:
        """The fine voxels, or points, in each coarse voxel."""
        key = fine_key.key, coarse_key.key
        groups = self._groups.get(key)
        if groups is None:
            find = self.field_rows if self.is_field(fine_key) else self.stride_rows
            rows = find(fine_key, coarse_key)
            groups = self._groups[key] = PointGroups(rows, self.size(coarse_key))
        return groups

    def stride_map(self, in_key: CoordinateMapKey, stride_key: CoordinateMapKey) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of fine voxels, and of the coarse voxels that hold them, int64."""
        rows = self.stride_rows(in_key, stride_key)
        held = (rows >= 0).nonzero()[:, 0]
        return held, rows[held]

    def kernel_map(
        self,
        in_key: CoordinateMapKey | Axes,
        out_key: CoordinateMapKey | Axes,
        stride: Axes = 1,
        kernel_size: Axes = 3,
        dilation: Axes = 1,
        region_type: RegionType | int = RegionType.HYPER_CUBE,
        region_offset: torch.Tensor | None = None,
        is_transpose: bool = False,
        is_pool: bool = False,
    ) -> dict[int, torch.Tensor]:
        """The pairs of each tap that has any, (2, P) int32: input rows, output rows."""
        ends = self._key(in_key), self._key(out_key)
        kernel = kernel_of(kernel_size, stride, dilation, region_type, region_offset, None, self.D)
        if is_pool and kernel.kernel_size == kernel.kernel_stride:
            pairs = torch.stack(self.stride_map(*(ends[::-1] if is_transpose else ends))).int()
            return {0: pairs.flip(0) if is_transpose else pairs}
        edges = self.plan(*ends, kernel, is_transpose).kernel_map
        pairs = torch.stack([edges.in_rows, edges.out_rows]).int()
        return {tap: p for tap, p in enumerate(pairs.split(list(edges.tap_counts), 1)) if p.shape[1]}

    get_kernel_map = kernel_map

    def interpolation(self, key: CoordinateMapKey, samples: torch.Tensor) -> tuple[Interpolation, torch.Tensor]:
        """The plan that interpolates between the voxels of a key, and the samples' positions in its grid (M, D).

        Raises:
            ValueError: coordinates that are no multiples of their tensor stride.
        """
        source = self.find(key)
        check_rows("samples", samples, self.D + 1, "the batch first")
        if source.unit != source.stride:
            raise ValueError(
                f"interpolation takes coordinates that are multiples of the tensor stride; {key} has others"
            )
        grid = source.grid
        points = flipped(samples)[:, 1:].double() / samples.new_tensor(source.unit, dtype=torch.float64)
        points = (points + 0.5) * points.new_tensor(grid.voxel_size) + points.new_tensor(grid.origin)
        items = samples[:, 0].round().long()
        known = (items >= 0) & (items < grid.batch_size)
        far = points.new_tensor([(end + 9) * size for end, size in zip(grid.extent.end, grid.voxel_size)])
        points = torch.where(known[:, None], points, far)  # a sample of no batch item has no corner
        return Interpolation(grid, points, torch.where(known, items, 0)), points

    def interpolation_map_weight(self, key: CoordinateMapKey, samples: torch.Tensor) -> list[torch.Tensor]:
        """(voxel rows, sample rows, weights), one entry for each corner of a sample that is a voxel."""
        source = self.find(key)
        steps = samples.new_tensor([1, *backwards(source.stride)])
        low = torch.cat([samples[:, :1].round(), torch.floor(samples[:, 1:] / steps[1:]) * steps[1:]], 1)
        corners = torch.cartesian_prod(*[torch.arange(2, device=samples.device)] * self.D).reshape(-1, self.D)
        corners = torch.cat([torch.zeros_like(corners[:, :1]), corners], 1) * steps.long()
        at = low.long()[None] + corners[:, None]
        weights = (1 - (samples[None, :, 1:] - at[..., 1:]).abs() / steps[1:]).prod(-1).flatten()
        rows = source.rows(at.flatten(0, 1).int())
        held = (rows >= 0).nonzero()[:, 0]
        return [rows[held], held % max(1, len(samples)), weights[held]]

    def __repr__(self) -> str:
        lines = [f"\t{CoordinateMapKey.of(key)}: {len(made):,} voxels" for key, made in self._maps.items()]
        lines += [f"\t{CoordinateMapKey.of(key)}: {len(field):,} points" for key, field in self._fields.items()]
        return "\n".join([f"{type(self).__name__}(", *lines, f"\t{len(self._plans)} plans", ")"])


# ---- managers while torch traces: sets of voxels are grids of the program, and plans its operators


class TracedManager(CoordinateManager):
    """What ``CoordinateManager(D)`` makes while torch traces, and what stands for one that was made before.

    Attributes:
        outer: the manager of the caller that this one stands for, None for one of the trace.
        ordinary: the ordinary manager that it became, once somebody asked for it after the program had run.
    """

    outer: CoordinateManager | None = None
    ordinary: CoordinateManager | None = None

    @classmethod
    def of(cls, outer: CoordinateManager) -> TracedManager:
        """A manager with the voxels of another one, which stays as it is."""
        made = TracedManager(*trace_constants([outer.D]))
        made.outer = outer
        for key, held in outer._maps.items():
            made._maps[key] = CoordinateMap(
                TracedGrid.of(held.grid), trace_constants(held.unit), trace_constants(held.stride)
            )
        return made

    def after_trace(self) -> CoordinateManager:
        """An ordinary manager with the voxels that the program made."""
        if self.ordinary is None:
            made = self.ordinary = CoordinateManager(self.D) if self.outer is None else self.outer
            for key, held in self._maps.items():
                if key not in made._maps:
                    grid: TracedGrid = held.grid  # type: ignore[assignment]
                    made._maps[key] = CoordinateMap(grid.real, held.unit, held.stride)
        return self.ordinary

    def _items(self, *maps: CoordinateMap) -> int:
        return maps[0].grid.batch_size  # which is that of all: nobody knows them here

    @property
    def batch_size(self) -> int:
        return self._items(*self._maps.values())


def same(a: CoordinateManager, b: CoordinateManager) -> bool:
    """Whether two managers are one, or stand for one."""
    if a is b:
        return True
    return isinstance(a, TracedManager) and isinstance(b, TracedManager) and a.outer is not None and a.outer is b.outer


CoordinateManager.traced_type = TracedManager

__all__ = ["CoordinateManager"]
