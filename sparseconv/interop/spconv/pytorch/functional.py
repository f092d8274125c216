"""``spconv.pytorch.functional``: sums of sparse tensors, and layers over tables of pairs."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from sparseconv.checks import INTEGERS, check_values
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.interop.arguments import check_features, integers
from sparseconv.interop.spconv import constants
from sparseconv.interop.spconv.core import activated
from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.geometry import Place
from sparseconv.interop.spconv.pytorch.tracing import recorded
from sparseconv.ops.pooling import edge_max, edge_sum
from sparseconv.plan.convolution import autocast, check_operands
from sparseconv.plan.fused import fused_convolution
from sparseconv.plan.weights import packed
from sparseconv.torch_private import any_autocast


def sparse_add(*tens: SparseConvTensor) -> SparseConvTensor:
    """The sum of tensors at any indices, over the union of them, in lexicographic order; differentiable.

    All must have one spatial shape, batch size and width. Where the union is the indices of one of them, what its keys
    remember is kept.
    """
    if not all(isinstance(t, SparseConvTensor) for t in tens):
        if (node := recorded(sparse_add, tens)) is not None:
            return node
        raise TypeError(f"sparse_add takes SparseConvTensors; got {[type(t).__name__ for t in tens]}")
    if not tens:
        raise TypeError("sparse_add takes one SparseConvTensor or more; got none")
    first = tens[0]
    for t in tens:
        t.to_sparse_tensor()  # which says where features are not (N, C), one row per index
    for other in tens[1:]:
        mine, theirs = ((t.spatial_shape, t.batch_size, t.features.shape[1], t.features.device) for t in (first, other))
        if mine != theirs:
            raise ValueError(
                f"tensors must agree in spatial shape, batch size, channels and device; got {mine} and {theirs}"
            )
    union = first.inside
    for other in tens[1:]:
        union = union.union(_beside(union, other.inside))
    union, _ = union.sorted("lexicographic")
    rows = [union.lookup(t.voxels.coords) for t in tens]
    dtype = reduce(torch.promote_types, (t.features.dtype for t in tens))
    total = first.features.new_zeros(len(union), first.features.shape[1], dtype=dtype)
    for t, at in zip(tens, rows):
        total = total.index_add(0, at, t.features.to(total.dtype))
    largest = max(range(len(tens)), key=lambda i: len(tens[i].voxels))
    if len(tens[largest].voxels) == len(union):
        return tens[largest].replace_feature(total[rows[largest]])
    return first.replace_feature(total)._leave_keys()._at(Place(None, 0, union))


def _beside(grid: VoxelGrid, other: VoxelGrid) -> VoxelGrid:
    """``other`` in the space of ``grid``: of two grids in one spatial shape, one may know that it is coarser."""
    if (grid.voxel_size, grid.origin) == (other.voxel_size, other.origin):
        return other
    return VoxelGrid(other.coords, other.batch_size, grid.voxel_size, grid.origin)


#: the same sum; in spconv the two differ in how they find the union
sparse_add_hash_based = sparse_add


# ---- convolutions over tables of pairs


def of_pairs(pairs: torch.Tensor, counts: torch.Tensor, rows: int, num_out: int) -> KernelMap:
    """The edges of a table (2, K, N), of which each tap has so many.

    Raises:
        ValueError: a pair of rows that there are not, or two pairs of one output at one tap.
    """
    check_values("indice_pairs", pairs, "(2, K, N) integers")
    check_values("indice_pair_num", counts, "(K,) integers")
    if pairs.ndim != 3 or len(pairs) != 2 or pairs.dtype not in INTEGERS:
        raise ValueError(f"indice_pairs must be (2, K, N) integers; got {tuple(pairs.shape)} {pairs.dtype}")
    if counts.shape != pairs.shape[1:2] or counts.dtype not in INTEGERS:
        raise ValueError(f"indice_pair_num must be ({pairs.shape[1]},) integers; got {tuple(counts.shape)}")
    (num_out,) = integers([num_out], "num_activate_out", 0)
    held = torch.arange(pairs.shape[2], device=pairs.device) < counts.to(pairs.device)[:, None]
    taps = held.nonzero()[:, 0]
    into, out = (side[held].long() for side in pairs)
    _check_rows("indice_pairs", into, 0, rows)
    _check_rows("indice_pairs", out, 0, num_out)
    table = torch.full((pairs.shape[1], num_out), -1, dtype=torch.int32, device=pairs.device)
    table[taps, out] = into.int()
    if int((table >= 0).sum()) != len(taps):
        raise ValueError(
            "indice_pairs must name an output once at each tap, but some name one twice: number such pairs as taps of "
            "their own"
        )
    return KernelMap(rows, num_out, pairs.shape[1], neighbors=table)


def backwards(pairs: torch.Tensor) -> torch.Tensor:
    """The pairs from outputs to inputs."""
    check_values("indice_pairs", pairs, "(2, K, N) integers")
    return pairs.flip(0)


def of_table(pair_fwd: torch.Tensor, rows: int, num_out: int) -> KernelMap:
    """The edges of a table (K, N_out) of input rows, -1 for none."""
    check_values("pair_fwd", pair_fwd, "(K, N_out) integers")
    (num_out,) = integers([num_out], "num_activate_out", 0)
    if pair_fwd.ndim != 2 or pair_fwd.shape[1] != num_out or pair_fwd.dtype not in INTEGERS:
        raise ValueError(f"pair_fwd must be (K, {num_out}) integers; got {tuple(pair_fwd.shape)} {pair_fwd.dtype}")
    _check_rows("pair_fwd", pair_fwd, -1, rows)
    return KernelMap(rows, num_out, len(pair_fwd), neighbors=pair_fwd.int().contiguous())


def _check_rows(name: str, found: torch.Tensor, least: int, rows: int) -> None:
    if found.numel():
        low, high = torch.stack(torch.aminmax(found)).tolist()
        if low < least or high >= rows:
            raise ValueError(f"{name} must name rows from {least} to {rows - 1} here; got {low} to {high}")


def convolved(
    features: torch.Tensor,
    filters: torch.Tensor,
    edges: KernelMap,
    bias: torch.Tensor | None = None,
    act_type: Any = None,
    act_alpha: float = 0.0,
) -> torch.Tensor:
    """Features (N, C_in) over edges, for filters (C_out, *kernel, C_in); differentiable to any order."""
    check_values("filters", filters, "(C_out, *kernel, C_in)")
    if bias is not None:
        check_values("bias", bias, "(C_out,)")
    if filters.ndim < 3 or filters[0, ..., 0].numel() != edges.num_taps:
        raise ValueError(f"filters must be (C_out, *kernel, C_in) of {edges.num_taps} taps; got {tuple(filters.shape)}")
    for name, tensor in (("features", features), ("filters", filters), ("bias", bias)):
        if tensor is not None and tensor.device != edges.device:
            raise ValueError(f"the pairs are on {edges.device}, {name} on {tensor.device}: move one of them")
    x, taps = features, filters.flatten(1, -2).permute(1, 2, 0)
    if any_autocast():
        x, taps, bias, _ = autocast(x, taps, bias, None)
    taps = packed(taps)
    check_operands(edges, 1, x, filters, taps, bias, None)
    y = fused_convolution(x, taps, bias, None, None, edges, 1, "auto")
    return activated(y, act_type, act_alpha)


def indice_conv(
    features: torch.Tensor,
    filters: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
    num_activate_out: int,
    algo: Any = None,
    timer: Any = None,
    bias: torch.Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: Any = None,
) -> torch.Tensor:
    """A convolution over pairs (2, K, N) and their numbers (K,); ``algo``, ``timer``, ``act_beta`` have no effect.

    Args:
        features: (N_in, C_in).
        filters: (C_out, *kernel, C_in).
        indice_pairs, indice_pair_num, num_activate_out: of `ops.get_indice_pairs`; the last is the number of outputs.
        bias: (C_out,) or None.
        act_alpha, act_type: an activation after it, as for the layers.

    Returns:
        (num_activate_out, C_out); differentiable to any order.
    """
    check_features("features", features)
    edges = of_pairs(indice_pairs, indice_pair_num, len(features), num_activate_out)
    return convolved(features, filters, edges, bias, act_type, act_alpha)


def indice_inverse_conv(
    features: torch.Tensor,
    filters: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
    num_activate_out: int,
    *options: Any,
    **named: Any,
) -> torch.Tensor:
    """`indice_conv` with the pairs backwards: from a layer's outputs to its inputs."""
    pairs = backwards(indice_pairs)
    return indice_conv(features, filters, pairs, indice_pair_num, num_activate_out, *options, **named)


