"""One call of a module as two CUDA graphs over arrays of fixed size: forward, and backward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch

from sparseconv.geometry.fixed_grid import FixedGrid, forget_tables
from sparseconv.geometry.fixed_grid_io import fault_of
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.gpu import graphs
from sparseconv.gpu.streams import forget_workspaces, reporting
from sparseconv.nn.capturing.answer import Answer
from sparseconv.nn.capturing.arrays import Lengths, SceneArrays, Sizes
from sparseconv.nn.capturing.joining import Changed, Joined, Joining, Norms, Watched
from sparseconv.nn.capturing.module_state import Attributes, ModuleState, modules_of_clients
from sparseconv.nn.capturing.padding import Breaker, Guard, LiveRows, Noise, Seen, keep_apart
from sparseconv.nn.capturing.reads import Reading, Reads
from sparseconv.nn.capturing.region import Scene, kind_of, watched
from sparseconv.nn.capturing.shared_memory import Gathered, SharedMemory, copies_of, reached
from sparseconv.nn.capturing.values.given import CannotCapture, DoesNotFit, Given
from sparseconv.nn.results import put_rows

#: captures to try, and bytes of graphs from which on a second one is: their memory is held as long as they are
TRIES, WORTH = 3, 2**27


class Recording:
    """A call over arrays that a scene is copied into.

    Args:
        call: the module's own forward.
        given: the arguments of the call at hand, whose scene the recording is made and tried on.
        path: where among the arguments the sparse tensor is; None where the call makes it.
        example: a scene by which coarser grids and numbers of edges are foreseen.
        lengths: rows of arguments that have none a voxel.
        parameters: those whose gradients the backward graph finds; empty for inference.
        wanted: numbers of the results that get a gradient; none for all of them.
        memory: where the graphs have their arrays.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        module: torch.nn.Module,
        given: Given,
        path: tuple[Any, ...] | None,
        example: Scene,
        sizes: Sizes,
        lengths: Lengths,
        parameters: Sequence[torch.Tensor],
        wanted: set[int],
        memory: SharedMemory,
    ) -> None:
        self._call, self._module, self._given, self.path = call, module, given, path
        self.sizes, self.parameters, self._wanted, self.memory = sizes, list(parameters), wanted, memory
        self._device, features = example.features.device, example.features
        self.trains = bool(self.parameters) or features.requires_grad
        self.of_features = features.requires_grad
        with torch.inference_mode(False):
            self.arrays = SceneArrays(given, path, example, sizes, lengths)
            self.state = ModuleState(module, self.parameters)
        self._told, self.grads = torch.zeros(0, dtype=torch.int32), list[torch.Tensor]()
        self._gathered: Gathered | None = None
        #: what the region reads of what the call makes before it; found by the first run
        self.reads = Reads()
        self._reading: Reading | None = None
        #: what batch norms take with them; while the first run is watched, what notes that
        self._joined: Norms | list[Joined | None] = Norms()
        #: how far results are from the eager call's; whether those for another scene are, which numbers may tell apart
        self.gaps: list[float] | None = None
        self.is_compared = path is not None

    # ---- the call on these arrays

    def run(self, around: Callable[[], Any] = nullcontext) -> Answer:
        """The call; from its region on within ``around``. Writes the report; results are on grids of fixed size."""
        stack = ExitStack()
        grids: list[FixedGrid] = []

        def begin(x: Any) -> bool:
            grids.append(self._enter(x, stack, around, in_place=True)[1])
            return True

        kind, dtype = self._device.type, torch.get_autocast_dtype(self._device.type)
        torch.clear_autocast_cache()
        with stack:
            stack.enter_context(torch.autocast(kind, dtype, torch.is_autocast_enabled(kind), cache_enabled=False))
            if self.path is None:
                args, kwargs = self._given.copied(note=None if self._reading is None else self._reading.entry)
                with watched(begin):
                    out = self._call(*args, **kwargs)
            else:
                x, grid = self._enter(self._given.at(self.path), stack, around)
                grids.append(grid)
                args, kwargs = self._given.copied({self.path: x, **self.arrays.slots()})
                out = self._call(*args, **kwargs)
            if not grids:
                raise CannotCapture("the call asked for no sparse tensor's grid this time")
            family = grids[0].family
            own = None if self.path is None else len(grids[0])
            answer = Answer(out, self._given, family, self.state.constants, own)
            self._report(answer, grids[0], family)
            self._grid_now = grids[0]
            torch.clear_autocast_cache()
            return answer

    def _enter(
        self, x: Any, stack: ExitStack, around: Callable[[], Any], in_place: bool = False
    ) -> tuple[Any, FixedGrid]:
        """The region begins: the sparse tensor on the arrays, and its grid."""
        kind = kind_of(x)
        assert kind is not None
        self.arrays.limits.begin()
        stack.enter_context(around())
        self.state.keep()
        #: a leaf of its own in every run, over the same memory
        wanted = torch.is_grad_enabled() and (self.of_features or not self.trains)
        self._leaf = self.arrays.features.detach().requires_grad_(wanted)
        grid = self.arrays.grid()
        norms = Joining(self._joined) if isinstance(self._joined, list) else self._joined
        stack.enter_context(LiveRows(grid.family, norms))
        return kind.fill(x if in_place else kind.copy(x), grid, self._leaf, self.arrays.shape()), grid

    def _report(self, answer: Answer, grid: FixedGrid, family: dict[int, torch.Tensor]) -> None:
        """Tell the host what did not fit and how many rows are real: as soon as all maps are there."""
        counts = [family[rows] for rows in answer.grids]
        with reporting(), torch.no_grad():
            told = torch.cat([self.arrays.ticket, grid.fault, *counts])
            if len(self._told) != len(told):
                self._told = torch.zeros(len(told), dtype=torch.int32, pin_memory=self._device.type == "cuda")
                self._told_on_host = self._told.numpy()
            self._told.copy_(told, non_blocking=True)
            if answer.voxels:  # of all grids that are returned, one after another, so that a call copies them at once
                self._voxels_now = torch.cat([grid.coords for grid in answer.voxels.values()])
            self._mark()

    def _mark(self) -> None:
        """Record, within a capture, that the report is there."""
        self._reported = None
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._reported = torch.cuda.Event(external=True)
            self._reported.record()

    # ---- recording

    def record(self, scene: Scene) -> None:
        """Try the call on arrays of fixed size, then capture it; raises CannotCapture or DoesNotFit."""
        with torch.inference_mode(False), self.state.restoring(), self.state.as_leaves(self._module):
            self.arrays.load(scene, self._given)
            with torch.set_grad_enabled(self.trains):
                self._guarded()
                self.arrays.load(scene, self._given)  # once more: now the strided layers are known
                names = [name for name, _ in self._module.named_buffers()]
                keep_apart(self._with, [*self.state.constants.values()], names)
                watched = Watched()
                answer = self._run_with(watched)
                self._choose(answer)
                self._joined = watched.joined(answer.tensors) if self.trains else watched.foreseen(self._run_with)
                if self.trains:
                    self._find(answer)
                del answer
                try:
                    self._capture()
                except RuntimeError as error:
                    self._name_breaker(error)
                    raise
        forget_tables(self.arrays.like)

    def tried(self) -> None:
        """Let go of what only the capture and its comparison needed, the module among it: it holds this recording."""
        self._given = Given((), {})
        del self._leaf, self._call, self._module
        gc.collect()  # an eager call's maps and the gradient's graph hold one another

    def _guarded(self) -> None:
        """A run in which what no graph can hold is found."""
        seen, own = Seen(), {t.untyped_storage().data_ptr() for t in self.state.constants.values()}
        stack, kept = ExitStack(), list[tuple[Attributes, Guard]]()
        self._reading = reading = Reading(modules_of_clients(self._module), self.reads)

        def around() -> Guard:
            stack.close()
            before = {t.untyped_storage().data_ptr(): "a tensor" for t in seen.made}
            for _, leaf in self._given.leaves:  # calls with a scene are told apart by the values of those on the host
                if isinstance(leaf, torch.Tensor) and (self.path is None or leaf.device == self._device):
                    before[leaf.untyped_storage().data_ptr()] = "an argument"
            guard = Guard({at: what for at, what in before.items() if at not in own}, self._device)
            kept.append((Attributes(self._module, self.arrays.given()), guard))
            reading.begin()
            return guard

        with self.state.looking(), reading, stack:
            stack.enter_context(seen)
            results = self.run(around).tensors
        self._reading = None
        kept[0][0].check()
        kept[0][1].check(results)

    def _with(self, noise: Noise) -> list[torch.Tensor]:
        """Results and buffers of a run that is given other values in rows that are no voxels; does the scene fit?"""
        with self.state.restoring():
            answer = self._run_with(noise)
            self._wait()
            if fault := fault_of(int(self._told_on_host[1])):
                raise DoesNotFit(fault)
            live = (t if n is None else t[: self.counts()[n]] for t, n in zip(answer.tensors, answer.rows))
            return [t.detach().clone() for t in (*live, *self._module.buffers())]

    def _run_with(self, norms: Norms) -> Answer:
        self._joined = norms
        return self.run()

    def _choose(self, answer: Answer) -> None:
        """Which results get a gradient, and the arrays that it is copied into."""
        floats = [i for i, t in enumerate(answer.tensors) if t.requires_grad]
        #: numbers of the results that have a gradient, and of those whose gradient the graph takes
        self.differentiable = set(floats)
        self.taken = sorted(self._wanted & self.differentiable or self.differentiable)
        self.grads = [torch.zeros_like(answer.tensors[i]) for i in self.taken]
        self._grads_filled = [0] * len(self.taken)
        self._reached = {i: reached(answer.tensors[i], self.state.starts, self._leaf) for i in floats}
        self.trains = self.trains and bool(floats)

    def _find(self, answer: Answer) -> list[torch.Tensor | None]:
        """Gradients of the features and of the parameters, from those of the results."""
        ends = [answer.tensors[i] for i in self.taken]
        starts = ([self._leaf] if self.of_features else []) + self.state.starts
        with torch.autograd.set_multithreading_enabled(False):
            return list(torch.autograd.grad(ends, starts, self.grads, allow_unused=True))

    def _capture(self) -> None:
        device, memory = self._device, self.memory
        stream = memory.stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            summed = self._once_on_streams()  # what is timed on first use is timed here
        torch.cuda.current_stream(device).wait_stream(stream)
        forget_workspaces()
        with torch.cuda.stream(stream):
            side, other = memory.sides(), memory.sides(summed)

        def capture(pieces: graphs.Pieces) -> tuple[torch.cuda.CUDAGraph, None]:
            self._drop()
            self._forward = forward = torch.cuda.CUDAGraph()
            self.answer = self.run(lambda: graphs.capturing(forward, stream, side, pieces, pool=memory.pool()))
            if self.trains:
                self._backward = torch.cuda.CUDAGraph()
                assert self._gathered is not None
                also = graphs.capturing(self._backward, stream, other, {}, pool=forward.pool())
                with also, self._gathered.at_once():
                    found = self._find(self.answer)
                    other.settle(found)
                    self._gather(found)
            return forward, None

        if memory.pool() is not None:
            capture({})  # there is room: pieces that were tried would stay
        else:
            graphs.least_memory(capture, dict.fromkeys((stream, *side.streams), 0), TRIES, WORTH)
        memory.add(self._forward)
        self._finish()

    def _name_breaker(self, error: RuntimeError) -> None:
        """Capture again, to raise `CannotCapture` by the name of the operation that broke off the capture."""
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return
        self._drop()
        graph, stream, side = torch.cuda.CUDAGraph(), self.memory.stream(self._device), self.memory.sides()
        breaker = Breaker()
        with suppress(RuntimeError):  # torch's own, of the broken capture
            self.run(lambda: graphs.capturing(graph, stream, side, {}, recorder=breaker))
        if breaker.found is not None:
            raise CannotCapture(breaker.found) from error

    def _drop(self) -> None:
        """Let go of a capture that was tried."""
        if self.__dict__.pop("_forward", None) is not None:
            for name in ("answer", "_backward", "_grid_now", "_voxels_now", "_grad_features"):
                self.__dict__.pop(name, None)
            gc.collect()  # maps and the gradient's graph hold one another

    def _once_on_streams(self) -> bool:
        """A run as it will be captured. Returns whether gradients may be summed on a stream of their own."""
        try:
            answer = self.run(lambda: self.memory.sides().run())
        except Changed:
            self._joined = Norms()
            answer = self.run(lambda: self.memory.sides().run())
        if self.trains:
            again = self.memory.sides()
            with again.run():
                found = self._find(answer)
                again.settle(found)
                self._gather(found)
            return not again.mixed
        return False

    def _gather(self, found: Sequence[torch.Tensor | None]) -> None:
        """Put the gradients of parameters where a call takes them from."""
        self._grad_features = found[0] if self.of_features else None
        of_parameters = found[1:] if self.of_features else found
        if self._gathered is None:
            self._gathered = Gathered(self.parameters, of_parameters, self.memory)
        self._gathered.fill(of_parameters)

    def _finish(self) -> None:
        answer = self.answer
        self.rows_of = answer.rows
        self.results = [t.detach() for t in answer.tensors]
        self._alive = self._grid_now  # with the grids and maps made of it, which the graphs read
        self._voxels = dict(answer.voxels)
        self._voxels_there = self._voxels_now if self._voxels else None
        answer.forget()

    # ---- a replay

    def begin(self, scene: Scene, given: Given) -> None:
        """Start a replay for a scene; the device works on."""
        self.arrays.load(scene, given)
        self._replay_forward()
        self.state.count_writes()

    def fault(self) -> str | None:
        """What of the scene did not fit, once the host knows; None where all is well."""
        self._wait()
        fault = int(self._told_on_host[1])
        if fault:
            self.state.put_back()
        return fault_of(fault)

    def abandon(self) -> None:
        """Take back what a replay that was begun moved."""
        self._wait()
        self.state.put_back()

    def counts(self) -> list[int]:
        """Real rows of each grid of the results."""
        return self._told_on_host[2:].tolist()

    def taken_results(self) -> list[torch.Tensor]:
        """The results of the last replay, in new tensors of their real rows."""
        counts = self.counts()
        return copies_of([t if n is None else t[: counts[n]] for t, n in zip(self.results, self.rows_of)])

    def grids(self) -> dict[int, VoxelGrid]:
        """The voxels of sparse results, as ordinary grids."""
        if self._voxels_there is None:
            return {}
        counts, found, start = self.counts(), {}, 0
        coords = self._voxels_there.clone()
        for number, grid in self._voxels.items():
            found[number] = grid._known(coords[start : start + counts[number]], grid.extent)
            start += len(grid)
        return found

    def backward(self, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Gradients of the features and the parameters, in new tensors, from those of all results."""
        counts = self.counts()
        with torch.no_grad():
            for at, number in enumerate(self.taken):
                into, grad, rows = self.grads[at], grads[number], self.rows_of[number]
                live = counts[rows] if rows is not None else len(into) if into.ndim else 0
                if grad is None:
                    into.zero_()
                    live = 0
                elif rows is None:
                    into.copy_(grad)
                else:
                    put_rows(grad, into, self._grads_filled[at])
                self._grads_filled[at] = live
            self._replay_backward()
            assert self._gathered is not None
            of_parameters = self._gathered.taken([self._reached[n] for n in self.taken if grads[n] is not None])
            of_features = None
            if self._grad_features is not None:
                of_features = self._grad_features[: self.arrays.filled].clone()
        return of_features, of_parameters

    def _replay_forward(self) -> None:
        self._forward.replay()

    def _replay_backward(self) -> None:
        self._backward.replay()

    def _wait(self) -> None:
        """Wait until the report of the last run is there; the device goes on with the features meanwhile."""
        if self._device.type != "cuda":
            return
        if self._reported is not None:
            self._reported.synchronize()
        if self._reported is None or int(self._told_on_host[0]) != self.arrays.tickets:
            torch.cuda.current_stream(self._device).synchronize()
