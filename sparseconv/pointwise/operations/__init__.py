"""Operations made with `pointwise_dynamic`, each with its twin for CPU tensors and its derivatives."""

# ruff: noqa: F401  sparseconv.pointwise lists these names
from __future__ import annotations

from sparseconv.pointwise.operations.activations import (
    clamp,
    elu,
    gelu,
    gelu_tanh,
    hardswish,
    leaky_relu,
    mish,
    relu,
    sigmoid,
    silu,
    softplus,
    tanh,
)
from sparseconv.pointwise.operations.arithmetic import add, copy, div, flip, mul, sub, where
from sparseconv.pointwise.operations.batch import batch_affine
from sparseconv.pointwise.operations.fused import bias_activation, chain
from sparseconv.pointwise.operations.gated import swiglu
from sparseconv.pointwise.operations.seeded import dropout
