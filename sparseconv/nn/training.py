"""A convolution, its batch norm, a residual and an activation as one graph node in training.

    y = act(norm(conv(x)) + residual),    act(z) = z for z > 0 and slope * z elsewhere

Kept for the gradients: x, the convolution's result z, and two numbers a channel; y too where a residual was added,
since the sign of what the activation met cannot be told from z then.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from sparseconv.autograd import adjoint, convolution, number_of, weight_gradient
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.nn import normalize
from sparseconv.nn.normalize import Norm
from sparseconv.plan.convolution import ConvolutionPlan

#: bytes from which the next convolution's input is computed again in the backward pass rather than kept: one more pass
#: over memory, on scenes large enough that the device and not the host sets the pace
RECOMPUTED_BYTES = 8 << 20


class Call(NamedTuple):
    """What of a plan the convolution in a node needs; it keeps the map alive and not the plan's grids."""

    kernel_map: KernelMap
    edges: int
    groups: int
    backend: str

    @staticmethod
    def of(plan: ConvolutionPlan) -> Call:
        return Call(plan.kernel_map, number_of(plan.kernel_map), plan.groups, plan.backend)


class Recipe(NamedTuple):
    """How the result of a node is made again, as long as the norm's weight and bias are what they were."""

    z: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    kept: torch.Tensor
    norm: Norm
    versions: tuple[int, ...]

    def run(self) -> torch.Tensor:
        if self.versions != _versions(self.weight, self.bias):
            raise RuntimeError(
                "the weight or bias of a batch norm was changed in place between the forward and the backward pass, "
                "which needs them as they were: run backward before the optimiser's step"
            )
        return normalize.again(self.z, self.weight, self.bias, self.kept, self.norm)


