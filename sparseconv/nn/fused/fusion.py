"""A convolution, its batch norm and its activation as one call, in inference and in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparseconv import pointwise, transforms
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.nn.convolution import ConvolutionModule
from sparseconv.nn.features import ELU, GELU, LeakyReLU, Linear, ReLU, Sigmoid, SiLU, Tanh
from sparseconv.nn.fused import normalize
from sparseconv.nn.fused.evaluation import folds
from sparseconv.nn.fused.joining import branched, joined
from sparseconv.nn.fused.training import Layer, serves, trained
from sparseconv.nn.module import apply, features_of
from sparseconv.nn.normalization import BatchNorm
from sparseconv.pointwise import Epilogue
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import any_module_hook, exporting

_RELU = Epilogue(pointwise.relu)
#: torch's activations as epilogues, and ours, which derive from them; a user's own class may do something else
ACTIVATIONS: dict[type[torch.nn.Module], Callable[[Any], Epilogue]] = {
    torch.nn.ReLU: lambda m: _RELU,
    torch.nn.LeakyReLU: lambda m: Epilogue(pointwise.leaky_relu, (m.negative_slope,)),
    torch.nn.ELU: lambda m: Epilogue(pointwise.elu, (m.alpha,)),
    torch.nn.GELU: lambda m: Epilogue(pointwise.gelu if m.approximate == "none" else pointwise.gelu_tanh),
    torch.nn.SiLU: lambda m: Epilogue(pointwise.silu),
    torch.nn.Sigmoid: lambda m: Epilogue(pointwise.sigmoid),
    torch.nn.Tanh: lambda m: Epilogue(pointwise.tanh),
    torch.nn.Hardswish: lambda m: Epilogue(pointwise.hardswish),
    torch.nn.Mish: lambda m: Epilogue(pointwise.mish),
}
ACTIVATIONS |= {ours: ACTIVATIONS[ours.__mro__[3]] for ours in (ReLU, LeakyReLU, ELU, GELU, SiLU, Sigmoid, Tanh)}


def conv_norm_act(
    x: Any, conv: Any, norm: Any, activation: Any = None, residual: SparseTensor | None = None, **where: Any
) -> SparseTensor:
    """activation(norm(conv(x)) + residual), as few calls and passes over memory as the moment allows.

    One kernel in inference, one graph node in training on a GPU; module after module elsewhere, and wherever somebody
    hooked in between. ``where`` is what else the convolution's call takes (target, onto).
    """
    if _can_join(x, conv, norm, activation):
        if not (norm.training or norm.running_mean is None or torch.is_grad_enabled()):
            return _in_inference(x, conv, norm, activation, residual, where)
        layer = _layer(x, x.channels, conv, norm, activation, where)
        if layer is not None and _joins(_target(layer), x.dtype, norm, residual):
            y = SparseTensor(_target(layer), trained(x.features, [layer], _features(residual)))
            return y if _slope(activation) is not None else apply(activation, y)
    return norm_act(conv(x, **where), norm, activation, residual)


def two_layers(
    x: Any,
    first: tuple[Any, Any, Any],
    second: tuple[Any, Any, Any],
    residual: SparseTensor | None = None,
    skip: Any = None,
) -> SparseTensor:
    """Two times `conv_norm_act`, the residual in the second: in training on a GPU one graph node, on one grid.

    ``first`` and ``second`` are convolution, norm and activation; ``skip`` is a linear layer that makes the residual of
    x, where that is not given.
    """
    norms = first[1], second[1]
    if all(isinstance(n, BatchNorm) and n.training for n in norms) and _can_join(x, *first) and _can_join(x, *second):
        slopes = _slope(first[2]), _slope(second[2])
        one = None if None in slopes else _layer(x, x.channels, *first, {})
        two = None if one is None or _target(one) is not x.grid else _layer(x, first[0].out_channels, *second, {})
        if (
            one is not None
            and two is not None
            and _target(two) is x.grid
            and _joins(x.grid, x.dtype, first[1], None)
            and _joins(x.grid, x.dtype, second[1], residual)
        ):
            plain = x.grid.count is not None and type(skip) is Linear and skip.bias is None and not hooked(skip)
            both = branched(x.features, skip.weight) if plain and skip.out_features == second[1].num_features else None
            if both is not None:
                return x.with_features(trained(both[0], [one, two], both[1]))
            residual = residual if skip is None else skip(x)
            if _joins(x.grid, x.dtype, second[1], residual):
                return x.with_features(trained(x.features, [one, two], _features(residual)))
    residual = skip(x) if skip is not None and residual is None else residual
    return conv_norm_act(conv_norm_act(x, *first), *second, residual)


def norm_act(x: Any, norm: Any, activation: Any = None, residual: SparseTensor | None = None) -> Any:
    """activation(norm(x) + residual): in training on a GPU one graph node, module after module elsewhere."""
    if (
        isinstance(norm, BatchNorm)
        and isinstance(x, SparseTensor)
        and not torch.compiler.is_compiling()
        and _joins(x.grid, x.dtype, norm, residual)
    ):
        features = features_of(x, norm, norm.num_features)
        if not hooked(norm, activation) and serves(features, norm, features.shape[0]):
            slope = _slope(activation)
            layer = Layer(norm, 1.0 if slope is None else slope, alive=x.grid.count)
            y = trained(features, [layer], _features(residual))
            return x.with_features(y) if slope is not None else apply(activation, x.with_features(y))
    y = apply(norm, x)
    y = y if residual is None else y + residual
    return y if activation is None else apply(activation, y)


def concatenated(x: SparseTensor, *others: SparseTensor, again: bool = True) -> SparseTensor:
    """``x.cat(*others)``; a captured step may make it ``again`` in its backward pass rather than keep it."""
    if not again or x.grid.count is None or any(other.grid is not x.grid for other in others):
        return x.cat(*others)
    return x.with_features(joined(x.features, *(other.features for other in others)))


def is_activation(module: Any) -> bool:
    """Whether a module is an activation that can be joined to what comes before it."""
    return type(module) in ACTIVATIONS


def _slope(activation: Any) -> float | None:
    """Of an activation with two straight halves, the slope of the lower one; 1 for none, None for a curved one."""
    if activation is None:
        return 1.0
    if type(activation) in (ReLU, torch.nn.ReLU):
        return 0.0
    if type(activation) in (LeakyReLU, torch.nn.LeakyReLU) and activation.negative_slope >= 0:
        return float(activation.negative_slope)
    return None


def _features(x: SparseTensor | None) -> torch.Tensor | None:
    return None if x is None else x.features


def _joins(grid: VoxelGrid, dtype: torch.dtype, norm: BatchNorm, residual: SparseTensor | None) -> bool:
    """Whether a norm does what `BatchNorm` does and nothing else, and the residual is what a kernel can add."""
    return (
        type(norm).forward is BatchNorm.forward
        and not grid.is_shared
        and (
            residual is None
            or (
                residual.grid is grid
                and residual.dtype == dtype
                and residual.channels == norm.num_features
                and type(residual.features) is torch.Tensor
            )
        )
    )


def hooked(*modules: Any) -> bool:
    """Whether one of these modules has forward or backward hooks."""
    for m in modules:
        if m is not None and (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks):
            return True
    return bool(any_module_hook())


def _can_join(x: Any, conv: Any, norm: Any, activation: Any) -> bool:
    """Whether these modules can run as one on x, without hooks between them."""
    return (
        isinstance(norm, BatchNorm)
        and isinstance(conv, ConvolutionModule)
        and isinstance(x, SparseTensor)
        and norm.num_features == conv.out_channels
        and not x.grid.is_shared
        and (not torch.compiler.is_compiling() or exporting())
        and not transforms.active()
        and not hooked(conv, norm, activation)
    )


def _layer(
    x: SparseTensor, channels: int, conv: Any, norm: BatchNorm, activation: Any, where: dict[str, Any]
) -> Layer | None:
    """What a node needs to know of modules that can join, for ``channels`` on x's grid; None where they cannot."""
    features = x.features
    if (
        channels != conv.in_channels
        or conv.bias is not None
        or not conv.weight.requires_grad
        or torch.is_autocast_enabled(features.device.type)
        or not serves(features, norm, 2)
    ):
        return None
    plan = conv.plan(x, **where)
    taps = conv.weight
    if (
        plan.kernel_map.num_out < 2
        or taps.dtype != features.dtype
        or taps.get_device() != features.get_device()
        or taps.shape != (plan.num_taps, conv.in_channels // conv.groups, conv.out_channels)
        or not taps.is_contiguous()
    ):
        return None
    slope = _slope(activation)
    return Layer(norm, 1.0 if slope is None else slope, plan, taps, plan.target.count)


def _target(layer: Layer) -> VoxelGrid:
    plan: Any = layer.plan
    target: VoxelGrid = plan.target
    return target


def _in_inference(
    x: SparseTensor, conv: Any, norm: BatchNorm, activation: Any, residual: SparseTensor | None, where: dict[str, Any]
) -> SparseTensor:
    """One kernel, the norm's statistics being known."""
    make = ACTIVATIONS.get(type(activation))
    epilogue = None if make is None else make(activation)
    plan = conv.plan(x, **where)
    features = features_of(x, conv, conv.in_channels)
    weight, bias = folded(conv.weight, conv.bias, norm, conv.weight.dtype)
    y = plan.execute(features, weight, bias, residual=_features(residual), epilogue=epilogue)
    done = SparseTensor(plan.target, y)
    return done if activation is None or make is not None else apply(activation, done)


def folded(
    weight: torch.Tensor, bias: torch.Tensor | None, norm: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight (K, C_in/G, C) and bias (C,) with a batch norm's scale and shift in them, in ``dtype``.

    They are made anew from the tensors as they are now.

    norm(conv(x)) = conv with w * s, and (b - mean) * s + beta        (s = gamma / sqrt(var + eps))

    No version of a tensor tells of a write through ``.data``, numpy or another process, so no copy is kept. Folding
    costs K C_in C_out products, under one percent of a convolution of 30,000 voxels.
    """
    gamma, beta, mean, var = norm.weight, norm.bias, norm.running_mean, norm.running_var
    if dtype in normalize.DTYPES and folds(weight, bias, gamma, beta, mean, var):
        return normalize.folded(weight, bias, gamma, beta, mean, var, norm.eps, dtype)
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(var.to(wide) + norm.eps)
    scale = scale if gamma is None else scale * gamma
    shift = -mean.to(wide) if bias is None else bias.to(wide) - mean
    shift = shift * scale if beta is None else shift * scale + beta
    return (weight.to(wide) * scale).to(dtype), shift.to(dtype)
