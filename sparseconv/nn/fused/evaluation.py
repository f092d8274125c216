"""Batch norms in evaluation, and what of a norm kernels can read."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv import transforms
from sparseconv.nn.fused import normalize
from sparseconv.torch_private import dispatch_modes

#: types of tensors that nobody intercepts
PLAIN = (torch.Tensor, torch.nn.Parameter)


def settled(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
    slope: float = 1.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """A norm in evaluation, a residual and an activation (``slope`` as in `Layer`) on x (N, C) by one launch.

    None where `trained` may not stand for it either, and where a gradient may be asked for.
    """
    if torch.is_grad_enabled() or not x.shape[0] or not reads(x, weight, bias, mean, var):
        return None
    if residual is not None:
        if type(residual) is not torch.Tensor:
            return None
        residual = lined_up(residual)
    return normalize.settled(lined_up(x), weight, bias, mean, var, eps, slope, residual)


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


def lined_up(x: torch.Tensor) -> torch.Tensor:
    """x as kernels can read it: rows one after another, aligned."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def reads(x: Any, weight: Any, bias: Any, *statistics: Any) -> bool:
    """Whether kernels can read features and a norm's tensors, and nobody looks between operations."""
    if (
        type(x) not in PLAIN
        or not normalize.on_kernels(x)
        or (weight is None) != (bias is None)
        or torch.compiler.is_compiling()
        or dispatch_modes()
        or transforms.active()
    ):
        return False
    return are_near(x.get_device(), weight, bias, *statistics)


def folds(weight: Any, bias: Any, *norm: Any) -> bool:
    """Whether one launch can fold a norm into the weight (K, C_in/G, C) and bias of the convolution before it.

    ``weight`` may be a view of (C, K, C_in/G). ``norm`` are the norm's weight, bias, running mean and variance. Nobody
    must look between operations.
    """
    if not normalize.on_kernels(weight) or (norm[0] is None) != (norm[1] is None) or dispatch_modes():
        return False
    kept = weight if weight.is_contiguous() else weight.permute(2, 0, 1)
    if not are_near(weight.get_device(), kept, bias, *norm):
        return False
    return all([t is None or t.dtype in normalize.DTYPES for t in (bias, *norm)])


def are_near(device: int, *tensors: Any) -> bool:
    """Whether kernels on a device can read these, or they are None: torch raises its own error for other places."""
    for t in tensors:  # one loop: a call per tensor costs as much as its questions
        if t is not None and (
            type(t) not in PLAIN or t.get_device() != device or t.data_ptr() % 16 or not t.is_contiguous()
        ):
            return False
    return True
