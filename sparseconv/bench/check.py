"""The judge: submanifold convolution of an odd cube in double precision on sampled rows, found by its own search and
nobody's kernels.

y[p] = sum over taps k of x[p + offset(k)] @ w[k]        dx[p] = sum over k of g[p - offset(k)] @ w[k]^T
dw[k] = sum over p of x[p + offset(k)]^T g[p]            offset(k) in {-r, .., r}^3, the last axis fastest
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch


def offsets(kernel: int) -> tuple[tuple[int, int, int], ...]:
    """The taps of an odd cube around 0, the last axis fastest.

    >>> offsets(3)[:2], offsets(3)[13], len(offsets(5))
    (((-1, -1, -1), (-1, -1, 0)), (0, 0, 0), 125)
    """
    reach = kernel // 2
    span = range(-reach, reach + 1)
    return tuple(itertools.product(span, span, span))


#: largest |difference| / |reference| in the Frobenius norm, and largest element over the reference's rms. Rounding the
#: result to a half costs 2^-11 / sqrt(3); ``slack`` times that for peers that round partial sums, too.
LIMITS = {
    "fp64": (1e-12, 1e-10),
    "fp32": (1e-4, 2e-3),
    "tf32": (2e-3, 3e-2),
    "fp16": (3e-3, 5e-2),
    "bf16": (1e-2, 2e-1),
}
HALVES = ("fp16", "bf16")
SAMPLED_ROWS, SAMPLED_CHANNELS = 2000, 16


class Neighbours:
    """Rows of neighboring voxels by binary search in sorted keys; coords (N, 4), one batch item; an odd kernel."""

    def __init__(self, coords: torch.Tensor, kernel: int = 3) -> None:
        self.offsets, reach = offsets(kernel), kernel // 2
        c = coords[:, 1:].long()
        c = c - c.amin(0) + reach
        self._size = c.amax(0) + 1 + reach
        self._key = (c[:, 0] * self._size[1] + c[:, 1]) * self._size[2] + c[:, 2]
        self._sorted, self._rows = torch.sort(self._key)

    def rows(self, offset: tuple[int, int, int], of: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """Row of p + offset for the rows p in ``of``; -1 where there is no voxel."""
        step = (offset[0] * self._size[1] + offset[1]) * self._size[2] + offset[2]
        wanted = self._key[of] + step
        at = torch.searchsorted(self._sorted, wanted).clamp_(max=len(self._sorted) - 1)
        return torch.where(self._sorted[at] == wanted, self._rows[at], -1)

    def count_pairs(self) -> int:
        """P: the taps before the center, twice, and the center."""
        half = sum(int((self.rows(offset) >= 0).sum()) for offset in self.offsets[: len(self.offsets) // 2])
        return 2 * half + len(self._key)


@dataclass
class Verdict:
    """Errors of a result by quantity, and what is wrong with them if anything is."""

    errors: dict[str, float]
    fault: str | None


def judge(
    neighbours: Neighbours,
    x: torch.Tensor,
    weight: torch.Tensor,
    grad: torch.Tensor,
    results: dict[str, torch.Tensor],
    dtype: str,
    slack: float = 1.0,
) -> Verdict:
    """Compare ``results`` (forward (N, C_out), input_grad (N, C_in), weight_grad (K, C_in, C_out)) with the
    reference.

    x (N, C_in), weight (K, C_in, C_out) and grad (N, C_out) are the rounded operands; only quantities present are
    judged.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(x), generator=generator)[:SAMPLED_ROWS].to(x.device)
    w = weight.double()
    wanted: dict[str, torch.Tensor] = {}
    got: dict[str, torch.Tensor] = {}
    if "forward" in results:
        wanted["forward"] = x.new_zeros(len(rows), w.shape[2], dtype=torch.float64)
        for k, offset in enumerate(neighbours.offsets):
            wanted["forward"] += _gather(x, neighbours.rows(offset, rows)) @ w[k]
        got["forward"] = results["forward"][rows]
    if "input_grad" in results:
        wanted["input_grad"] = x.new_zeros(len(rows), w.shape[1], dtype=torch.float64)
        for k, (a, b, c) in enumerate(neighbours.offsets):
            wanted["input_grad"] += _gather(grad, neighbours.rows((-a, -b, -c), rows)) @ w[k].t()
        got["input_grad"] = results["input_grad"][rows]
    if "weight_grad" in results:
        channels = torch.randperm(x.shape[1], generator=generator)[:SAMPLED_CHANNELS].to(x.device)
        # the center, a corner and two more
        taps = sorted({len(w) // 2, 0, len(w) // 5, 5 * len(w) // 6})
        products = [_product(x, grad, neighbours.rows(neighbours.offsets[k]), channels) for k in taps]
        wanted["weight_grad"] = torch.stack(products)
        got["weight_grad"] = results["weight_grad"][taps][:, channels]
    norm_limit, element_limit = (limit * (slack if dtype in HALVES else 1.0) for limit in LIMITS[dtype])
    errors, fault = {}, None
    for name, want in wanted.items():
        found = got[name].double()
        difference = found - want
        scale = want.square().mean().sqrt().clamp(min=1e-30)
        error = float(difference.square().mean().sqrt() / scale)
        worst = float(difference.abs().max() / scale)
        errors[name] = error
        if not (error <= norm_limit and worst <= element_limit):
            fault = fault or (
                f"{name} is wrong: relative error {error:.2g} (limit {norm_limit:g}), "
                f"worst element {worst:.2g} of the rms (limit {element_limit:g})"
            )
    return Verdict(errors, fault)


def _gather(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x[rows.clamp(min=0)].double() * (rows >= 0)[:, None]


def _product(x: torch.Tensor, grad: torch.Tensor, inputs: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """x[inputs][:, channels]^T grad over the rows that have an input, in pieces that fit any GPU."""
    outs = (inputs >= 0).nonzero()[:, 0]
    ins, total = inputs[outs], torch.zeros(len(channels), grad.shape[1], dtype=torch.float64, device=x.device)
    for start in range(0, len(outs), 1 << 20):
        part = slice(start, start + (1 << 20))
        total += x[ins[part]][:, channels].double().t() @ grad[outs[part]].double()
    return total
