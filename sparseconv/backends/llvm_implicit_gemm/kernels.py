"""The two loops of a sparse convolution on a CPU, written in LLVM's language for shapes of blocks of output channels.

Nothing is gathered and nothing is scattered: a tile of edges of one tap holds its sums in vector registers, reads its
input rows where they lie, a channel at a time, and adds itself to its output rows, which one thread owns and the caches
hold. The weight's gradient holds a tile of the weight in registers and runs over edges.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from sparseconv.backends.llvm_implicit_gemm.emitter import Emitter
from sparseconv.backends.llvm_implicit_gemm.operands import Shape, columns
from sparseconv.llvm.compile import compiled
from sparseconv.llvm.target import Target

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
        c_in, w_row, whole = self.given("c_in"), self.given("w_row"), self.given("whole")
        nought, none = self.place(0), self.b.icmp_signed("<", whole, self.place(0))
        with self.parts(self.given("chunks")) as chunk:
            sums = self.sums(chunk)
            with self.b.if_then(none):
                self.start_rows(chunk, sums)
            with self.taps(self.b.select(none, nought, whole)) as (tap, later):
                first, last = self.edges(chunk, tap)
                with self.groups(sums) as (x, y, w, bias):
                    w, then = (self.b.gep(w, [self.b.mul(t, self.given("w_tap"))]) for t in (tap, later))
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
        c_in, w_row, chunks = (self.given(name) for name in ("c_in", "w_row", "chunks"))
        with (
            self.parts(self.given("parts")) as part,
            self.count(part, chunks, self.given("parts")) as chunk,
            self.taps(self.place(0)) as (tap, later),
        ):
            first, last = self.edges(chunk, tap)
            upcoming, _ = self.edges(chunk, later)
            _, total = self.edges(self.b.sub(chunks, self.place(1)), self.b.sub(self.given("taps"), self.place(1)))
            with self.groups(self.given("y")) as (x, y, w, _):
                w = self.b.gep(w, [self.b.mul(part, self.given("w_part"))])
                w, then = (self.b.gep(w, [self.b.mul(t, self.given("w_tap"))]) for t in (tap, later))
                step = self.given("edges")
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
        return self.given("y")

    def rows_of(self, chunk: Any) -> tuple[Any, Any]:
        """The first row of a chunk, and that of the next."""
        cuts = self.given("cuts")
        return self.b.load(self.b.gep(cuts, [chunk])), self.b.load(self.b.gep(cuts, [self.b.add(chunk, self.place(1))]))

    def start_rows(self, chunk: Any, sums: Any) -> None:
        """sums = bias in the rows of a chunk."""
        first, last = self.rows_of(chunk)
        with self.count(first, last) as row, self.groups(sums) as (_, y, _, bias):
            line = self.b.gep(y, [self.b.mul(row, self.given("out_row"))])
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
        """What a tile asks for of the weights that come next: of each row, another line than its neighbours do."""
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
        tile = self.b.select(self.b.icmp_signed("<", below, self.given("c_in")), own, coming)
        for i in range(rows):
            line = self.b.gep(tile, [self.b.mul(self.place(i), w_row)])
            for at in range(0, sum(block), LINE // self.size):
                self.ask(self.b.gep(line, [self.place(at)]), write=1)

    def share_of_rows(self, x: Any, y: Any, shift: Any, turn: Any) -> tuple[Any, Any, Any]:
        """What a tile asks for of the rows that the next tiles meet, ``shift`` edges on: one line of each, by turns."""
        each = self.place(LINE // self.size)
        of_x = self.b.sdiv(self.b.add(self.given("c_in"), self.place(LINE // self.size - 1)), each)
        of_y = self.b.sdiv(self.b.add(self.given("c_out"), self.place(LINE // self.size - 1)), each)
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
