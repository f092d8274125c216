"""A view of a tensor's memory with any strides, negative ones included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Shaped


class StridedBuffer:
    """A tensor's memory seen with another shape, other strides (negative ones too) and an offset; nothing is copied.

    element [i0, i1, ...] lies at base.data_ptr() + (offset + i0 * strides[0] + i1 * strides[1] + ...) * itemsize

    Args:
        base: the tensor whose memory is viewed, of any layout.
        shape: sizes of the view; those of ``base`` by default.
        strides: strides of the view in elements; those of ``base`` by default.
        offset: elements between the first element of ``base`` and that of the view.

    Raises:
        ValueError: if the view would reach outside the storage of ``base``, or torch negates what lies there.

    Example:
        >>> x = torch.arange(4)
        >>> StridedBuffer(x, strides=(-1,), offset=3).to_tensor()
        tensor([3, 2, 1, 0])
    """

    __slots__ = ("_strides", "base", "dtype", "offset", "shape", "start")

    def __init__(
        self,
        base: Shaped[torch.Tensor, " ..."],
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> None:
        if not isinstance(base, torch.Tensor):
            raise TypeError(f"StridedBuffer views a tensor, but got {type(base).__name__}")
        if base.is_neg() or base.is_conj():
            raise ValueError("StridedBuffer views memory, but base is the negative or conjugate of it: pass a clone")
        self.base = base
        self.shape = torch.Size(base.shape if shape is None else shape)
        self._strides = tuple(int(s) for s in (base.stride() if strides is None else strides))
        self.dtype = base.dtype
        self.offset = int(offset)
        if len(self.shape) != len(self._strides):
            raise ValueError(f"StridedBuffer: {len(self.shape)} sizes, but {len(self._strides)} strides")
        first = base.storage_offset() + self.offset
        low, high = self.extent()
        elements = base.untyped_storage().nbytes() // base.element_size()
        if self.numel() and not 0 <= first + low <= first + high < elements:
            raise ValueError(
                f"StridedBuffer of shape {tuple(self.shape)}, strides {self._strides} and offset {self.offset} reaches "
                f"elements {first + low} to {first + high}, but the storage holds {elements}"
            )
        # A tensor of one element whose address is that of the first element: what a kernel is given.
        self.start = base.as_strided((1,) if self.numel() else (0,), (1,), first if self.numel() else 0)

    def extent(self) -> tuple[int, int]:
        """The lowest and highest element address, from the first element of the view."""
        reach = [s * (n - 1) for n, s in zip(self.shape, self._strides) if n > 0]
        return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    @property
    def strides(self) -> tuple[int, ...]:
        return self._strides

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.base.element_size()

    def data_ptr(self) -> int:
        return self.start.data_ptr()

    def as_positive(self) -> tuple[Shaped[torch.Tensor, " ..."], list[int]]:
        """The same memory as a torch view with non-negative strides, and the axes to flip to get this one."""
        low, _ = self.extent()
        flipped = [k for k, s in enumerate(self._strides) if s < 0]
        start = self.base.storage_offset() + self.offset + low if self.numel() else 0
        return self.base.as_strided(self.shape, [abs(s) for s in self._strides], start), flipped

    def to_tensor(self) -> Shaped[torch.Tensor, "*shape"]:
        """A tensor of the same values; a view where the strides allow it, else a copy."""
        view, flipped = self.as_positive()
        return view.flip(flipped) if flipped else view

    def copy_(self, source: Shaped[torch.Tensor, "*shape"]) -> StridedBuffer:
        """Write ``source`` into the memory that this buffer views."""
        view, flipped = self.as_positive()
        view.copy_(source.flip(flipped) if flipped else source)
        return self

    def __repr__(self) -> str:
        form = f"shape={tuple(self.shape)}, strides={self._strides}, offset={self.offset}"
        return f"StridedBuffer({form}, dtype={self.dtype})"
