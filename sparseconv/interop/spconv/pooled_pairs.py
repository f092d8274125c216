"""Pools over tables of pairs that a client holds by hand, with the numbers of the layers in `pytorch.pool`."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.geometry.arguments import INTEGERS
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.interop.arguments import whole
from sparseconv.interop.spconv import constants
from sparseconv.interop.spconv.rulebooks import by_name, check_features, of_pairs, of_table
from sparseconv.kinds import check_values
from sparseconv.ops.pooling import edge_max, edge_sum


def indice_maxpool(
    features: torch.Tensor, indice_pairs: torch.Tensor, indice_pair_num: torch.Tensor, num_activate_out: int
) -> torch.Tensor:
    """The largest of the rows that each output sees, by pairs (2, K, N) and their numbers (K,).

    ``features`` are (N_in, C), the result is (num_activate_out, C); differentiable to any order.
    """
    check_features(features)
    return _largest(features, of_pairs(indice_pairs, indice_pair_num, len(features), num_activate_out))


def indice_maxpool_implicit_gemm(
    features: torch.Tensor, indice_pairs_fwd: torch.Tensor, indice_pairs_bwd: torch.Tensor | None, num_activate_out: int
) -> torch.Tensor:
    """`indice_maxpool` by the table ``indice_pairs_fwd`` (K, N_out) of input rows; the other has no effect."""
    check_features(features)
    return _largest(features, of_table(indice_pairs_fwd, len(features), num_activate_out))


def indice_avgpool_implicit_gemm(
    features: torch.Tensor,
    indice_pairs_fwd: torch.Tensor,
    indice_pairs_bwd: torch.Tensor | None,
    num_activate_out: int,
    calc_count: bool = True,
) -> torch.Tensor:
    """The mean of the rows that each output sees, by a table (K, N_out); ``calc_count`` has no effect."""
    check_features(features)
    edges = of_table(indice_pairs_fwd, len(features), num_activate_out)
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    counts = counted(edges).clamp(min=1)[:, None].to(wide.dtype)
    total = edge_sum(wide, edges)
    return (SpconvMean.apply(total, counts) if constants.POOL_AS_SPCONV else total / counts).to(features.dtype)


class SpconvMean(torch.autograd.Function):
    """total / count, with the gradient that spconv's kernel has: grad * count, where the mean's is grad / count."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return total / counts.clamp(min=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        return grad * counts, None


def counted(edges: KernelMap) -> torch.Tensor:
    """How many rows each output sees, (N_out,) int32."""
    return (edges.neighbors >= 0).sum(0, dtype=torch.int32)


def maxpool_gradient(features: torch.Tensor, out_bp: torch.Tensor, edges: KernelMap) -> torch.Tensor:
    """The gradient of a maximum's features."""
    x = features.detach().requires_grad_()
    with torch.enable_grad():
        y = _largest(x, edges)
    check_values("out_bp", out_bp, f"{tuple(y.shape)}")
    if out_bp.shape != y.shape:
        raise ValueError(f"out_bp must be {tuple(y.shape)}; got {tuple(out_bp.shape)}")
    return torch.autograd.grad(y, x, out_bp)[0]


def rows_by_item(coords: torch.Tensor, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of each batch item (B, N) int32, of which so many are meant: (B,) int32; -1 behind them."""
    check_values("coords", coords, "(N, 1 + D) integers")
    (batch_size,) = whole([batch_size], "batch_size", 0)
    if coords.ndim != 2 or coords.dtype not in INTEGERS:
        raise ValueError(f"coords must be (N, 1 + D) integers, batch first; got {tuple(coords.shape)} {coords.dtype}")
    own = coords[:, 0] == torch.arange(batch_size, device=coords.device)[:, None]
    place = own.cumsum(1) - 1
    rows = torch.full(own.shape, -1, dtype=torch.int32, device=coords.device)
    item, row = own.nonzero().unbind(1)
    rows[item, place[item, row]] = row.int()
    return rows, own.sum(1, dtype=torch.int32)


def _largest(features: torch.Tensor, edges: KernelMap) -> torch.Tensor:
    found = edge_max(features, edges)[0]
    return found.clamp(min=0) if constants.POOL_AS_SPCONV else found


#: spconv's autograd functions, of which clients call ``apply``
SparseMaxPoolFunction = by_name("SparseMaxPoolFunction", indice_maxpool)
SparseMaxPoolImplicitGemmFunction = by_name("SparseMaxPoolImplicitGemmFunction", indice_maxpool_implicit_gemm)
SparseAvgPoolImplicitGemmFunction = by_name("SparseAvgPoolImplicitGemmFunction", indice_avgpool_implicit_gemm)
