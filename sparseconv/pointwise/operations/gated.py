"""Gated units: one half of the channels opens or shuts the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparseconv.pointwise.decorator import pointwise_dynamic
from sparseconv.pointwise.function import PointwiseDynamicFunction
from sparseconv.pointwise.operations.activations import silu_grad, silu_grad2
from sparseconv.pointwise.operations.arithmetic import multiply
from sparseconv.pointwise.scalar import Deferred
from sparseconv.pointwise.schema import Derivative

if TYPE_CHECKING:
    from jaxtyping import Shaped


def _scalar(name: str) -> Deferred:
    return Deferred("sparseconv.pointwise.scalars.arithmetic", name)


swiglu_grad_gate: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("swiglu_grad_gate"),
    num_inputs=3,
    promotion_methods=[(0, 1, 2, "DEFAULT")],
    reference=lambda grad, gate, value: grad * value * gate.sigmoid() * (1 + gate * (1 - gate.sigmoid())),
    derivative={
        0: Derivative(lambda g, gate, value: swiglu_grad_gate(g, gate, value), "grad0", "in1", "in2"),
        1: Derivative(
            lambda g, grad, gate, value: silu_grad2(multiply(multiply(g, grad), value), gate),
            "grad0",
            "in0",
            "in1",
            "in2",
        ),
        2: Derivative(lambda g, grad, gate: silu_grad(multiply(g, grad), gate), "grad0", "in0", "in1"),
    },
    doc="grad * value * silu'(gate).",
)

swiglu_pair: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("swiglu"),
    num_inputs=2,
    promotion_methods=[(0, 1, "DEFAULT")],
    reference=lambda gate, value: torch.nn.functional.silu(gate) * value,
    derivative={
        0: Derivative(swiglu_grad_gate, "grad0", "in0", "in1"),
        1: Derivative(lambda grad, gate: swiglu_pair(gate, grad), "grad0", "in0"),
    },
    doc="silu(gate) * value.",
)


def swiglu(
    x: Shaped[torch.Tensor, "*#gate"], value: Shaped[torch.Tensor, "*#gate"] | None = None
) -> Shaped[torch.Tensor, "*shape"]:
    """The gated unit of transformers: out = silu(gate) * value, silu(g) = g * sigmoid(g).

    Args:
        x: the gate, or, if ``value`` is left out, (..., 2 C) with the gate in the first half of the last axis.
        value: what is gated; broadcasts with x.

    Returns:
        tensor of the broadcast shape, or (..., C).

    Raises:
        ValueError: if the last axis cannot be halved.

    Example:
        >>> swiglu(torch.tensor([[0.0, 1.0, 2.0, 2.0]]))
        tensor([[0.0000, 1.4621]])
    """
    if value is not None:
        return swiglu_pair(x, value)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"swiglu halves the last axis, but x has shape {tuple(x.shape)}")
    gate, gated = x.chunk(2, dim=-1)
    return swiglu_pair(gate, gated)
