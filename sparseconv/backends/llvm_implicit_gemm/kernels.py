"""The two loops of a sparse convolution on a CPU, written in LLVM's language for a number of output channels.

Nothing is gathered and nothing is scattered: a tile of edges of one tap holds its sums in vector registers, reads its
input rows where they lie, a channel at a time, and adds itself to its output rows, which one thread owns and the caches
hold. The weight's gradient holds a tile of the weight in registers and runs over edges.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from sparseconv.backends.llvm_implicit_gemm.compile import binding, compiled, lanes

#: input channels whose weights are multiplied before the next: 16 KB of them beside 64 output channels of fp32
DEPTH = 64
LINE = 64  # bytes of a cache line
APART = 8  # places from a counter of parts to the next, which another thread counts up


class Operands(ctypes.Structure):
    """What a kernel reads: all strides in elements, all rows dense in their channels."""

    NUMBERS = (
        "arrived",
        "regions",
        "parts",
        "chunks",
        "taps",
        "groups",
        "c_in",
        "in_row",
        "out_row",
        "w_row",
        "w_tap",
        "w_part",
        "edges",
        "whole",
    )
    ARRAYS = ("x", "y", "w", "bias", "ins", "outs", "cuts", "bounds", "taken")
    _fields_ = [(name, ctypes.c_int64) for name in NUMBERS] + [(name, ctypes.c_void_p) for name in ARRAYS]


_PLACES = {name: place for place, name in enumerate(Operands.NUMBERS + Operands.ARRAYS)}


@cache
def kernel(kind: str, channels: int, double: bool) -> int:
    """The address of ``forward`` or ``weight_grad`` (pointer to `Operands`) for ``channels`` output channels a group.

    ``forward``: for every part (a chunk of rows [cuts[i], cuts[i+1])), y = bias + the sum over taps k and edges
    [bounds[i, k], bounds[i+1, k]) of x[ins] @ w[k]. The tap ``whole``, one with an edge for every row, comes first and
    begins the rows, which it need not read; -1 where there is none. ``weight_grad``: every part p takes the chunks p,
    p + parts, ..., and adds x[ins]^T @ y[outs] to the weight gradient of its own, ``w_part`` elements after the last.
    Each of ``regions`` threads calls it once; ``taken`` holds ``APART`` zeros for each.
    """
    emitter = _Emitter(kind, channels, double)
    emitter.forward() if kind == "forward" else emitter.weight_grad()
    return compiled(str(emitter.module), kind)


def columns(channels: int, vector: int, most: int) -> list[list[tuple[int, int]]]:
    """Channels cut into blocks of at most ``most`` vectors (first channel, width); widths are powers of two.

    >>> columns(20, 16, 4)
    [[(0, 16), (16, 4)]]
    >>> [[width for _, width in block] for block in columns(96, 16, 4)]
    [[16, 16, 16], [16, 16, 16]]
    """
    vectors, first = [], 0
    while first < channels:
        width = min(vector, 1 << (channels - first).bit_length() - 1)
        vectors.append((first, width))
        first += width
    blocks = -(-len(vectors) // most)
    return [vectors[i * len(vectors) // blocks : (i + 1) * len(vectors) // blocks] for i in range(blocks)]


class _Emitter:
    """One function of one module."""

    def __init__(self, name: str, channels: int, double: bool) -> None:
        from llvmlite import ir

        self.ir, self.channels = ir, channels
        register, self.registers = lanes()
        self.number = ir.DoubleType() if double else ir.FloatType()
        self.size, self.suffix = (8, "f64") if double else (4, "f32")
        self.vector = register // self.size
        self.i32, self.i64 = ir.IntType(32), ir.IntType(64)
        self.module = ir.Module(name)
        self.module.triple = binding().get_default_triple()
        kind = ir.FunctionType(ir.VoidType(), [self.i64.as_pointer()])
        self.function = ir.Function(self.module, kind, name)
        self.entry = ir.IRBuilder(self.function.append_basic_block("entry"))  # where variables are made
        self.b = ir.IRBuilder(self.function.append_basic_block("body"))
        numbers, rows, places = self.number.as_pointer(), self.i32.as_pointer(), self.i64.as_pointer()
        self.kinds = dict.fromkeys(("x", "y", "w", "bias"), numbers) | {
            "ins": rows, "outs": rows, "cuts": places, "bounds": places, "taken": places
        }  # fmt: skip
        byte = self.ir.IntType(8).as_pointer()
        asking = ir.FunctionType(ir.VoidType(), [byte, self.i32, self.i32, self.i32])
        self.prefetch = ir.Function(self.module, asking, "llvm.prefetch.p0")
        self.columns = columns(channels, self.vector, 4 if self.registers == 32 else 2)

    # ---- the two loops

    def forward(self) -> None:
        c_in, w_row, whole = self.given("c_in"), self.given("w_row"), self.given("whole")
        nought, none = self.place(0), self.b.icmp_signed("<", whole, self.place(0))
        with self.parts(self.given("chunks")) as chunk:
            with self.b.if_then(none):
                self.start_rows(chunk)
            with self.taps(self.b.select(none, nought, whole)) as (tap, later):
                first, last = self.edges(chunk, tap)
                with self.groups() as (x, y, w, bias):
                    w, then = (self.b.gep(w, [self.b.mul(t, self.given("w_tap"))]) for t in (tap, later))
                    with self.count(nought, c_in, DEPTH) as start:
                        stop = self.least(self.b.add(start, self.place(DEPTH)), c_in)
                        begins = self.b.and_(
                            self.b.icmp_signed("==", tap, whole), self.b.icmp_signed("==", start, nought)
                        )
                        deeper = self.b.icmp_signed("<", stop, c_in)
                        after = self.b.select(deeper, self.b.gep(w, [self.b.mul(stop, w_row)]), then)
                        here = self.b.gep(w, [self.b.mul(start, w_row)])
                        for number, block in enumerate(self.columns):
                            following = self.columns[number + 1 : number + 2]
                            coming = self.b.gep(here, [self.place(following[0][0][0])]) if following else after
                            most = min(14, (24 if self.registers == 32 else 12) // len(block))
                            with self.tiled(first, last, {most, 4, 1}) as tiles:
                                for edge, rows in tiles:
                                    ahead = None
                                    if rows == most and len(block) > 2:
                                        self.announce(x, edge, rows, last, start)
                                        ahead = self.share(coming, edge, rows, block)
                                    self.product(x, y, w, w_row, edge, rows, block, start, stop, ahead, bias, begins)
        self.finish()

    def weight_grad(self) -> None:
        c_in, w_row, chunks = (self.given(name) for name in ("c_in", "w_row", "chunks"))
        with (
            self.parts(self.given("parts")) as part,
            self.count(part, chunks, self.given("parts")) as chunk,
            self.taps(self.place(0)) as (tap, later),
        ):
            first, last = self.edges(chunk, tap)
            upcoming, _ = self.edges(chunk, later)
            _, total = self.edges(self.b.sub(chunks, self.place(1)), self.b.sub(self.given("taps"), self.place(1)))
            with self.groups() as (x, y, w, _):
                w = self.b.gep(w, [self.b.mul(part, self.given("w_part"))])
                w, then = (self.b.gep(w, [self.b.mul(t, self.given("w_tap"))]) for t in (tap, later))
                step = self.given("edges")
                with self.count(first, last, step) as start:
                    stop = self.least(self.b.add(start, step), last)
                    more = self.b.icmp_signed("<", stop, last)
                    after = self.b.select(more, w, then)
                    ahead = self.least(self.b.select(more, stop, upcoming), self.b.sub(total, self.b.sub(stop, start)))
                    shift, turn = self.b.sub(ahead, start), self.variable(self.place(0))
                    for number, block in enumerate(self.columns):
                        following = self.columns[number + 1 : number + 2]
                        coming = self.b.gep(w, [self.place(following[0][0][0])]) if following else after
                        most = (6 if self.registers == 32 else 4) if len(block) > 2 else 8
                        if self.registers == 16 and len(block) == 2:
                            most = 4
                        with self.tiled(self.place(0), c_in, {most, 2, 1}) as tiles:
                            for channel, rows in tiles:
                                asked = None
                                if rows == most and len(self.columns) > 1:
                                    self.announce_sums(w, w_row, channel, rows, block, coming)
                                    asked = self.share_of_rows(x, y, shift, turn)
                                self.gram(x, y, w, w_row, channel, rows, block, start, stop, asked)
        self.finish()

    def start_rows(self, chunk: Any) -> None:
        """y = bias in the rows of a chunk."""
        cuts = self.given("cuts")
        first, last = (self.b.load(self.b.gep(cuts, [at])) for at in (chunk, self.b.add(chunk, self.place(1))))
        with self.count(first, last) as row, self.groups() as (_, y, _, bias):
            line = self.b.gep(y, [self.b.mul(row, self.given("out_row"))])
            for at, width in (vector for block in self.columns for vector in block):
                self.store(self.load(bias, self.place(at), width), line, self.place(at), width)

    def product(
        self,
        x: Any,
        y: Any,
        w: Any,
        w_row: Any,
        edge: Any,
        rows: int,
        block: Any,
        start: Any,
        stop: Any,
        ahead: Any,
        bias: Any,
        begins: Any,
    ) -> None:
        """y[outs] (or the bias, where it ``begins`` them) += x[ins, start:stop] @ w[start:stop] for ``rows`` edges and
        a block of columns. A line of every row ``ahead`` is asked for on the way."""
        ins = [self.row(x, "ins", "in_row", edge, i) for i in range(rows)]
        outs = [self.row(y, "outs", "out_row", edge, i) for i in range(rows)]
        sums = [[self.variable(self.zero(width), width) for _, width in block] for _ in range(rows)]
        with self.count(start, stop) as channel:
            if ahead is not None:
                self.ask(self.b.gep(ahead, [self.b.mul(self.b.sub(channel, start), w_row)]))
            weights = [
                self.load(w, self.b.add(self.b.mul(channel, w_row), self.place(at)), width) for at, width in block
            ]
            for line, held in zip(ins, sums):
                self.accumulate(self.b.load(self.b.gep(line, [channel])), weights, held, block)
        for line, held in zip(outs, sums):
            before = self.b.select(begins, bias, line)
            for (at, width), kept in zip(block, held):
                total = self.b.fadd(self.load(before, self.place(at), width), self.b.load(kept))
                self.store(total, line, self.place(at), width)

    def share(self, coming: Any, edge: Any, rows: int, block: Any) -> Any:
        """What a tile asks for of the weights that come next: of each row, another line than its neighbours do."""
        lines = max(1, self.size * sum(width for _, width in block) // LINE)
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

    def announce_sums(self, w: Any, w_row: Any, channel: Any, rows: int, block: Any, coming: Any) -> None:
        """Ask for the next tile of the weight's gradient, which for a column's last one is the first at ``coming``."""
        below = self.b.add(channel, self.place(rows))
        own = self.b.gep(w, [self.b.add(self.b.mul(below, w_row), self.place(block[0][0]))])
        tile = self.b.select(self.b.icmp_signed("<", below, self.given("c_in")), own, coming)
        for i in range(rows):
            line = self.b.gep(tile, [self.b.mul(self.place(i), w_row)])
            for at in range(0, sum(width for _, width in block), LINE // self.size):
                self.ask(self.b.gep(line, [self.place(at)]), write=1)

    def share_of_rows(self, x: Any, y: Any, shift: Any, turn: Any) -> tuple[Any, Any, Any]:
        """What a tile asks for of the rows that the next tiles meet, ``shift`` edges on: one line of each, by turns."""
        each = self.place(LINE // self.size)
        of_x = self.b.sdiv(self.b.add(self.given("c_in"), self.place(LINE // self.size - 1)), each)
        of_y = self.place(-(-self.channels * self.size // LINE))
        now = self.b.load(turn)
        self.b.store(self.b.add(now, self.place(1)), turn)
        line = self.b.urem(now, self.b.add(of_x, of_y))
        is_x = self.b.icmp_signed("<", line, of_x)
        base = self.b.select(is_x, x, y)
        base = self.b.gep(base, [self.b.mul(self.b.select(is_x, line, self.b.sub(line, of_x)), each)])
        numbers = self.b.gep(self.b.select(is_x, self.given("ins"), self.given("outs")), [shift])
        return base, numbers, self.b.select(is_x, self.given("in_row"), self.given("out_row"))

    def ask(self, line: Any, write: int = 0, cache: int = 3) -> None:
        """Fetch a line without waiting for it into L1 (``cache`` 3) or L2 (2); one that does not exist is no fault."""
        place = self.b.bitcast(line, self.ir.IntType(8).as_pointer())
        self.b.call(self.prefetch, [place, self.i32(write), self.i32(cache), self.i32(1)])

    def gram(
        self, x: Any, y: Any, w: Any, w_row: Any, channel: Any, rows: int, block: Any, start: Any, stop: Any, asked: Any
    ) -> None:
        """w[channel:channel + rows] += x[ins, channel:...]^T @ y[outs] over edges [start, stop).

        What is ``asked`` for on the way: (place in a first row, the numbers of rows by edge, the length of a row).
        """
        lines = [self.b.gep(w, [self.b.mul(self.b.add(channel, self.place(i)), w_row)]) for i in range(rows)]
        sums = [[self.variable(self.load(line, self.place(at), width), width) for at, width in block] for line in lines]
        with self.count(start, stop) as edge:
            if asked is not None:
                base, numbers, length = asked
                number = self.b.sext(self.b.load(self.b.gep(numbers, [edge])), self.i64)
                self.ask(self.b.gep(base, [self.b.mul(number, length)]), cache=2)
            near = self.row(y, "outs", "out_row", edge, 0)
            met = [self.load(near, self.place(at), width) for at, width in block]
            line = self.b.gep(self.row(x, "ins", "in_row", edge, 0), [channel])
            for i, held in enumerate(sums):
                self.accumulate(self.b.load(self.b.gep(line, [self.place(i)])), met, held, block)
        for line, held in zip(lines, sums):
            for (at, width), kept in zip(block, held):
                self.store(self.b.load(kept), line, self.place(at), width)

    def accumulate(self, factor: Any, vectors: list[Any], sums: list[Any], block: Any) -> None:
        """sums += factor * vectors."""
        spread = {width: self.spread(factor, width) for _, width in block}
        for (_, width), vector, kept in zip(block, vectors, sums):
            call = self.b.call(self.fma(width), [spread[width], vector, self.b.load(kept)])
            self.b.store(call, kept)

    # ---- control

    @contextmanager
    def parts(self, count: Any) -> Iterator[Any]:
        """For every part below ``count`` that no other thread has taken.

        They are divided into as many regions as threads, and a thread goes through one after another from its own on:
        two that wrote side by side would wait for the same huge page to be cleared.
        """
        arrived = self.b.gep(self.function.args[0], [self.place(_PLACES["arrived"])])
        own = self.b.atomic_rmw("add", arrived, self.place(1), "monotonic")
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
    def count(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """For every number from ``start`` below ``stop``."""
        step = self.place(step) if isinstance(step, int) else step
        at = self.variable(start)
        look, run, done = (self.function.append_basic_block(name) for name in ("look", "run", "done"))
        self.b.branch(look)
        self.b.position_at_end(look)
        now = self.b.load(at)
        self.b.cbranch(self.b.icmp_signed("<", now, stop), run, done)
        self.b.position_at_end(run)
        yield now
        self.b.store(self.b.add(now, step), at)
        self.b.branch(look)
        self.b.position_at_end(done)

    @contextmanager
    def taps(self, first: Any) -> Iterator[tuple[Any, Any]]:
        """For every tap in a circle that begins with ``first``: the tap and the one after it."""
        taps = self.given("taps")
        with self.count(self.place(0), taps) as turn:
            tap = self.around(self.b.add(turn, first), taps)
            yield tap, self.around(self.b.add(tap, self.place(1)), taps)

    @contextmanager
    def groups(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """For every group: x, y, w and the bias at its first channels."""
        x, *others = (self.given(name) for name in ("x", "y", "w", "bias"))
        with self.count(self.place(0), self.given("groups")) as group:
            columns = self.b.mul(group, self.place(self.channels))
            y, w, bias = (self.b.gep(other, [columns]) for other in others)
            yield self.b.gep(x, [self.b.mul(group, self.given("c_in"))]), y, w, bias

    @contextmanager
    def tiled(self, first: Any, last: Any, sizes: set[int]) -> Iterator[Iterator[tuple[Any, int]]]:
        """[first, last) in tiles of the largest size while they fit, then of the next."""

        def tiles() -> Iterator[tuple[Any, int]]:
            begin = first
            for size in sorted(sizes, reverse=True):
                whole = self.b.sdiv(self.b.sub(last, begin), self.place(size))
                end = self.b.add(begin, self.b.mul(whole, self.place(size)))
                with self.count(begin, end, size) as at:
                    yield at, size
                begin = end

        yield tiles()

    def finish(self) -> None:
        self.b.ret_void()
        self.entry.branch(self.function.blocks[1])

    # ---- values

    def place(self, value: int) -> Any:
        return self.i64(value)

    def given(self, name: str) -> Any:
        """A field of the operands."""
        value = self.entry.load(self.entry.gep(self.function.args[0], [self.place(_PLACES[name])]))
        return self.entry.inttoptr(value, self.kinds[name]) if name in self.kinds else value

    def variable(self, value: Any, width: int = 0) -> Any:
        """A place that holds a value, in a register once LLVM has seen it."""
        place = self.entry.alloca(self.kind(width) if width else self.i64)
        self.b.store(value, place)
        return place

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

    def least(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def kind(self, width: int) -> Any:
        return self.ir.VectorType(self.number, width)

    def zero(self, width: int) -> Any:
        return self.ir.Constant(self.kind(width), [0.0] * width)

    def load(self, base: Any, place: Any, width: int) -> Any:
        address = self.b.bitcast(self.b.gep(base, [place]), self.kind(width).as_pointer())
        return self.b.load(address, align=self.size)

    def store(self, value: Any, base: Any, place: Any, width: int) -> None:
        address = self.b.bitcast(self.b.gep(base, [place]), self.kind(width).as_pointer())
        self.b.store(value, address, align=self.size)

    def spread(self, number: Any, width: int) -> Any:
        nothing = self.ir.Constant(self.kind(width), self.ir.Undefined)
        first = self.b.insert_element(nothing, number, self.i32(0))
        zeros = self.ir.Constant(self.ir.VectorType(self.i32, width), [0] * width)
        return self.b.shuffle_vector(first, nothing, zeros)

    def fma(self, width: int) -> Any:
        name, kind = f"llvm.fma.v{width}{self.suffix}", self.kind(width)
        found = self.module.globals.get(name)
        return found or self.ir.Function(self.module, self.ir.FunctionType(kind, [kind] * 3), name)
