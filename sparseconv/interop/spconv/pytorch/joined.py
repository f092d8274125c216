"""Neighbouring modules of a `SparseSequential` that run as one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sparseconv import transforms
from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.nn.fused.evaluation import settled, tensors_of
from sparseconv.nn.fused.fusion import ACTIVATIONS, folded, hooked
from sparseconv.nn.fused.training import Layer, serves, trained
from sparseconv.pointwise import Epilogue
from sparseconv.torch_private import exporting


class Inference(NamedTuple):
    """What follows a convolution in inference: a batch norm by its running statistics, and an activation or None."""

    norm: torch.nn.BatchNorm1d
    epilogue: Epilogue | None

    def folded(
        self, features: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight (K, C_in/G, C) and bias (C,) with the norm in them, in the dtype that ``features`` will have."""
        kind, dtype = features.device.type, taps.dtype
        if torch.is_autocast_enabled(kind) and features.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        return folded(taps, bias, self.norm, dtype)


def in_inference(conv: Any, norm: Any, activation: Any) -> Inference | None:
    """What of ``norm`` and ``activation`` a convolution takes into its own kernel; None where it may not.

    Gradients, training, hooks between the modules and replaced forwards keep them apart. An activation that has no
    kernel of its own (`ACTIVATIONS`) stays a module.
    """
    if (
        type(norm) is not torch.nn.BatchNorm1d
        or norm.training
        or tensors_of(norm)[2] is None
        or norm.num_features != conv.out_channels
        or torch.is_grad_enabled()
        or (torch.compiler.is_compiling() and not exporting())
        or transforms.active()
        or hooked(conv, norm)
        or "forward" in vars(conv)
        or "forward" in vars(norm)
    ):
        return None
    make = ACTIVATIONS.get(type(activation))
    alone = make is None or hooked(activation) or "forward" in vars(activation)
    return Inference(norm, None if alone or make is None else make(activation))


def norm_and_relu(norm: torch.nn.BatchNorm1d, relu: Any, input: SparseConvTensor) -> torch.Tensor | None:
    """Features after torch's batch norm and ReLU by one node of the gradient, in evaluation by one launch; None where
    it may not."""
    features = input.features
    if type(relu) is not torch.nn.ReLU or features.shape[1] != norm.num_features or hooked(norm, relu):
        return None
    if torch.compiler.is_compiling():
        return None
    weight, bias, mean, var, _ = tensors_of(norm)
    known = not (norm.training or mean is None or var is None)
    y = settled(features, weight, bias, mean, var, norm.eps, 0.0) if known else None
    if y is None and serves(features, norm, features.shape[0]):
        y = trained(features, [Layer(norm, 0.0, alive=input.voxels.count)])
    return y
