"""Addition, multiplication, division, selection and copies of tensors and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseconv import transforms
from sparseconv.gpu.cuda_capability import has_triton
from sparseconv.pointwise.decorator import pointwise_dynamic
from sparseconv.pointwise.function import PointwiseDynamicFunction
from sparseconv.pointwise.metadata import dtypes_of
from sparseconv.pointwise.scalar import Deferred
from sparseconv.pointwise.schema import Derivative
from sparseconv.pointwise.strided import StridedBuffer

if TYPE_CHECKING:
    from jaxtyping import Bool, Shaped


#: what an operand is made of where it is no number
_ARRAYS = (torch.Tensor, StridedBuffer)


def _scalar(name: str) -> Deferred:
    return Deferred("sparseconv.pointwise.scalars.arithmetic", name)


def same(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a sum with respect to one of its terms."""
    return grad


copy: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("copy"),
    num_inputs=1,
    promotion_methods=[(0, "NO_OPMATH")],
    reference=lambda x: x.clone(),
    derivative={0: Derivative(same, "grad0")},
    doc="""x, in memory of its own: x (any shape) -> a tensor of the same shape, dtype and stride order.

    >>> copy(torch.arange(3))
    tensor([0, 1, 2])""",
)

multiply: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("multiply"),
    name="multiply",
    num_inputs=2,
    promotion_methods=[(0, 1, "DEFAULT")],
    reference=torch.mul,
    derivative={
        0: Derivative(lambda grad, y: multiply(grad, y.conj()), "grad0", "in1"),
        1: Derivative(lambda grad, x: multiply(grad, x.conj()), "grad0", "in0"),
    },
    doc="x * y of two tensors.",
)

scale: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("multiply"),
    name="scale",
    is_tensor=[True, False],
    promotion_methods=[(0, 1, "DEFAULT")],
    reference=torch.mul,
    derivative={0: Derivative(lambda grad, factor: scale(grad, factor), "grad0", "in1")},
    doc="x * factor of a tensor and a number.",
)

add_tensors: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("add"),
    name="add",
    is_tensor=[True, True, False],
    promotion_methods=[(0, 1, "DEFAULT")],
    reference=lambda x, y, alpha: x + y * alpha,
    derivative={
        0: Derivative(same, "grad0"),
        1: Derivative(lambda grad, alpha: grad if alpha == 1 else scale(grad, alpha), "grad0", "in2"),
    },
    defaults=(1,),
    doc="x + alpha * y of two tensors.",
)

add_number: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("add"),
    name="add_number",
    is_tensor=[True, False, False],
    promotion_methods=[(0, 1, "DEFAULT")],
    reference=lambda x, y, alpha: x + y * alpha,
    derivative={0: Derivative(same, "grad0")},
    defaults=(1,),
    doc="x + alpha * y of a tensor and a number.",
)


def _bend_of_divisor(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return scale(divide(divide_grad_divisor(grad, x, y), y), -2.0)


divide_grad_divisor: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("divide_grad_divisor"),
    num_inputs=3,
    promotion_methods=[(0, 1, 2, "DEFAULT")],
    reference=lambda grad, x, y: -(grad * x) / (y * y),
    derivative={
        0: Derivative(lambda g, x, y: divide_grad_divisor(g, x.conj(), y.conj()), "grad0", "in1", "in2"),
        1: Derivative(lambda g, grad, y: divide_grad_divisor(g, grad.conj(), y.conj()), "grad0", "in0", "in2"),
        2: Derivative(
            lambda g, grad, x, y: _bend_of_divisor(multiply(g, grad.conj()), x.conj(), y.conj()),
            "grad0",
            "in0",
            "in1",
            "in2",
        ),
    },
    doc="-grad * x / y**2, the gradient of x / y with respect to y.",
)

divide: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("divide"),
    name="divide",
    num_inputs=2,
    promotion_methods=[(0, 1, "INT_TO_FLOAT")],
    reference=torch.div,
    derivative={
        0: Derivative(lambda grad, y: divide(grad, y.conj()), "grad0", "in1"),
        1: Derivative(lambda grad, x, y: divide_grad_divisor(grad, x.conj(), y.conj()), "grad0", "in0", "in1"),
    },
    doc="x / y of two tensors.",
)

