"""One convolution over shards: the interior is computed while the halo is on its way, forth and back."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.autograd import adjoint, convolution, weight_gradient
from sparseconv.autograd_function import Function
from sparseconv.distributed.exchange import Exchange, returned
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.plan.convolution import ConvolutionPlan


class Passage:
    """A shard's convolution in two parts: its interior, and the outputs at its border, which see other ranks' rows.

    ``inner`` goes from the rank's own rows to all its outputs. ``outer`` goes from the border's inputs (``own_rows`` of
    the rank, then the halo) to the border's outputs, ``rows`` of all outputs; ``beyond`` is its part from the halo.

        y = inner(x);  y[rows] = outer(x[own_rows], halo)            (= y[rows] + beyond(halo), rounded once)

    Returning gradients are summed in fp32, in a fixed order: the row's own part, then rank after rank. Each touched row
    is read and written once; the other rows are left alone.
    """

    def __init__(
        self,
        exchange: Exchange,
        inner: ConvolutionPlan,
        outer: ConvolutionPlan,
        beyond: ConvolutionPlan,
        own_rows: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        self.exchange, self.inner, self.outer, self.beyond = exchange, inner, outer, beyond
        self.own_rows, self.rows = own_rows, rows
        self.touched, places = torch.unique(exchange.send_rows, return_inverse=True)
        self.places = places.split(exchange.send_counts)

    def with_groups(self, groups: int) -> Passage:
        """The same ways for another number of channel groups."""
        inner, outer, beyond = (plan.with_groups(groups) for plan in (self.inner, self.outer, self.beyond))
        return Passage(self.exchange, inner, outer, beyond, self.own_rows, self.rows)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """y (N_out, C_out) of this rank's x (N, C_in) with weight (K, C_in/G, C_out); differentiable to any order.

        Operands are taken as checked by `ConvolutionPlan.operands` of ``inner``.
        """
        return _Sharded.apply(x, weight, bias, self)

    def _forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y and the halo that it was made with."""
        seen = x.new_empty((len(self.own_rows) + self.exchange.num_received, x.shape[1]))
        own, halo = seen.split([len(self.own_rows), self.exchange.num_received])
        torch.index_select(x, 0, self.own_rows, out=own)
        under_way = self.exchange.forth(x, halo)
        y = convolution(x, weight, bias, *_edges(self.inner))
        under_way.wait()
        outside = convolution(seen, weight, bias, *_edges(self.outer))
        return y.index_copy_(0, self.rows, outside), halo

    def _backward(
        self, grad: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None, halo: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dL/dx and dL/dw. The longest launch comes first, so that the device is busy while the rest is prepared; the
        halo's gradient travels while the interior's is computed."""
        outside = grad.index_select(0, self.rows)
        grad_x = grad_weight = None
        if x is not None and halo is not None:
            grad_weight = weight_gradient(x, grad, *_edges(self.inner))
            grad_weight += weight_gradient(halo, outside, *_edges(self.beyond))
        if weight is not None:
            leaving = adjoint(outside, weight, *_edges(self.beyond))
            under_way = self.exchange.back(leaving)
            grad_x = adjoint(grad, weight, *_edges(self.inner))
            self._land(grad_x, under_way.wait())
        return grad_x, grad_weight

    def _land(self, grad_x: torch.Tensor, came: torch.Tensor) -> None:
        """Add what came home to the interior's gradient, which is this call's own tensor."""
        wide = torch.promote_types(grad_x.dtype, torch.float32)
        total = grad_x.index_select(0, self.touched).to(wide)
        for places, part in zip(self.places, came.split(self.exchange.send_counts)):
            total.index_add_(0, places, part.to(wide))  # no row twice in one part: no two adds meet
        grad_x.index_copy_(0, self.touched, total.to(grad_x.dtype))


def _edges(plan: ConvolutionPlan) -> tuple[KernelMap, int, str]:
    return plan.kernel_map, plan.groups, plan.backend


class _Sharded(Function):
    """One node for both parts, so that the order of launches is ours; a second derivative goes through theirs."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, passage: Passage
    ) -> torch.Tensor:
        y, halo = passage._forward(x, weight, bias)
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None, halo if of_weight else None)
        ctx.passage = passage
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        x, weight, halo = ctx.saved_tensors
        derivative = _differentiable if torch.is_grad_enabled() else Passage._backward
        grad_x, grad_weight = derivative(ctx.passage, grad, x, weight, halo)
        return grad_x, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None


def _differentiable(
    passage: Passage, grad: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`Passage._backward` in operations that have a derivative: the halo is asked for anew, as a function of x."""
    inner, beyond, exchange = passage.inner, passage.beyond, passage.exchange
    outside = grad.index_select(0, passage.rows)
    grad_x = grad_weight = None
    if x is not None:
        mine = weight_gradient(x, grad, *_edges(inner))
        grad_weight = mine + weight_gradient(exchange(x), outside, *_edges(beyond))
    if weight is not None:
        leaving = adjoint(outside, weight, *_edges(beyond))
        grad_x = adjoint(grad, weight, *_edges(inner)) + returned(leaving, exchange)
    return grad_x, grad_weight
