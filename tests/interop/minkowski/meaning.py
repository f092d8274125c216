"""What MinkowskiEngine's layers mean, in loops: in = out + tap * dilation * tensor stride of the finer side."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from tests import oracle


def cube(kernel):
    """Taps with the first axis fastest; odd axes centred, even ones from 0."""
    ranges = [range(-(k // 2), k // 2 + 1) if k % 2 else range(k) for k in kernel]
    return [tap[::-1] for tap in itertools.product(*reversed(ranges))]


def cross(kernel):
    """The centre; then each axis in turn, 1 .. r and -r .. -1."""
    taps = [(0,) * len(kernel)]
    for axis, k in enumerate(kernel):
        for move in [*range(1, k // 2 + 1), *range(-(k // 2), 0)]:
            taps.append(tuple(move * (i == axis) for i in range(len(kernel))))
    return taps


def edges(fine, coarse, taps, step):
    """(tap, fine row, coarse row); ``step`` is the coordinate distance of neighbouring taps on each axis."""
    moved = [tuple(t * s for t, s in zip(tap, step)) for tap in taps]
    ones, zeros = (1,) * len(step), (0,) * len(step)
    return oracle.edges(np.asarray(fine), np.asarray(coarse), moved, ones, zeros)


def strided(coords, stride):
    """The voxels floor(c / stride) * stride."""
    return {(int(c[0]), *(math.floor(int(v) / s) * s for v, s in zip(c[1:], stride))) for c in coords}


def as_set(coords):
    rows = [tuple(row) for row in coords.tolist()]
    assert len(set(rows)) == len(rows)
    return set(rows)


def cloud(rank=3, points=60, extent=5, batch=2, stride=1, channels=3, seed=0):
    """Features (N, C) fp64 and distinct coordinates (N, 1+D), negative ones among them, multiples of ``stride``."""
    gen = torch.Generator().manual_seed(seed)
    coords = torch.randint(-extent, extent, (points, rank), generator=gen) * torch.as_tensor(stride)
    items = torch.randint(0, batch, (points, 1), generator=gen)
    items[0] = batch - 1
    coords = torch.unique(torch.cat([items, coords], 1), dim=0)
    coords = coords[torch.randperm(len(coords), generator=gen)].int()
    return torch.randn(len(coords), channels, generator=gen, dtype=torch.float64), coords


def check_convolution(layer, x, y, found, transposed=False):
    """Values and all three gradients of y = layer(x) are those of the edges ``found``, fine to coarse."""
    pairs = [(k, o, i) for k, i, o in found] if transposed else found
    features, kernel = x.F.detach().numpy(), layer.kernel.detach()
    weight = (kernel if kernel.ndim == 3 else kernel[None]).numpy()
    bias = None if layer.bias is None else layer.bias.detach().numpy()[0]
    wanted = oracle.convolve(features, weight, pairs, len(y), bias=bias)
    assert np.allclose(y.F.detach().numpy(), wanted, atol=1e-12)
    grad = torch.randn(y.F.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = [x.F, layer.kernel, *([] if bias is None else [layer.bias])]
    got = torch.autograd.grad(y.F, parameters, grad, retain_graph=True)
    assert np.allclose(got[0].numpy(), oracle.input_grad(grad.numpy(), weight, pairs, len(x)), atol=1e-12)
    wanted = oracle.weight_grad(features, grad.numpy(), pairs, len(weight))
    assert np.allclose(got[1].numpy().reshape(weight.shape), wanted, atol=1e-12)
    if bias is not None:
        assert np.allclose(got[2].numpy(), grad.numpy().sum(0, keepdims=True), atol=1e-12)
