"""Norms over the rows that are voxels, of arrays that have other rows behind them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def live_rows(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """(N, 1) bool: the first ``count`` rows, a number (1,) that the device knows."""
    return torch.arange(x.shape[0], device=x.device)[:, None] < count


def over_live_rows(
    x: torch.Tensor,
    count: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of the first ``count`` (1,) rows of x (N, C), of all where it is None; differentiable to any order.

    Dead rows have no part in anything, NaN or not: they come out as 0 and get no gradient. Statistics in fp32 for
    halves; ``total`` adds sums up over processes.

    Returns:
        y (N, C) of x's dtype; detached, (C,), (C,) and (1,): mean, biased variance, and the number of rows.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    live = None if count is None else live_rows(x, count)
    wide = wide if live is None else torch.where(live, wide, 0)
    rows = wide.new_full((1,), x.shape[0]) if count is None else count.to(wide.dtype)
    sums = total(torch.cat([wide.sum(0), rows]))
    rows = sums[-1:].detach()
    mean = sums[:-1] / rows.clamp_min(1)
    centred = wide - mean if live is None else torch.where(live, wide - mean, 0)
    var = total(centred.square().sum(0)) / rows.clamp_min(1)
    y = centred * torch.rsqrt(var + eps)
    if weight is not None and bias is not None:
        y = y * weight + bias
        y = y if live is None else torch.where(live, y, 0)
    return y.to(x.dtype), mean.detach(), var.detach(), rows
