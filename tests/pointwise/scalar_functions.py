"""Scalar functions that other processes of the tests import too."""

import triton
import triton.language as tl


@triton.jit
def axpy(x, y, a):
    return x + y * a


def plain_axpy(x, y, a=2.0):
    """x + a * y"""
    return x + y * a


@triton.jit
def squared_relu(x, threshold):
    y = tl.maximum(x - threshold, 0.0)
    return y * y


@triton.jit
def activate_rows(x_ptr, y_ptr, N: tl.constexpr, ACTIVATION: tl.constexpr):
    """A kernel of someone else's that calls an activation on what it holds."""
    at = tl.arange(0, N)
    value = tl.load(x_ptr + at) * 2.0
    tl.store(y_ptr + at, ACTIVATION(value))
