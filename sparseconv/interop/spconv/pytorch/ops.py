"""``spconv.pytorch.ops``: output shapes and tables of pairs, for code that computes layers by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparseconv.checks import INTEGERS, check_values
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.window import check_taps
from sparseconv.interop.arguments import axes, check_features, integers
from sparseconv.interop.spconv import constants
from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.interop.spconv.pytorch import functional
from sparseconv.interop.spconv.pytorch.geometry import (
    LayerWindow,
    check_inside,
    conv_size,
    deconv_size,
    find_plan,
    pair_table,
)
from sparseconv.ops.pooling import edge_sum
from sparseconv.plan.convolution import ConvolutionPlan

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


def _sizes(*given: Sequence[int]) -> list[list[int]]:
    """Input size, kernel size, stride, padding and dilation as whole numbers, one per axis each."""
    rank = len(integers(given[0], "input_size"))
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
) -> tuple[Any, ...]:
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
    (batch_size,) = integers([batch_size], "batch_size", 1)
    voxels = VoxelGrid(indices, batch_size)
    check_inside(voxels, given[0])
    return find_plan(voxels, window, shape, subm=subm, transposed=transpose)


# ---- layers over such tables, and their gradients as spconv's own autograd functions take them

indice_maxpool = functional.indice_maxpool


def indice_conv(
    features: torch.Tensor,
    filters: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
    num_activate_out: int,
    inverse: bool = False,
    subm: bool = False,
    *options: Any,
    **named: Any,
) -> torch.Tensor:
    """`functional.indice_conv`, or `functional.indice_inverse_conv` where ``inverse``."""
    run = functional.indice_inverse_conv if inverse else functional.indice_conv
    return run(features, filters, indice_pairs, indice_pair_num, num_activate_out, *options, **named)


def indice_conv_backward(
    features: torch.Tensor,
    filters: torch.Tensor,
    out_bp: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
    inverse: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, ...]:
    """The gradients of features and filters of `indice_conv`; further options have no effect."""
    tables = indice_pairs, indice_pair_num, len(out_bp), inverse
    return _gradients(lambda x, w: indice_conv(x, w, *tables), out_bp, features, filters)


def _gradients(run: Callable[..., torch.Tensor], out_bp: torch.Tensor, *inputs: torch.Tensor) -> tuple[Any, ...]:
    """The gradients of what ``run`` makes of inputs."""
    check_features("out_bp", out_bp)
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        y = run(*leaves)
    if out_bp.shape != y.shape:
        raise ValueError(f"out_bp must be {tuple(y.shape)}; got {tuple(out_bp.shape)}")
    return torch.autograd.grad(y, leaves, out_bp)


def implicit_gemm(
    features: torch.Tensor,
    filters: torch.Tensor,
    pair_fwd: torch.Tensor,
    masks: Any,
    order: Any,
    *more: Any,
    **named: Any,
) -> tuple[torch.Tensor, None, int]:
    """The result of `functional.implicit_gemm`, no mask, and -1 for the mask's width; ``more`` begins with the number
    of outputs."""
    tables = (pair_fwd, None, None, None, None, None)
    return functional.implicit_gemm(features, filters, *tables, *more, **named), None, -1


def implicit_gemm_backward(
    features: torch.Tensor, filters: torch.Tensor, out_bp: torch.Tensor, pair_fwd: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, ...]:
    """The gradients of features and filters of `implicit_gemm`; tables but ``pair_fwd``, and flags, have no effect."""
    tables = pair_fwd, None, None, len(out_bp)
    return _gradients(lambda x, w: implicit_gemm(x, w, *tables)[0], out_bp, features, filters)


def indice_maxpool_backward(
    features: torch.Tensor,
    out_features: Any,
    out_bp: torch.Tensor,
    indice_pairs: torch.Tensor,
    indice_pair_num: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the features of `indice_maxpool`; ``out_features`` has no effect."""
    tables = indice_pairs, indice_pair_num, len(out_bp)
    return _gradients(lambda x: indice_maxpool(x, *tables), out_bp, features)[0]


def indice_maxpool_implicit_gemm(
    features: torch.Tensor, indice_pairs: torch.Tensor, num_activate_out: int
) -> torch.Tensor:
    """`functional.indice_maxpool_implicit_gemm` by the table (K, N_out) of input rows alone."""
    return functional.indice_maxpool_implicit_gemm(features, indice_pairs, None, num_activate_out)


def indice_maxpool_implicit_gemm_backward(
    features: torch.Tensor, out_features: Any, out_bp: torch.Tensor, indice_pairs: torch.Tensor
) -> torch.Tensor:
    """The gradient of the features, by the table (K, N_in) of output rows; ``out_features`` has no effect."""
    edges = functional.of_table(indice_pairs, len(out_bp), len(features)).reverse()
    return _gradients(lambda x: functional.largest(x, edges), out_bp, features)[0]


def indice_avgpool_implicit_gemm(
    features: torch.Tensor, indice_pairs: torch.Tensor, num_activate_out: int, calc_count: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`functional.indice_avgpool_implicit_gemm`, and how many rows each output sees (N_out,), none if not asked for."""
    mean = functional.indice_avgpool_implicit_gemm(features, indice_pairs, None, num_activate_out)
    counts = (indice_pairs >= 0).sum(0, dtype=torch.int32)
    return mean, counts if calc_count else counts[:0]


def indice_avgpool_implicit_gemm_backward(
    out_bp: torch.Tensor, indice_pairs: torch.Tensor, count_out: torch.Tensor
) -> torch.Tensor:
    """The gradient of the features (N_in, C), by the table (K, N_in) of output rows and the counts (N_out,)."""
    check_features("out_bp", out_bp)
    check_values("count_out", count_out, f"({len(out_bp)},) integers")
    if count_out.shape != out_bp.shape[:1]:
        raise ValueError(f"count_out must be ({len(out_bp)},); got {tuple(count_out.shape)}")
    edges = functional.of_table(indice_pairs, len(out_bp), indice_pairs.shape[-1])
    counts = count_out.clamp(min=1)[:, None].to(out_bp.dtype)
    return edge_sum(out_bp * counts if constants.POOL_AS_SPCONV else out_bp / counts, edges)


def maximum_value_int_(ten: torch.Tensor, value: int) -> None:
    """Raise the numbers of a tensor below ``value`` to it, in place."""
    check_values("ten", ten, "integers")
    ten.clamp_(min=value)


def global_pool_rearrange(coords: torch.Tensor, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of each batch item (B, N) int32, of which so many are meant: (B,) int32; -1 behind them."""
    check_values("coords", coords, "(N, 1 + D) integers")
    (batch_size,) = integers([batch_size], "batch_size", 0)
    if coords.ndim != 2 or coords.dtype not in INTEGERS:
        raise ValueError(f"coords must be (N, 1 + D) integers, batch first; got {tuple(coords.shape)} {coords.dtype}")
    own = coords[:, 0] == torch.arange(batch_size, device=coords.device)[:, None]
    place = own.cumsum(1) - 1
    rows = torch.full(own.shape, -1, dtype=torch.int32, device=coords.device)
    item, row = own.nonzero().unbind(1)
    rows[item, place[item, row]] = row.int()
    return rows, own.sum(1, dtype=torch.int32)
