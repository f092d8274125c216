"""Activations, each with its gradient and the gradient of that; orders beyond go through the twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from sparseconv.pointwise.decorator import pointwise_dynamic
from sparseconv.pointwise.function import PointwiseDynamicFunction
from sparseconv.pointwise.operations.arithmetic import multiply, scale
from sparseconv.pointwise.scalar import Deferred
from sparseconv.pointwise.schema import Config, Derivative

if TYPE_CHECKING:
    from jaxtyping import Shaped

aten = torch.ops.aten
_FLOAT = "INT_TO_FLOAT"


def _make(
    name: str,
    reference: Callable[..., Any],
    derivative: Any,
    *,
    tensors: int = 1,
    numbers: int = 0,
    defaults: Sequence[float] = (),
    kind: str = "DEFAULT",
    promoted: Sequence[int] | None = None,
    doc: str,
) -> PointwiseDynamicFunction:
    return pointwise_dynamic(
        Deferred("sparseconv.pointwise.scalars.activations", name),
        is_tensor=[True] * tensors + [False] * numbers,
        dtypes=[None] * tensors + ([float] * numbers if promoted is None else [None] * numbers),
        promotion_methods=[(*(promoted if promoted is not None else range(tensors)), kind)],
        reference=reference,
        derivative=derivative,
        defaults=defaults,
        config=Config(num_warps=4),  # more elements per thread, since these compute as well as move
        doc=doc,
    )


def _with_slope(
    name: str,
    reference: Callable[..., Any],
    first: Callable[..., Any],
    bend: PointwiseDynamicFunction | None = None,
    *,
    numbers: int = 0,
    defaults: Sequence[float] = (),
    promoted: Sequence[int] | None = None,
    doc: str,
) -> tuple[PointwiseDynamicFunction, PointwiseDynamicFunction]:
    """f(x, ...) and grad * f'(x, ...); ``bend`` is grad * f''(x, ...), None where that is 0."""
    named = [f"in{i}" for i in range(1, numbers + 2)]
    derivative = {0: Derivative(lambda g, *rest: slope(g, *rest), "grad0", *named)}
    if bend is not None:
        derivative[1] = Derivative(lambda g, grad, *rest: bend(multiply(g, grad), *rest), "grad0", "in0", *named)
    slope_doc = f"grad * {name}'(x), the gradient of {name}."
    slope = _make(f"{name}_grad", first, derivative, tensors=2, numbers=numbers, doc=slope_doc)
    arguments = [f"in{i}" for i in range(numbers + 1)]
    derivative = {0: Derivative(slope, "grad0", *arguments)}
    value = _make(name, reference, derivative, numbers=numbers, defaults=defaults, promoted=promoted, doc=doc)
    return value, slope


def _family(
    name: str,
    reference: Callable[..., Any],
    first: Callable[..., Any],
    second: Callable[..., Any],
    *,
    parameters: Sequence[float] = (),
    doc: str,
) -> tuple[PointwiseDynamicFunction, PointwiseDynamicFunction, PointwiseDynamicFunction]:
    """f(x, ...), grad * f'(x, ...) and grad * f''(x, ...); the last is differentiated through its twin."""
    numbers = len(parameters)
    bend_doc = f"grad * {name}''(x), the slope of its gradient."
    bend = _make(f"{name}_grad2", second, None, tensors=2, numbers=numbers, doc=bend_doc)
    return *_with_slope(name, reference, first, bend, numbers=numbers, defaults=parameters, doc=doc), bend


relu_grad: PointwiseDynamicFunction = _make(
    "relu_grad",
    lambda grad, y: torch.where(y <= 0, torch.zeros_like(grad), grad),
    {0: Derivative(lambda g, y: relu_grad(g, y), "grad0", "in1")},
    tensors=2,
    doc="grad where y > 0, else 0.",
)
relu: PointwiseDynamicFunction = _make(
    "relu",
    torch.relu,
    {0: Derivative(relu_grad, "grad0", "out0")},
    doc="""max(x, 0): x (any shape, real) -> the same shape and dtype. The gradient is taken from the output.

    >>> relu(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])""",
)

leaky_relu, leaky_relu_grad = _with_slope(
    "leaky_relu",
    F.leaky_relu,
    lambda grad, x, slope: torch.where(x > 0, grad, grad * slope),
    numbers=1,
    defaults=(0.01,),
    doc="""leaky_relu(x, slope=0.01): x where x > 0, else slope * x.

    >>> leaky_relu(torch.tensor([-2.0, 2.0]), 0.5)
    tensor([-1.,  2.])""",
)


