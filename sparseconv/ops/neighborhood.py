"""Attention and depthwise convolution over the edges of a plan: sparse products over its map.

    logits[e]  = <q[out_e], k[in_e]>                                            sparse_inner
    softmax    = exp(logits[e]) / sum over the edges f of out_e of exp(logits[f])   sparse_scale
    y[out]     = sum over the edges e of out of softmax[e] * v[in_e]            sparse_vecsca
    depthwise  = sum over the edges (k, i, out) of x[i] * weight[k]             sparse_mul

Edges e are those of ``plan.kernel_map`` in its own order, by tap. No atomics: the same bits in every run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from sparseconv.checks import check_tensor
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.ops.rows import check_plan, check_rows
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.products import (
    SparseProductInfo,
    SparseScaleInfo,
    sparse_inner,
    sparse_mul,
    sparse_scale,
    sparse_vecsca,
)
from sparseconv.products.info import known_right

if TYPE_CHECKING:
    from jaxtyping import Float

Products: TypeAlias = tuple[SparseProductInfo, SparseProductInfo, SparseProductInfo]
Scales: TypeAlias = tuple[SparseScaleInfo, SparseScaleInfo]


def neighborhood_logits(
    q: Float[torch.Tensor, "N_out *H C"], k: Float[torch.Tensor, "N_in *H C"], plan: ConvolutionPlan
) -> Float[torch.Tensor, " P *H"]:
    """The inner product of each output's query with the key of every input that it sees.

    Args:
        q: (N_out, C), or (N_out, H, C) with H heads; floating point on the plan's device, rows as ``plan.target``.
        k: (N_in, C) or (N_in, H, C), rows as ``plan.source``.
        plan: any plan; its groups and backend do not matter.

    Returns:
        (P,) or (P, H), one for each edge of ``plan.kernel_map`` in its order (by tap), in the promoted dtype; not
        scaled. Differentiable to any order.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit the plan.

    >>> from sparseconv import VoxelGrid
    >>> plan = ConvolutionPlan(VoxelGrid(torch.tensor([[0, 0], [0, 1]])), 3)
    >>> neighborhood_logits(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]]), plan).tolist()
    [6.0, 3.0, 10.0, 5.0]
    """
    k, local = _sources("k", k, plan)
    _check_targets(q, k, local)
    return _logits(q, k, local)


def neighborhood_softmax(logits: Float[torch.Tensor, " P *H"], plan: ConvolutionPlan) -> Float[torch.Tensor, " P *H"]:
    """Logits (P,) or (P, H) of a plan's edges -> weights that sum to 1 over the edges of each output.

    In fp32 at least, whatever autocast says. An output whose logits are all -inf gets zeros.

    >>> from sparseconv import VoxelGrid
    >>> plan = ConvolutionPlan(VoxelGrid(torch.tensor([[0, 0], [0, 1]])), 3)
    >>> neighborhood_softmax(torch.zeros(4), plan).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    check_plan(plan)
    check_tensor("logits", logits)
    edges = plan.localize(logits.new_zeros(plan.num_in, 0))[1].kernel_map
    check_rows("logits", logits[:, None] if logits.ndim == 1 else logits, edges.num_pairs, "edge", plan.device,
               "the plan")  # fmt: skip
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    columns = wide[:, None] if logits.ndim == 1 else wide
    outs = edges.out_rows.long()
    # shifted by each output's largest, which cancels: no gradient goes through it
    found = columns.detach()
    most = found.new_full((edges.num_out, columns.shape[1]), -torch.inf)
    most = most.scatter_reduce(0, outs[:, None].expand_as(found), found, "amax")
    shift = torch.where(most == -torch.inf, 0, most).index_select(0, outs)
    powers = (columns - shift).exp()
    there, back = _output_infos(edges)
    with torch.autocast(logits.device.type, enabled=False):
        total = sparse_scale(powers, there, back)
        total = torch.where(total > 0, total, 1)
        return (powers / sparse_scale(total, back, there)).view_as(wide)


