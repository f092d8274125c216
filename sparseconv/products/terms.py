"""The one form in which the structure of a scale or a product reaches its operation and its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Terms(NamedTuple):
    """The columns of an info, None where they are not needed, as kernels read them."""

    scale: torch.Tensor | None
    index1: torch.Tensor | None
    index2: torch.Tensor | None
    seg_out: torch.Tensor | None
    gather_index: torch.Tensor | None
    index_out: torch.Tensor | None
    out_size: int

    def num_positions(self, rows1: int, rows2: int) -> int:
        """Q, the positions that segments run over; ``rows1`` and ``rows2`` decide where every index is the identity."""
        if self.gather_index is not None:
            return self.gather_index.shape[0]
        for column in (self.scale, self.index1, self.index2):
            if column is not None:
                return column.shape[0]
        return self.num_segments if self.seg_out is None else min(rows1, rows2)

    @property
    def num_segments(self) -> int:
        """S, the output rows that are written."""
        if self.seg_out is not None:
            return self.seg_out.shape[0] - 1
        return self.out_size if self.index_out is None else self.index_out.shape[0]


class Packed(NamedTuple):
    """An info as arguments of an operation: the tensors that are there, and letters that say which ones they are."""

    tensors: list[torch.Tensor]
    layout: str


#: in place of an info that was not given
ABSENT = Packed([], "absent")


def pack(*columns: torch.Tensor | None) -> Packed:
    """The given columns, in the order of :class:`Terms`, as a list without gaps."""
    present = [(letter, column) for letter, column in zip("s12ogi", columns) if column is not None]
    return Packed([column for _, column in present], "".join(letter for letter, _ in present))


def unpack(tensors: list[torch.Tensor], layout: str, out_size: int) -> Terms:
    """The inverse of :func:`pack`."""
    found = dict(zip(layout, tensors))
    scale, index1, index2, seg_out, gather_index, index_out = (found.get(letter) for letter in "s12ogi")
    return Terms(scale, index1, index2, seg_out, gather_index, index_out, out_size)
