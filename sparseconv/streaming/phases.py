"""A recorded network in phases: what can be made of a block and its surroundings alone, between totals of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparseconv.trace.program import Coords, GridStep, InputRows, OverEdges, PlanStep, Step, SubsetGrid, TargetGrid
from sparseconv.trace.totals import BatchStatistics, Total

#: the steps of the scene's own voxels and features
GRID, FEATURES = 0, 1


@dataclass(frozen=True)
class Phase:
    """One pass over all blocks.

    ``outputs`` are rows that are wanted of each block's own voxels: results of the network, and what later phases go on
    from. ``totals`` are made of rows of this phase. ``loaded`` are rows that earlier phases left.
    """

    steps: tuple[int, ...]
    outputs: tuple[int, ...]
    totals: tuple[int, ...]
    loaded: tuple[int, ...]


class Program:
    """The steps of a network, which of them are results, and the phases they are run in.

    A cut makes rows that are needed behind it an output of what is before it: nothing before it is computed anew for
    the surroundings of blocks behind it. ``cuts`` are numbers of steps before which one is made.
    """

    def __init__(self, steps: Sequence[Step], results: Sequence[int], cuts: Sequence[int] = ()) -> None:
        self.steps, self.results, self.cuts = tuple(steps), tuple(dict.fromkeys(results)), tuple(sorted(cuts))
        self.levels = self._levels()
        followed = [n for n, step in enumerate(self.steps) if isinstance(step, BatchStatistics) and step.moves]
        self.needed = self.closure([*self.results, *followed], frozenset())

    def _levels(self) -> list[int]:
        """The phase in which each step can be made first; rows of an earlier phase are loaded, geometry never waits."""
        levels: list[int] = []
        for step in self.steps:
            level = 0
            for used in step.uses:
                level = max(level, levels[used] + isinstance(self.steps[used], Total))
            if step.is_rows:
                assert step.place is not None
                level = max(level, levels[step.place])
                if not isinstance(step, InputRows):  # cuts are phases, and those that totals make as well
                    level = max(level, sum(cut <= step.number for cut in self.cuts))
            levels.append(level)
        return levels

    def closure(self, wanted: Sequence[int], known: frozenset[int]) -> list[int]:
        """All steps that ``wanted`` takes, in order, without what ``known`` ones are made of."""
        found: set[int] = set()
        open_ = list(wanted)
        while open_:
            number = open_.pop()
            if number in found:
                continue
            found.add(number)
            step = self.steps[number]
            if step.place is not None:
                open_.append(step.place)
            if number not in known:
                open_ += step.uses
        return sorted(found)

    @cached_property
    def phases(self) -> list[Phase]:
        """In the order in which they are run."""
        steps, levels = self.steps, self.levels
        crossing: dict[int, None] = {}
        for number in self.needed:
            step = steps[number]
            for used in step.uses:
                behind = levels[number] > levels[used] and not isinstance(step, (GridStep, PlanStep))
                is_kept = steps[used].is_rows and used != FEATURES
                if behind and is_kept and not isinstance(steps[used], Coords):  # which any phase's geometry has
                    crossing[used] = None
        made = []
        for level in range(max((levels[n] for n in self.needed), default=0) + 1):
            outputs = [n for n in crossing if levels[n] == level]
            outputs += [n for n in self.results if steps[n].is_rows and levels[n] == level and n not in outputs]
            totals = [n for n in self.needed if isinstance(steps[n], Total) and levels[n] == level]
            if not outputs and not totals:
                continue
            stored = frozenset(n for n in crossing if levels[n] < level)
            found: Any = [steps[n] for n in totals]
            sources = [total.of for total in found]
            whole = set(filter(self.is_whole, range(len(steps))))
            body = self.closure([*outputs, *sources], stored | whole)
            loaded = tuple(n for n in body if n in stored)
            made.append(Phase(tuple(body), tuple(outputs), tuple(totals), loaded))
        return made

    def is_whole(self, number: int) -> bool:
        """Whether a value is one tensor of the whole scene: a total, or made of such alone. Geometry and rows are not:
        each block makes them anew."""
        step = self.steps[number]
        if isinstance(step, Total):
            return True
        if step.is_rows or isinstance(step, (GridStep, PlanStep)):
            return False
        return all(self.is_whole(used) for used in step.uses)

    def keeps_order(self, place: int) -> bool:
        """Whether a grid holds some of the scene's own voxels, in the scene's order."""
        step: Any = self.steps[place]
        if isinstance(step, SubsetGrid):
            return self.keeps_order(step.of)
        if isinstance(step, TargetGrid) and step.same:
            plan: Any = self.steps[step.plan]
            return self.keeps_order(plan.source)
        return place == GRID

    @property
    def edges(self) -> list[int]:
        """The steps before which a cut saves most: those over edges."""
        return [n for n in self.needed if isinstance(self.steps[n], OverEdges)]
