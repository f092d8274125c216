"""A traced network as a program: over the scene's own rows, or over arrays of fixed capacity (CUDA graphs)."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sparseconv.compiler.operators import handle, held_by, own_of, running
from sparseconv.compiler.rows import (
    SYMBOLIC,
    Rows,
    Unknown,
    aten,
    is_number,
    is_own,
    source_line,
    symbol,
    symbols,
    value,
)
from sparseconv.geometry.fixed_grid import ROWS, FixedGrid
from sparseconv.geometry.fixed_grid_io import fault_of
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.gpu.stream_mutex import StreamMutex
from sparseconv.gpu.streams import reporting
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.torch_private import others_save, pieces

#: over the rows of the largest scene so far, for those of the next
ROOM = 1.25
#: recordings of one program, after which scenes that do not fit run as they are
MOST_RECORDINGS = 8
#: results that are copied one by one; more have their place in one piece of memory
FEW = 4
#: captures to try for a graph whose memory is small, where it holds more than so many bytes
TRIES, WORTH = 3, 2**27


_numbers = itertools.count()


class DoesNotFit(Exception):
    """A scene has no place in what was recorded."""


class Call:
    """One run of a forward program, which its backward program follows.

    Attributes:
        recording: whose fixed arrays it ran over; None if it ran over the scene's own rows.
        counts: numbers of live rows, by symbol.
        tensors: what the backward program reads, by the name of its node: tensors that others see or that go with the
            backward pass.
        values: what it reads besides: numbers, grids, plans, and arrays of the recording.
    """

    def __init__(self, recording: Recording | None, counts: dict[str, int]) -> None:
        self.recording, self.counts = recording, counts
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}


class Program:
    """The forward and the backward graph of one trace."""

    def __init__(self, name: str, parameters: Sequence[torch.Tensor], poison: bool = False) -> None:
        self.name, self.poison, self.number = name, poison, next(_numbers)
        self.parameters = [weakref.ref(p) for p in parameters]
        self.forward: Pass | None = None
        self.backward: Pass | None = None
        self.recordings: dict[Any, Recording] = {}
        self.calls = self.replays = self.made = 0
        self.reasons: list[str] = []
        self.extents: dict[str, IndexRange] = {}
        self.most: dict[str, int] = {}
        #: over the rows of the scene that a recording is made with, for coarser grids; more after each that did not fit
        self.room = ROOM
        self.broken: str | None = None
        #: of Dynamo: why the graph ends before its function does, and which guard had it traced again
        self.graph_break: str | None = None
        self.recompiled: str | None = None
        #: fixed arrays are those of one call at a time
        self.mutex = StreamMutex()

    @cached_property
    def is_random(self) -> bool:
        """Whether running the forward graph once more, as for gradients of gradients, would draw other numbers."""
        assert self.forward is not None
        return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in self.forward.nodes)

    def _generators(self) -> list[torch.Generator]:
        """The generators that the forward graph may draw numbers from."""
        assert self.forward is not None
        if not self.is_random:
            return []
        device = self.forward.device
        return [torch.default_generator] + (
            [torch.cuda.default_generators[device.index]] if device.index is not None else []
        )

    def note(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def all_reasons(self) -> list[str]:
        """Why what is not captured is not."""
        why = [] if self.broken is None else [self.broken]
        why += [p.why_not for p in (self.forward, self.backward) if p is not None and p.why_not is not None]
        return why + self.reasons

    # ---- calls

    def run_forward(self, args: list[Any]) -> tuple[Sequence[Any], Call]:
        """Results, and what `run_backward` reads."""
        self.calls += 1
        forward = self.forward
        assert forward is not None
        trains = self.backward is not None
        if self.calls > 1 and not (forward.why_not or self.broken or (trains and others_save())):
            before = [(g, g.get_state()) for g in self._generators()]
            try:
                with self.mutex.on(forward.device):
                    found = forward.fixed(args)
            except DoesNotFit as reason:
                self.note(f"a scene ran as it is: {reason}")
                for generator, state in before:  # it draws the same numbers once more
                    generator.set_state(state)
            else:
                self.replays += 1
                return found
        forward.learn(args)
        return forward.dynamic(args)

    def run_backward(self, call: Call, values: dict[str, Any], grads: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Gradients of the arguments, None for those that have none."""
        backward = self.backward
        assert backward is not None
        saved = backward.inputs[: len(backward.inputs) - len(grads)]
        args = [*(values[node.name] for node in saved), *grads]
        if call.recording is None:
            return backward.module.forward(*args)
        with self.mutex.on(backward.device):
            return _Run(backward, args).backward(call, call.recording)


