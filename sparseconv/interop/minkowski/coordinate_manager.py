"""The coordinate manager: the plans between sets of voxels, each made once."""

from __future__ import annotations

import math
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Ints
from sparseconv.interop.arguments import settled
from sparseconv.interop.minkowski.coordinate_map import CoordinateMap, backwards, common_unit, divided, flipped
from sparseconv.interop.minkowski.kernel_generator import KernelGenerator
from sparseconv.interop.minkowski.keyed_maps import KeyedMaps
from sparseconv.interop.minkowski.keys import CoordinateMapKey, Key
from sparseconv.interop.minkowski.kinds import Axes, RegionType, positive
from sparseconv.kinds import check_values
from sparseconv.ops.interpolation import Interpolation
from sparseconv.ops.points import PointGroups
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.torch_private import tracing

#: taps of a stride's window up to which the window itself finds the coarse voxels
FEW_TAPS = 27


def _kind(grid: VoxelGrid) -> Any:
    """The class of the plans of a grid."""
    return grid.plan_type or ConvolutionPlan


class CoordinateManager(KeyedMaps):
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
        super().__init__(D)
        self.minkowski_algorithm = minkowski_algorithm
        self._groups: dict[tuple[Key, Key], PointGroups] = {}
        self._plans: dict[Any, ConvolutionPlan] = {}

    # ---- other voxels

    def stride(self, coordinate_map_key: CoordinateMapKey, stride: Axes, string_id: str = "") -> CoordinateMapKey:
        """The voxels floor(c / s) * s, s being the new tensor stride; those that lie under its key, if any do."""
        source, key = self.find(coordinate_map_key), coordinate_map_key.key
        steps = settled(positive("stride", stride, self.D))
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
        stride, steps = key.key[0], settled(kernel.kernel_stride)
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
            raise ValueError("the voxels of whole batch items have no neighbours: a kernel of one tap alone fits them")
        unit = common_unit([fine.unit, coarse.unit])
        window = kernel.window(tuple(t // u for t, u in zip(fine.stride, unit)))
        key = self._plan_key(ends[0].key, ends[1].key, window)
        plan = self._plans.get(key)
        if plan is None:
            items = self._items(fine, coarse)
            steps = tuple(a // b for a, b in zip(coarse.unit, unit))
            grid = fine.at(unit, items)
            plan = _kind(grid)(grid, stride=steps, target=coarse.at(coarse.unit, items), **window)
            self._plans[key] = plan
        if not transposed:
            return plan
        back = self._plans.get((key, "back"))
        if back is None:
            back = self._plans[key, "back"] = plan.transpose()
        return back

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
        offsets = None if region_offset is None or len(region_offset) == 0 else region_offset
        kernel = KernelGenerator(
            kernel_size, stride, dilation, region_type=region_type, region_offsets=offsets, dimension=self.D
        )
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
        check_values("samples", samples, f"(M, {self.D + 1})")
        if samples.is_complex() or samples.dtype == torch.bool:
            raise TypeError(f"samples must be numbers; got {samples.dtype}")
        if samples.ndim != 2 or samples.shape[1] != self.D + 1:
            raise ValueError(f"samples must be (M, {self.D + 1}), the batch first; got {tuple(samples.shape)}")
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
