"""SHA-256 of integer layers of every kind: the same on every device, backend and number of threads.

    python -m benchmarks.integer --against benchmarks/results/integer_hashes.json [--device cuda|cpu]
        [--backend NAME] [--threads N] [--json FILE] [--time]

A hash is over the voxels and the features of a result, its rows in lexicographic order. Every case runs for its rows as
they are and shuffled; both must agree. Numbers come from numpy's frozen generator, so that no machine draws others.
``--backend`` holds every plan to one backend; with TRITON_INTERPRET=1 and ``--backend triton_implicit_gemm`` the GPU's
kernel runs in Triton's interpreter. ``--against`` exits with 1 where a hash differs. ``--time`` prints milliseconds of
int8 and of fp32 (on a card also of fp16 and float8) layers instead, the least of several
runs in turns; on a CPU the time that all threads computed (run it with OMP_WAIT_POLICY=passive).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.backends.float8 import FLOAT8, Float8Rescale
from sparseconv.backends.registry import backend as backend_named
from sparseconv.quantization import Rescale, convolve
from sparseconv.quantization.layers import Affine, Combine, IntegerConvolution, MaxPooling, SumPooling

Case = Callable[[sc.SparseTensor, "Numbers"], sc.SparseTensor]


class Numbers:
    """Integers of a case, the same on every machine."""

    def __init__(self, name: str, device: torch.device, backend: str) -> None:
        self.state = np.random.RandomState(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
        self.device, self.backend = device, backend

    def draw(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        """From ``low`` up to ``high``, both included."""
        values = self.state.randint(low, high + 1, shape, dtype=np.int64)
        return torch.from_numpy(values).to(dtype).to(self.device)

    def rescale(self, channels: int, sums: int, **options: Any) -> Rescale:
        """One that brings ``sums`` products to int8."""
        most = 2**23 // int(sums**0.5)
        return Rescale(self.draw(most // 2, most, channels, dtype=torch.int32), 30, **options)


def layer(kind: type, *sizes: Any, c_in: int = 16, c_out: int = 24, act: float | None = None, residual: bool = False,
          rescales: bool = True, **options: Any) -> Case:  # fmt: skip
    """A convolution module as an integer layer."""

    def run(x: sc.SparseTensor, numbers: Numbers) -> sc.SparseTensor:
        module = kind(c_in, c_out, *sizes, backend=numbers.backend, **options)
        given: tuple[Any, ...] = ()
        if kind is nn.InverseConv:
            given, x = (x,), _coarse(x, numbers, c_in, options, sizes)
        plan = module.plan(x, *given)
        taps, each = module.weight.shape[0], module.weight.shape[1]
        weight = numbers.draw(-127, 127, taps, each, c_out)
        bias = numbers.draw(-(2**14), 2**14, c_out, dtype=torch.int32)
        low, slope = (0, 0) if act == 0 else (-127, round((1 if act is None else act) * 65536))
        more = 2**29 + 12_345 if residual else 0
        rescale = numbers.rescale(c_out, 4 * each, slope=slope, low=low, residual_multiplier=more)
        other = by_voxel(plan.target, c_out) if residual else None
        y = convolve(plan, x.features, weight, bias, rescale=rescale if rescales else None, residual=other)
        return sc.SparseTensor(plan.target, y)

    return run


def _coarse(x: sc.SparseTensor, numbers: Numbers, c: int, options: dict[str, Any], sizes: Any) -> sc.SparseTensor:
    down = nn.Conv(c, c, *sizes, backend=numbers.backend, **options).plan(x)
    return sc.SparseTensor(down.target, by_voxel(down.target, c))


def by_voxel(grid: sc.VoxelGrid, channels: int) -> torch.Tensor:
    """int8 features that follow from a voxel's coordinates, whatever its row."""
    primes = torch.tensor([73856093, 19349663, 83492791, 49979687, 67867967][: grid.coords.shape[1]])
    key = (grid.coords.long() * primes.to(grid.device)).sum(1)[:, None]
    mixed = (key * 2654435761 + torch.arange(channels, device=grid.device) * 40503) & (2**31 - 1)
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 & (2**31 - 1)
    return ((mixed >> 11) % 255 - 127).to(torch.int8)


