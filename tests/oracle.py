"""Slow and obvious: what a sparse convolution means, in loops over dictionaries. Imports nothing of the package."""

import itertools

import numpy as np


def window_taps(kernel, dilation=None):
    """The taps of a box kernel, last axis fastest, each times the dilation."""
    dilation = dilation or (1,) * len(kernel)
    return [tuple(d * t for d, t in zip(dilation, tap)) for tap in itertools.product(*(range(k) for k in kernel))]


def default_padding(kernel, dilation):
    return tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel))


def edges(fine, coarse, taps, stride, padding, extent=None):
    """Every (tap, fine row, coarse row) with fine = stride * coarse + tap - padding, batch items apart.

    ``taps`` are already dilated. ``extent`` = (start, shape) makes the fine space a torus.
    """
    rows = {tuple(int(v) for v in c): i for i, c in enumerate(fine)}
    found = []
    for k, tap in enumerate(taps):
        for out, c in enumerate(coarse):
            at = [s * int(v) + t - p for s, v, t, p in zip(stride, c[1:], tap, padding)]
            if extent is not None:
                at = [(a - lo) % n + lo for a, lo, n in zip(at, *extent)]
            row = rows.get((int(c[0]), *at))
            if row is not None:
                found.append((k, row, out))
    return found


def coarse_voxels(fine, taps, stride, padding):
    """Every coarse voxel that sees a fine one, sorted."""
    found = set()
    for c in fine:
        for tap in taps:
            at = [int(v) - t + p for v, t, p in zip(c[1:], tap, padding)]
            if all(a % s == 0 for a, s in zip(at, stride)):
                found.add((int(c[0]), *(a // s for a, s in zip(at, stride))))
    return sorted(found)


def fine_voxels(coarse, taps, stride, padding):
    """Every fine voxel that a coarse one sees, sorted."""
    return sorted(
        {
            (int(c[0]), *(s * int(v) + t - p for s, v, t, p in zip(stride, c[1:], tap, padding)))
            for c in coarse
            for tap in taps
        }
    )


def convolve(x, weight, edges_, num_out, groups=1, bias=None):
    """y[out] += x[in] @ weight[tap], group by group, in fp64."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    ci, co = weight.shape[1], weight.shape[2] // groups
    y = np.zeros((num_out, weight.shape[2]))
    for k, i, o in edges_:
        for g in range(groups):
            y[o, g * co : (g + 1) * co] += x[i, g * ci : (g + 1) * ci] @ weight[k][:, g * co : (g + 1) * co]
    return y if bias is None else y + np.asarray(bias, np.float64)


def input_grad(grad, weight, edges_, num_in, groups=1):
    """dx[in] += grad[out] @ weight[tap]^T."""
    grad, weight = np.asarray(grad, np.float64), np.asarray(weight, np.float64)
    ci, co = weight.shape[1], weight.shape[2] // groups
    dx = np.zeros((num_in, ci * groups))
    for k, i, o in edges_:
        for g in range(groups):
            dx[i, g * ci : (g + 1) * ci] += grad[o, g * co : (g + 1) * co] @ weight[k][:, g * co : (g + 1) * co].T
    return dx


def weight_grad(x, grad, edges_, num_taps, groups=1):
    """dw[tap] += x[in]^T grad[out]."""
    x, grad = np.asarray(x, np.float64), np.asarray(grad, np.float64)
    ci, co = x.shape[1] // groups, grad.shape[1] // groups
    dw = np.zeros((num_taps, ci, grad.shape[1]))
    for k, i, o in edges_:
        for g in range(groups):
            cols = slice(g * co, (g + 1) * co)
            dw[k][:, cols] += np.outer(x[i, g * ci : (g + 1) * ci], grad[o, cols])
    return dw


def integer_convolve(x, weight, edges_, num_out, groups=1, bias=None):
    """Sums of integer products in Python's integers; what 32 bits do not hold is an error."""
    x, weight = np.asarray(x, object), np.asarray(weight, object)
    each_in, each_out = weight.shape[1], weight.shape[2] // groups
    y = np.zeros((num_out, weight.shape[2]), object)
    if bias is not None:
        y += np.asarray(bias, object)
    for k, i, o in edges_:
        for g in range(groups):
            columns = slice(g * each_out, (g + 1) * each_out)
            y[o, columns] += x[i, g * each_in : (g + 1) * each_in] @ weight[k][:, columns]
    if any(not -(2**31) <= int(v) < 2**31 for v in y.flat):
        raise OverflowError("sums are past 32 bits")
    return y


def integer_rescale(sums, multiplier, shift, residual=None, residual_multiplier=0, slope=1 << 16, low=-127):
    """int8 values of sums: floor((sums * multiplier + residual * its multiplier) / 2^shift + 1/2), then the rest."""
    sums = np.asarray(sums, object)
    y = np.zeros(sums.shape, np.int8)
    for (o, c), total in np.ndenumerate(sums):
        total = int(total) * int(multiplier[c])
        if residual is not None:
            total += int(residual[o, c]) * residual_multiplier
        value = (2 * total + 2**shift) // 2 ** (shift + 1)
        if value < 0:
            value = (2 * value * slope + 2**16) // 2**17
        y[o, c] = min(max(value, low), 127)
    return y
