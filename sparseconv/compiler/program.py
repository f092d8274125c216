"""A traced network as a program: over the scene's own rows, or over arrays of fixed capacity (CUDA graphs)."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
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

#: over the rows of the largest scene so far, for those of the next
ROOM = 1.25
#: recordings of one program, after which scenes that do not fit run as they are
MOST_RECORDINGS = 8


_numbers = itertools.count()


class DoesNotFit(Exception):
    """A scene has no place in what was recorded."""


class Call:
    """One run of a forward program over fixed arrays, which its backward program follows."""

    def __init__(self, recording: Recording, counts: dict[str, int]) -> None:
        self.recording, self.counts = recording, counts


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
        self.broken: str | None = None

    @property
    def is_random(self) -> bool:
        """Whether running the graph once more would draw other random numbers."""
        passes = [p for p in (self.forward, self.backward) if p is not None]
        return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for p in passes for n in p.nodes)

    def note(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def all_reasons(self) -> list[str]:
        """Why what is not captured is not."""
        why = [] if self.broken is None else [self.broken]
        why += [p.why_not for p in (self.forward, self.backward) if p is not None and p.why_not is not None]
        return why + self.reasons

    # ---- calls

    def run_forward(self, args: list[Any]) -> Any:
        self.calls += 1
        forward = self.forward
        assert forward is not None
        if self.calls == 1 or forward.why_not is not None or self.broken is not None:
            forward.learn(args)
            return forward.dynamic(args)
        given = list(args)
        try:
            results = forward.fixed(given)
        except DoesNotFit as reason:
            self.note(f"a scene ran as it is: {reason}")
            forward.learn(args)
            return forward.dynamic(args)
        self.replays += 1
        args.clear()
        return results

    def run_backward(self, args: list[Any]) -> Any:
        backward = self.backward
        assert backward is not None
        call = backward.call_of(args)
        return backward.dynamic(args) if call is None else backward.fixed_backward(args, call)


class Recording:
    """What a program over arrays of fixed capacity keeps from call to call."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.capacity: dict[str, int] = {}
        self.examples: dict[Node, VoxelGrid] = {}
        #: by the name of a forward node: its value in fixed arrays
        self.held: dict[str, Any] = {}
        #: names of forward nodes whose values are saved in fixed arrays
        self.saved: set[str] = set()
        self.pending: weakref.ref[Call] | None = None
        #: by segment: what was captured of it on a GPU
        self.regions: dict[Any, Region] = {}


class Region:
    """What of a segment was captured in a CUDA graph, and the arrays that it reads and writes."""

    def __init__(self) -> None:
        #: by node: arrays that a call is copied into
        self.arrays: dict[Node, torch.Tensor] = {}
        #: by node: rows of the last scene in them
        self.filled: dict[Node, int] = {}
        #: what is read where it lies, and numbers that are part of the graph
        self.addresses: dict[Node, int] = {}
        self.constants: dict[Node, Any] = {}
        #: by symbol: the number of live rows of what crosses into it
        self.counts: dict[str, torch.Tensor] = {}
        #: ends of dense shapes that change from scene to scene, on the device
        self.values: dict[Node, Any] = {}
        self.made: dict[str, torch.Tensor] = {}
        self.faults = 0
        self.status: torch.Tensor | None = None
        self.replay: Callable[[], None] | None = None


