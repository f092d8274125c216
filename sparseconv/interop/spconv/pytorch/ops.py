"""Shapes and rulebooks, for code that asks for them by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.interop.spconv.pytorch.geometry import LayerWindow, find_plan, pair_table


def get_conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The dense shape after a convolution: floor((n + 2 p - d (k - 1) - 1) / s) + 1 an axis; 1 where k is -1."""
    return [
        1 if k == -1 else (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(input_size, kernel_size, stride, padding, dilation)
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
    if -1 in kernel_size:
        raise ValueError(f"a transposed convolution needs positive kernel sizes; got {list(kernel_size)}")
    return [
        (n - 1) * s - 2 * p + k + extra
        for n, k, s, p, extra in zip(input_size, kernel_size, stride, padding, output_padding)
    ]


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

    window = LayerWindow(tuple(ksize), tuple(stride), tuple(padding), tuple(dilation))
    if subm:
        shape = list(spatial_shape)
    elif transpose:
        shape = get_deconv_output_size(spatial_shape, ksize, stride, padding, dilation, out_padding)
    else:
        shape = get_conv_output_size(spatial_shape, ksize, stride, padding, dilation)
    plan = find_plan(VoxelGrid(indices, batch_size), window, shape, subm=subm, transposed=transpose)
    pairs, counts = pair_table(plan)
    return indices if subm else plan.target.coords, pairs, counts
