"""The one differentiable operation, as torch knows it; `sparseconv.plan.held_maps` has its twin for compiled graphs.

Two operators, closed under differentiation (k over taps, over the edges of a kernel map E):

    convolution:      y[out] = sum x[in] @ w[k]            adjoint:  y[in] = sum x[out] @ w[k]^T
    weight_gradient:  w[k]   = sum x[in]^T g[out]

    d convolution = {adjoint of g with w, weight_gradient(x, g)}
    d adjoint     = {convolution of g with w, weight_gradient(g, x)}
    d weight_gradient with cotangent h = {adjoint of g with h, convolution of x with h}

A kernel map travels through an operator's schema as an integer, since torch's schemas know no such type.
The plan or graph node that holds the map keeps it alive. The schema says SymInt, so a compiled network serves every
scene.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from sparseconv import transforms
from sparseconv.backends.base import Backend, Request
from sparseconv.backends.registry import choose
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.numbered_maps import alive, check_convolution, check_weight_gradient, map_of
from sparseconv.torch_private import (
    any_autocast,
    backward_pass,
    below_autograd,
    dispatch_modes,
    exporting,
    functional,
    is_batch_of_cotangents,
    unwrap_dead,
)


def serving_backend(kernel_map: KernelMap, x: torch.Tensor, weight: tuple[int, ...], groups: int, name: str) -> Backend:
    """What serves these features with a weight of that shape."""
    key = ("backend", name, x.dtype, weight, groups)
    chosen = kernel_map.prepared.get(key)
    if chosen is None:
        request = Request(kernel_map, x.device, x.dtype, weight[1] * groups, weight[2], groups)
        chosen = kernel_map.prepared[key] = choose(request, name)
    return chosen


library = torch.library.Library("sparseconv", "FRAGMENT")
library.define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, SymInt edges, SymInt rows, int groups, bool adjoint,"
    " str backend) -> Tensor"
)
library.define("weight_gradient(Tensor x, Tensor grad, SymInt edges, int taps, int groups, str backend) -> Tensor")


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
    kernel_map = map_of(edges)
    serving = serving_backend(kernel_map, x, weight.shape, groups, backend)
    if adjoint:
        return serving.input_grad(x, weight, kernel_map, groups)
    return serving.forward(x, weight, kernel_map, groups, bias)


def _weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, edges: int, taps: int, groups: int, backend: str
) -> torch.Tensor:
    kernel_map = map_of(edges)
    serving = serving_backend(kernel_map, x, (taps, x.shape[1] // groups, grad.shape[1]), groups, backend)
    return serving.weight_grad(x, grad, kernel_map, groups)


def checked_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: int,
    rows: int,
    groups: int,
    adjoint: bool,
    backend: str,
) -> torch.Tensor:
    """What torch has registered, which anybody may call; a plan's own calls are checked by the plan."""
    check_convolution(map_of(edges), x, weight, bias, rows, groups, adjoint)
    return _convolution(x, weight, bias, edges, rows, groups, adjoint, backend)


def checked_weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, edges: int, taps: int, groups: int, backend: str
) -> torch.Tensor:
    check_weight_gradient(map_of(edges), x, grad, taps, groups)
    return _weight_gradient(x, grad, edges, taps, groups, backend)


