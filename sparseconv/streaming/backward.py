"""Gradients of a streamed network: phases backwards, block after block, each computed once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sparseconv.autograd_function import Function
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.streaming.phases import FEATURES, GRID, Phase, Program
from sparseconv.streaming.run import Run
from sparseconv.streaming.steps import Call, OverEdges, Step
from sparseconv.streaming.work import Own, Work

Gradients = list[torch.Tensor | None]


def parameters_of(program: Program) -> list[torch.Tensor]:
    """The tensors among the arguments of a program's steps that want a gradient, each once."""
    return [tensor for tensor in _given(program) if tensor.requires_grad]


def _given(program: Program) -> list[torch.Tensor]:
    """The tensors among the arguments of a program's steps, each once."""
    found: dict[int, torch.Tensor] = {}
    for number in program.needed:
        step: Step = program.steps[number]
        if isinstance(step, (Call, OverEdges)):
            for tensor in _tensors([step.args, tuple(step.kwargs.values())]):
                found.setdefault(id(tensor), tensor)
    return list(found.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in lists and tuples, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


class Streamed(Function):
    """A run as one node: its backward pass computes every block once more, and adds up what blocks give.

    Sums go over blocks in one order, in fp32 at least: two runs give the same bits.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, features: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        run.run()
        ctx.run, ctx.parameters = run, parameters
        ctx.versions = [(tensor, _version(tensor)) for tensor in (features, *_relied_on(run))]
        ctx.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", run.device.type))
        ]
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
        with ExitStack() as as_forward:
            for kind, dtype, enabled in ctx.autocast:
                as_forward.enter_context(torch.autocast(kind, dtype, enabled))
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
        self.of, self.parameters = run, parameters
        self.sums: Gradients = [None] * len(parameters)
        #: of rows on the scene's voxels, of pieces that a phase left, of tensors of the whole scene
        self.rows: dict[int, torch.Tensor] = {}
        self.pieces: dict[tuple[int, int], torch.Tensor] = {}
        self.whole: dict[tuple[int, int], torch.Tensor] = {}
        self.wants, self.leaves = wants, {}  # type: bool, dict[Any, torch.Tensor]

    def run(self, results: dict[int, torch.Tensor | None]) -> Gradients:
        run = self.of
        for number, grad in results.items():
            step = run.program.steps[number]
            if grad is None or not grad.is_floating_point():
                continue
            if step.place is None:
                _add(self.whole, (number, 0), grad.to(run.device, copy=True))
            elif step.place == GRID:
                added = number == FEATURES or any(number in phase.loaded for phase in run.program.phases)
                self.rows[number] = (
                    grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True) if added else grad
                )
            else:
                found = run.rows_of(number)
                assert found.order is not None
                back = torch.empty_like(grad)
                back[found.order.to(grad.device)] = grad
                for at, part in enumerate(back.split(found.sizes)):
                    self.pieces[number, at] = part
        phases = run.program.phases
        for level in reversed(range(len(phases))):
            totals = self._totals(phases[level], len(run.plans[level]), level)
            with run.ranks.together():
                self._leave_to_first(phases[level])
                self._phase(phases[level], level, totals)
            self._join(phases[level])
        given = self.rows.get(FEATURES)
        like = run.scene.features
        if self.wants and given is None:
            given = torch.zeros_like(like)
        sums: Gradients = [None if s is None else s.to(p.dtype) for s, p in zip(self.sums, self.parameters)]
        return [given.to(like.dtype) if given is not None and self.wants else None, *sums]

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
            for (number, at), grad in list(self.whole.items()):
                if run.level_of(number) == level:
                    value = shared[number][at] if isinstance(shared[number], tuple) else shared[number]
                    if value.requires_grad:
                        outputs.append(value)
                        grads.append(grad.to(value.dtype))
                    del self.whole[number, at]
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
            loaded = {FEATURES, *phase.loaded}
            self.rows = {number: rows for number, rows in self.rows.items() if number not in loaded}
            self.pieces = {key: piece for key, piece in self.pieces.items() if key[0] not in loaded}
            self.whole, self.sums = {}, [None] * len(self.sums)

    def _join(self, phase: Phase) -> None:
        """The sums over all ranks of what blocks of a phase gave, one after another on each."""
        ranks, loaded = self.of.ranks, {FEATURES, *phase.loaded}
        if ranks.size == 1:
            return
        mine: dict[Any, torch.Tensor] = {("sums", at, 0): s for at, s in enumerate(self.sums) if s is not None}
        mine |= {("rows", number, 0): rows for number, rows in self.rows.items() if number in loaded}
        mine |= {("pieces", *key): piece for key, piece in self.pieces.items() if key[0] in loaded}
        mine |= {("whole", *key): value for key, value in self.whole.items()}
        for (kind, *key), total in ranks.summed(mine, self.of.device).items():
            if kind == "sums":
                self.sums[key[0]] = total
            elif kind == "rows":
                self.rows[key[0]] = total
            else:
                (self.pieces if kind == "pieces" else self.whole)[key[0], key[1]] = total

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
            found = self.rows.get(number)
            return None if found is None else found[own.rows.to(found.device)]
        piece = self.pieces.get((number, at))
        first = starts[number]
        starts[number] = first + len(own.values)
        return None if piece is None else piece[first : starts[number]]

    def _keep(self, key: Any, grad: torch.Tensor, rows: torch.Tensor) -> None:
        kind, number, at = key
        if kind == "whole":
            _add(self.whole, (number, at), grad)
        elif kind == "piece":
            _add(self.pieces, (number, at), grad.cpu())
        else:
            source = self.of.scene.features if number == FEATURES else self.of.arrays[number]
            if number not in self.rows:
                wide = torch.promote_types(source.dtype, torch.float32)
                self.rows[number] = torch.zeros(source.shape, dtype=wide, device=source.device)
            total = self.rows[number]
            total.index_add_(0, rows.to(total.device), grad.to(total.device, total.dtype))

    def _sum(self, found: Gradients) -> None:
        """Add what a block gives for parameters."""
        for at, grad in enumerate(found):
            if grad is not None:
                grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
                before = self.sums[at]
                self.sums[at] = grad if before is None else before.add_(grad)

    def _load(self, number: int, grid: VoxelGrid, rows: torch.Tensor, boxes: dict[int, IndexRange]) -> torch.Tensor:
        """What `Run.load` loads, as leaves that a gradient is found for."""
        run = self.of
        if run.array_of(number) is not None:
            loaded = run.load(number, grid, rows, boxes)
            return loaded if number == FEATURES and not self.wants else self._leaf_of(("rows", number, 0), loaded)
        return run.load(number, grid, rows, boxes, lambda at, piece: self._leaf_of(("piece", number, at), piece))

    def _whole_leaf(self, number: int, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._leaf_of(("whole", number, at), one) for at, one in enumerate(value))
        return self._leaf_of(("whole", number, 0), value)

    def _leaf_of(self, key: Any, value: torch.Tensor) -> torch.Tensor:
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


def _add(sums: dict[Any, torch.Tensor], key: Any, grad: torch.Tensor) -> None:
    sums[key] = sums[key] + grad if key in sums else grad
