"""The dense products of the CPU's strategy: which of torch's CPU libraries multiplies, and into what memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from time import perf_counter

import numpy as np
import torch

from sparseconv.backends.base import Request
from sparseconv.torch_private import onednn_linear

_buffers = threading.local()


def not_on_cpu(request: Request) -> str | None:
    """None where a request is for the CPU and of a dtype that it computes, else a sentence that says why not."""
    if request.device.type != "cpu":
        return f"it runs on the CPU and the plan is on {request.device}"
    if request.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8):
        return f"it has no arithmetic for {request.dtype}: use fp16, bf16, fp32 or fp64, or int8 without a gradient"
    return None


def buffer(name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised matrix that the next caller in this thread with this name gets again."""
    size = rows * columns * dtype.itemsize
    kept = getattr(_buffers, name, None)
    if kept is None or len(kept) < size:
        kept = torch.from_numpy(np.empty(max(size, 1), np.uint8))
        setattr(_buffers, name, kept)
    return kept[:size].view(dtype).view(rows, columns)


@cache
def linear() -> Callable[..., torch.Tensor] | None:
    """oneDNN's fp32 product where it is well ahead of torch's BLAS on this machine, else None.

    oneDNN is well ahead of MKL on some CPUs and behind it on others, so each process times both once. The bound lies
    far from either case, and the least of many short runs counts. So every process makes the same choice.
    """
    onednn = onednn_linear
    if onednn is None or not torch.backends.mkldnn.is_available():
        return None
    x, w, out = torch.ones(2048, 64), torch.ones(64, 64), torch.empty(2048, 64)
    blas = _least(lambda: torch.mm(x, w, out=out))
    return onednn if 1.5 * _least(lambda: onednn(x, w.t(), None, "none", [], "")) < blas else None


def _least(call: Callable[[], object]) -> float:
    """Seconds of the fastest of 20 runs."""
    found = []
    for _ in range(20):
        start = perf_counter()
        call()
        found.append(perf_counter() - start)
    return min(found)


def multiply(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out (M, b) = x (M, a) @ w (a, b).

    oneDNN gives a tensor of its own, so that a copy is paid, and asks about 10 us for a call: below some 2 Mflop,
    or under 24 channels, the BLAS that writes in place is faster.
    """
    is_large = x.dtype == torch.float32 and min(w.shape) >= 24 and x.shape[0] * w.numel() >= 1_000_000
    onednn = linear() if is_large else None
    if onednn is None:
        torch.mm(x, w, out=out)
    else:
        out.copy_(onednn(x, w.t(), None, "none", [], ""))


def add_sums(
    rows: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, fill: bool = False
) -> None:
    """out[r] (R, C) += the sum of rows[s] (E, C) over s in slots[offsets[r]:offsets[r+1]], in that order.

    With ``fill``, what ``out`` held is ignored. One owner for each row of ``out``: the same bits in every run.
    """
    if len(slots) == 0:
        if fill:
            out.zero_()
        return
    sums = torch.embedding_bag(rows, slots, offsets, False, 0, False, None, True)[0]
    out.copy_(sums) if fill else out.add_(sums)


def accumulate_gram(x: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    """out (a, b) += x (M, a)^T @ g (M, b).

    The weight gradient of a 1x1 convolution over 16 images is the same sum, and goes to oneDNN. oneDNN generates code
    for every new shape and keeps a bounded number of them. So it gets multiples of 256 rows, and BLAS gets the rest.
    """
    rows = x.shape[0] // 256 * 256
    if linear() is None or x.dtype != torch.float32 or rows * out.numel() < 4_000_000:
        rows = 0
    if rows:
        a, b = out.shape
        images = (t[:rows].view(16, rows // 16, 1, -1).permute(0, 3, 1, 2) for t in (g, x))
        shape = x.new_zeros(1).expand(b, a, 1, 1)
        once, nought = [1, 1], [0, 0]
        _, gradient, _ = torch.ops.aten.convolution_backward(
            *images, shape, None, once, nought, once, False, nought, 1, [False, True, False]
        )
        out += gradient.view(b, a).t()
    if rows < x.shape[0]:
        out.addmm_(x[rows:].t(), g[rows:])
