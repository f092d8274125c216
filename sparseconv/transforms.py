"""Traces, torch.func's transforms and forward-mode derivatives: whether they are active, and what runs outside of them.

Transforms and forward mode need every call as an autograd node that they can transform. A kernel launched past them
loses the tangent or the wrapper, and its result looks like a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from sparseconv.torch_private import (
    JVP,
    dispatch_modes,
    dual_level,
    functional,
    interpreters,
    is_batch_of_cotangents,
    is_batched,
    is_wrapped,
    no_transforms,
    records_proxies,
    unwrapped,
)

P = ParamSpec("P")
R = TypeVar("R")

#: whether torch.export traces, outside of torch.compile; older versions of torch do not say so
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def tracing() -> bool:
    """Whether torch.compile or torch.export traces."""
    return torch.compiler.is_compiling() or _is_exporting()


def forward_mode() -> bool:
    """Whether there is a level of dual tensors, of torch.autograd.forward_ad or of torch.func.jvp.

    Raises RuntimeError for the forward-mode derivative of a forward-mode derivative: torch silently loses a part of it
    at autograd functions.
    """
    if dual_level() < 0:
        return False
    levels = interpreters() or ()
    if sum(level.key() == JVP for level in levels) > 1:
        raise RuntimeError(
            "nesting torch.func.jvp or jacfwd in another one is not supported, since torch drops a part of the "
            "derivative: use torch.func.grad, vjp or jacrev for one of the two, as torch.func.hessian does"
        )
    return True


def present() -> bool:
    """Whether either is active. Do not call it where torch.compile may trace: tracing has no rules for them."""
    return forward_mode() or functional()


def active() -> bool:
    """Whether either is active and torch.compile does not trace."""
    return not torch.compiler.is_compiling() and present()


def followed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func or a level of duals follows this tensor, and not only wraps it."""
    while True:
        if dual_level() >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        if not is_wrapped(tensor):
            return False
        if is_batched(tensor) or tensor.requires_grad:
            return True
        tensor = unwrapped(tensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds outside of the transforms of torch.func; ValueError for one that torch.func.vmap splits."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            raise ValueError(
                "geometry (coordinates, points, masks) cannot differ along a batch of torch.func.vmap: make the grid "
                "or plan of one scene outside of it, or put the scenes into one grid by their batch column"
            )
        tensor = unwrapped(tensor)
    return tensor


def check_no_batch(*tensors: torch.Tensor) -> None:
    """Raise RuntimeError for a batch of cotangents, for an operation that torch cannot take apart for each of them."""
    if any(map(is_batch_of_cotangents, tensors)):
        raise RuntimeError(
            "torch.autograd.grad(is_grads_batched=True), and vectorize=True of torch.autograd.functional, pass "
            "convolutions but no sparse products or pools: use torch.func.jacrev, or torch.func.vmap of torch.func.vjp"
        )


def check_not_recorded() -> None:
    """Raise RuntimeError where torch.jit.trace or make_fx records what happens to tensors.

    Voxels and kernel maps are found by code that they do not see: the record would hold those of the example, and use
    them for every other scene.
    """
    if torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():
        tracer = "torch.jit.trace (which torch.onnx.export calls, too, unless dynamo=True)"
    elif dispatch_modes() and records_proxies():
        tracer = "make_fx"
    else:
        return
    raise RuntimeError(
        f"{tracer} records operations on tensors, and would keep the voxels and kernel maps of this example for every "
        "other scene: use torch.export, by sparseconv.export.export(net, (coords, features)) or by torch.export.export "
        "of a module that makes its VoxelGrid itself"
    )


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose result no transform of torch.func follows: it runs outside of them, on what its tensors hold.

    Geometry is made by such functions. Tensors made within a transform are wrapped for it, and no kernel could read
    them; kept with a grid or a map, they would outlive it. Tensors made in ``torch.inference_mode()`` would outlive it,
    too, and no gradient may save them: the function runs outside of that mode, without gradients.
    """

    @wraps(function)
    def found(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        check_not_recorded()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return _outside(function, *args, **kwargs)
        return _outside(function, *args, **kwargs) if functional() else function(*args, **kwargs)

    return found


def _outside(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    held: Any = [plain(value) if isinstance(value, torch.Tensor) else value for value in args]
    named: Any = {key: plain(value) if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
    with no_transforms():
        return function(*held, **named)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """A function that torch.compile calls and never looks into, with a break in its graph.

    What builds plans must not be traced: a trace would keep the kernel map of its first scene as a constant.
    torch._dynamo, half a second to import, is loaded by then.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return _skipping(function)(*args, **kwargs)

    return run


@untraced
def eagerly(function: Callable[..., R], *args: Any) -> R:
    """A call that torch.compile leaves to Python, with a break in its graph."""
    return function(*args)


#: functions as torch.compile is told to skip them
_skipped: dict[Callable[..., Any], Callable[..., Any]] = {}


def _skipping(function: Callable[P, R]) -> Callable[P, R]:
    if function not in _skipped:
        _skipped[function] = torch.compiler.disable(function)
    return _skipped[function]


def stack_channels(tensor: torch.Tensor | None, dim: int | None, size: int) -> torch.Tensor | None:
    """A batch of tensors side by side in their last axis; ``dim``: that of the batch, None where all have this one."""
    if tensor is None:
        return None
    if dim is None:
        batch = tensor.unsqueeze(-2).expand(*tensor.shape[:-1], size, tensor.shape[-1])
    else:
        batch = tensor.movedim(dim, -2)
    return batch.reshape(*batch.shape[:-2], size * batch.shape[-1])


def unstack_channels(found: torch.Tensor, size: int, like: torch.Tensor, dim: int | None) -> torch.Tensor:
    """(..., size * C) as (..., size, C), with the channels C of ``like``, whose batch is along ``dim``.

    >>> unstack_channels(torch.zeros(4, 0), 0, torch.zeros(0, 4, 3), 0).shape
    torch.Size([4, 0, 3])
    """
    channels = like.shape[-1] if dim is None else like.movedim(dim, 0).shape[-1]
    return found.unflatten(-1, (size, channels))
