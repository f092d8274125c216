"""LLVM's language, a piece at a time: the values, loops and parts of work of which kernels are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparseconv.backends.llvm_implicit_gemm.operands import APART, PLACES, Shape
from sparseconv.llvm.function import Function
from sparseconv.llvm.target import Target


class Emitter(Function):
    """One function of one module, which takes a pointer to `Operands`."""

    def __init__(self, name: str, shapes: tuple[Shape, ...], double: bool, target: Target) -> None:
        super().__init__(name, numbers=0, arrays=1)
        ir = self.ir
        self.shapes, self.registers = shapes, target.registers
        self.number: Any = ir.DoubleType() if double else ir.FloatType()
        self.size, self.suffix = (8, "f64") if double else (4, "f32")
        self.numbers()
        self.operands = self.array(self.function.args[0], self.i64)
        numbers, rows, places = self.number.as_pointer(), self.i32.as_pointer(), self.i64.as_pointer()
        bytes_ = ir.IntType(8).as_pointer()
        self.kinds = dict.fromkeys(("x", "y", "w", "bias"), numbers) | {
            "ins": rows, "outs": rows, "cuts": places, "bounds": places, "taken": places,
            "out": bytes_, "multiplier": rows, "residual": bytes_,
        }  # fmt: skip
        asking = ir.FunctionType(ir.VoidType(), [bytes_, self.i32, self.i32, self.i32])
        self.prefetch = ir.Function(self.module, asking, "llvm.prefetch.p0")

    def numbers(self) -> None:
        """Set the type of numbers, where it is none of floating point."""

    # ---- control

    @contextmanager
    def parts(self, count: Any) -> Iterator[Any]:
        """For every part below ``count`` that no other thread has taken.

        They are divided into as many regions as threads, and a thread goes through one after another from its own on:
        two that wrote side by side would wait for the same huge page to be cleared.
        """
        arrived = self.b.gep(self.operands, [self.place(PLACES["arrived"])])
        self.thread = own = self.b.atomic_rmw("add", arrived, self.place(1), "monotonic")
        regions = self.given("regions")
        with self.count(self.place(0), regions) as turn:
            region = self.around(self.b.add(own, turn), regions)
            begin, end = (
                self.b.sdiv(self.b.mul(count, at), regions) for at in (region, self.b.add(region, self.place(1)))
            )
            counter = self.b.gep(self.given("taken"), [self.b.mul(region, self.place(APART))])
            take, run, done = (self.function.append_basic_block(name) for name in ("take", "run", "done"))
            self.b.branch(take)
            self.b.position_at_end(take)
            part = self.b.add(begin, self.b.atomic_rmw("add", counter, self.place(1), "monotonic"))
            self.b.cbranch(self.b.icmp_signed("<", part, end), run, done)
            self.b.position_at_end(run)
            yield part
            self.b.branch(take)
            self.b.position_at_end(done)

    @contextmanager
    def taps(self, first: Any) -> Iterator[tuple[Any, Any]]:
        """For every tap in a circle that begins with ``first``: the tap and the one after it."""
        taps = self.given("taps")
        with self.count(self.place(0), taps) as turn:
            tap = self.around(self.b.add(turn, first), taps)
            yield tap, self.around(self.b.add(tap, self.place(1)), taps)

    @contextmanager
    def groups(self, y: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
        """For every group: x, ``y``, w and the bias at its first channels."""
        x, *others = self.given("x"), y, self.given("w"), self.given("bias")
        with self.count(self.place(0), self.given("groups")) as group:
            columns = self.b.mul(group, self.given("c_out"))
            y, w, bias = (self.b.gep(other, [columns]) for other in others)
            yield self.b.gep(x, [self.b.mul(group, self.given("c_in"))]), y, w, bias

    def blocks(self) -> Iterator[tuple[Shape, Any, Any]]:
        """For every block of output channels: its shape, its first channel, and whether it is the last."""
        first = self.place(0)
        for number, shape in enumerate(self.shapes):
            blocks, width = self.given(f"run{number}"), self.place(sum(shape))
            final = self.ir.IntType(1)(number == len(self.shapes) - 1)
            with self.count(self.place(0), blocks) as turn:
                is_last = self.b.and_(final, self.b.icmp_signed("==", self.b.add(turn, self.place(1)), blocks))
                yield shape, self.b.add(first, self.b.mul(turn, width)), is_last
            first = self.b.add(first, self.b.mul(blocks, width))

    def tiled(self, first: Any, last: Any, sizes: set[int]) -> Iterator[tuple[Any, int]]:
        """[first, last) in tiles of the largest size while they fit, then of the next."""
        for size in sorted(sizes, reverse=True):
            whole = self.b.sdiv(self.b.sub(last, first), self.place(size))
            end = self.b.add(first, self.b.mul(whole, self.place(size)))
            with self.count(first, end, size) as at:
                yield at, size
            first = end

    # ---- values

    def place(self, value: int) -> Any:
        return self.i64(value)

    def given(self, name: str) -> Any:
        """A field of the operands."""
        value = self.entry.load(self.entry.gep(self.operands, [self.place(PLACES[name])]))
        return self.entry.inttoptr(value, self.kinds[name]) if name in self.kinds else value

    def edges(self, chunk: Any, tap: Any) -> tuple[Any, Any]:
        """The first edge of a tap in a chunk, and that in the next."""
        taps, bounds = self.given("taps"), self.given("bounds")
        first = self.b.add(self.b.mul(chunk, taps), tap)
        return self.b.load(self.b.gep(bounds, [first])), self.b.load(self.b.gep(bounds, [self.b.add(first, taps)]))

    def row(self, base: Any, rows: str, length: str, edge: Any, after: int) -> Any:
        """Where the row of an edge begins."""
        number = self.b.load(self.b.gep(self.given(rows), [self.b.add(edge, self.place(after))]))
        return self.b.gep(base, [self.b.mul(self.b.sext(number, self.i64), self.given(length))])

    def around(self, number: Any, count: Any) -> Any:
        """A number below ``2 * count`` modulo ``count``."""
        return self.b.select(self.b.icmp_signed("<", number, count), number, self.b.sub(number, count))

    def kind(self, width: int) -> Any:
        return self.ir.VectorType(self.number, width)

    def zero(self, width: int) -> Any:
        return self.ir.Constant(self.kind(width), [0 if self.number is self.i32 else 0.0] * width)

    def added(self, a: Any, b: Any) -> Any:
        return self.b.add(a, b) if self.number is self.i32 else self.b.fadd(a, b)

    def load(self, base: Any, place: Any, width: int) -> Any:
        address = self.b.bitcast(self.b.gep(base, [place]), self.kind(width).as_pointer())
        return self.b.load(address, align=self.size)

    def store(self, value: Any, base: Any, place: Any, width: int) -> None:
        address = self.b.bitcast(self.b.gep(base, [place]), self.kind(width).as_pointer())
        self.b.store(value, address, align=self.size)

    def spread(self, number: Any, width: int) -> Any:
        """A number in every lane."""
        nothing = self.ir.Constant(self.ir.VectorType(number.type, width), self.ir.Undefined)
        first = self.b.insert_element(nothing, number, self.i32(0))
        zeros = self.ir.Constant(self.ir.VectorType(self.i32, width), [0] * width)
        return self.b.shuffle_vector(first, nothing, zeros)

    def fma(self, width: int) -> Any:
        """a * b + c, rounded once where the CPU can: without such an instruction, to round once is a call of libm."""
        name, kind = f"llvm.fmuladd.v{width}{self.suffix}", self.kind(width)
        found = self.module.globals.get(name)
        return found or self.ir.Function(self.module, self.ir.FunctionType(kind, [kind] * 3), name)