class Recording:
    """What a program over arrays of fixed capacity keeps from call to call.

    Attributes:
        capacity: by symbol, the rows of the arrays.
        counts: by symbol, the number of live rows on the device, (1,) int32; where it lies never changes.
        examples: by node, the grid that those of fixed size are made after.
        saved: what the backward program reads: nodes by whether their values are fixed, and those that replays leave
            as they were; None before the first run.
        in_arrays: inputs of the backward program that are fixed arrays, and what its regions make.
        pending: the call whose gradients are still to come.
        static: by kind of results, those that a graph leaves in one place, by dtype and device, and places of others.
        written: what is written after a call, and where, if both stay where they are.
        read_in_place: names of forward nodes whose tensors have been found where the graph reads them.
        ends: by node: the spatial shape of the scene at hand, on the device.
        regions: by segment.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.capacity: dict[str, int] = {}
        self.counts: dict[str, torch.Tensor] = {}
        self.examples: dict[Node, VoxelGrid] = {}
        self.saved: Saved | None = None
        self.in_arrays: set[Node] = set()
        self.pending: weakref.ref[Call] | None = None
        self.static: dict[str, tuple[dict[Any, Any], list[int]]] = {}
        self.written: dict[Any, Any] | None = None
        self.read_in_place: set[str] = set()
        self.ends: dict[Node, torch.Tensor] = {}
        self.regions: dict[Any, Region] = {}


class Saved:
    """How a recording hands over to its backward program."""

    def __init__(self, run: _Run) -> None:
        #: of values in fixed arrays, their nodes; of tensors of the caller's own or made outside of regions; of others
        self.fixed: list[Node] = []
        self.tensors: list[Node] = []
        self.others: list[Node] = []
        for node in run.graph.saved:
            is_tensor = isinstance(run.arg(node), torch.Tensor)
            if node in run.crossed or node in run.padded:
                self.fixed.append(node)
            else:
                (self.tensors if is_tensor and node not in run.graph.handles else self.others).append(node)
        #: numbers that the backward program is captured with
        backward = run.program.backward
        read = set() if backward is None else backward.numbers
        self.numbers = {n: run.env[n] for n in self.others if n.name in read}
        #: values in fixed arrays, which replays of CUDA graphs leave where they are
        self.values: dict[str, Any] | None = None

    def keep(self, run: _Run, call: Call) -> None:
        """Put a call's values where `Program.run_backward` finds them."""
        for node, number in self.numbers.items():
            if run.env[node] != number:
                raise DoesNotFit(f"its gradients were captured with {number}, and the scene has {run.env[node]}")
        values = self.values
        if values is None:
            values = {node.name: run.arg(node) for node in self.fixed}
            if all(region.graph is not None for region in run.recording.regions.values()):
                self.values = values
        call.values = {**values, **{node.name: run.env[node] for node in self.others}}
        call.tensors = {node.name: run.env[node] for node in self.tensors}


