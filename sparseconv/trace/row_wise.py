"""Which functions of torch a streamed network may call on rows: those that make each row of one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparseconv.row_functions import ALONG, ELEMENTWISE_NAMES, INSTEAD, LAST_AXIS_NAMES, name_of

#: further functions of single values
ALSO_ELEMENTWISE = """eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor bitwise_and
bitwise_or bitwise_not bitwise_xor and or invert xor truediv radd rmul rtruediv rpow to float half double bfloat16 int
long bool type type_as contiguous detach positive one_hot embedding isclose masked_fill heaviside addcmul addcdiv"""
#: functions along an axis that is the second argument, or the third; it must not be that of the rows
OVER_SECOND = """sum mean amax amin max min prod std var argmax argmin any all cumsum cumprod logsumexp sort flip
count_nonzero nanmean nansum median std_mean var_mean unsqueeze squeeze flatten unflatten unbind select narrow"""
OVER_THIRD = "norm softmax log_softmax softmin chunk split tensor_split topk"
#: those that take several axes one after another
SEVERAL = frozenset(("flip", "squeeze", "count_nonzero"))
#: functions that draw numbers: a block would draw others than the whole
DRAWING = "dropout alpha_dropout feature_alpha_dropout dropout1d bernoulli rand_like randn_like rrelu gumbel_softmax"
#: questions about a tensor that its values do not answer
ASKING = """shape dtype device ndim layout is_nested requires_grad is_cuda is_quantized is_sparse is_meta is_leaf
itemsize nbytes grad_fn is_cpu size dim is_floating_point is_complex is_contiguous stride element_size numel get_device
len ndimension nelement storage_offset is_signed is_inference _version names is_same_size is_mkldnn is_mps is_xpu
is_vulkan is_sparse_csr is_conj is_neg"""
#: functions that hand a tensor's values to the CPU
TELLING = """item tolist numpy bool float int index array equal allclose data_ptr contains nonzero unique cpu cuda iter
untyped_storage"""

ROW_BY_ROW, RANDOM = frozenset(ALSO_ELEMENTWISE.split()) | ELEMENTWISE_NAMES, frozenset(DRAWING.split())
ABOUT, READING = frozenset(ASKING.split()), frozenset(TELLING.split())
AXIS_AT = {
    **dict.fromkeys(OVER_SECOND.split(), 1),
    **dict.fromkeys(OVER_THIRD.split(), 2),
    **{name: place for name, (place, _) in ALONG.items()},
}


def asks(name: str) -> bool:
    """Whether a call asks about a tensor, and not for its values."""
    return name in ABOUT


def tells(function: Callable[..., Any], name: str) -> bool:
    """Whether a call hands values to the CPU: ``__bool__`` does, and ``Tensor.bool`` does not."""
    dunder = name_of(function).startswith("__")
    return name in READING and (dunder or name not in ("bool", "float", "int"))


def plain_name(function: Callable[..., Any]) -> str:
    """The function's name without what marks a method of Python's: ``add`` of ``__add__``."""
    name = name_of(function)
    if name in ELEMENTWISE_NAMES or name in ("__getitem__", "__setitem__"):
        return name
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def is_product(name: str) -> bool:
    """Whether rows meet a matrix, along their last axis."""
    return name in ("linear", "matmul", "mm")


def why_not(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[int, int]) -> str | None:
    """Why a call does not make each row of one row, in words; None where it does.

    ``dims`` are the axes of its first argument and of the widest of the others that have rows.
    """
    axes, others = dims
    if name in RANDOM:
        at = 3 if name == "rrelu" else 2
        training = kwargs.get("training", args[at] if len(args) > at else name != "rrelu")
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        draws = name.endswith("like") or name in ("bernoulli", "gumbel_softmax") or (training and p)
        return (
            f"{name} draws random numbers, and a block draws others than the whole: call net.eval()" if draws else None
        )
    if name in ("view", "reshape", "__getitem__", "batch_norm"):
        return None  # looked at by who asks
    if name in LAST_AXIS_NAMES or name == "matmul":
        if axes < 2 or others:
            return f"{name} takes rows (N, C) as its first argument alone"
        return None
    if name == "layer_norm":
        return None if len(kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())) < axes else "it joins rows"
    if name in AXIS_AT:
        axis = args[AXIS_AT[name]] if len(args) > AXIS_AT[name] else None
        if name in SEVERAL and len(args) > 2:
            axis = args[1:]
        axis = next((kwargs[key] for key in ("dim", "axis", "start_dim") if key in kwargs), axis)
        if axis is None and name in ("chunk", "split", "cat", "concat", "concatenate"):
            axis = 0
        if axis is None:
            return f"{name} without dim= mixes all rows"
        listed = axis if isinstance(axis, (tuple, list)) else (axis,)
        width = axes + 1 if name == "unsqueeze" else axes
        if any(not isinstance(a, int) or a % width == 0 for a in listed):
            given = axis if isinstance(axis, (int, tuple, list)) else f"a {type(axis).__name__}"
            return f"{name} over dim={given} mixes rows or reorders them"
        return None
    if name == "one_hot" and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) < 0:
        return "its width is the largest number of all rows: give num_classes"
    if name in ROW_BY_ROW:
        return None
    return INSTEAD.get(name, "it is not known to make each row of one row")
