"""Gradients of a streamed network: phases backwards, block after block, each computed once more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sparseconv.autograd_function import Function
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.streaming.phases import FEATURES, GRID, Phase, Program
from sparseconv.streaming.run import Run
from sparseconv.streaming.work import Own, Work
from sparseconv.trace.program import Call, OverEdges, Step, casting, modes_now, parts_of

Gradients = list[torch.Tensor | None]
#: what a gradient is of: ("rows", step, 0) of rows on the scene's voxels, ("pieces", step, block) of those that a phase
#: left, ("whole", step, place) of tensors of the whole scene, ("sums", parameter, 0)
Key = tuple[str, int, int]


def parameters_of(program: Program) -> list[torch.Tensor]:
    """The tensors among the arguments of a program's steps that want a gradient, each once."""
    return [tensor for tensor in _given(program) if tensor.requires_grad]


def _given(program: Program) -> list[torch.Tensor]:
    """The tensors among the arguments of a program's steps, each once."""
    found: dict[int, torch.Tensor] = {}
    for number in program.needed:
        step: Step = program.steps[number]
        if isinstance(step, (Call, OverEdges)):
            for tensor in parts_of((step.args, step.kwargs), torch.Tensor):
                found.setdefault(id(tensor), tensor)
    return list(found.values())


