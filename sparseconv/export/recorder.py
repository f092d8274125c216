"""What a run does on a GPU, written down while it is captured: launches, operations of torch, and who waits for whom.

A run over grids of fixed size does the same for every scene. So its steps can be replayed by whoever has the kernels
and the memory. Addresses are those of the capture; `sequence` finds the arrays that they lie in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from sparseconv.gpu.launch_log import listeners, parameters, tell
from sparseconv.torch_private import TorchDispatchMode, pytree

#: operations that make memory without a value
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
#: arguments that say what memory is made
MEMORY = ("dtype", "layout", "device", "pin_memory", "memory_format")
#: operations that are another one on memory that is there: that one, and which of their arguments it takes
INSTEAD: dict[str, tuple[str, tuple[int, ...]]] = {
    "zeros": ("zero_.default", ()),
    "zeros_like": ("zero_.default", ()),
    "new_zeros": ("zero_.default", ()),
    "ones": ("fill_.Scalar", ()),
    "ones_like": ("fill_.Scalar", ()),
    "new_ones": ("fill_.Scalar", ()),
    "full": ("fill_.Scalar", (1,)),
    "full_like": ("fill_.Scalar", (1,)),
    "new_full": ("fill_.Scalar", (2,)),
    "scalar_tensor": ("fill_.Scalar", (0,)),
    "clone": ("copy_.default", (0,)),
    "_to_copy": ("copy_.default", (0,)),
}


class LaunchStep(NamedTuple):
    """A launch: Triton's compiled kernel, the grid, and a value with Triton's type of it for each parameter."""

    stream: int
    kernel: Any
    grid: tuple[int, int, int]
    values: tuple[Any, ...]
    kinds: tuple[str, ...]


class CallStep(NamedTuple):
    """An operation of torch that writes into given memory, with its arguments in the order of its schema."""

    stream: int
    operator: Any
    values: tuple[Any, ...]


class EventStep(NamedTuple):
    """A stream records an event, or waits for it."""

    stream: int
    event: int
    is_wait: bool


Step = LaunchStep | CallStep | EventStep


class Recorder:
    """A context: what this thread does on a GPU within it, in order. Entered again, it begins anew.

    Raises:
        ValueError: at the end of the context, for what no sequence can hold.
        RuntimeError: this torch cannot tell what runs.
    """

    #: the kind of device whose operations are written down
    DEVICE = "cuda"

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.steps: list[Step] = []
        #: priority of each stream; the first is that on which the run begins
        self.priorities: list[int] = []
        self.events = 0
        #: what cannot be written down, as sentences
        self.refused: list[str] = []
        self._streams: dict[int, int] = {}
        self._numbers: dict[int, tuple[torch.cuda.Event, int]] = {}
        #: what operations were given, so that its memory on the CPU is not reused later
        self._kept: list[Any] = []
        self._within = ExitStack()
        self._thread = threading.get_ident()

    def __enter__(self) -> Recorder:
        if issubclass(TorchDispatchMode, nullcontext):
            raise RuntimeError(
                f"torch {torch.__version__} has no dispatch modes, which see operations: use another one"
            )
        self._begin()
        self._stream()
        listeners.append(self._launched)
        self._within.callback(listeners.remove, self._launched)
        self._within.enter_context(_events_recorded(self))
        self._within.enter_context(_triton_recorded())
        self._within.enter_context(_Functions(_Operations(self)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.close()
        if self.refused and error[0] is None:
            raise ValueError(f"no package can be made of this network: {self.refused[0]}")

    # ---- what happens

    def _stream(self, stream: torch.cuda.Stream | None = None) -> int:
        stream = torch.cuda.current_stream() if stream is None else stream
        number = self._streams.setdefault(stream.cuda_stream, len(self._streams))
        if number == len(self.priorities):
            self.priorities.append(stream.priority)
        return number

    def _launched(self, kernel: Any, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        if threading.get_ident() != self._thread or 0 in grid:
            return
        if isinstance(kernel, str):
            self.refused.append(f"it launches {kernel}, and a package holds those of Triton: choose another backend")
            return
        kinds = parameters(kernel)
        if len(kinds) != len(values):
            self.refused.append(f"the kernel {kernel.name} has {len(kinds)} parameters, but {len(values)} were given")
            return
        self.steps.append(LaunchStep(self._stream(), kernel, grid, tuple(values), tuple(kinds)))

    def event(self, event: torch.cuda.Event, stream: torch.cuda.Stream, is_wait: bool) -> None:
        """An event is recorded, or waited for."""
        if threading.get_ident() != self._thread:
            return
        if not is_wait:
            self._numbers[id(event)] = event, self.events
            self.events += 1
        known = self._numbers.get(id(event))
        if known is not None:  # others were recorded before the run
            self.steps.append(EventStep(self._stream(stream), known[1], is_wait))

    def operation(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> None:
        """An operation has run."""
        made = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = operator._schema.name.partition("::")[2]
        if name in EMPTY or not any(t.device.type == self.DEVICE and t.numel() for t in (*made, *given)):
            return
        if operator.namespace not in ("aten", "prims"):
            self.refused.append(f"it calls {operator}, which torch does not have in C++")
            return
        values = _by_schema(operator, args, kwargs)
        if operator._schema.is_mutable:
            self._call(operator, values)
            return
        places = {t.untyped_storage().data_ptr() for t in given}
        if all(t.untyped_storage().data_ptr() in places or not t.numel() for t in made):
            return  # views
        if len(made) == 1 and name in INSTEAD:
            other, taken = INSTEAD[name]
            more = [args[at] if at < len(args) else values[_names(operator)[at]] for at in taken]
            packet, overload = other.split(".")
            inner = getattr(getattr(torch.ops.aten, packet), overload)
            self._call(inner, _by_schema(inner, [made[0], *(more or [1] * (packet == "fill_"))], {}))
            return
        writing = _writing(operator)
        outs = [a.name for a in writing._schema.arguments if a.is_out] if writing else []
        if writing is None or len(outs) != len(made):
            self.refused.append(f"{operator} has no form that writes into given memory")
            return
        self._call(writing, values | dict(zip(outs, made)))

    def _call(self, operator: Any, values: dict[str, Any]) -> None:
        self._kept.append(values)
        self.steps.append(CallStep(self._stream(), operator, tuple(values[name] for name in _names(operator))))


def _names(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def _by_schema(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their names, defaults where none are given."""
    values = {a.name: a.default_value if a.has_default_value() else None for a in operator._schema.arguments}
    return values | dict(zip(_names(operator), args)) | kwargs