def both_gradients(
    needs: tuple[bool, bool],
    x: torch.Tensor,
    weight: torch.Tensor,
    grad: torch.Tensor,
    edges: int,
    sizes: tuple[int, int],
    groups: int,
    backend: str,
    adjoint: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dL/dx and dL/dw, as far as they are wanted, from dL/dy; ``sizes``: the rows of x and the taps."""
    (of_x, of_weight), (rows, taps) = needs, sizes
    if of_x and of_weight and not adjoint and is_last(grad, x, weight):
        kernel_map = map_of(edges)
        serving = serving_backend(kernel_map, x, weight.shape, groups, backend)
        return serving.gradients(x, weight, grad, kernel_map, groups)
    grad_x = grad_weight = None
    if of_weight:  # first: its partial sums then lie where the input gradient will be
        fine, coarse = (grad, x) if adjoint else (x, grad)
        grad_weight = _call(_WeightGradient, fine, coarse, edges, taps, groups, backend)
    if of_x:
        grad_x = _call(_Convolution, grad, weight, None, edges, rows, groups, not adjoint, backend)
    return grad_x, grad_weight


#: types of plain tensors, which no subclass intercepts
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether a call may bypass torch's dispatcher: plain eager tensors, no mode, no forward mode, no batch of
    cotangents, which the dispatcher takes one after another, and no view that it negates, as ``z.conj().imag``.

    Two passes through the dispatcher's Python kernels cost as much as launching a small layer.
    """
    has_batches = backward_pass() >= 0
    for t in tensors:  # no generator: that takes as long as all of the rest
        if t is not None and (type(t) not in _PLAIN or t.is_neg() or (has_batches and is_batch_of_cotangents(t))):
            return False
    return not dispatch_modes() and not transforms.forward_mode()


def _in_autocast(x: torch.Tensor) -> bool:
    return any_autocast() and torch.is_autocast_enabled(x.device.type)


def is_direct(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether a call may run its kernel as things are: `is_plain`, and no autocast would cast what is within it."""
    return is_plain(x, *others) and not _in_autocast(x)


def is_last(*tensors: torch.Tensor) -> bool:
    """Whether both gradients of a convolution are wanted as they are, without derivatives of their own."""
    return not torch.is_grad_enabled() and not functional() and is_direct(*tensors)


def _call(function: type[_Linear], *args: Any) -> torch.Tensor:
    tensors = args[: function.num_tensors]
    if is_plain(*tensors) and not functional():
        return without_casts(tensors[0], _run, function, *args) if any_autocast() else _run(function, *args)
    if transforms.present():  # which see through autograd functions only
        return function.apply(*tensors, args[len(tensors) :])
    return getattr(torch.ops.sparseconv, function.name)(*args)


def without_casts(x: torch.Tensor, run: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """run(*args) with autocast off, the operands being cast already; torch's own context costs as much as a layer."""
    if not _in_autocast(x):
        return run(*args)
    kind = x.device.type
    torch.set_autocast_enabled(kind, False)
    try:
        return run(*args)
    finally:
        torch.set_autocast_enabled(kind, True)


def _run(function: type[_Linear], *args: Any) -> torch.Tensor:
    """The kernel, with its derivative where one is wanted."""
    if torch.is_grad_enabled():
        for t in args[: function.num_tensors]:
            if t is not None and t.requires_grad:
                return function.at_once(*args)
    return function.kernel(*args)


def _at_once(function: type[_Linear], run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An operator with the same derivative by the older signature of ``forward``, whose call costs some 12 us less than
    the one that torch.func needs: torch binds the arguments of the latter through ``inspect`` each time.

    Nor does it look for functional transforms, another 2 us: what one that is over has wrapped is unwrapped here.
    """

    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        function.keep(ctx, args)
        return run(*args[:-1], *args[-1])

    body = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    made: Any = type(f"{function.__name__}AtOnce", (torch.autograd.Function,), body)
    unwrap: Any = unwrap_dead
    if unwrap is None:
        return lambda *args: made.apply(*args[: function.num_tensors], args[function.num_tensors :])
    apply = super(torch.autograd.Function, made).apply

    def at_once(*args: Any) -> torch.Tensor:
        tensors = [t if t is None else unwrap(t) for t in args[: function.num_tensors]]
        return apply(*tensors, args[len(tensors) :])

    return at_once


class _Linear(torch.autograd.Function):
    """An operator's derivative; it goes under the operator's ``Autograd`` key, or runs the kernel directly.

    It takes the operator's tensors, and one tuple of the operator's other arguments.
    """

    name: ClassVar[str]
    num_tensors: ClassVar[int]
    kernel: ClassVar[Callable[..., torch.Tensor]]
    checked: ClassVar[Callable[..., torch.Tensor]]
    at_once: ClassVar[Callable[..., torch.Tensor]]

    @classmethod
    def run(cls, *args: Any) -> torch.Tensor:
        return below(cls.name, cls.checked, args[: cls.num_tensors], args)

    @classmethod
    def forward(cls, *args: Any) -> torch.Tensor:
        return cls.run(*args[:-1], *args[-1])

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        cls.keep(ctx, inputs)
        if transforms.present():
            ctx.save_for_forward(*inputs[:2])

    @classmethod
    def keep(cls, ctx: Any, inputs: tuple) -> None:
        """What `backward` reads; forward mode has its own."""
        one, other, *_, ctx.call = inputs
        of_one, of_other, *_ = ctx.needs_input_grad
        ctx.save_for_backward(one if of_other else None, other if of_one else None)
        ctx.sizes = one.shape[0], other.shape[0]
        ctx.kernel_map = kernel_map = alive(ctx.call[0])
        if cls is _Convolution and of_other and kernel_map is not None:
            kernel_map.list_pairs()

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> torch.Tensor:
        """The derivative along tangents of both factors and of the bias, for forward mode."""
        (one, other), (of_one, of_other, *bias) = ctx.saved_tensors, tangents[:-1]
        return _call(cls, of_one, other, *bias, *ctx.call) + _call(cls, one, of_other, *(None for _ in bias), *ctx.call)

    @classmethod
    def vmap(cls, info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        """A batch of calls over one map, for torch.func.vmap: as many times the groups, in one call."""
        size, (*tensors, (edges, length, groups, *rest)) = info.batch_size, args
        if size == 0:  # an empty sum along the batch is a call like others, of which none is returned
            one = (t if dim is None or t is None else t.sum(dim) for t, dim in zip(tensors, dims))
            return _call(cls, *one, edges, length, groups, *rest)[None][:0], 0
        shared = dims[0] is None and groups == 1 and cls is _Convolution and not rest[0]
        if shared:  # then they are more output channels of the same rows
            stacked = [tensors[0], *(transforms.side_by_side(t, dim, size) for t, dim in zip(tensors[1:], dims[1:]))]
        else:
            stacked, groups = [transforms.side_by_side(t, dim, size) for t, dim in zip(tensors, dims)], groups * size
        found = _call(cls, *stacked, edges, length, groups, *rest)
        return found.unflatten(-1, (size, found.shape[-1] // size)), found.ndim - 1


class _Convolution(_Linear):
    name, num_tensors = "convolution", 3
    kernel, checked = staticmethod(_convolution), staticmethod(checked_convolution)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        edges, _, groups, adjoint, backend = ctx.call
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        pair = both_gradients((of_x, of_weight), x, weight, grad, edges, ctx.sizes, groups, backend, adjoint)
        return *pair, grad.sum(0) if of_bias else None, None


class _WeightGradient(_Linear):
    name, num_tensors = "weight_gradient", 2
    kernel, checked = staticmethod(_weight_gradient), staticmethod(checked_weight_gradient)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple:  # type: ignore[override]
        x, grad = ctx.saved_tensors
        (edges, _, groups, backend), (rows_in, rows_out), (of_x, of_grad, _) = ctx.call, ctx.sizes, ctx.needs_input_grad
        grad_x = grad_grad = None
        if of_x:
            grad_x = _call(_Convolution, grad, cotangent, None, edges, rows_in, groups, True, backend)
        if of_grad:
            grad_grad = _call(_Convolution, x, cotangent, None, edges, rows_out, groups, False, backend)
        return grad_x, grad_grad, None


def below(name: str, run: Callable[..., torch.Tensor], tensors: Sequence[Any], args: tuple) -> Any:
    """An operator without its derivative; past the dispatcher where nobody listens."""
    if below_autograd is None or is_direct(*tensors):
        return run(*args)
    with below_autograd():
        return getattr(torch.ops.sparseconv, name)(*args)


def register(name: str, run: Callable[..., torch.Tensor], with_derivative: Callable[..., torch.Tensor]) -> None:
    """Tell torch what an operator runs; below autocast as it is: operands are cast already, and its products stay."""

    def without_autocast(kind: str, *args: Any) -> Any:
        with torch.autocast(kind, enabled=False):
            return getattr(torch.ops.sparseconv, name)(*args)

    library.impl(name, with_derivative, "Autograd")
    for kind in ("CPU", "CUDA"):
        library.impl(name, run, kind)
        library.impl(name, partial(without_autocast, kind.lower()), f"Autocast{kind}")


for _function in (_Convolution, _WeightGradient):
    _function.at_once = staticmethod(_at_once(_function, _function.kernel))
    register(_function.name, _function.checked, _at_once(_function, _function.run))


@torch.library.register_fake("sparseconv::convolution", lib=library)
def _(x, weight, bias, edges, rows, groups, adjoint, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((rows, weight.shape[1] * groups if adjoint else weight.shape[2]))


@torch.library.register_fake("sparseconv::weight_gradient", lib=library)
def _(x, grad, edges, taps, groups, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((taps, x.shape[1] // groups, grad.shape[1]))


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: int | torch.Tensor,
    rows: int,
    groups: int = 1,
    backend: str = "auto",
) -> torch.Tensor:
    """y (rows, C_out) from x (N_in, C_in) and weight (K, C_in/G, C_out) over the numbered map; differentiable to any
    order in x, weight and bias (C_out,). Arguments are taken as checked: `ConvolutionPlan.execute` is the boundary."""
    if torch.compiler.is_compiling():
        if exporting():
            raise RuntimeError(
                "torch.export cannot hold a kernel map that was made before: the program would name one of this "
                "process, and no other has it. Make the VoxelGrid within what is exported, or use "
                "sparseconv.export.export(net, (coords, features))"
            )
        if isinstance(edges, torch.Tensor):
            return torch.ops.sparseconv.held_convolution(x, weight, bias, edges, groups, False, backend)
        return torch.ops.sparseconv.convolution(x, weight, bias, edges, rows, groups, False, backend)
    return _call(_Convolution, x, weight, bias, edges, rows, groups, False, backend)


def adjoint(
    grad: torch.Tensor, weight: torch.Tensor, edges: int, rows: int, groups: int = 1, backend: str = "auto"
) -> torch.Tensor:
    """dL/dx (rows, C_in) of a `convolution` from dL/dy; differentiable to any order in both tensors."""
    return _call(_Convolution, grad, weight, None, edges, rows, groups, True, backend)


def adjoint_onto(
    grad: torch.Tensor, weight: torch.Tensor, edges: int, rows: int, groups: int, backend: str, other: torch.Tensor
) -> torch.Tensor:
    """`adjoint` plus another gradient (rows, C_in) of the same; without a derivative."""
    if not is_direct(grad, weight, other):
        return adjoint(grad, weight, edges, rows, groups, backend) + other
    kernel_map = map_of(edges)
    serving = serving_backend(kernel_map, grad, weight.shape, groups, backend)
    return serving.input_grad_onto(grad, weight, kernel_map, groups, other)


def weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, edges: int, taps: int, groups: int = 1, backend: str = "auto"
) -> torch.Tensor:
    """dL/dw (K, C_in/G, C_out) of a `convolution` from dL/dy; differentiable to any order in both tensors."""
    return _call(_WeightGradient, x, grad, edges, taps, groups, backend)