class Region:
    """A captured segment, and the arrays that it reads and writes: on a GPU a CUDA graph, on a CPU its operations.

    Args:
        run: the first call, whose values decide what is read in place, copied, or part of the graph.
        segment: its nodes.
    """

    def __init__(self, run: _Run, segment: list[Node]) -> None:
        self.segment, self.on_gpu, recording = segment, run.on_gpu, run.recording
        inside = set(segment)
        #: nodes that are read after the segment, and, by node, those whose values nobody reads after it has run
        self.leaving = [n for n in segment if n in run.graph.handles or any(u not in inside for u in n.users)]
        self.last: dict[Node, list[Node]] = {}
        unread = inside.difference(self.leaving)
        for user in reversed(segment):
            for node in (user, *user.all_input_nodes):
                if node in unread:
                    unread.remove(node)
                    self.last.setdefault(user, []).append(node)
        graph, rows = run.graph, run.rows
        #: numbers that are part of the graph, and those of rows, by symbol
        self.numbers: list[tuple[Node, Any]] = []
        self.sizes: list[tuple[Node, str]] = []
        #: tensors that are read where they lie, and where that is
        self.in_place: list[Node] = []
        self.addresses: list[int] = []
        #: handles of grids and plans of earlier regions
        self.handles: list[Node] = []
        #: tensors that are copied into arrays; of those with rows, the axis and the symbol
        self.copied: list[tuple[Node, torch.Tensor]] = []
        self.rows: list[tuple[Node, torch.Tensor, int, str]] = []
        self.filled: dict[Node, int] = {}
        own: list[str] = []
        #: what reads a spatial shape, which may change from scene to scene, and that shape
        self.shapes = {node: shape for node in segment if (shape := _shape_of(node))}
        for node in dict.fromkeys(n for user in segment for n in user.all_input_nodes if n not in inside):
            if node in run.crossed:  # an earlier region has it in an array
                continue
            found, known = run.env[node], value(node)
            if not isinstance(found, torch.Tensor):
                name = symbol(known) if is_number(node) else None
                if name in rows.symbols and name is not None and node not in run.padded:
                    self.sizes.append((node, name))
                elif node not in run.padded and not all(
                    node in _shape_of(user) for user in node.users if user in inside
                ):
                    self.numbers.append((node, found))
                continue
            axis = None if node in run.padded or node in graph.handles else rows.axis(known)
            if axis is not None:
                place, name = axis
                shape = list(found.shape)
                shape[place] = run.capacity(name, shape[place])
                self.rows.append((node, _dead(found, shape, graph.program.poison), *axis))
                if name not in recording.counts:
                    recording.counts[name] = torch.zeros(1, dtype=torch.int32, device=found.device)
                    own.append(name)
            elif (
                node in run.padded
                or node in graph.handles
                or ((isinstance(found, torch.nn.Parameter) or node in graph.static) and found.is_cuda == run.on_gpu)
            ):
                if node in graph.handles:
                    self.handles.append(node)
                elif found.is_cuda and not (
                    graph.of_forward and (node in recording.in_arrays or node.name in recording.read_in_place)
                ):
                    self.in_place.append(node)
                    self.addresses.append(found.data_ptr())
                    recording.read_in_place.add(node.name)
            else:
                self.copied.append((node, found.detach().to(run.graph.device, copy=True)))
        #: the number of this replay, live rows that the caller's tensors say, and shapes; on a GPU, from pinned memory
        device = run.graph.device
        self.names = own
        places = 1 + len(own) + sum(map(len, self.shapes.values()))
        self.header = torch.zeros(places, dtype=torch.int32, device=device)
        self.header_there = torch.zeros(places, dtype=torch.int32, pin_memory=self.on_gpu)
        self.header_numbers = self.header_there.numpy()
        for i, name in enumerate(own):
            recording.counts[name] = self.header[1 + i : 2 + i]
        at = 1 + len(own)
        for node, shape in self.shapes.items():
            recording.ends[node] = self.header[at : at + len(shape)]
            at += len(shape)
        self.calls = 0
        #: what the graph makes: values that others read, live rows by symbol; and whether scenes fit
        self.values: dict[Node, Any] = {}
        self.made: list[str] = []
        self.faults = 0
        #: symbols that the rows of several grids have
        self.twins: list[str] = []
        self.report: torch.Tensor | None = None
        self.reported: Any = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def load(self, run: _Run) -> None:
        """Put the values of a call where the graph reads them; raises DoesNotFit where they have no place there."""
        env = run.env
        if list(map(torch.Tensor.data_ptr, map(env.__getitem__, self.in_place))) != self.addresses:
            raise DoesNotFit("a parameter lies elsewhere now")
        for node, number in self.numbers:
            if env[node] != number:
                raise DoesNotFit(f"it was captured with {number}, and the scene has {env[node]}")
        for node, name in self.sizes:
            run.crossed[node] = run.capacity(name, env[node])
        for node, array in self.copied:
            found = env[node]
            if array.shape != found.shape:
                raise DoesNotFit(f"a tensor of {tuple(found.shape)} is given, and {tuple(array.shape)} was")
            array.copy_(found)
            run.crossed[node] = array
        for node, _, axis, name in self.rows:
            run.capacity(name, env[node].shape[axis])
        poison = run.program.poison
        for node, array, axis, name in self.rows:
            found, rows = env[node], run.host[name]
            before = self.filled.get(node, 0)
            array.narrow(axis, 0, rows).copy_(found)
            if rows < before and (poison or not found.is_floating_point()):
                array.narrow(axis, rows, before - rows).fill_(_dead_value(found, poison))
            self.filled[node] = rows
            run.crossed[node] = array
        self.calls += 1
        shapes = [env[n] if isinstance(n, Node) else n for shape in self.shapes.values() for n in shape]
        if any(cells < 1 for cells in shapes):
            raise DoesNotFit(f"a spatial shape without a cell, {shapes}")
        self.header_numbers[:] = [self.calls, *(run.host[name] for name in self.names), *shapes]
        self.header.copy_(self.header_there, non_blocking=True)

    def body(self, run: _Run) -> Any:
        """The segment's operations; then, of what was made, whether the scene fits and how many rows are live."""
        counts = run.recording.counts
        before, run.grids = set(counts), []
        run.said, run.twins = before.difference(self.made), []
        running.fixed = True
        try:
            for node in self.segment:
                run.env[node] = run.fixed(node)
                for read in self.last.get(node, ()):
                    if not isinstance(run.env[read], int):
                        del run.env[read]
        finally:
            running.fixed = False
        self.made = self.made or [name for name in counts if name not in before]
        self.faults, self.twins = len(run.grids), [name for name, _ in run.twins]
        if self.faults or self.made or self.twins:
            with reporting():
                rows = [counts[n] for n in self.made] + [count for _, count in run.twins]
                told = torch.cat([self.header[:1], *(g.fault for g in run.grids), *rows])
                if self.report is None:
                    self.report = torch.zeros(len(told), dtype=torch.int32, pin_memory=self.on_gpu)
                self.report.copy_(told, non_blocking=True)
                if self.on_gpu and torch.cuda.is_current_stream_capturing():
                    self.reported = torch.cuda.Event(external=True)
                    self.reported.record()
        return None

    def run(self, run: _Run) -> None:
        if self.on_gpu and self.graph is None and run.program.broken is None:
            self._capture(run)
        if self.graph is None:
            try:
                self.body(run)
            except RuntimeError as error:
                if run.graph.of_forward is not None:
                    raise
                raise DoesNotFit(run.program.broken or str(error).splitlines()[0]) from error
        else:
            self.graph.replay()
            run.env.update(self.values)

    def _capture(self, run: _Run) -> None:
        """Capture the segment. Lists that it makes of maps from an earlier region are made anew in each of its runs:
        those of this scene would else be part of the graph."""
        from sparseconv.gpu import graphs  # loaded where it is used

        before = _state_of([own_of(run.arg(n)) for n in self.handles])

        def body() -> dict[Node, Any]:
            _put_back(before)
            self.body(run)
            run.grids = []
            made = {node: run.env[node] for node in self.leaving}
            for node in self.segment:  # what a capture holds goes with it
                run.env.pop(node, None)
            return made

        try:
            with torch.no_grad():
                self.graph, self.values = graphs.graph_of(body, run.graph.device, tries=TRIES, worth=WORTH)
        except RuntimeError as error:
            # this call still runs over the arrays, since its gradients may read them; later ones do not
            run.program.broken = f"it cannot be captured: {str(error).splitlines()[0]}"
            _put_back(before)
            return
        run.env.update(self.values)
        torch.cuda.empty_cache()  # of captures that were tried

    def settle(self, run: _Run) -> None:
        """What the device says of this replay: raises DoesNotFit, or fills in the numbers of live rows."""
        if self.report is None:
            return
        if self.on_gpu:
            # before the graph has begun, the event is still that of the replay before
            if self.reported is not None:
                self.reported.synchronize()
            if self.reported is None or int(self.report[0]) != self.calls:
                torch.cuda.current_stream(run.graph.device).synchronize()
        numbers = self.report.tolist()[1:]
        for fault in numbers[: self.faults]:
            if fault:
                raise DoesNotFit(str(fault_of(fault)))
        for name, rows in zip(self.made + self.twins, numbers[self.faults :]):
            run._agree(name, rows)


