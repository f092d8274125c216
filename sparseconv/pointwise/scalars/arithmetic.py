"""Arithmetic, selection, gated units, affine maps and dropout as functions of scalars."""

import triton
import triton.language as tl

from sparseconv.pointwise.scalars.elementary import sigmoid


@triton.jit
def copy(x):
    return x


@triton.jit
def add(x, y, alpha):
    return x + y * alpha


@triton.jit
def multiply(x, y):
    return x * y


@triton.jit
def divide(x, y):
    return x / y


@triton.jit
def divide_grad_divisor(grad, x, y):
    return -(grad * x) / (y * y)


@triton.jit
def select(condition, x, y):
    return tl.where(condition != 0, x, y)


@triton.jit
def select_first(condition, grad):
    return tl.where(condition != 0, grad, 0.0)


@triton.jit
def select_second(condition, grad):
    return tl.where(condition != 0, 0.0, grad)


@triton.jit
def swiglu(gate, value):
    return gate * sigmoid(gate) * value


@triton.jit
def swiglu_grad_gate(grad, gate, value):
    s = sigmoid(gate)
    return grad * value * s * (1.0 + gate * (1.0 - s))


@triton.jit
def batch_affine(x, item, scale, shift):
    return x * scale + shift


@triton.jit
def batch_scale(x, item, scale):
    return x * scale


@triton.jit
def scramble(h):
    """A bijection of 32-bit words in which every input bit moves half of the output bits (MurmurHash3's finaliser)."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    h ^= h >> 16
    return h


@triton.jit
def dropout(x, probability, seed, index):
    """x / (1 - p) with probability 1 - p, else 0; the choice is a hash of (seed, index), 32 bits of it."""
    low = scramble((index & 0xFFFFFFFF).to(tl.uint32) ^ (seed & 0xFFFFFFFF).to(tl.uint32))
    high = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32) + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word = scramble(low + scramble(high + 0x9E3779B9))
    rate = tl.where(probability < 1.0, probability, 0.0)
    threshold = tl.where(probability < 1.0, probability, 2.0).to(tl.float32)
    return tl.where(word.to(tl.float32) * 2.3283064365386963e-10 >= threshold, x * (1.0 / (1.0 - rate)), 0.0)
