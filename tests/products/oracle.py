"""Slow, obvious and independent: every product from its raw (index1, index2, index_out, scale), term by term."""

from __future__ import annotations

import torch

#: the dense product of each operation, with any leading batch
DENSE = {
    "mul": lambda x, y: x * y,
    "outer": lambda x, y: x[..., :, None] * y[..., None, :],
    "inner": lambda x, y: (x * y).sum(-1),
    "vecmat": lambda x, y: (x[..., :, None] * y).sum(-2),
    "vecsca": lambda x, y: x * y[..., None],
    "scavec": lambda x, y: x[..., None] * y,
    "mat_t_vec": lambda x, y: (x * y[..., :, None]).sum(-2),
}

#: the dense ranks of the two inputs of each operation
RANKS = {
    "mul": (1, 1),
    "outer": (1, 1),
    "inner": (1, 1),
    "vecmat": (1, 2),
    "vecsca": (1, 0),
    "scavec": (0, 1),
    "mat_t_vec": (2, 1),
}


def product(name, x, y, triples, out_size, out_accumulated=False):
    """x (N, M1, dense...) or shared (M1, dense...), y likewise; triples of (index1, index2, index_out, scale)."""
    rank1, rank2 = RANKS[name]
    batched1, batched2 = x.dim() == rank1 + 2, y.dim() == rank2 + 2
    batch = x.shape[0] if batched1 else y.shape[0] if batched2 else 1
    xs = x if batched1 else x.expand(batch, *x.shape)
    ys = y if batched2 else y.expand(batch, *y.shape)
    empty = DENSE[name](xs.new_zeros(batch, *xs.shape[2:]), ys.new_zeros(batch, *ys.shape[2:]))
    empty = empty + 0 * (x.sum() + y.sum())  # without a single term, still a function of both
    rows = [empty for _ in range(out_size)]
    for i, j, m, s in triples:
        rows[m] = rows[m] + s * DENSE[name](xs[:, i], ys[:, j])
    out = torch.stack([empty, *rows], 1)[:, 1:]
    if not batched1 and not batched2:
        return out[0]
    return out.sum(0) if out_accumulated else out


def scale(x, pairs, out_size):
    """x (N, M, C) or (M, C); pairs a list of (index, index_out, scale)."""
    y = torch.ones(1, dtype=x.dtype)
    batched = x if x.dim() == 3 else x[None]
    out = product("vecsca", batched, y, [(i, 0, m, s) for i, m, s in pairs], out_size)
    return out if x.dim() == 3 else out[0]
