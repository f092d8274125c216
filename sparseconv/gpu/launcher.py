"""Launching Triton kernels at the cost of the driver's call alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq
from triton.runtime import driver

from sparseconv.gpu.compiling.job import Job, compile_kernel, job_of, put_mark
from sparseconv.gpu.compiling.pool import Pool, current_target, pool_of, wait_for_pools
from sparseconv.gpu.launch_log import listeners, tell
from sparseconv.gpu.triton_private import (
    SHARED_ARGUMENTS,
    build_shared_launcher,
    builds_launchers,
    call_of,
    early,
    entry_of,
    with_shared_launcher,
)
from sparseconv.torch_private import current_device, is_capturing

#: programs of a cooperative launch on each multiprocessor, of 128 threads, where they need many of the registers that
#: these share
RESIDENT, REGISTERS = 4, 65_536
Pointer = Any  # an address on a card; a tensor where kernels are interpreted


#: the name of threads that compile ahead
COMPILER = "sparseconv compiler"
#: seconds that a thread of Python computes, at most, while Triton's files are read; Python's own number is 0.005
TURN = 0.0002
#: times that a kernel is compiled ahead before whoever launches it is told what fails
TRIES = 3

#: what the text of a kernel has in it that begins with `follow`, on cards that can launch it early
FOLLOWS = "griddepcontrol.wait"

_reading, _starting = threading.Lock(), threading.Lock()


@triton.jit
def _probe():
    pass


#: whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors
INTERPRETED = not isinstance(_probe, triton.runtime.JITFunction)
IS_INTERPRETED = tl.constexpr(INTERPRETED)


def constant(value: Any) -> Any:
    """A number of a module that its kernels know when they are compiled; as it is for the interpreter, whose kernels
    are plain Python and may shift by it."""
    return value if INTERPRETED else tl.constexpr(value)


@triton.jit
def follow():
    """First of all in a kernel: wait until the launch before it in its stream has ended.

    A kernel that does so is launched early where the card can (Hopper and later): its programs take their places as
    those before them leave, and the microsecond between two launches is gone.
    """
    if not IS_INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()


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
        self.options = (
            {"launch_cooperative_grid": True, "maxnreg": REGISTERS // 128 // resident & -8} if resident else options
        )
        self._ready: dict[tuple, Callable[[int, int, tuple], None]] = {}
        self._compiled: dict[tuple, Future] = {}
        self._begun: set[tuple] = set()
        #: the jobs of those that are compiled beside this process
        self._jobs: dict[tuple, Job] = {}
        #: what threads of their own failed with, who try again a few times
        self.failures: dict[tuple, list[Exception]] = {}

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

    def if_ready(self, device: torch.device, constants: tuple) -> Callable[[int, int, tuple], None] | None:
        """What launches, where no compiler is waited for; else its thread is started, and None."""
        ready = self._ready.get((device.index, constants))
        if ready is None and INTERPRETED:
            return lambda x, y, args: self.function[x, y](*args, *constants)
        if ready is None:
            kernel = self._compiled.get((device.index, constants))
            job, pool = self._jobs.get((device.index, constants)), compilers_for(device.index)
            is_cached = job is not None and pool is not None and job.mark in pool.done
            if is_cached or (kernel is not None and kernel.done()):
                return self.on(device.index, constants)
            self.ahead(device, constants)
        return ready

    def ahead(self, device: torch.device, constants: tuple) -> None:
        """Compile what a device will soon be asked to launch, in a process beside this one or on a thread of its own;
        that launch says what fails."""
        key = device.index, constants
        if INTERPRETED or (key in self._begun and key not in self._jobs):
            return
        if self._give_away(key):
            return
        self._begun.add(key)
        threading.Thread(target=self._compile_for, args=(device, constants), name=COMPILER).start()

    def _give_away(self, key: tuple) -> bool:
        """Whether a process beside this one compiles a kernel, or has, or Triton's cache has it."""
        if key in self._compiled:
            return True
        index, constants = key
        pool = compilers_for(index)
        if pool is None:
            return False
        job = self._jobs.get(key)
        if job is None and pool.is_usable:
            job = job_of(self.function, self.types, constants, self._all_options, pool.target)
        if job is None or not pool.submit(job):
            self._jobs.pop(key, None)
            return False
        self._jobs[key] = job
        self._begun.add(key)
        return True

    @property
    def _all_options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True, **self.options}

    def _compile_for(self, device: torch.device, constants: tuple) -> None:
        key = device.index, constants
        try:
            with torch.cuda.device(device):
                self.compile(constants)
        except Exception as error:
            failures = self.failures.setdefault(key, [])
            failures.append(error)
            if len(failures) < TRIES:
                self._begun.discard(key)

    def compile(self, constants: tuple) -> Any:
        """Triton's compiled kernel for these constants on the current device; once, whichever threads ask."""
        mine: Future = Future()
        key = torch.cuda.current_device(), constants
        found = self._compiled.setdefault(key, mine)
        if found is not mine:
            return found.result()
        try:
            read_triton()
            job, pool = self._jobs.get(key), compilers_for(key[0]) if key in self._jobs else None
            if job is not None and pool is not None:
                pool.take(job.mark)
            mine.set_result(compile_kernel(self.function, self.types, constants, self._all_options))
            if job is not None:
                put_mark(job.mark)
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
        plain, stream_of = call_of(kernel, run), driver.active.get_current_stream
        overlapped = call_of(kernel, early(run)) if FOLLOWS in kernel.asm.get("ptx", "") else None

        def launch(x: int, y: int, args: tuple) -> None:
            if current_device() != device_index:
                with torch.cuda.device(device_index):
                    return launch(x, y, args)
            if listeners:
                tell(compiled, (x, y, 1), args)
            stream = stream_of(device_index)
            start, told = plain
            if overlapped is not None and (stream == 0 or not is_capturing()):  # CUDA captures no default stream
                start, told = overlapped
            start(*((x, y, 1, stream) + told + args + rest))

        return launch


