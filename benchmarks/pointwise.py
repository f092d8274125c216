"""Pointwise kernels beside torch eager and torch.compile: device time, host cost, bytes moved.

    python -m benchmarks.pointwise --json results.json [--seconds 0.6] [--sweep]

Every case is checked against an fp64 computation before it is timed; one that fails is reported and not timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

import sparseconv.pointwise as pw
from sparseconv.pointwise.operations.arithmetic import add_tensors, copy, reversed_view
from sparseconv.pointwise.scalar import Deferred
from sparseconv.pointwise.scalars.activations import gelu


@pw.pointwise_dynamic(promotion_methods=[(0, 1, 2, "DEFAULT")])
@triton.jit
def gelu_chain(a, b, r):
    return gelu(a * b + r) + b


@pw.pointwise_dynamic(promotion_methods=[(0, 1, 2, "DEFAULT")])
@triton.jit
def erf_chain(a, b, r):
    x = a * b + r
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + b


@dataclass(frozen=True)
class Case:
    name: str
    ours: Callable[[], Any]
    eager: Callable[[], Any]
    exact: Callable[[], torch.Tensor]
    bytes: int
    must: float | None = None  # ms
    goal: float | None = None


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def chain(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(a * b + r) + b


def exact_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() + b.double()


def cases(size: int) -> list[Case]:
    found = []
    for power, dtype, must in (
        (22, torch.float16, None),
        (26, torch.float16, None),
        (28, torch.float16, None),
        (26, torch.float32, None),
    ):
        x, y = (torch.randn(2**power, device="cuda", dtype=dtype) for _ in range(2))
        name = f"add contiguous {str(dtype)[6:]} 2^{power}"
        volume = 3 * x.numel() * x.element_size()
        found.append(
            Case(
                name,
                partial(pw.add, x, y),
                partial(add, x, y),
                partial(exact_sum, x, y),
                volume,
                must,
            )
        )
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    row, column = a[:1].clone(), a[:, :1].clone()
    one = a.numel() * 2
    plane = {
        "a + b.T": (b.t(), 3 * one, 0.20, 0.13),
        "a + row": (row, 2 * one, 0.085, 0.07),
        "a + column": (column, 2 * one, 0.085, 0.07),
    }
    for name, (other, volume, must, goal) in plane.items():
        found.append(
            Case(
                name,
                partial(pw.add, a, other),
                partial(add, a, other),
                partial(exact_sum, a, other),
                volume,
                must,
                goal,
            )
        )
    found.append(
        Case(
            "a + b.flip(0)",
            lambda: add_tensors(a, reversed_view(b, [0])),
            lambda: a + b.flip(0),
            lambda: a.double() + b.flip(0).double(),
            3 * one,
            0.12,
            0.10,
        )
    )
    found.append(
        Case(
            "a + b.flip(1)",
            lambda: add_tensors(a, reversed_view(b, [1])),
            lambda: a + b.flip(1),
            lambda: a.double() + b.flip(1).double(),
            3 * one,
        )
    )
    found.append(
        Case(
            "gelu(a * b + row) + b",
            lambda: gelu_chain(a, b, row),
            lambda: chain(a, b, row),
            lambda: chain(a.double(), b.double(), row.double()),
            3 * one,
            0.125,
            0.105,
        )
    )
    found.append(
        Case(
            "the same, gelu written with erf",
            lambda: erf_chain(a, b, row),
            lambda: chain(a, b, row),
            lambda: chain(a.double(), b.double(), row.double()),
            3 * one,
        )
    )
    found.append(
        Case(
            "gelu(a * b + r) + b",
            lambda: gelu_chain(a, b, c),
            lambda: chain(a, b, c),
            lambda: chain(a.double(), b.double(), c.double()),
            4 * one,
        )
    )
    c = torch.randn_like(a)
    odd = torch.randn(1_000_001, 33, device="cuda", dtype=torch.float16)
    found.append(
        Case(
            "relu (1000001, 33)",
            lambda: pw.relu(odd),
            lambda: torch.relu(odd),
            lambda: odd.double().relu(),
            2 * odd.numel() * 2,
        )
    )
    item = torch.arange(8, device="cuda", dtype=torch.int32).repeat_interleave(size * size // 64 // 8)
    rows, scale, shift = a.view(-1, 64), *(torch.randn(8, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    found.append(
        Case(
            "batch_affine (N, 64)",
            lambda: pw.batch_affine(rows, item, scale, shift),
            lambda: rows * scale[item] + shift[item],
            lambda: rows.double() * scale[item].double() + shift[item].double(),
            2 * one,
        )
    )
    return found


def in_turns(calls: dict[str, Callable[[], Any]], seconds: float, spin: int = 1_500_000) -> dict[str, float]:
    """Median device time of each call; they take turns of ten, so that a drift of the card's clocks meets all.

    A kernel that spins for so many clocks ahead of a turn lets the host queue its calls before they run.
    """
    for call in calls.values():
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    until = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < until or len(next(iter(times.values()))) < 3:
        for name, call in calls.items():
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
            torch.cuda._sleep(spin)
            marks[0].record()
            for mark in marks[1:]:
                call()
                mark.record()
            torch.cuda.synchronize()
            times[name] += [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return {name: statistics.median(samples) for name, samples in times.items()}


def device_ms(call: Callable[[], Any], seconds: float) -> float:
    """Median device time of a call."""
    return in_turns({"": call}, seconds)[""]


def copy_tb_s(seconds: float) -> float:
    """The rate of a large copy, read and write counted."""
    big = torch.empty(2**29, device="cuda", dtype=torch.float16)
    target = torch.empty_like(big)
    return 2 * big.nbytes / device_ms(lambda: target.copy_(big), seconds) / 1e9


def host_us(call: Callable[[], Any], repeats: int = 2000) -> float:
    """Host time of a call whose kernel is small."""
    for _ in range(100):
        call()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats // 5):
            call()
        best = min(best, (time.perf_counter() - start) / (repeats // 5))
        torch.cuda.synchronize()
    return best * 1e6


def check(case: Case) -> float:
    """The largest error relative to the exact result, or to its rms where that is larger."""
    exact = case.exact()
    scale = torch.maximum(exact.abs(), exact.square().mean().sqrt())
    return ((case.ours().double() - exact).abs() / scale).max().item()


def facts() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
    }


def sweep(size: int, seconds: float) -> dict[str, Any]:
    """The same additions under other tiles."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    long, other = (torch.randn(2**28, device="cuda", dtype=torch.float16) for _ in range(2))
    operands = {
        "contiguous": (long, other),
        "a + b.T": (a, b.t()),
        "a + row": (a, b[:1]),
        "a + column": (a, b[:, :1]),
        "a + b.flip(0)": (a, reversed_view(b, [0])),
    }
    tiles: dict[str, list[tuple[int, int | None]]] = {"contiguous": [(e, None) for e in (512, 1024, 2048, 4096, 8192)]}
    tiles["a + b.T"] = [(2048, 32), (4096, 32), (4096, 64), (4096, 128), (8192, 64), (8192, 128), (16384, 128)]
    for name in ("a + row", "a + column", "a + b.flip(0)"):
        tiles[name] = [(e, c) for e in (1024, 2048, 4096) for c in (128, 256, 512, 1024) if c <= e]
    results: dict[str, Any] = {}
    for name, pair in operands.items():
        line = {}
        for elements, columns in tiles[name]:
            for warps in (4, 8, 16) if name == "a + b.T" else (4, 8):
                f = pw.pointwise_dynamic(
                    Deferred("sparseconv.pointwise.scalars.arithmetic", "add"),
                    is_tensor=[True, True, False],
                    promotion_methods=[(0, 1, "DEFAULT")],
                    defaults=(1,),
                    config=pw.Config(elements=elements, columns=columns, num_warps=warps),
                    name="add_sweep",
                )
                line[f"{elements}/{columns}/{warps}"] = device_ms(partial(f, *pair), seconds)
        best = sorted(line.items(), key=lambda item: item[1])
        print(
            f"{name:20}",
            "  ".join(f"{key} {ms:.4f}" for key, ms in best[:6]),
            " worst",
            f"{best[-1][0]} {best[-1][1]:.4f}",
        )
        results[name] = line
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=None)
    parser.add_argument("--seconds", type=float, default=0.6, help="for each way of each case")
    parser.add_argument("--compile-only", action="store_true", help="leave compiled kernels in the caches")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    seconds = 1e-3 if options.compile_only else options.seconds
    report: dict[str, Any] = {"facts": facts(), "cases": {}}
    report["copy_tb_s"] = copy_tb_s(seconds)
    print(f"copy {report['copy_tb_s']:.2f} TB/s")
    print(f"{'case':32}{'ours':>9}{'eager':>9}{'compile':>9}{'TB/s':>7}{'must':>8}{'goal':>8}  error")
    for case in cases(8192):
        error = check(case)
        line: dict[str, Any] = {"error": error, "bytes": case.bytes, "must_ms": case.must, "goal_ms": case.goal}
        report["cases"][case.name] = line
        if not error < 2e-3:
            print(f"{case.name:32} WRONG: error {error:.2e}, not timed")
            continue
        ways = {"ours_ms": case.ours, "eager_ms": case.eager}
        if not options.no_compile:
            ways["compile_ms"] = torch.compile(case.eager)
        line.update(in_turns(ways, seconds))
        line["tb_s"] = case.bytes / line["ours_ms"] / 1e9
        print(
            f"{case.name:32}{line['ours_ms']:9.4f}{line['eager_ms']:9.4f}{line.get('compile_ms', float('nan')):9.4f}"
            f"{line['tb_s']:7.2f}{case.must or 0:8.3f}{case.goal or 0:8.3f}  {error:.1e}"
        )
    x, y = (torch.randn(64, 64, device="cuda") for _ in range(2))
    z = torch.randn(64, 64, device="cuda", requires_grad=True)
    report["host_us"] = {
        "torch add": host_us(lambda: x + y),
        "add": host_us(lambda: pw.add(x, y)),
        "add transposed": host_us(lambda: pw.add(x, y.t())),
        "relu": host_us(lambda: pw.relu(x)),
        "relu with gradient": host_us(lambda: pw.relu(z)),
        "torch relu with gradient": host_us(lambda: torch.relu(z)),
        "add in place": host_us(lambda: pw.add(x, y, out=x)),
        "op": host_us(lambda: add_tensors.op(x, y, 1)),
        "a new geometry": _new_geometry_us(),
    }
    for name, us in report["host_us"].items():
        print(f"host {name:28}{us:8.2f} us")
    if options.sweep:
        report["sweep"] = sweep(8192, 0.03)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def _new_geometry_us() -> float:
    """Host time of a call with a shape never seen, its kernel compiled."""
    tensors = [torch.empty(1000 + 16 * i, 64, device="cuda") for i in range(301)]
    copy(tensors[0])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for x in tensors[1:]:
        copy(x)
    return (time.perf_counter() - start) / 300 * 1e6


if __name__ == "__main__":
    main()
