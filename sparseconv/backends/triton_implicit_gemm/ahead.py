"""Kernels of layers that did not run yet: compiled ahead, from sizes that are known about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sparseconv.backends.base import Request
from sparseconv.backends.triton_implicit_gemm.config import Work, autotuned, conv_candidates, weight_grad_candidates
from sparseconv.backends.triton_implicit_gemm.conv_recipe import ConvRecipe
from sparseconv.backends.triton_implicit_gemm.recipe import are_aligned, work_of
from sparseconv.backends.triton_implicit_gemm.weight_grad_recipe import WeightGradRecipe

if TYPE_CHECKING:
    from sparseconv.geometry.gpu.ahead import ExpectedMap
    from sparseconv.pointwise import Epilogue


def considered(candidates: Sequence[Any]) -> Sequence[Any]:
    """Those that are compiled ahead: all that are timed; the expected best alone, where none is."""
    return candidates if autotuned() else candidates[:1]


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
    request, x, y, weight = _operands(layer, dtype, device)
    for tile in considered(conv_candidates(_conv_work(request, y if transposed else x, weight, transposed))):
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
    request, x, _, weight = _operands(layer, dtype, device)
    conv_ahead(request, x, weight, bias=_bias(layer))


def inference_ahead(layer: ExpectedLayer, dtype: torch.dtype, device: torch.device, epilogue: Epilogue) -> None:
    """Start to compile forwards that a norm and an activation have joined, and on the same voxels a residual too."""
    request, x, y, weight = _operands(layer, dtype, device)
    bias = _bias(layer._replace(bias=layer.bias or dtype))
    for residual in (None, y)[: 1 + layer.map.same]:
        conv_ahead(request, x, weight, False, bias, residual, epilogue)


def gradients_ahead(layer: ExpectedLayer, dtype: torch.dtype, device: torch.device) -> None:
    """Start to compile what both gradients launch, but for schedules."""
    request, x, y, weight = _operands(layer, dtype, device)
    weight_grad_ahead(request, x, y)
    if layer.takes_gradient:
        conv_ahead(request, y, weight, True)


def weight_grad_ahead(request: Request, x: torch.Tensor, grad_out: torch.Tensor) -> None:
    """Start to compile the candidates for a weight gradient of operands like these."""
    work = work_of(request, are_aligned((x, x.stride(0)), (grad_out, grad_out.stride(0))))
    sizes = request.kernel_map
    for sums in considered(weight_grad_candidates(work)):
        WeightGradRecipe(sums, work, x, grad_out, sizes.num_taps).ahead(sizes, request.device)


def conv_ahead(
    request: Request,
    x: torch.Tensor,
    weight: torch.Tensor,
    transposed: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """Start to compile the candidates for a forward or an input gradient of operands like these."""
    work = _conv_work(request, x, weight, transposed)
    for tile in considered(conv_candidates(work)):
        recipe = ConvRecipe(tile, work, x, weight, transposed, bias, residual, epilogue)
        recipe.ahead(request.kernel_map, request.device)


def _conv_work(request: Request, x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> Work:
    return work_of(request, are_aligned((x, x.stride(0)), (weight, weight.shape[2])), transposed)


class _Sizes(NamedTuple):
    """A kernel map, as far as recipes ask for it before they run over it."""

    num_in: int
    num_out: int
    num_pairs: int
    num_taps: int
    is_halved: bool
    part_of: None = None


def _operands(
    layer: ExpectedLayer, dtype: torch.dtype, device: torch.device
) -> tuple[Request, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The request, and input, output and weight without memory, which count as aligned."""
    expected = layer.map
    num_in, num_out = (expected.num_in, expected.num_out)[:: -1 if layer.turned else 1]
    sizes: Any = _Sizes(num_in, num_out, expected.num_pairs, expected.num_taps, expected.is_halved)
    x, y = (torch.empty(1, channels, dtype=dtype, device="meta") for channels in (layer.c_in, layer.c_out))
    weight = torch.empty(expected.num_taps, layer.c_in // layer.groups, layer.c_out, dtype=dtype, device="meta")
    return Request(sizes, device, dtype, layer.c_in, layer.c_out, layer.groups), x, y, weight


def _bias(layer: ExpectedLayer) -> torch.Tensor | None:
    return None if layer.bias is None else torch.empty(layer.c_out, dtype=layer.bias, device="meta")
