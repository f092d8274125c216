"""Weights that were packed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparseconv.checks import as_device

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

#: which tap each of the first axis of a packed weight is: taps along each axis, or an explicit list of their offsets
Taps = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeights:
    """A weight as kernels read it, (K, C_in/G, C_out) and contiguous: a copy, made once by `ConvolutionPlan.pack`.

    `ConvolutionPlan.execute` accepts it as the weight, on any plan with the same taps and groups, and copies nothing.
    It keeps the values that the weight had when it was packed: pack it again after training. It has no gradient, so a
    copy of a weight that requires gradients is refused while gradients are recorded.

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
        """These weights on another device; returns itself if they are already there."""
        there = self._tensor.to(as_device(device))
        return self if there is self._tensor else PackedWeights(there, self._taps, self._groups, self._learns)

    def for_call(
        self, kernel: tuple[int, ...] | None, offsets: Taps, groups: int, x: object
    ) -> Float[torch.Tensor, "K C_in/G C_out"]:
        """The taps (K, C_in/G, C_out) for a call with ``x`` of a plan with these taps and groups.

        Raises:
            ValueError: packed for other taps or groups, or for a gradient that it would not give.
            TypeError: packed in another dtype than that of the call.
        """
        taps = offsets if kernel is None else kernel
        if self._taps != taps:
            raise ValueError(
                f"the plan has {_named(taps)}, but these weights were packed for {_named(self._taps)}: pack them by "
                "this plan"
            )
        if self._groups != groups:
            raise ValueError(
                f"the plan has groups={groups}, but these weights were packed for {self._groups}: pack them by this "
                "plan"
            )
        if self._learns and torch.is_grad_enabled():
            raise ValueError(
                "these weights were packed from a tensor that requires gradients, but have none themselves: execute "
                "under torch.no_grad(), pass the weight itself, or pack weight.detach()"
            )
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            wanted = x.dtype
            if torch.is_autocast_enabled(x.device.type) and wanted != torch.float64:
                wanted = torch.get_autocast_dtype(x.device.type)
            if wanted != self.dtype:
                raise TypeError(
                    f"the call computes in {wanted}, but these weights were packed in {self.dtype}: pack "
                    f"weight.to({wanted})"
                )
        return self._tensor

    def __repr__(self) -> str:
        _, c_in, c_out = self.shape
        groups = f" in {self._groups} groups" if self._groups > 1 else ""
        return (
            f"PackedWeights({_named(self._taps)}, {c_in * self._groups} -> {c_out} channels{groups}, {self.dtype}, "
            f"{self.device})"
        )


def _named(taps: Taps) -> str:
    return f"{len(taps)} explicit taps" if isinstance(taps[0], tuple) else f"kernel_size {taps}"
