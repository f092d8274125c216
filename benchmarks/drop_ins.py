"""Networks written for MinkowskiEngine and torchsparse, unmodified under these names, beside sums over dictionaries.

    python -m benchmarks.drop_ins --checkouts DIR --json FILE [--only NAME ...]

``--checkouts`` is a folder with the authors' repositories, which are no part of this project, a folder for each: `sts`
(SpatioTemporalSegmentation), `mask3d`, `pointcept`, `spvnas` and `swin3d`. Both runs are of their files with the same
weights, in fp64, on the CPU. In the second each convolution looks its neighbours up in a dictionary of coordinates, tap
by tap. Output coordinates are compared with floors of the inputs'. torch_scatter, timm, what Swin3D compiles of its
own, and a name that Python 3.10 took away are stood in for.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.clients import swin3d
from benchmarks.clients.__main__ import machine
from benchmarks.clients.equality import differences, fill
from benchmarks.clients.standing_in import Registry, module, unless_installed
from benchmarks.clients.transformers import kept_in_fp64
from sparseconv.interop import minkowski as ME
from sparseconv.interop import torchsparse
from sparseconv.interop.minkowski.nn.convolution import MinkowskiConvolutionBase
from sparseconv.interop.torchsparse.nn.modules import Conv3d

CONFIG = SimpleNamespace(bn_momentum=0.1, conv1_kernel_size=3, dilations=[1, 1, 1, 1])


class Network(NamedTuple):
    """Whose files, which class of which, its axes, and the part of its channels."""

    folder: str
    file: str
    kind: str
    axes: int = 3
    width: float = 1.0


NETWORKS = {
    "ResUNet14": Network("sts", "models.resunet", "ResUNet14"),
    "Res16UNet34C": Network("sts", "models.res16unet", "Res16UNet34C"),
    "STRes16UNet14A, four axes": Network("sts", "models.res16unet", "STRes16UNet14A", 4),
    "ResNet14": Network("sts", "models.resnet", "ResNet14"),
    "Mask3D's Res16UNet34C": Network("mask3d", "models.res16unet", "Res16UNet34C"),
    "Mask3D's ResNet14": Network("mask3d", "models.resnet", "ResNet14"),
    "Mask3D's STRes16UNet14A, four axes": Network("mask3d", "models.res16unet", "STRes16UNet14A", 4),
    "Pointcept's MinkUNet34C": Network("pointcept", "pointcept.models.sparse_unet.mink_unet", "MinkUNet34C"),
    "spvnas' MinkUNet": Network("spvnas", "core.models.semantic_kitti.minkunet", "MinkUNet", width=0.5),
    "SPVCNN": Network("spvnas", "core.models.semantic_kitti.spvcnn", "SPVCNN", width=0.5),
    "Swin3D": Network("swin3d", "Swin3D.models.Swin3D", "Swin3DUNet"),
}


def cloud(axes: int, count: int = 500) -> torch.Tensor:
    """Distinct voxels (N, 1 + D) int32 of two items: a floor and a wall, and one layer behind the other in time."""
    gen = torch.Generator().manual_seed(0)
    cells = torch.randint(0, 40, (2 * count, axes), generator=gen)
    cells[:count, 2], cells[count:, 0] = 3, 5
    if axes == 4:
        cells[:, 3] %= 3
    items = torch.randint(0, 2, (2 * count, 1), generator=gen)
    return torch.unique(torch.cat([items, cells], 1), dim=0).int()


def scatter_mean(rows: torch.Tensor, index: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """torch_scatter's, of rows."""
    index = index.flatten()
    total = rows.new_zeros(int(index.max()) + 1, rows.shape[1]).index_add(dim, index, rows)
    return total / torch.bincount(index)[:, None].clamp(min=1)


@contextmanager
def authors(network: Network, checkouts: Path) -> Iterator[type]:
    """The class, its package and no other under its name; what that imports besides is not run."""
    before, folder = set(sys.modules), checkouts / network.folder
    ME.install()
    torchsparse.install()
    vars(collections).setdefault("Sequence", Sequence)
    unless_installed("torch_scatter", scatter_mean=scatter_mean)
    parts = network.file.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        module(name).__path__ = [str(folder / Path(*parts[:end]))]
    if network.folder == "swin3d":
        swin3d.parts(folder)
    if network.folder == "pointcept":
        module("pointcept.models.builder", MODELS=Registry())
    sys.path.insert(0, str(folder))
    try:
        yield getattr(importlib.import_module(network.file), network.kind)
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("models", "core", "pointcept", "Swin3D"):
                del sys.modules[name]