def _state_of(roots: Sequence[Any]) -> list[tuple[Any, Any]]:
    """What grids and maps hold, and all of this library that they hold: lists are made of them where they are asked
    for, and kept. An ordinary grid, by whose example sizes are chosen, is left out."""
    found: dict[int, tuple[Any, Any]] = {}
    left = list(roots)
    while left:
        at = left.pop()
        is_own = type(at).__module__.startswith("sparseconv.") and not isinstance(at, type)
        if isinstance(at, VoxelGrid) and at.count is None:
            continue
        if id(at) in found or not ((is_own and hasattr(at, "__dict__")) or isinstance(at, (dict, list, tuple))):
            continue
        held: Any = dict(at) if isinstance(at, dict) else list(at) if isinstance(at, (list, tuple)) else dict(vars(at))
        found[id(at)] = at, held
        left += held.values() if isinstance(held, dict) else held
    return list(found.values())


def _put_back(state: list[tuple[Any, Any]]) -> None:
    for at, held in state:
        if isinstance(at, list):
            at[:] = held
        elif not isinstance(at, tuple):
            own = at if isinstance(at, dict) else vars(at)
            own.clear()
            own.update(held)


def _dead(like: torch.Tensor, shape: Sequence[int], poison: bool) -> torch.Tensor:
    """An array of rows that are no voxels, with its axes in memory as those of ``like``: views were traced of them."""
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    made = like.new_full([shape[axis] for axis in order], _dead_value(like, poison))
    return made.permute([order.index(axis) for axis in range(like.ndim)])


def _dead_value(like: torch.Tensor, poison: bool) -> float:
    if like.is_floating_point():
        return float("nan") if poison else 0.0
    return 0 if like.dtype == torch.bool else -1


