"""The loops of a sparse convolution on a CPU, written in LLVM's language for shapes of blocks of output channels.

Nothing is gathered and nothing is scattered: a tile of edges of one tap holds its sums in vector registers, reads its
input rows where they lie, a channel at a time, and adds itself to its output rows, which one thread owns and the caches
hold. The weight's gradient holds a tile of the weight in registers and runs over edges.

Over int8 features some channels are one number of 32 bits, and the sums are int32. Two channels of 16 bits are
multiplied (``pairs``) by x86's ``pmaddwd`` and an addition. Where no feature is negative, as after a ReLU, four
channels of 8 bits are (``quads``), by ``pmaddubsw``, ``pmaddwd`` and an addition: its sums of two products are at most
2 * 127 * 127, which 16 bits hold, so nothing saturates. Elsewhere both are written with shifts. Each thread rescales
the rows of a chunk while the caches hold their sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import groupby, pairwise
from typing import Any

import torch

from sparseconv.backends.integers import LARGEST, SLOPE_BITS
from sparseconv.llvm.compile import compiled
from sparseconv.llvm.function import Function
from sparseconv.llvm.target import Target, binding, host

APART = 8  # places from a counter of parts to the next, which another thread counts up
RUNS = 4  # of blocks of one shape, at most

Shape = tuple[int, ...]  # of a block: the widths of its vectors


class Operands(ctypes.Structure):
    """All strides are in elements, and all rows dense in their channels."""

    NUMBERS = (
        "arrived",
        "regions",
        "parts",
        "chunks",
        "taps",
        "groups",
        "c_in",
        "c_out",
        "in_row",
        "out_row",
        "w_row",
        "w_tap",
        "w_part",
        "y_part",
        "edges",
        "whole",
        *(f"run{i}" for i in range(RUNS)),  # blocks of each run
        *("shift", "residual_multiplier", "slope", "low"),  # of a rescale of integers
    )
    ARRAYS = ("x", "y", "w", "bias", "ins", "outs", "cuts", "bounds", "taken", "out", "multiplier", "residual")
    _fields_ = [(name, ctypes.c_int64) for name in NUMBERS] + [(name, ctypes.c_void_p) for name in ARRAYS]


PLACES = {name: place for place, name in enumerate(Operands.NUMBERS + Operands.ARRAYS)}


def columns(channels: int, vector: int, most: int) -> list[tuple[Shape, int]]:
    """Channels cut into blocks of at most ``most`` vectors: runs of (shape, blocks of it), in order of channels.

    Blocks have as many vectors as one another, or one more. Only the last vectors are narrower than ``vector``, and
    their widths are powers of two. So the shapes of all numbers of channels are few, and kernels that loop over runs
    serve every number with the same shapes.

    >>> columns(20, 16, 4)
    [((16, 4), 1)]
    >>> columns(1000, 8, 2)
    [((8,), 1), ((8, 8), 62)]
    """
    rest = channels % vector
    narrow = [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
    widths = [vector] * (channels // vector) + narrow
    blocks = -(-len(widths) // most)
    size, larger = divmod(len(widths), max(1, blocks))
    cuts = [min(i, blocks - larger) * size + max(0, i - blocks + larger) * (size + 1) for i in range(blocks + 1)]
    shapes = [tuple(widths[a:b]) for a, b in pairwise(cuts)]
    return [(shape, len(list(same))) for shape, same in groupby(shapes)]


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
        regions = self.operand("regions")
        with self.count(self.place(0), regions) as turn:
            region = self.wrapped(self.b.add(own, turn), regions)
            begin, end = (
                self.b.sdiv(self.b.mul(count, at), regions) for at in (region, self.b.add(region, self.place(1)))
            )
            counter = self.b.gep(self.operand("taken"), [self.b.mul(region, self.place(APART))])
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
        taps = self.operand("taps")
        with self.count(self.place(0), taps) as turn:
            tap = self.wrapped(self.b.add(turn, first), taps)
            yield tap, self.wrapped(self.b.add(tap, self.place(1)), taps)

    @contextmanager
    def groups(self, y: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
        """For every group: x, ``y``, w and the bias at its first channels."""
        x, *others = self.operand("x"), y, self.operand("w"), self.operand("bias")
        with self.count(self.place(0), self.operand("groups")) as group:
            columns = self.b.mul(group, self.operand("c_out"))
            y, w, bias = (self.b.gep(other, [columns]) for other in others)
            yield self.b.gep(x, [self.b.mul(group, self.operand("c_in"))]), y, w, bias

    def blocks(self) -> Iterator[tuple[Shape, Any, Any]]:
        """For every block of output channels: its shape, its first channel, and whether it is the last."""
        first = self.place(0)
        for number, shape in enumerate(self.shapes):
            blocks, width = self.operand(f"run{number}"), self.place(sum(shape))
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

    def operand(self, name: str) -> Any:
        """A field of the operands."""
        value = self.entry.load(self.entry.gep(self.operands, [self.place(PLACES[name])]))
        return self.entry.inttoptr(value, self.kinds[name]) if name in self.kinds else value

    def edges(self, chunk: Any, tap: Any) -> tuple[Any, Any]:
        """The first edge of a tap in a chunk, and that in the next."""
        taps, bounds = self.operand("taps"), self.operand("bounds")
        first = self.b.add(self.b.mul(chunk, taps), tap)
        return self.b.load(self.b.gep(bounds, [first])), self.b.load(self.b.gep(bounds, [self.b.add(first, taps)]))

    def row(self, base: Any, rows: str, length: str, edge: Any, after: int) -> Any:
        """Where the row of an edge begins."""
        number = self.b.load(self.b.gep(self.operand(rows), [self.b.add(edge, self.place(after))]))
        return self.b.gep(base, [self.b.mul(self.b.sext(number, self.i64), self.operand(length))])

    def wrapped(self, number: Any, count: Any) -> Any:
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


#: input channels whose weights are multiplied before the next: 16 KB of them beside 64 output channels of fp32
DEPTH = 64
LINE = 64  # bytes of a cache line


@lru_cache(256)
def runs(channels: int, double: bool, target: Target) -> list[tuple[Shape, int]]:
    """The blocks of output channels of a group that ``target``'s registers hold, see `columns`."""
    return columns(channels, target.lanes(8 if double else 4), 4 if target.registers == 32 else 2)


