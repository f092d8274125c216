"""Weights as kernels read them: by tap, contiguous and in the dtype of the call, in copies that live for one call."""

from __future__ import annotations

import math
from typing import Any

import torch

from sparseconv.checks import warn
from sparseconv.gpu.streams import current


def by_tap(weight: torch.Tensor, kernel: tuple[int, ...] | None, taps: int) -> torch.Tensor:
    """A weight in any accepted layout as a view (K, C_in/G, C_out); gradients flow to the tensor given.

    Three dimensions are always (K, C_in/G, C_out); 2 + D of them, D > 1, are torch's (C_out, C_in/G, *kernel).
    ``kernel`` is None where the taps are an explicit list, which has no such layout. Warns where torch's layout is not
    the only one that fits.
    """
    shape = weight.shape
    if len(shape) == 3:
        if shape[0] != taps:
            hint = " (a torch conv1d weight (C_out, C_in, k) goes in as weight.permute(2, 1, 0))"
            raise ValueError(
                f"a weight of 3 dimensions is (K, C_in/G, C_out) with K = {taps} taps; got {tuple(shape)}"
                + (hint if shape[2] == taps else "")
            )
        return weight
    if kernel is not None and len(kernel) > 1 and len(shape) == 2 + len(kernel):
        if tuple(shape[2:]) != kernel:
            raise ValueError(
                f"a weight of {len(shape)} dimensions is (C_out, C_in/G, {', '.join(map(str, kernel))}) here; got "
                f"{tuple(shape)}: other libraries' layouts go through permute first"
            )
        if tuple(shape[1:-1]) == kernel and taps > 1 and not torch.compiler.is_compiling():
            warn(
                f"a weight {tuple(shape)} is taken in torch's layout (C_out, C_in/G, *kernel), but spconv's (C_out, "
                "*kernel, C_in/G) has the same shape here. To be explicit, pass "
                "weight.flatten(2).permute(2, 1, 0) for torch's or weight.flatten(1, -2).permute(1, 2, 0) for spconv's"
            )
        return weight.reshape(*shape[:2], math.prod(kernel)).permute(2, 1, 0)
    accepted = f"(K = {taps}, C_in/G, C_out)"
    if kernel is not None and len(kernel) > 1:
        accepted += f" or (C_out, C_in/G, {', '.join(map(str, kernel))})"
    raise ValueError(f"the weight must be {accepted}; got {tuple(shape)}")


def packed(view: torch.Tensor) -> torch.Tensor:
    """A weight by tap (K, C_in/G, C_out) as kernels read it, contiguous: itself, or a copy that lives for one call.

    No version of a tensor tells of a write through ``.data``, numpy or another process, so no copy is kept. In the
    graph it is an operation like others; a compiler decides for itself what it copies.
    """
    return view if view.is_contiguous() or torch.compiler.is_compiling() else packed_as(view, view.dtype)


# ---- casts of a captured run: one launch each


def packed_as(taps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Taps (K, C_in/G, C_out) of any strides, contiguous in a dtype; themselves where they are that."""
    if taps.dtype == dtype and taps.is_contiguous():
        return taps
    if torch.compiler.is_compiling() or current() is None or not taps.is_cuda:
        same = taps.dtype == dtype  # of which Tensor.to returns what it was given, whatever its strides
        return taps.contiguous() if same else taps.to(dtype, memory_format=torch.contiguous_format)
    if taps.requires_grad and torch.is_grad_enabled():
        return _Packed.apply(taps, dtype)
    return _copied(taps, torch.empty(taps.shape, dtype=dtype, device=taps.device))


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, taps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.layout = taps.shape, taps.stride(), taps.dtype
        return _copied(taps, torch.empty(taps.shape, dtype=dtype, device=taps.device))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        shape, stride, dtype = ctx.layout
        return _copied(grad, torch.empty_strided(shape, stride, dtype=dtype, device=grad.device)), None


def _copied(source: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """``into`` (K, C_in/G, C_out) filled; where one of both lies as (C_out, K, C_in/G) does, by one transposition."""
    for one, other, is_transposed in ((source, into, False), (into, source, True)):
        outward = one.permute(2, 0, 1)
        if outward.is_contiguous() and other.is_contiguous() and not (one.is_contiguous() or source.is_neg()):
            from sparseconv.gpu.transposing import is_aligned, transpose  # Triton is loaded where it is used

            if is_aligned(one, other):
                by_channel, by_tap = outward.flatten(1), other.flatten(0, 1)
                transpose(*((by_tap, by_channel) if is_transposed else (by_channel, by_tap)))
                return into
    return into.copy_(source)
