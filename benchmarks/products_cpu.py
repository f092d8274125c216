"""Times the products on a CPU beside the plain torch formulation: gather, multiply, ``index_add``.

    python -m benchmarks.products_cpu [--threads 2] [--rounds 9] [--only REGEX] [--json FILE]

Every result and both its gradients are compared with the plain formulation in fp64 before anything is timed. Then the
two take turns, so that a disturbance of the machine meets both. *Step* is forward and every gradient.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu import Times, preemptions, summary
from benchmarks.layers.machine import machine
from examples.equivariant_tensor_product import couple
from sparseconv import products
from sparseconv.products import sparse_product_infos, sparse_scale, sparse_scale_infos

#: the dense axes of both inputs and of the result of each product
AXES = {
    "mul": ("c", "c", "c"),
    "outer": ("a", "b", "ab"),
    "inner": ("c", "c", ""),
    "vecmat": ("a", "ab", "b"),
    "vecsca": ("c", "", "c"),
    "scavec": ("", "c", "c"),
    "mat_t_vec": ("ab", "a", "b"),
}


@dataclass
class Case:
    """Two ways to the same result, and what both are differentiated by."""

    name: str
    ours: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]


def take_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Least and median milliseconds of each call and how many counted, after one round that does not.

    With one thread the clock is the processor time, which waiting for others does not lengthen.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    spent: dict[str, list[tuple[bool, float]]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            before, start = preemptions(), clock()
            call()
            taken = 1e3 * (clock() - start)
            spent[name].append((preemptions() == before, taken))
    return {name: summary(runs[1:]) for name, runs in spent.items()}


def multiply(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The dense product of gathered rows as one writes it in torch."""
    if name == "mul":
        return x * y
    if name == "outer":
        return x[..., :, None] * y[..., None, :]
    if name == "inner":
        return (x * y).sum(-1)
    if name == "vecsca":
        return x * y[..., None]
    if name == "scavec":
        return x[..., None] * y
    vector, matrix = (x, y) if name == "vecmat" else (y, x)
    return torch.matmul(vector[..., None, :], matrix)[..., 0, :]


def product_case(label: str, name: str, x: torch.Tensor, y: torch.Tensor, columns: Any, rows: int) -> Case:
    """A product of ``columns`` (index1, index2, index_out, scale) onto ``rows`` rows."""
    index1, index2, index_out, scale = (torch.as_tensor(column) for column in columns)
    axis1, axis2 = x.dim() - 1 - len(AXES[name][0]), y.dim() - 1 - len(AXES[name][1])
    axis, dense = max(axis1, axis2), len(AXES[name][2])
    infos = sparse_product_infos(index1, index2, index_out, scale, rows, x.shape[axis1], y.shape[axis2])

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        terms = multiply(name, x.index_select(axis1, index1), y.index_select(axis2, index2))
        terms = terms * scale.to(x.dtype).view(-1, *[1] * dense)
        shape = (*terms.shape[:axis], rows, *terms.shape[axis + 1 :])
        return terms.new_zeros(shape).index_add(axis, index_out, terms)

    call = getattr(products, f"sparse_{name}")
    return Case(f"{label}: {name}", lambda x, y: call(x, y, *infos), plain, (x, y))


def scale_case(
    label: str, x: torch.Tensor, index: torch.Tensor, index_out: torch.Tensor, scale: torch.Tensor | None, rows: int
) -> Case:
    """A scaled sum; its plain formulation neither gathers rows in order nor multiplies by ones."""
    infos = sparse_scale_infos(index, index_out, scale, rows, x.shape[-2])
    in_order = torch.equal(index, torch.arange(x.shape[-2]))

    def plain(x: torch.Tensor) -> torch.Tensor:
        terms = x if in_order else x.index_select(-2, index)
        terms = terms if scale is None else terms * scale.to(x.dtype)[:, None]
        return terms.new_zeros(*x.shape[:-2], rows, x.shape[-1]).index_add(x.dim() - 2, index_out, terms)

    return Case(f"{label}: scale", lambda x: sparse_scale(x, *infos), plain, (x,))


