"""The forward loop over int8 features: some channels are one number of 32 bits, and the sums are int32.

A tile of edges is that of `kernels`; what differs is one step of it. There a channel is multiplied and added by one
instruction. Here two channels of 16 bits are (``pairs``), by x86's ``pmaddwd`` and an addition. Where no feature is
negative, as after a ReLU, four channels of 8 bits are (``quads``), by ``pmaddubsw``, ``pmaddwd`` and an addition: its
sums of two products are at most 2 * 127 * 127, which 16 bits hold, so nothing saturates. Elsewhere both are written
with shifts. Each thread rescales the rows of a chunk while the caches hold their sums.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from sparseconv.backends.integers import LARGEST, SLOPE_BITS
from sparseconv.backends.llvm_implicit_gemm.kernels import Loops, placed
from sparseconv.backends.llvm_implicit_gemm.operands import Shape
from sparseconv.llvm.compile import compiled
from sparseconv.llvm.target import Target, binding

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
        piece = self.b.mul(self.thread, self.given("y_part"))
        return self.b.gep(self.given("y"), [self.b.sub(piece, self.b.mul(first, self.given("out_row")))])

    def finish_rows(self, chunk: Any, sums: Any) -> None:
        """out = the rescaled sums of the rows of a chunk."""
        if not self.rescales:
            return
        first, last = self.rows_of(chunk)
        adds = self.b.icmp_signed("!=", self.b.ptrtoint(self.given("residual"), self.i64), self.place(0))
        scales = self.b.icmp_signed("!=", self.given("slope"), self.place(1 << SLOPE_BITS))
        bends = self.b.and_(scales, self.b.icmp_signed("<", self.given("low"), self.place(0)))
        with self.count(self.place(0), self.given("groups")) as group:
            begin = self.b.mul(group, self.given("c_out"))
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
        place = self.b.add(self.b.mul(row, self.given("out_row")), channel)
        total = self.b.mul(self.widened(sums, place, width), self.widened(self.given("multiplier"), channel, width))
        if residual:
            more = self.widened(self.given("residual"), place, width)
            total = self.b.add(total, self.b.mul(more, self.all(self.given("residual_multiplier"), width)))
        half = self.b.shl(self.place(1), self.b.sub(self.given("shift"), self.place(1)))
        value = self.b.ashr(self.b.add(total, self.all(half, width)), self.all(self.given("shift"), width))
        if slope:
            less = self.b.mul(value, self.all(self.given("slope"), width))
            less = self.b.ashr(self.b.add(less, self.all(1 << (SLOPE_BITS - 1), width)), self.all(SLOPE_BITS, width))
            value = self.b.select(self.b.icmp_signed("<", value, self.all(0, width)), less, value)
        for limit, sign in ((self.all(self.given("low"), width), "<"), (self.all(LARGEST, width), ">")):
            value = self.b.select(self.b.icmp_signed(sign, value, limit), limit, value)
        byte = self.ir.VectorType(self.ir.IntType(8), width)
        address = self.b.bitcast(self.b.gep(self.given("out"), [place]), byte.as_pointer())
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
