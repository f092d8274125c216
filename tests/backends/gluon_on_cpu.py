"""Gluon kernels as plain Python over numpy.

A module of kernels is executed again with stand-ins for Gluon's own modules, so that what runs is the shipped source.
Copies and products happen at once, and warps of different kinds are threads; what is checked is the arithmetic, the
addresses, and that nobody waits for ever.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

#: seconds after which a wait counts as one for ever
PATIENCE = 20.0


class Tensor(np.ndarray):
    """A numpy array with the few members of a Gluon tensor."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype):
        return self.astype(dtype)


def tensor(value) -> Tensor:
    return np.asarray(value).view(Tensor)


class Pointer:
    """An address in a flat array: the array and one offset or many."""

    def __init__(self, array: np.ndarray, offset=0) -> None:
        self.array, self.offset = array, offset

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.array.dtype)

    def __add__(self, more):
        return Pointer(self.array, self.offset + np.asarray(more, dtype=np.int64))

    __radd__ = __add__

    def __getitem__(self, at):
        return Pointer(self.array, np.asarray(self.offset)[at])


class Shared:
    """A block of shared memory; ``index`` and ``slice`` are views of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def shape(self):
        return self.array.shape

    def index(self, at):
        return Shared(self.array[int(at)])

    def slice(self, start, length, dim=0):
        assert dim == 0
        return Shared(self.array[int(start) : int(start) + int(length)])

    def permute(self, axes):
        return Shared(self.array.transpose(axes))

    def load(self, layout):
        return tensor(self.array)


def _inside(at: np.ndarray, array: np.ndarray) -> None:
    assert ((at >= 0) & (at < array.size)).all(), "an address outside the array"


def load(pointer: Pointer, mask=None, other=0):
    at = np.asarray(pointer.offset)
    if mask is None:
        _inside(at, pointer.array)
        return tensor(pointer.array[at])
    at, mask = np.broadcast_arrays(at, mask)
    _inside(at[mask], pointer.array)
    return tensor(np.where(mask, pointer.array[np.where(mask, at, 0)], np.asarray(other, pointer.array.dtype)))


def store(pointer: Pointer, value, mask) -> None:
    at, mask, value = np.broadcast_arrays(np.asarray(pointer.offset), mask, np.asarray(value))
    pointer.array[at[mask]] = value[mask]


def copy(shared: Shared, pointer: Pointer, mask=None) -> None:
    shared.array[...] = load(pointer, True if mask is None else mask)


class Barrier:
    """A barrier in shared memory: a phase ends when nobody is missing any more and all bytes have landed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.ended = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int = 1, size: int = 0, pred=True) -> None:
        if not pred:
            return
        with self.changed:
            self.missing -= int(count)
            self.bytes += int(size)
            assert self.missing >= 0, "more arrivals than the barrier was made for"
            if self.missing == self.bytes == 0:
                self.missing = self.count
                self.ended += 1
                self.changed.notify_all()

    def expect(self, size: int, pred=True) -> None:
        self.arrive(1, size, pred)

    def land(self, size: int) -> None:
        assert self.bytes >= size, "bytes landed that nobody expected"
        self.arrive(0, -size)

    def wait(self, parity) -> None:
        with self.changed:
            ended = self.changed.wait_for(lambda: self.ended % 2 != int(parity), PATIENCE)
        assert ended, "a card would wait here for ever"

    def invalidate(self) -> None:
        self.init(0)


class Barriers:
    """Some of them side by side."""

    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, at) -> Barrier:
        return self.all[int(at)]


