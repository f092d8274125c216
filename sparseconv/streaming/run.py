"""A streamed run: phase after phase, block after block, within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import MapSizes
from sparseconv.geometry.ranges import IndexRange
from sparseconv.streaming.blocks import ROW_BYTES, Block, Blocks, halves, piece_of
from sparseconv.streaming.device.peak import Peak
from sparseconv.streaming.device.pipeline import Direct, Overlapped, pipeline_of
from sparseconv.streaming.digests import digest
from sparseconv.streaming.phases import FEATURES, GRID, Phase, Program
from sparseconv.streaming.planning import (
    chosen,
    costs,
    counted,
    counting_bytes,
    estimated,
    map_sizes,
    needed_boxes,
    rates,
    smallest,
    target_of,
    too_small,
    uncertain,
)
from sparseconv.streaming.ranks import ALONE, Ranks
from sparseconv.streaming.scene import lexicographic
from sparseconv.streaming.store import OwnRows, Store
from sparseconv.streaming.work import Inputs, Job, Own, Result, TooLarge, Values, Work, clipped, own_box, wanted
from sparseconv.trace.boxes import meets
from sparseconv.trace.totals import BatchStatistics, Total

#: pieces of the smallest blocks that make up one as large as the budget is thought to hold, at least
FINE = 4
#: smallest blocks that a scene is cut into before its memory is measured, at most, and voxels that they hold at least
FIRST, LEAST = 512, 1024
#: of a budget on a GPU, the part that the scene may take there
HELD = 3
#: voxels that memory is measured on: a part of them before the scene's blocks are known, and more on a GPU
MEASURED, MORE = 2**16, 2**22


class Run:
    """One scene through one program.

    Rows on the scene's own voxels lie in one array in the scene's order, or, of a result that is not gathered, as this
    rank's blocks leave them; rows on other voxels are kept by block.
    """

    def __init__(
        self,
        job: Job,
        budget: int,
        store: Store,
        progress: Callable[[int, int], None] | None,
        ranks: Ranks,
    ) -> None:
        program, scene, device, sample = job.program, job.scene, job.device, job.sample
        self.out, self.learns, self.ranks, self.gathers = job.out, job.learns, ranks, job.gathers
        self.program, self.scene, self.budget, self.device, self.store = program, scene, budget, device, store
        self.pipeline: Direct | Overlapped = Direct()
        self.progress, self.done, self.total = progress, 0, 0
        self.shared: dict[int, Any] = {}
        self.arrays: dict[int, torch.Tensor] = {}
        #: results that are not gathered
        self.parts: dict[int, OwnRows] = {}
        #: where results over the whole scene lie
        self.home = scene.features.device
        #: running statistics that are to be moved once all is done
        self.followers: list[tuple[BatchStatistics, list[Any]]] = []
        #: of the whole scene: rows of grids and pairs of plans as they are known, those to be counted, sizes of maps
        self.found: dict[int, int] = {}
        self.uncertain: list[int] = []
        #: bytes that a voxel takes while these are counted
        self.counting = 0
        self.sizes: dict[int, MapSizes] = {}
        #: on a GPU, what blocks took over what was counted for them, at most so far
        self.factor, self.counted, self.peak_before = 1.0, 1, 0
        self.peak = Peak(device)
        size, piece, count = scene.like.batch_size, piece_of(budget), len(scene)
        most = MORE if device.type == "cuda" else MEASURED
        part = max(1, min(most, budget // counting_bytes(program, program.needed)))
        if part < LEAST and count:
            size_of_one, voxels = smallest(program, scene, self._grid, self.learns)
            if size_of_one > budget:
                raise too_small(budget, size_of_one, voxels)
        first, on = max(1, min(part, max(LEAST, -(-count // FIRST)))), None
        if part >= MEASURED:  # a budget that is not small
            self.scene, on, held = scene.held_on(device, budget // HELD, piece, not job.learns)
            scene, self.budget = self.scene, budget - held
        self.blocks = Blocks(scene.coords, scene.extent, first, store, piece, device, self.budget // 4, on)
        if count > 1:
            sample = self._measured(program, part)
            limit = self._limit(program, sample)
            if device.type == "cuda" and min(limit // 2, MORE) > 2 * part:
                sample = self._measured(program, min(limit // 2, MORE))
                limit = self._limit(program, sample)
            if limit < count:
                self.blocks.refine(max(1, limit // FINE))
            self.found = estimated(program, sample, count)
            self.uncertain = sorted(set().union(*uncertain(program, sample, count)))
            self.counting = counting_bytes(program, self.uncertain, sample)
        self.program, self.plans = chosen(program, sample, self.blocks, self.budget, size, job.learns)
        #: by phase, what each block costs, and which of them this rank computes, by their numbers
        self.costs = costs(self.program, self.blocks, self.plans, size)
        self.shares: list[list[int]] = []

    def _limit(self, program: Program, sample: dict[int, Any]) -> int:
        """Voxels that the budget is thought to hold with all that is made of them."""
        return max(1, int(self.budget / max(rates(program, sample, self.learns))))

    def _measured(self, program: Program, most: int) -> Values:
        """The geometry of a part of the scene, by which the memory of blocks is planned."""
        part = max(self.blocks.chosen(lambda block: block.size <= most), key=lambda block: block.size)
        rows = self.blocks.order[part.first : min(part.last, part.first + most)].long()
        values, coords = Values({}), self._coords(rows)
        values[GRID] = self._grid(coords)
        Work(program, Phase(tuple(program.needed), (), (), ()), {}, self.load).geometry(values)
        return values

    def run(self) -> None:
        """All phases."""
        for number, each in enumerate(self.costs):
            left = [at for at in range(len(each)) if not self.store.is_done(f"{number}.{at}")]
            self.done += len(each) - len(left)
            self.shares.append([left[at] for at in self.ranks.share([each[at] for at in left])])
        self.total = self.done + sum(map(len, self.shares))
        if any(len(plan) > 1 for plan in self.plans):
            self._count(self.ranks)
        self.peak_before = self.peak.now()
        for number, (phase, plan) in enumerate(zip(self.program.phases, self.plans)):
            self._phase(number, phase, plan)

    def _count(self, ranks: Ranks = ALONE) -> None:
        """Find the sizes of the whole scene's maps, once: blocks choose their kernels by them. Several ranks count some
        blocks each."""
        if self.sizes or not self.found:
            return
        numbers, program, size = self.uncertain, self.program, self.scene.like.batch_size
        if numbers:
            steps = tuple(program.closure([*numbers, *(target_of(program, n) for n in numbers)], frozenset()))
            work = Work(program, Phase(steps, (), (), ()), {}, self.load)
            totals = torch.zeros(len(numbers), dtype=torch.int64, device=self.device)  # read once
            for block in self.blocks.chosen(self._is_countable)[ranks.rank :: ranks.size]:
                root = needed_boxes(program, numbers, block.box).get(GRID)
                if root is None:
                    continue
                values = Values({})
                values[GRID] = self._grid(self._coords(self.blocks.rows_in(clipped(root, size)).rows))
                work.geometry(values)
                totals += counted(program, numbers, values, block.box, size)
            self.found.update(zip(numbers, map(sum, zip(*ranks.heard(totals.tolist())))))
        self.sizes.update(map_sizes(program, self.found))

    def _is_countable(self, block: Block) -> bool:
        """Whether the geometry by which a block is counted fits into the budget."""
        root = needed_boxes(self.program, self.uncertain, block.box).get(GRID)
        voxels = 0 if root is None else self.blocks.most_in(clipped(root, self.scene.like.batch_size))
        return voxels * self.counting <= self.budget

    def _phase(self, number: int, phase: Phase, plan: list[Block]) -> None:
        known = [output for output in phase.outputs if self.program.steps[output].place == GRID]
        mine = [(at, plan[at]) for at in self.shares[number]]
        for output in known:
            if not self._is_gathered(output):
                step, count = self.program.steps[output], sum(block.size for _, block in mine)
                self.parts[output] = OwnRows(count, step.channels, step.dtype)
            else:
                self.arrays[output] = self._array(output)
        work = Work(self.program, phase, self.shared, self.load, self.sizes, self.peak.mark)
        with self.ranks.together(), pipeline_of(self.device) as self.pipeline:
            self.store.check(number, lambda at: self._some_rows(phase, plan[at]))
            for (at, block), inputs in self.pipeline.prefetched(mine, lambda item: self._inputs(phase, item[1].box)):
                parts = self._block(work, phase, block.box, inputs)
                self.pipeline.leave(parts, partial(self._finish, number, at, phase), known)
                del parts, inputs
        self._join(phase, len(plan))

    def _is_gathered(self, output: int) -> bool:
        """Whether rows on the scene's voxels are there for all ranks: where these want them, or a later phase does."""
        is_loaded = any(output in phase.loaded for phase in self.program.phases)
        return self.gathers or is_loaded or output not in self.program.results

    def _array(self, output: int) -> torch.Tensor:
        step = self.program.steps[output]
        if self.out is not None and self.program.results == (output,):
            return self.out
        assert step.dtype is not None
        return self.store.shared(f"rows.{output}", (len(self.scene), *step.channels), step.dtype)

    def _inputs(self, phase: Phase, box: IndexRange) -> Inputs:
        """What a block is made of: read from the scene, and on its way to the device where it fits."""
        boxes, size = wanted(self.program, phase, box), self.scene.like.batch_size
        root, rows, own = boxes.get(GRID), torch.zeros(0, dtype=torch.int64), None
        if root is not None:
            found = self.blocks.rows_in(clipped(root, size))
            rows, own = found.rows, found.place_of(self.blocks.at(box))
        inputs = Inputs(boxes, rows, own, None, {})
        if len(rows) * ROW_BYTES > self.budget:
            return inputs
        inputs.on_device = self._coords(rows)
        if self.device.type == "cuda":  # on a CPU they are read when they are needed
            for number in phase.steps:
                source = self.array_of(number)
                if source is not None and (number == FEATURES or number in phase.loaded):
                    inputs.loaded[number] = self.pipeline.gathered(source, rows)
        return inputs

    def array_of(self, number: int) -> torch.Tensor | None:
        """The rows on the scene's own voxels that are there already."""
        return self.scene.features if number == FEATURES else self.arrays.get(number)

    def in_parts(
        self, work: Work, phase: Phase, box: IndexRange, inputs: Inputs | None = None
    ) -> Iterator[tuple[IndexRange, Values, Inputs]]:
        """A block with its geometry, ready to be run; where it is larger than was thought, its halves one by one."""
        inputs = self._inputs(phase, box) if inputs is None else inputs
        try:
            values = self._started(work, inputs)
        except TooLarge as large:
            halved = halves(box, self.scene.coords[inputs.rows.to(self.scene.coords.device)])
            if halved is None:
                raise too_small(self.budget, large.size, len(inputs.rows)) from None
            inputs.clear()
            self._count()
            for half in halved:
                yield from self.in_parts(work, phase, half)
        else:
            yield box, values, inputs

    def _block(self, work: Work, phase: Phase, box: IndexRange, inputs: Inputs) -> list[dict[int, Any]]:
        """A block's own rows, and what it adds to totals; those of its halves where it had to be cut."""
        made = []
        self.peak.begin()
        for part, values, given in self.in_parts(work, phase, box, inputs):
            self.peak.mark()
            work.run(values, given.boxes)
            made.append(work.own(values, part, self.scene.like.batch_size, given.own))
            self._measure()
        return made

    def _measure(self) -> None:
        """On a GPU, compare what the last block took with what was counted for it; later ones are judged by that."""
        self.factor = max(self.factor, (self.peak.most() - self.peak_before) / max(1, self.counted))
        self.peak.begin()

    def _started(self, work: Work, inputs: Inputs) -> Values:
        """A block with its geometry, and the certainty that the rest fits."""
        least = len(inputs.rows) * ROW_BYTES
        if inputs.on_device is None:
            raise TooLarge(least)
        values = Values(self.shared)
        values[GRID], values[-1] = self._grid(inputs.on_device), inputs.rows
        values.update(inputs.loaded)
        work.geometry(values)
        size = self.counted = work.bytes(values, self.learns) + (
            least if self.device.type == "cpu" else 2 * inputs.num_bytes
        )
        if size * self.factor > self.budget:
            raise TooLarge(int(size * self.factor))
        return values

    def _coords(self, rows: torch.Tensor) -> torch.Tensor:
        """Coords of the scene's rows, on the device."""
        return self.pipeline.gathered(self.scene.coords, rows).to(self.device, torch.int32)

    def _grid(self, coords: torch.Tensor) -> VoxelGrid:
        """The grid of a block, in the scene, on the device."""
        like = self.scene.like
        grid = VoxelGrid(coords.to(self.device), like.batch_size, like.voxel_size, like.origin)
        grid.is_placed = like.is_placed
        return grid

    def load(
        self,
        number: int,
        grid: VoxelGrid,
        rows: torch.Tensor,
        boxes: dict[int, IndexRange],
        seen: Callable[[int, torch.Tensor], torch.Tensor] = lambda at, piece: piece,
    ) -> torch.Tensor:
        """Rows of the scene, or rows that an earlier phase left, for the voxels of a block's grid.

        ``seen`` is given each piece of an earlier phase, and returns what is used of it.
        """
        source = self.array_of(number)
        if source is not None:
            return self.pipeline.gathered(source, rows).to(self.device)
        step, level = self.program.steps[number], self.phase_of(number)
        assert step.dtype is not None
        made = torch.zeros((len(grid), *step.channels), dtype=step.dtype, device=self.device)
        for at, block in enumerate(self.plans[level]):
            own = own_box(self.program, number, block.box)
            if own is None or number not in boxes or not meets(own, boxes[number]):
                continue
            coords, values = self.store.get(f"piece.{number}.{at}")[:2]
            found = VoxelGrid(coords.to(self.device), grid.batch_size).lookup(grid.coords)
            there = (found >= 0).nonzero().flatten()
            made = made.index_put((there,), seen(at, values.to(self.device))[found[there]])
        return made

    def phase_of(self, number: int) -> int:
        return next(at for at, phase in enumerate(self.program.phases) if number in phase.outputs)

    def _finish(self, number: int, at: int, phase: Phase, parts: list[dict[int, Own]]) -> None:
        """Keep what a block has made, in host memory by now."""
        steps = self.program.steps
        for output in phase.outputs:
            own = [part[output] for part in parts]
            if steps[output].place == GRID:
                for one in own:
                    if output in self.parts:
                        self.parts[output].append(self.pipeline.write, one.rows, one.values)
                    else:
                        self.pipeline.write(self.arrays[output], one.rows, one.values)
            else:
                kept = [(one.coords, one.values, one.rows) for one in own]
                self.store.put(f"piece.{output}.{at}", tuple(torch.cat(some) for some in zip(*kept)))
        for total in phase.totals:
            self.store.put(f"total.{total}.{at}", [part[total] for part in parts])
        self.store.finish(f"{number}.{at}", lambda: self._some_rows(phase, self.plans[number][at]))
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _some_rows(self, phase: Phase, block: Block) -> str:
        """A digest of some rows that a block left."""
        rows = self.blocks.order[block.first : block.last][:: block.size // 16 + 1].long()
        arrays = (self.arrays[output] for output in phase.outputs if output in self.arrays)
        return digest(*(array[rows.to(array.device)] for array in arrays))[:16]

    def _join(self, phase: Phase, count: int) -> None:
        """Totals of all blocks, and what is made of them alone."""
        for total in phase.totals:
            step: Any = self.program.steps[total]
            parts = [part for at in range(count) for part in self.store.get(f"total.{total}.{at}")]
            self.shared[total] = self.on_device(step.join(parts, self.program.steps[step.of].dtype))
            self.followers += [(step, parts)] if isinstance(step, BatchStatistics) else []
        self.finish_whole(self.shared)

    def finish_whole(self, shared: dict[int, Any]) -> None:
        """Add what can be made of the tensors of the whole scene that are there."""
        for known in self.program.needed:
            step = self.program.steps[known]
            ready = known not in shared and not isinstance(step, Total) and self.program.is_whole(known)
            if ready and all(used in shared for used in step.uses):
                shared[known] = step.value(shared)

    def level_of(self, number: int) -> int:
        """The phase after which a tensor of the whole scene is there."""
        step = self.program.steps[number]
        if isinstance(step, Total):
            return self.program.levels[number]
        return max((self.level_of(used) for used in step.uses), default=0)

    def on_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        return tuple(one.to(self.device) for one in value)

    def rows_of(self, number: int) -> Result:
        """A result as blocks have left it."""
        step = self.program.steps[number]
        if step.place is None:
            return Result(self.shared[number].to(self.home))
        plan, share = self.plans[self.phase_of(number)], self.shares[self.phase_of(number)]
        mine = range(len(plan)) if self.gathers else share
        if step.place == GRID:
            if self.gathers:
                return Result(self.store.kept(self.arrays[number]))
            if number in self.parts:
                return Result(self.parts[number].part.features, rows=self.parts[number].part.rows)
            rows = torch.cat([self.blocks.order[plan[at].first : plan[at].last] for at in mine]).cpu().long()
            return Result(self.arrays[number][rows], rows=rows)
        pieces = [self.store.get(f"piece.{number}.{at}") for at in mine]
        coords, features, rows = (torch.cat([piece[at] for piece in pieces]) for at in range(3))
        order = rows.argsort() if self.program.keeps_order(step.place) else lexicographic(coords)
        return Result(features[order], coords[order], order, [len(piece[0]) for piece in pieces])
