"""The loops of a kernel map on a CPU, in LLVM's language: keys of voxels, edges of a window, voxels that it reaches.

Each is compiled once for a number of axes, and takes all sizes when it is called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from sparseconv.llvm.compile import compiled
from sparseconv.llvm.function import Function
from sparseconv.llvm.target import host


@cache
def key_loop(columns: int) -> Callable[..., int]:
    """keys(n; coords (n, columns) int32, factors (columns + 1,) int64, keys (n + 1,) int64) -> whether keys ascend.

    A key is the sum of a row's products with factors, and of the last factor. The largest number follows the keys.
    """
    return _called("keys", 1, 3, columns)


@cache
def edge_loop() -> Callable[..., int]:
    """edges(writes, n, m, lines, taps; arrays) -> how many there are; `_Loop.edges` names the arrays."""
    return _called("edges", 5, 12)


@cache
def mark_loop(axes: int) -> Callable[..., int]:
    """mark(n, items, words per line; coords (n, 1 + axes) int32, windows (axes, 6) int64, bits) -> how many are new."""
    return _called("mark", 3, 3, axes)


@cache
def collect_loop(axes: int) -> Callable[..., int]:
    """collect(items, words per line; windows as of `mark_loop`, bits, coords, ends (2, 1 + axes) int64).

    The voxels of the bits in lexicographic order, and the smallest and the largest number of each column.
    """
    return _called("collect", 2, 4, axes)


def _called(name: str, numbers: int, arrays: int, *sizes: int) -> Callable[..., int]:
    kinds = [ctypes.c_int64] * numbers + [ctypes.c_void_p] * arrays
    address = compiled(_Loop, (name, numbers, arrays), name, host(), *sizes)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *kinds)(address)


#: numbers of an axis in ``windows``
NUMBERS = ("times", "over", "first", "last", "low", "size")


class _Loop(Function):
    def __init__(self, name: str, numbers: int, arrays: int) -> None:
        super().__init__(name, numbers, arrays, returns=True)

    def keys(self, columns: int) -> str:
        """A key for each row."""
        b = self.b
        count, *arrays = self.function.args
        coords, factors, keys = map(self.array, arrays, (self.i32, self.i64, self.i64))
        *by, moved = (self.read(factors, self.i64(at)) for at in range(columns + 1))
        before, ascends = self.variable(self.i64(-(2**63))), self.variable(self.i64(1))
        with self.count(0, count) as row:
            begin, key = b.mul(row, self.i64(columns)), moved
            for at, factor in enumerate(by):
                key = b.add(key, b.mul(self.read(coords, b.add(begin, self.i64(at))), factor))
            self.write(keys, row, key)
            more = b.zext(b.icmp_signed(">", key, b.load(before)), self.i64)
            b.store(b.and_(b.load(ascends), more), ascends)
            b.store(key, before)
        self.write(keys, count, self.i64(2**63 - 1))
        return self.finished(b.load(ascends))

    def edges(self) -> str:
        """Count the edges of each tap, or write them down behind ``offsets``, by queries in ascending order.

        ``keys`` (n + 1,) ascend and end with a larger one than any; ``names`` are their rows. ``queries`` (m,) ascend;
        ``called`` are their rows. Line i adds ``deltas[i]`` to a query for its first tap, and one more for each tap
        after it; its taps are ``taps[cuts[i]:cuts[i + 1]]``. The tap ``mirrors[j]`` has the edges of tap ``taps[j]``
        turned round; -1 where there is none. ``held`` counts the edges of ``taps[j]``, from 0 on at first.
        """
        b, one, nought = self.b, self.i64(1), self.i64(0)
        writes, _, queried, lines, kinds, *arrays = self.function.args
        names = ("keys", "names", "queries", "called", "deltas", "cuts", "taps", "mirrors", "held", "offsets")
        narrow = ("names", "called")
        keys, rows, queries, called, deltas, cuts, taps, mirrors, held, offsets = (
            self.array(array, self.i32 if name in narrow else self.i64) for name, array in zip(names, arrays)
        )
        ins, outs = (self.array(array, self.i32) for array in arrays[len(names) :])
        writing = b.icmp_signed("!=", writes, nought)
        with self.count(0, lines) as line:
            delta, first, last = self.read(deltas, line), self.read(cuts, line), self.read(cuts, b.add(line, one))
            place = self.variable(nought)
            with self.count(0, queried) as query:
                wanted = self.variable(b.add(self.read(queries, query), delta))
                with self.during(lambda: b.icmp_signed("<", self.read(keys, b.load(place)), b.load(wanted))):
                    b.store(b.add(b.load(place), one), place)
                near = self.variable(b.load(place))
                with self.count(first, last) as at:
                    here = b.load(near)
                    with b.if_then(b.icmp_signed("==", self.read(keys, here), b.load(wanted))):
                        edge = self.read(held, at)
                        self.write(held, at, b.add(edge, one))
                        b.store(b.add(here, one), near)
                        with b.if_then(writing):
                            into, out = self.read(rows, here), self.read(called, query)
                            begin = self.read(offsets, self.read(taps, at))
                            self.write(ins, b.add(begin, edge), into)
                            self.write(outs, b.add(begin, edge), out)
                            mirror = self.read(mirrors, at)
                            with b.if_then(b.icmp_signed(">=", mirror, nought)):
                                begin = self.read(offsets, mirror)
                                self.write(ins, b.add(begin, edge), out)
                                self.write(outs, b.add(begin, edge), into)
                    b.store(b.add(b.load(wanted), one), wanted)
        total = self.variable(nought)
        with b.if_then(b.icmp_signed("==", writes, nought)):  # counts become offsets
            with self.count(0, self.read(cuts, lines)) as at:
                number, mirror = self.read(held, at), self.read(mirrors, at)
                self.write(offsets, b.add(self.read(taps, at), one), number)
                with b.if_then(b.icmp_signed(">=", mirror, nought)):
                    self.write(offsets, b.add(mirror, one), number)
                self.write(held, at, nought)
            self.write(offsets, nought, nought)
            with self.count(0, kinds) as tap:
                after = b.add(tap, one)
                b.store(b.add(b.load(total), self.read(offsets, after)), total)
                self.write(offsets, after, b.load(total))
        return self.finished(b.load(total))

    def mark(self, axes: int) -> str:
        """Set the bit of every voxel from (times * c - last) / over to (times * c - first) / over along each axis."""
        b, one = self.b, self.i64(1)
        count, items, words, *arrays = self.function.args
        coords, windows, bits = map(self.array, arrays, (self.i32, self.i64, self.i64))
        found = self.variable(self.i64(0))
        table = [self._window(windows, axis) for axis in range(axes)]
        with self.count(0, count) as row:
            begin = b.mul(row, self.i64(1 + axes))

            def along(axis: int, line: Any) -> None:
                times, over, first, last, low, size = table[axis]
                middle = b.mul(self.read(coords, b.add(begin, self.i64(1 + axis))), times)
                lowest = self._floor(b.add(b.sub(middle, last), b.sub(over, one)), over)
                highest = self._floor(b.sub(middle, first), over)
                start = self.most(b.sub(lowest, low), self.i64(0))
                stop = b.add(self.least(b.sub(highest, low), b.sub(size, one)), one)
                with self.count(start, stop) as at:
                    if axis + 1 < axes:
                        along(axis + 1, b.add(b.mul(line, size), at))
                    else:
                        word = b.add(b.mul(line, words), b.lshr(at, self.i64(6)))
                        bit, before = b.and_(at, self.i64(63)), self.read(bits, word)
                        self.write(bits, word, b.or_(before, b.shl(one, bit)))
                        there = b.and_(b.lshr(before, bit), one)
                        b.store(b.add(b.load(found), b.xor(there, one)), found)

            item = self.read(coords, begin)
            with b.if_then(b.icmp_unsigned("<", item, items)):
                along(0, item)
        return self.finished(b.load(found))

    def collect(self, axes: int) -> str:
        """List what `mark` has set."""
        b, one = self.b, self.i64(1)
        items, words, *arrays = self.function.args
        windows, bits, coords, ends = map(self.array, arrays, (self.i64, self.i64, self.i32, self.i64))
        table, found = [self._window(windows, axis) for axis in range(axes)], self.variable(self.i64(0))
        low = [self.variable(self.i64(2**63 - 1)) for _ in range(1 + axes)]
        high = [self.variable(self.i64(-(2**63))) for _ in range(1 + axes)]

        def seen(column: int, value: Any) -> None:
            b.store(self.least(b.load(low[column]), value), low[column])
            b.store(self.most(b.load(high[column]), value), high[column])

        def along(axis: int, line: Any, columns: list[Any]) -> None:
            first, size = table[axis][4:]
            if axis + 1 < axes:
                with self.count(0, size) as at:
                    along(axis + 1, b.add(b.mul(line, size), at), [*columns, b.add(at, first)])
                return
            before = b.load(found)
            with self.count(0, words) as word:
                left = self.variable(self.read(bits, b.add(b.mul(line, words), word)))
                with self.during(lambda: b.icmp_signed("!=", b.load(left), self.i64(0))):
                    now = b.load(left)
                    place = b.add(b.add(b.mul(word, self.i64(64)), b.cttz(now, self.ir.IntType(1)(1))), first)
                    begin = b.mul(b.load(found), self.i64(1 + axes))
                    for at, value in enumerate([*columns, place]):
                        self.write(coords, b.add(begin, self.i64(at)), value)
                    seen(axes, place)
                    b.store(b.add(b.load(found), one), found)
                    b.store(b.and_(now, b.sub(now, one)), left)
            with b.if_then(b.icmp_signed("!=", before, b.load(found))):
                for at, value in enumerate(columns):
                    seen(at, value)

        with self.count(0, items) as item:
            along(0, item, [item])
        for column, sides in enumerate(zip(low, high)):
            for side, value in enumerate(sides):
                self.write(ends, self.i64(column + side * (1 + axes)), b.load(value))
        return self.finished(b.load(found))

    def _window(self, windows: Any, axis: int) -> list[Any]:
        return [self.read(windows, self.i64(axis * len(NUMBERS) + at)) for at in range(len(NUMBERS))]

    def _floor(self, number: Any, over: Any) -> Any:
        """The quotient rounded down, of a positive divisor."""
        b = self.b
        rest = b.srem(number, over)
        down = b.zext(b.icmp_signed("<", rest, self.i64(0)), self.i64)
        return b.sub(b.sdiv(number, over), down)
