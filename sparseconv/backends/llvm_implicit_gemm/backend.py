"""The CPU's strategy where llvmlite can be used: an implicit matrix product, compiled for the CPU at hand."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparseconv.backends.base import Backend, Request, not_on_cpu
from sparseconv.backends.gather_scatter import NumpyGatherScatter
from sparseconv.backends.integers import Rescale
from sparseconv.backends.llvm_implicit_gemm.kernels import (
    APART,
    Operands,
    find_bounds,
    integer_kernel,
    kernel,
    runs,
    sort_edges,
    together_in_rows,
    together_in_weight,
)
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.llvm.compile import missing
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
            return f"{channels} channels per group are too few for its products: it needs {NARROW}"
        return not_on_cpu(request) or missing()

    @torch.no_grad()
    def forward(
        self, x: Tensor, weight: Tensor, kernel_map: KernelMap, groups: int, bias: Tensor | None = None
    ) -> Tensor:
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
    def weight_grad(self, x: Tensor, grad_out: Tensor, kernel_map: KernelMap, groups: int) -> Tensor:
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
        x: Tensor,
        weight: Tensor,
        kernel_map: KernelMap,
        groups: int,
        bias: Tensor | None = None,
        rescale: Rescale | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
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
        shapes, blocks = zip(*runs(operands.c_out, is_double, target))
        for number, count in enumerate(blocks):
            setattr(operands, f"run{number}", count)
        taken = np.zeros(threads * APART, np.int64)
        operands.regions, operands.taken = threads, taken.ctypes.data
        if dtype == torch.int32:
            address = integer_kernel(kind, shapes, target)
        else:
            address = kernel(kind, shapes, blocks == (1,), is_double, target)
        run_on_threads(address, ctypes.addressof(operands), threads, (operands, taken, *held))


#: what sums the gradients of wide weights
_WITH_TORCH = NumpyGatherScatter()


def _is_wide(kernel_map: KernelMap, numbers: int) -> bool:
    """Whether torch sums the gradient of a weight with so many numbers per tap."""
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
    x: Tensor, y: Tensor, w: Tensor, kernel_map: KernelMap, groups: int, channels: tuple[int, int]
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


class Chunks(NamedTuple):
    """Rows of edges by tap and then by output row (P,) int32; rows that begin chunks (M+1,) int64; where taps' edges
    of each chunk begin (M+1, K) int64."""

    ins: Tensor
    outs: Tensor
    cuts: Tensor
    bounds: Tensor


def _chunks(kernel_map: KernelMap, c_in: int, c_out: int, size: int) -> Chunks:
    """Edges in chunks of output rows that a cache holds, of which each thread gets several; kept with the map.

    Kernels read them by address, so what one thread kept no other may replace.
    """
    most = max(64, CHUNK // (size * max(1, c_in + c_out)))
    rows = min(most, max(64, -(-kernel_map.num_out // (4 * torch.get_num_threads()))))
    kept, key = kernel_map.prepared, (Chunks, rows)
    if key not in kept:
        kept.setdefault(key, _cut(kernel_map, rows))
    found: Chunks = kept[key]
    return found


def _cut(kernel_map: KernelMap, rows: int) -> Chunks:
    ins, outs, ends = kernel_map.pairs
    ins, outs = kernel_map.prepared.get(Chunks, (ins, outs))
    total, taps = kernel_map.num_out, kernel_map.num_taps
    cuts = torch.arange(0, total + rows, rows).clamp_(max=total)
    bounds = torch.empty(len(cuts), taps, dtype=torch.int64)
    find, places = find_bounds(), (ends.data_ptr(), cuts.data_ptr(), bounds.data_ptr())
    if not find(taps, len(cuts), *places, outs.data_ptr()):
        if taps * total > SPARSE * len(ins):
            order = (kernel_map.pair_taps.long() * total + outs).argsort()
            ins, outs = ins[order], outs[order]
        else:
            given, (ins, outs) = (ins, outs), (torch.empty_like(ins), torch.empty_like(outs))
            table = torch.zeros(total, dtype=torch.int32)
            sort_edges()(taps, total, *map(Tensor.data_ptr, (ends, *given, table, ins, outs)))
        ins, outs = kernel_map.prepared.setdefault(Chunks, (ins, outs))
        find(taps, len(cuts), *places, outs.data_ptr())
    return Chunks(ins, outs, cuts, bounds)


# ---- threads

_FUNCTION, _process = ctypes.CFUNCTYPE(None, ctypes.c_void_p), os.getpid()


def run_on_threads(function: int, argument: int, threads: int, owner: object) -> None:
    """Call a compiled function (its address) with a pointer on as many threads, without Python's lock.

    They are torch's own threads where it uses GNU's OpenMP, as its Linux packages do: after an operation those wait
    for the next one awake, in the way of any others. ``owner`` owns the memory behind the pointer; every thread's task
    refers to it, so that memory that a thread still writes is never given away.
    """
    call = _FUNCTION(function)
    if threads == 1:
        call(argument)
    elif os.getpid() == _process and (team := _openmp()) is not None:
        team(function, argument, threads, 0)
    else:  # OpenMP's threads do not survive a fork

        def work(_: int, owner: object = owner) -> None:
            call(argument)

        for done in [_pool(threads, os.getpid()).submit(work, number) for number in range(threads)]:
            done.result()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """A forked process, which inherits no threads, makes its own."""
    return ThreadPoolExecutor(threads, "sparseconv")


@cache
def _openmp() -> Any:
    """``GOMP_parallel(function, argument, threads, flags)`` of the OpenMP that this process has loaded, or None."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return found
