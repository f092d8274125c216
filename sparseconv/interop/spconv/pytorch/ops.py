"""Shapes and rulebooks, for code that asks for them by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.window import check_taps
from sparseconv.interop.arguments import axes, whole
from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.interop.spconv.pytorch.geometry import LayerWindow, check_inside, find_plan, pair_table

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
    given = _sizes(spatial_shape, ksize, stride, padding, dilation)
    check_taps(given[1])
    window = LayerWindow(*(tuple(sizes) for sizes in given[1:]))
    if subm:
        shape = given[0]
    elif transpose:
        shape = get_deconv_output_size(spatial_shape, ksize, stride, padding, dilation, out_padding)
    else:
        shape = conv_size(*given)
    (batch_size,) = whole([batch_size], "batch_size", 1)
    voxels = VoxelGrid(indices, batch_size)
    check_inside(voxels, given[0])
    plan = find_plan(voxels, window, shape, subm=subm, transposed=transpose)
    pairs, counts = pair_table(plan)
    return indices if subm else plan.target.coords, pairs, counts
