"""All plans of a network on one scene: built ahead, sent to another process, put back under the grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from sparseconv.geometry.arguments import check_same_space, checked_device
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.geometry.ranges import Boundary
from sparseconv.geometry.window import Window
from sparseconv.moving import Movable
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import TorchDispatchMode


class PlanSet(Movable):
    """The plans that layers keep with a grid, and with the coarser grids that these lead to.

    A grid drops them when it is pickled, since they are large and can be built again. A plan set carries them: a worker
    of a data loader fills one while the trainer computes, and the trainer's layers then find every plan ready.

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
        """Every plan that ``net`` asks for on a grid, found by calling it once with convolutions left out.

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
        """Bytes of the edges, which is most of what travels."""
        maps = (plan.kernel_map for plan in self.plans)
        pairs = {frozenset((id(m), id(m.reverse()))): m.num_pairs for m in maps}  # both directions have the same edges
        return sum(2 * torch.int32.itemsize * count for count in pairs.values())

    def __len__(self) -> int:
        return len(self.plans)

    def __repr__(self) -> str:
        return f"PlanSet({len(self)} plans over {len(self.grids)} grids, {self.num_bytes / 1e6:.1f} MB, on {self.grid})"

    # ---- elsewhere

    def to(self, device: torch.device | str) -> PlanSet:
        """The grids and plans on another device; itself if they are there."""
        if checked_device(device) == self.grid.device:
            return self
        return PlanSet(_assemble(_dismantle(self.grid), lambda t: t.to(device)))

    def into(self, grid: VoxelGrid) -> VoxelGrid:
        """Give the plans to another grid object of the same voxels in the same order; returns it.

        Raises:
            ValueError: the voxels, their order, size or origin, or the number of batch items, are others.
        """
        if grid is not self.grid:
            check_same_space(self.grid, grid, True)
            if grid.device != self.grid.device or not torch.equal(grid.coords, self.grid.coords):
                raise ValueError(f"the plans are of {self.grid}; the given grid is another: {grid}")
            _assemble(_dismantle(self.grid), lambda t: t, grid)
        return grid

    def __getstate__(self) -> dict[str, Any]:
        return _dismantle(self.grid)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.grid = _assemble(state, lambda t: t)


@dataclass(frozen=True)
class _Ref:
    """A grid, by number."""

    number: int


@dataclass(frozen=True)
class _Plan:
    """A plan, its grids and its map by number."""

    source: int
    target: int
    window: Window
    boundary: Boundary
    kernel_map: int
    box: bool
    groups: int
    backend: str
    is_transposed: bool

    def build(self, grids: list[VoxelGrid], maps: list[KernelMap]) -> ConvolutionPlan:
        plan = object.__new__(ConvolutionPlan)
        plan._set(
            grids[self.source],
            grids[self.target],
            self.window,
            self.boundary,
            maps[self.kernel_map],
            self.box,
            self.groups,
            self.backend,
            self.is_transposed,
        )
        return plan


class _WithoutConvolutions(TorchDispatchMode):
    """Convolutions give zeros at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.sparseconv.convolution.default:
            x, weight, _, _, rows, groups, adjoint = args[:7]
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


def _dismantle(root: VoxelGrid) -> dict[str, Any]:
    """The grids, the maps and what each grid keeps, as numbers and plain data; what is neither is left behind."""
    grids = _reachable(root)
    number = {id(grid): i for i, grid in enumerate(grids)}
    maps: list[KernelMap] = []
    reverses: dict[int, int] = {}  # a map -> the earlier one that it reverses

    def map_number(kernel_map: KernelMap) -> int:
        for i, known in enumerate(maps):
            if known is kernel_map:
                return i
            if known.in_rows is kernel_map.out_rows and known.out_rows is kernel_map.in_rows:
                reverses[len(maps)] = i
        maps.append(kernel_map)
        return len(maps) - 1

    def spell(value: Any) -> Any:
        if isinstance(value, VoxelGrid):
            return _Ref(number[id(value)]) if id(value) in number else None
        if isinstance(value, tuple):
            return tuple(spell(v) for v in value)
        return value

    tables = []
    for grid in grids:
        table: list[tuple[Any, Any]] = []
        for key, value in grid.derived.items():
            if isinstance(value, ConvolutionPlan):
                record = _Plan(
                    number[id(value.source)],
                    number[id(value.target)],
                    value.window,
                    value.boundary,
                    map_number(value.kernel_map),
                    value.kernel_size is not None,
                    value.groups,
                    value.backend,
                    value.is_transposed,
                )
                table.append((spell(key), record))
            elif _travels(value):
                table.append((spell(key), spell(value)))
        tables.append(table)
    kept = [None if i in reverses else m for i, m in enumerate(maps)]
    return {"grids": grids, "maps": kept, "reverses": reverses, "tables": tables}


def _assemble(
    state: dict[str, Any], move: Callable[[torch.Tensor], torch.Tensor], root: VoxelGrid | None = None
) -> VoxelGrid:
    """The first grid with all that it kept, its tensors moved; ``root`` takes its place if given."""
    here = move(state["grids"][0].coords).device
    grids = [grid.to(here) for grid in state["grids"]]
    if root is not None:
        grids = [root, *(g._like(g.coords) for g in grids[1:])]
    maps: list[Any] = [None if m is None else m.to(here) for m in state["maps"]]
    for i, j in state["reverses"].items():
        maps[i] = maps[j].reverse()
    for grid, table in zip(grids, state["tables"]):
        for key, value in table:
            if isinstance(value, _Plan):
                grid.derived[_read(key, grids, move)] = value.build(grids, maps).kept_with(grid)
            else:
                grid.derived[_read(key, grids, move)] = _read(value, grids, move)
    return grids[0]


def _read(value: Any, grids: list[VoxelGrid], move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What was spelled, with its grids, and its tensors moved."""
    if isinstance(value, _Ref):
        return grids[value.number]
    if isinstance(value, torch.Tensor):
        return move(value)
    return tuple(_read(v, grids, move) for v in value) if isinstance(value, tuple) else value
