"""All plans of a network on one scene: built ahead, sent to another process, put back under the grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from sparseconv.checks import check_same_space, checked_device
from sparseconv.device_mixin import Movable
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import TorchDispatchMode, pytree

#: a grid, and what it keeps under which keys
Table = tuple[VoxelGrid, list[tuple[Any, Any]]]


class PlanSet(Movable):
    """The plans that layers keep with a grid, and with the coarser grids made from it.

    Pickling a grid drops its plans, since they are large and can be rebuilt. A plan set carries them: a data loader's
    worker fills one while the trainer computes, and the trainer's layers then find every plan ready.

    >>> import sparseconv as sc
    >>> from sparseconv import nn
    >>> net = nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.Conv(8, 8, 2, stride=2))
    >>> grid, _ = sc.voxelize(torch.rand(200, 3), voxel_size=0.1)
    >>> plans = PlanSet.of(net, grid)                       # in the worker: no arithmetic of convolutions
    >>> import pickle; plans = pickle.loads(pickle.dumps(plans))        # what the loader does
    >>> y = net(SparseTensor(plans.grid, torch.randn(len(grid), 4)))    # in the trainer: no plan is built
    """

    def __init__(self, grid: VoxelGrid) -> None:
        #: the grid of the inputs, which holds the plans; use it, or `into` another one, for the scene's tensors
        self.grid = grid

    @classmethod
    def of(
        cls,
        net: torch.nn.Module,
        grid: VoxelGrid,
        channels: int | None = None,
        prepare: Callable[[SparseTensor], Any] | None = None,
    ) -> PlanSet:
        """Every plan that ``net`` needs on a grid, found by one call that skips the convolutions.

        Args:
            net: takes a `SparseTensor`; on the grid's device. It is put into evaluation meanwhile and then back, so no
                other thread may train this very object: workers of a data loader have their own.
            grid: the scene, or the batch of scenes.
            channels: of the input; default: those of the first layer that says ``in_channels``.
            prepare: makes the network's input from a `SparseTensor`, where it takes something else.

        Raises:
            ValueError: no layer says how many channels the input has.
        """
        if channels is None:
            said = [m.in_channels for m in net.modules() if isinstance(getattr(m, "in_channels", None), int)]
            if not said:
                raise ValueError("no layer of the network has in_channels: give channels=")
            channels = cast(int, said[0])
        like = next(net.parameters(), torch.empty(0))
        training = [module for module in net.modules() if module.training]
        net.eval()
        try:
            with torch.no_grad(), _WithoutConvolutions():
                x = SparseTensor(grid, torch.zeros(len(grid), channels, dtype=like.dtype, device=grid.device))
                net(x if prepare is None else prepare(x))
        finally:
            for module in training:
                module.training = True
        return cls(grid)

    # ---- reading

    @property
    def grids(self) -> list[VoxelGrid]:
        """The grid and all that its plans lead to."""
        return _reachable(self.grid)

    @property
    def plans(self) -> list[ConvolutionPlan]:
        """The distinct plans, those of one grid together."""
        found = [value for grid in self.grids for value in grid.derived.values() if isinstance(value, ConvolutionPlan)]
        return list({(id(p.kernel_map), p.groups): p for p in found}.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the edges, which are most of what is pickled."""
        maps = (plan.kernel_map for plan in self.plans)
        pairs = {frozenset((id(m), id(m.reverse()))): m.num_pairs for m in maps}  # both directions have the same edges
        return sum(2 * torch.int32.itemsize * count for count in pairs.values())

    def __len__(self) -> int:
        return len(self.plans)

    def __repr__(self) -> str:
        return f"PlanSet({len(self)} plans over {len(self.grids)} grids, {self.num_bytes / 1e6:.1f} MB, on {self.grid})"

    # ---- elsewhere

    def to(self, device: torch.device | str) -> PlanSet:
        """The grids and plans on another device; returns itself if they are already there."""
        here = checked_device(device)
        return self if here == self.grid.device else PlanSet(_copied(_tables(self.grid), here))

    def into(self, grid: VoxelGrid) -> VoxelGrid:
        """Attach the plans to another grid object with the same voxels in the same order, and return that grid.

        Raises:
            ValueError: the voxels, their order, size or origin, or the number of batch items, are others.
        """
        if grid is not self.grid:
            check_same_space(self.grid, grid, True)
            if grid.device != self.grid.device or not torch.equal(grid.coords, self.grid.coords):
                raise ValueError(f"the plans are of {self.grid}; the given grid is another: {grid}")
            _copied(_tables(self.grid), grid.device, grid)
        return grid

    def __getstate__(self) -> dict[str, Any]:
        return {"tables": _tables(self.grid)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tables = state["tables"]
        self.grid = _copied(tables, tables[0][0].device)


class _WithoutConvolutions(TorchDispatchMode):
    """Convolutions give zeros at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.sparseconv.convolution.default:
            x, weight, _, edges, groups, adjoint = args[:6]
            rows = edges.shape[0 if adjoint else 1]
            return x.new_zeros(rows, weight.shape[1] * groups if adjoint else weight.shape[2])
        return func(*args, **(kwargs or {}))


def _reachable(root: VoxelGrid) -> list[VoxelGrid]:
    grids = [root]
    for grid in grids:
        for value in list(grid.derived.values()):
            ends = (value.source, value.target) if isinstance(value, ConvolutionPlan) else (value,)
            grids += [end for end in ends if isinstance(end, VoxelGrid) and all(end is not g for g in grids)]
    return grids


def _travels(value: Any) -> bool:
    """Whether something that a grid keeps is plain data, to be sent along."""
    if isinstance(value, (tuple, list)):
        return all(_travels(v) for v in value)
    return value is None or isinstance(value, (int, float, str, torch.Tensor, VoxelGrid))


def _tables(root: VoxelGrid) -> list[Table]:
    """The grids, and of what each keeps the plans and plain data; what is neither is left behind."""
    return [
        (grid, [(k, v) for k, v in grid.derived.items() if isinstance(v, ConvolutionPlan) or _travels(v)])
        for grid in _reachable(root)
    ]


def _copied(tables: list[Table], device: torch.device, root: VoxelGrid | None = None) -> VoxelGrid:
    """The first grid with all that it kept, on a device; ``root`` takes its place if given, among new grids."""
    grids = {id(grid): grid.to(device) if root is None else grid._like(grid.coords) for grid, _ in tables}
    if root is not None:
        grids[id(tables[0][0])] = root
    maps: list[tuple[KernelMap, KernelMap]] = []

    def map_there(kernel_map: KernelMap) -> KernelMap:
        for known, there in maps:
            if known is kernel_map:
                return there
            if known.in_rows is kernel_map.out_rows and known.out_rows is kernel_map.in_rows:
                return there.reverse()
        maps.append((kernel_map, kernel_map.to(device)))
        return maps[-1][1]

    def moved(value: Any) -> Any:
        if isinstance(value, ConvolutionPlan):
            source, target = grids[id(value.source)], grids[id(value.target)]
            return value.replaced(map_there(value.kernel_map), source=source, target=target)
        if isinstance(value, VoxelGrid):
            return grids.get(id(value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    for grid, table in tables:
        there = grids[id(grid)]
        for key, value in table:
            made = pytree.tree_map(moved, value)
            kept = made.weak_copy(there) if isinstance(made, ConvolutionPlan) else made
            there.derived[pytree.tree_map(moved, key)] = kept
    return grids[id(tables[0][0])]
