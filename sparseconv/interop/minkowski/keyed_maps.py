"""Sets of voxels and of points under keys."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.geometry.arguments import bounds
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Ints
from sparseconv.interop.minkowski.coordinate_map import CoordinateMap, FieldMap, backwards, common_unit
from sparseconv.interop.minkowski.keys import CoordinateMapKey, Key
from sparseconv.interop.minkowski.kinds import Axes, convert_to_int_list, positive, rank_of
from sparseconv.kinds import check_kind, check_values

#: whole numbers up to this one are exact in fp32
EXACT_IN_FLOAT = 1 << 24


def _named(key: CoordinateMapKey) -> Key:
    check_kind("the key", key, CoordinateMapKey, "pass the key of a tensor, x.coordinate_map_key")
    return key.key


class KeyedMaps:
    """Sets of voxels and of points under keys, and the sets that follow from them without a kernel."""

    def __init__(self, rank: int) -> None:
        self.D = rank_of(rank)
        self._maps: dict[Key, CoordinateMap] = {}
        self._fields: dict[Key, FieldMap] = {}
        self._field_maps: dict[tuple[Key, Key], tuple[torch.Tensor, torch.Tensor]] = {}

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
        check_values("coordinates", coordinates, f"(N, {self.D + 1}) integers")
        if coordinates.is_floating_point():
            raise TypeError(f"coordinates must be integers; got {coordinates.dtype}: take torch.floor(...).int()")
        if coordinates.ndim != 2 or coordinates.shape[1] != self.D + 1:
            raise ValueError(f"coordinates must be (N, {self.D + 1}), the batch first; got {tuple(coordinates.shape)}")
        stride = tuple(positive("tensor_stride", tensor_stride, self.D))
        made, unique, inverse = CoordinateMap.of(coordinates, backwards(stride))
        return self._insert(self._free(stride, string_id), made), (unique, inverse)

    def insert_field(self, coordinates: torch.Tensor, tensor_stride: Axes, string_id: str = "") -> CoordinateMapKey:
        """Keep points (N, 1+D), the batch first."""
        check_values("coordinates", coordinates, f"(N, {self.D + 1})")
        if coordinates.ndim != 2 or coordinates.shape[1] != self.D + 1:
            raise ValueError(f"coordinates must be (N, {self.D + 1}), the batch first; got {tuple(coordinates.shape)}")
        if coordinates.is_complex() or coordinates.dtype == torch.bool:
            raise TypeError(f"coordinates must be numbers; got {coordinates.dtype}")
        stride = tuple(positive("tensor_stride", tensor_stride, self.D))
        key = self._free(stride, string_id or "field")
        if not coordinates.is_floating_point():
            low, high = bounds(coordinates.reshape(-1, 1))
            is_wide = bool(low) and max(-low[0], high[0]) > EXACT_IN_FLOAT
            coordinates = coordinates.double() if is_wide else coordinates.float()
        self._fields[key] = FieldMap(coordinates, stride)
        return CoordinateMapKey.of(key)

    def size(self, coordinate_map_key: CoordinateMapKey) -> int:
        if self.is_field(coordinate_map_key):
            return len(self.find_field(coordinate_map_key))
        return len(self.find(coordinate_map_key))

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
        sizes = [m.grid.batch_size for m in self._maps.values()] + [m.items.num_voxels for m in self._fields.values()]
        return max(sizes, default=0)

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
            some = (
                next(iter(self._maps.values())).grid.coords if self._maps else next(iter(self._fields.values())).coords
            )
            coords = torch.zeros(items, self.D + 1, dtype=torch.int32, device=some.device)
            coords[:, 0] = torch.arange(items, device=some.device)
            self._maps[key] = CoordinateMap(VoxelGrid(coords, items), (1,) * self.D, zeros)
        return CoordinateMapKey.of(key)

    origin_field = origin

    def origin_map(self, key: CoordinateMapKey) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The batch items (B,) and the rows of each, int64."""
        rows = (self.find_field(key) if self.is_field(key) else self.find(key)).item_rows()
        device = rows[0].device if rows else None
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
