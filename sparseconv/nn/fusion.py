"""Inference in fewer passes: a convolution, its batch norm and its activation as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparseconv import pointwise
from sparseconv.nn.convolution import ConvolutionModule
from sparseconv.nn.module import features_of
from sparseconv.nn.normalization import BatchNorm
from sparseconv.pointwise import Epilogue
from sparseconv.tensor import SparseTensor

#: torch's activations (ours derive from them) as epilogues
ACTIVATIONS: dict[type[torch.nn.Module], Callable[[Any], Epilogue]] = {
    torch.nn.ReLU: lambda m: Epilogue(pointwise.relu),
    torch.nn.LeakyReLU: lambda m: Epilogue(pointwise.leaky_relu, (m.negative_slope,)),
    torch.nn.ELU: lambda m: Epilogue(pointwise.elu, (m.alpha,)),
    torch.nn.GELU: lambda m: Epilogue(pointwise.gelu if m.approximate == "none" else pointwise.gelu_tanh),
    torch.nn.SiLU: lambda m: Epilogue(pointwise.silu),
    torch.nn.Sigmoid: lambda m: Epilogue(pointwise.sigmoid),
    torch.nn.Tanh: lambda m: Epilogue(pointwise.tanh),
    torch.nn.Hardswish: lambda m: Epilogue(pointwise.hardswish),
    torch.nn.Mish: lambda m: Epilogue(pointwise.mish),
}


def run_fused(
    x: Any, conv: Any, norm: Any, activation: Any = None, residual: SparseTensor | None = None, **where: Any
) -> SparseTensor | None:
    """activation(norm(conv(x)) + residual) as one call, or None where it cannot be one.

    It can in inference, with the norm's statistics known, and where nobody hooked in between. ``where`` is what else
    the convolution's call takes (target, onto).
    """
    if (
        torch.is_grad_enabled()
        or not isinstance(conv, ConvolutionModule)
        or not isinstance(norm, BatchNorm)
        or not isinstance(x, SparseTensor)
        or norm.training
        or norm.running_mean is None
        or norm.num_features != conv.out_channels
        or torch.compiler.is_compiling()
        or any(m._forward_hooks or m._forward_pre_hooks for m in (conv, norm))
        or x.grid.is_shared
    ):
        return None
    epilogue = None
    if activation is not None:
        make = next((make for kind, make in ACTIVATIONS.items() if isinstance(activation, kind)), None)
        if make is None or activation._forward_hooks or activation._forward_pre_hooks:
            return None
        epilogue = make(activation)
    plan = conv.plan(x, **where)
    features = features_of(x, conv, conv.in_channels)
    weight, bias = _folded(conv, norm)
    added = None if residual is None else residual.features
    return SparseTensor(plan.target, plan.execute(features, weight, bias, residual=added, epilogue=epilogue))


def _folded(conv: Any, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias with the norm's scale and shift in them; kept until one of their tensors changes.

    norm(conv(x)) = conv with w * s, and (b - mean) * s + beta        (s = gamma / sqrt(var + eps))
    """
    parts = (conv.weight, conv.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    state = tuple((t._version, t.data_ptr(), t.dtype) for t in parts if t is not None and not t.is_inference())
    kept = conv.__dict__.get("_folded")
    if kept is None or kept[0] != state or any(t is not None and t.is_inference() for t in parts):
        weight, bias, gamma, beta, mean, var = parts
        wide = torch.promote_types(weight.dtype, torch.float32)
        scale = torch.rsqrt(var.to(wide) + norm.eps)
        scale = scale if gamma is None else scale * gamma
        shift = -mean.to(wide) if bias is None else bias.to(wide) - mean
        shift = shift * scale if beta is None else shift * scale + beta
        kept = (state, ((weight.to(wide) * scale).to(weight.dtype), shift.to(weight.dtype)))
        conv.__dict__["_folded"] = kept
    return kept[1]