class Pass:
    """One graph: its segments, of which those of odd number run over fixed arrays."""

    def __init__(
        self,
        program: Program,
        graph_module: GraphModule,
        rows: Rows,
        results: int | None = None,
        static: Sequence[int] = (),
        forward: Pass | None = None,
    ) -> None:
        self.program, self.module, self.results = program, graph_module, results
        self.nodes = list(graph_module.graph.nodes)
        self.inputs = [n for n in self.nodes if n.op == "placeholder"]
        self.handles = {n for n in self.nodes if _is_handle(n)}
        self.output = next(n for n in self.nodes if n.op == "output")
        #: what leaves the graph: results, or gradients; and what its backward graph reads
        given: Sequence[Any] = self.output.args[0][:results]  # type: ignore[index,assignment]
        self.leaves = [n.args[0] if _writes(n) else n for n in given]  # what is written to is written in the end
        self.saved: Sequence[Node] = () if results is None else self.output.args[0][results:]  # type: ignore
        self.rows = rows
        self.static = {n for i, n in enumerate(self.inputs) if i in static}
        self.of_forward = forward
        devices = {value(n).device for n in self.inputs if isinstance(value(n), torch.Tensor)}
        self.device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
        self.on_gpu = self.device.type == "cuda"
        self.stage = self._stages()
        self.segments = self._segments()
        self.is_captured = [i % 2 == 1 and any(_is_work(n) for n in s) for i, s in enumerate(self.segments)]
        self.why_not = self._why_not()
        self.in_region: set[Node] = set()
        self.axes = self._axes()
        self.keys = [n for n in self.inputs if is_number(n) and self._is_key(n)]
        self.writes = [n for s, c in zip(self.segments, self.is_captured) if not c for n in s if _writes(n)]
        self.counters = self._counters()
        self.conditions = [n for n in map(self._condition, self.nodes) if n is not None]
        #: of a backward graph: by what leaves it, the numbers of the results whose gradients it is made of
        self.reached = self._reached() if forward is not None else []
        #: names of inputs that are numbers, but for those of rows, and that regions read
        self.numbers = self._numbers()
        self._drop_unread()
        self.in_region |= {n for s, c in zip(self.segments, self.is_captured) if c for n in s}

    def _reached(self) -> list[set[int]]:
        given = [n for n in self.inputs if "tangents" in n.name]
        found: dict[Node, set[int]] = {n: {i} for i, n in enumerate(given)}
        for node in self.nodes:
            if node not in found:
                found[node] = set().union(*[found[n] for n in node.all_input_nodes])
        return [found[n] if isinstance(n, Node) else set() for n in self.leaves]

    def _numbers(self) -> set[str]:
        found: set[str] = set()
        left = [n for s, c in zip(self.segments, self.is_captured) if c for user in s for n in user.all_input_nodes]
        while left:
            node = left.pop()
            if is_number(node) and not symbols(value(node)) & self.rows.symbols:
                left += node.all_input_nodes
                found |= {node.name} if node.op == "placeholder" else set()
        return found

    # ---- stages

    def _stages(self) -> dict[Node, int]:
        stage: dict[Node, int] = {}
        read_by_host = self._read_by_host()
        for node in self.nodes:
            least = max((stage[n] for n in node.all_input_nodes), default=0)
            if node.op == "placeholder":
                stage[node] = 0
            elif node.op == "output":
                stage[node] = least + least % 2
            elif node.op == "get_attr" or (_is_symbolic(node) and least == 0):
                stage[node] = 0
            elif node in read_by_host:
                stage[node] = least + least % 2
            elif _is_symbolic(node) or node.target is operator.getitem:  # of several results, where they are
                stage[node] = least
            elif self.on_gpu and self._is_on_cpu(node):  # what a graph reads there would be part of it
                stage[node] = least + least % 2
            elif "unknown" in node.meta:
                stage[node] = least + least % 2
                if not _writes(node):
                    self.program.note(f"{node.target} ends the region: {node.meta['unknown']} [{source_line(node)}]")
            else:
                stage[node] = least + 1 - least % 2
        for node in reversed(self.nodes):  # what stands in dead rows is read where it is written
            if _fills(node) and node.users:
                stage[node] = min(stage[user] for user in node.users)
        return stage

    def _read_by_host(self) -> set[Node]:
        """Numbers that are read from tensors, and what is computed for them alone: a graph cannot wait for the CPU."""
        found: set[Node] = set()
        for node in reversed(self.nodes):
            if node.target is aten._local_scalar_dense.default or (
                node.op == "call_function"
                and isinstance(v := value(node), torch.Tensor)
                and not is_own(node)
                and node.users
                and all(user in found for user in node.users)
                and not any(symbols(size) & self.rows.symbols for size in v.shape)
            ):
                found.add(node)
        return found

    def _is_on_cpu(self, node: Node) -> bool:
        v = value(node)
        made = v if isinstance(v, (tuple, list)) else [v]
        return (
            not is_own(node)
            and node not in self.handles
            and any(isinstance(t, torch.Tensor) and not t.is_cuda for t in made)
        )

    def _segments(self) -> list[list[Node]]:
        count = max(self.stage.values()) + 1
        found: list[list[Node]] = [[] for _ in range(count)]
        for node in self.nodes:
            if node.op not in ("placeholder", "output"):
                found[self.stage[node]].append(node)
        return found

    def _why_not(self) -> str | None:
        if not any(self.is_captured):
            return "there is no sparse operation to capture"
        for node in self.nodes:
            if is_own(node, "grid") and symbol(value(node.args[0]).shape[0]) is None:
                return f"it was traced for scenes of {value(node.args[0]).shape[0]} voxels alone"  # torch's own 0 and 1
        for segment, captured in zip(self.segments, self.is_captured):
            inside = set(segment)
            for node in segment if captured else ():
                for given in node.all_input_nodes:
                    try:
                        tensor = value(given)
                        if given not in inside and isinstance(tensor, torch.Tensor) and not _is_handle(given):
                            self.rows.axis(tensor)
                    except Unknown as reason:
                        return f"{given.name} has {reason}"
        if self.of_forward is None and any(_is_handle(n) for n in self.inputs):
            return "its grids come from another program"
        return None

    def _axes(self) -> dict[Node, tuple[int, str]]:
        """The row axes of tensors."""
        found = {}
        for node in self.nodes:
            if isinstance(value(node), torch.Tensor) and not _is_handle(node):
                try:
                    axis = self.rows.axis(value(node))
                except Unknown:
                    continue
                if axis is not None:
                    found[node] = axis
        return found

    def _counters(self) -> dict[Any, list[Node]]:
        """Buffers that a call adds to, such as numbers of batches, by what it adds (see `_counted`): they are not part
        of a region."""
        found: dict[Any, list[Node]] = {}
        for write in list(self.writes):
            target, added = write.args[:2]
            if (
                isinstance(added, Node)
                and added.target is aten.add.Tensor
                and added.args[0] is target
                and not added.kwargs
                and len(added.users) == 1
                and value(added).dtype == value(target).dtype
                and (number := _counted(added.args[1])) is not None
            ):
                found.setdefault(number, []).append(target)  # type: ignore[arg-type]
                self.writes.remove(write)
                self.segments[self.stage[added]].remove(added)
        return found

    def _is_key(self, node: Node) -> bool:
        names = symbols(value(node))
        return bool(names & self.rows.keys) and not names & self.rows.symbols

    def _condition(self, node: Node) -> Node | None:
        """A condition on numbers of rows that the program asserts; None for what is always so."""
        if node.target is not aten._assert_scalar.default or not is_number(node.args[0]):
            return None
        given: Any = node.args[0]
        expr = value(given).node.expr
        is_size = getattr(expr, "rel_op", None) == ">=" and expr.lhs.is_symbol and expr.rhs == 0
        return None if is_size or not symbols(value(given)) & self.rows.symbols else given

    def _drop_unread(self) -> None:
        """Leave out numbers between regions that nobody reads."""
        read = {n for s, c in zip(self.segments, self.is_captured) if c for m in s for n in m.all_input_nodes}
        read |= set(self.output.all_input_nodes) | set(self.conditions)
        for i in reversed(range(len(self.segments))):
            if not self.is_captured[i]:
                kept: list[Node] = []
                for node in reversed(self.segments[i]):
                    if _writes(node):
                        read.update(node.all_input_nodes)
                    elif node in read or not (_is_symbolic(node) or node.op == "get_attr"):
                        read.update(node.all_input_nodes)
                        kept.append(node)
                self.segments[i] = kept[::-1]

    # ---- over the scene's own rows

    def dynamic(self, args: list[Any]) -> tuple[Sequence[Any], Call]:
        found = self.module.forward(*args)
        call = Call(None, {})
        for node, made in zip(self.saved, found[self.results :]):
            is_tensor = isinstance(made, torch.Tensor) and node not in self.handles
            (call.tensors if is_tensor else call.values)[node.name] = made
        return found[: self.results], call

    def learn(self, args: Sequence[Any]) -> None:
        """How many rows there are."""
        most = self.program.most
        for node, arg in zip(self.inputs, args):
            if isinstance(arg, torch.Tensor):
                for size, n in zip(value(node).shape, arg.shape):
                    name = symbol(size)
                    if name in self.rows.symbols and name is not None:
                        most[name] = max(most.get(name, 0), n)

    # ---- over fixed arrays

    def fixed(self, args: list[Any]) -> Any:
        """Results of the forward program; raises DoesNotFit, with nothing written, where the scene runs as it is."""
        run = _Run(self, args)
        key = run.key()
        program = self.program
        recording = program.recordings.get(key)
        if recording is None:
            if program.made >= MOST_RECORDINGS:
                raise DoesNotFit(f"there are {MOST_RECORDINGS} recordings already")
            recording = program.recordings[key] = Recording(program)
            program.made += 1
        if recording.pending is not None and recording.pending() is not None:
            raise DoesNotFit("the gradients of the call before are still to come")
        try:
            return run.forward(recording)
        except DoesNotFit:
            if program.recordings.get(key) is recording and program.made < MOST_RECORDINGS:
                del program.recordings[key]
                program.room *= ROOM
            raise


