"""Calls of the operators of exported programs, by whoever registered them: Python, or the C++ library.

    python tests/export/operator_cases.py LIBRARY RESULTS [CASES]

runs them by the library, in a process without sparseconv, and writes the results.
"""

import random
import sys

import torch

ACTIVATIONS = [
    ("", []),
    ("relu", []),
    ("leaky_relu", [0.1]),
    ("elu", [0.7]),
    ("gelu", []),
    ("gelu_tanh", []),
    ("silu", []),
    ("sigmoid", []),
    ("tanh", []),
    ("hardswish", []),
    ("mish", []),
]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]


def plan_arguments(chance, rank):
    """Arguments of the operator ``plan`` behind source and target, any of those that a trace writes."""
    outputs = chance.choice(["same", "full", "full", "generative", "given", "within", "within generative"])
    kernel = [chance.randint(1, 3) for _ in range(rank)]
    stride = [1] * rank if outputs == "same" else [chance.randint(1, 3) for _ in range(rank)]
    dilation = [chance.randint(1, 2) for _ in range(rank)]
    padding = None if chance.random() < 0.5 else [chance.randint(0, 2) for _ in range(rank)]
    taps, shape, boundary, extent = [], [], chance.choice(["absent", "absent", "forbid", "periodic"]), []
    if outputs.startswith("within"):
        padding, boundary, shape = padding or [0] * rank, "absent", [chance.randint(3, 9) for _ in range(rank)]
    elif chance.random() < 0.3:
        taps = sorted({tuple(chance.randint(-2, 2) for _ in range(rank)) for _ in range(5)})
        taps, kernel, dilation, padding = [index for tap in taps for index in tap], None, [1] * rank, None
    if (outputs, boundary) in (("given", "forbid"), ("generative", "periodic")):  # which such voxels leave
        boundary = "absent"
    if boundary == "periodic":
        low = [chance.randint(-1, 0) * s for s in stride]
        extent = [*low, *(a + -(-(9 - a) // s) * s for a, s in zip(low, stride))]
    elif boundary == "forbid":
        extent = [-1] * rank + [9] * rank
    return kernel, taps, stride, dilation, padding, outputs, shape, boundary, extent, "auto"


def results(seed):
    """What all operators make of one random scene."""
    ops, chance = torch.ops.sparseconv, random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rank, items = chance.randint(1, 4), chance.randint(1, 3)
    sizes = torch.tensor([items, *[8] * rank])

    def voxels(rows):
        found = torch.unique((torch.rand(rows, rank + 1, generator=generator) * sizes).int(), dim=0)
        return found[torch.randperm(len(found), generator=generator)]

    def values(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    dtype, groups = chance.choice(DTYPES), chance.choice([1, 1, 2])
    arguments, activation = plan_arguments(chance, rank), chance.choice(ACTIVATIONS)
    coords = voxels(chance.choice([0, 1, 40, 120])).to(chance.choice([torch.int32, torch.int64]))
    grid = ops.grid(coords, items, [], [])
    given = arguments[5] == "given"
    coarse = [8 // s for s in arguments[2]]
    other = voxels(40)
    other = other[(other[:, 1:] < torch.tensor(coarse)).all(1)]
    plan = ops.plan(grid, ops.grid(other, items, [], []) if given else None, *arguments)
    target, reached = ops.target(plan, coords)
    back = ops.transposed(plan)
    taps = len(arguments[1]) // rank if arguments[1] else torch.tensor(arguments[0]).prod()
    x, weight = values(len(coords), 4), values(int(taps), 4 // groups, 6)
    bias, residual = (values(*n) if chance.random() < 0.5 else None for n in ((6,), (len(reached), 6)))
    y = ops.execute(plan, x, weight, bias, residual, reached, groups, *activation)
    turned = ops.execute(back, y, values(int(taps), 6, 3), None, None, coords, 1, "", [])
    high, winners = ops.max_pool(plan, x, reached)
    kept, near = ops.subset(grid, x[:, 0] > 0, coords)
    return [
        *(reached, y, turned, high, winners, near),
        *(ops.pool(plan, x, reached, how) for how in ("sum", "average", "average_of_taps")),
        *(ops.max_unpool(back, high, winners, coords), ops.lookup(grid, reached), ops.lookup(target, coords)),
        *(ops.pool_items(grid, x, items, how) for how in ("sum", "average", "max")),
        *(ops.standardise_items(grid, x, 2, 1e-5), ops.to_dense(grid, x, items, [-1] * rank, [10] * rank)),
        *(ops.lookup(kept, coords), ops.pool_items(kept, x[x[:, 0] > 0], items, "max")),
    ]


def wrong():
    """Calls that must be refused, by name."""
    ops = torch.ops.sparseconv
    coords = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 4, 4, 4]], dtype=torch.int32)
    grid = ops.grid(coords, 1, [], [])
    shape = ([3] * 3, [], [1] * 3, [1] * 3, None)
    plan = ops.plan(grid, None, *shape, "same", [], "absent", [], "auto")
    x, weight = torch.randn(3, 4), torch.randn(27, 4, 6)
    none = (None, None, coords, 1, "", [])
    far = torch.tensor([[0, -(2**31), 0, 0], [0, 0, -(2**31), 2**31 - 2], [0, 2**31 - 2, 2**31 - 2, 0]])
    return {
        "same voxel": lambda: ops.grid(coords[[0, 1, 0]], 1, [], []),
        "batch item": lambda: ops.grid(coords + 1, 1, [], []),
        "negative item": lambda: ops.grid(coords - 1, 1, [], []),
        "floats": lambda: ops.grid(coords.float(), 1, [], []),
        "columns": lambda: ops.grid(coords[:, :1], 1, [], []),
        "past 32 bits": lambda: ops.grid(coords.long() + torch.tensor([0, 2**31, 0, 0]), 1, [], []),
        "too many cells": lambda: ops.grid(far, 1, [], []),
        "rows of x": lambda: ops.execute(plan, x[:2], weight, *none),
        "no rows of x": lambda: ops.execute(plan, x[:0], weight, *none),
        "axes of x": lambda: ops.execute(plan, x[0], weight, *none),
        "integer x": lambda: ops.execute(plan, x.int(), weight.int(), *none),
        "channels": lambda: ops.execute(plan, x[:, :3], weight, *none),
        "taps": lambda: ops.execute(plan, x, weight[:26], *none),
        "dtype of the weight": lambda: ops.execute(plan, x, weight.double(), *none),
        "dtype of the bias": lambda: ops.execute(plan, x, weight, torch.zeros(6).double(), *none[1:]),
        "bias": lambda: ops.execute(plan, x, weight, torch.zeros(5), *none[1:]),
        "residual": lambda: ops.execute(plan, x, weight, None, torch.zeros(2, 6), *none[2:]),
        "groups": lambda: ops.execute(plan, x, weight, None, None, coords, 3, "", []),
        "no groups": lambda: ops.execute(plan, x, weight, None, None, coords, 0, "", []),
        "activation": lambda: ops.execute(plan, x, weight, None, None, coords, 1, "banana", []),
        "pool": lambda: ops.pool(plan, x, coords, "banana"),
        "rows of a pool": lambda: ops.pool(plan, x[:2], coords, "sum"),
        "rows of a maximum": lambda: ops.max_pool(plan, x[:2], coords),
        "winners": lambda: ops.max_unpool(plan, x, torch.zeros(2, 4, dtype=torch.int16), coords),
        "floating winners": lambda: ops.max_unpool(plan, x, torch.zeros(3, 4), coords),
        "items": lambda: ops.pool_items(grid, x, 1, "banana"),
        "rows of items": lambda: ops.pool_items(grid, x[:2], 1, "sum"),
        "groups of a norm": lambda: ops.standardise_items(grid, x, 3, 1e-5),
        "no groups of a norm": lambda: ops.standardise_items(grid, x, 0, 1e-5),
        "box": lambda: ops.to_dense(grid, x, 1, [0] * 3, [3] * 3),
        "axes of a box": lambda: ops.to_dense(grid, x, 1, [0] * 2, [9] * 2),
        "mask": lambda: ops.subset(grid, torch.ones(2, dtype=torch.bool), coords),
        "mask of integers": lambda: ops.subset(grid, torch.ones(3, dtype=torch.int32), coords),
        "lookup": lambda: ops.lookup(grid, coords[:, :3]),
        "plan for a grid": lambda: ops.lookup(plan, coords),
        "grid for a plan": lambda: ops.pool(grid, x, coords, "sum"),
        "another number": lambda: ops.lookup(grid + 1, coords),
        "gone": lambda: ops.lookup(ops.grid(coords, 1, [], []).clone(), coords),
        "no number": lambda: ops.lookup(grid.float(), coords),
        "boundary": lambda: ops.plan(grid, None, *shape, "same", [], "negative", [], "auto"),
        "torus": lambda: ops.plan(grid, None, *shape, "same", [], "periodic", [], "auto"),
        "uneven torus": lambda: ops.plan(
            grid, None, [3] * 3, [], [2] * 3, [1] * 3, None, "full", [], "periodic", [0] * 3 + [5] * 3, "auto"
        ),
        "small torus": lambda: ops.plan(grid, None, *shape, "same", [], "periodic", [0] * 3 + [3] * 3, "auto"),
        "stride": lambda: ops.plan(grid, None, [3] * 3, [], [0] * 3, [1] * 3, None, "full", [], "absent", [], "auto"),
        "axes of a stride": lambda: ops.plan(
            grid, None, [3] * 3, [], [1] * 2, [1] * 3, None, "full", [], "absent", [], "auto"
        ),
        "most taps": lambda: ops.plan(
            grid, None, [99] * 3, [], [1] * 3, [1] * 3, None, "same", [], "absent", [], "auto"
        ),
        "leaves the extent": lambda: ops.plan(
            grid, ops.grid(coords, 1, [], []), *shape, "given", [], "forbid", [0] * 3 + [3] * 3, "auto"
        ),
        "unbounded": lambda: ops.plan(grid, None, *shape, "generative", [], "forbid", [], "auto"),
    }


def refused():
    """The names of those that raise an error."""
    found = []
    for name, call in wrong().items():
        try:
            call()
        except (ValueError, TypeError, RuntimeError):
            found.append(name)
    return found


if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.ops.load_library(sys.argv[1])
    assert "sparseconv" not in sys.modules
    cases = [results(seed) for seed in range(int(sys.argv[3]))] if len(sys.argv) > 3 else []
    torch.save((cases, refused()), sys.argv[2])
