"""What every module of this room shares: sparse tensors in, sparse tensors out, or plain features both ways."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch

from sparseconv.checks import check_tensor, described
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.tensor import SparseTensor

Features = TypeVar("Features", torch.Tensor, SparseTensor)
Module = TypeVar("Module", bound=torch.nn.Module)


class SparseModule(torch.nn.Module):
    """Base class of modules that take and return a `SparseTensor`.

    Derive from it to write your own: `Sequential` hands the whole `SparseTensor` to such modules, and only its features
    (N, C) to plain torch modules.

    >>> class Scale(SparseModule):
    ...     def forward(self, x):
    ...         return x.with_features(2 * x.features)
    """


class FeatureModule(SparseModule):
    """Mixin for PyTorch modules that work row by row, so that they also accept a `SparseTensor`.

    List it before the PyTorch module among the bases. Parameters and arguments stay PyTorch's.

    >>> class Softsign(FeatureModule, torch.nn.Softsign):
    ...     pass
    >>> Softsign()(torch.tensor([[1.0]]))
    tensor([[0.5000]])
    """

    def forward(self, x: Features) -> Features:
        """Features (N, C), alone or in a `SparseTensor` -> the same kind."""
        channels = getattr(self, "in_features", None)  # of torch's layers that mix channels
        return with_features(x, super().forward(features_of(x, self, channels)))


def features_of(x: Any, module: torch.nn.Module, channels: int | None = None, floating: bool = True) -> torch.Tensor:
    """The features (N, C) of a sparse or a plain tensor, their kind, shape and channels checked."""
    features = x.features if isinstance(x, SparseTensor) else x
    name = type(module).__name__
    if not isinstance(features, torch.Tensor) or features.layout is not torch.strided or features.is_nested:
        check_tensor(f"{name} takes a SparseTensor or features (N, C): x", features)
    if floating and not features.is_floating_point():
        raise TypeError(f"{name} takes features in floating point, but their dtype is {features.dtype}: x.float() is")
    if features.ndim != 2:
        raise ValueError(f"{name} takes features (N, C), one row per voxel; got {tuple(features.shape)}")
    if channels is not None and features.shape[1] != channels:
        raise ValueError(f"{name} was made for {channels} channels; got features {tuple(features.shape)}")
    return features


def with_features(x: Any, features: torch.Tensor) -> Any:
    """Features (N, C') in place of those of x: in a `SparseTensor` if x is one, else as they are."""
    return x.with_features(features) if isinstance(x, SparseTensor) else features


def placed(x: Any, plan: ConvolutionPlan, features: torch.Tensor) -> Any:
    """Features made from those of x over a plan: in a `SparseTensor` on its target if x is one, else as they are."""
    return SparseTensor(plan.target, features) if isinstance(x, SparseTensor) else features


def apply(module: torch.nn.Module, x: Any) -> Any:
    """A module on a sparse tensor, or on its features if it is a plain one."""
    if isinstance(x, SparseTensor) and not isinstance(module, SparseModule):
        return x.with_features(module(x.features))
    return module(x)


def pack(module: Module, packed: bool = True) -> Module:
    """Store a module's weights in the memory layout that kernels read, so that no call copies them. Returns the module.

    It is for layers of spconv's and fVDB's names, whose weights have other layouts; this library's own have this one.
    Parameters keep their names, shapes and numbers: their strides change, as ``module.to(memory_format=...)`` changes
    them. Nothing is kept beside them, so a call computes with whatever was written to a weight, in training too.
    ``packed=False`` makes them contiguous again, which safetensors asks of what it saves.

    >>> import sparseconv.interop.spconv.pytorch as spconv
    >>> layer = pack(spconv.SubMConv3d(4, 8, 3))
    >>> layer.weight.shape, layer.weight.flatten(1, 3).permute(1, 2, 0).is_contiguous()
    (torch.Size([8, 3, 3, 3, 4]), True)
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"pack takes a torch.nn.Module, but it was given {described(module)}: plan.pack packs a weight")
    for part in module.modules():
        axes = getattr(part, "packed_axes", None)
        if axes:
            weight = part.get_parameter("weight")
            laid = weight.detach().permute(axes).contiguous().permute(np.argsort(axes).tolist())
            weight.data = laid if packed else weight.detach().contiguous()
    return module
