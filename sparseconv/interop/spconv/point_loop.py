"""Points -> voxels on the CPU by two compiled loops over the points, where llvmlite is installed.

The first finds the voxel of each point, in a hash table of the voxels so far. The second writes the points into them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from sparseconv.llvm.compile import compiled, missing
from sparseconv.llvm.function import Function
from sparseconv.llvm.target import Target, host

#: 2^64 over the golden ratio: its products with neighboring keys lie far apart
SPREAD = 0x9E3779B97F4A7C15


def serves(points: torch.Tensor) -> bool:
    """Whether the loops take these points."""
    return points.device.type == "cpu" and points.dtype in (torch.float32, torch.float64) and missing() is None


def put(
    points: torch.Tensor,
    sizes: Sequence[float],
    low: Sequence[float],
    shape: Sequence[int],
    most_voxels: int,
    most_points: int,
    means: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Points (M, F) -> voxels (V, P, F) fp32, cells (V, D) and points per voxel (V,) int32, voxel of each point (M,).

    ``sizes``, ``low`` and ``shape`` have the slowest axis first, and the points have it last. Voxels are in the order
    of their first points. ``means`` fills the places without a point with the mean of the voxel's points.
    """
    points = points.detach().contiguous()
    (count, columns), axes = points.shape, len(shape)
    double = points.dtype == torch.float64
    real = ctypes.c_double if double else ctypes.c_float
    box = (real * (2 * axes))(*low, *sizes)
    extent = (ctypes.c_int64 * axes)(*shape)
    room = min(count, most_voxels)
    bits = max(1, (2 * room).bit_length())
    table = torch.zeros(1 << bits, dtype=torch.int32)
    keys, ids, places = (torch.empty(n, dtype=torch.int64) for n in (room, count, count))
    cells, counts = torch.empty(room, axes, dtype=torch.int32), torch.empty(room, dtype=torch.int32)
    find, fill = loops(axes, double, host())
    arrays = (t.data_ptr() for t in (points, table, keys, ids, places, cells, counts))
    found = find(count, columns, most_voxels, most_points, 64 - bits, box, extent, *arrays)
    cells, counts = cells[:found].clone(), counts[:found].clone()
    voxels = torch.zeros(found, most_points, columns)
    fill(count, columns, found if means else 0, most_points, *(t.data_ptr() for t in (points, places, counts, voxels)))
    return voxels, cells, counts, ids


@cache
def loops(axes: int, double: bool, target: Target) -> tuple[Callable[..., int], Callable[..., None]]:
    """The two loops for points of so many axes, in fp32 or fp64."""
    numbers, arrays = [ctypes.c_int64] * 5, [ctypes.c_void_p] * 9
    address = compiled(_Loop, ("find", 5, 9, double), "find", target, axes)
    find = ctypes.CFUNCTYPE(ctypes.c_int64, *numbers, *arrays)(address)
    address = compiled(_Loop, ("fill", 4, 4, double), "fill", target)
    return find, ctypes.CFUNCTYPE(None, *numbers[:4], *arrays[:4])(address)


