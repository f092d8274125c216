"""Shapes and rulebooks, for code that asks for them by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.window import check_taps
from sparseconv.interop.arguments import axes, whole
from sparseconv.interop.spconv import constants, pooled_pairs, rulebooks
from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.interop.spconv.pytorch.geometry import LayerWindow, check_inside, find_plan, pair_table
from sparseconv.kinds import check_values
from sparseconv.ops.pooling import edge_sum
from sparseconv.plan.convolution import ConvolutionPlan

#: the same sums and maxima, also by these names
indice_maxpool = pooled_pairs.indice_maxpool
global_pool_rearrange = pooled_pairs.rows_by_item

Ints = Sequence[int]

#: the least that a size may be, where there is one
LEAST = {"input_size": 0, "kernel_size": -1, "stride": 1, "padding": None, "dilation": 1}


def get_conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The dense shape after a convolution: floor((n + 2 p - d (k - 1) - 1) / s) + 1 an axis; 1 where k is -1."""
    return conv_size(*_sizes(input_size, kernel_size, stride, padding, dilation))


def conv_size(shape: Sequence[int], kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> list[int]:
    """`get_conv_output_size` of sizes that were checked."""
    return [
        1 if k == -1 else (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(shape, kernel, stride, padding, dilation)
    ]


def get_deconv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:
    """The dense shape after a transposed convolution: (n - 1) s - 2 p + k + output_padding an axis.

    The formula is spconv's, which leaves dilation out.
    """
    shape, kernel, steps, pad, _ = _sizes(input_size, kernel_size, stride, padding, dilation)
    if -1 in kernel:
        raise ValueError(f"a transposed convolution needs positive kernel sizes; got {kernel}")
    return deconv_size(shape, kernel, steps, pad, axes(output_padding, len(shape), "output_padding"))


def deconv_size(shape: Sequence[int], kernel: Ints, stride: Ints, padding: Ints, extra: Ints) -> list[int]:
    """`get_deconv_output_size` of sizes that were checked."""
    return [(n - 1) * s - 2 * p + k + e for n, k, s, p, e in zip(shape, kernel, stride, padding, extra)]


def _sizes(*given: Sequence[int]) -> list[list[int]]:
    """Input size, kernel size, stride, padding and dilation as whole numbers, one an axis each."""
    rank = len(whole(given[0], "input_size"))
    return [axes(sizes, rank, name, least) for (name, least), sizes in zip(LEAST.items(), given)]


def get_indice_pairs(
    indices: torch.Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    algo: ConvAlgo,
    ksize: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out_padding: Sequence[int],
    subm: bool = False,
    transpose: bool = False,
    num_out_act_bound: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rulebook of a layer: (out_indices (N_out, 1+D), pairs (2, K, N_in) with -1 past the end, counts (K,)).

    All int32. ``algo`` and ``num_out_act_bound`` are accepted and change nothing.
    """
    size = (ksize, stride, padding, dilation, out_padding)
    plan = _plan(indices, batch_size, spatial_shape, size, subm, transpose)
    pairs, counts = pair_table(plan)
    return indices if subm else plan.target.coords, pairs, counts


def get_indice_pairs_implicit_gemm(
    indices: torch.Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    algo: ConvAlgo,
    ksize: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out_padding: Sequence[int],
    subm: bool = False,
    transpose: bool = False,
    is_train: bool = True,
    *options: Any,
    **more: Any,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[Any], list[Any], list[Any], list[Any], list[Any]
]:
    """The tables of a layer: out_indices, counts (K,), pair_fwd (K, N_out), pair_bwd (K, N_in), and five empty lists.

    The lists are of masks and orders, which kernels here make for themselves. ``pair_bwd`` has no elements for
    submanifold layers, and where not ``is_train``.
    """
    size = (ksize, stride, padding, dilation, out_padding)
    plan = _plan(indices, batch_size, spatial_shape, size, subm, transpose)
    edges = plan.kernel_map
    back = edges.reverse().neighbors.clone() if is_train and not subm else indices.new_empty(0)
    counts, out = edges.tap_offsets.diff().int(), indices if subm else plan.target.coords
    return out, counts, edges.neighbors.clone(), back, [], [], [], [], []


def _plan(
    indices: torch.Tensor, batch_size: int, spatial_shape: Ints, size: Sequence[Ints], subm: bool, transpose: bool
) -> ConvolutionPlan:
    given = _sizes(spatial_shape, *size[:4])
    check_taps(given[1])
    window = LayerWindow(*(tuple(sizes) for sizes in given[1:]))
    if subm:
        shape = given[0]
    elif transpose:
        shape = get_deconv_output_size(spatial_shape, *size)
    else:
        shape = conv_size(*given)
    (batch_size,) = whole([batch_size], "batch_size", 1)
    voxels = VoxelGrid(indices, batch_size)
    check_inside(voxels, given[0])
    return find_plan(voxels, window, shape, subm=subm, transposed=transpose)


def indice_conv(
    features: torch.Tensor,
    filters: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
    num_activate_out: int,
    inverse: bool = False,
    subm: bool = False,
    algo: ConvAlgo | None = None,
    timer: Any = None,
    bias: torch.Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: Any = None,
) -> torch.Tensor:
    """`functional.indice_conv`, or `functional.indice_inverse_conv` where ``inverse``."""
    run = rulebooks.indice_inverse_conv if inverse else rulebooks.indice_conv
    given = (features, filters, indice_pairs, indice_pair_num, num_activate_out, algo, timer)
    return run(*given, bias, act_alpha, act_beta, act_type)


def indice_conv_backward(
    features: torch.Tensor,
    filters: torch.Tensor,
    out_bp: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
    inverse: bool = False,
    subm: bool = False,
    algo: ConvAlgo | None = None,
    timer: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of features and filters of `indice_conv`."""
    rulebooks.check_features(features)
    rulebooks.check_features(out_bp)
    edges = rulebooks.of_pairs(indice_pairs, indice_pair_num, len(features), len(out_bp), inverse)
    return rulebooks.gradients(features, filters, out_bp, edges)


def implicit_gemm(
    features: torch.Tensor,
    filters: torch.Tensor,
    pair_fwd: torch.Tensor,
    pair_mask_fwd_splits: Any,
    mask_argsort_fwd_splits: Any,
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
) -> tuple[torch.Tensor, None, int]:
    """The result of `functional.implicit_gemm`, no mask, and -1 for the mask's width."""
    given = (features, filters, pair_fwd, None, None, None, None, None, num_activate_out)
    return rulebooks.implicit_gemm(*given, bias=bias, act_alpha=act_alpha, act_type=act_type), None, -1


def implicit_gemm_backward(
    features: torch.Tensor,
    filters: torch.Tensor,
    out_bp: torch.Tensor,
    pair_fwd: torch.Tensor,
    pair_bwd: torch.Tensor | None = None,
    *options: Any,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of features and filters of `implicit_gemm`; tables but ``pair_fwd``, and flags, have no effect."""
    rulebooks.check_features(features)
    rulebooks.check_features(out_bp)
    return rulebooks.gradients(features, filters, out_bp, rulebooks.of_table(pair_fwd, len(features), len(out_bp)))


def indice_maxpool_backward(
    features: torch.Tensor,
    out_features: torch.Tensor,
    out_bp: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the features of `indice_maxpool`; ``out_features`` has no effect."""
    rulebooks.check_features(features)
    edges = rulebooks.of_pairs(indice_pairs, indice_pair_num, len(features), len(out_bp))
    return pooled_pairs.maxpool_gradient(features, out_bp, edges)


def indice_maxpool_implicit_gemm(
    features: torch.Tensor, indice_pairs: torch.Tensor, num_activate_out: int
) -> torch.Tensor:
    """`functional.indice_maxpool_implicit_gemm` by the table (K, N_out) of input rows alone."""
    return pooled_pairs.indice_maxpool_implicit_gemm(features, indice_pairs, None, num_activate_out)


def indice_maxpool_implicit_gemm_backward(
    features: torch.Tensor, out_features: torch.Tensor, out_bp: torch.Tensor, indice_pairs: torch.Tensor
) -> torch.Tensor:
    """The gradient of the features, by the table (K, N_in) of output rows; ``out_features`` has no effect."""
    rulebooks.check_features(features)
    edges = rulebooks.of_table(indice_pairs, len(out_bp), len(features)).reverse()
    return pooled_pairs.maxpool_gradient(features, out_bp, edges)


def indice_avgpool_implicit_gemm(
    features: torch.Tensor, indice_pairs: torch.Tensor, num_activate_out: int, calc_count: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`functional.indice_avgpool_implicit_gemm`, and how many rows each output sees (N_out,), none if not asked for."""
    mean = pooled_pairs.indice_avgpool_implicit_gemm(features, indice_pairs, None, num_activate_out)
    counts = (indice_pairs >= 0).sum(0, dtype=torch.int32)
    return mean, counts if calc_count else counts.new_empty(0)


def indice_avgpool_implicit_gemm_backward(
    out_bp: torch.Tensor, indice_pairs: torch.Tensor, count_out: torch.Tensor
) -> torch.Tensor:
    """The gradient of the features (N_in, C), by the table (K, N_in) of output rows and the counts (N_out,)."""
    rulebooks.check_features(out_bp)
    check_values("count_out", count_out, f"({len(out_bp)},) integers")
    if count_out.shape != out_bp.shape[:1]:
        raise ValueError(f"count_out must be ({len(out_bp)},); got {tuple(count_out.shape)}")
    edges = rulebooks.of_table(indice_pairs, len(out_bp), indice_pairs.shape[-1])
    counts = count_out.clamp(min=1)[:, None].to(out_bp.dtype)
    return edge_sum(out_bp * counts if constants.POOL_AS_SPCONV else out_bp / counts, edges)


def maximum_value_int_(ten: torch.Tensor, value: int) -> None:
    """Raise the numbers of a tensor below ``value`` to it, in place."""
    check_values("ten", ten, "integers")
    ten.clamp_(min=value)
