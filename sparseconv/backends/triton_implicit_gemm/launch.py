"""A kernel with everything but its tensors bound: launched at the cost of one C call once it is compiled."""

from __future__ import annotations

from typing import Any

import torch


class Launch:
    """One compiled kernel, its grid and its fixed arguments.

    Triton's own launch looks at every argument to find the compiled kernel again; here the arguments that change are
    pointers alone, so a look at their alignment is enough. Anything else (unaligned views, launch hooks of a profiler,
    the interpreter) takes Triton's way.
    """

    def __init__(
        self, kernel: Any, grid: int, fixed: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int
    ) -> None:
        self.kernel = kernel
        self.grid = (grid, 1, 1)
        self.fixed = fixed
        self.options = {**constants, "num_warps": warps, "num_stages": stages}
        self._rest: tuple[Any, ...] = tuple(f.data_ptr() if isinstance(f, torch.Tensor) else f for f in fixed) + tuple(
            constants.values()
        )
        self._compiled: Any = None

    def compile(self, *tensors: torch.Tensor) -> None:
        """Compile for tensors like these without running."""
        self.kernel.warmup(*tensors, *self.fixed, grid=self.grid, **self.options)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream of the current device."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        if self._compiled is None or bits & 15 or _hooks():
            compiled = self.kernel[self.grid](*tensors, *self.fixed, **self.options)
            if not bits & 15 and hasattr(compiled, "packed_metadata"):
                self._compiled = compiled
            return
        compiled = self._compiled
        stream = _current_stream(tensors[0].get_device())
        compiled.run(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *self._rest
        )


def _hooks() -> bool:
    from triton import knobs

    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def _current_stream(device: int) -> int:
    from triton.runtime import driver

    return driver.active.get_current_stream(device)