def neighborhood_attention(
    q: Float[torch.Tensor, "N_out *H C"],
    k: Float[torch.Tensor, "N_in *H C"],
    v: Float[torch.Tensor, "N_in *H C_v"],
    plan: ConvolutionPlan,
    *,
    scale: float | None = None,
    bias: Float[torch.Tensor, " K *H"] | None = None,
) -> Float[torch.Tensor, "N_out *H C_v"]:
    """Softmax attention of each output over the inputs in its window.

        y[out] = sum over edges (t, in, out) of softmax(scale * <q[out], k[in]> + bias[t]) * v[in]

    Args:
        q: (N_out, C) or (N_out, H, C).
        k: (N_in, C) or (N_in, H, C).
        v: (N_in, C_v) or (N_in, H, C_v).
        plan: any plan; a submanifold one of 3x3x3 is attention over 27 cells.
        scale: default 1 / sqrt(C), as torch's `scaled_dot_product_attention`.
        bias: (K,) or (K, H), a number for each tap: a relative position's.

    Returns:
        (N_out, C_v) or (N_out, H, C_v), dtype of v; 0 for an output without edges. Logits, softmax and sums are in
        fp32 (fp64 for fp64), under autocast on operands of its dtype. Differentiable to any order in all tensors.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit the plan.

    >>> from sparseconv import VoxelGrid
    >>> plan = ConvolutionPlan(VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 7]])), 3)
    >>> q = k = torch.zeros(3, 4)
    >>> neighborhood_attention(q, k, torch.tensor([[1.0], [3.0], [5.0]]), plan).tolist()
    [[2.0], [2.0], [5.0]]
    """
    k, local = _sources("k", k, plan)
    _check_targets(q, k, local)
    factor = 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale
    wide = q.to(torch.promote_types(q.dtype, torch.float32))  # so that logits are not rounded to halves
    logits = _logits(wide * factor, k, local)
    v, _ = _sources("v", v, plan)
    if v.ndim != q.ndim or (v.ndim == 3 and v.shape[1] != q.shape[1]):
        raise ValueError(f"v must have the heads of q {tuple(q.shape)}; got {tuple(v.shape)}")
    if bias is not None:
        logits = logits + _of_taps(bias, logits, local.kernel_map)
    weights = neighborhood_softmax(logits, local)
    forward, backward1, backward2 = _edge_infos(local.kernel_map)
    # the triple turned: the logits' gradient to q reads (k, edge) and adds up over the edges of an output
    y = sparse_vecsca(_heads_first(v), _heads_last(weights), backward1, backward2, forward)
    return _heads_first(y).to(v.dtype)


def depthwise_convolution(
    x: Float[torch.Tensor, "N_in C"],
    weight: Float[torch.Tensor, "K C"] | Float[torch.Tensor, "K 1 C"],
    plan: ConvolutionPlan,
) -> Float[torch.Tensor, "N_out C"]:
    """A depthwise convolution: the same as ``plan.with_groups(C).execute(x, weight[:, None])``.

        y[out, c] = sum over edges (k, in, out) of x[in, c] * weight[k, c]

    Args:
        x: (N_in, C) floating point on the plan's device.
        weight: (K, C) on the plan's device, or (K, 1, C), a plan's layout with C groups.
        plan: any plan; its groups and backend do not matter.

    Returns:
        (N_out, C) in the promoted dtype; summed in fp32 (fp64 for fp64), the same bits in every run. Differentiable
        to any order in both.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit the plan.

    >>> from sparseconv import VoxelGrid
    >>> plan = ConvolutionPlan(VoxelGrid(torch.tensor([[0, 0], [0, 1]])), 3)
    >>> weight = torch.tensor([[1.0], [10.0], [100.0]])
    >>> depthwise_convolution(torch.tensor([[1.0], [2.0]]), weight, plan).tolist()
    [[210.0], [21.0]]
    """
    check_plan(plan)
    check_tensor("weight", weight)
    check_rows("x", x, plan.num_in, "voxel of the plan's source", plan.device, "the plan")
    taps = weight[:, 0] if weight.ndim == 3 and weight.shape[1] == 1 else weight
    if taps.shape != (plan.num_taps, x.shape[1]):
        raise ValueError(
            f"weight must be ({plan.num_taps}, {x.shape[1]}), a number for each tap and channel; "
            f"got {tuple(weight.shape)}"
        )
    x, plan = plan.localize(x)
    return sparse_mul(x, taps, *plan.kernel_map.product_infos())