class Pass:
    """One graph: its segments, of which those of odd number run over fixed arrays."""

    def __init__(
        self,
        program: Program,
        graph_module: GraphModule,
        rows: Rows,
        results: int | None,
        static: Sequence[int] = (),
        forward: Pass | None = None,
    ) -> None:
        self.program, self.module, self.results = program, graph_module, results
        self.nodes = list(graph_module.graph.nodes)
        self.inputs = [n for n in self.nodes if n.op == "placeholder"]
        self.output = next(n for n in self.nodes if n.op == "output")
        self.rows = rows
        self.static = {n for i, n in enumerate(self.inputs) if i in static}
        self.of_forward = forward
        self.fixed_names: set[str] = set()
        self.stage = self._stages()
        self.segments = self._segments()
        self.is_captured = [any(_is_work(n) for n in s) for s in self.segments]
        self.why_not = self._why_not()
        self.in_region = {n for s, c in zip(self.segments, self.is_captured) if c for n in s}
        self.fixed_names = {n.name for n in self.in_region}
        self.last_use = self._last_uses()

    # ---- stages

    def _stages(self) -> dict[Node, int]:
        stage: dict[Node, int] = {}
        for node in self.nodes:
            least = max((stage[n] for n in node.all_input_nodes), default=0)
            if node.op == "placeholder":
                stage[node] = 0
            elif node.op == "output":
                stage[node] = least + least % 2
            elif node.op == "get_attr" or (_is_symbolic(node) and least == 0):
                stage[node] = 0
            elif _is_symbolic(node) or node.target is operator.getitem:  # of several results, where they are
                stage[node] = least
            elif "unknown" in node.meta:
                stage[node] = least + least % 2
                self.program.note(f"{node.target} ends the region: {node.meta['unknown']} [{source_line(node)}]")
            else:
                stage[node] = least + 1 - least % 2
        return stage

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

    def _last_uses(self) -> dict[Node, list[Node]]:
        last: dict[Node, Node] = {}
        order = [n for s in self.segments for n in s] + [self.output]
        for node in order:
            for given in node.all_input_nodes:
                last[given] = node
        found: dict[Node, list[Node]] = {}
        for given, node in last.items():
            found.setdefault(node, []).append(given)
        return found

    # ---- over the scene's own rows

    def dynamic(self, args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return self.module.forward(*given)

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
        if self.results is not None and recording.pending is not None and recording.pending() is not None:
            raise DoesNotFit("the gradients of the call before are still to come")
        try:
            return run.forward(recording)
        except DoesNotFit:
            if program.recordings.get(key) is recording and program.made < MOST_RECORDINGS:
                del program.recordings[key]
            raise

    def call_of(self, args: Sequence[Any]) -> Call | None:
        """The forward run that these were saved by, None where it ran over the scene's own rows."""
        for node, arg in zip(self.inputs, args):
            if _is_handle(node):
                held = own_of(arg)
                return held if isinstance(held, Call) else None
        return None

    def fixed_backward(self, args: list[Any], call: Call) -> Any:
        given = list(args)
        args.clear()
        return _Run(self, given).backward(call)


#: operators for whose sake a segment is captured
WORK = {"grid", "plan", "convolve", "weight_grad"}


def _is_work(node: Any) -> bool:
    return is_own(node) and node.target._opname in WORK


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
        self.counts: dict[str, torch.Tensor] = {}
        self.host: dict[str, int] = {}
        self.grids: list[FixedGrid] = []
        self.on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
        self.crossed: dict[Node, Any] = {}
        #: by node: handles of ordinary grids and plans in place of those over arrays
        self.ordinary: dict[Node, torch.Tensor] = {}
        #: values that have the rows of the arrays, and not the scene's own
        self.padded: set[Node] = set(graph.in_region)

    def key(self) -> Any:
        """What a recording is made for: sizes and numbers that are no rows."""
        found = []
        for node in self.graph.inputs:
            names = symbols(value(node)) if is_number(node) else set()
            if names & self.rows.keys and not names & self.rows.symbols:
                found.append((node.name, self.env[node]))
        return tuple(found)

    # ---- forward

    def forward(self, recording: Recording) -> Any:
        self.recording = recording
        graph = self.graph
        writes: list[Node] = []
        for segment, captured in zip(graph.segments, graph.is_captured):
            if not captured:
                for node in segment:
                    if node.target is aten.copy_.default:
                        writes.append(node)  # nothing is written before it is known that the scene fits
                    else:
                        self.env[node] = self._as_it_is(node)
            else:
                self._region(segment)
        self._settle()
        call = Call(recording, dict(self.host))
        out: Any = graph.output.args[0]
        first = len(out) if graph.results is None else graph.results
        ticket = None
        if any(_is_handle(node) for node in out[first:]):
            ticket = handle((call,))
            recording.pending = weakref.ref(call)
        results = [self._result(node) for node in out[:first]]
        # without a handle the backward program could not tell whose arrays these are: it gets the scene's own rows
        results += [self._result(node) if ticket is None else self._saved(node, ticket) for node in out[first:]]
        for node in writes:  # the scene fits: nothing is left that could raise
            self._as_it_is(node)
        return results

    def _saved(self, node: Any, ticket: Any) -> Any:
        """What the backward program is given: arrays of fixed capacity, where the region made or read them."""
        if not isinstance(node, Node):
            return node
        if _is_handle(node):
            self.recording.held[node.name] = self.env[node]
            return ticket
        if node in self.crossed or node in self.padded:
            self.recording.saved.add(node.name)
        return self._arg(node)

    def _result(self, node: Any) -> Any:
        if not isinstance(node, Node):
            return node
        found = self._real(node)
        if isinstance(found, torch.Tensor) and node in self.padded and not _is_handle(node):
            return found.clone()
        return found

    def _real(self, node: Any) -> Any:
        """A value with the scene's own rows."""
        found = self.env[node]
        if node not in self.padded:
            return found
        if isinstance(found, torch.Tensor):
            if _is_handle(node):
                return self._ordinary(node)
            self._settle()
            axis = self.rows.axis(value(node))
            return found if axis is None else found.narrow(axis[0], 0, self.host[axis[1]])
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
            self._settle()
            rows = self._count_of(node)
            coords, items = fixed.coords[:rows].clone(), fixed.batch_size
            size, origin = fixed.voxel_size, fixed.origin
            return lambda: (VoxelGrid(coords, items, size, origin),)
        target: Any = node.target

        def real(given: Node) -> Any:
            return self._ordinary(given) if given in self.padded and _is_handle(given) else self._real(given)

        args = torch.fx.map_arg(node.args, real)
        return lambda: (own_of(target(*args)),)

    def _count_of(self, node: Any) -> int:
        """The rows of a grid's handle."""
        if is_own(node, "grid"):
            return self.host[str(symbol(value(node.args[0]).shape[0]))]
        target: Any = node.args[0]  # a grid that a window reaches: the first of the operator's results
        return self.host[str(symbol(value(target)[1].shape[0]))]

    def _as_it_is(self, node: Any) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            return getattr(self.graph.module, target)
        args = torch.fx.map_arg(node.args, self._real)
        return target(*args, **torch.fx.map_arg(node.kwargs, self._real))

    def _settle(self) -> None:
        """Ask the device whether the scene fits, and how many rows there are."""
        names = [name for name in self.counts if name not in self.host]
        if not names and not self.grids:
            return
        told = [*(g.fault for g in self.grids), *(self.counts[name] for name in names)]
        numbers = torch.cat(told).tolist()
        faults, found = numbers[: len(self.grids)], numbers[len(self.grids) :]
        self.grids = []
        for fault in faults:
            if fault:
                raise DoesNotFit(str(fault_of(fault)))
        self.host.update(zip(names, found))

    # ---- regions

    def _region(self, segment: list[Node]) -> None:
        if self.on_gpu:
            self._captured(segment)
            return
        running.fixed = True
        try:
            inside = set(segment)
            for node in segment:
                for given in node.all_input_nodes:
                    if given not in inside and given not in self.crossed and given not in self.padded:
                        self.crossed[given] = self._cross(given)
                self.env[node] = self._fixed(node)
        finally:
            running.fixed = False

    def _captured(self, segment: list[Node]) -> None:
        """A region on a GPU: its inputs are copied into arrays, and its graph is replayed."""
        number = (self.graph.of_forward is not None, segment[0].name)
        region = self.recording.regions.get(number)
        is_new = region is None
        region = region or Region()
        inside = set(segment)
        crossing = dict.fromkeys(
            given
            for node in segment
            for given in node.all_input_nodes
            if given not in inside and not (given in self.graph.in_region or given in self.crossed)
        )
        for node in crossing:
            self.crossed[node] = self._put(region, node, is_new)
        for node in segment:
            for given in node.all_input_nodes:
                if given not in inside and given not in crossing and isinstance(self._arg(given), torch.Tensor):
                    self._in_place(region, given, self._arg(given), is_new)
        if is_new:
            self._record(region, segment)
            self.recording.regions[number] = region
        region.replay()  # type: ignore[misc]
        self.env.update(region.values)
        self.counts.update(region.made)
        if region.status is not None:
            numbers = region.status.tolist()
            for fault in numbers[: region.faults]:
                if fault:
                    raise DoesNotFit(str(fault_of(fault)))
            self.host.update(zip(region.made, numbers[region.faults :]))
        if any(self.host.get(name, 2) < 2 for name in self.rows.norms):
            raise DoesNotFit("a norm over fewer than two rows")

    def _put(self, region: Region, node: Any, is_new: bool) -> Any:
        """A value of this call where the graph reads it."""
        found = self.env[node]
        if not isinstance(found, torch.Tensor):
            if node in self.padded:  # a capacity, as the forward program saved it
                return found
            if is_number(node) and (name := symbol(value(node))) in self.rows.symbols and name is not None:
                return self._capacity(name, found)
            if is_new:
                region.constants[node] = found
            elif region.constants.get(node) != found:
                raise DoesNotFit(f"it was captured with {region.constants.get(node)}, and the scene has {found}")
            return found
        if node in self.padded or _is_handle(node):
            return self._in_place(region, node, found, is_new)
        axis = self.rows.axis(value(node))
        if axis is None:
            if isinstance(found, torch.nn.Parameter) or node in self.graph.static or not found.is_cuda:
                return self._in_place(region, node, found, is_new)
            if is_new:
                region.arrays[node] = found.detach().clone()
            elif region.arrays[node].shape != found.shape:
                raise DoesNotFit(
                    f"a tensor of {tuple(found.shape)} is given, and {tuple(region.arrays[node].shape)} was"
                )
            else:
                region.arrays[node].copy_(found)
            return region.arrays[node]
        place, name = axis
        rows = found.shape[place]
        capacity = self._capacity(name, rows)
        if name not in region.counts:
            region.counts[name] = torch.zeros(1, dtype=torch.int32, device=found.device)
        if name not in self.counts:
            self.counts[name] = region.counts[name]
            region.counts[name].fill_(rows)
        if is_new:
            shape = list(found.shape)
            shape[place] = capacity
            region.arrays[node] = found.new_full(
                shape, 0 if found.is_floating_point() or found.dtype == torch.bool else -1
            )
        array = region.arrays[node]
        array.narrow(place, 0, rows).copy_(found)
        before = region.filled.get(node, 0)
        if rows < before and not found.is_floating_point():
            array.narrow(place, rows, before - rows).fill_(0 if found.dtype == torch.bool else -1)
        region.filled[node] = rows
        return array

    def _in_place(self, region: Region, node: Any, found: torch.Tensor, is_new: bool) -> torch.Tensor:
        if is_new:
            region.addresses[node] = found.data_ptr()
        elif region.addresses.get(node) != found.data_ptr() and not _is_handle(node):
            raise DoesNotFit("a parameter lies elsewhere now")
        return found

    def _record(self, region: Region, segment: list[Node]) -> None:
        from sparseconv.gpu import graphs  # loaded where it is used

        given = dict(self.counts)

        def body() -> tuple[torch.Tensor | None, dict[Node, Any], dict[str, torch.Tensor]]:
            self.counts, self.grids = dict(given), []
            running.fixed = True
            try:
                for node in segment:
                    self.env[node] = self._fixed(node)
            finally:
                running.fixed = False
            made = {n: c for n, c in self.counts.items() if n not in given}
            parts = [*(g.fault for g in self.grids), *made.values()]
            region.faults = len(self.grids)
            kept = {node: self.env[node] for node in segment if any(u not in inside for u in node.users)}
            kept |= {node: self.env[node] for node in segment if _is_handle(node)}
            return torch.cat(parts) if parts else None, kept, made

        inside = set(segment)
        try:
            with torch.no_grad():
                region.replay, (region.status, region.values, region.made) = graphs.graph_of(body, self._device())
        except RuntimeError as error:
            self.program.broken = f"it cannot be captured: {str(error).splitlines()[0]}"
            raise DoesNotFit(self.program.broken) from error
        self.grids = []

    def _cross(self, node: Any) -> Any:
        """A value as the region reads it."""
        found = self.env[node]
        if isinstance(found, torch.Tensor):
            if _is_handle(node):
                return found
            axis = self.rows.axis(value(node))
            return found if axis is None else self._padded(found, *axis)
        if is_number(node) and (name := symbol(value(node))) in self.rows.symbols and name is not None:
            return self._capacity(name, found)
        return found

    def _capacity(self, name: str, rows: int) -> int:
        capacity = self.recording.capacity.get(name)
        if capacity is None:
            most = max(rows, self.program.most.get(name, 0))
            capacity = self.recording.capacity[name] = max(ROWS, -(-int(ROOM * most) // ROWS) * ROWS)
        if rows > capacity:
            self.program.most[name] = max(rows, self.program.most.get(name, 0))
            raise DoesNotFit(f"{rows} rows, and places for {capacity}")
        self.host[name] = rows
        return capacity

    def _padded(self, tensor: torch.Tensor, axis: int, name: str) -> torch.Tensor:
        rows = tensor.shape[axis]
        capacity = self._capacity(name, rows)
        if name not in self.counts:
            self.counts[name] = torch.full((1,), rows, dtype=torch.int32, device=tensor.device)
        dead = -1 if not tensor.is_floating_point() else float("nan") if self.program.poison else 0.0
        shape = list(tensor.shape)
        shape[axis] = capacity
        padded = tensor.new_full(shape, 0 if tensor.dtype == torch.bool else dead)
        padded.narrow(axis, 0, rows).copy_(tensor)
        return padded

    def _arg(self, node: Any) -> Any:
        return self.crossed[node] if node in self.crossed else self.env[node]

    def _fixed(self, node: Any) -> Any:
        target: Any = node.target
        if target is aten._assert_scalar.default or target is aten.sym_constrain_range_for_size.default:
            return None
        if is_own(node, "rows"):
            return self.counts[node.meta["rows"]]
        args = torch.fx.map_arg(node.args, self._arg)
        if is_own(node) and target._opname != "live" and not self.on_gpu:
            found = self._of_live_rows(node, args)
        elif is_own(node, "grid"):
            return self._grid(node, args)
        else:
            found = target(*args, **torch.fx.map_arg(node.kwargs, self._arg))
            if is_own(node, "target"):
                name = symbol(value(node)[1].shape[0])
                grid = held_by(found[0], VoxelGrid)
                assert name is not None
                assert grid.count is not None
                self.counts[name] = grid.count
                self.recording.capacity[name] = len(grid)
        return self._poisoned(node, found) if self.program.poison and "fills" not in node.meta else found

    def _of_live_rows(self, node: Any, args: Any) -> Any:
        """An operator of this library on a CPU: it is given live rows, and its rows are put into arrays again."""
        target: Any = node.target

        def live(given: Any) -> Any:
            found, v = self._arg(given), value(given)
            if isinstance(found, torch.Tensor) and not _is_handle(given) and (axis := self.rows.axis(v)) is not None:
                return found.narrow(axis[0], 0, min(found.shape[axis[0]], self._rows_of(axis[1])))
            return self._rows_of(name) if is_number(given) and (name := symbol(v)) in self.counts else found

        found = target(*torch.fx.map_arg(node.args, live))
        if target._opname == "filled":
            return found

        def place(v: Any, t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or (axis := self.rows.axis(v)) is None:
                return t
            return self._padded(t, *axis)

        v = value(node)
        return tuple(map(place, v, found)) if isinstance(v, (tuple, list)) else place(v, found)

    def _rows_of(self, name: Any) -> int:
        self._settle()
        return self.host[name]

    def _poisoned(self, node: Any, found: Any) -> Any:
        """NaN in dead rows, for tests: whatever reads one shows it."""

        def dead(v: Any, t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or not t.is_floating_point() or (axis := self.rows.axis(v)) is None:
                return t
            live = torch.arange(t.shape[axis[0]]) < self.counts[axis[1]]
            return torch.where(live.view([-1 if a == axis[0] else 1 for a in range(t.ndim)]), t, float("nan"))

        v = value(node)
        if isinstance(v, (tuple, list)):
            return type(found)(map(dead, v, found))
        return dead(v, found)

    def _grid(self, node: Any, args: Any) -> torch.Tensor:
        coords, items, size, origin = args
        name = symbol(value(node.args[0]).shape[0])
        assert name is not None
        recording = self.recording
        example = recording.examples.get(node)
        if example is None:
            own = coords[: int(self.counts[name])]
            example = VoxelGrid(own, items, tuple(size) or None, tuple(origin) or None)
            if not len(example):
                raise DoesNotFit("a scene without voxels")
            recording.examples[node] = example
            seen = self.program.extents.get(node.name, example.extent)
            self.program.extents[node.name] = _around(seen, example.extent)
        room = max(ROOM, recording.capacity[name] / len(example))
        box = _grown(self.program.extents[node.name])
        grid = FixedGrid(coords.contiguous(), self.counts[name], example, extent=box, room=room)
        self.grids.append(grid)
        return handle((grid,))

    # ---- backward

    def backward(self, call: Call) -> Any:
        self.recording, graph = call.recording, self.graph
        forward = self.program.forward
        assert forward is not None
        self.host = dict(call.counts)
        for name, n in self.host.items():
            self.counts[name] = torch.full((1,), n, dtype=torch.int32, device=self._device())
        for node in graph.inputs:
            if _is_handle(node):
                self.env[node] = self.recording.held[node.name]
        self.padded |= {n for n in graph.inputs if n.name in self.recording.saved}
        for segment, captured in zip(graph.segments, graph.is_captured):
            if not captured:
                for node in segment:
                    self.env[node] = self._as_it_is(node)
            else:
                self._region(segment)
        return [self._result(n) for n in graph.output.args[0]]  # type: ignore[union-attr]

    def _device(self) -> torch.device:
        places = [t.device for t in self.env.values() if isinstance(t, torch.Tensor)]
        return next((d for d in places if d.type != "cpu"), places[0])


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