def pool(kind: type, step: type, **options: Any) -> Case:
    """A pooling layer."""

    def run(x: sc.SparseTensor, numbers: Numbers) -> sc.SparseTensor:
        module = kind(2, backend=numbers.backend, **options)
        values: dict[int, Any] = {0: x}
        where: dict[str, int] = {}
        if kind is nn.Unpool:
            values = {0: _coarse(x, numbers, 16, {"stride": 2}, (2,)), 1: x}
            where = {"onto": 1}
        if step is MaxPooling:
            return MaxPooling("", [0], 2, module, where).run(values)
        each = [2**20 // max(1, n if kind is nn.AvgPool else 2) for n in range(module.geometry.num_taps + 1)]
        multipliers = torch.tensor(each, dtype=torch.int32, device=x.device)
        return SumPooling("", [0], 2, module, where, multipliers, 20).run(values)

    return run


def combine(multipliers: tuple[int, ...], slope: int = 1 << 16, low: int = -127, concatenates: bool = False) -> Case:
    """Sums and concatenations of values on different scales, or an activation by itself."""

    def run(x: sc.SparseTensor, numbers: Numbers) -> sc.SparseTensor:
        others = [x.with_features(by_voxel(x.grid, 16 + k)[:, k:]) for k in range(1, len(multipliers))]
        step = Combine("", range(len(multipliers)), 9, multipliers, 18, slope, low, concatenates)
        return step.run(dict(enumerate([x, *others])))

    return run


def norm(x: sc.SparseTensor, numbers: Numbers) -> sc.SparseTensor:
    weight = numbers.draw(-32767, 32767, 16, dtype=torch.int32)
    bias = numbers.draw(-(2**20), 2**20, 16, dtype=torch.int32)
    return Affine("", [0], 1, weight, bias, Rescale(numbers.draw(1, 2**20, 16, dtype=torch.int32), 34)).run({0: x})


def linear(x: sc.SparseTensor, numbers: Numbers) -> sc.SparseTensor:
    weight, bias = numbers.draw(-127, 127, 1, 16, 40), numbers.draw(-999, 999, 40, dtype=torch.int32)
    step = IntegerConvolution("", [0], 1, nn.Linear(16, 40), weight, bias, numbers.rescale(40, 16), {})
    step.backend = numbers.backend
    return step.run({0: x})


def network(make: Callable[[], torch.nn.Module]) -> Case:
    """A quantized network whose integers are drawn: calibration, which is not, gives its structure alone."""

    def run(x: sc.SparseTensor, numbers: Numbers) -> sc.SparseTensor:
        grid = sc.VoxelGrid(torch.cartesian_prod(torch.arange(1), *[torch.arange(4)] * 3).int())
        example = sc.SparseTensor(grid, torch.ones(len(grid), 16))
        small = sc.quantize(make().eval(), [example]).to(x.device).use_backend(numbers.backend)
        for step in small.steps:
            if isinstance(step, IntegerConvolution):
                taps, each, c_out = step.weight.shape
                step.weight.copy_(numbers.draw(-127, 127, taps, each, c_out))
                step.bias.copy_(numbers.draw(-(2**14), 2**14, c_out, dtype=torch.int32))
                if step.numbers:
                    rescale = numbers.rescale(c_out, 4 * each)
                    step.multiplier.copy_(rescale.multiplier)
                    step.numbers.update(shift=30, residual_multiplier=2**29 + 1 if len(step.inputs) > 1 else 0)
            elif isinstance(step, Combine):
                step.multipliers, step.rounding = [2**17 + 3 * k for k in range(len(step.inputs))], (18, 1 << 16, -127)
            for name in ("inverse", "scale"):
                if hasattr(step, name):
                    bits = torch.full_like(getattr(step, name).view(torch.float32), 0.125)
                    getattr(step, name).copy_(bits.view(torch.int32))
        return small(x.with_features(x.features.float()))

    return run


CASES: dict[str, Case] = {
    "submanifold, sums": layer(nn.SubmanifoldConv, 3, rescales=False),
    "submanifold": layer(nn.SubmanifoldConv, 3),
    "submanifold, relu": layer(nn.SubmanifoldConv, 3, act=0.0),
    "submanifold, leaky relu": layer(nn.SubmanifoldConv, 3, act=0.1),
    "submanifold, residual": layer(nn.SubmanifoldConv, 3, residual=True),
    "submanifold, residual, relu": layer(nn.SubmanifoldConv, 3, residual=True, act=0.0),
    "submanifold, residual, leaky relu": layer(nn.SubmanifoldConv, 3, residual=True, act=0.25),
    "submanifold, odd channels": layer(nn.SubmanifoldConv, 3, c_in=5, c_out=7),
    "submanifold, wide": layer(nn.SubmanifoldConv, 3, c_in=96, c_out=130, act=0.0),
    "submanifold, groups": layer(nn.SubmanifoldConv, 3, c_in=24, c_out=48, groups=4),
    "submanifold, dilation": layer(nn.SubmanifoldConv, 3, dilation=2),
    "submanifold, 125 taps": layer(nn.SubmanifoldConv, 5),
    "every reachable voxel": layer(nn.Conv, 3, target="full"),
    "strided": layer(nn.Conv, 2, stride=2, act=0.0),
    "strided, overlapping": layer(nn.Conv, 3, stride=2),
    "inverse": layer(nn.InverseConv, 2, stride=2),
    "inverse, overlapping": layer(nn.InverseConv, 3, stride=2, act=0.1),
    "generative": layer(nn.ConvTranspose, 2, stride=2),
    "generative, overlapping": layer(nn.ConvTranspose, 3, stride=2, act=0.0),
    "linear": linear,
    "norm": norm,
    "max pooling": pool(nn.MaxPool, MaxPooling),
    "max pooling, overlapping": pool(nn.MaxPool, MaxPooling, stride=1, target="full"),
    "average pooling": pool(nn.AvgPool, SumPooling),
    "sum pooling": pool(nn.SumPool, SumPooling),
    "unpooling": pool(nn.Unpool, SumPooling),
    "sum of two scales": combine((2**17, 99_991)),
    "sum of two scales, relu": combine((2**17, 99_991), 0, 0),
    "sum of three scales, leaky relu": combine((2**17, 99_991, 70_001), 6554),
    "concatenation": combine((2**18, 99_991), concatenates=True),
    "relu": combine((2**18,), 0, 0),
    "leaky relu": combine((2**18,), 6554),
    "network, U-Net": network(lambda: nn.UNet(16, 5, channels=(8, 16))),
    "network, MinkUNet": network(lambda: nn.MinkUNet(16, 5, variant="14", planes=(8,) * 8, init_channels=8)),
}


def scene(device: torch.device, voxels: int = 150, seed: int = 0) -> sc.VoxelGrid:
    """Two batch items of voxels around the origin."""
    drawn = np.random.RandomState(seed).randint(-4, 5, (voxels, 3))
    item = np.random.RandomState(seed + 1).randint(0, 2, (voxels, 1))
    rows = np.unique(np.concatenate([item, drawn], 1), axis=0)
    return sc.VoxelGrid(torch.from_numpy(rows).int(), 2).to(device)


def hash_of(y: sc.SparseTensor) -> str:
    """Over coordinates and features, rows in lexicographic order."""
    coords, features = y.coords.cpu().numpy(), y.features.cpu().numpy()
    order = np.lexsort(coords.T[::-1])
    digest = hashlib.sha256()
    for array in (coords[order], features[order]):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def hashes(device: torch.device, backend: str = "auto", names: list[str] | None = None) -> Iterator[tuple[str, str]]:
    """The hash of every case; an AssertionError where shuffled rows have another."""
    grid = scene(device)
    order = torch.from_numpy(np.random.RandomState(2).permutation(len(grid))).to(device)
    shuffled = sc.VoxelGrid(grid.coords[order], grid.batch_size)
    for name in names or CASES:
        found = []
        for rows in (grid, shuffled):
            rows.derived.clear()
            numbers = Numbers(name, device, backend)
            module_channels = 16
            channels = {"submanifold, odd channels": 5, "submanifold, wide": 96, "submanifold, groups": 24}
            x = sc.SparseTensor(rows, by_voxel(rows, channels.get(name, module_channels)))
            found.append(hash_of(CASES[name](x, numbers)))
        if found[0] != found[1]:
            raise AssertionError(f"{name}: other bytes for shuffled rows")
        yield name, found[0]


def timed(device: torch.device, backend: str, seconds: float = 1.5) -> Iterator[str]:
    """Layers in int8 and in floating point, the least milliseconds of runs in turns."""
    points = np.random.RandomState(0).rand(30_000 if device.type == "cpu" else 400_000, 3) * [1, 1, 0.1]
    grid = sc.voxelize(torch.from_numpy(points).float(), 0.012 if device.type == "cpu" else 0.005)[0].to(device)
    plan = sc.ConvolutionPlan(grid, 3, backend=backend)
    for c in (16, 32, 64, 128, 256):
        best = least(timed_calls(plan, c, Numbers(f"time {c}", device, backend)), device, seconds)
        words = ", ".join(f"{name} {ms:.3f}" for name, ms in best.items())
        share = best["float32"] / best["int8, x >= 0"]
        yield f"{len(grid)} voxels, {c} -> {c} channels: {words} ms; fp32 / int8 after a ReLU {share:.2f}"


def timed_calls(plan: sc.ConvolutionPlan, c: int, numbers: Numbers) -> dict[str, Callable[[], Any]]:
    """A convolution, its bias and its ReLU in each dtype."""
    weight, bias = numbers.draw(-127, 127, 27, c, c), numbers.draw(-999, 999, c, dtype=torch.int32)
    weight, rescale = weight.mT.contiguous().mT, numbers.rescale(c, 9 * c, slope=0, low=0)
    x = by_voxel(plan.source, c)
    positive = x.abs()
    calls: dict[str, Callable[[], Any]] = {
        "int8": lambda: convolve(plan, x, weight, bias, rescale=rescale),
        "int8, x >= 0": lambda: convolve(plan, positive, weight, bias, rescale=rescale),
    }
    on_card = plan.device.type == "cuda"
    for dtype in (torch.float32, *((torch.float16,) if on_card else ())):
        operands = x.to(dtype), weight.to(dtype).contiguous() / 2**12, bias.to(dtype)
        calls[str(dtype)[6:]] = partial(plan.execute, *operands, epilogue=sc.pointwise.relu)
    if on_card:
        floats = Float8Rescale(torch.full((c,), 2.0**-8, device=plan.device), 0.0, 0.0)
        wide = x.float(), weight.float()
        narrow: Any = (*(t.to(FLOAT8) for t in wide), plan.kernel_map, 1, bias.float(), floats)
        calls["float8"] = partial(backend_named("triton_implicit_gemm").float8, *narrow)
    return calls


def least(calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, float]:
    """The least milliseconds of each call, called in turns; on a CPU those that its threads computed, all together.

    So other programs on the machine do not count. Run it with OMP_WAIT_POLICY=passive: threads that wait awake would.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        for _ in range(3):
            call()
    end = time.monotonic() + seconds * len(calls)
    while time.monotonic() < end:
        for name, call in calls.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = clock()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best[name] = min(best[name], 1e3 * (clock() - start))
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a card, where there is one")
    parser.add_argument("--backend", default="auto", help="the backend of every plan")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--json", type=Path, help="write hashes or times here")
    parser.add_argument("--against", type=Path, help="compare with the hashes in this file")
    parser.add_argument("--time", action="store_true", help="milliseconds instead of hashes")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.time:
        lines = []
        for line in timed(device, args.backend):
            print(line, flush=True)
            lines.append(line)
        if args.json:
            found = {
                "torch": torch.__version__,
                "device": str(device),
                "threads": torch.get_num_threads(),
                "lines": lines,
            }
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    found = dict(hashes(device, args.backend))
    print(f"{len(found)} hashes on {device}, backend {args.backend}, {torch.get_num_threads()} threads")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if args.against is None:
        return 0
    want = json.loads(args.against.read_text())
    other = sorted(name for name in found.keys() | want.keys() if found.get(name) != want.get(name))
    print("\n".join(["all hashes agree"] if not other else [f"{len(other)} hashes differ:", *other]))
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
