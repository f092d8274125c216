"""Rows that travel between ranks: differentiable, in a fixed order, and while something else is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sparseconv.autograd_function import Function

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped


Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Exchange:
    """The rows that each rank sends to each other rank; received rows are grouped by sender, in rank order.

        received = all_to_all(x[send_rows])
        x_grad[send_rows] += all_to_all(received_grad), rank after rank

    A single process sends to itself:

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> exchange = Exchange(None, send_rows=torch.tensor([1]), send_counts=(1,), receive_counts=(1,), num_rows=2)
    >>> exchange(torch.tensor([[1.0], [2.0]])).tolist()
    [[2.0]]
    >>> dist.destroy_process_group()
    """

    group: dist.ProcessGroup | None
    send_rows: Int64[torch.Tensor, " S"]  # (S,) int64: own rows, grouped by receiver
    send_counts: tuple[int, ...]  # rows for each rank
    receive_counts: tuple[int, ...]  # rows from each rank
    num_rows: int  # own rows

    @property
    def world_size(self) -> int:
        return len(self.send_counts)

    @property
    def num_received(self) -> int:
        return sum(self.receive_counts)

    def __call__(self, x: Shaped[torch.Tensor, "N ..."]) -> Shaped[torch.Tensor, "N_received ..."]:
        """The received rows (num_received, C) of the ranks' x, differentiably."""
        return _Linear.apply(x, self._received, partial(returned, exchange=self))

    def _received(self, x: torch.Tensor) -> torch.Tensor:
        return self.forth(x, x.new_empty((self.num_received, *x.shape[1:]))).wait()

    def forth(self, x: Shaped[torch.Tensor, "N ..."], received: Shaped[torch.Tensor, "N_received ..."]) -> UnderWay:
        """Start sending the rows of x (num_rows, C) into ``received`` (num_received, C)."""
        sent = x.index_select(0, self.send_rows)
        work = dist.all_to_all_single(
            sendable(received), sendable(sent), self.receive_counts, self.send_counts, self.group, async_op=True
        )
        return UnderWay(work, received, sent)

    def back(self, grad: Shaped[torch.Tensor, "N_received ..."]) -> UnderWay:
        """Send gradients (num_received, C) of received rows back to where they came from, grouped as ``send_rows``."""
        leaving = grad.contiguous()
        came = grad.new_empty((len(self.send_rows), *grad.shape[1:]))
        work = dist.all_to_all_single(
            came, leaving, list(self.send_counts), list(self.receive_counts), self.group, async_op=True
        )
        return UnderWay(work, came, leaving)

    def _adjoint(self, grad: torch.Tensor) -> torch.Tensor:
        came = self.back(grad).wait()
        total = grad.new_zeros((self.num_rows, *grad.shape[1:]), dtype=torch.promote_types(grad.dtype, torch.float32))
        for rows, part in zip(self.send_rows.split(self.send_counts), came.split(self.send_counts)):
            total.index_add_(0, rows, part.to(total.dtype))  # a rank asks for a row once: no two adds meet
        return total.to(grad.dtype)


@dataclass(frozen=True)
class UnderWay:
    """Rows that travel while something else is computed, and the buffer that they are read from."""

    work: dist.Work
    received: torch.Tensor
    sent: torch.Tensor

    def wait(self) -> torch.Tensor:
        """What came; the work that follows on this stream sees it complete."""
        self.work.wait()
        return self.received


class _Linear(Function):
    """A linear function of rows, whose derivative is ``adjoint``: a differentiable function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Rows, adjoint: Rows) -> torch.Tensor:
        ctx.adjoint = adjoint
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return ctx.adjoint(grad), None, None


class _Joined(Function):
    """x itself where nothing was received, with the exchange still in the graph: its way back is a collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, grad[:0]


def returned(grad: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Gradients of received rows (num_received, C) summed where the rows came from, (num_rows, C); any order."""
    return _Linear.apply(grad, exchange._adjoint, exchange)


def summed(x: Shaped[torch.Tensor, "*shape"], group: dist.ProcessGroup | None = None) -> Shaped[torch.Tensor, "*shape"]:
    """The sum of x over the ranks, on each of them; differentiable to any order.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> summed(torch.ones(2)).tolist()
    [1.0, 1.0]
    >>> dist.destroy_process_group()
    """

    def total_of(x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    return _Linear.apply(x, total_of, partial(summed, group=group))


def replicated(
    x: Shaped[torch.Tensor, "*shape"], group: dist.ProcessGroup | None = None
) -> Shaped[torch.Tensor, "*shape"]:
    """Use x, which is equal on every rank, in a sharded computation: its gradients are summed over the ranks, once
    however often this is called.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> weight = torch.ones(2, requires_grad=True)
    >>> (3 * replicated(weight)).sum().backward()
    >>> weight.grad.tolist()
    [3.0, 3.0]
    >>> dist.destroy_process_group()
    """
    if getattr(x, "_replicated_over", False) == (group,):
        return x
    same = _Linear.apply(x, lambda x: x.view_as(x), partial(summed, group=group))
    same._replicated_over = (group,)
    return same


def sendable(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous rows (N, ...) as they travel: small and whole numbers, which not every transport knows, as bytes."""
    if rows.dtype.itemsize > 1 and (rows.is_floating_point() or rows.is_complex()):
        return rows
    return (rows.flatten(1) if rows.ndim > 1 else rows[:, None]).view(torch.uint8)


def joined(x: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Own rows, then received ones (N + R, C)."""
    return torch.cat([x, received]) if len(received) else _Joined.apply(x, received)


def send_to(
    rows: torch.Tensor, owners: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor, tuple[int, ...]]:
    """Send each of rows (M, ...) to its owner (M,): (received rows, counts received, order sent, counts sent).

    ``order`` lists the rows as they were sent, grouped by owner and otherwise in the given order.
    """
    world = dist.get_world_size(group)
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners, minlength=world)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    sent, received = tuple(counts.tolist()), tuple(theirs.tolist())
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows[order].contiguous(), list(received), list(sent), group)
    return out, received, order, sent
