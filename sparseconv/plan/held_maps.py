"""The operators of `sparseconv.autograd` as graphs of torch.compile have them: with a tensor that holds the kernel map.

Such a graph keeps tensors for its backward pass, and nothing else. A map that it knew by number alone was gone where
the scene was, as in networks that make their scene and return features. The tensor (N_in, N_out) int64 has the map as
an attribute, which lives as long as the graph keeps the tensor; its memory is one number, without a meaning. Its shape
tells the rows of a result: inductor loses numbers that a graph is called with, never those of shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sparseconv import transforms
from sparseconv.autograd import below, checked_convolution, checked_weight_gradient, library, register
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.numbered_maps import number_of


class Names(NamedTuple):
    """What operators know a map by: its number, and in a graph of torch.compile a tensor that holds it.

    The tensor is None for a plan that was made before torch.compile was loaded: whoever compiles has that plan.
    """

    number: int
    holder: torch.Tensor | None

    @property
    def now(self) -> Any:
        return self.holder if self.holder is not None and torch.compiler.is_compiling() else self.number


@transforms.untraced
def names_of(kernel_map: KernelMap) -> Names:
    """The names of a map; a plan keeps them, and the map with them."""
    return Names(number_of(kernel_map), _holder_of(kernel_map) if "torch._dynamo" in sys.modules else None)


@transforms.constant
def _holder_of(kernel_map: KernelMap) -> torch.Tensor:
    # no view, of which a compiled graph would keep a copy without the attribute
    holder = torch.empty_strided((kernel_map.num_in, kernel_map.num_out), (0, 0), dtype=torch.int64)
    holder.__dict__["kernel_map"] = kernel_map
    return holder


def _number(edges: torch.Tensor) -> int:
    held = edges.__dict__.get("kernel_map")
    if held is None:
        raise RuntimeError(
            "a compiled graph knows its kernel map by a tensor, of which this is a copy without the map: do not move "
            "what the graph keeps, as torch.autograd.graph.save_on_cpu does"
        )
    return number_of(held)


def _rows(edges: Any, adjoint: bool) -> Any:
    return edges.shape[0 if adjoint else 1]


def _convolution(
    x: Any, weight: Any, bias: Any, edges: torch.Tensor, groups: int, adjoint: bool, backend: str
) -> torch.Tensor:
    return checked_convolution(x, weight, bias, _number(edges), _rows(edges, adjoint), groups, adjoint, backend)


def _weight_gradient(x: Any, grad: Any, edges: torch.Tensor, *others: Any) -> torch.Tensor:
    return checked_weight_gradient(x, grad, _number(edges), *others)


def _keep(ctx: Any, inputs: tuple) -> None:
    ctx.save_for_backward(*(t for t in inputs if isinstance(t, torch.Tensor)))
    ctx.call = [value for value in inputs if not isinstance(value, torch.Tensor)]


def _of_convolution(ctx: Any, grad: torch.Tensor) -> tuple:
    (x, weight, *_, edges), (*_, groups, adjoint, backend) = ctx.saved_tensors, ctx.call
    of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
    grad_x = grad_weight = None
    if of_weight:
        pair = (grad, x) if adjoint else (x, grad)
        grad_weight = torch.ops.sparseconv.held_weight_gradient(*pair, edges, weight.shape[0], groups, backend)
    if of_x:
        grad_x = torch.ops.sparseconv.held_convolution(grad, weight, None, edges, groups, not adjoint, backend)
    return grad_x, grad_weight, grad.sum(0) if of_bias else None, None, None, None, None


def _of_weight_gradient(ctx: Any, cotangent: torch.Tensor) -> tuple:
    (x, grad, edges), (_taps, groups, backend) = ctx.saved_tensors, ctx.call
    of_x, of_grad, *_ = ctx.needs_input_grad
    convolution = torch.ops.sparseconv.held_convolution
    grad_x = convolution(grad, cotangent, None, edges, groups, True, backend) if of_x else None
    grad_grad = convolution(x, cotangent, None, edges, groups, False, backend) if of_grad else None
    return grad_x, grad_grad, None, None, None, None


library.define(
    "held_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor edges, int groups, bool adjoint, str backend)"
    " -> Tensor"
)
library.define("held_weight_gradient(Tensor x, Tensor grad, Tensor edges, int taps, int groups, str backend) -> Tensor")


def _with_derivative(name: str, run: Callable[..., torch.Tensor], derivative: Any) -> Callable[..., torch.Tensor]:
    """What goes under an operator's ``Autograd`` key. A compiled graph has its own derivative and asks for none here:
    that of `torch.library.register_autograd` then costs a second pass through the dispatcher, some 12 us a call."""

    def plainly(*args: Any) -> torch.Tensor:
        found: torch.Tensor = below(name, run, [t for t in args if isinstance(t, torch.Tensor)], args)
        return found

    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        _keep(ctx, args)
        return plainly(*args)

    body = {"forward": staticmethod(forward), "backward": staticmethod(derivative)}
    made: Any = type(f"Held{name}", (torch.autograd.Function,), body)

    def called(*args: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in args):
            found: torch.Tensor = made.apply(*args)
            return found
        return plainly(*args)

    return called


for _name, _run, _derivative in (
    ("held_convolution", _convolution, _of_convolution),
    ("held_weight_gradient", _weight_gradient, _of_weight_gradient),
):
    register(_name, _run, _with_derivative(_name, _run, _derivative))


@torch.library.register_fake("sparseconv::held_convolution", lib=library)
def _fake_convolution(
    x: Any, weight: Any, bias: Any, edges: Any, groups: int, adjoint: bool, backend: str
) -> torch.Tensor:
    made: torch.Tensor = x.new_empty((_rows(edges, adjoint), weight.shape[1] * groups if adjoint else weight.shape[2]))
    return made


@torch.library.register_fake("sparseconv::held_weight_gradient", lib=library)
def _fake_weight_gradient(x: Any, grad: Any, edges: Any, taps: int, groups: int, backend: str) -> torch.Tensor:
    made: torch.Tensor = x.new_empty((taps, x.shape[1] // groups, grad.shape[1]))
    return made
