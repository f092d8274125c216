"""Where a network is cut into phases, and which blocks each phase has: what computes least within the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from sparseconv.geometry.ranges import IndexRange
from sparseconv.streaming.blocks import Block, Blocks
from sparseconv.streaming.phases import GRID, Phase, Program
from sparseconv.streaming.steps import OverEdges, PlanStep
from sparseconv.streaming.work import Values, Work, clipped, wanted

#: of the budget, what blocks are planned to take
PLANNED = 0.9
#: how many times the voxels of a scene may be computed before cuts are tried
ENOUGH = 1.3
#: multiplications that finding a plan of one output takes as long as, and keeping or loading one number
FINDING, KEEPING = 20_000, 100


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
        return self.of(block) <= most


def _planned(
    program: Program, sample: dict[int, Any], blocks: Blocks, budget: int, batch_size: int, learns: bool = False
) -> tuple[list[list[Block]], float, float]:
    """The blocks of each phase, what all of it costs in multiplications, and how often a voxel is computed at most."""
    plans, cost, most, total = [], 0.0, 0.0, max(1, blocks.root.size)
    for phase, rate in zip(program.phases, rates(program, sample, learns)):
        sizes = _Sizes(program, phase, blocks, batch_size)
        plan = blocks.chosen(partial(sizes.fits, PLANNED * budget / rate))
        computed = sum(map(sizes.of, plan))
        over = sum(not sizes.fits(budget / rate, block) for block in plan)
        plans.append(plan)
        most = max(most, computed / total)
        cost += computed * _work(program, phase, sample) + KEEPING * total * _kept(program, phase, sample)
        cost += 10 * cost * over / len(plan)  # blocks that must be cut further have more surroundings yet
    return plans, cost, most


def _work(program: Program, phase: Phase, sample: dict[int, Any]) -> float:
    """Multiplications for a voxel of the scene."""
    total = 0.0
    for number in phase.steps:
        step = program.steps[number]
        if number in phase.loaded:
            continue
        if isinstance(step, PlanStep) and step.of is None:
            total += FINDING * _share(step.source, sample)
        elif isinstance(step, OverEdges):
            channels: Sequence[int] = program.steps[step.x].channels
            taps = plan_of(program, step.plan)
            total += taps * math.prod((*channels, *step.channels)) / step.groups * _share(step.place, sample)
        elif step.is_rows:
            total += 10 * math.prod(step.channels) * _share(step.place, sample)
    return total


def plan_of(program: Program, number: int) -> int:
    """Taps of a plan."""
    plan: Any = program.steps[number]
    return len(plan.window.offsets)


def _kept(program: Program, phase: Phase, sample: dict[int, Any]) -> float:
    """Numbers that are kept or loaded for a voxel of the scene."""
    moved = [*phase.outputs, *phase.loaded]
    return sum(math.prod(program.steps[n].channels) * _share(program.steps[n].place, sample) for n in moved)


def _share(place: int | None, sample: dict[int, Any]) -> float:
    return 1.0 if place is None or place not in sample else len(sample[place]) / max(1, len(sample[GRID]))