class Matrix:
    """The matrix that a descriptor describes."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


def copy_tile(matrix: Matrix, first, barrier: Shared, shared: Shared, pred=True) -> None:
    if pred:
        row, column = map(int, first)
        rows, columns = shared.array.shape
        tile = matrix.array[row : row + rows, column : column + columns]
        assert tile.shape == shared.array.shape, "a tile that hangs over the edge"
        shared.array[...] = tile
        barrier.land(tile.size * matrix.array.itemsize)


class Kernel:
    """A jitted function called directly; its launches run one program after another."""

    def __init__(self, fn) -> None:
        self.fn = fn
        self.names = list(inspect.signature(fn).parameters)

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


def _check(condition) -> None:
    assert condition


def modules(state: threading.local) -> dict[str, ModuleType]:
    """Stand-ins for the modules that kernels import, by name."""
    int64, float32, float16 = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.float16)

    def mma(a, b, acc, is_async=True):
        return tensor(acc + a.array.astype(np.float32) @ b.array.astype(np.float32))

    language = ModuleType("language")
    language.__dict__.update(
        constexpr=lambda value: value, static_assert=_check,
        int64=int64, int32=np.dtype(np.int32), float32=float32, float16=float16,
        arange=lambda a, b, layout=None: tensor(np.arange(a, b, dtype=np.int32)),
        zeros=lambda shape, dtype, layout=None: tensor(np.zeros(shape, dtype)),
        load=load, store=store, minimum=min, maximum=np.maximum, static_range=range,
        where=lambda c, a, b: a if c else b,
        program_id=lambda axis: state.program, num_programs=lambda axis: state.programs, num_warps=lambda: state.warps,
        convert_layout=lambda value, layout: value,
        allocate_shared_memory=lambda dtype, shape, layout: Barriers(shape[0]) if layout == "barriers"
        else Shared(np.full(shape, np.nan, np.float32)),
        BlockedLayout=lambda *a, **k: None, SliceLayout=lambda *a: None, NVMMASharedLayout=lambda **k: None,
        NVMMADistributedLayout=lambda **k: None, SwizzledSharedLayout=lambda *a: None, DotOperandLayout=lambda *a: None,
    )  # fmt: skip
    cp = ModuleType("async_copy")
    cp.async_copy_global_to_shared = copy
    cp.commit_group = lambda: None
    cp.wait_group = lambda n: None
    hopper = ModuleType("hopper")
    hopper.__dict__.update(
        async_copy=cp, fence_async_shared=lambda: None, warpgroup_mma=mma,
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: "barriers", init=Barrier.init, expect=Barrier.expect, arrive=Barrier.arrive,
            wait=Barrier.wait, invalidate=Barrier.invalidate,
        ),
        tma=SimpleNamespace(async_copy_global_to_shared=copy_tile),
        warpgroup_mma_wait=lambda num_outstanding, deps: deps[0],
    )  # fmt: skip
    ampere = ModuleType("ampere")
    ampere.async_copy = cp
    ampere.mma_v2 = lambda a, b, acc, input_precision=None: tensor(acc + a @ b)
    gluon = ModuleType("gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = Kernel, lambda fn: fn, language
    root = "triton.experimental"
    nvidia = f"{root}.gluon.language.nvidia"
    return {
        root: ModuleType(root), f"{root}.gluon": gluon, f"{root}.gluon.language": language, nvidia: ModuleType(nvidia),
        f"{nvidia}.ampere": ampere, f"{nvidia}.hopper": hopper,
    }  # fmt: skip


class Program:
    """The kernels of some modules."""

    def __init__(self, *names: str) -> None:
        self._state = threading.local()
        stand_ins = modules(self._state)
        stand_ins["triton.experimental"].gluon = stand_ins["triton.experimental.gluon"]
        self.space: dict = {}
        with _imports(stand_ins):
            for name in names:
                path = Path(importlib.util.find_spec(name).origin)
                module = sys.modules[name] = ModuleType(name)
                exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
                self.space.update(module.__dict__)
            for name in names:
                del sys.modules[name]

    def launch(self, name: str, grid: int, warps: int, *arguments, **constants) -> None:
        """Run every program of a grid, one after another; arrays are passed by their address."""
        for program in range(grid):
            self._state.program, self._state.programs, self._state.warps = program, grid, warps
            self.space[name](*map(_argument, arguments), **constants)


def _argument(value):
    if isinstance(value, Matrix):
        return value
    return Pointer(value.reshape(-1)) if isinstance(value, np.ndarray) else tensor(np.int64(value))


@contextmanager
def _imports(stand_ins: dict[str, ModuleType]):
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
