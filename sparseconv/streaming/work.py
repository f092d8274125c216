"""One block of one phase: its surroundings, its memory, and its own rows of the results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import MapSizes
from sparseconv.geometry.ranges import IndexRange
from sparseconv.streaming.phases import FEATURES, GRID, Phase, Program
from sparseconv.streaming.scene import Scene
from sparseconv.trace.boxes import FAR, scaled, within
from sparseconv.trace.program import GridStep, OverEdges, PlanStep, SubsetGrid, Wants

#: bytes that an edge, a tap of an output, and a voxel of a grid take, while a map is built and while it is used
EDGE_BYTES, TAP_BYTES, VOXEL_BYTES = 40, 0, 160


class TooLarge(Exception):
    """A block does not fit into the budget: bytes that it takes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Own(NamedTuple):
    """A block's own rows of an output: coords (M, 1+D), values (M, ...), and the rows of the scene by whose order they
    are ordered: their own, or none (0,)."""

    coords: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor


@dataclass
class Inputs:
    """What a block needs from the CPU: the boxes of all values, its rows of the scene and where they lie, which of
    them are its own where these lie one after another, and tensors that are on their way to the device."""

    boxes: dict[int, IndexRange]
    rows: torch.Tensor
    own: slice | None
    on_device: torch.Tensor | None
    loaded: dict[int, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return sum(t.nbytes for t in (self.on_device, *self.loaded.values()) if t is not None)

    def clear(self) -> None:
        self.on_device = None
        self.loaded.clear()


class Result(NamedTuple):
    """A result of the network: its features; on other voxels than the scene's, where these lie, the order in which they
    are taken from the blocks' own, and how many each block has; and which rows of the scene they are, if not all."""

    features: torch.Tensor
    coords: torch.Tensor | None = None
    order: torch.Tensor | None = None
    sizes: list[int] = []  # noqa: RUF012 (never changed)
    rows: torch.Tensor | None = None


class Job(NamedTuple):
    """What is to be done: a program, its scene, its sample of the recording, and what the caller is given at last."""

    program: Program
    scene: Scene
    device: torch.device
    sample: dict[int, Any]
    out: torch.Tensor | None
    parameters: list[torch.Tensor]
    learns: bool
    about: dict[str, str]
    leaves: list[Any]
    layout: Any
    counted: list[tuple[torch.Tensor, torch.Tensor]]
    gathers: bool


class Values(dict[Any, Any]):
    """The values of a block by step; a value goes when nothing needs it any more."""

    def __init__(self, shared: dict[int, Any]) -> None:
        super().__init__()
        self.shared = shared

    def __missing__(self, number: int) -> Any:
        return self.shared[number]


def wanted(program: Program, phase: Phase, box: IndexRange) -> dict[int, IndexRange]:
    """The box in which each value must be right, so that a block's own results are."""
    wants = Wants(program.steps)
    for number in targets(program, phase):
        wants.add(number, own_box(program, number, box))
    return wants.spread(frozenset(phase.loaded))


def targets(program: Program, phase: Phase) -> list[int]:
    """The rows that are wanted of each block's own voxels."""
    totals: Any = [program.steps[n] for n in phase.totals]
    return list(dict.fromkeys([*phase.outputs, *(total.of for total in totals)]))


def own_box(program: Program, number: int, box: IndexRange) -> IndexRange | None:
    """A block's box of the input's grid -> that of the grid of a step's rows."""
    place: Any = program.steps[program.steps[number].place or 0]
    return scaled(box, place.scale)


def clipped(box: IndexRange, batch_size: int) -> IndexRange:
    """The part of a box where there may be voxels."""
    ends = (batch_size, *(FAR,) * (box.rank - 1))
    return box.intersect(IndexRange((0, *(-FAR,) * (box.rank - 1)), ends))


class Work:
    """The steps of a phase, run on a block; ``sizes`` are those of the whole scene's maps, by their plans' steps.

    ``mark`` is called after each step, while all is there that it needed.
    """

    def __init__(
        self,
        program: Program,
        phase: Phase,
        shared: dict[int, Any],
        load: Callable[[int, VoxelGrid, torch.Tensor, dict[int, IndexRange]], torch.Tensor],
        sizes: dict[int, MapSizes] | None = None,
        mark: Callable[[], None] = lambda: None,
    ) -> None:
        self.program, self.phase, self.shared, self.load = program, phase, shared, load
        self.sizes, self.mark = {} if sizes is None else sizes, mark
        self.last = last_uses(program, phase)

    def geometry(self, values: Values) -> None:
        """The grids and plans that no feature decides."""
        steps = self.program.steps
        waiting: set[int] = set()
        for number in self.phase.steps:
            step = steps[number]
            if not isinstance(step, (GridStep, PlanStep)) or number == GRID:
                continue
            if isinstance(step, SubsetGrid) or waiting & set(step.uses) or number in values:
                waiting.add(number)
            else:
                values[number] = self._made(number, values)

    def _made(self, number: int, values: Values) -> Any:
        """The value of a step; a plan's kernels are those of the whole scene's."""
        made = self.program.steps[number].value(values)
        if number in self.sizes:
            made.kernel_map.part_of = self.sizes[number]
        return made

    def bytes(self, values: Values, learns: bool = False) -> int:
        """The most memory that the block takes, its geometry being known; with the way back where it ``learns``."""
        steps = self.program.steps
        rows: dict[int, int] = {}
        for number in self.phase.steps:
            step = steps[number]
            if isinstance(step, GridStep):
                known = values.get(number)
                rows[number] = len(known) if known is not None else max(rows.values())
        fixed = sum(VOXEL_BYTES * count for count in rows.values())
        maps: dict[int, int] = {}
        for number in self.phase.steps:
            plan = values.get(number)
            if isinstance(steps[number], PlanStep) and plan is not None:
                edges = plan.kernel_map
                maps[id(edges)] = EDGE_BYTES * edges.num_pairs + TAP_BYTES * edges.num_taps * edges.num_out
        size = {n: self._size(n, rows) for n in self.phase.steps}
        live = most = 0
        for number in self.phase.steps:
            live += size[number]
            most = max(most, live + self._workspace(number, values, size))
            if not learns:
                live -= sum(size[n] for n in self.last.get(number, ()))
        return fixed + sum(maps.values()) + (2 if learns else 1) * most

    def _size(self, number: int, rows: dict[int, int]) -> int:
        step = self.program.steps[number]
        if step.place is None or step.dtype is None:
            return 0
        return rows[step.place] * math.prod(step.channels) * step.dtype.itemsize

    def _workspace(self, number: int, values: Values, size: dict[int, int]) -> int:
        step = self.program.steps[number]
        if not isinstance(step, OverEdges):
            return size[number]
        plan, source = values.get(step.plan), self.program.steps[step.x]
        if plan is None or step.kind != "convolve" or source.dtype is None:
            return 2 * size[number]
        return int(plan.workspace_bytes(source.channels[0], step.channels[0], source.dtype))

    def run(self, values: Values, boxes: dict[int, IndexRange]) -> None:
        """All steps that are left; what is needed no more is let go."""
        steps = self.program.steps
        for number in self.phase.steps:
            step = steps[number]
            if number not in values and (step.is_rows or isinstance(step, (GridStep, PlanStep)) or step.uses):
                if number in values.shared:
                    continue
                if number in self.phase.loaded or number == FEATURES:
                    values[number] = self.load(number, values[step.place], values[-1], boxes)
                else:
                    values[number] = self._made(number, values)
                self.mark()
            for done in self.last.get(number, ()):
                values.pop(done, None)

    def own(self, values: Values, box: IndexRange, batch_size: int, at: slice | None = None) -> dict[int, Any]:
        """The block's own rows of what is wanted, and what they add to totals.

        ``at`` says where rows on the scene's own voxels lie, if one after another: nothing is then looked for.
        """
        found: dict[int, Any] = {}
        for number in targets(self.program, self.phase):
            place: Any = self.program.steps[number].place
            if place == GRID and at is not None:
                found[number] = Own(values[place].coords[at], values[number][at], values[-1][at])
                continue
            grid, region = values[place], own_box(self.program, number, box)
            if region is None:
                inside = torch.zeros(len(grid), dtype=torch.bool, device=grid.device)
            else:
                inside = within(grid.coords, clipped(region, batch_size))
            coords, rows = grid.coords[inside], values[-1][:0]
            if place == GRID:
                rows = values[-1][inside.to(values[-1].device)]
            elif self.program.keeps_order(place):
                rows = values[-1][values[GRID].lookup(coords).to(values[-1].device)]
            found[number] = Own(coords, values[number][inside], rows)
        made: dict[int, Any] = {}
        for number in self.phase.outputs:
            own = found[number]
            is_known = self.program.steps[number].place == GRID  # where these rows lie, the scene says
            made[number] = own._replace(coords=own.coords[:0]) if is_known else own
        for number in self.phase.totals:
            total: Any = self.program.steps[number]
            own = found[total.of]
            made[number] = total.part(own.values, own.coords, batch_size)
        return made


def last_uses(program: Program, phase: Phase) -> dict[int, list[int]]:
    """The values that each step is the last to need; what is wanted in the end stays."""
    wanted_rows = set(targets(program, phase))
    places = {program.steps[n].place for n in wanted_rows}
    users: dict[int, int] = {}
    inside = set(phase.steps)
    for number in phase.steps:
        step = program.steps[number]
        uses = () if number in phase.loaded else step.uses
        for used in (*uses, *(() if step.place is None else (step.place,))):
            users[used] = number
    gone: dict[int, list[int]] = {}
    for used, number in users.items():
        if used in inside and used not in wanted_rows and used not in places and used != GRID:
            gone.setdefault(number, []).append(used)
    return gone
