"""Activations and their first and second derivatives as functions of scalars; `grad` comes first in a derivative."""

import triton
import triton.language as tl

from sparseconv.pointwise.scalars.elementary import expm1, normal_cdf, normal_pdf, sigmoid, tanh  # noqa: F401
from sparseconv.pointwise.scalars.elementary import softplus as softplus_of


@triton.jit
def relu(x):
    return tl.where(x <= 0, 0, x)


@triton.jit
def relu_grad(grad, y):
    return tl.where(y <= 0, 0, grad)


@triton.jit
def leaky_relu(x, slope):
    return tl.where(x > 0, x, x * slope)


@triton.jit
def leaky_relu_grad(grad, x, slope):
    return tl.where(x > 0, grad, grad * slope)


@triton.jit
def elu(x, alpha):
    return tl.where(x > 0, x, alpha * expm1(tl.where(x > 0, 0.0, x)))


@triton.jit
def elu_grad(grad, x, alpha):
    return tl.where(x > 0, grad, grad * alpha * tl.exp(tl.where(x > 0, 0.0, x)))


@triton.jit
def elu_grad2(grad, x, alpha):
    return tl.where(x > 0, 0.0, grad * alpha * tl.exp(tl.where(x > 0, 0.0, x)))


@triton.jit
def sigmoid_grad(grad, y):
    return grad * y * (1.0 - y)


@triton.jit
def sigmoid_grad_slope(grad, y):
    return grad * (1.0 - 2.0 * y)


@triton.jit
def tanh_grad(grad, y):
    return grad * (1.0 - y * y)


@triton.jit
def tanh_grad_slope(grad, y):
    return -2.0 * grad * y


@triton.jit
def softplus(x, beta, threshold):
    z = x * beta
    return tl.where(z > threshold, x, softplus_of(z) / beta)


@triton.jit
def softplus_grad(grad, x, beta, threshold):
    z = x * beta
    return tl.where(z > threshold, grad, grad * sigmoid(z))


@triton.jit
def softplus_grad2(grad, x, beta, threshold):
    s = sigmoid(x * beta)
    return tl.where(x * beta > threshold, 0.0, grad * beta * s * (1.0 - s))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def silu_grad(grad, x):
    s = sigmoid(x)
    return grad * s * (1.0 + x * (1.0 - s))


@triton.jit
def silu_grad2(grad, x):
    s = sigmoid(x)
    return grad * s * (1.0 - s) * (2.0 + x * (1.0 - 2.0 * s))


@triton.jit
def gelu(x):
    return x * normal_cdf(x)


@triton.jit
def gelu_grad(grad, x):
    return grad * (normal_cdf(x) + x * normal_pdf(x))


@triton.jit
def gelu_grad2(grad, x):
    return grad * normal_pdf(x) * (2.0 - x * x)


@triton.jit
def gelu_tanh(x):
    # 0.5 (1 + tanh(u)) is the logistic function of 2 u, which has no cancellation for negative u
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gelu_tanh_grad(grad, x):
    s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return grad * s * (1.0 + x * (1.0 - s) * slope)


@triton.jit
def gelu_tanh_grad2(grad, x):
    s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    bend = 0.4281288976356015 * x  # the second derivative of the argument
    return grad * s * (1.0 - s) * (2.0 * slope + x * (bend + (1.0 - 2.0 * s) * slope * slope))


@triton.jit
def hardswish(x):
    inner = tl.where(x < -3, 0.0, tl.where(x > 3, 6.0, x + 3.0))
    return x * inner / 6.0


@triton.jit
def hardswish_grad(grad, x):
    return tl.where(x <= -3, 0.0, tl.where(x < 3, grad * (x / 3.0 + 0.5), grad))


@triton.jit
def hardswish_grad2(grad, x):
    return tl.where((x > -3) & (x < 3), grad / 3.0, 0.0)


@triton.jit
def tanh_softplus(x):
    # tanh(log(1 + e)) = (e**2 + 2 e) / (e**2 + 2 e + 2) with e = exp(x); it is 1 in every dtype long before x = 20
    e = tl.exp(tl.where(x < 20, x, 20.0))
    return e * (e + 2.0) / (e * (e + 2.0) + 2.0)


@triton.jit
def mish(x):
    return x * tanh_softplus(x)


@triton.jit
def mish_grad(grad, x):
    w = tanh_softplus(x)
    return grad * (w + x * (1.0 - w * w) * sigmoid(x))


@triton.jit
def mish_grad2(grad, x):
    w = tanh_softplus(x)
    s = sigmoid(x)
    slope = (1.0 - w * w) * s
    return grad * (2.0 * slope + x * slope * (1.0 - s - 2.0 * w * s))


@triton.jit
def clamp(x, low, high):
    raised = tl.where((x >= low) | (x != x), x, low)  # as in torch, a NaN wins: of x, or of a bound
    return tl.where((raised <= high) | (raised != raised), raised, high)


@triton.jit
def clamp_grad(grad, x, low, high):
    return tl.where((x >= low) & (x <= high), grad, 0.0)


@triton.jit
def clamp_min(x, low):
    return tl.where((x >= low) | (x != x), x, low)


@triton.jit
def clamp_min_grad(grad, x, low):
    return tl.where(x >= low, grad, 0.0)


@triton.jit
def clamp_max(x, high):
    return tl.where((x <= high) | (x != x), x, high)


@triton.jit
def clamp_max_grad(grad, x, high):
    return tl.where(x <= high, grad, 0.0)
