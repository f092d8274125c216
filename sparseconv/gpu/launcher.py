"""Launching Triton kernels at the cost of the driver's call alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq
from triton.runtime import driver
from triton.runtime.jit import constexpr_function

from sparseconv.gpu.cuda_capability import PTX_FROM
from sparseconv.gpu.launch_log import listeners, tell
from sparseconv.gpu.triton_private import (
    SHARED_ARGUMENTS,
    builds_launchers,
    call_of,
    entry_of,
    fix_cache_key,
    with_shared_launcher,
)
from sparseconv.torch_private import current_device

#: programs of a cooperative launch on each multiprocessor, of 128 threads, where they need many of the registers that
#: these share
RESIDENT, REGISTERS = 4, 65_536
Pointer = Any  # an address on a GPU; a tensor where kernels are interpreted


@triton.jit
def _probe():
    pass


#: whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors
INTERPRETED = not isinstance(_probe, triton.runtime.JITFunction)
IS_INTERPRETED = tl.constexpr(INTERPRETED)


@constexpr_function
def has_ptx():
    """Whether a kernel is compiled with inline PTX; else with the plain forms, which the interpreter runs, too."""
    return not INTERPRETED and cuda_capability_geq(*PTX_FROM)


def constant(value: Any) -> Any:
    """A number of a module that its kernels know when they are compiled; as it is for the interpreter, whose kernels
    are plain Python and may shift by it."""
    return value if INTERPRETED else tl.constexpr(value)


def room_for(programs: int) -> dict[str, int]:
    """Triton's option that leaves registers for so many programs on each multiprocessor."""
    if torch.version.hip is None:
        return {"maxnreg": REGISTERS // 128 // programs & -8}
    return {"waves_per_eu": ceil_div(programs, 2)}  # of 64 threads, on four units


class Launcher:
    """A jitted function, compiled once for each set of constants and launched without a look at its arguments.

    Triton's own call works out the type, alignment and value class of every argument at each launch, which costs
    several times the driver's launch. Here the types are declared: ``types`` has the torch dtype of each pointer and
    ``int`` for each 32-bit integer; constants follow them in the function's signature. Pointers must be aligned to 16
    bytes; integers are not specialised, but for those declared by an example (16: a multiple of 16).

    Example::

        fill = Launcher(fill_kernel, (torch.int32, int), num_warps=4)
        fill(device, (blocks,), (pointer(out), out.numel()), (256,))
    """

    def __init__(
        self, function: Any, types: Sequence[Any], num_warps: int = 4, resident: int = 0, **options: Any
    ) -> None:
        self.function, self.types, self.num_warps = function, tuple(types), num_warps
        #: programs on each multiprocessor that run all at once, so that they may wait for each other; 0: they may not
        self.resident = resident
        #: options of the compiler, which joins products and sums into fused ones in every version of Triton
        self.options = {"launch_cooperative_grid": True, **room_for(resident)} if resident else options
        self._ready: dict[tuple, Callable[[int, int, tuple], None]] = {}
        self._compiled: dict[tuple, Future] = {}

    def __call__(self, device: torch.device, grid: tuple[int, ...], args: tuple, constants: tuple = ()) -> None:
        if INTERPRETED:
            self.function[grid](*args, *constants)
            return
        ready = self._ready.get((device.index, constants)) or self.on(device.index, constants)
        ready(grid[0], grid[1] if len(grid) > 1 else 1, args)

    def on(self, device_index: int, constants: tuple) -> Callable[[int, int, tuple], None]:
        """What launches on a device with these constants: called with both sides of the grid and the arguments."""
        ready = self._ready.get((device_index, constants))
        if ready is None:
            with torch.cuda.device(device_index):
                ready = self._ready[device_index, constants] = self._prepare(constants, device_index)
        return ready

    def compile(self, constants: tuple) -> Any:
        """Triton's compiled kernel for these constants on the current device; once, whichever threads ask."""
        mine: Future = Future()
        key = torch.cuda.current_device(), constants
        found = self._compiled.setdefault(key, mine)
        if found is not mine:
            return found.result()
        try:
            for value in (self.function, *constants):
                fix_cache_key(value)
            warps = self.num_warps  # of 32 threads; AMD's may have 64
            if torch.version.hip is not None:
                warps = max(1, warps * 32 // driver.active.get_current_target().warp_size)
            options = {"num_warps": warps, "enable_fp_fusion": True, **self.options}
            examples = [13 if kind is int else kind for kind in self.types]  # neither 1 nor a multiple of 16
            mine.set_result(self.function.warmup(*examples, *constants, grid=(1,), **options))
        except BaseException as error:
            del self._compiled[key]  # who asks again tries again
            mine.set_exception(error)
        return mine.result()

    def _prepare(self, constants: tuple, device_index: int) -> Callable[[int, int, tuple], None]:
        kernel = compiled = self.compile(constants)
        rest: tuple = constants
        numbers = all(t is int or isinstance(t, (int, torch.dtype)) for t in self.types)  # 64 bits or fewer
        fits = numbers and len(self.types) + 2 <= SHARED_ARGUMENTS
        if fits and builds_launchers():
            kernel, rest = with_shared_launcher(kernel), (0,) * (SHARED_ARGUMENTS - len(self.types))
        run = kernel.run  # loads the binary
        if entry_of(run) is None and rest is not constants:  # it asks for scratch memory
            kernel, rest = compiled, constants
            run = kernel.run
        (start, fixed), stream_of = call_of(kernel, run), driver.active.get_current_stream

        def launch(x: int, y: int, args: tuple) -> None:
            if current_device() != device_index:
                with torch.cuda.device(device_index):
                    return launch(x, y, args)
            if listeners:
                tell(compiled, (x, y, 1), args)
            start(*((x, y, 1, stream_of(device_index)) + fixed + args + rest))

        return launch


def ceil_div(a: int, b: int) -> int:
    """The smallest integer that is at least a / b (Triton's own costs microseconds a call)."""
    return -(-a // b)


def pointer(tensor: torch.Tensor) -> Pointer:
    """What a launcher takes for a tensor."""
    return tensor if INTERPRETED else tensor.data_ptr()