def _shape_of(node: Any) -> Sequence[Any]:
    """The spatial shape that a node reads, for which every scene may have its own."""
    if is_own(node, "inside"):
        return node.args[1]
    is_within = is_own(node, "plan") and node.args[7] == "within" and any(is_number(n) for n in node.args[8])
    return node.args[8] if is_within else ()


def _counted(number: Any) -> Any:
    """What is added to a counter: a number, or a symbol and n for 1 where there are more than n rows; else None."""
    if isinstance(number, int):
        return number
    chain = []
    for target in (aten._to_copy.default, aten.select.int, aten.gt.Scalar):
        if not isinstance(number, Node) or number.target is not target:
            return None
        chain.append(number)
        number = number.args[0]
    name = number.meta.get("rows") if isinstance(number, Node) else None
    return None if name is None or value(chain[1]).ndim else (name, chain[2].args[1])


def _fills(node: Any) -> bool:
    """Whether a node writes to dead rows what is read there."""
    return is_own(node, "filled") or "fills" in node.meta


#: operators for whose sake a segment is captured
WORK = {"grid", "plan", "convolve", "convolve_norm_act", "weight_grad"}


def _is_work(node: Any) -> bool:
    return is_own(node) and node.target._opname in WORK


def _writes(node: Any) -> bool:
    """Whether a node writes what a call leaves behind: nothing is written before it is known that the scene fits."""
    return isinstance(node, Node) and node.target is aten.copy_.default


def _is_symbolic(node: Any) -> bool:
    return is_number(node) or node.target in SYMBOLIC


def _is_handle(node: Any) -> bool:
    v = value(node) if isinstance(node, Node) else None
    return (
        isinstance(v, torch.Tensor)
        and v.dtype == torch.int64
        and v.device.type == "cpu"
        and (_makes_handle(node) or any(is_own(u) and _takes_handle(u, node) for u in node.users))
    )


def _makes_handle(node: Any) -> bool:
    """Whether a node is the handle of what an operator made: a copy of its number would name nothing."""
    if node.target is operator.getitem:
        return node.args[1] == 0 and (is_own(node.args[0], "target") or is_own(node.args[0], "subset"))
    return any(is_own(node, name) for name in ("grid", "inside", "plan", "transposed"))


def _takes_handle(user: Node, node: Any) -> bool:
    names = [a.name for a in user.target._schema.arguments]  # type: ignore[union-attr]
    return any(a is node and n in ("grid", "plan", "source", "target") for n, a in zip(names, user.args))


