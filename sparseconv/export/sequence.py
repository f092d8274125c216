"""A recorded run as plain lists, numbers and tensors, which C++ reads from a file that torch.save wrote.

Memory of the graph becomes workspaces. All other memory that a step touches becomes constants with what they hold.
`cpp/sequence.h` reads what is written here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sparseconv.export.recorder import CallStep, EventStep, LaunchStep, Recorder

#: kinds of steps, of parameters of kernels and of arguments of operations; `cpp/sequence.cpp` has the same numbers
LAUNCH, CALL, RECORD, WAIT = range(4)
POINTER, INT32, INT64, FLOAT32, DESCRIPTOR = range(5)
PLAIN, TENSOR, HOST, DTYPE, DEVICE, LIST = range(6)
#: parameters that are numbers, by Triton's names of their types
NUMBERS = {"i32": INT32, "u32": INT32, "i64": INT64, "u64": INT64, "fp32": FLOAT32}


class _Block(NamedTuple):
    """Bytes that torch's allocator gave out as one; ``workspace`` is the number of the graph's segment, or -1."""

    start: int
    size: int
    workspace: int


class Memory:
    """Which array an address lies in: memory of a graph, or memory that was there before its capture."""

    def __init__(self, pool: tuple[int, int], snapshot: Sequence[dict[str, Any]]) -> None:
        self._blocks: list[_Block] = []
        graphs = 0
        for segment in snapshot:
            start = segment["address"]
            if tuple(segment["segment_pool_id"]) == tuple(pool):
                self._blocks.append(_Block(start, segment["total_size"], graphs))
                graphs += 1
                continue
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    self._blocks.append(_Block(start, block["size"], -1))
                start += block["size"]
        self._blocks.sort()
        self._starts = [block.start for block in self._blocks]
        #: bytes of each workspace
        self.workspaces = [size for _, size, n in sorted(self._blocks, key=lambda block: block.workspace) if n >= 0]
        self._constants: dict[int, tuple[int, int]] = {}

    def place(self, address: int, what: str) -> tuple[int, int]:
        """The array of an address and the bytes before it there: workspaces first, then constants; -1 for address 0."""
        if address == 0:
            return -1, 0
        at = bisect_right(self._starts, address) - 1
        block = self._blocks[at] if at >= 0 else None
        if block is None or address >= block.start + block.size:
            raise ValueError(
                f"no package can be made of this network: {what} reads memory that torch did not allocate on the GPU"
            )
        if block.workspace >= 0:
            return block.workspace, address - block.start
        number, _ = self._constants.setdefault(block.start, (len(self._constants), block.size))
        return len(self.workspaces) + number, address - block.start

    def constants(self, device: torch.device) -> list[torch.Tensor]:
        """What the arrays that are no workspaces hold now, (bytes,) uint8 each, on the CPU."""
        return [torch.as_tensor(_Raw(start, size), device=device).cpu() for start, (_, size) in self._constants.items()]


class _Raw:
    """Bytes of a GPU at an address, for torch.as_tensor."""

    def __init__(self, start: int, size: int) -> None:
        told = {"shape": (size,), "typestr": "|u1", "data": (start, False), "version": 3}
        self.__cuda_array_interface__ = told


class Writer:
    """Steps as plain lists."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        #: an empty tensor of each dtype that is named: a number stands for it
        self.kinds: list[torch.Tensor] = []
        self._numbers: dict[torch.dtype, int] = {}
        #: (name, binary, threads, bytes of shared memory, whether cooperative, programs of a cluster) of each kernel
        self.kernels: list[tuple[Any, ...]] = []
        self._known: dict[int, int] = {}

    def dtype(self, dtype: torch.dtype) -> int:
        """The number of a dtype."""
        number = self._numbers.setdefault(dtype, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(torch.empty(0, dtype=dtype))
        return number

    def tensor(self, tensor: torch.Tensor, what: str) -> tuple[Any, ...]:
        """(array, bytes before it, shape, strides, dtype) of a tensor on the GPU."""
        address = tensor.data_ptr() if tensor.numel() else 0
        shape, strides = list(tensor.shape), list(tensor.stride())
        return (*self._memory.place(address, what), shape, strides, self.dtype(tensor.dtype))

    def steps(self, recorder: Recorder) -> list[tuple[Any, ...]]:
        """All steps, as C++ reads them."""
        return [self._step(step) for step in recorder.steps]

    def _step(self, step: Any) -> tuple[Any, ...]:
        if isinstance(step, EventStep):
            return (WAIT if step.is_wait else RECORD, step.stream, step.event)
        if isinstance(step, CallStep):
            schema = step.operator._schema
            values = [self._argument(value, str(step.operator)) for value in step.values]
            return (CALL, step.stream, schema.name, schema.overload_name, values)
        return (LAUNCH, step.stream, self._kernel(step.kernel), list(step.grid), self._parameters(step))

    # ---- launches

    def _kernel(self, kernel: Any) -> int:
        number = self._known.get(id(kernel))
        if number is None:
            data = kernel.metadata
            if data.global_scratch_size or data.profile_scratch_size:
                raise ValueError(f"no package can be made of this network: the kernel {kernel.name} asks for scratch")
            binary = torch.frombuffer(bytearray(kernel.asm["cubin"]), dtype=torch.uint8)
            cooperative = bool(data.launch_cooperative_grid)
            made = (data.name, binary, 32 * data.num_warps, data.shared, cooperative, data.num_ctas)
            number = self._known[id(kernel)] = len(self.kernels)
            self.kernels.append(made)
        return number

    def _parameters(self, step: LaunchStep) -> list[tuple[Any, ...]]:
        from sparseconv.gpu.triton_private import described  # Triton is loaded where it is used

        what = f"the kernel {step.kernel.name}"
        parameters: list[tuple[Any, ...]] = []
        layouts = iter(getattr(step.kernel.metadata, "tensordesc_meta", None) or ())
        for value, kind in zip(step.values, step.kinds):
            if kind.startswith("*"):
                address = value if isinstance(value, int) else 0 if value is None else value.data_ptr()
                parameters.append((POINTER, *self._memory.place(address, what)))
            elif kind.startswith("tensordesc"):
                found = described(value, next(layouts, None))
                if found is None:
                    raise ValueError(f"no package can be made of this network: {what} takes an unknown descriptor")
                address, *told = found
                parameters.append((DESCRIPTOR, *self._memory.place(address, what), *told))
            elif kind in NUMBERS:
                number = NUMBERS[kind]
                parameters.append((number, float(value) if number == FLOAT32 else int(value)))
            else:
                raise ValueError(f"no package can be made of this network: {what} has a parameter of type {kind}")
        return parameters

    # ---- operations

    def _argument(self, value: Any, what: str) -> tuple[Any, ...]:
        if isinstance(value, torch.Tensor):
            return (TENSOR, *self.tensor(value, what)) if value.is_cuda else (HOST, value.detach().clone())
        if isinstance(value, torch.dtype):
            return (DTYPE, self.dtype(value))
        if isinstance(value, torch.device):
            return (DEVICE,)
        if isinstance(value, (list, tuple)):
            return (LIST, [self._argument(item, what) for item in value])
        if isinstance(value, torch.layout):
            value = 0  # strided
        elif isinstance(value, torch.memory_format):
            value = (torch.contiguous_format, torch.preserve_format).index(value)
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"no package can be made of this network: {what} takes a {type(value).__name__}")
        return (PLAIN, value)
