"""The one differentiable operation, as torch knows it.

Two operators, closed under differentiation (k over taps, over the edges of a kernel map E):

    convolution:      y[out] = sum x[in] @ w[k]            adjoint:  y[in] = sum x[out] @ w[k]^T
    weight_gradient:  w[k]   = sum x[in]^T g[out]

    d convolution = {adjoint of g with w, weight_gradient(x, g)}
    d adjoint     = {convolution of g with w, weight_gradient(g, x)}
    d weight_gradient with cotangent h = {adjoint of g with h, convolution of x with h}

Plain eager calls run a backend's kernel directly, with the kernel map as it is. Calls that torch's dispatcher must see
(torch.compile, dispatch modes, subclasses of tensors) go through the operators ``torch.ops.sparseconv.convolution`` and
``weight_gradient``. These take a tensor of the shape (N_in, N_out) that refers to its map, see `edges_tensor`: graphs
of torch.compile keep tensors for their backward pass and nothing else, and sizes of tensors stay symbolic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from sparseconv import transforms
from sparseconv.backends.base import Backend, Request
from sparseconv.backends.registry import choose
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.torch_private import (
    any_autocast,
    backward_pass,
    below_autograd,
    dispatch_modes,
    exporting,
    functional,
    is_batch_of_cotangents,
)

#: a kernel map, or the tensor that stands for it
Edges = KernelMap | torch.Tensor

# ---- kernels


def serving_backend(kernel_map: KernelMap, x: torch.Tensor, weight: tuple[int, ...], groups: int, name: str) -> Backend:
    """The backend that serves these features with a weight of that shape; kept with the map."""
    key = ("backend", name, x.dtype, weight, groups)
    chosen = kernel_map.prepared.get(key)
    if chosen is None:
        request = Request(kernel_map, x.device, x.dtype, weight[1] * groups, weight[2], groups)
        chosen = kernel_map.prepared[key] = choose(request, name)
    return chosen


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: KernelMap,
    groups: int,
    adjoint: bool,
    backend: str,
) -> torch.Tensor:
    serving = serving_backend(edges, x, weight.shape, groups, backend)
    if adjoint:
        return serving.input_grad(x, weight, edges, groups)
    return serving.forward(x, weight, edges, groups, bias)


def _weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, edges: KernelMap, groups: int, taps: int, backend: str
) -> torch.Tensor:
    serving = serving_backend(edges, x, (taps, x.shape[1] // groups, grad.shape[1]), groups, backend)
    return serving.weight_grad(x, grad, edges, groups)


# ---- who watches a call

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


def is_direct(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether a call may run its kernel as things are: `is_plain`, and no autocast would cast what is within it."""
    return is_plain(x, *others) and not (any_autocast() and torch.is_autocast_enabled(x.device.type))