#: the same pairs and the same sum
indice_subm_conv = indice_conv


def implicit_gemm(
    features: torch.Tensor,
    filters: torch.Tensor,
    pair_fwd: torch.Tensor,
    pair_bwd: torch.Tensor | None,
    pair_mask_fwd_splits: Any,
    pair_mask_bwd_splits: Any,
    mask_argsort_fwd_splits: Any,
    mask_argsort_bwd_splits: Any,
    num_activate_out: int,
    masks: Any = None,
    is_train: bool = True,
    is_subm: bool = False,
    timer: Any = None,
    fp32_accum: bool | None = None,
    bias: torch.Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: Any = None,
) -> torch.Tensor:
    """A convolution over the table ``pair_fwd`` (K, N_out) of input rows; the other tables and flags have no effect."""
    check_features("features", features)
    edges = of_table(pair_fwd, len(features), num_activate_out)
    return convolved(features, filters, edges, bias, act_type, act_alpha)


# ---- pools over tables of pairs


def indice_maxpool(
    features: torch.Tensor, indice_pairs: torch.Tensor, indice_pair_num: torch.Tensor, num_activate_out: int
) -> torch.Tensor:
    """The largest of the rows that each output sees, by pairs (2, K, N) and their numbers (K,).

    ``features`` are (N_in, C), the result is (num_activate_out, C); differentiable to any order.
    """
    check_features("features", features)
    return largest(features, of_pairs(indice_pairs, indice_pair_num, len(features), num_activate_out))