def _of_result(
    name: str,
    reference: Callable[..., Any],
    first: Callable[..., Any],
    second: Callable[..., Any],
    *,
    slope_doc: str,
    bend_doc: str,
    doc: str,
) -> tuple[PointwiseDynamicFunction, PointwiseDynamicFunction]:
    """y = f(x), and grad * f'(x) as a polynomial of y whose leading term is -y**2, so that its bend is -2."""
    bend = _make(
        f"{name}_grad_slope",
        second,
        {
            0: Derivative(lambda g, y: bend(g, y.conj()), "grad0", "in1"),
            1: Derivative(lambda g, grad: scale(multiply(g, grad.conj()), -2.0), "grad0", "in0"),
        },
        tensors=2,
        doc=bend_doc,
    )
    slope = _make(
        f"{name}_grad",
        first,
        {
            0: Derivative(lambda g, y: slope(g, y.conj()), "grad0", "in1"),
            1: Derivative(lambda g, grad, y: bend(multiply(g, grad.conj()), y.conj()), "grad0", "in0", "in1"),
        },
        tensors=2,
        doc=slope_doc,
    )
    derivative = {0: Derivative(lambda grad, y: slope(grad, y.conj()), "grad0", "out0")}
    return _make(name, reference, derivative, kind=_FLOAT, doc=doc), slope


sigmoid, sigmoid_grad = _of_result(
    "sigmoid",
    torch.sigmoid,
    lambda grad, y: grad * y * (1 - y),
    lambda grad, y: grad * (1 - 2 * y),
    slope_doc="grad * y * (1 - y).",
    bend_doc="grad * (1 - 2 y).",
    doc="""1 / (1 + exp(-x)); integers give floats. The gradient is taken from the output.

    >>> sigmoid(torch.arange(2))
    tensor([0.5000, 0.7311])""",
)

tanh, tanh_grad = _of_result(
    "tanh",
    torch.tanh,
    lambda grad, y: grad * (1 - y * y),
    lambda grad, y: -2 * grad * y,
    slope_doc="grad * (1 - y**2).",
    bend_doc="-2 * grad * y.",
    doc="""The hyperbolic tangent; integers give floats. The gradient is taken from the output.

    >>> tanh(torch.arange(2))
    tensor([0.0000, 0.7616])""",
)

elu, elu_grad, elu_grad2 = _family(
    "elu",
    F.elu,
    lambda grad, x, alpha: torch.where(x > 0, grad, grad * alpha * x.clamp(max=0).exp()),
    lambda grad, x, alpha: torch.where(x > 0, torch.zeros_like(x), grad * alpha * x.clamp(max=0).exp()),
    parameters=(1.0,),
    doc="""elu(x, alpha=1.0): x where x > 0, else alpha * (exp(x) - 1).

    >>> elu(torch.tensor([-1.0, 2.0]))
    tensor([-0.6321,  2.0000])""",
)

silu, silu_grad, silu_grad2 = _family(
    "silu",
    F.silu,
    lambda grad, x: grad * x.sigmoid() * (1 + x * (1 - x.sigmoid())),
    lambda grad, x: grad * x.sigmoid() * (1 - x.sigmoid()) * (2 + x * (1 - 2 * x.sigmoid())),
    doc="""x * sigmoid(x).

    >>> silu(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.7311])""",
)


