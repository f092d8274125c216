"""Rows grouped by their owners, piece by piece: each group in its old order, where the order lies."""

from __future__ import annotations

import torch


class OnHost:
    """Groups of each piece, put into an order in host memory from ``starts`` on."""

    def __init__(self, into: torch.Tensor, starts: list[int]) -> None:
        self.into, self.starts = into, starts

    def put(self, owners: torch.Tensor, source: torch.Tensor | int) -> None:
        """A piece's rows, by the owner of each: rows of ``source``, or from that number on one after another."""
        order = on_host(grouped(owners))
        rows = order + source if isinstance(source, int) else torch.index_select(source, 0, order)
        counts = torch.bincount(owners, minlength=len(self.starts)).tolist()
        for owner, part in enumerate(rows.split(counts)):
            self.into[self.starts[owner] : self.starts[owner] + len(part)] = part
            self.starts[owner] += len(part)


class OnCard:
    """The same where the order lies on the GPU: nothing is read back."""

    def __init__(self, into: torch.Tensor, starts: list[int]) -> None:
        self.into, self.starts = into, torch.tensor(starts, device=into.device)

    def put(self, owners: torch.Tensor, source: torch.Tensor | int) -> None:
        """A piece's rows, by the owner of each: rows of ``source``, or from that number on one after another."""
        own, order = owners.sort(stable=True)
        counts = torch.bincount(owners, minlength=len(self.starts))
        shifts = self.starts - (counts.cumsum(0) - counts)
        places = torch.index_select(shifts, 0, own.int()).add_(torch.arange(len(own), device=own.device))
        rows = order.add_(source) if isinstance(source, int) else torch.index_select(source, 0, order)
        self.into[places] = rows.to(self.into.dtype)
        self.starts += counts


def on_host(values: torch.Tensor) -> torch.Tensor:
    """Values of a GPU in pinned memory, which the GPU writes to in one go; others as they are."""
    if not values.is_cuda:
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return pinned


def grouped(owners: torch.Tensor) -> torch.Tensor:
    """The order that groups rows by the numbers of their owners, each group in its old order.

    >>> grouped(torch.tensor([2, 0, 2, 1])).tolist()
    [1, 3, 0, 2]
    """
    if owners.device.type != "cpu":
        return owners.sort(stable=True).indices
    return torch.from_numpy(owners.numpy().argsort(kind="stable"))  # by digits, where numbers have 16 bits
