"""From operands with addresses to a running kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sparseconv.pointwise import cache as files
from sparseconv.pointwise import codegen, layout, promotion
from sparseconv.pointwise.promotion import Dtypes, Operand
from sparseconv.pointwise.schema import Config, ScalarType, Schema
from sparseconv.pointwise.strided import StridedBuffer

if TYPE_CHECKING:
    from sparseconv.pointwise.scalar import ScalarFunction

_ALIGNMENT = 16


class Array(Protocol):
    """What a kernel needs of an operand; a tensor and a StridedBuffer both have it."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def stride(self) -> tuple[int, ...]: ...
    def data_ptr(self) -> int: ...


@dataclass(frozen=True)
class Launch:
    """One kernel ready for operands of one geometry: ``start(*tensors, *numbers, *outputs, *tail)``.

    ``start`` takes addresses alone at run time; sizes, strides and compile-time constants are in ``tail``. ``device`` is
    the index of the GPU, or -1 where the interpreter runs the kernel.
    """

    start: Callable[..., Any]
    tail: tuple[Any, ...]
    tensors: tuple[int, ...]
    scalars: tuple[int, ...]
    device: int

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        operands = [inputs[i] for i in self.tensors]
        operands += [inputs[i] for i in self.scalars]
        operands += outputs
        operands += self.tail
        if self.device < 0:
            self.start(*operands)
        elif self.device == torch.cuda.current_device():
            self.start(*operands, stream=_stream_of()(self.device))
        else:
            with torch.cuda.device(self.device):
                self.start(*operands, stream=_stream_of()(self.device))