def without_casts(x: torch.Tensor, run: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """run(*args) with autocast off, the operands being cast already; torch's own context costs as much as a layer."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return run(*args)
    torch.set_autocast_enabled(kind, False)
    try:
        return run(*args)
    finally:
        torch.set_autocast_enabled(kind, True)


def _call(function: type[Operator], *args: Any) -> torch.Tensor:
    """An operator's result, with its derivative where one is wanted, of its tensors, the edges, its other arguments."""
    count = function.num_tensors
    tensors, edges = args[:count], args[count]
    if isinstance(edges, KernelMap):
        if is_plain(*tensors) and not functional():
            if any_autocast():
                return without_casts(tensors[0], as_node, function, function.kernel, *args)
            return as_node(function, function.kernel, *args)
        if transforms.present():  # which see through autograd functions only
            return function.apply(*tensors, edges, args[count + 1 :])
        args = (*tensors, edges_tensor(edges), *args[count + 1 :])
    return getattr(torch.ops.sparseconv, function.name)(*args)


def as_node(function: type[Operator], kernel: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """What a kernel of an operator returns, as a node of autograd's graph where a gradient is wanted."""
    count = function.num_tensors
    if torch.is_grad_enabled():
        for t in args[:count]:
            if t is not None and t.requires_grad:
                return function.eager.apply(*args[: count + 1], args[count + 1 :])
    return kernel(*args)


# ---- derivatives


class Operator(torch.autograd.Function):
    """An operator under torch.func, and the derivative that all its calls share.

    Arguments of ``apply``: the operator's tensors, the edges, one tuple of its other arguments.
    """

    name: ClassVar[str]
    num_tensors: ClassVar[int]
    kernel: ClassVar[Callable[..., torch.Tensor]]
    checked: ClassVar[Callable[..., torch.Tensor]]
    eager: ClassVar[type[torch.autograd.Function]]

    @classmethod
    def forward(cls, *args: Any) -> torch.Tensor:
        found: torch.Tensor = below(cls, *args[:-1], *args[-1])
        return found

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        cls.keep(ctx, inputs)
        if transforms.present():
            ctx.save_for_forward(*inputs[:2])

    @classmethod
    def keep(cls, ctx: Any, inputs: tuple) -> None:
        """What `backward` reads; forward mode has its own."""
        one, other, *_, edges, ctx.rest = inputs
        of_one, of_other, *_ = ctx.needs_input_grad
        ctx.sizes = one.shape[0], other.shape[0]
        ctx.edges = edges if isinstance(edges, KernelMap) else edges.__dict__.get("kernel_map")
        kept = (one if of_other else None, other if of_one else None)
        ctx.save_for_backward(*kept, *([edges] if ctx.edges is None else []))
        if cls is Convolution and of_other and ctx.edges is not None:
            ctx.edges.list_pairs()

    @classmethod
    def run(cls, ctx: Any, *inputs: Any) -> torch.Tensor:
        """`forward` and `setup_context` in one, for eager calls and the dispatcher's."""
        cls.keep(ctx, inputs)
        if isinstance(inputs[-2], KernelMap):
            return cls.kernel(*inputs[:-1], *inputs[-1])
        return cls.forward(*inputs)

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> torch.Tensor:
        """The derivative along tangents of both factors and of the bias, for forward mode."""
        (one, other), (of_one, of_other, *bias) = ctx.saved_tensors, tangents[:-2]
        call = (ctx.edges, *ctx.rest)
        return _call(cls, of_one, other, *bias, *call) + _call(cls, one, of_other, *(None for _ in bias), *call)

    @classmethod
    def vmap(cls, info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        """A batch of calls over one map, for torch.func.vmap: as many times the groups, in one call."""
        size, (*tensors, edges, (groups, *rest)) = info.batch_size, args
        if size == 0:  # an empty sum along the batch is a call like others, of which none is returned
            one = (t if dim is None or t is None else t.sum(dim) for t, dim in zip(tensors, dims))
            return _call(cls, *one, edges, groups, *rest)[None][:0], 0
        shared = dims[0] is None and groups == 1 and cls is Convolution and not rest[0]
        if shared:  # then they are more output channels of the same rows
            stacked = [tensors[0], *(transforms.stack_channels(t, dim, size) for t, dim in zip(tensors[1:], dims[1:]))]
        else:
            stacked, groups = [transforms.stack_channels(t, dim, size) for t, dim in zip(tensors, dims)], groups * size
        found = _call(cls, *stacked, edges, groups, *rest)
        return found.unflatten(-1, (size, found.shape[-1] // size)), found.ndim - 1


class Convolution(Operator):
    name, num_tensors, kernel = "convolution", 3, staticmethod(_convolution)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        x, weight, *kept = ctx.saved_tensors
        edges = kept[0] if kept else ctx.edges
        (groups, adjoint, backend), (of_x, of_weight, of_bias, *_) = ctx.rest, ctx.needs_input_grad
        pair = both_gradients((of_x, of_weight), x, weight, grad, edges, ctx.sizes[1], groups, backend, adjoint)
        return *pair, grad.sum(0) if of_bias else None, None, None


class WeightGradient(Operator):
    name, num_tensors, kernel = "weight_gradient", 2, staticmethod(_weight_gradient)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple:  # type: ignore[override]
        x, grad, *kept = ctx.saved_tensors
        edges = kept[0] if kept else ctx.edges
        (groups, _, backend), (of_x, of_grad, *_) = ctx.rest, ctx.needs_input_grad
        grad_x = _call(Convolution, grad, cotangent, None, edges, groups, True, backend) if of_x else None
        grad_grad = _call(Convolution, x, cotangent, None, edges, groups, False, backend) if of_grad else None
        return grad_x, grad_grad, None, None


# torch binds the arguments of `setup_context`, which torch.func needs, through ``inspect``: 12 us per call. So eager
# calls have functions with the older signature of ``forward``.


class _EagerConvolution(torch.autograd.Function):
    forward, backward = staticmethod(Convolution.run), staticmethod(Convolution.backward)


class _EagerWeightGradient(torch.autograd.Function):
    forward, backward = staticmethod(WeightGradient.run), staticmethod(WeightGradient.backward)


Convolution.eager, WeightGradient.eager = _EagerConvolution, _EagerWeightGradient


def both_gradients(
    needs: tuple[bool, bool],
    x: torch.Tensor,
    weight: torch.Tensor,
    grad: torch.Tensor,
    edges: Edges,
    taps: int,
    groups: int,
    backend: str,
    adjoint: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dL/dx and dL/dw of a convolution, as far as they are wanted, from dL/dy."""
    of_x, of_weight = needs
    last = not torch.is_grad_enabled() and not functional()  # without derivatives of their own
    if of_x and of_weight and not adjoint and last and isinstance(edges, KernelMap) and is_direct(grad, x, weight):
        serving = serving_backend(edges, x, weight.shape, groups, backend)
        return serving.gradients(x, weight, grad, edges, groups)
    grad_x = grad_weight = None
    if of_weight:  # first: its partial sums then lie where the input gradient will be
        fine, coarse = (grad, x) if adjoint else (x, grad)
        grad_weight = _call(WeightGradient, fine, coarse, edges, groups, taps, backend)
    if of_x:
        grad_x = _call(Convolution, grad, weight, None, edges, groups, not adjoint, backend)
    return grad_x, grad_weight


# ---- maps and calls that the dispatcher sees


@transforms.untraced
@transforms.constant
def edges_tensor(kernel_map: KernelMap) -> torch.Tensor:
    """What the operators take for a map: int64 (N_in, N_out) without values, which refers to the map while it lives."""
    # no view, of which a compiled graph would keep a copy without the attribute
    edges = torch.empty_strided((kernel_map.num_in, kernel_map.num_out), (0, 0), dtype=torch.int64)
    edges.__dict__["kernel_map"] = kernel_map
    return edges


def below(function: type[Operator], *args: Any) -> Any:
    """An operator without its derivative; past the dispatcher where nobody watches."""
    count = function.num_tensors
    if below_autograd is None or is_direct(*args[:count]):
        return function.checked(*args)
    edges = args[count]
    with below_autograd():
        edges = edges_tensor(edges) if isinstance(edges, KernelMap) else edges
        return getattr(torch.ops.sparseconv, function.name)(*args[:count], edges, *args[count + 1 :])


# ---- calls


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: Edges,
    groups: int = 1,
    backend: str = "auto",
) -> torch.Tensor:
    """y (N_out, C_out) from x (N_in, C_in) and weight (K, C_in/G, C_out); differentiable to any order in x, weight and
    bias (C_out,). Arguments are taken as checked: `ConvolutionPlan.execute` is the boundary."""
    if torch.compiler.is_compiling():
        if exporting():
            raise RuntimeError(
                "torch.export cannot store a kernel map that was built outside of the exported module, since it "
                "exists in this process only. Build the VoxelGrid inside the module, or use "
                "sparseconv.export.export(net, (coords, features))"
            )
        return torch.ops.sparseconv.convolution(x, weight, bias, edges, groups, False, backend)
    return _call(Convolution, x, weight, bias, edges, groups, False, backend)


def adjoint(
    grad: torch.Tensor, weight: torch.Tensor, edges: KernelMap, groups: int = 1, backend: str = "auto"
) -> torch.Tensor:
    """dL/dx (N_in, C_in) of a `convolution` from dL/dy; differentiable to any order in both tensors."""
    return _call(Convolution, grad, weight, None, edges, groups, True, backend)


def adjoint_onto(
    grad: torch.Tensor, weight: torch.Tensor, edges: KernelMap, groups: int, backend: str, other: torch.Tensor
) -> torch.Tensor:
    """`adjoint` plus another gradient (N_in, C_in) of the same; without a derivative."""
    if not is_direct(grad, weight, other):
        return adjoint(grad, weight, edges, groups, backend) + other
    serving = serving_backend(edges, grad, weight.shape, groups, backend)
    return serving.input_grad_onto(grad, weight, edges, groups, other)


def weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, edges: KernelMap, groups: int = 1, backend: str = "auto"
) -> torch.Tensor:
    """dL/dw (K, C_in/G, C_out) of a `convolution` from dL/dy; differentiable to any order in both tensors."""
    return _call(WeightGradient, x, grad, edges, groups, edges.num_taps, backend)
