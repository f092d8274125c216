"""Launching Triton kernels at the cost of the driver's call alone, and scratch memory cut from one allocation."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from sparseconv.torch_private import current_device, current_stream, is_capturing

#: programs of a cooperative launch on each multiprocessor, of 128 threads, where they need many of the registers that
#: these share
CREW, REGISTERS = 4, 65_536
#: times that the programs of a cooperative launch may wait for each other
NUM_GATES = 10
#: arguments of the launcher that kernels share: those of the longest, and two that Triton adds
SHARED_ARGUMENTS = 56
Pointer = Any  # an address on a card; a tensor where kernels are interpreted


#: the name of threads that compile ahead
COMPILER = "sparseconv compiler"
#: times that a kernel is compiled ahead before whoever launches it is told what fails
TRIES = 3

#: what the text of a kernel has in it that begins with `follow`, on cards that can launch it early
FOLLOWS = "griddepcontrol.wait"

#: what a launcher is called with that a C compiler made
BUILT_FORM = ("self", "gridX", "gridY", "gridZ", "stream", "function", "args")
_reading = threading.Lock()


@triton.jit
def _probe():
    pass


#: whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors
INTERPRETED = not isinstance(_probe, triton.runtime.JITFunction)
IS_INTERPRETED = tl.constexpr(INTERPRETED)

try:
    from triton.language.extra.cuda import gdc_wait
    from triton.language.target_info import cuda_capability_geq
except ImportError:  # an older Triton

    @triton.jit
    def follow():
        """Nothing: each launch begins when the one before it has ended."""

else:

    @triton.jit
    def follow():
        """First of all in a kernel: wait until the launch before it in its stream has ended.

        A kernel that does so is launched early where the card can (Hopper and later): its programs take their places
        as those before them leave, and the microsecond between two launches is gone.
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

    def __init__(self, function: Any, types: Sequence[Any], num_warps: int = 4, crew: int = 0, **options: Any) -> None:
        self.function, self.types, self.num_warps = function, tuple(types), num_warps
        #: programs on each multiprocessor that run all at once, so that they may wait for each other; 0: they may not
        self.crew = crew
        #: options of the compiler, which joins products and sums into fused ones in every version of Triton
        self.options = {"launch_cooperative_grid": True, "maxnreg": REGISTERS // 128 // crew & -8} if crew else options
        self._ready: dict[tuple, Callable[[int, int, tuple], None]] = {}
        self._compiled: dict[tuple, Future] = {}
        self._begun: set[tuple] = set()
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
            if kernel is not None and kernel.done():
                return self.on(device.index, constants)
            self.ahead(device, constants)
        return ready

    def ahead(self, device: torch.device, constants: tuple) -> None:
        """Compile on a thread of its own what a device will soon be asked to launch; that launch says what fails."""
        if not INTERPRETED and (device.index, constants) not in self._begun:
            self._begun.add((device.index, constants))
            threading.Thread(target=self._compile_for, args=(device, constants), name=COMPILER).start()

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
            shown = [13 if t is int else t for t in self.types]  # 13: neither 1 nor a multiple of 16
            options = {"num_warps": self.num_warps, "enable_fp_fusion": True, **self.options}
            mine.set_result(self.function.warmup(*shown, *constants, grid=(1,), **options))
        except BaseException as error:
            del self._compiled[key]  # who asks again tries again
            mine.set_exception(error)
        return mine.result()

    def _prepare(self, constants: tuple, device_index: int) -> Callable[[int, int, tuple], None]:
        kernel = self.compile(constants)
        rest: tuple = constants
        numbers = all(t is int or isinstance(t, (int, torch.dtype)) for t in self.types)  # 64 bits or fewer
        fits = numbers and len(self.types) + 2 <= SHARED_ARGUMENTS
        if fits and _builds_launchers():
            kernel, rest = _with_shared_launcher(kernel), (0,) * (SHARED_ARGUMENTS - len(self.types))
        run = kernel.run  # loads the binary
        if _entry(run) is None and rest is not constants:  # it asks for scratch memory
            kernel, rest = self.compile(constants), constants
            run = kernel.run
        plain, stream_of = _call_of(kernel, run), driver.active.get_current_stream
        early = _call_of(kernel, _early(run)) if FOLLOWS in kernel.asm.get("ptx", "") else None

        def launch(x: int, y: int, args: tuple) -> None:
            if current_device() != device_index:
                with torch.cuda.device(device_index):
                    return launch(x, y, args)
            start, told = plain if early is None or is_capturing() else early
            start(*((x, y, 1, stream_of(device_index)) + told + args + rest))

        return launch


_SHARED = SimpleNamespace(constants={}, signature=dict.fromkeys(range(SHARED_ARGUMENTS), "i64"))


def _with_shared_launcher(kernel: Any) -> Any:
    """The kernel, to be launched with SHARED_ARGUMENTS 64-bit numbers, of which the card reads those that it declares.

    Addresses and integers come first, then Triton's two addresses of scratch memory, then what is left over.
    """
    kernel = copy.copy(kernel)  # Triton launches its own by the signature that it was compiled for
    kernel.src = _SHARED
    kernel.module = kernel.function = kernel._run = None
    return kernel


@cache
def _builds_launchers() -> bool:
    """Whether this Triton has a C compiler make a launcher for each signature, which takes it half a second."""
    return tuple(inspect.signature(driver.active.launcher_cls.__call__).parameters) == BUILT_FORM


def _build_shared_launcher() -> None:
    names = ("num_ctas", "global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
    with suppress(Exception):  # who launches will say what is wrong
        told = dict.fromkeys((*names, "launch_cooperative_grid", "launch_pdl"), 0)
        driver.active.launcher_cls(_SHARED, SimpleNamespace(**told))


def await_compilers() -> None:
    """Wait for all that is being compiled ahead."""
    for thread in threading.enumerate():
        if thread.name == COMPILER:
            thread.join()


@cache
def read_triton() -> None:
    """Once, whichever threads ask: the digest of Triton's files, which is part of every kernel's name in its cache, and
    what Triton needs of the driver."""
    with _reading, suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
    if _builds_launchers():  # both by a C compiler: what it calls of the driver, then the shared launcher
        threading.Thread(target=_build_shared_launcher, name=COMPILER).start()


def _entry(run: Any) -> tuple[Callable[..., None], tuple[bool, bool]] | None:
    """The C function behind a launcher of Triton that only adds memory for kernels which ask for some, and what it
    is told of cooperation and of overlap; None for kernels that ask, and for launchers of another form."""
    told = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if tuple(inspect.signature(type(run).__call__).parameters) != BUILT_FORM or not all(
        hasattr(run, name) for name in told
    ):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl)


def _call_of(kernel: Any, run: Any) -> tuple[Callable[..., None], tuple]:
    """What launches a kernel, and what it is told between the stream and the kernel's own arguments."""
    at_once = _entry(run)
    start, how = (run, ()) if at_once is None else (at_once[0], (*at_once[1], None, None))
    return start, (kernel.function, *how, kernel.packed_metadata, None, None, None)


def _early(run: Any) -> Any:
    """A launcher of Triton that does not wait for the launch ahead; not for graphs, in which nothing lies between."""
    run = copy.copy(run)
    run.launch_pdl = True
    return run


def ceil_div(a: int, b: int) -> int:
    """The smallest integer that is at least a / b (Triton's own costs microseconds a call)."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def pointer(tensor: torch.Tensor) -> Pointer:
    """What a launcher takes for a tensor."""
    return tensor if INTERPRETED else tensor.data_ptr()


class Kinds(tuple[torch.dtype, ...]):
    """The dtypes of an arena's arrays, one after another."""

    def __init__(self, _: Sequence[torch.dtype]) -> None:
        #: bytes of a number of each
        self.sizes = [dtype.itemsize for dtype in self]


def lay_out(kinds: Kinds, lengths: Sequence[int], start: int = 0) -> tuple[list[int], int]:
    """Where arrays begin that follow one another from ``start``, each aligned to 128 bytes, and where they end."""
    starts = []
    for size, length in zip(kinds.sizes, lengths):
        starts.append(start)
        start += (length * size + 127) & -128
    return starts, start


class Arena(list[Pointer]):
    """The pointers of arrays cut from one allocation, each aligned to 128 bytes.

    ``lengths`` are those of arrays of these ``kinds``, the last of which may be left out; the first ``zeroed`` of them
    start as zeros, the others as the memory was.
    """

    def __init__(self, device: torch.device, kinds: Kinds, lengths: Sequence[int], zeroed: int = 0) -> None:
        starts, total = lay_out(kinds, lengths)
        clean = (starts[zeroed] if zeroed < len(starts) else total) if zeroed else 0
        if clean and clean == total:
            memory = torch.zeros(total, dtype=torch.uint8, device=device)
        else:
            memory = torch.empty(total, dtype=torch.uint8, device=device)
            if clean:
                memory.narrow(0, 0, clean).zero_()
        self._cut(memory, memory.data_ptr(), kinds, lengths, starts)

    @classmethod
    def of(
        cls, memory: torch.Tensor, address: int, kinds: Kinds, lengths: Sequence[int], starts: Sequence[int]
    ) -> Arena:
        """Arrays that begin at these bytes of memory (B,) uint8 at an address, which others may share."""
        arena = cls.__new__(cls)
        arena._cut(memory, address, kinds, lengths, starts)
        return arena

    def _cut(
        self, memory: torch.Tensor, address: int, kinds: Kinds, lengths: Sequence[int], starts: Sequence[int]
    ) -> None:
        self.memory, self._kinds, self._lengths, self._starts = memory, kinds, lengths, starts
        self.extend(map(self.tensor, range(len(lengths))) if INTERPRETED else [address + at for at in starts])

    def length_before(self, index: int) -> int:
        """Bytes before the i-th array."""
        return self._starts[index]

    def length_of(self, index: int) -> int:
        """Numbers of the i-th array."""
        return self._lengths[index]

    def read(self, first: int, last: int) -> list[torch.Tensor]:
        """The arrays from the first to the last of these, on the host, in one copy."""
        begin = self._starts[first]
        end = self._starts[last] + self._lengths[last] * self._kinds.sizes[last]
        host = self.memory.narrow(0, begin, end - begin).cpu()
        parts = []
        for index in range(first, last + 1):
            length = self._lengths[index] * self._kinds.sizes[index]
            parts.append(host.narrow(0, self._starts[index] - begin, length).view(self._kinds[index]))
        return parts

    def tensor(self, index: int) -> torch.Tensor:
        """The i-th array as a tensor that keeps the whole arena alive."""
        length = self._lengths[index] * self._kinds.sizes[index]
        return self.memory.narrow(0, self._starts[index], length).view(self._kinds[index])


@dataclass(frozen=True, eq=False)
class Unseen:
    """What belongs to rows whose number the host does not know: those past ``count`` have a negative batch item."""

    count: torch.Tensor  # (1,) int32
    fault: torch.Tensor  # (1,) int32: the bits of what did not fit since the grid's first table
    gates: torch.Tensor  # for cooperative launches: not those of the stream, for a graph may be replayed on another one


def crew_of(device: torch.device, most: int, each: int = CREW) -> int:
    """How many programs a device holds at once, ``each`` on a multiprocessor and ``most`` at most.

    By default, of a cooperative launch of four warps.

    The interpreter runs programs one after another: one alone waits for nobody.
    """
    return 1 if INTERPRETED else min(most, each * _processors(device.index))


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def gates_of(device: torch.device, unseen: Unseen | None = None) -> Pointer:
    """Counters at which the programs of a cooperative launch meet, all zero between the launches of a stream."""
    if unseen is not None:
        return pointer(unseen.gates)
    if INTERPRETED:
        return torch.zeros(NUM_GATES + 1, dtype=torch.int32)
    return _gates(device.index, current_stream(device.index)).data_ptr()


@cache
def _gates(index: int, stream: int) -> torch.Tensor:
    return torch.zeros(NUM_GATES + 1, dtype=torch.int32, device=torch.device("cuda", index))


@triton.jit
def wait_for_all(gate_ptr, programs):
    """Wait until all programs of a cooperative launch are here and what they wrote can be read.

    A gate serves once, or again for twice, three times the number of programs and so on.
    """
    tl.debug_barrier()
    here = tl.atomic_add(gate_ptr, 1, sem="acq_rel") + 1
    while here < programs:
        here = tl.atomic_add(gate_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def leave(gates_ptr, programs, NUM_GATES: tl.constexpr):
    """The last act of a program of a cooperative launch: whoever is the last sets all gates back."""
    if tl.atomic_add(gates_ptr + NUM_GATES, 1, sem="acq_rel") == programs - 1:
        for gate in tl.static_range(NUM_GATES + 1):
            tl.store(gates_ptr + gate, 0)


if not INTERPRETED and torch.cuda.is_initialized():  # kernels will be asked for: 0.5 s beside the imports that follow
    threading.Thread(target=read_triton, name=COMPILER).start()
