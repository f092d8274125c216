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
    if x.dtype == tl.float32:
        # 2**p(|x|) is the tail beyond |x|: within 2e-7 of it, and within 5e-5 of its size up to |x| = 5
        z = tl.abs(x)
        p = -4.507063522396493e-07
        p = p * z + 7.899532647570595e-06
        p = p * z - 2.2056825400795788e-05
        p = p * z - 0.0005656766006723046
        p = p * z + 0.007652986794710159
        p = p * z - 0.05290822684764862
        p = p * z - 0.45907923579216003
        p = p * z - 1.1511180400848389
        tail = tl.exp2(p * z - 1.0)
        cdf = tl.where(x < 0, tail, 1.0 - tail)
    else:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return cdf


@triton.jit
def normal_pdf(x):
    """The standard normal density."""
    return 0.3989422804014327 * tl.exp(-0.5 * x * x)
