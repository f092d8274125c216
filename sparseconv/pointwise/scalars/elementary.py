"""Functions that Triton's language lacks on some of its targets, accurate near zero and in fp64."""

import triton
import triton.language as tl


@triton.jit
def expm1(x):
    """exp(x) - 1 without cancellation near 0, by Kahan's quotient."""
    u = tl.exp(x)
    v = u - 1.0
    inner = (u == 1.0) | (v == -1.0) | (u == float("inf"))
    quotient = v * x / tl.where(inner, 1.0, tl.log(tl.where(inner, 2.0, u)))
    return tl.where(u == 1.0, x, tl.where(inner, v, quotient))


@triton.jit
def log1p(x):
    """log(1 + x) without cancellation near 0, by Kahan's quotient."""
    u = 1.0 + x
    v = u - 1.0
    return tl.where(v == 0.0, x, tl.log(u) * x / tl.where(v == 0.0, 1.0, v))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def tanh(x):
    """The hyperbolic tangent, without overflow or cancellation."""
    m = expm1(-2.0 * tl.abs(x))
    t = -m / (2.0 + m)
    return tl.where(x < 0, -t, t)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow."""
    return tl.where(x > 0, x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def normal_cdf(x):
    """The standard normal distribution function."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def normal_pdf(x):
    """The standard normal density."""
    return 0.3989422804014327 * tl.exp(-0.5 * x * x)