class _Loop(Function):
    """One of the two loops, over points in fp32 or fp64."""

    def __init__(self, name: str, numbers: int, arrays: int, double: bool) -> None:
        super().__init__(name, numbers, arrays, returns=name == "find")
        self.single, self.real = self.ir.FloatType(), self.ir.DoubleType() if double else self.ir.FloatType()

    def find(self, axes: int) -> str:
        """The voxel of each point, and its place in it; -1 where there is none."""
        b, one = self.b, self.i64(1)
        count, columns, most_voxels, most_points, shift, *arrays = self.function.args
        kinds = (self.real, self.i64, self.real, self.i32, self.i64, self.i64, self.i64, self.i32, self.i32)
        box, extent, points, table, keys, ids, places, cells, counts = map(self.array, arrays, kinds)
        found = self.variable(self.i64(0))
        with self.count(0, count) as point:
            row, inside, quotients = b.mul(point, columns), self.ir.IntType(1)(1), []
            for axis in range(axes):
                low, size = (self.read(box, self.i64(at)) for at in (axis, axes + axis))
                value = self.read(points, b.add(row, self.i64(axes - 1 - axis)))
                quotient = b.fdiv(b.fsub(value, low), size)
                end = b.sitofp(self.read(extent, self.i64(axis)), self.real)
                for sign, bound in ((">=", self.real(0.0)), ("<", end)):  # both are false for nan
                    inside = b.and_(inside, b.fcmp_ordered(sign, quotient, bound))
                quotients.append(quotient)
            name, place = self.variable(self.i64(-1)), self.variable(self.i64(-1))
            with b.if_then(inside):
                cell = [b.fptosi(quotient, self.i64) for quotient in quotients]  # rounds down, from 0 on
                key = self.i64(0)
                for axis, number in enumerate(cell):
                    key = b.add(b.mul(key, self.read(extent, self.i64(axis))), number)
                slot, known = self.look_up(table, keys, key, shift)
                new = b.load(found)
                there = b.icmp_signed("<", new, most_voxels)
                with b.if_then(b.and_(b.icmp_signed("==", b.load(known), self.i64(0)), there)):
                    self.write(keys, new, key)
                    self.write(counts, new, self.i64(0))
                    for axis, number in enumerate(cell):
                        self.write(cells, b.add(b.mul(new, self.i64(axes)), self.i64(axis)), number)
                    b.store(b.add(new, one), found)
                    b.store(b.add(new, one), known)
                    self.write(table, slot, b.load(known))
                with b.if_then(b.icmp_signed("!=", b.load(known), self.i64(0))):
                    voxel = b.sub(b.load(known), one)
                    held = self.read(counts, voxel)
                    b.store(voxel, name)
                    with b.if_then(b.icmp_signed("<", held, most_points)):
                        b.store(b.add(b.mul(voxel, most_points), held), place)
                        self.write(counts, voxel, b.add(held, one))
            self.write(ids, point, b.load(name))
            self.write(places, point, b.load(place))
        return self.finished(b.load(found))

    def fill(self) -> str:
        """The points in their places, and means in those behind them."""
        b = self.b
        count, columns, meant, most_points, *arrays = self.function.args
        points, places, counts, voxels = map(self.array, arrays, (self.real, self.i64, self.i32, self.single))
        with self.count(0, count) as point:
            place = self.read(places, point)
            with b.if_then(b.icmp_signed(">=", place, self.i64(0))):
                row, to = b.mul(point, columns), b.mul(place, columns)
                with self.count(0, columns) as column:
                    self.write(voxels, b.add(to, column), self.read(points, b.add(row, column)))
        with self.count(0, meant) as voxel:
            held = self.read(counts, voxel)
            first = b.mul(b.mul(voxel, most_points), columns)
            with self.count(0, columns) as column:
                total = self.variable(self.single(0.0))
                begin = b.add(first, column)
                with self.count(0, held) as point:
                    value = self.read(voxels, b.add(begin, b.mul(point, columns)))
                    b.store(b.fadd(b.load(total), value), total)
                mean = b.fdiv(b.load(total), b.sitofp(held, self.single))
                with self.count(held, most_points) as point:
                    self.write(voxels, b.add(begin, b.mul(point, columns)), mean)
        return self.finished()

    # ---- pieces

    def look_up(self, table: Any, keys: Any, key: Any, shift: Any) -> tuple[Any, Any]:
        """The slot of a key, and a variable with its voxel's number plus 1; 0 where it has none yet."""
        b, one = self.b, self.i64(1)
        last = b.sub(b.shl(one, b.sub(self.i64(64), shift)), one)
        place = self.variable(b.lshr(b.mul(key, self.i64(SPREAD)), shift))
        known = self.variable(self.i64(0))
        look, compare, further, done = (self.function.append_basic_block(n) for n in ("look", "same", "next", "done"))
        b.branch(look)
        b.position_at_end(look)
        slot = b.load(place)
        there = self.read(table, slot)
        b.store(there, known)
        b.cbranch(b.icmp_signed("==", there, self.i64(0)), done, compare)
        b.position_at_end(compare)
        b.cbranch(b.icmp_signed("==", self.read(keys, b.sub(there, one)), key), done, further)
        b.position_at_end(further)
        b.store(b.and_(b.add(slot, one), last), place)
        b.branch(look)
        b.position_at_end(done)
        return slot, known
