"""A function in LLVM's language, a piece at a time: its arguments, loops, variables and arrays."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparseconv.llvm.target import binding


def _source(module: str) -> str | None:
    """SHA-256 of a module's file; None where it has none."""
    file = getattr(sys.modules[module], "__file__", None)
    try:
        return file and hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


class Function:
    """One function of one module, which takes int64 ``numbers`` and then addresses of ``arrays``.

    It returns an int64 where it ``returns`` anything. Methods add to its body where ``b``, the builder, stands. A
    method of the function's own name writes the whole.
    """

    #: what `_source` says of the class and of those above it, read when they are loaded: a later edit is not theirs
    sources: tuple[str | None, ...] = (_source(__name__),)

    def __init_subclass__(cls) -> None:
        cls.sources = (*cls.sources, _source(cls.__module__))

    def __init__(self, name: str, numbers: int, arrays: int, returns: bool = False) -> None:
        from llvmlite import ir

        self.ir, self.i32, self.i64 = ir, ir.IntType(32), ir.IntType(64)
        self.module = ir.Module(name)
        self.module.triple = binding().get_default_triple()
        arguments = [self.i64] * numbers + [ir.IntType(8).as_pointer()] * arrays
        kind = ir.FunctionType(self.i64 if returns else ir.VoidType(), arguments)
        self.function = ir.Function(self.module, kind, name)
        self.entry = ir.IRBuilder(self.function.append_basic_block("entry"))  # where variables are made
        self.b = ir.IRBuilder(self.function.append_basic_block("body"))

    def text(self, *sizes: Any) -> str:
        """The module in LLVM's language."""
        text: str = getattr(self, self.module.name)(*sizes)
        return text

    # ---- control

    @contextmanager
    def count(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """For every number from ``start`` below ``stop``."""
        step = self.i64(step) if isinstance(step, int) else step
        at = self.variable(self.i64(start) if isinstance(start, int) else start)
        with self.during(lambda: self.b.icmp_signed("<", self.b.load(at), stop)):
            now = self.b.load(at)
            yield now
            self.b.store(self.b.add(now, step), at)

    @contextmanager
    def during(self, holds: Callable[[], Any]) -> Iterator[None]:
        """Again and again while what ``holds`` writes down is true."""
        look, run, done = (self.function.append_basic_block(name) for name in ("look", "run", "done"))
        self.b.branch(look)
        self.b.position_at_end(look)
        self.b.cbranch(holds(), run, done)
        self.b.position_at_end(run)
        yield
        self.b.branch(look)
        self.b.position_at_end(done)

    def finished(self, *result: Any) -> str:
        """The whole module, once its function returns."""
        self.b.ret(*result) if result else self.b.ret_void()
        self.entry.branch(self.function.blocks[1])
        return str(self.module)

    # ---- values

    def variable(self, value: Any) -> Any:
        """A place that holds a value, in a register once LLVM has seen it."""
        place = self.entry.alloca(value.type)
        self.b.store(value, place)
        return place

    def array(self, address: Any, kind: Any) -> Any:
        """An argument as the address of numbers of a kind."""
        return self.entry.bitcast(address, kind.as_pointer())

    def read(self, array: Any, place: Any) -> Any:
        """A number of an array, an int32 in 64 bits."""
        value = self.b.load(self.b.gep(array, [place]))
        return self.b.sext(value, self.i64) if value.type == self.i32 else value

    def write(self, array: Any, place: Any, value: Any) -> None:
        """A number, in the fewer bits of the array where it has fewer."""
        kind = array.type.pointee
        if value.type == self.i64 and kind == self.i32:
            value = self.b.trunc(value, kind)
        elif value.type != kind:
            value = self.b.fptrunc(value, kind)
        self.b.store(value, self.b.gep(array, [place]))

    def least(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def most(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", a, b), b, a)
