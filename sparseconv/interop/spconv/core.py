"""``spconv.core``: names of algorithms, which choose nothing here, and activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from sparseconv.checks import described


class ConvAlgo(Enum):
    """What spconv lets a layer ask for. Every value gives the same numbers here."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


def default_algo(kernel_size: Sequence[int], most: int) -> ConvAlgo:
    """What spconv, built for GPUs, chooses where a layer does not say: implicit GEMM up to so many taps."""
    return ConvAlgo.MaskImplicitGemm if math.prod(kernel_size) <= most else ConvAlgo.Native


class AlgoHint(Enum):
    """Passes of a layer, as flags."""

    NoHint = 0b000
    Fowrard = 0b001  # spelled as in spconv
    BackwardInput = 0b010
    BackwardWeight = 0b100


class Activation(Enum):
    """What a layer may apply to its result; cumm's enumeration of the same names is taken too."""

    None_ = 0
    ReLU = 1
    Sigmoid = 2
    LeakyReLU = 3


def activated(x: torch.Tensor, act_type: Any, act_alpha: float = 0.0) -> torch.Tensor:
    """``x`` after an activation, known by its name; ``act_alpha`` is the slope of LeakyReLU."""
    name = activation_name(act_type)
    if name == "ReLU":
        return torch.nn.functional.relu(x)
    if name == "Sigmoid":
        return torch.sigmoid(x)
    return x if name == "None_" else torch.nn.functional.leaky_relu(x, act_alpha)


def activation_name(act_type: Any) -> str:
    """One of the names of `Activation`; ValueError for another activation, TypeError for none."""
    if act_type is None:
        return "None_"
    name = getattr(act_type, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"act_type must be an Activation, but it is {described(act_type)}: leave it out for none")
    if name not in Activation.__members__:
        raise ValueError(f"act_type must be one of {', '.join(Activation.__members__)}; got {name}")
    return name
