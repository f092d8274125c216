"""Random integer layers, each by every backend that is here, by one thread and by two, and by the oracle.

``python -m tests.fuzz integers --count 2000 --seed 0``. A case is drawn from the seed and its number alone. All answers
must be the oracle's bytes, and those for shuffled rows the same rows. Set TRITON_INTERPRET=1 for the GPU's kernel too;
on a card it runs there.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

import sparseconv as sc
from sparseconv.backends.base import Request
from sparseconv.backends.integers import Rescale
from sparseconv.backends.registry import BACKENDS, backend
from tests import oracle

CPU = ("llvm_implicit_gemm", "numpy_gather_scatter")
KINDS = ("submanifold", "submanifold", "full", "strided", "inverse", "generative", "given")


def draw(seed: int, number: int) -> dict[str, Any]:
    """A layer and its operands on the CPU."""
    rng = random.Random(f"{seed}/{number}")
    rank, groups = rng.choice((1, 2, 3, 3)), rng.choice((1, 1, 1, 2, 3))
    plan = _plan(rng, rank, groups)
    each_in, each_out = (rng.choice((1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 40)) for _ in range(2))
    g = torch.Generator().manual_seed(rng.randrange(2**31))

    def bytes_of(*shape: int) -> torch.Tensor:
        if rng.random() < 0.15:  # the largest sums there can be
            return torch.full(shape, rng.choice((127, -127)), dtype=torch.int8)
        return torch.randint(-127, 128, shape, generator=g, dtype=torch.int8)

    c_in, c_out = groups * each_in, groups * each_out
    x, weight = bytes_of(plan.num_in, c_in), bytes_of(plan.num_taps, each_in, c_out)
    if rng.random() < 0.5:
        x = x.abs()
    bias = torch.randint(-(2**20), 2**20, (c_out,), generator=g, dtype=torch.int32) if rng.random() < 0.5 else None
    rescale = residual = None
    if rng.random() < 0.8:
        shift = rng.randint(16, 62)
        most = min(2**31 - 1, 2**shift // rng.choice((1, 100, 10_000)))
        multiplier = torch.randint(0, most + 1, (c_out,), generator=g).int()
        if rng.random() < 0.2:
            multiplier.fill_(2**31 - 1)
        slope = rng.choice((1 << 16, 1 << 16, 0, rng.randint(0, 1 << 16)))
        low = 0 if slope == 0 else -127
        if rng.random() < 0.5:
            residual = bytes_of(plan.kernel_map.num_out, c_out)
        rescale = Rescale(multiplier, shift, rng.choice((0, rng.randrange(2**31), most)), slope, low)
    return {"plan": plan, "x": x, "weight": weight, "bias": bias, "rescale": rescale, "residual": residual}


def _plan(rng: random.Random, rank: int, groups: int) -> sc.ConvolutionPlan:
    kind, batch = rng.choice(KINDS), rng.randint(1, 2)
    rows = {
        tuple([rng.randrange(batch), *(rng.randint(-4, 4) for _ in range(rank))])
        for _ in range(rng.choice((0, 1, 6, 30)))
    }
    coords = torch.tensor(rng.sample(sorted(rows), len(rows)), dtype=torch.int32).reshape(-1, rank + 1)
    grid = sc.VoxelGrid(coords, batch)
    window = [rng.randint(1, 4 if rank < 3 else 3) for _ in range(rank)]
    options: dict[str, Any] = {"kernel_size": window, "dilation": rng.choice((1, 1, 2)), "groups": groups}
    if kind == "full":
        options["target"] = "full"
    if kind in ("strided", "inverse", "generative"):
        options["stride"] = rng.choice((2, 3))
    if kind == "given":
        options["target"] = grid.subset(torch.tensor([rng.random() < 0.5 for _ in range(len(grid))], dtype=torch.bool))
    if kind == "generative":
        return sc.ConvolutionPlan.transposed(grid, **options)
    plan = sc.ConvolutionPlan(grid, **options)
    return plan.transpose() if kind == "inverse" else plan


def run(seed: int, number: int) -> str:
    """What is wrong with a case, or nothing."""
    case = draw(seed, number)
    plan, rescale = case["plan"], case["rescale"]
    operands = [case[name] for name in ("x", "weight", "bias", "residual")]
    want = _want(case)
    for name in BACKENDS:
        device = "cuda" if name not in CPU and torch.cuda.is_available() else "cpu"
        there = plan.to(device)
        x, weight, bias, residual = (None if t is None else t.to(device) for t in operands)
        scaled = None if rescale is None else _on(rescale, device)
        channels = (x.shape[1], weight.shape[2])
        request = Request(there.kernel_map, there.device, torch.int8, *channels, there.groups)
        if backend(name).unsupported(request) is not None:
            continue
        for threads in (1, 2) if name in CPU else (1,):
            torch.set_num_threads(threads)
            options = {"rescale": scaled, "residual": residual}
            found = sc.quantization.convolve(_named(there, name), x, weight, bias, **options).cpu()
            if found.dtype != want.dtype or not torch.equal(found, want):
                return f"{number}: {name}, {threads} threads, {plan}"
    return _shuffled(case, want, number)


def _want(case: dict[str, Any]) -> torch.Tensor:
    plan, rescale, kernel_map = case["plan"], case["rescale"], case["plan"].kernel_map
    edges = list(zip(kernel_map.pair_taps.tolist(), kernel_map.in_rows.tolist(), kernel_map.out_rows.tolist()))
    bias = None if case["bias"] is None else case["bias"].tolist()
    operands = (case["x"].tolist(), case["weight"].tolist()) if kernel_map.num_in else (case["x"], case["weight"])
    sums = oracle.integer_convolve(*operands, edges, kernel_map.num_out, plan.groups, bias)
    if rescale is None:
        return torch.from_numpy(sums.astype(np.int32))
    residual = None if case["residual"] is None else case["residual"].numpy()
    numbers = (rescale.shift, residual, rescale.residual_multiplier, rescale.slope, rescale.low)
    return torch.from_numpy(oracle.integer_rescale(sums, rescale.multiplier.tolist(), *numbers))


def _shuffled(case: dict[str, Any], want: torch.Tensor, number: int) -> str:
    """The same layer over edges in another order of input rows."""
    kernel_map, plan = case["plan"].kernel_map, case["plan"]
    order = torch.randperm(kernel_map.num_in, generator=torch.Generator().manual_seed(number))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    pairs = (place[kernel_map.in_rows.long()].int(), kernel_map.out_rows, kernel_map.tap_offsets)
    sizes = kernel_map.num_in, kernel_map.num_out, kernel_map.num_taps
    other = plan.replaced(sc.KernelMap(*sizes, pairs=pairs))
    options = {"rescale": case["rescale"], "residual": case["residual"]}
    found = sc.quantization.convolve(other, case["x"][order], case["weight"], case["bias"], **options)
    return "" if torch.equal(found, want) else f"{number}: other bytes for shuffled rows, {plan}"


def _named(plan: sc.ConvolutionPlan, name: str) -> sc.ConvolutionPlan:
    return plan.replaced(plan.kernel_map, backend=name)


def _on(rescale: Rescale, device: str) -> Rescale:
    numbers = (rescale.shift, rescale.residual_multiplier, rescale.slope, rescale.low)
    return Rescale(rescale.multiplier.to(device), *numbers)


def main(count: int, seed: int) -> list[str]:
    """One line for each case that is wrong."""
    threads = torch.get_num_threads()
    try:
        return [wrong for wrong in (run(seed, number) for number in range(count)) if wrong]
    finally:
        torch.set_num_threads(threads)


if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import hasten

    hasten()