def cases() -> Iterator[Case]:
    """A graph without a batch, a small structure with one, matrices shared by a batch, long segments, points."""
    generator = torch.Generator().manual_seed(0)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def rows(size: int, terms: int) -> torch.Tensor:
        return torch.randint(size, (terms,), generator=generator)

    nodes, edges = 20_000, 200_000
    ends = rows(nodes, edges), rows(nodes, edges), rows(nodes, edges), real(edges)
    kinds = rows(27, edges)
    label = "graph"
    for name, width in (("mul", 64), ("inner", 64), ("outer", 16)):
        yield product_case(label, name, real(nodes, width), real(nodes, width), ends, nodes)
    own = torch.arange(edges)
    yield product_case(label, "vecsca", real(nodes, 64), real(edges), (ends[0], own, *ends[2:]), nodes)
    yield product_case(label, "scavec", real(edges), real(nodes, 64), (own, ends[1], *ends[2:]), nodes)
    for width, some in ((16, 200_000), (32, 100_000), (64, 40_000)):
        x, w = real(nodes, width), real(27, width, width)
        starts, ways, *rest = (column[:some] for column in (ends[0], kinds, *ends[2:]))
        yield product_case(f"graph, C {width}", "vecmat", x, w, (starts, ways, *rest), nodes)
        yield product_case(f"graph, C {width}", "mat_t_vec", w, x, (ways, starts, *rest), nodes)
    long = ends[0], ends[1], kinds, ends[3]
    yield product_case("27 long segments", "outer", real(nodes, 32), real(nodes, 32), long, 27)
    yield product_case("27 long segments", "mul", real(nodes, 64), real(nodes, 64), long, 27)
    paths = couple(((0, 1), (1, -1), (2, 1)), ((0, 1), (1, -1), (2, 1)), ((0, 1), (1, -1), (2, 1)))
    coupled = [torch.as_tensor(c) for c in (paths.index1, paths.index2, paths.index_out)]
    scale = torch.as_tensor(paths.scale, dtype=torch.float32)
    first, second, out = coupled
    label, batch, width = "tensor product", 5000, 64
    yield product_case(label, "vecsca", real(batch, 9, width), real(batch, 9), (first, second, out, scale), 35)
    yield product_case(label, "scavec", real(batch, 9), real(batch, 9, width), (second, first, out, scale), 35)
    yield product_case(label, "inner", real(batch, 35, width), real(batch, 9, width), (out, first, second, scale), 9)
    yield product_case(label, "mul", real(batch, 9, width), real(batch, 9, width), (first, second, out, scale), 35)
    yield product_case(label, "outer", real(500, 9, 16), real(500, 9, 16), (first, second, out, scale), 35)
    each = torch.arange(35), torch.as_tensor(paths.path_of_row), torch.as_tensor(paths.row_of_row), real(35)
    yield product_case("mixing", "vecmat", real(2000, 35, 64), real(11, 64, 32), each, 9)
    turned = each[1], each[0], *each[2:]
    yield product_case("mixing", "mat_t_vec", real(11, 64, 32), real(2000, 35, 64), turned, 9)
    own_matrices = torch.arange(35), torch.arange(35) % 4, each[2], each[3]
    yield product_case("matrix an item", "vecmat", real(400, 35, 32), real(400, 4, 32, 32), own_matrices, 9)
    nodes, edges = 50_000, 800_000
    for width in (16, 64):
        sparse = rows(nodes, edges), rows(nodes, edges), real(edges)
        yield scale_case(f"sparse matrix, C {width}", real(nodes, width), *sparse, nodes)
    points, voxels = 300_000, 53_686
    for width in (4, 16, 64):
        groups = rows(voxels, points)
        own = torch.arange(points)
        yield scale_case(f"sum of points, C {width}", real(points, width), own, groups, None, voxels)
        share = 1 / torch.bincount(groups, minlength=voxels)[groups]
        yield scale_case(f"mean of points, C {width}", real(points, width), own, groups, share, voxels)
    groups = rows(voxels, points).sort().values
    yield scale_case("sum of sorted points, C 16", real(points, 16), torch.arange(points), groups, None, voxels)
    few = rows(20, 60), rows(12, 60), real(60)
    yield scale_case("a batch of 5000, C 32", real(5000, 20, 32), *few, 12)


def gradients(call: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], seed: torch.Tensor) -> Any:
    return torch.autograd.grad(call(*inputs), inputs, seed)


def check(case: Case) -> float:
    """The largest error of the result and of each gradient, relative to their norm."""
    inputs = [t.detach().requires_grad_() for t in case.inputs]
    wide = [t.detach().double().requires_grad_() for t in case.inputs]
    got, want = case.ours(*inputs), case.plain(*wide)
    seed = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    pairs = [
        (got, want),
        *zip(gradients(case.ours, tuple(inputs), seed), gradients(case.plain, tuple(wide), seed.double())),
    ]
    return max(float((a.double() - b).detach().norm() / b.detach().norm().clamp_min(1e-30)) for a, b in pairs)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Least and median milliseconds of forward and step, both ways, and how many times as fast ours is."""
    error = check(case)
    if not error < 1e-5:
        raise SystemExit(f"{case.name} is wrong: relative error {error:.2e}; nothing was timed")
    inputs = tuple(t.detach().requires_grad_() for t in case.inputs)
    with torch.no_grad():
        seed = torch.randn_like(case.ours(*case.inputs))
        found = take_turns({"ours": lambda: case.ours(*case.inputs), "plain": lambda: case.plain(*case.inputs)}, rounds)
    steps = take_turns(
        {
            "ours": lambda: gradients(case.ours, inputs, seed),
            "plain": lambda: gradients(case.plain, inputs, seed),
        },
        rounds,
    )
    row: dict[str, Any] = {"error": error}
    for name, times in (("forward", found), ("step", steps)):
        row[name] = {who: {"least_ms": t[0], "median_ms": t[1], "undisturbed": t[2]} for who, t in times.items()}
        row[name]["times_as_fast"] = times["plain"][1] / times["ours"][1]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"machine": {**machine("cpu"), "threads": options.threads}, "cases": {}}
    print(f"{'':36}{'forward':>9}{'plain':>9}{'':7}{'step':>9}{'plain':>9}")
    for case in cases():
        if not re.search(options.only, case.name):
            continue
        report["cases"][case.name] = row = measure(case, options.rounds)
        parts = [
            f"{row[w]['ours']['median_ms']:9.2f}{row[w]['plain']['median_ms']:9.2f}{row[w]['times_as_fast']:6.1f}x"
            for w in ("forward", "step")
        ]
        print(f"{case.name:36}" + "".join(parts), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