def _writing(operator: Any) -> Any:
    """The operation that writes what this one returns into tensors that it is given; None where torch has none."""
    plain = [(a.name, str(a.type)) for a in operator._schema.arguments]
    packet = operator.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads()]
    for wanted in (plain, [(name, kind) for name, kind in plain if name not in MEMORY]):
        for other in others:
            arguments = other._schema.arguments
            given = [(a.name, str(a.type)) for a in arguments if not a.is_out]
            if len(given) < len(arguments) and given == wanted:
                return other
    return None


class _Operations(TorchDispatchMode):
    """Tells of each operation that torch runs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = operator(*args, **kwargs)
        self._recorder.operation(operator, args, kwargs, results)
        return results


class _Functions(TorchFunctionMode):
    """Turns a dispatch mode on within each function of torch, and not around this library's own code.

    Whoever asks whether there are modes takes another way where there is one, with other launches.
    """

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._operations:
            return function(*args, **(kwargs or {}))


@contextmanager
def _events_recorded(recorder: Recorder) -> Iterator[None]:
    """All ways by which one stream waits for another go through these two methods."""
    kind: Any = torch.cuda.Event
    record, wait = kind.record, kind.wait

    def recorded(method: Callable[..., None], is_wait: bool) -> Callable[..., None]:
        def call(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
            stream = torch.cuda.current_stream() if stream is None else stream
            method(event, stream)
            recorder.event(event, stream, is_wait)

        return call

    kind.record, kind.wait = recorded(record, False), recorded(wait, True)
    try:
        yield
    finally:
        kind.record, kind.wait = record, wait


@contextmanager
def _triton_recorded() -> Iterator[None]:
    """Kernels that are launched by Triton's own call are told of too."""
    from triton.runtime.jit import JITFunction  # Triton is loaded where it is used

    kind: Any = JITFunction
    run = kind.run

    def recorded(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(function, *args, grid=grid, warmup=warmup, **kwargs)
        if not warmup:
            bound = function.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in function.arg_names})
            bound.apply_defaults()
            shape = tuple(grid(bound.arguments) if callable(grid) else grid)
            kinds = kernel.src.signature
            values = [value for name, value in bound.arguments.items() if kinds.get(name) != "constexpr"]
            tell(kernel, (*shape, 1, 1)[:3], values)
        return kernel

    kind.run = recorded
    try:
        yield
    finally:
        kind.run = run