class Streamed(Function):
    """A run as one node: its backward pass computes every block once more, and adds up what blocks give.

    Sums go over blocks in one order, in fp32 at least: two runs give the same bits.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, features: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        run.run()
        ctx.run, ctx.parameters = run, parameters
        ctx.versions = [(tensor, _version(tensor)) for tensor in (features, *_relied_on(run))]
        ctx.casts = modes_now()[1]
        # tensors of their own: the run that the node keeps must not keep the node
        return tuple(run.rows_of(number).features.detach() for number in run.program.results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        for tensor, version in ctx.versions:
            if _version(tensor) != version:
                raise RuntimeError(
                    f"a tensor {tuple(tensor.shape)} that stream used or returned was changed in place, and the "
                    "backward pass computes blocks from it once more: call backward() before such a change"
                )
        wants = ctx.needs_input_grad[1]
        with casting(ctx.casts):
            made = _Backward(ctx.run, list(ctx.parameters), wants).run(dict(zip(ctx.run.program.results, grads)))
        return None, *made


def _relied_on(run: Run) -> Iterator[torch.Tensor]:
    """What a user may change and blocks are computed from once more: arguments, and results that other steps use."""
    yield from _given(run.program)
    used = {number for step in run.program.needed for number in run.program.steps[step].uses}
    for number in used.intersection(run.program.results):
        value = run.shared.get(number) if number in run.shared else run.arrays.get(number)
        if isinstance(value, torch.Tensor):
            yield value


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, where torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


class _Backward:
    """The gradients of one run, as they are added up."""

    def __init__(self, run: Run, parameters: list[torch.Tensor], wants: bool) -> None:
        self.of, self.parameters, self.wants = run, parameters, wants
        self.grads: dict[Key, torch.Tensor] = {}
        #: of the block that is computed
        self.leaves: dict[Key, torch.Tensor] = {}

    def run(self, results: dict[int, torch.Tensor | None]) -> Gradients:
        run = self.of
        for number, grad in results.items():
            step = run.program.steps[number]
            if grad is None or not grad.is_floating_point():
                continue
            if step.place is None:
                self._add(("whole", number, 0), grad.to(run.device, copy=True))
            elif step.place == GRID:
                added = number == FEATURES or any(number in phase.loaded for phase in run.program.phases)
                wide = torch.promote_types(grad.dtype, torch.float32)
                self.grads["rows", number, 0] = grad.to(wide, copy=True) if added else grad
            else:
                found = run.rows_of(number)
                assert found.order is not None
                back = torch.empty_like(grad)
                back[found.order.to(grad.device)] = grad
                for at, part in enumerate(back.split(found.sizes)):
                    self.grads["pieces", number, at] = part
        phases = run.program.phases
        for level in reversed(range(len(phases))):
            totals = self._totals(phases[level], len(run.plans[level]), level)
            with run.ranks.together():
                self._leave_to_first(phases[level])
                self._phase(phases[level], level, totals)
            self._join(phases[level])
        like = run.scene.features
        given = self.grads.get(("rows", FEATURES, 0)) if self.wants else None
        if self.wants and given is None:
            given = torch.zeros_like(like)
        sums = [self.grads.get(("sums", at, 0)) for at in range(len(self.parameters))]
        return [None if s is None else s.to(p.dtype) for s, p in zip([given, *sums], [like, *self.parameters])]

    def _totals(self, phase: Phase, count: int, level: int) -> dict[int, list[list[tuple[Any, ...]]]]:
        """From gradients of totals, and of what is made of them, to gradients of the parts of each block."""
        run, made = self.of, {}
        with torch.enable_grad():
            parts: dict[int, list[list[tuple[torch.Tensor, ...]]]] = {}
            shared: dict[int, Any] = {n: v for n, v in run.shared.items() if run.level_of(n) != level}
            for number in phase.totals:
                total: Any = run.program.steps[number]
                stored = [run.store.get(f"total.{number}.{at}") for at in range(count)]
                parts[number] = [[tuple(_leaf(t) for t in part) for part in block] for block in stored]
                with torch.set_grad_enabled(total.modes is None or total.modes[0]):
                    joined = total.join(list(chain(*parts[number])), run.program.steps[total.of].dtype)
                shared[number] = run.on_device(joined)
            run.finish_whole(shared)
            outputs, grads = [], []
            for kind, number, at in [key for key in self.grads if key[0] == "whole"]:
                if run.level_of(number) == level:
                    grad = self.grads.pop((kind, number, at))
                    value = shared[number][at] if isinstance(shared[number], tuple) else shared[number]
                    if value.requires_grad:
                        outputs.append(value)
                        grads.append(grad.to(value.dtype))
            leaves = [t for some in parts.values() for part in chain(*some) for t in part if t.requires_grad]
            found = _grad(outputs, [*leaves, *self.parameters], grads)
        self._sum(found[len(leaves) :])
        by_leaf = dict(zip(map(id, leaves), found))
        for number, some in parts.items():
            made[number] = [[tuple(by_leaf.get(id(t)) for t in part) for part in block] for block in some]
        return made

    def _leave_to_first(self, phase: Phase) -> None:
        """What a phase adds to begins on the first rank with what is there, and on the others with nothing."""
        if self.of.ranks.rank:
            for key in self._added_to(phase):
                del self.grads[key]

    def _join(self, phase: Phase) -> None:
        """The sums over all ranks of what blocks of a phase gave, one after another on each."""
        if self.of.ranks.size > 1:
            mine = {key: self.grads[key] for key in self._added_to(phase)}
            self.grads |= self.of.ranks.summed(mine, self.of.device)

    def _added_to(self, phase: Phase) -> list[Key]:
        """What blocks of a phase may add to, as far as it is there."""
        loaded = {FEATURES, *phase.loaded}
        return [key for key in self.grads if key[0] in ("sums", "whole") or key[1] in loaded]

    def _phase(self, phase: Phase, level: int, totals: dict[int, list[list[tuple[Any, ...]]]]) -> None:
        """One pass over the blocks of a phase."""
        run = self.of
        work, plan = Work(run.program, phase, run.shared, self._load, run.sizes), run.plans[level]
        for at in run.shares[level]:
            block = plan[at]
            starts = dict.fromkeys(phase.outputs, 0)
            for taken, (box, values, given) in enumerate(run.in_parts(work, phase, block.box)):
                self.leaves = {}
                with torch.enable_grad():
                    values.shared = {n: self._whole_leaf(n, v) for n, v in run.shared.items()}
                    for number in [n for n in values if n == FEATURES or n in phase.loaded]:
                        del values[number]
                    work.run(values, given.boxes)
                    own = work.own(values, box, run.scene.like.batch_size, given.own)
                    outputs, grads = [], []
                    for number in phase.outputs:
                        if number == FEATURES:  # its gradient is the scene's already
                            continue
                        mine: Own = own[number]
                        grad = self._grad_of(number, at, mine, starts)
                        if grad is not None and mine.values.requires_grad:
                            outputs.append(mine.values)
                            grads.append(grad.to(mine.values.device, mine.values.dtype))
                    for number in phase.totals:
                        for part, grad in zip(own[number], totals[number][at][taken]):
                            if grad is not None and part.requires_grad:
                                outputs.append(part)
                                grads.append(grad.to(part.device))
                    keys = list(self.leaves)
                    found = _grad(outputs, [*self.leaves.values(), *self.parameters], grads)
                self._sum(found[len(keys) :])
                for key, grad in zip(keys, found):
                    if grad is not None:
                        self._keep(key, grad, values[-1])
                self.leaves = {}

    def _grad_of(self, number: int, at: int, own: Own, starts: dict[int, int]) -> torch.Tensor | None:
        """The gradient of a block's own rows of an output."""
        if self.of.program.steps[number].place == GRID:
            found = self.grads.get(("rows", number, 0))
            return None if found is None else found[own.rows.to(found.device)]
        piece = self.grads.get(("pieces", number, at))
        first = starts[number]
        starts[number] = first + len(own.values)
        return None if piece is None else piece[first : starts[number]]

    def _keep(self, key: Key, grad: torch.Tensor, rows: torch.Tensor) -> None:
        """Add what a block gives for one of its leaves; rows of the scene are those of ``rows``."""
        if key[0] != "rows":
            self._add(key, grad.cpu() if key[0] == "pieces" else grad)
            return
        if key not in self.grads:
            source: Any = self.of.array_of(key[1])
            wide = torch.promote_types(source.dtype, torch.float32)
            self.grads[key] = torch.zeros(source.shape, dtype=wide, device=source.device)
        total = self.grads[key]
        total.index_add_(0, rows.to(total.device), grad.to(total.device, total.dtype))

    def _add(self, key: Key, grad: torch.Tensor) -> None:
        self.grads[key] = self.grads[key] + grad if key in self.grads else grad

    def _sum(self, found: Gradients) -> None:
        """Add what a block gives for parameters."""
        for at, grad in enumerate(found):
            if grad is not None:
                grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
                key = ("sums", at, 0)
                self.grads[key] = self.grads[key].add_(grad) if key in self.grads else grad

    def _load(self, number: int, grid: VoxelGrid, rows: torch.Tensor, boxes: dict[int, IndexRange]) -> torch.Tensor:
        """What `Run.load` loads, as leaves that a gradient is found for."""
        run = self.of
        if run.array_of(number) is not None:
            loaded = run.load(number, grid, rows, boxes)
            return loaded if number == FEATURES and not self.wants else self._leaf_of(("rows", number, 0), loaded)
        return run.load(number, grid, rows, boxes, lambda at, piece: self._leaf_of(("pieces", number, at), piece))

    def _whole_leaf(self, number: int, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._leaf_of(("whole", number, at), one) for at, one in enumerate(value))
        return self._leaf_of(("whole", number, 0), value)

    def _leaf_of(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        leaf = _leaf(value)
        if leaf.requires_grad:
            self.leaves[key] = leaf
        return leaf


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.is_floating_point())


def _grad(outputs: list[torch.Tensor], inputs: list[torch.Tensor], grads: list[torch.Tensor]) -> Gradients:
    if not outputs or not inputs:
        return [None] * len(inputs)
    with torch.autocast(outputs[0].device.type, enabled=False):  # as torch's own backward pass, which casts nothing
        return list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))