@cache
def _stream_of() -> Callable[[int], int]:
    import triton

    return triton.runtime.driver.active.get_current_stream


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

    ``overload(*inputs, out0=...)`` takes tensors or StridedBuffers that all have this rank and the shape of the outputs
    (a size of 1 or a stride of 0 repeats), writes the outputs and returns them. Nothing is inferred or allocated, and
    axes are not merged.
    """

    def __init__(self, schema: Schema, scalar: ScalarFunction, rank: int, config: Config) -> None:
        self.schema, self.scalar, self.rank, self.config = schema, scalar, rank, config
        self._kernels: dict[tuple[ScalarType | None, ...], Any] = {}
        self._compiled: dict[Any, Callable[..., Any]] = {}
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
                    path = files.store(codegen.kernel_name(self.schema, self.rank), text)
                    module = files.load(path, text, {"scalar_function": self.scalar.jitted})
                    found = getattr(module, codegen.kernel_name(self.schema, self.rank))
                    self._kernels[scalar_types] = found
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
        for array in [*arrays, *outs]:
            if len(array.shape) != self.rank:
                raise ValueError(f"{schema.name}: this overload is for rank {self.rank}, but an operand is {array!r:.200}")
        geometry = [layout.broadcast_strides(a.shape, a.stride(), shape) for a in [*outs, *arrays]]
        operands = [
            Operand(a.dtype, 2) if flag else Operand.of_number(type(a)) for a, flag in zip(inputs, schema.is_tensor)
        ]
        dtypes = promotion.resolve(schema, operands)
        if shape and 0 in shape:
            return outs[0] if len(outs) == 1 else tuple(outs)
        launch = self.prepare(inputs, outs, shape, geometry, dtypes)
        launch([a.start if isinstance(a, StridedBuffer) else a for a in inputs], [_start(a) for a in outs])
        return outs[0] if len(outs) == 1 else tuple(outs)

    def prepare(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Array],
        shape: Sequence[int],
        geometry: Sequence[layout.Ints],
        dtypes: Dtypes,
    ) -> Launch:
        """The launch for operands of these strides (``geometry``: outputs first), every axis kept."""
        space = task_space(self.schema, inputs, outputs, shape, geometry, self.config, collapse=False)
        return self.prepare_space(inputs, outputs, space, dtypes)

    def prepare_space(
        self, inputs: Sequence[Any], outputs: Sequence[Array], space: layout.Iteration, dtypes: Dtypes
    ) -> Launch:
        """The launch over a task space that has this overload's rank."""
        schema = self.schema
        tiled = len(space.tile)
        operands = len(outputs) + len(schema.tensors)
        sizes_strides = [*space.sizes, *(s for line in space.strides[:operands] for s in line)]
        sizes_strides += [inputs[i].stride()[0] for i, _ in schema.gather]
        sizes_strides += space.strides[-1] if schema.index else ()
        lines = space.strides[len(outputs) : operands]
        constants: list[Any] = [_address_dtype(space.wide), *space.tile]
        constants += [_triton_dtype(dtypes.compute[i]) for i in schema.tensors]
        for line in lines:
            constants += [s != 0 for s in line[len(line) - tiled :]]
        constants += [_triton_dtype(dtypes.compute[i]) for i in schema.scalars]
        programs = 1
        for k, size in enumerate(space.sizes):
            tile = space.tile[k - len(space.sizes) + tiled] if k >= len(space.sizes) - tiled else 1
            programs *= -(-size // tile)
        warps = self.config.num_warps or (8 if space.across else 4)
        tail = (*sizes_strides, *constants)
        types = _scalar_types(schema, inputs)
        start, device = self._start(inputs, outputs, tail, len(sizes_strides), programs, warps, types)
        return Launch(start, tail, schema.tensors, schema.scalars, device)

    def _start(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Array],
        tail: tuple[Any, ...],
        integers: int,
        programs: int,
        warps: int,
        types: tuple[ScalarType | None, ...],
    ) -> tuple[Callable[..., Any], int]:
        kernel = self.kernel(types)
        device = outputs[0].device
        if device.type != "cuda" or torch.version.hip is not None or self.scalar.interpreted:
            return _through_triton(kernel, (programs,), warps), -1
        # Triton compiles for what it knows of each argument; ours is at least as fine, so a compiled kernel found under
        # the same key may be started directly, which skips most of what a launch costs the host.
        arrays = [inputs[i] for i in self.schema.tensors]
        key = (
            types,
            device.index,
            warps,
            tuple((a.dtype, a.data_ptr() % _ALIGNMENT == 0) for a in [*arrays, *outputs]),
            tuple((v == 1, v % _ALIGNMENT == 0, -(2**31) <= v < 2**31) for v in tail[:integers]),
            tail[integers:],
        )
        with torch.cuda.device(device):
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = kernel.warmup(
                    *[_start(a) for a in arrays],
                    *[inputs[i] for i in self.schema.scalars],
                    *[_start(a) for a in outputs],
                    *tail,
                    grid=(1,),
                    num_warps=warps,
                )
                self._compiled[key] = compiled
            return compiled[(programs, 1, 1)], device.index


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
    itemsize = max(torch.empty(0, dtype=a.dtype).element_size() for a in outputs)
    reach = _reach(schema, inputs)
    return layout.iterate(shape, geometry, itemsize=itemsize, config=config, collapse=collapse, reach=reach)


def _through_triton(kernel: Any, grid: tuple[int, ...], warps: int) -> Callable[..., Any]:
    start = kernel[grid]
    return lambda *operands, stream=None: start(*operands, num_warps=warps)


def _address_dtype(wide: bool) -> Any:
    return _triton_dtype(torch.int64 if wide else torch.int32)


def _start(array: Any) -> torch.Tensor:
    return array.start if isinstance(array, StridedBuffer) else array


def _scalar_types(schema: Schema, inputs: Sequence[Any]) -> tuple[ScalarType | None, ...]:
    """The declared type of each number, or that of its value."""
    declared = schema.scalar_types
    if all(declared[i] is not None for i in schema.scalars):
        return declared
    return tuple(
        None if flag else kind or (bool if isinstance(v, bool) else int if isinstance(v, int) else float)
        for flag, kind, v in zip(schema.is_tensor, declared, inputs)
    )


def _reach(schema: Schema, inputs: Sequence[Any]) -> int:
    """The highest address in a gathered argument."""
    return max(
        (sum((n - 1) * abs(s) for n, s in zip(inputs[i].shape, inputs[i].stride())) for i, _ in schema.gather), default=0
    )
