"""The layouts a weight may come in, and the packed copy of the foreign one."""

from __future__ import annotations

import math

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sparseconv import transforms


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


class PackedWeights:
    """Contiguous (K, C_in/G, C_out) copies of weights in the foreign layout, for calls that need no gradient.

    A copy is kept with the version of the tensor it was made from: an in-place step of an optimiser makes it stale, and
    the next call packs anew. Where a gradient is needed the copy is made in the graph, so that it is never detached.
    """

    def __init__(self) -> None:
        #: weight -> ((version, address), packed); made with the first copy, which most plans never need
        self._copies: WeakTensorKeyDictionary | None = None

    def pack(self, weight: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """``view`` of ``weight``, contiguous."""
        if view.is_contiguous() or torch.compiler.is_compiling():
            return view
        if weight.is_inference() or (torch.is_grad_enabled() and weight.requires_grad) or transforms.present():
            return view.contiguous()  # that of a transform lives no longer than a call
        if self._copies is None:
            self._copies = WeakTensorKeyDictionary()
        state = (weight._version, weight.data_ptr())
        kept = self._copies.get(weight)
        if kept is None or kept[0] != state or kept[1].dtype != view.dtype or kept[1].device != view.device:
            kept = (state, view.detach().contiguous())
            self._copies[weight] = kept
        return kept[1]

    def __getstate__(self) -> dict:
        return {}

    def __setstate__(self, state: dict) -> None:
        self._copies = None
