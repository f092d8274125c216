"""The one form in which the structure of a scale or a product reaches its operation and its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparseconv import transforms
from sparseconv.gpu.cuda_capability import has_triton
from sparseconv.products.schedule import WorkItems, table_text, work_items

_LETTERS = "s12ogiwj"


class Terms(NamedTuple):
    """The columns of an info, None where they are not needed, and for a GPU the work lists made of them."""

    scale: torch.Tensor | None
    index1: torch.Tensor | None
    index2: torch.Tensor | None
    seg_out: torch.Tensor | None
    gather_index: torch.Tensor | None
    index_out: torch.Tensor | None
    out_size: int
    items: torch.Tensor | None = None
    joins: torch.Tensor | None = None
    table: str = ""

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

    def work(self, positions: int) -> WorkItems:
        """The work list over ``positions`` terms: the one that came along, or one made now."""
        if self.items is not None:
            slots = 0 if self.joins is None else 2 * self.joins.shape[0]
            return WorkItems(self.items, self.joins, slots)
        if self.seg_out is None:
            raise ValueError("without seg_out nothing is summed, and there is no work list")
        return work_items(self.seg_out, self.index_out, positions)


class Packed(NamedTuple):
    """An info as arguments of an operation: the tensors that are there, and letters that say which ones they are."""

    tensors: list[torch.Tensor]
    layout: str


#: in place of an info that was not given
ABSENT = Packed([], "absent")


@transforms.constant
def make_terms(
    scale: torch.Tensor | None,
    index1: torch.Tensor | None,
    index2: torch.Tensor | None,
    seg_out: torch.Tensor | None,
    gather_index: torch.Tensor | None,
    index_out: torch.Tensor | None,
    out_size: int,
) -> Terms:
    """The columns of an info; on a GPU with their work list, and those of small structures with their table."""
    terms = Terms(scale, index1, index2, seg_out, gather_index, index_out, out_size)
    columns = terms[:6]
    lengths = [column.shape[0] for column in (gather_index, scale, index1, index2) if column is not None]
    if not lengths or not has_triton(next(c for c in columns if c is not None).device):
        return terms
    terms = terms._replace(table=table_text(*columns))
    if seg_out is None:
        return terms
    items, joins, _ = work_items(seg_out, index_out, lengths[0])
    return terms._replace(items=items, joins=joins)


def pack(terms: Terms | None) -> Packed:
    """The columns that are there as a list without gaps."""
    if terms is None:
        return ABSENT
    tensors, letters = [], ""
    for letter, column in zip(_LETTERS, (*terms[:6], terms.items, terms.joins)):
        if column is not None:
            tensors.append(column)
            letters += letter
    return Packed(tensors, f"{letters}|{terms.table}")


def unpack(tensors: list[torch.Tensor], layout: str, out_size: int) -> Terms:
    """The inverse of `pack`."""
    letters, _, table = layout.partition("|")
    found = dict(zip(letters, tensors))
    scale, index1, index2, seg_out, gather_index, index_out, items, joins = (found.get(letter) for letter in _LETTERS)
    return Terms(scale, index1, index2, seg_out, gather_index, index_out, out_size, items, joins, table)