def _normal(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return 0.5 * (1 + torch.erf(x * 0.5**0.5)), 0.3989422804014327 * torch.exp(-0.5 * x * x)


def _gelu_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    below, density = _normal(x)
    return grad * (below + x * density)


gelu, gelu_grad, gelu_grad2 = _family(
    "gelu",
    F.gelu,
    _gelu_grad,
    lambda grad, x: grad * _normal(x)[1] * (2 - x * x),
    doc="""x * Phi(x), Phi the standard normal distribution function (the exact form).

    >>> gelu(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8413])""",
)


def _gelu_tanh_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k = (2 / torch.pi) ** 0.5
    t = torch.tanh(k * (x + 0.044715 * x**3))
    return t, k * (1 + 0.134145 * x * x), k * 0.26829 * x


def _gelu_tanh_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t, slope, _ = _gelu_tanh_parts(x)
    return grad * 0.5 * (1 + t + x * (1 - t * t) * slope)


def _gelu_tanh_grad2(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t, slope, bend = _gelu_tanh_parts(x)
    return grad * (1 - t * t) * (slope + 0.5 * x * (bend - 2 * t * slope * slope))


gelu_tanh, gelu_tanh_grad, gelu_tanh_grad2 = _family(
    "gelu_tanh",
    lambda x: F.gelu(x, approximate="tanh"),
    _gelu_tanh_grad,
    _gelu_tanh_grad2,
    doc="""0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))), the approximate form of gelu.

    >>> gelu_tanh(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8412])""",
)


def _mish_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tanh(F.softplus(x)), x.sigmoid()


def _mish_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w, s = _mish_parts(x)
    return grad * (w + x * (1 - w * w) * s)


def _mish_grad2(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w, s = _mish_parts(x)
    slope = (1 - w * w) * s
    return grad * (2 * slope + x * slope * (1 - s - 2 * w * s))


mish, mish_grad, mish_grad2 = _family(
    "mish",
    F.mish,
    _mish_grad,
    _mish_grad2,
    doc="""x * tanh(log(1 + exp(x))).

    >>> mish(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8651])""",
)

softplus, softplus_grad, softplus_grad2 = _family(
    "softplus",
    F.softplus,
    lambda grad, x, beta, threshold: torch.where(x * beta > threshold, grad, grad * (x * beta).sigmoid()),
    lambda grad, x, beta, threshold: torch.where(
        x * beta > threshold, torch.zeros_like(x), grad * beta * (x * beta).sigmoid() * (1 - (x * beta).sigmoid())
    ),
    parameters=(1.0, 20.0),
    doc="""softplus(x, beta=1.0, threshold=20.0): log(1 + exp(beta x)) / beta, and x where beta x > threshold.

    >>> softplus(torch.tensor([0.0, 30.0]))
    tensor([ 0.6931, 30.0000])""",
)

hardswish, hardswish_grad, hardswish_grad2 = _family(
    "hardswish",
    F.hardswish,
    lambda grad, x: torch.where(x <= -3, torch.zeros_like(x), torch.where(x < 3, grad * (x / 3 + 0.5), grad)),
    lambda grad, x: torch.where((x > -3) & (x < 3), grad / 3, torch.zeros_like(x)),
    doc="""x * min(max(x + 3, 0), 6) / 6.

    >>> hardswish(torch.tensor([-3.0, 3.0]))
    tensor([-0., 3.])""",
)


def _clamps(
    name: str, numbers: int, reference: Callable[..., Any], inside: Callable[..., Any]
) -> PointwiseDynamicFunction:
    def slope(grad: torch.Tensor, x: torch.Tensor, *bounds: float) -> torch.Tensor:
        return torch.where(inside(x, *bounds), grad, torch.zeros_like(grad))

    doc = f"{name}(x, *bounds): x held within its bounds."
    return _with_slope(name, reference, slope, numbers=numbers, promoted=range(numbers + 1), doc=doc)[0]


clamp_both: PointwiseDynamicFunction = _clamps("clamp", 2, torch.clamp, lambda x, low, high: (x >= low) & (x <= high))
clamp_min: PointwiseDynamicFunction = _clamps("clamp_min", 1, torch.clamp_min, lambda x, low: x >= low)
clamp_max: PointwiseDynamicFunction = _clamps("clamp_max", 1, torch.clamp_max, lambda x, high: x <= high)


def clamp(
    x: Shaped[torch.Tensor, "*shape"],
    low: float | None = None,
    high: float | None = None,
    *,
    out: Shaped[torch.Tensor, "*shape"] | None = None,
) -> Shaped[torch.Tensor, "*shape"]:
    """Clamp to bounds: out = min(max(x, low), high); None means no bound.

    Args:
        x: tensor of any shape and real dtype.
        low: the lowest value.
        high: the highest value; it wins over a larger ``low``.
        out: where to write; a new tensor by default.

    Returns:
        tensor of the shape of x, of the common dtype of x and the bounds.

    Raises:
        ValueError: if neither bound is given.

    Example:
        >>> clamp(torch.arange(4.0), low=1, high=2)
        tensor([1., 1., 2., 2.])
    """
    written = {} if out is None else {"out": out}
    if low is not None and high is not None:
        return clamp_both(x, low, high, **written)
    if low is not None:
        return clamp_min(x, low, **written)
    if high is not None:
        return clamp_max(x, high, **written)
    raise ValueError("clamp needs a bound: give low=, high= or both")