@cache
def kernel(kind: str, shapes: tuple[Shape, ...], alone: bool, double: bool, target: Target) -> int:
    """The address of ``forward`` or ``weight_grad`` (pointer to `Operands`) for runs of blocks of these ``shapes``.

    How many blocks a run has is an operand, ``run0`` to ``run3``; ``alone`` says that there is one block in all.

    ``forward``: for every part (a chunk of rows [cuts[i], cuts[i+1])), y = bias + the sum over taps k and edges
    [bounds[i, k], bounds[i+1, k]) of x[ins] @ w[k]. The tap ``whole``, one with an edge for every row, comes first and
    begins the rows, which it need not read; -1 where there is none. ``weight_grad``: every part p takes the chunks p,
    p + parts, ..., and adds x[ins]^T @ y[outs] to the weight gradient of its own, ``w_part`` elements after the last.
    Each of ``regions`` threads calls it once; ``taken`` holds ``APART`` zeros for each.
    """
    return compiled(Loops, (kind, shapes, double, target), kind, target, *((alone,) if kind == "weight_grad" else ()))


class Loops(Emitter):
    # ---- the two loops

    def forward(self) -> str:
        c_in, w_row, whole = self.operand("c_in"), self.operand("w_row"), self.operand("whole")
        nought, none = self.place(0), self.b.icmp_signed("<", whole, self.place(0))
        with self.parts(self.operand("chunks")) as chunk:
            sums = self.sums(chunk)
            with self.b.if_then(none):
                self.start_rows(chunk, sums)
            with self.taps(self.b.select(none, nought, whole)) as (tap, later):
                first, last = self.edges(chunk, tap)
                with self.groups(sums) as (x, y, w, bias):
                    w, then = (self.b.gep(w, [self.b.mul(t, self.operand("w_tap"))]) for t in (tap, later))
                    with self.count(nought, c_in, DEPTH) as start:
                        stop = self.least(self.b.add(start, self.place(DEPTH)), c_in)
                        begins = self.b.and_(
                            self.b.icmp_signed("==", tap, whole), self.b.icmp_signed("==", start, nought)
                        )
                        deeper = self.b.icmp_signed("<", stop, c_in)
                        after = self.b.select(deeper, self.b.gep(w, [self.b.mul(stop, w_row)]), then)
                        here = self.b.gep(w, [self.b.mul(start, w_row)])
                        for block, column, is_last in self.blocks():
                            near, own, begin = (self.b.gep(base, [column]) for base in (y, w, bias))
                            following = self.b.gep(here, [self.b.add(column, self.place(sum(block)))])
                            coming = self.b.select(is_last, after, following)
                            most = self.edges_together(block)
                            for edge, rows in self.tiled(first, last, {most, 4, 1}):
                                ahead = None
                                if rows == most and len(block) > 2:
                                    self.announce(x, edge, rows, last, start)
                                    ahead = self.share(coming, edge, rows, block)
                                self.product(x, near, own, begin, w_row, edge, rows, block, start, stop, ahead, begins)
            self.finish_rows(chunk, sums)
        return self.finished()

    def weight_grad(self, alone: bool) -> str:
        c_in, w_row, chunks = (self.operand(name) for name in ("c_in", "w_row", "chunks"))
        with (
            self.parts(self.operand("parts")) as part,
            self.count(part, chunks, self.operand("parts")) as chunk,
            self.taps(self.place(0)) as (tap, later),
        ):
            first, last = self.edges(chunk, tap)
            upcoming, _ = self.edges(chunk, later)
            _, total = self.edges(self.b.sub(chunks, self.place(1)), self.b.sub(self.operand("taps"), self.place(1)))
            with self.groups(self.operand("y")) as (x, y, w, _):
                w = self.b.gep(w, [self.b.mul(part, self.operand("w_part"))])
                w, then = (self.b.gep(w, [self.b.mul(t, self.operand("w_tap"))]) for t in (tap, later))
                step = self.operand("edges")
                with self.count(first, last, step) as start:
                    stop = self.least(self.b.add(start, step), last)
                    more = self.b.icmp_signed("<", stop, last)
                    after = self.b.select(more, w, then)
                    ahead = self.least(self.b.select(more, stop, upcoming), self.b.sub(total, self.b.sub(stop, start)))
                    shift, turn = self.b.sub(ahead, start), self.variable(self.place(0))
                    for block, column, is_last in self.blocks():
                        own = self.b.gep(w, [column])
                        following = self.b.gep(own, [self.place(sum(block))])
                        coming = self.b.select(is_last, after, following)
                        most = (6 if self.registers == 32 else 4) if len(block) > 2 else 8
                        if self.registers == 16 and len(block) == 2:
                            most = 4
                        for channel, rows in self.tiled(self.place(0), c_in, {most, 2, 1}):
                            asked = None
                            if rows == most and not alone:
                                self.announce_sums(own, w_row, channel, rows, block, coming)
                                asked = self.share_of_rows(x, y, shift, turn)
                            near = self.b.gep(y, [column])
                            self.gram(x, near, own, w_row, channel, rows, block, start, stop, asked)
        return self.finished()

    def edges_together(self, block: Shape) -> int:
        """How many edges a tile has at most: registers hold its sums."""
        return min(14, (24 if self.registers == 32 else 12) // len(block))

    def sums(self, chunk: Any) -> Any:
        """Where row 0 of the sums would lie, of which those of a chunk do lie there."""
        return self.operand("y")

    def rows_of(self, chunk: Any) -> tuple[Any, Any]:
        """The first row of a chunk, and that of the next."""
        cuts = self.operand("cuts")
        return self.b.load(self.b.gep(cuts, [chunk])), self.b.load(self.b.gep(cuts, [self.b.add(chunk, self.place(1))]))

    def start_rows(self, chunk: Any, sums: Any) -> None:
        """sums = bias in the rows of a chunk."""
        first, last = self.rows_of(chunk)
        with self.count(first, last) as row, self.groups(sums) as (_, y, _, bias):
            line = self.b.gep(y, [self.b.mul(row, self.operand("out_row"))])
            for block, column, _ in self.blocks():
                begin, near = (self.b.gep(base, [column]) for base in (bias, line))
                for at, width in placed(block):
                    self.store(self.load(begin, self.place(at), width), near, self.place(at), width)

    def finish_rows(self, chunk: Any, sums: Any) -> None:
        """What follows once the rows of a chunk have all their sums."""

    def product(
        self,
        x: Any,
        y: Any,
        w: Any,
        bias: Any,
        w_row: Any,
        edge: Any,
        rows: int,
        block: Shape,
        start: Any,
        stop: Any,
        ahead: Any,
        begins: Any,
    ) -> None:
        """y[outs] (or the bias, where it ``begins`` them) += x[ins, start:stop] @ w[start:stop] for ``rows`` edges and
        a block of columns, at which y, w and the bias begin. A line of every row ``ahead`` is asked for on the way."""
        ins = [self.row(x, "ins", "in_row", edge, i) for i in range(rows)]
        outs = [self.row(y, "outs", "out_row", edge, i) for i in range(rows)]
        sums = [[self.variable(self.zero(width)) for width in block] for _ in range(rows)]
        with self.count(start, stop) as channel:
            if ahead is not None:
                self.ask(self.b.gep(ahead, [self.b.mul(self.b.sub(channel, start), w_row)]))
            weights = [
                self.load(w, self.b.add(self.b.mul(channel, w_row), self.place(at)), width)
                for at, width in placed(block)
            ]
            for line, held in zip(ins, sums):
                self.accumulate(self.b.load(self.b.gep(line, [channel])), weights, held, block)
        for line, held in zip(outs, sums):
            before = self.b.select(begins, bias, line)
            for (at, width), kept in zip(placed(block), held):
                total = self.added(self.load(before, self.place(at), width), self.b.load(kept))
                self.store(total, line, self.place(at), width)

    def share(self, coming: Any, edge: Any, rows: int, block: Shape) -> Any:
        """What a tile asks for of the weights that come next: of each row, another line than its neighbors do."""
        lines = max(1, self.size * sum(block) // LINE)
        line = self.b.srem(self.b.sdiv(edge, self.place(rows)), self.place(lines))
        return self.b.gep(coming, [self.b.mul(line, self.place(LINE // self.size))])

    def announce(self, x: Any, edge: Any, rows: int, last: Any, start: Any) -> None:
        """Ask for the input rows of the next tile: worth it where a tile takes longer than the asking."""
        final = self.b.sub(last, self.place(1))
        for i in range(rows):
            row = self.row(x, "ins", "in_row", self.least(self.b.add(edge, self.place(rows + i)), final), 0)
            line = self.b.gep(row, [start])
            for at in range(0, DEPTH, LINE // self.size):
                self.ask(self.b.gep(line, [self.place(at)]))

    def announce_sums(self, w: Any, w_row: Any, channel: Any, rows: int, block: Shape, coming: Any) -> None:
        """Ask for the next tile of the weight's gradient, which for a column's last one is the first at ``coming``."""
        below = self.b.add(channel, self.place(rows))
        own = self.b.gep(w, [self.b.mul(below, w_row)])
        tile = self.b.select(self.b.icmp_signed("<", below, self.operand("c_in")), own, coming)
        for i in range(rows):
            line = self.b.gep(tile, [self.b.mul(self.place(i), w_row)])
            for at in range(0, sum(block), LINE // self.size):
                self.ask(self.b.gep(line, [self.place(at)]), write=1)

    def share_of_rows(self, x: Any, y: Any, shift: Any, turn: Any) -> tuple[Any, Any, Any]:
        """What a tile asks for of the rows that the next tiles meet, ``shift`` edges on: one line of each, by turns."""
        each = self.place(LINE // self.size)
        of_x = self.b.sdiv(self.b.add(self.operand("c_in"), self.place(LINE // self.size - 1)), each)
        of_y = self.b.sdiv(self.b.add(self.operand("c_out"), self.place(LINE // self.size - 1)), each)
        now = self.b.load(turn)
        self.b.store(self.b.add(now, self.place(1)), turn)
        line = self.b.urem(now, self.b.add(of_x, of_y))
        is_x = self.b.icmp_signed("<", line, of_x)
        base = self.b.select(is_x, x, y)
        base = self.b.gep(base, [self.b.mul(self.b.select(is_x, line, self.b.sub(line, of_x)), each)])
        numbers = self.b.gep(self.b.select(is_x, self.operand("ins"), self.operand("outs")), [shift])
        return base, numbers, self.b.select(is_x, self.operand("in_row"), self.operand("out_row"))

    def ask(self, line: Any, write: int = 0, cache: int = 3) -> None:
        """Fetch a line without waiting for it into L1 (``cache`` 3) or L2 (2); one that does not exist is no fault."""
        place = self.b.bitcast(line, self.ir.IntType(8).as_pointer())
        self.b.call(self.prefetch, [place, self.i32(write), self.i32(cache), self.i32(1)])

    def gram(
        self,
        x: Any,
        y: Any,
        w: Any,
        w_row: Any,
        channel: Any,
        rows: int,
        block: Shape,
        start: Any,
        stop: Any,
        asked: Any,
    ) -> None:
        """w[channel:channel + rows] += x[ins, channel:...]^T @ y[outs] over edges [start, stop).

        What is ``asked`` for on the way: (place in a first row, the numbers of rows by edge, the length of a row).
        """
        lines = [self.b.gep(w, [self.b.mul(self.b.add(channel, self.place(i)), w_row)]) for i in range(rows)]
        sums = [
            [self.variable(self.load(line, self.place(at), width)) for at, width in placed(block)] for line in lines
        ]
        with self.count(start, stop) as edge:
            if asked is not None:
                base, numbers, length = asked
                number = self.b.sext(self.b.load(self.b.gep(numbers, [edge])), self.i64)
                self.ask(self.b.gep(base, [self.b.mul(number, length)]), cache=2)
            near = self.row(y, "outs", "out_row", edge, 0)
            met = [self.load(near, self.place(at), width) for at, width in placed(block)]
            line = self.b.gep(self.row(x, "ins", "in_row", edge, 0), [channel])
            for i, held in enumerate(sums):
                self.accumulate(self.b.load(self.b.gep(line, [self.place(i)])), met, held, block)
        for line, held in zip(lines, sums):
            for (at, width), kept in zip(placed(block), held):
                self.store(self.b.load(kept), line, self.place(at), width)

    def accumulate(self, factor: Any, vectors: list[Any], sums: list[Any], block: Shape) -> None:
        """sums += factor * vectors."""
        spread = {width: self.spread(factor, width) for width in block}
        for width, vector, kept in zip(block, vectors, sums):
            call = self.b.call(self.fma(width), [spread[width], vector, self.b.load(kept)])
            self.b.store(call, kept)


def placed(block: Shape) -> list[tuple[int, int]]:
    """(first channel, width) of the vectors of a block.

    >>> placed((16, 16, 4))
    [(0, 16), (16, 16), (32, 4)]
    """
    return [(sum(block[:i]), width) for i, width in enumerate(block)]


# ---- integers

#: x86's multiplication of pairs and of quads by the lanes of its result, and what a CPU must have for both
PAIRS = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
QUADS = {4: "llvm.x86.ssse3.pmadd.ub.sw.128", 8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
NEEDS = {4: "ssse3", 8: "avx2", 16: "avx512bw"}
LEVELS = {"x86-64-v2": ("ssse3",), "x86-64-v3": ("ssse3", "avx2"), "x86-64-v4": ("ssse3", "avx2", "avx512bw")}


@cache
def integer_kernel(kind: str, shapes: tuple[Shape, ...], target: Target) -> int:
    """The address of a forward loop over int8 channels for runs of blocks of these ``shapes``.

    ``kind``: ``pairs`` or ``quads`` says how channels lie. The int32 sums are in ``y`` afterwards. Where the name has
    ``rescaled``, int8 rows ``out`` are made of them, and of those of ``residual`` where it is not null. ``y`` is then
    a piece of ``y_part`` numbers for each thread, for the rows of one chunk.
    """
    return compiled(_Integers, (kind, shapes, False, target), kind, target)


def together_in_rows(x: torch.Tensor, groups: int, count: int) -> torch.Tensor:
    """(N, C) int8 -> (N, G * ceil(C/G/count)) int32 of ``count`` channels each, a group padded by zeros."""
    rows, channels = x.shape
    each, dtype = channels // groups, torch.int16 if count == 2 else torch.int8
    if each % count == 0:
        return x.to(dtype).contiguous().view(-1).view(torch.int32).view(rows, channels // count)
    padded = torch.zeros(rows, groups, -(-each // count) * count, dtype=dtype)
    padded[:, :, :each] = x.reshape(rows, groups, each)
    return padded.view(-1).view(torch.int32).view(rows, groups * -(-each // count))


def together_in_weight(weight: torch.Tensor, count: int) -> torch.Tensor:
    """(K, C, C_out) int8 -> (K, ceil(C/count), C_out) int32 of ``count`` input channels each."""
    each, dtype = weight.shape[1], torch.int16 if count == 2 else torch.int8
    channels_last = torch.nn.functional.pad(weight.mT, (0, -each % count)) if each % count else weight.mT
    words = (
        channels_last.to(dtype).contiguous().view(-1).view(torch.int32)
    )  # flat: a stride of one place may be any number
    return words.view(*channels_last.shape[:2], -(-each // count)).mT.contiguous()


class _Integers(Loops):
    def __init__(self, kind: str, shapes: tuple[Shape, ...], double: bool, target: Target) -> None:
        super().__init__(kind, shapes, double, target)
        self.rescales, self.quads = "rescaled" in kind, kind.startswith("quads")
        x86 = binding().get_default_triple().startswith(("x86_64", "i686"))
        has = (*LEVELS.get(target.cpu, ()), *target.features.replace("+", "").split(","))
        self.together = {width for width in PAIRS if x86 and NEEDS[width] in has}

    def text(self, *sizes: Any) -> str:
        return self.forward()

    def numbers(self) -> None:
        self.number, self.size, self.suffix = self.i32, 4, "i32"

    def accumulate(self, factor: Any, vectors: list[Any], sums: list[Any], block: Shape) -> None:
        """sums += the products of the channels that lie together, added."""
        spread = {width: self.spread(factor, width) for width in block}
        for width, vector, kept in zip(block, vectors, sums):
            self.b.store(self.b.add(self.b.load(kept), self.products(spread[width], vector, width)), kept)

    def products(self, a: Any, b: Any, width: int) -> Any:
        """For each number of 32 bits, the sum of the products of its channels in a and in b."""
        if width not in self.together:
            bits = 8 if self.quads else 16
            parts = [[self.part(value, at, bits, width) for value in (a, b)] for at in range(32 // bits)]
            total = self.b.mul(*parts[0])
            for part in parts[1:]:
                total = self.b.add(total, self.b.mul(*part))
            return total
        halves = self.ir.VectorType(self.ir.IntType(16), 2 * width)
        if self.quads:
            a = self.called(QUADS[width], halves, a, b)
            b = self.ir.Constant(halves, [1] * 2 * width)
        return self.called(PAIRS[width], self.kind(width), a, b)

    def called(self, name: str, result: Any, a: Any, b: Any) -> Any:
        """An instruction of x86 that makes numbers twice as wide as its operands'."""
        element = self.ir.IntType(result.element.width // 2)
        operand = self.ir.VectorType(element, 2 * result.count)
        kind = self.ir.FunctionType(result, [operand] * 2)
        function = self.module.globals.get(name) or self.ir.Function(self.module, kind, name)
        return self.b.call(function, [self.b.bitcast(value, operand) for value in (a, b)])

    def part(self, value: Any, at: int, bits: int, width: int) -> Any:
        """Channel ``at`` of each number."""
        up = self.ir.Constant(self.kind(width), [32 - bits * (at + 1)] * width)
        return self.b.ashr(self.b.shl(value, up), self.ir.Constant(self.kind(width), [32 - bits] * width))

    def edges_together(self, block: Shape) -> int:
        """Two thirds of what floats have: a product needs registers of its own."""
        return max(1, super().edges_together(block) * 2 // 3)

    def sums(self, chunk: Any) -> Any:
        """Sums that are rescaled lie in a piece of ``y`` that a thread uses again for every chunk."""
        if not self.rescales:
            return super().sums(chunk)
        first, _ = self.rows_of(chunk)
        piece = self.b.mul(self.thread, self.operand("y_part"))
        return self.b.gep(self.operand("y"), [self.b.sub(piece, self.b.mul(first, self.operand("out_row")))])

    def finish_rows(self, chunk: Any, sums: Any) -> None:
        """out = the rescaled sums of the rows of a chunk."""
        if not self.rescales:
            return
        first, last = self.rows_of(chunk)
        adds = self.b.icmp_signed("!=", self.b.ptrtoint(self.operand("residual"), self.i64), self.place(0))
        scales = self.b.icmp_signed("!=", self.operand("slope"), self.place(1 << SLOPE_BITS))
        bends = self.b.and_(scales, self.b.icmp_signed("<", self.operand("low"), self.place(0)))
        with self.count(self.place(0), self.operand("groups")) as group:
            begin = self.b.mul(group, self.operand("c_out"))
            for block, column, _ in self.blocks():
                for at, width in placed(block):
                    place = self.b.add(begin, self.b.add(column, self.place(at)))
                    for residual, adding in enumerate(self.both(adds)):
                        for slope, bending in enumerate(self.both(bends)):
                            with self.b.if_then(self.b.and_(adding, bending)), self.count(first, last) as row:
                                self.rescale(sums, row, place, width, bool(residual), bool(slope))

    def both(self, is_so: Any) -> tuple[Any, Any]:
        """Whether something is not so, and whether it is."""
        return self.b.not_(is_so), is_so

    def rescale(self, sums: Any, row: Any, channel: Any, width: int, residual: bool, slope: bool) -> None:
        """The int8 values of one vector of sums.

        Its multipliers are loaded here, so that LLVM sees that both factors have 32 bits and multiplies as such.
        """
        place = self.b.add(self.b.mul(row, self.operand("out_row")), channel)
        total = self.b.mul(self.widened(sums, place, width), self.widened(self.operand("multiplier"), channel, width))
        if residual:
            more = self.widened(self.operand("residual"), place, width)
            total = self.b.add(total, self.b.mul(more, self.all(self.operand("residual_multiplier"), width)))
        half = self.b.shl(self.place(1), self.b.sub(self.operand("shift"), self.place(1)))
        value = self.b.ashr(self.b.add(total, self.all(half, width)), self.all(self.operand("shift"), width))
        if slope:
            less = self.b.mul(value, self.all(self.operand("slope"), width))
            less = self.b.ashr(self.b.add(less, self.all(1 << (SLOPE_BITS - 1), width)), self.all(SLOPE_BITS, width))
            value = self.b.select(self.b.icmp_signed("<", value, self.all(0, width)), less, value)
        for limit, sign in ((self.all(self.operand("low"), width), "<"), (self.all(LARGEST, width), ">")):
            value = self.b.select(self.b.icmp_signed(sign, value, limit), limit, value)
        byte = self.ir.VectorType(self.ir.IntType(8), width)
        address = self.b.bitcast(self.b.gep(self.operand("out"), [place]), byte.as_pointer())
        self.b.store(self.b.trunc(value, byte), address, align=1)

    def widened(self, base: Any, place: Any, width: int) -> Any:
        """A vector of integers in memory, as numbers of 64 bits."""
        element = base.type.pointee
        address = self.b.bitcast(self.b.gep(base, [place]), self.ir.VectorType(element, width).as_pointer())
        value = self.b.load(address, align=element.width // 8)
        return self.b.sext(value, self.ir.VectorType(self.i64, width))

    def all(self, value: Any, width: int) -> Any:
        """A number of 64 bits in every lane."""
        if isinstance(value, int):
            return self.ir.Constant(self.ir.VectorType(self.i64, width), [value] * width)
        return self.spread(value, width)


# ---- edges in chunks of output rows


@cache
def find_bounds() -> Callable[..., int]:
    return ctypes.CFUNCTYPE(*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 4)(compiled(_Find, (), "find", host()))


@cache
def sort_edges() -> Callable[..., int]:
    return ctypes.CFUNCTYPE(*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 6)(compiled(_Sort, (), "sort", host()))


class _Find(Function):
    def __init__(self) -> None:
        super().__init__("find", numbers=2, arrays=4, returns=True)

    def find(self) -> str:
        """Where the edges of each tap and chunk begin; whether those of every tap are in order of output rows."""
        b, one, number = self.b, self.i64(1), self.i64
        taps, count, *arrays = self.function.args
        ends, cuts, bounds, outs = map(self.array, arrays, (number, number, number, self.i32))
        ordered = self.variable(one)
        with self.count(0, taps) as tap:
            first, last = self.read(ends, tap), self.read(ends, b.add(tap, one))
            chunk, before = self.variable(number(0)), self.variable(number(-1))
            with self.count(first, last) as edge:
                row = self.read(outs, edge)
                up = b.zext(b.icmp_signed("<=", b.load(before), row), number)
                b.store(b.and_(b.load(ordered), up), ordered)
                b.store(row, before)
                with self.during(
                    lambda: b.and_(
                        b.icmp_signed("<", b.load(chunk), b.sub(count, one)),
                        b.icmp_signed("<=", self.read(cuts, b.load(chunk)), row),
                    )
                ):
                    self.write(bounds, b.add(b.mul(b.load(chunk), taps), tap), edge)
                    b.store(b.add(b.load(chunk), one), chunk)
            with self.count(b.load(chunk), count) as rest:
                self.write(bounds, b.add(b.mul(rest, taps), tap), last)
        return self.finished(b.load(ordered))


class _Sort(Function):
    def __init__(self) -> None:
        super().__init__("sort", numbers=2, arrays=6, returns=True)

    def sort(self) -> str:
        """Edges by output row within each tap: each is put where its row is in a table, which is then read."""
        b, one = self.b, self.i64(1)
        taps, total, *arrays = self.function.args
        ends, *others = map(self.array, arrays, (self.i64, *[self.i32] * 5))
        given_ins, given_outs, table, ins, outs = others
        with self.count(0, taps) as tap:
            first, last = self.read(ends, tap), self.read(ends, b.add(tap, one))
            with self.count(first, last) as edge:
                self.write(table, self.read(given_outs, edge), b.add(self.read(given_ins, edge), one))
            place = self.variable(first)
            with self.count(0, total) as row:
                held = self.read(table, row)
                with b.if_then(b.icmp_signed("!=", held, self.i64(0))):
                    at = b.load(place)
                    self.write(ins, at, b.sub(held, one))
                    self.write(outs, at, row)
                    self.write(table, row, self.i64(0))
                    b.store(b.add(at, one), place)
        return self.finished(self.i64(0))