def _versions(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(t._version for t in tensors if t is not None)


class _Trained(torch.autograd.Function):
    """The node; without ``call`` the norm alone, of x itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        taps: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        norm: Norm,
        call: Call | None,
    ) -> torch.Tensor:
        if call is None or taps is None:
            z = x
        else:
            z = convolution(x, taps, None, call.edges, call.kernel_map.num_out, call.groups, call.backend)
        y, kept = normalize.forward(z, weight, bias, residual, norm)
        joined = residual is not None and norm.slope != 1
        ctx.save_for_backward(x, taps, None if z is x else z, weight, bias, kept, y if joined else None)
        ctx.norm, ctx.call = norm, call
        ctx.recipe = Recipe(z, weight, bias, kept, norm, _versions(weight, bias)) if residual is None else None
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        x, taps, z, weight, bias, kept, y = ctx.saved_tensors
        norm, call, needs = ctx.norm, ctx.call, ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _differentiable(grad, x, taps, weight, bias, y, norm, call, needs[4])
        ctx.recipe = None  # whoever asked for it comes before
        dz, grad_weight, grad_bias, grad_residual = normalize.backward(
            grad, x if z is None else z, y, weight, bias, kept, norm
        )
        after = (grad_weight, grad_bias, grad_residual if needs[4] else None, None, None)
        if call is None:
            return dz, None, *after
        del z, y
        grad_x = grad_taps = None
        if needs[1]:  # first: its partial sums then lie where the input gradient will be
            grad_taps = weight_gradient(x, dz, call.edges, taps.shape[0], call.groups, call.backend)
        if needs[0]:
            grad_x = adjoint(dz, taps, call.edges, x.shape[0], call.groups, call.backend)
        return grad_x, grad_taps, *after


def _differentiable(
    grad: torch.Tensor,
    x: torch.Tensor,
    taps: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor | None,
    norm: Norm,
    call: Call | None,
    residual: bool,
) -> tuple:
    """The gradients in operations that have a derivative: torch's own, and this library's convolution."""
    z = x
    if call is not None and taps is not None:
        z = convolution(x, taps, None, call.edges, call.kernel_map.num_out, call.groups, call.backend)
    middle = torch.nn.functional.batch_norm(z, None, None, weight, bias, True, 0.0, norm.eps)
    dz = grad
    if norm.slope != 1:
        dz = torch.where((middle if y is None else y).detach() <= 0, grad * norm.slope, grad)
    inputs = (x, taps, weight, bias)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(middle, wanted, dz, create_graph=True) if wanted else ())
    grads = [next(found) if t is not None and t.requires_grad else None for t in inputs]
    return *grads, dz if residual else None, None, None


def trained(
    x: torch.Tensor,
    norm: torch.nn.BatchNorm1d,
    slope: float = 1.0,
    residual: torch.Tensor | None = None,
    convolved: tuple[ConvolutionPlan, torch.Tensor] | None = None,
) -> torch.Tensor:
    """act(norm(conv(x)) + residual) (N, C) with the statistics of this batch; running ones follow as torch's do.

    Args:
        x: (N, C) that `serves`; or (N_in, C_in) where ``convolved`` has a plan and its weight by tap.
        norm: whose weight, bias, eps, momentum and running statistics are meant.
        slope: of the activation below zero: 0 is relu, 1 is none.
        residual: (N, C) of x's dtype, added before the activation; or None.
    """
    plan, taps = (None, None) if convolved is None else convolved
    weight, bias, *running = tensors_of(norm)
    follows = norm.training and running[0] is not None
    how = Norm(norm.eps, norm.momentum or 0.0, slope, tuple(running) if follows else None)  # type: ignore[arg-type]
    if plan is None:
        x = _lined_up(x)
    if residual is not None:
        residual = _lined_up(residual)
    args = (x, taps, weight, bias, residual, how, None if plan is None else Call.of(plan))
    source = _maker_of(x)
    if source is None:
        return _apply(*args)
    address = x.data_ptr()

    def pack(tensor: torch.Tensor) -> Any:
        # detached: a node that keeps its own result, as it is, would never go
        return source if tensor.data_ptr() == address else tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
        return _apply(*args)


#: Function.apply without its look for functional transforms, which `serves` has ruled out
_apply: Any = super(torch.autograd.Function, _Trained).apply


def tensors_of(norm: torch.nn.BatchNorm1d) -> tuple[Any, ...]:
    """Weight, bias, running mean, running variance and count of a norm; some may be None.

    Read past torch's ``__getattr__``, which costs as much as a launch; parametrised ones lie elsewhere.
    """
    parameters, buffers = norm._parameters, norm._buffers
    if "weight" in parameters and "bias" in parameters and "running_mean" in buffers and "running_var" in buffers:
        return (
            *(parameters["weight"], parameters["bias"]),
            *(buffers["running_mean"], buffers["running_var"], buffers.get("num_batches_tracked")),
        )
    return norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked


def _lined_up(x: torch.Tensor) -> torch.Tensor:
    """x as kernels can read it: rows one after another, aligned."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def serves(x: Any, norm: torch.nn.BatchNorm1d, rows: int) -> bool:
    """Whether `trained` can stand for this norm of (``rows``, C) made from the features x.

    On a GPU, in a half or single precision, with statistics of this batch whose weight is known beforehand, and where
    nobody looks between operations: no tracing, no functional transform, no tensor of another kind.
    """
    training, momentum = norm.training, norm.momentum
    weight, bias, mean, var, tracked = tensors_of(norm)
    if (
        rows < 2
        or not (training or mean is None)
        or type(x) not in _PLAIN
        or not on_kernels(x)
        or (weight is None) != (bias is None)
        or (training and mean is not None and (momentum is None or var is None or tracked is None))
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    device = x.get_device()
    return all(t is None or _is_near(t, device) for t in (weight, bias, mean, var))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_near(tensor: Any, device: int) -> bool:
    """Whether kernels on a device can read (C,): torch raises its own error for what is elsewhere."""
    return (
        type(tensor) in _PLAIN
        and tensor.get_device() == device
        and not tensor.data_ptr() % 16
        and tensor.is_contiguous()
    )


def on_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels serve features of this kind where they are."""
    return x.is_cuda and x.dtype in normalize.DTYPES and _has_kernels(x.device)


@cache
def _has_kernels(device: torch.device) -> bool:
    """Whether Triton is there and serves this card."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _maker_of(x: torch.Tensor) -> Any:
    """The node that can make x again and should, rather than that x is kept; None where x is small or not its own."""
    source: Any = x.grad_fn
    if (
        type(source) is not _NODE
        or source.recipe is None
        or x.numel() * x.itemsize < RECOMPUTED_BYTES
        or x._version
        or not torch.is_grad_enabled()
        or _others_save()
    ):
        return None
    return source


#: the class of the node's ``grad_fn``
_NODE: Any = _Trained._backward_cls  # type: ignore[attr-defined]


def _unpacked(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    recipe: Recipe | None = kept.recipe
    if recipe is None:  # its node has run, and was told to keep the graph
        x, _, z, weight, bias, stats, _ = kept.saved_tensors
        recipe = Recipe(x if z is None else z, weight, bias, stats, kept.norm, _versions(weight, bias))
    return recipe.run()


def _others_save() -> bool:
    """Whether somebody else decides what graphs keep, such as activation checkpointing, or nobody may."""
    state: Any = torch._C._autograd
    return not state._saved_tensors_hooks_is_enabled() or state._top_saved_tensors_default_hooks(False) is not None
