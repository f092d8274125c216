"""Functions of torch on features: activations return tensors of the input's kind, losses what torch returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from sparseconv.interop.minkowski.sparse_tensor import features_of, with_features

ACTIVATIONS = """
    threshold relu hardtanh hardswish relu6 elu selu celu leaky_relu prelu rrelu glu gelu logsigmoid hardshrink
    tanhshrink softsign softplus softmin softmax softshrink gumbel_softmax log_softmax tanh sigmoid hardsigmoid silu
    batch_norm normalize linear dropout alpha_dropout
"""
LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss cross_entropy hinge_embedding_loss kl_div
    l1_loss mse_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss smooth_l1_loss
    soft_margin_loss
"""


def _on_features(name: str, is_loss: bool) -> Callable[..., Any]:
    function = getattr(F, name)

    def apply(input: Any, *args: Any, **kwargs: Any) -> Any:
        if is_loss:
            return function(features_of(input), *args, **kwargs)
        return with_features(input, lambda x: function(x, *args, **kwargs))

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"``torch.nn.functional.{name}`` {'of features and a target' if is_loss else 'on features'}."
    return apply


globals().update({name: _on_features(name, is_loss=False) for name in ACTIVATIONS.split()})
globals().update({name: _on_features(name, is_loss=True) for name in LOSSES.split()})
