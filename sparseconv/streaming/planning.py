"""Where a network is cut into phases, and which blocks each phase has: what computes least within the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import torch

from sparseconv.backends.registry import choose
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import MapSizes
from sparseconv.geometry.ranges import IndexRange
from sparseconv.streaming.blocks import ROW_BYTES, Block, Blocks
from sparseconv.streaming.phases import GRID, Phase, Program
from sparseconv.streaming.scene import Scene
from sparseconv.streaming.work import EDGE_BYTES, VOXEL_BYTES, Values, Work, clipped, wanted
from sparseconv.trace.boxes import scaled, union, within
from sparseconv.trace.program import GridStep, OverEdges, PlanStep, TargetGrid, Wants

#: of the budget, what blocks are planned to take
PLANNED = 0.9
#: how many times the voxels of a scene may be computed before cuts are tried
ENOUGH = 1.3
#: voxels that are looked at before a small budget is planned with, and rows of the scene that are read together then
SOME, PIECE = 3, 2**14


def rates(program: Program, sample: dict[int, Any], learns: bool = False) -> list[float]:
    """Bytes that a voxel of the scene takes in each phase with all that is made of it, as in the sample."""
    found = []
    for phase in program.phases:
        values = Values({})
        values.update(sample)
        found.append(Work(program, phase, {}, _none).bytes(values, learns) / max(1, len(sample[GRID])))
    return found or [1.0]


def _none(*_: Any) -> Any:
    raise NotImplementedError("nothing is loaded")


def chosen(
    program: Program, sample: dict[int, Any], blocks: Blocks, budget: int, batch_size: int, learns: bool = False
) -> tuple[Program, list[list[Block]]]:
    """The program with its cuts, and the blocks of each phase.

    Without a cut the surroundings of a block are as wide as the whole network looks. Every cut makes them smaller and
    keeps rows. None are tried while no cut is needed; else the cheapest of several numbers of them.
    """
    edges = program.edges
    counts = [0, *(2**n - 1 for n in range(1, 10) if 2**n - 1 < len(edges)), max(0, len(edges) - 1)]
    best: tuple[float, Program, list[list[Block]]] | None = None
    for count in dict.fromkeys(counts):
        tried = Program(program.steps, program.results, cuts(program, count))
        plans, cost, rows = _planned(tried, sample, blocks, budget, batch_size, learns)
        if best is None or cost < best[0]:
            best = cost, tried, plans
        if rows <= ENOUGH and not count:
            break
    assert best is not None
    return best[1], best[2]


def smallest(
    program: Program, scene: Scene, grid_of: Callable[[torch.Tensor], VoxelGrid], learns: bool
) -> tuple[int, int]:
    """Bytes and voxels of the largest among some of the smallest blocks: one voxel with what its result looks at.

    The network is cut wherever it can be. No block of the scene is made for it.
    """
    cut = Program(program.steps, program.results, cuts(program, max(0, len(program.edges) - 1)))
    most = 0, 0
    for row in {number * (len(scene) - 1) // (SOME - 1) for number in range(SOME)}:
        start = scene.coords[row].tolist()
        boxes = [wanted(cut, phase, IndexRange(start, [v + 1 for v in start])).get(GRID) for phase in cut.phases]
        near = _rows_in(scene.coords, reduce(union, boxes, None))
        for phase, box in zip(cut.phases, boxes):
            if box is None:
                continue
            values, work = Values({}), Work(cut, phase, {}, _none)
            coords = near[within(near, clipped(box, scene.like.batch_size))]
            values[GRID] = grid_of(coords)
            work.geometry(values)
            rows = ROW_BYTES * len(coords) if values[GRID].device.type == "cpu" else 0
            most = max(most, (work.bytes(values, learns) + rows, len(coords)))
    return most


def _rows_in(coords: torch.Tensor, box: IndexRange | None) -> torch.Tensor:
    """The voxels of a scene in a box, read piece by piece."""
    if box is None:
        return coords[:0].int()
    return torch.cat([piece[within(piece, box)].int() for piece in coords.split(PIECE)])


def too_small(budget: int, size: int, voxels: int) -> ValueError:
    """What is said of a budget in which a block of one voxel has no room."""
    return ValueError(
        f"budget_bytes is {budget:,}, but the smallest block of this scene, one voxel with all that its result looks "
        f"at ({voxels:,} voxels), takes about {size:,}: allow at least that"
    )


def cuts(program: Program, count: int) -> list[int]:
    """Steps before which ``count`` cuts divide evenly how far the network looks."""
    widths = [_width(program, number) for number in program.edges]
    wanted_at = [sum(widths) * part / (count + 1) for part in range(1, count + 1)]
    found, seen = [], 0.0
    for number, width in zip(program.edges, widths):
        while wanted_at and seen + width / 2 >= wanted_at[0]:
            wanted_at.pop(0)
            if number != program.edges[0]:
                found.append(number)
        seen += width
    return sorted(set(found))


def _width(program: Program, number: int) -> float:
    """How far a step over edges looks, in voxels of the scene."""
    step: Any = program.steps[number]
    plan: Any = program.steps[step.plan]
    fine: Any = program.steps[step.place if plan.is_transposed else plan.source]
    return sum(float(f) * max(1, n - 1) for f, n in zip(fine.scale, plan.window.projection.shape))


def _margins(box: IndexRange, around: IndexRange) -> tuple[list[int], list[int]]:
    """Voxels by which a box is surrounded, on both sides of each axis."""
    low = [max(0, a - b) for a, b in zip(box.start, around.start)]
    return low, [max(0, b - a) for a, b in zip(box.end, around.end)]


class _Sizes:
    """Voxels that blocks are computed with in a phase, their surroundings included; each counted once."""

    def __init__(self, program: Program, phase: Phase, blocks: Blocks, batch_size: int) -> None:
        self.program, self.phase, self.blocks, self.batch_size = program, phase, blocks, batch_size
        self._known: dict[IndexRange, int] = {}
        box = min(blocks.leaves, key=lambda leaf: -leaf.size).tight
        root = None if box is None else wanted(program, phase, box).get(GRID)
        #: how far beyond a block its surroundings reach, as of one block
        self._margins = None if box is None or root is None else _margins(box, root)

    def of(self, block: Block) -> int:
        if block.box not in self._known:
            around = None
            if self._margins is not None:
                low, high = self._margins
                start = tuple(s - m for s, m in zip(block.box.start, low))
                around = clipped(IndexRange(start, tuple(e + m for e, m in zip(block.box.end, high))), self.batch_size)
            self._known[block.box] = self.blocks.most_in(around)
        return self._known[block.box]

    def fits(self, most: float, block: Block) -> bool:
        return block.size <= most and self.of(block) <= most


def _planned(
    program: Program, sample: dict[int, Any], blocks: Blocks, budget: int, batch_size: int, learns: bool = False
) -> tuple[list[list[Block]], float, float]:
    """The blocks of each phase, what all of it costs, and how often a voxel is computed at most.

    A step costs one for each voxel that it is computed of, and so do rows that are kept or loaded.
    """
    plans, cost, most, total = [], 0.0, 0.0, max(1, blocks.root.size)
    for phase, rate in zip(program.phases, rates(program, sample, learns)):
        sizes = _Sizes(program, phase, blocks, batch_size)
        plan = blocks.chosen(partial(sizes.fits, PLANNED * budget / rate))
        computed = sum(map(sizes.of, plan))
        over = sum(not sizes.fits(budget / rate, block) for block in plan)
        plans.append(plan)
        most = max(most, computed / total)
        cost += computed * len(phase.steps) + total * (len(phase.outputs) + len(phase.loaded))
        cost += 10 * cost * over / len(plan)  # blocks that must be cut further have more surroundings yet
    return plans, cost, most


def costs(program: Program, blocks: Blocks, plans: list[list[Block]], batch_size: int) -> list[list[int]]:
    """The voxels that each block of each phase is computed with, its surroundings included."""
    found = []
    for phase, plan in zip(program.phases, plans):
        sizes = _Sizes(program, phase, blocks, batch_size)
        found.append(list(map(sizes.of, plan)))
    return found


def plan_of(program: Program, number: int) -> int:
    """Taps of a plan."""
    plan: Any = program.steps[number]
    return len(plan.window.offsets)


def _share(place: int | None, sample: dict[int, Any]) -> float:
    return 1.0 if place is None or place not in sample else len(sample[place]) / max(1, len(sample[GRID]))


# ---- sizes of the whole scene's maps, by which blocks choose their kernels


def estimated(program: Program, sample: dict[int, Any], count: int) -> dict[int, int]:
    """Rows of grids and pairs of plans of a scene of ``count`` voxels, as in the sample; no fewer than there."""
    share = max(1.0, count / max(1, len(sample[GRID])))
    found = {GRID: count}
    for number in program.needed:
        value = sample.get(number)
        if isinstance(program.steps[number], PlanStep) and value is not None:
            found[number] = round(share * value.kernel_map.num_pairs)
        elif isinstance(program.steps[number], GridStep) and value is not None and number != GRID:
            found[number] = round(share * len(value))
    return found


def uncertain(program: Program, sample: dict[int, Any], count: int) -> tuple[set[int], set[int]]:
    """Grids whose rows, and plans whose pairs, must be counted, for blocks to sum rows as the whole scene does.

    The sample is a part of the scene: no grid that features do not decide has fewer rows there.
    """
    grids, plans = set(), set()
    for number in program.needed:
        step: Any = program.steps[number]
        plan = sample.get(step.plan) if isinstance(step, OverEdges) and step.kind == "convolve" else None
        if plan is None or step.place not in sample:
            continue
        channels = program.steps[step.x].channels[0], step.channels[0]
        request = plan.with_groups(step.groups).request(*channels, step.dtype)
        least = choose(request, plan.backend).steady_rows(request)
        if (count if step.place == GRID else len(sample[step.place])) < least:
            grids.add(step.place)
        if least == math.inf:
            plans.add(step.plan)
    return grids - {GRID}, plans


def needed_boxes(program: Program, numbers: Iterable[int], box: IndexRange) -> dict[int, IndexRange]:
    """The box in which each grid must be right, so that a block's own voxels of these grids, and the edges that lead
    to them in these plans, are."""
    wants = Wants(program.steps)
    for number in numbers:
        step: Any = program.steps[number]
        target: Any = program.steps[target_of(program, number)]
        own = scaled(box, target.scale)
        wants.add(target.number, own)
        if isinstance(step, PlanStep) and own is not None:
            wants.add(step.source, step.sees(own))
    return wants.spread()


def counted(program: Program, numbers: Sequence[int], values: Values, box: IndexRange, batch_size: int) -> torch.Tensor:
    """(len(numbers),) int64: of each grid a block's own rows, of each plan the edges to those; ``values`` has both."""
    found = []
    for number in numbers:
        target: Any = program.steps[target_of(program, number)]
        own, grid = scaled(box, target.scale), values[target.number]
        if own is None:
            found.append(torch.zeros((), dtype=torch.int64, device=grid.device))
            continue
        inside = within(grid.coords, clipped(own, batch_size))
        is_grid = target.number == number
        found.append((inside if is_grid else inside[values[number].kernel_map.out_rows.long()]).sum())
    return torch.stack(found)


