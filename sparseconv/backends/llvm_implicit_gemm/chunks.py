"""The edges of a map as kernels read them: by tap and then by output row, in chunks of rows, by compiled loops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.llvm.compile import compiled
from sparseconv.llvm.function import Function
from sparseconv.llvm.target import host

SPARSE = 32  # output rows for each edge, over all taps, from which edges are sorted and not looked for


class Chunks(NamedTuple):
    """Rows of edges by tap and then by output row (P,) int32; rows that begin chunks (M+1,) int64; where taps' edges
    of each chunk begin (M+1, K) int64."""

    ins: torch.Tensor
    outs: torch.Tensor
    cuts: torch.Tensor
    bounds: torch.Tensor


def cut(kernel_map: KernelMap, rows: int) -> Chunks:
    """Chunks of ``rows`` output rows, kept with the map for the next call.

    Kernels read them by address, so what one thread kept no other may replace.
    """
    kept, key = kernel_map.prepared, (Chunks, rows)
    if key not in kept:
        kept.setdefault(key, _cut(kernel_map, rows))
    found: Chunks = kept[key]
    return found


def _cut(kernel_map: KernelMap, rows: int) -> Chunks:
    ins, outs = kernel_map.prepared.get(Chunks, (kernel_map.in_rows, kernel_map.out_rows))
    total, taps, ends = kernel_map.num_out, kernel_map.num_taps, kernel_map.tap_offsets
    cuts = torch.arange(0, total + rows, rows).clamp_(max=total)
    bounds = torch.empty(len(cuts), taps, dtype=torch.int64)
    find, places = _find(), (ends.data_ptr(), cuts.data_ptr(), bounds.data_ptr())
    if not find(taps, len(cuts), *places, outs.data_ptr()):
        if taps * total > SPARSE * len(ins):
            order = (kernel_map.pair_taps.long() * total + outs).argsort()
            ins, outs = ins[order], outs[order]
        else:
            given, (ins, outs) = (ins, outs), (torch.empty_like(ins), torch.empty_like(outs))
            table = torch.zeros(total, dtype=torch.int32)
            _sort()(taps, total, ends.data_ptr(), *(t.data_ptr() for t in (*given, table, ins, outs)))
        ins, outs = kernel_map.prepared.setdefault(Chunks, (ins, outs))
        find(taps, len(cuts), *places, outs.data_ptr())
    return Chunks(ins, outs, cuts, bounds)


@cache
def _find() -> Callable[..., int]:
    return ctypes.CFUNCTYPE(*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 4)(compiled(_Find, (), "find", host()))


@cache
def _sort() -> Callable[..., int]:
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


def reversed_edges(kernel_map: KernelMap) -> tuple[KernelMap, list[int] | slice]:
    """A map with the reversed edges, and which of this map's taps each of its own is.

    The reversed edges of a tap are those of its mirror, where there is one: the chunks of the map serve twice.
    """
    return (kernel_map.reverse(), slice(None)) if kernel_map.mirror is None else (kernel_map, list(kernel_map.mirror))