divide_by_number: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("divide"),
    name="divide_by_number",
    is_tensor=[True, False],
    promotion_methods=[(0, 1, "INT_TO_FLOAT")],
    reference=torch.div,
    derivative={0: Derivative(lambda grad, divisor: divide_by_number(grad, divisor), "grad0", "in1")},
    doc="x / divisor of a tensor and a number.",
)

select_first: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("select_first"),
    num_inputs=2,
    promotion_methods=[(1, "NO_OPMATH")],
    reference=lambda condition, grad: torch.where(condition.bool(), grad, torch.zeros_like(grad)),
    derivative={1: Derivative(lambda g, condition: select_first(condition, g), "grad0", "in0")},
    doc="grad where the condition holds, else 0.",
)

select_second: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("select_second"),
    num_inputs=2,
    promotion_methods=[(1, "NO_OPMATH")],
    reference=lambda condition, grad: torch.where(condition.bool(), torch.zeros_like(grad), grad),
    derivative={1: Derivative(lambda g, condition: select_second(condition, g), "grad0", "in0")},
    doc="0 where the condition holds, else grad.",
)

select: PointwiseDynamicFunction = pointwise_dynamic(
    _scalar("select"),
    num_inputs=3,
    promotion_methods=[(1, 2, "NO_OPMATH")],
    reference=lambda condition, x, y: torch.where(condition.bool(), x, y),
    derivative={
        1: Derivative(lambda grad, condition: select_first(condition, grad), "grad0", "in0"),
        2: Derivative(lambda grad, condition: select_second(condition, grad), "grad0", "in0"),
    },
    doc="x where the condition holds, else y.",
)


def add(
    x: Shaped[torch.Tensor, "*#shape"],
    y: Shaped[torch.Tensor, "*#shape"] | float,
    alpha: float = 1,
    *,
    out: Shaped[torch.Tensor, "*shape"] | None = None,
) -> Shaped[torch.Tensor, "*shape"]:
    """The sum of a tensor and a tensor or number: out = x + alpha * y, broadcast.

    Args:
        x: tensor of any shape and dtype.
        y: tensor that broadcasts with x, or a number.
        alpha: a number.
        out: where to write; a new tensor by default.

    Returns:
        tensor of the broadcast shape, of the dtype that torch.add would give.

    Raises:
        TypeError: if alpha is a float where x and y are of integer dtypes, since the result is of theirs.

    Example:
        >>> add(torch.ones(2), torch.arange(2.0), 0.5)
        tensor([1.0000, 1.5000])
    """
    function = add_tensors if isinstance(y, _ARRAYS) else add_number
    if isinstance(alpha, float) and isinstance(x, _ARRAYS):
        (result,) = dtypes_of(function.schema, (x, y, alpha)).results
        if not (result.is_floating_point or result.is_complex):
            raise TypeError(f"add: x and y give {result}, so alpha is an int, but got {alpha!r}; make x a float tensor")
    return function(x, y, alpha) if out is None else function(x, y, alpha, out=out)


def sub(
    x: Shaped[torch.Tensor, "*#shape"],
    y: Shaped[torch.Tensor, "*#shape"] | float,
    alpha: float = 1,
    *,
    out: Shaped[torch.Tensor, "*shape"] | None = None,
) -> Shaped[torch.Tensor, "*shape"]:
    """The difference out = x - alpha * y, broadcast; arguments as in `add`.

    Raises:
        TypeError: if x or y is bool, as torch refuses, besides what `add` raises.

    Example:
        >>> sub(torch.ones(2), 3)
        tensor([-2., -2.])
    """
    for operand in (x, y):
        if (operand.dtype is torch.bool) if isinstance(operand, _ARRAYS) else isinstance(operand, bool):
            raise TypeError("sub: bool tensors cannot be subtracted: use x ^ y or ~y")
    return add(x, y, -alpha, out=out)