class _Run:
    """One pass through the segments."""

    def __init__(self, graph: Pass, args: list[Any]) -> None:
        self.graph, self.program = graph, graph.program
        self.env: dict[Node, Any] = dict(zip(graph.inputs, args))
        self.rows = graph.rows
        #: numbers of live rows, by symbol
        self.host: dict[str, int] = {}
        self.grids: list[FixedGrid] = []
        #: symbols whose numbers of rows are known to the region at hand, and numbers of rows that must be the same
        self.said: set[str] = set()
        self.twins: list[tuple[str, torch.Tensor]] = []
        self.on_gpu = graph.on_gpu
        #: values of the caller as regions read them
        self.crossed: dict[Node, Any] = {}
        #: by node: handles of ordinary grids and plans in place of those over arrays
        self.ordinary: dict[Node, torch.Tensor] = {}
        #: by symbol: coordinates of the grids of those handles
        self.coords: dict[str, torch.Tensor] = {}
        #: values that have the rows of the arrays, and not the scene's own
        self.padded: set[Node] = graph.in_region
        #: regions that were run, and not yet asked whether the scene fits
        self.unsettled: list[Region] = []

    def key(self) -> Any:
        """What a recording is made for: sizes and numbers that are no rows."""
        return tuple(self.env[node] for node in self.graph.keys)

    # ---- forward

    def forward(self, recording: Recording) -> tuple[list[Any], Call]:
        self.recording = recording
        graph = self.graph
        self._segments()
        self._settle()
        if any(self.host.get(name, least) < least for name, least in self.rows.least.items()):
            raise DoesNotFit("a norm over fewer than two rows, or a maximum over none")
        for condition in graph.conditions:
            if not _evaluate(value(condition), {**self._known(), **self.host}):
                raise DoesNotFit(f"{value(condition)} does not hold")
        call = Call(recording, dict(self.host))
        results = self._results(graph.leaves, "results")
        if recording.saved is None:
            recording.saved = Saved(self)
        recording.saved.keep(self, call)
        if self.program.backward is not None:
            recording.pending = weakref.ref(call)
        self._write()  # the scene fits: nothing is left that could raise
        return results, call

    def _write(self) -> None:
        """Write what the call leaves behind, such as running statistics."""
        for number, counters in self.graph.counters.items():
            if not isinstance(number, int):
                name, least = number
                number = int(self.host[name] > least)
            torch._foreach_add_([self.env[n] for n in counters], number)
        written = self.recording.written
        if written is None:
            written = {}
            for node in self.graph.writes:
                target, source = map(self._real, node.args[:2])
                alike = target.shape == source.shape and target.dtype == source.dtype
                targets, sources = written.setdefault((target.dtype, target.device, alike), ([], []))
                targets.append(target)
                sources.append(source)
            pairs: list[Any] = [n.args for n in self.graph.writes]
            if all(a[0].name in self.recording.read_in_place and self._stays(a[1]) for a in pairs):
                self.recording.written = written
        for (*_, alike), (targets, sources) in written.items():
            if alike:
                torch._foreach_copy_(targets, sources)
            else:
                for target, source in zip(targets, sources):
                    target.copy_(source)

    def _stays(self, node: Any) -> bool:
        """Whether a graph leaves a tensor where it left it before, with as many rows."""
        graph = self.graph
        moves = not self.on_gpu or node not in graph.in_region or node in graph.handles or node in graph.axes
        return not moves and isinstance(self.env[node], torch.Tensor)

    def _segments(self) -> None:
        graph, regions = self.graph, self.recording.regions
        for number, (segment, captured) in enumerate(zip(graph.segments, graph.is_captured)):
            if captured:
                key = (graph.of_forward is not None, number)
                region = regions.get(key)
                if region is None:
                    region = regions[key] = Region(self, segment)
                region.load(self)
                region.run(self)
                self.unsettled.append(region)
            else:
                for node in segment:
                    self.env[node] = self._as_it_is(node)

    def _settle(self) -> None:
        for region in self.unsettled:
            region.settle(self)
        self.unsettled = []

    def _results(self, nodes: Sequence[Any], kind: str) -> list[Any]:
        """Values as the caller gets them: none of them in the memory of the graph."""
        static = self.recording.static.get(kind)
        if static is None:
            static = self.recording.static[kind] = {}, []
            for i, node in enumerate(nodes):
                if isinstance(node, Node) and self._stays(node):
                    made = self.env[node]
                    places, tensors = static[0].setdefault((made.dtype, made.device), ([], []))
                    places.append(i)
                    tensors.append(self.env[node])
                else:
                    static[1].append(i)
        found: list[Any] = [None] * len(nodes)
        for i in static[1]:
            node = nodes[i]
            made = self._real(node) if isinstance(node, Node) else node
            if isinstance(made, torch.Tensor) and node in self.padded and node not in self.graph.handles:
                made = made.clone()
            found[i] = made
        for places, tensors in static[0].values():
            if len(tensors) < FEW:
                copies: Sequence[torch.Tensor] = [t.clone() for t in tensors]
            else:  # few launches for all of them, and one piece of memory
                copies = pieces(tensors[0].new_empty(sum(t.numel() for t in tensors)), tensors)
                torch._foreach_copy_(list(copies), tensors)
            for i, copy in zip(places, copies):
                found[i] = copy
        return found

    def _real(self, node: Any) -> Any:
        """A value with the scene's own rows."""
        found = self.env[node]
        if node not in self.padded:
            return found
        if isinstance(found, torch.Tensor):
            if node in self.graph.handles:
                return self._ordinary(node)
            axis = self.graph.axes.get(node)
            if axis is None:
                return found
            self._settle()
            own = found.narrow(axis[0], 0, self.host[axis[1]])
            # views were traced of tensors without gaps
            has_gaps = any(n > 1 and step > own.stride(axis[0]) for n, step in zip(own.shape, own.stride()))
            return own.clone() if has_gaps else own
        if is_number(node):
            self._settle()
            return _evaluate(value(node), {**self._known(), **self.host})
        return found

    def _known(self) -> dict[str, int]:
        return {str(symbol(value(n))): v for n, v in self.env.items() if isinstance(v, int)}

    def _ordinary(self, node: Any) -> torch.Tensor:
        """The handle of an ordinary grid or plan in place of one over arrays, which is made where somebody asks."""
        if not self.on_gpu:  # they are ordinary ones
            return self.env[node]
        if node not in self.ordinary:
            self.ordinary[node] = handle(self._maker(node))
        return self.ordinary[node]

    def _maker(self, node: Any) -> Callable[[], Any]:
        fixed = own_of(self.env[node])
        if isinstance(fixed, VoxelGrid):
            coords, items = self._coords_of(node, fixed), fixed.batch_size
            size, origin = fixed.voxel_size, fixed.origin
            return lambda: (VoxelGrid(coords, items, size, origin),)
        target: Any = node.target

        def real(given: Node) -> Any:
            return self._ordinary(given) if given in self.padded and given in self.graph.handles else self._real(given)

        args = torch.fx.map_arg(node.args, real)
        return lambda: (own_of(target(*args)),)

    def _coords_of(self, node: Any, fixed: VoxelGrid) -> torch.Tensor:
        """The coordinates of the grid of a handle, which the next call does not write to."""
        if is_own(node, "inside"):
            return self._coords_of(node.args[0], fixed)
        if is_own(node, "grid"):
            given: Any = node.args[0]
            if given not in self.padded:
                return self.env[given]
            name = symbol(value(given).shape[0])
        else:  # a grid that a window reaches: the first of the operator's results
            name = symbol(value(node.args[0])[1].shape[0])
        assert name is not None
        if name not in self.coords:
            self._settle()
            self.coords[name] = fixed.coords[: self.host[name]].clone()
        return self.coords[name]

    def _as_it_is(self, node: Any) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            return getattr(self.graph.module, target)
        args = torch.fx.map_arg(node.args, self._real)
        return target(*args, **torch.fx.map_arg(node.kwargs, self._real))

    # ---- within regions

    def arg(self, node: Any) -> Any:
        """A value as a region reads it."""
        return self.crossed[node] if node in self.crossed else self.env[node]

    def capacity(self, name: str, rows: int) -> int:
        """The rows of the arrays of a symbol, of which a scene has ``rows``; raises DoesNotFit."""
        capacity = self.recording.capacity.get(name)
        if capacity is None:
            most = max(rows, self.program.most.get(name, 0))
            capacity = self.recording.capacity[name] = max(ROWS, -(-int(ROOM * most) // ROWS) * ROWS)
        if rows > capacity:
            self.program.most[name] = max(rows, self.program.most.get(name, 0))
            raise DoesNotFit(f"{rows} rows, and places for {capacity}")
        self._agree(name, rows)
        return capacity

    def _agree(self, name: str, rows: int) -> None:
        """Note a number of rows; raises DoesNotFit where two grids, which the trace takes for as many rows, differ."""
        if self.host.setdefault(name, rows) != rows:
            raise DoesNotFit(f"{rows} rows meet {self.host[name]}")

    def fixed(self, node: Any) -> Any:
        """What a node makes over arrays."""
        target: Any = node.target
        if target is aten._assert_scalar.default or target is aten.sym_constrain_range_for_size.default:
            return None
        if is_own(node, "rows"):
            return self.recording.counts[node.meta["rows"]]
        args = torch.fx.map_arg(node.args, self.arg)
        if is_own(node) and target._opname not in ("live", "filled") and not self.on_gpu:
            found = self._of_live_rows(node)
        elif is_own(node, "grid"):
            return self._grid(node, args)
        else:
            running.ends = self.recording.ends.get(node)
            found = target(*args, **torch.fx.map_arg(node.kwargs, self.arg))
            running.ends = None
            if is_own(node, "convolve") and self.graph.saved:
                held_by(args[0], ConvolutionPlan).kernel_map.list_pairs()  # its fault is known before results leave
            if is_own(node, "target"):
                name = symbol(value(node)[1].shape[0])
                grid = held_by(found[0], VoxelGrid)
                assert name is not None
                assert grid.count is not None
                if name in self.said:  # the trace takes it for as many rows as another grid
                    self.twins.append((name, grid.count))
                else:
                    self.said.add(name)
                    self.recording.counts[name] = grid.count
                    self.recording.capacity[name] = len(grid)
        return self._poisoned(node, found) if self.program.poison and not _fills(node) else found

    def _of_live_rows(self, node: Any) -> Any:
        """An operator of this library on a CPU: it is given live rows, and its rows are put into arrays again."""
        target: Any = node.target

        def live(given: Any) -> Any:
            found, v = self.arg(given), value(given)
            if isinstance(found, torch.Tensor) and (axis := self.graph.axes.get(given)) is not None:
                return found.narrow(axis[0], 0, min(found.shape[axis[0]], self.host[axis[1]]))
            return self.host[name] if is_number(given) and (name := symbol(v)) in self.host else found

        found = target(*torch.fx.map_arg(node.args, live))

        def place(v: Any, t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or (axis := self.rows.axis(v)) is None:
                return t
            return self._padded(t, *axis)

        v = value(node)
        return tuple(map(place, v, found)) if isinstance(v, (tuple, list)) else place(v, found)

    def _padded(self, tensor: torch.Tensor, axis: int, name: str) -> torch.Tensor:
        rows = tensor.shape[axis]
        shape = list(tensor.shape)
        shape[axis] = self.capacity(name, rows)
        counts = self.recording.counts
        if name not in counts:
            counts[name] = torch.zeros(1, dtype=torch.int32, device=tensor.device)
        counts[name].fill_(rows)
        padded = _dead(tensor, shape, self.program.poison)
        padded.narrow(axis, 0, rows).copy_(tensor)
        return padded

    def _poisoned(self, node: Any, found: Any) -> Any:
        """NaN in dead rows, for tests: whatever reads one shows it."""
        counts = self.recording.counts

        def dead(v: Any, t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or not t.is_floating_point() or (axis := self.rows.axis(v)) is None:
                return t
            live = torch.arange(t.shape[axis[0]], device=t.device) < counts[axis[1]]
            return torch.where(live.view([-1 if a == axis[0] else 1 for a in range(t.ndim)]), t, float("nan"))

        v = value(node)
        if isinstance(v, (tuple, list)):
            return type(found)(map(dead, v, found))
        return dead(v, found)

    def _grid(self, node: Any, args: Any) -> torch.Tensor:
        coords, items, size, origin = args
        if coords.dtype != torch.int32:
            raise DoesNotFit(f"coordinates of {coords.dtype}, and arrays are of int32")
        name = symbol(value(node.args[0]).shape[0])
        assert name is not None
        recording, program = self.recording, self.program
        example = recording.examples.get(node)
        if example is None:
            own = coords[: self.host[name]]
            example = VoxelGrid(own, items, tuple(size) or None, tuple(origin) or None)
            if not len(example):
                raise DoesNotFit("a scene without voxels")
            recording.examples[node] = example
            seen = program.extents.get(node.name, example.extent)
            program.extents[node.name] = _around(seen, example.extent)
        room = max(program.room, recording.capacity[name] / len(example))
        box = _grown(program.extents[node.name])
        grid = FixedGrid(coords.contiguous(), recording.counts[name], example, extent=box, room=room)
        self.grids.append(grid)
        return handle((grid,))

    # ---- backward

    def backward(self, call: Call, recording: Recording) -> list[Any]:
        self.recording, graph = recording, self.graph
        self.host = dict(call.counts)
        if not recording.in_arrays:
            names = {node.name for node in recording.saved.fixed} if recording.saved else set()
            recording.in_arrays = graph.in_region | {n for n in graph.inputs if n.name in names}
        self.padded = recording.in_arrays
        self._segments()
        return self._results(graph.leaves, "gradients")


def _evaluate(number: Any, known: dict[str, int]) -> Any:
    expr = number.node.expr
    found = expr.subs({s: known[str(s)] for s in expr.free_symbols})
    kind = bool if isinstance(number, torch.SymBool) else float if isinstance(number, torch.SymFloat) else int
    return kind(found)


def _around(a: IndexRange, b: IndexRange) -> IndexRange:
    return IndexRange(tuple(map(min, a.start, b.start)), tuple(map(max, a.end, b.end)))


def _grown(box: IndexRange) -> IndexRange:
    """A box with half of its longest side, or 16 cells, more to each side: rotations stay within."""
    more = max(16, max(box.shape) // 2)
    return IndexRange(tuple(n - more for n in box.start), tuple(n + more for n in box.end))
