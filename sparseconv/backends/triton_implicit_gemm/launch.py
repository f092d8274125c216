"""From a kernel and its constants to a launch over one map, at the cost of one C call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

_address = torch.Tensor.data_ptr


class Program:
    """A kernel with its constants: compiled once for all maps, launched without a look at its arguments.

    ``types`` are those of the arguments before the constants, as a `Launcher` takes them.
    """

    def __init__(self, kernel: Any, types: Sequence[Any], constants: dict[str, Any], warps: int, stages: int) -> None:
        self.kernel, self.constants = kernel, constants
        self.types, self.warps, self.stages = types, warps, stages
        self._starts: dict[int, Callable[[int, int, tuple], None]] = {}

    @cached_property
    def _launcher(self) -> Any:
        from sparseconv.geometry.triton_launch import Launcher  # Triton is loaded where it is used

        return Launcher(self.kernel, self.types, self.warps, num_stages=self.stages)

    @property
    def interpreted(self) -> bool:
        """Whether Triton interprets the kernel: it then takes tensors, not addresses."""
        from sparseconv.geometry.triton_launch import INTERPRETED

        return INTERPRETED

    @cached_property
    def hooks(self) -> Any:
        """Where a profiler leaves what Triton is to call at each launch."""
        from triton import knobs

        return knobs.runtime

    def compile(self) -> None:
        """Compile for the current device without running."""
        self._launcher.compile(tuple(self.constants.values()))

    def start(self, device_index: int) -> Callable[[int, int, tuple], None]:
        """What launches it on a device: called with both sides of the grid and the arguments before the constants."""
        start = self._starts.get(device_index)
        if start is None:
            start = self._starts[device_index] = self._launcher.on(device_index, tuple(self.constants.values()))
        return start

    def through_triton(self, grid: int, arguments: tuple[Any, ...]) -> None:
        """Launch as Triton does, which looks at every argument: the way of the interpreter and of unaligned views."""
        self.kernel[grid, 1, 1](*arguments, **self.constants, num_warps=self.warps, num_stages=self.stages)


class Launch:
    """A program over one map: ``fixed`` holds what the map gives it, the call brings the tensors that change."""

    __slots__ = ("_bits", "_rest", "_start", "fixed", "grid", "program")

    def __init__(self, program: Program, grid: int, fixed: tuple[Any, ...]) -> None:
        self.program, self.grid, self.fixed = program, grid, fixed
        self._rest: tuple[int, ...] = ()
        self._bits = 0
        self._start: Callable[[int, int, tuple], None] | None = None

    def compile(self) -> None:
        """Compile without running."""
        self.program.compile()

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream of the current device."""
        start = self._start
        if start is None:
            index = tensors[0].get_device()
            if index < 0 or self.program.interpreted:
                self.program.through_triton(self.grid, (*tensors, *self.fixed))
                return
            start = self._prepare(index)
        pointers = tuple(map(_address, tensors))
        bits = self._bits
        for pointer in pointers:
            bits |= pointer
        hook = self.program.hooks.launch_enter_hook
        if bits & 15 or (hook is not None and getattr(hook, "calls", hook)):
            self.program.through_triton(self.grid, (*tensors, *self.fixed))
        else:
            start(self.grid, 1, pointers + self._rest)

    def _prepare(self, index: int) -> Callable[[int, int, tuple], None]:
        self._rest = tuple(_address(f) if isinstance(f, torch.Tensor) else f for f in self.fixed)
        for value, given in zip(self._rest, self.fixed):
            self._bits |= value if isinstance(given, torch.Tensor) else 0
        self._start = self.program.start(index)
        return self._start
