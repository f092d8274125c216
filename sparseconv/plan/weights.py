"""The layouts a weight may come in."""

from __future__ import annotations

import math

import torch

from sparseconv.plan.casting import packed_as


def by_tap(weight: torch.Tensor, kernel: tuple[int, ...] | None, taps: int) -> torch.Tensor:
    """A weight in any accepted layout as a view (K, C_in/G, C_out); gradients flow to the tensor given.

    Three dimensions are always (K, C_in/G, C_out); 2 + D of them, D > 1, are torch's (C_out, C_in/G, *kernel).
    ``kernel`` is None where the taps are an explicit list, which has no such layout.
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
