"""Which functions of torch mean something on a sparse tensor: those that make each row of one row alone."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch

from sparseconv.checks import check_tensor, described

#: one value of one value, or of those in the same place of several tensors
ELEMENTWISE = """abs absolute add acos acosh alpha_dropout asin asinh atan atan2 atanh bernoulli ceil celu clamp
clamp_max clamp_min clip clone copysign cos cosh deg2rad div divide dropout elu erf erfc erfinv exp exp2 expm1 fix
float_power floor floor_divide fmax fmin fmod frac gelu hardshrink hardsigmoid hardswish hardtanh hypot leaky_relu
lerp lgamma log log10 log1p log2 logaddexp logit log_sigmoid logsigmoid maximum minimum mish mul multiply nan_to_num
neg negative ones_like pow prelu rad2deg rand_like randn_like reciprocal relu relu6 remainder round rrelu rsqrt rsub
selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink
threshold true_divide trunc where xlogy zeros_like _threshold __floordiv__ __rdiv__ __rfloordiv__ __rmod__ __rpow__
__rsub__"""

#: the last axis of the first argument
LAST_AXIS = "layer_norm linear matmul mm rms_norm"

#: an axis by number, which must be that of the channels: where it stands among the arguments, and its default
ALONG = {
    "cat": (1, 0),
    "concat": (1, 0),
    "concatenate": (1, 0),
    "glu": (1, -1),
    "gumbel_softmax": (4, -1),
    "log_softmax": (1, None),
    "normalize": (2, 1),
    "softmax": (1, None),
    "softmin": (1, None),
}

#: what to do instead of functions that people try
INSTEAD = {
    "batch_norm": "use sparseconv.nn.BatchNorm",
    "group_norm": "use sparseconv.nn.GroupNorm, which knows the batch items",
    "instance_norm": "use sparseconv.nn.InstanceNorm, which knows the batch items",
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "use sparseconv.nn.SubmanifoldConv or Conv"),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "use sparseconv.nn.InverseConv or ConvTranspose"
    ),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), "use sparseconv.nn.MaxPool"),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), "use sparseconv.nn.AvgPool"),
    **dict.fromkeys(("sum", "mean"), "use sparseconv.nn.GlobalSumPool or GlobalAvgPool, or take x.features"),
    **dict.fromkeys(("max", "amax"), "use sparseconv.nn.GlobalMaxPool, or take x.features"),
    "interpolate": "use sparseconv.nn.Unpool or InverseConv",
    **dict.fromkeys(("cross_entropy", "mse_loss", "nll_loss"), "losses take rows: pass x.features"),
}


ELEMENTWISE_NAMES, LAST_AXIS_NAMES = frozenset(ELEMENTWISE.split()), frozenset(LAST_AXIS.split())


def name_of(function: Callable[..., Any]) -> str:
    """Its name: the same for torch's function, its tensors' method and that of torch.nn.functional."""
    return getattr(function, "__name__", str(function))


def method_advice(name: str) -> str:
    """What to use for a method of tensors that a `SparseTensor` has not; nothing for other names."""
    if name.startswith("_") or not hasattr(torch.Tensor, name):
        return ""
    if name in ELEMENTWISE_NAMES and hasattr(torch, name):
        return f"use torch.{name}(x)"
    return INSTEAD.get(name, f"use x.features.{name}, and x.with_features(...) puts rows back onto their voxels")


def check_function(function: Callable[..., Any], args: Any, kwargs: Any, kind: type) -> None:
    """Raise TypeError unless ``function``, called like this with tensors of ``kind``, makes rows of rows.

    >>> check_function(torch.sum, (), {}, object)
    Traceback (most recent call last):
    TypeError: torch's sum mixes the rows of voxels or drops them: use sparseconv.nn.GlobalSumPool or \
GlobalAvgPool, or take x.features
    """
    name = name_of(function)
    if name in ELEMENTWISE_NAMES:
        return
    if name in LAST_AXIS_NAMES:
        others = (*args[1:], *(value for key, value in kwargs.items() if key != "input"))
        if any(isinstance(value, kind) for value in others):
            raise TypeError(
                f"torch's {name} takes a {kind.__name__} as its first argument alone: pass the features of the others"
            )
        shape = kwargs.get("normalized_shape", args[1] if name.endswith("_norm") and len(args) > 1 else (1,))
        if len(shape) != 1:
            raise TypeError(f"torch's {name} works along channels here, a shape of one axis; got {tuple(shape)}")
        return
    if name in ALONG:
        place, default = ALONG[name]
        dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
        if dim not in (1, -1):
            cat = "; sparseconv.VoxelGrid.cat joins scenes" if "cat" in name else ""
            raise TypeError(f"torch's {name} works along channels here, dim=1 or -1, but dim is {dim}{cat}")
        return
    advice = INSTEAD.get(name, "call it on x.features, and x.with_features(...) puts rows back onto their voxels")
    raise TypeError(f"torch's {name} mixes the rows of voxels or drops them: {advice}")


def check_operand(value: Any, features: torch.Tensor) -> Any:
    """A number or a tensor as an operand beside ``features`` (N, C): itself, if it leaves rows as they are.

    Tensors are of the shape (), (C,), (1, C), (N, 1) or (N, C), on the features' device.

    Raises TypeError for another kind, ValueError for another shape or device.
    """
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (Number, torch.SymInt, torch.SymFloat)):
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"an integer operand must fit in 64 bits, but it is {value}: pass a float")
            return value
        raise TypeError(f"the other operand must be a number, a tensor or a sparse tensor; got {described(value)}")
    check_tensor("the operand", value)
    rows, channels = features.shape
    fits = value.ndim == 0 or value.shape[-1] in (1, channels) or (channels == 1 and value.ndim == 2)
    if value.ndim > 2 or not fits or (value.ndim == 2 and value.shape[0] not in (1, rows)):
        raise ValueError(
            f"an operand beside features ({rows}, {channels}) is a number, ({channels},), (1, {channels}), ({rows}, 1) "
            f"or ({rows}, {channels}); got {tuple(value.shape)}"
        )
    if value.device != features.device and (value.ndim > 0 or value.device.type != "cpu"):
        raise ValueError(f"the operand is on {value.device}, the features are on {features.device}: move one")
    return value
