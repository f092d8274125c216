"""SHA-256 of integer layers of every kind: the same on every device, backend and number of threads.

A hash is over the voxels and the features of a result, its rows in lexicographic order. Every case runs for its rows as
they are and shuffled; both must agree. Numbers come from numpy's frozen generator, so that no machine draws others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import sparseconv as sc
from sparseconv import nn
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
