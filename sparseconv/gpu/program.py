"""From a kernel and its constants to a launch over one map, at the cost of one C call."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


class Program:
    """A kernel with its constants: compiled once for all maps, launched without a look at its arguments.

    ``types`` are those of the arguments before the constants, as a `Launcher` takes them.
    """

    def __init__(self, kernel: Any, types: Sequence[Any], constants: dict[str, Any], warps: int, stages: int) -> None:
        self.kernel, self.constants = kernel, constants
        self.types, self.warps, self.stages = types, warps, stages

    @cached_property
    def _launcher(self) -> Any:
        from sparseconv.gpu.launcher import Launcher  # Triton is loaded where it is used

        return Launcher(self.kernel, self.types, self.warps, num_stages=self.stages)

    @property
    def _values(self) -> tuple[Any, ...]:
        """The constants in the order of the kernel's signature."""
        return tuple(self.constants[name] for name in self.kernel.arg_names if name in self.constants)

    @cached_property
    def interpreted(self) -> bool:
        """Whether Triton interprets the kernel: it then takes tensors, not addresses."""
        from sparseconv.gpu.launcher import INTERPRETED

        return INTERPRETED

    @cached_property
    def hooks(self) -> Any:
        """Where a profiler leaves what Triton is to call at each launch."""
        from triton import knobs

        return knobs.runtime

    def compile(self) -> None:
        """Compile for the current device without running."""
        self._launcher.compile(self._values)

    def start(self, device_index: int) -> Callable[[int, int, tuple], None]:
        """What launches it on a device: called with both sides of the grid and the arguments before the constants."""
        start: Callable[[int, int, tuple], None] = self._launcher.on(device_index, self._values)
        return start

    def through_triton(self, grid: int, arguments: tuple[Any, ...]) -> None:
        """Launch as Triton does, which looks at every argument: the way of the interpreter and of unaligned views."""
        device = arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[grid, 1, 1](
                *arguments, **self.constants, num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=True
            )


@functools.cache
def program_of(
    kernel: Any, types: tuple[Any, ...], constants: tuple[tuple[str, Any], ...], warps: int, stages: int
) -> Program:
    """The one program of its kind: whoever asks for it again finds it compiled."""
    return Program(kernel, types, dict(constants), warps, stages)


class Fixed:
    """What a map gives the launches over it: arrays, then numbers; their addresses are read once for all of them."""

    __slots__ = ("addresses", "arguments", "bits")

    def __init__(self, arrays: tuple[torch.Tensor, ...], numbers: tuple[int, ...] = ()) -> None:
        self.arguments: tuple[Any, ...] = (*arrays, *numbers)
        addresses = [array.data_ptr() for array in arrays]
        #: the addresses together: a multiple of 16 where all are
        self.bits = functools.reduce(operator.or_, addresses, 0)
        self.addresses = (*addresses, *numbers)


class Launch:
    """A program over one map: ``fixed`` and ``numbers`` come from the map, the call brings the tensors that change."""

    __slots__ = ("_fixed", "_grid", "_numbers", "_program", "_rest", "_start")

    def __init__(self, program: Program, grid: int, fixed: Fixed, numbers: tuple[int, ...] = ()) -> None:
        self._program, self._grid, self._fixed, self._numbers = program, grid, fixed, numbers
        self._rest = fixed.addresses + numbers
        self._start: Callable[[int, int, tuple], None] | None = None

    def compile(self) -> None:
        """Compile without running."""
        self._program.compile()

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream of the tensors' device."""
        start = self._start
        if start is None:
            index = tensors[0].get_device()
            if index < 0 or self._program.interpreted:
                self._through_triton(tensors)
                return
            start = self._start = self._program.start(index)
        pointers, bits = [], self._fixed.bits
        for tensor in tensors:
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            bits |= pointer
        hook = self._program.hooks.launch_enter_hook
        if bits & 15 or (hook is not None and getattr(hook, "calls", hook)):
            self._through_triton(tensors)
        else:
            start(self._grid, 1, (*pointers, *self._rest))

    def _through_triton(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._program.through_triton(self._grid, (*tensors, *self._fixed.arguments, *self._numbers))