def indice_maxpool_implicit_gemm(
    features: torch.Tensor, indice_pairs_fwd: torch.Tensor, indice_pairs_bwd: torch.Tensor | None, num_activate_out: int
) -> torch.Tensor:
    """`indice_maxpool` by the table ``indice_pairs_fwd`` (K, N_out) of input rows; the other has no effect."""
    check_features("features", features)
    return largest(features, of_table(indice_pairs_fwd, len(features), num_activate_out))


def indice_avgpool_implicit_gemm(
    features: torch.Tensor,
    indice_pairs_fwd: torch.Tensor,
    indice_pairs_bwd: torch.Tensor | None,
    num_activate_out: int,
    calc_count: bool = True,
) -> torch.Tensor:
    """The mean of the rows that each output sees, by a table (K, N_out); ``calc_count`` has no effect."""
    check_features("features", features)
    edges = of_table(indice_pairs_fwd, len(features), num_activate_out)
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    counts = (edges.neighbors >= 0).sum(0).clamp(min=1)[:, None].to(wide.dtype)
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


def largest(features: torch.Tensor, edges: KernelMap) -> torch.Tensor:
    """The largest of the rows that each output sees; 0 at least under ``POOL_AS_SPCONV``."""
    found = edge_max(features, edges)[0]
    return found.clamp(min=0) if constants.POOL_AS_SPCONV else found