def counting_bytes(program: Program, numbers: Iterable[int], sample: Values | None = None) -> int:
    """Bytes that a voxel of the scene takes while these are counted: its grids, and every edge that it may have.

    A tap leads to a row at most once and from a row at most once. Other grids have at most as many rows as the scene,
    and where a ``sample`` is known at most twice as many as there.
    """
    edges = 0.0
    for number in numbers:
        plan: Any = program.steps[number]
        if isinstance(plan, PlanStep):
            ends = plan.source, target_of(program, number)
            rows = min(1.0 if sample is None else min(1.0, 2 * _share(end, sample)) for end in ends)
            edges += plan_of(program, number) * rows
    return int(8 * VOXEL_BYTES + EDGE_BYTES * edges)


def target_of(program: Program, number: int) -> int:
    """The grid that a plan leads to, or that one itself."""
    plan: Any = program.steps[number]
    if not isinstance(plan, PlanStep):
        return number
    if plan.target is not None:
        return int(plan.target)
    return next(n for n, step in enumerate(program.steps) if isinstance(step, TargetGrid) and step.plan == number)


def map_sizes(program: Program, found: dict[int, int]) -> dict[int, MapSizes]:
    """The sizes of each plan's map, from rows of grids and pairs of plans."""
    made = {}
    for number in program.needed:
        step: Any = program.steps[number]
        if isinstance(step, PlanStep) and number in found:
            made[number] = MapSizes(found[step.source], found[target_of(program, number)], found[number])
    return made