def compilers_for(index: int) -> Pool | None:
    """The processes that compile for a device; None where Triton has no driver for it."""
    try:
        return pool_of(current_target(index))
    except (RuntimeError, AssertionError):
        return None


def await_compilers() -> None:
    """Wait for all that is being compiled ahead."""
    wait_for_pools()
    for thread in threading.enumerate():
        if thread.name == COMPILER:
            thread.join()


def read_triton() -> None:
    """What Triton needs before its first kernel, done once, whichever threads ask."""
    for part in (read_files, start_driver):
        part()


def read_files() -> None:
    """The digest of Triton's files, which is part of every kernel's name in its cache."""
    with _reading:
        _files()


def start_driver() -> None:
    """What Triton calls of the card's driver, and the launcher that kernels share: both by a C compiler at first."""
    with _starting:
        _driver()


@cache
def _files() -> None:
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        with short_turns():
            triton_key()


@contextmanager
def short_turns() -> Iterator[None]:
    """Within it, Python's threads wait for `TURN` seconds at most until another one, which computes, lets them go on.

    A thread that reads a large file asks for its turn at each piece. What somebody else sets meanwhile stays.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, TURN))
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:
            sys.setswitchinterval(before + 5e-7)  # Python cuts off what is no whole microsecond


@cache
def _driver() -> None:
    if builds_launchers():
        threading.Thread(target=build_shared_launcher, name=COMPILER).start()


def ceil_div(a: int, b: int) -> int:
    """The smallest integer that is at least a / b (Triton's own costs microseconds a call)."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def pointer(tensor: torch.Tensor) -> Pointer:
    """What a launcher takes for a tensor."""
    return tensor if INTERPRETED else tensor.data_ptr()


if not INTERPRETED and torch.cuda.is_initialized():  # kernels will be asked for: during the imports that follow
    for _part in (read_files, start_driver):
        threading.Thread(target=_part, name=COMPILER).start()
