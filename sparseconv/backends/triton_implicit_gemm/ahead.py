"""Kernels of layers that did not run yet: compiled ahead, from sizes that are known about."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sparseconv.backends.base import Request
from sparseconv.backends.triton_implicit_gemm.backend import work_of
from sparseconv.backends.triton_implicit_gemm.config import Work, conv_candidates, weight_grad_candidates
from sparseconv.backends.triton_implicit_gemm.conv_recipe import ConvRecipe
from sparseconv.backends.triton_implicit_gemm.tuning import considered
from sparseconv.backends.triton_implicit_gemm.weight_grad_recipe import WeightGradRecipe
from sparseconv.geometry.gpu.ahead import ExpectedMap
from sparseconv.pointwise.epilogue import Epilogue


class ExpectedLayer(NamedTuple):
    """A convolution before it runs: its map, or that one turned round, its channels, and what it adds."""

    map: ExpectedMap
    c_in: int
    c_out: int
    groups: int
    turned: bool = False
    bias: torch.dtype | None = None
    takes_gradient: bool = True  # whether that of its input is asked for


def schedules_ahead(layer: ExpectedLayer, dtype: torch.dtype, device: torch.device, transposed: bool = False) -> None:
    """Start to compile what makes the schedules of the forward, or of the input's gradient."""
    if transposed and not layer.takes_gradient:
        return
    straight = transposed == layer.turned
    for tile in considered(conv_candidates(_work(layer, dtype, device, transposed))):
        if tile.chunked:
            if straight or layer.map.same:
                layer.map.tiles_ahead(device, tile.block_m, in_runs=True)
        elif tile.split > 1:
            ahead = layer.map.split_ahead if straight else layer.map.turned_split_ahead
            ahead(device, tile.block_m, min(tile.split, layer.map.num_taps))
        else:
            (layer.map.tiles_ahead if straight else layer.map.turned_ahead)(device, tile.block_m)


def forward_ahead(layer: ExpectedLayer, dtype: torch.dtype, device: torch.device) -> None:
    """Start to compile what the forward launches, but for schedules."""
    _conv_ahead(layer, dtype, device, False)


def inference_ahead(layer: ExpectedLayer, dtype: torch.dtype, device: torch.device, epilogue: Epilogue) -> None:
    """Start to compile forwards that a norm and an activation have joined, and on the same voxels a residual too."""
    told = layer._replace(bias=layer.bias or dtype)
    for has_residual in (False, True)[: 1 + layer.map.same]:
        _conv_ahead(told, dtype, device, False, epilogue, has_residual)


def gradients_ahead(layer: ExpectedLayer, dtype: torch.dtype, device: torch.device) -> None:
    """Start to compile what both gradients launch, but for schedules."""
    sizes, x, y, _ = _operands(layer, dtype)
    request = Request(sizes, device, dtype, layer.c_in, layer.c_out, layer.groups)
    work = work_of(request, _aligned(dtype, layer.c_in, layer.c_out))
    for sums in considered(weight_grad_candidates(work)):
        WeightGradRecipe(sums, work, x, y, sizes.num_taps).ahead(sizes, device)
    if layer.takes_gradient:
        _conv_ahead(layer, dtype, device, True)


def _work(layer: ExpectedLayer, dtype: torch.dtype, device: torch.device, transposed: bool) -> Work:
    request = Request(_operands(layer, dtype)[0], device, dtype, layer.c_in, layer.c_out, layer.groups)
    read = layer.c_out if transposed else layer.c_in
    return work_of(request, _aligned(dtype, read, layer.c_out), transposed)


def _conv_ahead(
    layer: ExpectedLayer,
    dtype: torch.dtype,
    device: torch.device,
    transposed: bool,
    epilogue: Epilogue | None = None,
    has_residual: bool = False,
) -> None:
    sizes, x, y, weight = _operands(layer, dtype)
    work = _work(layer, dtype, device, transposed)
    bias = None
    if layer.bias is not None and not transposed:
        bias = torch.empty(layer.c_out, dtype=layer.bias, device="meta")
    operands = (y if transposed else x, weight, transposed, bias, y if has_residual else None, epilogue)
    for tile in considered(conv_candidates(work)):
        ConvRecipe(tile, work, *operands).ahead(sizes, device)


class _Sizes(NamedTuple):
    """A kernel map, as far as recipes ask for it before they run over it."""

    num_in: int
    num_out: int
    num_pairs: int
    num_taps: int
    is_halved: bool
    part_of: None = None


def _operands(layer: ExpectedLayer, dtype: torch.dtype) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sizes, and input, output and weight without memory."""
    expected = layer.map
    num_in, num_out = (expected.num_in, expected.num_out)[:: -1 if layer.turned else 1]
    sizes = _Sizes(num_in, num_out, expected.num_pairs, expected.num_taps, expected.is_halved)
    x, y = (torch.empty(1, channels, dtype=dtype, device="meta") for channels in (layer.c_in, layer.c_out))
    shape = (expected.num_taps, layer.c_in // layer.groups, layer.c_out)
    return sizes, x, y, torch.empty(shape, dtype=dtype, device="meta")


def _aligned(dtype: torch.dtype, *channels: int) -> bool:
    """Whether rows of so many channels each start at multiples of 16 bytes."""
    return all(count * dtype.itemsize % 16 == 0 for count in channels)