def mul(
    x: Shaped[torch.Tensor, "*#shape"],
    y: Shaped[torch.Tensor, "*#shape"] | float,
    *,
    out: Shaped[torch.Tensor, "*shape"] | None = None,
) -> Shaped[torch.Tensor, "*shape"]:
    """The product of a tensor and a tensor or number: out = x * y, broadcast.

    Example:
        >>> mul(torch.arange(3), 2.5)
        tensor([0.0000, 2.5000, 5.0000])
    """
    function = multiply if isinstance(y, _ARRAYS) else scale
    return function(x, y) if out is None else function(x, y, out=out)


def div(
    x: Shaped[torch.Tensor, "*#shape"],
    y: Shaped[torch.Tensor, "*#shape"] | float,
    *,
    out: Shaped[torch.Tensor, "*shape"] | None = None,
) -> Shaped[torch.Tensor, "*shape"]:
    """The true quotient of a tensor and a tensor or number: out = x / y, broadcast; integers give floats.

    Example:
        >>> div(torch.arange(3), 2)
        tensor([0.0000, 0.5000, 1.0000])
    """
    function = divide if isinstance(y, _ARRAYS) else divide_by_number
    return function(x, y) if out is None else function(x, y, out=out)


def where(
    condition: Bool[torch.Tensor, "*#shape"],
    x: Shaped[torch.Tensor, "*#shape"],
    y: Shaped[torch.Tensor, "*#shape"],
    *,
    out: Shaped[torch.Tensor, "*shape"] | None = None,
) -> Shaped[torch.Tensor, "*shape"]:
    """x where the condition holds, else y: out[i] = x[i] if condition[i] else y[i], broadcast.

    Args:
        condition: bool tensor.
        x: tensor of any dtype.
        y: tensor of any dtype; the result is of the common dtype of x and y.
        out: where to write; a new tensor by default.

    Returns:
        tensor of the broadcast shape.

    Example:
        >>> where(torch.tensor([True, False]), torch.ones(2), torch.zeros(()))
        tensor([1., 0.])
    """
    if condition.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"where: the condition is a bool tensor, but got {condition.dtype}; compare it with something")
    return select(condition, x, y) if out is None else select(condition, x, y, out=out)


def flip(x: Shaped[torch.Tensor, "*shape"], dims: int | Sequence[int]) -> Shaped[torch.Tensor, "*shape"]:
    """The order along some axes reversed, in one pass: out[..., i, ...] = x[..., n - 1 - i, ...].

    Args:
        x: tensor of any shape, dtype and device.
        dims: the axes to reverse.

    Returns:
        new tensor of the shape, dtype and stride order of x.

    Raises:
        ValueError: if an axis is out of range or named twice.

    Example:
        >>> flip(torch.arange(3), 0)
        tensor([2, 1, 0])
    """
    axes = [dims] if isinstance(dims, int) else list(dims)
    rank = x.dim()
    for axis in axes:
        if not -rank <= axis < rank:
            raise ValueError(f"flip: axis {axis} is out of range for a tensor of {rank} axes")
    chosen = {axis % rank for axis in axes}
    if len(chosen) != len(axes):
        raise ValueError(f"flip: an axis is named twice in {axes}")
    seen = (x.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling() or transforms.active()
    if seen or not has_triton(x.device):
        return torch.flip(x, list(chosen))
    return copy(reversed_view(x, chosen))


def reversed_view(x: torch.Tensor, dims: Any) -> StridedBuffer:
    """x seen in reverse along ``dims``, without a copy; an argument for any pointwise function.

    Example:
        >>> copy(reversed_view(torch.arange(3), [0]))
        tensor([2, 1, 0])
    """
    strides = [-s if k in dims else s for k, s in enumerate(x.stride())]
    offset = sum((n - 1) * s for k, (n, s) in enumerate(zip(x.shape, x.stride())) if k in dims and n > 0)
    return StridedBuffer(x, strides=strides, offset=offset)
