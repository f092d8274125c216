"""From operands with addresses to a running kernel."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from sparseconv.gpu.launch_log import listeners, tell
from sparseconv.pointwise import metadata
from sparseconv.pointwise.kernel import cache as files
from sparseconv.pointwise.kernel import codegen, layout
from sparseconv.pointwise.promotion import Dtypes
from sparseconv.pointwise.scalar import ScalarFunction
from sparseconv.pointwise.schema import Config, ScalarType, Schema
from sparseconv.pointwise.strided import StridedBuffer
from sparseconv.torch_private import current_device, current_stream

_ALIGNMENT = 16

#: what a kernel takes as an operand
Array = torch.Tensor | StridedBuffer


@dataclass(frozen=True)
class Launch:
    """One kernel ready for operands of one geometry; at run time it takes addresses and numbers alone.

    ``start(stream, *inputs, *numbers, *outputs, *tail)``; sizes, strides and compile-time constants are in ``tail``.
    ``device`` is the index of the GPU, or -1 where operands must be tensors, as for Triton's interpreter.
    """

    start: Callable[..., Any]
    tail: tuple[Any, ...]
    device: int

    def __call__(self, inputs: Sequence[Any], numbers: Sequence[Any], outputs: Sequence[Any]) -> None:
        if self.device < 0:
            self.start(None, *inputs, *numbers, *outputs, *self.tail)
        elif self.device == current_device():
            self.start(current_stream(self.device), *inputs, *numbers, *outputs, *self.tail)
        else:
            with torch.cuda.device(self.device):
                self.start(current_stream(self.device), *inputs, *numbers, *outputs, *self.tail)

    def on(self, args: Sequence[Any], outputs: Sequence[Any], schema: Schema) -> None:
        """Run on the arguments of a call."""
        address = _first_element if self.device < 0 else _address
        self(
            [address(args[i]) for i in schema.tensors], [args[i] for i in schema.scalars], [address(a) for a in outputs]
        )


def _first_element(array: Any) -> torch.Tensor:
    return array.start if isinstance(array, StridedBuffer) else array


def _address(array: Any) -> int:
    return array.data_ptr()


@cache
def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    name = {torch.bool: "int1"}.get(dtype, str(dtype).removeprefix("torch."))
    if dtype.is_complex or not hasattr(tl, name):
        raise TypeError(
            f"a kernel cannot compute in {dtype}, which Triton does not have"
            + ("; pass torch.view_as_real(x), or the real and imaginary part" if dtype.is_complex else "")
        )
    return getattr(tl, name)


class Overload:
    """The kernels of one function for task spaces of one rank, callable without any inference.

    ``overload(*inputs, out0=...)`` writes the outputs and returns them. It takes tensors or StridedBuffers of this rank
    and of the outputs' shape; a size of 1 or a stride of 0 repeats. Nothing is inferred or allocated, and axes are not
    merged.
    """

    def __init__(self, schema: Schema, scalar: ScalarFunction, rank: int, config: Config) -> None:
        self.schema, self.scalar, self.rank, self.config = schema, scalar, rank, config
        self._kernels: dict[tuple[ScalarType | None, ...], Any] = {}
        self._compiled: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def source(self, scalar_types: tuple[ScalarType | None, ...] | None = None) -> str:
        """The text of the kernel, for numbers of these types (those of the schema by default)."""
        schema = self.schema if scalar_types is None else replace(self.schema, scalar_types=scalar_types)
        return codegen.source(schema, self.rank, self.config)

    def kernel(self, scalar_types: tuple[ScalarType | None, ...]) -> Any:
        """The jitted kernel, from its text in the cache folder."""
        found = self._kernels.get(scalar_types)
        if found is None:
            with self._lock:
                found = self._kernels.get(scalar_types)
                if found is None:
                    text = self.source(scalar_types)
                    name = codegen.kernel_name(self.schema, self.rank)
                    module = files.load(files.store(name, text), text, {"scalar_function": self.scalar.jitted})
                    found = self._kernels[scalar_types] = getattr(module, name)
        return found

    def __call__(self, *inputs: Any, **outputs: Any) -> Any:
        schema = self.schema
        names = [f"out{j}" for j in range(schema.num_outputs)]
        if len(inputs) != schema.num_inputs or sorted(outputs) != sorted(names):
            raise TypeError(
                f"{schema.name}: an overload takes {schema.num_inputs} positional arguments and {', '.join(names)}=, "
                f"but got {len(inputs)} and {sorted(outputs) or 'none'}"
            )
        outs = [outputs[name] for name in names]
        shape = tuple(outs[0].shape)
        arrays = [inputs[i] for i in schema.tensors]
        gathered = {i for i, _ in schema.gather}
        for array in [*arrays, *outs]:
            if len(array.shape) != self.rank:
                raise ValueError(f"{schema.name}: this overload is for rank {self.rank}, but got {array!r:.200}")
        geometry = [layout.broadcast_strides(a.shape, a.stride(), shape) for a in outs]
        for i, a in zip(schema.tensors, arrays):
            strides = layout.broadcast_strides(a.shape, a.stride(), shape)
            geometry.append((0, *strides[1:]) if i in gathered else strides)
        if 0 not in shape:
            space = task_space(schema, inputs, outs, shape, geometry, self.config, collapse=False)
            self.prepare(inputs, outs, space, metadata.dtypes_of(schema, inputs)).on(inputs, outs, schema)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def prepare(
        self, inputs: Sequence[Any], outputs: Sequence[Array], space: layout.Iteration, dtypes: Dtypes
    ) -> Launch:
        """The launch over a task space that has this overload's rank."""
        schema = self.schema
        tiled = len(space.tile)
        operands = len(outputs) + len(schema.tensors)
        integers = [*space.sizes, *(s for line in space.strides[:operands] for s in line)]
        integers += [inputs[i].stride()[0] for i, _ in schema.gather]
        integers += space.strides[-1] if schema.index else ()
        constants: list[Any] = [
            _triton_dtype(torch.int64 if space.wide else torch.int32),
            space.parts,
            space.full,
            *space.tile,
        ]
        constants += [_triton_dtype(dtypes.compute[i]) for i in schema.tensors]
        for line in space.strides[len(outputs) : operands]:
            constants += [s != 0 for s in line[len(line) - tiled :]]
        constants += [_triton_dtype(dtypes.compute[i]) for i in schema.scalars]
        start, device = self._start(inputs, outputs, integers, constants, space.programs, space.warps)
        return Launch(start, (*integers, *constants), device)

    def _start(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Array],
        integers: Sequence[int],
        constants: Sequence[Any],
        programs: int,
        warps: int,
    ) -> tuple[Callable[..., Any], int]:
        types = _scalar_types(self.schema, inputs)
        device = outputs[0].device
        kernel = self.kernel(types)
        if device.type != "cuda" or torch.version.hip is not None or self.scalar.interpreted:
            return _through_triton(kernel, programs, warps), -1
        # Triton compiles for what it knows of each argument; this key is at least as fine, so a compiled kernel found
        # under it may be started directly, which skips most of what a launch costs the CPU.
        arrays = [*(inputs[i] for i in self.schema.tensors), *outputs]
        key = (
            types,
            device.index,
            warps,
            tuple((a.dtype, a.data_ptr() % _ALIGNMENT) for a in arrays),
            tuple(1 if v == 1 else (v % _ALIGNMENT == 0, -(2**31) <= v < 2**31) for v in integers),
            tuple(constants),
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            operands = [_first_element(a) for a in arrays]
            count = len(self.schema.tensors)
            numbers = [inputs[i] for i in self.schema.scalars]
            with torch.cuda.device(device):
                compiled = kernel.warmup(
                    *(*operands[:count], *numbers, *operands[count:], *integers, *constants),
                    grid=(1,),
                    num_warps=warps,
                    enable_fp_fusion=True,
                )
                compiled[(1, 1, 1)]  # loads the kernel onto the device
            self._compiled[key] = compiled
        return _direct(compiled, programs), device.index


def task_space(
    schema: Schema,
    inputs: Sequence[Any],
    outputs: Sequence[Array],
    shape: Sequence[int],
    geometry: Sequence[layout.Ints],
    config: Config,
    *,
    collapse: bool = True,
) -> layout.Iteration:
    """The task space of a call; the index, if the function takes one, is an operand with row-major strides."""
    if schema.index:
        geometry = [*geometry, layout.contiguous_strides(shape)]
    itemsize = max(a.dtype.itemsize for a in outputs)
    reach = 0
    for i, _ in schema.gather:
        reach = max(reach, sum((n - 1) * abs(s) for n, s in zip(inputs[i].shape, inputs[i].stride())))
    return layout.iterate(shape, geometry, itemsize=itemsize, config=config, collapse=collapse, reach=reach)


def _through_triton(kernel: Any, programs: int, warps: int) -> Callable[..., Any]:
    """Start a kernel as Triton does, from tensors."""
    launcher = kernel[(programs,)]
    return lambda stream, *operands: launcher(*operands, num_warps=warps, enable_fp_fusion=True)


def _direct(compiled: Any, programs: int) -> Callable[..., Any]:
    """Start a compiled kernel from addresses, past Triton's launch metadata unless a profiler's hook asks for it."""
    from triton import knobs

    runner = compiled[(programs, 1, 1)]
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    hooks, launcher = knobs.runtime, type(run)  # type: Any, Any
    if _launcher_form(launcher) != ("gridX", "gridY", "gridZ", "stream", "function"):
        return lambda stream, *operands: runner(*operands, stream=stream)

    def start(stream: int, *operands: Any) -> None:
        if listeners:
            told = zip(compiled.src.signature.values(), operands)
            tell(compiled, (programs, 1, 1), [value for kind, value in told if kind != "constexpr"])
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            runner(*operands, stream=stream)
        else:
            run(programs, 1, 1, stream, function, packed, None, None, None, *operands)

    return start


@cache
def _launcher_form(launcher: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(launcher.__call__).parameters)[1:6]


def _scalar_types(schema: Schema, inputs: Sequence[Any]) -> tuple[ScalarType | None, ...]:
    """The declared type of each number, or that of its value."""
    declared = schema.scalar_types
    if all(declared[i] is not None for i in schema.scalars):
        return declared
    return tuple(
        None if flag else kind or (bool if isinstance(v, bool) else int if isinstance(v, int) else float)
        for flag, kind, v in zip(schema.is_tensor, declared, inputs)
    )
