"""Pointwise kernels generated for any rank, strides, broadcast and dtype: differentiable, and fusible into others.

Nothing here imports Triton before a kernel is needed; the operations are made when one of them is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparseconv.pointwise.decorator import pointwise_dynamic
from sparseconv.pointwise.epilogue import Epilogue
from sparseconv.pointwise.function import PointwiseDynamicFunction
from sparseconv.pointwise.scalar import Deferred
from sparseconv.pointwise.schema import Config, Derivative, Promotion
from sparseconv.pointwise.strided import StridedBuffer

if TYPE_CHECKING:
    from sparseconv.pointwise.operations import (
        add,
        batch_affine,
        bias_activation,
        chain,
        clamp,
        copy,
        div,
        dropout,
        elu,
        flip,
        gelu,
        gelu_tanh,
        hardswish,
        leaky_relu,
        mish,
        mul,
        relu,
        sigmoid,
        silu,
        softplus,
        sub,
        swiglu,
        tanh,
        where,
    )

__all__ = [  # noqa: RUF022
    "Config",
    "Deferred",
    "Derivative",
    "Epilogue",
    "PointwiseDynamicFunction",
    "Promotion",
    "StridedBuffer",
    "pointwise_dynamic",
    "add",
    "batch_affine",
    "bias_activation",
    "chain",
    "clamp",
    "copy",
    "div",
    "dropout",
    "elu",
    "flip",
    "gelu",
    "gelu_tanh",
    "hardswish",
    "leaky_relu",
    "mish",
    "mul",
    "relu",
    "sigmoid",
    "silu",
    "softplus",
    "sub",
    "swiglu",
    "tanh",
    "where",
]


_OPERATIONS = frozenset(__all__[__all__.index("add") :])


def __getattr__(name: str) -> Any:
    if name not in _OPERATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("sparseconv.pointwise.operations"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
