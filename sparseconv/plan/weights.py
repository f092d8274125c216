"""The layouts a weight may come in, and weights that were packed once."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.gpu.streams import current
from sparseconv.kinds import as_device, check_tensor, warn

if TYPE_CHECKING:
    from jaxtyping import Shaped

#: which tap each of the first axis of a packed weight is: taps along each axis, or an explicit list of their offsets
Taps = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeights:
    """A weight as kernels read it, (K, C_in/G, C_out) and contiguous: a copy, made once by `ConvolutionPlan.pack`.

    `ConvolutionPlan.execute` takes it in the place of the weight, on any plan with the same taps and groups, and copies
    nothing. It keeps the numbers that the weight had when it was packed: pack anew what was trained since. It has no
    gradient, so one that was made of a tensor that requires a gradient is refused where gradients are recorded.

    >>> import sparseconv as sc
    >>> plan = sc.ConvolutionPlan(sc.VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1]])), 3)
    >>> weight = torch.ones(8, 4, 3, 3)
    >>> packed = plan.pack(weight)
    >>> packed
    PackedWeights(kernel_size (3, 3), 4 -> 8 channels, torch.float32, cpu)
    >>> torch.equal(plan.execute(torch.ones(2, 4), packed), plan.execute(torch.ones(2, 4), weight))
    True
    """

    _tensor: Shaped[torch.Tensor, "*shape"]
    _taps: Taps
    _groups: int
    _learns: bool

    @property
    def shape(self) -> torch.Size:
        """(K, C_in/G, C_out)."""
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def to(self, device: torch.device | str) -> PackedWeights:
        """These weights on another device; themselves if they are there."""
        there = self._tensor.to(as_device(device))
        return self if there is self._tensor else PackedWeights(there, self._taps, self._groups, self._learns)

    def __repr__(self) -> str:
        _, c_in, c_out = self.shape
        groups = f" in {self._groups} groups" if self._groups > 1 else ""
        return (
            f"PackedWeights({_named(self._taps)}, {c_in * self._groups} -> {c_out} channels{groups}, {self.dtype}, "
            f"{self.device})"
        )


def _named(taps: Taps) -> str:
    return f"{len(taps)} explicit taps" if isinstance(taps[0], tuple) else f"kernel_size {taps}"


def pack(weight: torch.Tensor, kernel: Sequence[int] | None, offsets: Taps, groups: int) -> PackedWeights:
    """A weight in any accepted layout, packed for plans of these taps."""
    check_tensor("weight", weight)
    if not weight.is_floating_point():
        raise TypeError(f"weight must be floating point; got {weight.dtype}")
    taps = by_tap(weight, None if kernel is None else tuple(kernel), len(offsets))
    with torch.inference_mode(False), torch.no_grad():  # so that a later call can save it for an input's gradient
        copied = taps.clone(memory_format=torch.contiguous_format)
    return PackedWeights(copied, offsets if kernel is None else tuple(kernel), groups, weight.requires_grad)


def unpacked(weight: Any, kernel: tuple[int, ...] | None, offsets: Taps, groups: int, x: object) -> Any:
    """What a call with ``x`` was given as weight; its taps (K, C_in/G, C_out) where it was packed.

    Raises:
        ValueError: packed for other taps or groups, or for a gradient that it would not give.
        TypeError: packed in another dtype than that of the call.
    """
    if not isinstance(weight, PackedWeights):
        return weight
    taps = offsets if kernel is None else kernel
    if weight._taps != taps:
        raise ValueError(
            f"the plan has {_named(taps)}, but these weights were packed for {_named(weight._taps)}: pack them by "
            "this plan"
        )
    if weight._groups != groups:
        raise ValueError(
            f"the plan has groups={groups}, but these weights were packed for {weight._groups}: pack them by this plan"
        )
    if weight._learns and torch.is_grad_enabled():
        raise ValueError(
            "these packed weights were made of a tensor that requires a gradient, and would give it none: execute "
            "under torch.no_grad(), pass the weight itself, or pack weight.detach()"
        )
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        wanted = x.dtype
        if torch.is_autocast_enabled(x.device.type) and wanted != torch.float64:
            wanted = torch.get_autocast_dtype(x.device.type)
        if wanted != weight.dtype:
            raise TypeError(
                f"the call computes in {wanted}, but these weights were packed in {weight.dtype}: pack "
                f"weight.to({wanted})"
            )
    return weight._tensor


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
                "*kernel, C_in/G) fits as well: weight.flatten(2).permute(2, 1, 0) says torch's, "
                "weight.flatten(1, -2).permute(1, 2, 0) spconv's"
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


# ---- casts of one call of a captured run: one launch each, and a gradient where the run gathers all of them


class _State(threading.local):
    places: dict[int, torch.Tensor] | None = None


_state = _State()


@contextmanager
def gradients_into(places: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Within it, the gradient of a weight is written into the place of its address, the first time it is found."""
    before, _state.places = _state.places, dict(places)
    try:
        yield
    finally:
        _state.places = before


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
        ctx.at, ctx.layout = taps.data_ptr(), (taps.shape, taps.stride(), taps.dtype)
        return _copied(taps, torch.empty(taps.shape, dtype=dtype, device=taps.device))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        shape, stride, dtype = ctx.layout
        place = None if _state.places is None else _state.places.pop(ctx.at, None)
        if place is None or place.numel() != grad.numel() or place.dtype != dtype:
            into = torch.empty_strided(shape, stride, dtype=dtype, device=grad.device)
        else:
            into = place.as_strided(shape, stride, place.storage_offset())
        return _copied(grad, into), None


def _copied(source: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """``into`` (K, C_in/G, C_out) filled; where one of both lies as (C_out, K, C_in/G) does, by one transposition."""
    for one, other, turns in ((source, into, False), (into, source, True)):
        outward = one.permute(2, 0, 1)
        if outward.is_contiguous() and other.is_contiguous() and not (one.is_contiguous() or source.is_neg()):
            from sparseconv.gpu.transposing import is_aligned, transpose  # Triton is loaded where it is used

            if is_aligned(one, other):
                by_channel, by_tap = outward.flatten(1), other.flatten(0, 1)
                transpose(*((by_tap, by_channel) if turns else (by_channel, by_tap)))
                return into
    return into.copy_(source)
