"""The one differentiable operation; the only file that registers it with torch.

Two operators, closed under differentiation (k over taps, over the edges of a kernel map E):

    convolution:      y[out] = sum x[in] @ w[k]            adjoint:  y[in] = sum x[out] @ w[k]^T
    weight_gradient:  w[k]   = sum x[in]^T g[out]

    d convolution = {adjoint of g with w, weight_gradient(x, g)}
    d adjoint     = {convolution of g with w, weight_gradient(g, x)}
    d weight_gradient with cotangent h = {adjoint of g with h, convolution of x with h}

A kernel map travels through an operator's schema as an integer, since torch's schemas know no such type; whoever holds
the map (a plan, a graph node) keeps it alive.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any
from weakref import WeakValueDictionary

import torch

from sparseconv.backends.base import Backend, Request
from sparseconv.backends.registry import choose
from sparseconv.geometry.kernel_map import KernelMap

_maps: WeakValueDictionary[int, KernelMap] = WeakValueDictionary()
_numbers = itertools.count(1)
_lock = threading.Lock()


def number_of(kernel_map: KernelMap) -> int:
    """The number under which operators find this map while it lives."""
    with _lock:
        number = kernel_map.prepared.get("number")
        if number is None:
            number = next(_numbers)
            _maps[number] = kernel_map
            kernel_map.prepared["number"] = number
    return number


def _map(number: int) -> KernelMap:
    found = _maps.get(number)
    if found is None:
        raise RuntimeError(
            f"kernel map {number} is gone: keep the plan alive as long as its graph (a compiled module must hold it)"
        )
    return found


def _backend(kernel_map: KernelMap, x: torch.Tensor, c_in: int, c_out: int, groups: int, name: str) -> Backend:
    key = ("backend", name, x.dtype, c_in, c_out, groups)
    chosen = kernel_map.prepared.get(key)
    if chosen is None:
        chosen = choose(Request(kernel_map, x.device, x.dtype, c_in, c_out, groups), name)
        kernel_map.prepared[key] = chosen
    return chosen


_library = torch.library.Library("sparseconv", "FRAGMENT")
_library.define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, int edges, int rows, int groups, bool adjoint, str backend)"
    " -> Tensor"
)
_library.define("weight_gradient(Tensor x, Tensor grad, int edges, int taps, int groups, str backend) -> Tensor")


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: int,
    rows: int,
    groups: int,
    adjoint: bool,
    backend: str,
) -> torch.Tensor:
    kernel_map = _map(edges)
    serving = _backend(kernel_map, x, weight.shape[1] * groups, weight.shape[2], groups, backend)
    if adjoint:
        return serving.input_grad(x, weight, kernel_map, groups)
    return serving.forward(x, weight, kernel_map, groups, bias)


def _weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, edges: int, taps: int, groups: int, backend: str
) -> torch.Tensor:
    kernel_map = _map(edges)
    serving = _backend(kernel_map, x, x.shape[1], grad.shape[1], groups, backend)
    return serving.weight_grad(x, grad, kernel_map, groups)


for _key in ("CPU", "CUDA"):
    _library.impl("convolution", _convolution, _key)
    _library.impl("weight_gradient", _weight_gradient, _key)


@torch.library.register_fake("sparseconv::convolution", lib=_library)
def _(x, weight, bias, edges, rows, groups, adjoint, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((rows, weight.shape[1] * groups if adjoint else weight.shape[2]))


@torch.library.register_fake("sparseconv::weight_gradient", lib=_library)
def _(x, grad, edges, taps, groups, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((taps, x.shape[1] // groups, grad.shape[1]))


def _save_convolution(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, _, edges, _, groups, adjoint, backend = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
    ctx.call = (edges, x.shape[0], weight.shape[0], groups, adjoint, backend)
    ctx.kernel_map = _maps.get(edges)


def _convolution_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    edges, rows, taps, groups, adjoint, backend = ctx.call
    ops = torch.ops.sparseconv
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = ops.convolution(grad, weight, None, edges, rows, groups, not adjoint, backend)
    if ctx.needs_input_grad[1]:
        fine, coarse = (grad, x) if adjoint else (x, grad)
        grad_weight = ops.weight_gradient(fine, coarse, edges, taps, groups, backend)
    if ctx.needs_input_grad[2]:
        grad_bias = grad.sum(0)
    return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _save_weight_gradient(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, grad, edges, _, groups, backend = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, grad if ctx.needs_input_grad[0] else None)
    ctx.call = (edges, x.shape[0], grad.shape[0], groups, backend)
    ctx.kernel_map = _maps.get(edges)


def _weight_gradient_backward(ctx: Any, cotangent: torch.Tensor) -> tuple:
    x, grad = ctx.saved_tensors
    edges, rows_in, rows_out, groups, backend = ctx.call
    ops = torch.ops.sparseconv
    grad_x = grad_grad = None
    if ctx.needs_input_grad[0]:
        grad_x = ops.convolution(grad, cotangent, None, edges, rows_in, groups, True, backend)
    if ctx.needs_input_grad[1]:
        grad_grad = ops.convolution(x, cotangent, None, edges, rows_out, groups, False, backend)
    return grad_x, grad_grad, None, None, None, None


torch.library.register_autograd(
    "sparseconv::convolution", _convolution_backward, setup_context=_save_convolution, lib=_library
)
torch.library.register_autograd(
    "sparseconv::weight_gradient", _weight_gradient_backward, setup_context=_save_weight_gradient, lib=_library
)


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: int,
    rows: int,
    groups: int = 1,
    backend: str = "auto",
) -> torch.Tensor:
    """y (rows, C_out) from x (N_in, C_in) and weight (K, C_in/G, C_out) over the numbered map; differentiable to any
    order in x, weight and bias (C_out,). Arguments are taken as checked: `ConvolutionPlan.execute` is the boundary."""
    return torch.ops.sparseconv.convolution(x, weight, bias, edges, rows, groups, False, backend)