def _sources(name: str, x: torch.Tensor, plan: ConvolutionPlan) -> tuple[torch.Tensor, ConvolutionPlan]:
    """x (N_in, C) or (N_in, H, C), checked; of a sharded scene, with what this rank's outputs see of other ranks."""
    check_plan(plan)
    check_rows(name, x, plan.num_in, "voxel of the plan's source", plan.device, "the plan", (2, 3))
    rows, local = plan.localize(x.flatten(1))
    return rows.unflatten(1, x.shape[1:]) if x.ndim == 3 else rows, local


def _check_targets(q: torch.Tensor, k: torch.Tensor, plan: ConvolutionPlan) -> None:
    check_rows("q", q, plan.kernel_map.num_out, "voxel of the plan's target", plan.device, "the plan", (2, 3))
    if q.shape[1:] != k.shape[1:]:
        raise ValueError(f"q and k must have the same heads and channels; got {tuple(q.shape)} and {tuple(k.shape)}")


def _logits(q: torch.Tensor, k: torch.Tensor, plan: ConvolutionPlan) -> torch.Tensor:
    """`neighborhood_logits` of checked operands over a plan of this process."""
    return _heads_last(sparse_inner(_heads_first(q), _heads_first(k), *_edge_infos(plan.kernel_map)))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """(N, H, C) <-> (H, N, C), the batch that products take; (N, C) as it is."""
    return x.transpose(0, 1) if x.ndim == 3 else x


def _heads_last(x: torch.Tensor) -> torch.Tensor:
    """(H, P) <-> (P, H); (P,) as it is."""
    return x.t() if x.ndim == 2 else x


def _of_taps(bias: torch.Tensor, logits: torch.Tensor, edges: KernelMap) -> torch.Tensor:
    """The tap's number for each edge, in the shape of the logits."""
    check_tensor("bias", bias)
    if bias.shape != (edges.num_taps, *logits.shape[1:]):
        raise ValueError(f"bias must be {(edges.num_taps, *logits.shape[1:])}; got {tuple(bias.shape)}")
    columns = bias.to(logits.dtype).reshape(edges.num_taps, -1)
    with torch.autocast(logits.device.type, enabled=False):
        return sparse_scale(columns, *_tap_infos(edges)).view_as(logits)


def _edge_infos(edges: KernelMap) -> Products:
    """(output, input -> edge), (input, edge -> output), (edge, output -> input); kept with the map."""
    if "edge_infos" not in edges.prepared:
        ins, outs, pairs = edges.in_rows, edges.out_rows, edges.num_pairs
        num_in, num_out = edges.num_in, edges.num_out
        (out_order, out_bounds), (in_order, in_bounds) = edges.by_output, edges.reverse().by_output
        edges.prepared["edge_infos"] = (
            known_right(SparseProductInfo, None, outs, ins, None, None, None, pairs, num_out, num_in),
            known_right(SparseProductInfo, None, ins, None, out_bounds, out_order, None, num_out, num_in, pairs),
            known_right(SparseProductInfo, None, None, outs, in_bounds, in_order, None, num_in, pairs, num_out),
        )
    return cast(Products, edges.prepared["edge_infos"])


def _output_infos(edges: KernelMap) -> Scales:
    """The sum over the edges of each output, and an output's number for each edge; kept with the map."""
    if "output_infos" not in edges.prepared:
        order, bounds = edges.by_output
        edges.prepared["output_infos"] = (
            known_right(SparseScaleInfo, None, order, bounds, None, edges.num_out, edges.num_pairs),
            known_right(SparseScaleInfo, None, edges.out_rows, None, None, edges.num_pairs, edges.num_out),
        )
    return cast(Scales, edges.prepared["output_infos"])


def _tap_infos(edges: KernelMap) -> Scales:
    """A tap's number for each edge, and the sum over the edges of each tap; kept with the map."""
    if "tap_infos" not in edges.prepared:
        edges.prepared["tap_infos"] = (
            known_right(SparseScaleInfo, None, edges.pair_taps, None, None, edges.num_pairs, edges.num_taps),
            known_right(SparseScaleInfo, None, None, edges.tap_offsets, None, edges.num_taps, edges.num_pairs),
        )
    return cast(Scales, edges.prepared["tap_infos"])
