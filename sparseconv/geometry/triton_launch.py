"""Launching Triton kernels at the cost of the driver's call alone, and scratch memory cut from one allocation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

Pointer = Any  # an address on a card; a tensor where kernels are interpreted


@triton.jit
def _probe():
    pass


#: whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors
INTERPRETED = not isinstance(_probe, triton.runtime.JITFunction)
IS_INTERPRETED = tl.constexpr(INTERPRETED)


class Launcher:
    """A jitted function, compiled once for each set of constants and called without looking at its arguments again.

    Triton's own call works out the type, alignment and value class of every argument at each launch, which costs
    several times the driver's launch. Here the types are declared: ``types`` has the torch dtype of each pointer and
    ``int`` for each 32-bit integer; constants follow them in the function's signature. Pointers must be aligned to 16
    bytes; integers are never specialised.

    Example::

        fill = Launcher(fill_kernel, (torch.int32, int), num_warps=4)
        fill(device, (blocks,), (pointer(out), out.numel()), (256,))
    """

    def __init__(self, function: Any, types: Sequence[Any], num_warps: int = 4) -> None:
        self.function, self.types, self.num_warps = function, tuple(types), num_warps
        self._compiled: dict[tuple, Any] = {}

    def __call__(self, device: torch.device, grid: tuple[int, ...], args: tuple, constants: tuple = ()) -> None:
        if INTERPRETED:
            self.function[grid](*args, *constants)
            return
        key = (device.index, constants)
        kernel = self._compiled.get(key)
        if kernel is None:
            kernel = self._compiled[key] = self.compile(constants)
        x, y = grid if len(grid) == 2 else (grid[0], 1)
        stream = driver.active.get_current_stream(device.index)
        kernel.run(x, y, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *args, *constants)

    def compile(self, constants: tuple) -> Any:
        """The compiled kernel for these constants on the current device, loaded."""
        shown = [13 if t is int else t for t in self.types]  # 13: neither 1 nor a multiple of 16
        kernel = self.function.warmup(*shown, *constants, grid=(1,), num_warps=self.num_warps)
        kernel.run  # noqa: B018 (loads the binary)
        return kernel


def pointer(tensor: torch.Tensor) -> Pointer:
    """What a launcher takes for a tensor."""
    return tensor if INTERPRETED else tensor.data_ptr()


class Arena:
    """Arrays cut from one allocation, each aligned to 128 bytes: ``arena[i]`` is the pointer of the i-th.

    ``arrays`` lists (dtype, length); those up to ``zeroed`` start as zeros, the others as whatever the memory held.
    """

    def __init__(self, device: torch.device, arrays: Sequence[tuple[torch.dtype, int]], zeroed: int = 0) -> None:
        starts, total, clean = [], 0, 0
        for index, (dtype, length) in enumerate(arrays):
            starts.append(total)
            total += (length * dtype.itemsize + 127) & -128
            if index < zeroed:
                clean = total
        self.memory = torch.empty(total, dtype=torch.uint8, device=device)
        if clean:
            self.memory[:clean].zero_()
        self._arrays = tuple(arrays)
        self._starts = starts
        self._address = 0 if INTERPRETED else self.memory.data_ptr()

    def __getitem__(self, index: int) -> Pointer:
        return self.tensor(index) if INTERPRETED else self._address + self._starts[index]

    def tensor(self, index: int) -> torch.Tensor:
        """The i-th array as a tensor that keeps the whole arena alive."""
        dtype, length = self._arrays[index]
        start = self._starts[index]
        return self.memory[start : start + length * dtype.itemsize].view(dtype)


def on_device(device: torch.device) -> Any:
    """A context in which kernels go to ``device``; free of charge where it is the current one."""
    if INTERPRETED or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NOTHING = _Nothing()