def summed(
    feats: torch.Tensor, weight: torch.Tensor, edges: Sequence[tuple[list[int], list[int]]], rows: int
) -> torch.Tensor:
    """y[out] += x[in] @ weight[tap] over the edges of each tap."""
    y = feats.new_zeros(rows, weight.shape[-1])
    for taps, (ins, outs) in zip(weight, edges, strict=True):
        y = y.index_add(0, torch.tensor(outs, dtype=torch.long), feats[ins] @ taps)
    return y


def looked_up(fine: torch.Tensor, coarse: torch.Tensor, moves: Sequence[Sequence[int]], scale: Sequence[int]) -> list:
    """For each move, the rows of the voxels coarse * scale + move, and of ``coarse``."""
    known = {tuple(row): at for at, row in enumerate(fine.tolist())}
    found = []
    for move in moves:
        ins, outs = [], []
        for out, (item, *cell) in enumerate(coarse.tolist()):
            row = known.get((item, *(c * s + m for c, s, m in zip(cell, scale, move))))
            if row is not None:
                ins.append(row)
                outs.append(out)
        found.append((ins, outs))
    return found


def box(kernel: Sequence[int], first_fastest: bool) -> list[tuple[int, ...]]:
    """Taps of a kernel: odd axes around 0, even ones from 0."""
    sides = [range(-(k // 2), k // 2 + 1) if k % 2 else range(k) for k in kernel]
    return [tap[::-1] for tap in itertools.product(*sides[::-1])] if first_fastest else list(itertools.product(*sides))


def floors(coords: torch.Tensor, step: Sequence[int], unit: Sequence[int]) -> set[tuple[int, ...]]:
    """floor(c / step) * unit of each axis."""
    return {(item, *(c // s * u for c, s, u in zip(cell, step, unit))) for item, *cell in coords.tolist()}


def of_minkowski(layer: Any, x: Any, coordinates: Any, given: Any) -> Any:
    """A convolution whose output has the keys of ``given``: at coordinates that are multiples of the tensor stride."""
    kernel, finer = layer.kernel_generator, given if layer.is_transpose else x
    weight = layer.kernel if layer.kernel.ndim == 3 else layer.kernel[None]
    step = [d * t for d, t in zip(kernel.kernel_dilation, finer.tensor_stride)]
    hybrid = kernel.region_type is ME.RegionType.HYBRID
    taps = kernel.taps().tolist() if hybrid else box(kernel.kernel_size, first_fastest=True)
    moves = [[t * s for t, s in zip(tap, step)] for tap in taps]
    coarse = x if layer.is_transpose else given
    edges = looked_up(finer.C, coarse.C, moves, [1] * len(step))
    if layer.is_transpose:
        edges = [pair[::-1] for pair in edges]
    elif coordinates is None:
        stride = given.tensor_stride
        assert {tuple(row) for row in given.C.tolist()} == floors(x.C, stride, stride)
    y = summed(x.F, weight, edges, len(given.C))
    y = y if layer.bias is None else y + layer.bias
    return ME.SparseTensor(y, coordinate_map_key=given.coordinate_map_key, coordinate_manager=x.coordinate_manager)


def of_torchsparse(layer: Any, x: Any, coordinates: Any, given: Any) -> Any:
    """A convolution whose output has the coordinates of ``given``, in units of its own stride."""
    weight = layer.kernel if layer.kernel.ndim == 3 else layer.kernel[None]
    steps = layer.stride
    odd = layer.kernel_volume % 2 == 1
    moves = [[t * d for t, d in zip(tap, [layer.dilation] * 3)] for tap in box(layer.kernel_size, first_fastest=odd)]
    fine, coarse = (given, x) if layer.transposed else (x, given)
    edges = looked_up(fine.C, coarse.C, moves, steps)
    if layer.transposed:
        edges = [pair[::-1] for pair in edges]
    elif max(steps) > 1:  # outputs whose window leaves the voxels' extent are dropped, as in a dense array
        ends = [(n - k) // s + 1 for n, k, s in zip((x.C.amax(0)[1:] + 1).tolist(), layer.kernel_size, steps)]
        reached = {row for row in floors(x.C, steps, [1] * 3) if all(c < n for c, n in zip(row[1:], ends))}
        assert {tuple(row) for row in given.C.tolist()} == reached
    y = summed(x.F, weight, edges, len(given.C))
    return given.like(y if layer.bias is None else y + layer.bias)


def replaced(kind: type, reference: Callable[..., Any]) -> Any:
    """A patch of a layer's call: ours finds the voxels, the reference makes the features."""
    own: Any = vars(kind)["forward"]

    def forward(layer: Any, x: Any, coordinates: Any = None) -> Any:
        rest = () if coordinates is None else (coordinates,)
        with torch.no_grad():
            given = own(layer, x, *rest)
        return reference(layer, x, coordinates, given)

    return patch.object(kind, "forward", forward)


def call(network: Network, net: torch.nn.Module, feats: torch.Tensor, coords: torch.Tensor) -> list[torch.Tensor]:
    """The answers of a network for a scene."""
    torch.manual_seed(0)  # of dropout
    if network.folder == "spvnas":
        answer = net(torchsparse.SparseTensor(feats, coords))
    elif network.folder == "pointcept":
        offset = torch.bincount(coords[:, 0]).cumsum(0)
        answer = net({"grid_coord": coords[:, 1:], "feat": feats, "offset": offset})
    elif network.folder == "swin3d":
        x = ME.SparseTensor(feats, coords)
        inside = torch.rand(len(coords), 3, generator=torch.Generator().manual_seed(2), dtype=feats.dtype)
        places = torch.cat([coords[:, :1], coords[:, 1:] + inside, feats[:, :3].detach().tanh()], 1)
        keys: Any = {"coordinate_map_key": x.coordinate_map_key, "coordinate_manager": x.coordinate_manager}
        with swin3d.on_the_cpu(), kept_in_fp64():
            answer = net(x, ME.SparseTensor(places, **keys))
    else:
        answer = net(ME.SparseTensor(feats, coords))
    answers = answer if isinstance(answer, (list, tuple)) else [answer]
    return [y if isinstance(y, torch.Tensor) else y.F for y in answers]


def step(network: Network, net: torch.nn.Module, feats: torch.Tensor, coords: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs in training and in evaluation, gradients of the features and of every parameter, and buffers."""
    x, found = feats.clone().requires_grad_(), {}
    net.train().zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for number, y in enumerate(call(network, net, x, coords)):
        found[f"output {number}"] = y.detach()
        total = total + (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    total.backward()
    assert x.grad is not None
    found["gradient of the features"] = x.grad
    found |= {f"gradient of {name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b.clone() for name, b in net.named_buffers()}
    with torch.no_grad():
        answers = call(network, net.eval(), feats, coords)
    return found | {f"evaluated {number}": y for number, y in enumerate(answers)}


def compare(network: Network, checkouts: Path) -> dict[str, Any]:
    """Differences, each in the norm of its tensor, and seconds of a step by plans."""
    with authors(network, checkouts) as kind:
        if network.folder == "spvnas":
            net = kind(num_classes=19, pres=1.0, vres=1.0, cr=network.width)  # codespell:ignore pres
        elif network.folder == "swin3d":
            net = kind(**swin3d.PUBLISHED, in_channels=4)
        elif network.folder == "pointcept":
            net = kind(4, 20)
        else:
            net = kind(4, 20, CONFIG, D=network.axes)
        net = net.double()
        fill(net)
        state = {name: value.clone() for name, value in net.state_dict().items()}
        coords = cloud(network.axes)
        feats = torch.randn(len(coords), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        begin = time.perf_counter()
        ours = step(network, net, feats, coords)
        seconds = time.perf_counter() - begin
        net.load_state_dict(state)
        with replaced(MinkowskiConvolutionBase, of_minkowski), replaced(Conv3d, of_torchsparse):
            theirs = step(network, net, feats, coords)
    facts = {"parameters": sum(p.numel() for p in net.parameters()), "voxels": len(coords)}
    return {**facts, "seconds": round(seconds, 2), **differences(ours, theirs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    command = "python -m benchmarks.drop_ins --checkouts DIR"
    found: dict[str, Any] = {"facts": {**machine("cpu"), "torch": torch.__version__, "command": command}, "rows": []}
    for name in args.only:
        network = NETWORKS[name]
        file = f"{network.folder}: {network.file.replace('.', '/')}.py"
        found["rows"].append({"name": name, "file": file, **compare(network, args.checkouts)})
        print(found["rows"][-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
