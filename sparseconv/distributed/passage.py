"""The halo of one convolution on its way, forth and back, while the interior is computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sparseconv.distributed.exchange import Exchange, _Returned


class Border:
    """What the outputs at a shard's border see: some of the rank's own rows, then the rows that it receives.

    ``own_rows`` (B,) int64 ascending. Where gradients come home, each touched row is read, summed in fp32 in a fixed
    order (its own part, the border's, then rank after rank) and written once; the other rows are left alone.
    """

    def __init__(self, exchange: Exchange, own_rows: torch.Tensor) -> None:
        self.exchange, self.own_rows = exchange, own_rows
        self.touched, places = torch.unique(torch.cat([own_rows, exchange.send_rows]), return_inverse=True)
        self.places = places.split([len(own_rows), *exchange.send_counts])

    @property
    def num_rows(self) -> int:
        """Rows that the border's outputs see."""
        return len(self.own_rows) + self.exchange.num_received


class Passage:
    """One call's exchange over a border: depart, compute, arrive."""

    def __init__(self, border: Border) -> None:
        self.border = border
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None
        self._coming_back: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    def depart(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (N, C) for the interior, and the border's rows (num_rows, C), complete only after `arrive`."""
        return _Depart.apply(x, self)

    def arrive(self, rows: torch.Tensor) -> torch.Tensor:
        """The border's rows, complete."""
        return _Arrive.apply(rows, self)

    def _send(self, x: torch.Tensor) -> torch.Tensor:
        border, exchange = self.border, self.border.exchange
        rows = x.new_empty((border.num_rows, x.shape[1]))
        own = len(border.own_rows)
        torch.index_select(x, 0, border.own_rows, out=rows[:own])
        sent = x.index_select(0, exchange.send_rows)
        work = dist.all_to_all_single(
            rows[own:], sent, list(exchange.receive_counts), list(exchange.send_counts), exchange.group, async_op=True
        )
        self._under_way = (work, sent)
        return rows

    def _send_back(self, grad: torch.Tensor) -> None:
        exchange = self.border.exchange
        leaving = grad[len(self.border.own_rows) :].contiguous()
        back = grad.new_empty((len(exchange.send_rows), grad.shape[1]))
        work = dist.all_to_all_single(
            back, leaving, list(exchange.send_counts), list(exchange.receive_counts), exchange.group, async_op=True
        )
        self._coming_back = (work, back, leaving)

    def _land(self, grad_x: torch.Tensor, grad_rows: torch.Tensor) -> torch.Tensor:
        """Add what came home to the interior's gradient, which is this call's own tensor."""
        border = self.border
        work, back, _ = self._coming_back or self._must_have_left()
        work.wait()
        wide = torch.promote_types(grad_x.dtype, torch.float32)
        total = grad_x.index_select(0, border.touched).to(wide)
        parts = (grad_rows[: len(border.own_rows)], *back.split(border.exchange.send_counts))
        for places, part in zip(border.places, parts):
            total.index_add_(0, places, part.to(wide))  # no row twice in one part: no two adds meet
        self._coming_back = None
        return grad_x.index_copy_(0, border.touched, total.to(grad_x.dtype))

    def _must_have_left(self) -> Any:
        raise RuntimeError("a halo's gradient was asked for that never left: the graph of this call was cut in two")


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passage: Passage) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.passage = passage
        return x.view_as(x), passage._send(x)

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor, grad_rows: torch.Tensor) -> tuple:  # type: ignore[override]
        passage = ctx.passage
        if not torch.is_grad_enabled():
            return passage._land(grad_x, grad_rows), None
        border = passage.border  # for a second derivative: the same sum, in operations that have one
        own, halo = grad_rows.split([len(border.own_rows), border.exchange.num_received])
        return grad_x.index_add(0, border.own_rows, own) + _Returned.apply(halo, border.exchange), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, passage: Passage) -> torch.Tensor:
        ctx.passage = passage
        if passage._under_way is not None:
            passage._under_way[0].wait()
            passage._under_way = None
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        if not torch.is_grad_enabled():
            ctx.passage._send_back(grad)
        return grad, None


class _Written(torch.autograd.Function):
    """The border's outputs written over the interior's, whose part in them they already hold.

        y[rows] = outside = inside[rows] + beyond        (exactly; in halves the right side would be rounded twice)

    So the interior's gradient is the whole of dL/dy, without a mask or a copy, and the halo's is that of its rows.
    """

    @staticmethod
    def forward(
        ctx: Any, inside: torch.Tensor, beyond: torch.Tensor, outside: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.mark_dirty(inside)
        return inside.index_copy_(0, rows, outside)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        return grad, grad.index_select(0, ctx.saved_tensors[0]), None, None


def written(inside: torch.Tensor, beyond: torch.Tensor, outside: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """inside (N, C) with outside (B, C) written over ``rows`` (B,), in place; outside is inside[rows] + beyond."""
    return _Written.apply(inside, beyond, outside, rows)
