"""The CPU's strategy where llvmlite can be used: an implicit matrix product, compiled for the CPU at hand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from sparseconv.backends.base import Backend, Request, not_on_cpu, swap_channels
from sparseconv.backends.cpu_threads import run_on_threads
from sparseconv.backends.gather_scatter import NumpyGatherScatter
from sparseconv.backends.integers import Rescale
from sparseconv.backends.llvm_implicit_gemm.kernels import (
    APART,
    Operands,
    integer_kernel,
    kernel,
    runs,
    together_in_rows,
    together_in_weight,
)
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.llvm.compile import compiled, missing
from sparseconv.llvm.function import Function
from sparseconv.llvm.target import Target, host
from sparseconv.memory import empty

CHUNK = 1 << 20  # bytes of the input and output rows of a chunk: half of an L2 cache
SMALLER = 4  # how much smaller chunks of integers are: a tile is soon done, and waits for rows of a far cache
NEAR, BLOCK = 36 << 10, 256  # bytes of most of an L1 cache, and of the columns of a tile
EDGES = 96  # that tiles of the weight's gradient run over one after another at most: their rows stay in an L1 cache
SHARED = 1 << 20  # multiplications from which a call is worth sharing among threads: some ten microseconds
#: parts of a weight's gradient, so that a thread that is late leaves some of its own to others; bytes of all of them,
#: unless threads need more: a share of an L3 cache
PARTS, PARTS_BYTES = 8, 16 << 20
WIDE, MANY = 1 << 16, 1 << 28  # numbers of a tap's weight, and multiplications, from which its gradient is torch's
SPARSE = 32  # output rows for each edge, over all taps, from which edges are sorted and not looked for
NARROW = 4  # channels of a group under which there is no product to speak of


class LlvmImplicitGemm(Backend):
    """Tiles of the edges of one tap, whose sums stay in vector registers; rows are read and written where they lie.

    Output rows are cut into chunks that a cache holds. A chunk has one owner, who goes through its taps in order, so
    nothing is raced for and every run with as many threads gives the same bits. The weight's gradient is summed in
    parts of whole chunks, then over the parts in order.

    A wide weight's gradient does not fit registers and is read again for every few edges. There torch
    multiplies gathered rows.

    Args:
        target: the CPU to compile for; None for this one. Another one's kernels run where this one has what they use.
    """

    name = "llvm_implicit_gemm"

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def unsupported(self, request: Request) -> str | None:
        channels = min(request.c_in, request.c_out) // request.groups
        if request.groups > 1 and channels < NARROW:
            return f"{channels} channels a group are no product: it needs {NARROW}"
        return not_on_cpu(request) or missing()

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
        c_in, c_out = x.shape[1], weight.shape[2]
        y = empty((kernel_map.num_out, c_out), wide)
        if 0 in y.shape:
            return y.to(dtype)
        x, weight = x.to(wide).contiguous(), weight.to(wide).contiguous()
        start = torch.zeros(c_out, dtype=wide) if bias is None else bias.to(wide).contiguous()
        operands = _operands(x, y, weight, kernel_map, groups, (c_in, c_out))
        operands.bias = start.data_ptr()
        operands.whole = _whole_tap(kernel_map) if c_in else -1
        threads = _threads(kernel_map.num_pairs * weight[0].numel())
        self._run("forward", operands, wide, threads, kernel_map, x, y, weight, start)
        return y.to(dtype)

    @torch.no_grad()
    def input_grad(
        self, grad_out: torch.Tensor, weight: torch.Tensor, kernel_map: KernelMap, groups: int
    ) -> torch.Tensor:
        edges, taps = reversed_edges(kernel_map)
        return self.forward(grad_out, swap_channels(weight, groups)[taps], edges, groups)

    @torch.no_grad()
    def weight_grad(self, x: torch.Tensor, grad_out: torch.Tensor, kernel_map: KernelMap, groups: int) -> torch.Tensor:
        dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
        taps, c_in, c_out = kernel_map.num_taps, x.shape[1], grad_out.shape[1]
        if _is_wide(kernel_map, c_in * c_out // groups):
            return _WITH_TORCH.weight_grad(x, grad_out, kernel_map, groups)
        threads = _threads(kernel_map.num_pairs * c_in * c_out // groups)
        parts = _parts(threads, taps * c_in // groups * c_out * wide.itemsize)
        grams = torch.zeros(parts, taps, c_in // groups, c_out, dtype=wide)
        if grams.numel():
            x, grad_out = x.to(wide).contiguous(), grad_out.to(wide).contiguous()
            operands = _operands(x, grad_out, grams[0], kernel_map, groups, (c_in, c_out))
            operands.parts, operands.w_part = parts, grams[0].numel()
            operands.edges = max(16, min(EDGES, NEAR // (x.itemsize * c_in // groups + BLOCK)))
            self._run("weight_grad", operands, wide, threads, kernel_map, x, grad_out, grams)
        return (grams[0] if parts == 1 else grams.sum(0)).to(dtype)

    @torch.no_grad()
    def integers(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: torch.Tensor | None = None,
        rescale: Rescale | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        c_out = weight.shape[2]
        out = empty((kernel_map.num_out, c_out), torch.int32 if rescale is None else torch.int8)
        if 0 in out.shape:
            return out
        kind = "pairs" if x.numel() and int(x.min()) < 0 else "quads"
        count = 2 if kind == "pairs" else 4
        rows, taps = together_in_rows(x, groups, count), together_in_weight(weight, count)
        start = torch.zeros(c_out, dtype=torch.int32) if bias is None else bias.contiguous()
        operands = _operands(rows, out, taps, kernel_map, groups, (rows.shape[1], c_out))
        operands.bias = start.data_ptr()
        operands.whole = _whole_tap(kernel_map) if rows.shape[1] else -1
        threads = _threads(kernel_map.num_pairs * taps[0].numel())
        held = []
        if rescale is not None:
            sums = empty((threads, operands.y_part), torch.int32)
            operands.y = sums.data_ptr()
            multiplier = rescale.multiplier.contiguous()
            operands.out, operands.multiplier = out.data_ptr(), multiplier.data_ptr()
            operands.shift, operands.residual_multiplier = rescale.shift, rescale.residual_multiplier
            operands.slope, operands.low = rescale.slope, rescale.low
            kind, held = f"{kind}_rescaled", [sums, multiplier]
            if residual is not None:
                residual = residual.contiguous()
                operands.residual = residual.data_ptr()
                held.append(residual)
        self._run(kind, operands, torch.int32, threads, kernel_map, rows, out, taps, start, *held)
        return out

    def workspace_bytes(self, request: Request) -> int:
        wide = torch.promote_types(request.dtype, torch.float32)
        kernel_map, size = request.kernel_map, wide.itemsize
        if request.dtype == torch.int8:  # int32 sums, and operands of up to 32 bits for two channels
            numbers = kernel_map.num_in * (request.c_in + request.groups) + kernel_map.num_out * request.c_out
            return size * (numbers + kernel_map.num_taps * (request.c_in // request.groups + 1) * request.c_out)
        weight = kernel_map.num_taps * request.c_in * request.c_out // request.groups * size
        parts = _parts(_threads(request.flops // 2), weight)
        rows = kernel_map.num_in * request.c_in + kernel_map.num_out * request.c_out
        widened = 0 if wide == request.dtype else rows * size + weight
        own = widened + (parts + 2) * weight
        if _is_wide(kernel_map, request.c_in * request.c_out // request.groups):
            return max(own, _WITH_TORCH.workspace_bytes(request))
        return own

    def describe(self, request: Request) -> list[str]:
        register = (self.target or host()).register
        chunks = len(_chunks(request.kernel_map, request.c_in, request.c_out, 4)[2]) - 1
        counted = {"chunk": chunks, "thread": _threads(request.flops // 2)}
        words = [f"{count} {name}{'s' * (count != 1)}" for name, count in counted.items()]
        return [f"vectors of {register} bytes, {words[0]} of output rows, {words[1]}"]

    def _run(self, kind: str, operands: Operands, dtype: torch.dtype, threads: int, *held: object) -> None:
        """Every part of a kernel's work, by threads that take one after another.

        ``held`` owns the memory that ``operands`` points to, and lives until the last thread is done with it.
        """
        is_double, target = dtype == torch.float64, self.target or host()
        blocks_of = runs(operands.c_out, is_double, target)
        for number, (_, blocks) in enumerate(blocks_of):
            setattr(operands, f"run{number}", blocks)
        taken = np.zeros(threads * APART, np.int64)
        operands.regions, operands.taken = threads, taken.ctypes.data
        alone = len(blocks_of) == 1 and blocks_of[0][1] == 1
        shapes = tuple(shape for shape, _ in blocks_of)
        if dtype == torch.int32:
            address = integer_kernel(kind, shapes, target)
        else:
            address = kernel(kind, shapes, alone, is_double, target)
        run_on_threads(address, ctypes.addressof(operands), threads, (operands, taken, *held))


#: what sums the gradients of wide weights
_WITH_TORCH = NumpyGatherScatter()


def _is_wide(kernel_map: KernelMap, numbers: int) -> bool:
    """Whether torch sums the gradient of a weight with so many numbers a tap."""
    return numbers >= WIDE and numbers * kernel_map.num_pairs >= MANY


def _whole_tap(kernel_map: KernelMap) -> int:
    """The tap that has an edge for every row, -1 if none is known: rows that are dead have none."""
    tap = kernel_map.identity_tap
    return -1 if tap is None or kernel_map.tap_counts[tap] < kernel_map.num_out else tap


def _threads(multiplications: int) -> int:
    return torch.get_num_threads() if multiplications >= SHARED else 1


def _parts(threads: int, weight_bytes: int) -> int:
    return 1 if threads == 1 else max(threads, min(PARTS, PARTS_BYTES // max(1, weight_bytes)))


def _operands(
    x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, kernel_map: KernelMap, groups: int, channels: tuple[int, int]
) -> Operands:
    """What both kernels read of contiguous x (N_in, C_in), y (N_out, C_out) and w (K, C_in/G, C_out)."""
    c_in, c_out = channels
    size = x.itemsize * (SMALLER if x.dtype == torch.int32 else 1)
    ins, outs, cuts, bounds = _chunks(kernel_map, c_in, c_out, size)
    return Operands(
        chunks=len(cuts) - 1,
        taps=kernel_map.num_taps,
        groups=groups,
        c_in=c_in // groups,
        c_out=c_out // groups,
        in_row=c_in,
        out_row=c_out,
        w_row=c_out,
        w_tap=w[0].numel(),
        y_part=int(cuts[:2][-1]) * c_out,
        x=x.data_ptr(),
        y=y.data_ptr(),
        w=w.data_ptr(),
        ins=ins.data_ptr(),
        outs=outs.data_ptr(),
        cuts=cuts.data_ptr(),
        bounds=bounds.data_ptr(),
    )


def _chunks(kernel_map: KernelMap, c_in: int, c_out: int, size: int) -> Chunks:
    """Edges in chunks of output rows that a cache holds, of which each thread gets several."""
    rows = max(64, CHUNK // (size * max(1, c_in + c_out)))
    return cut(kernel_map, min(rows, max(64, -(-kernel_map.num_out // (4 * torch.get_num_threads())))))


# ---- edges in chunks of output rows


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
