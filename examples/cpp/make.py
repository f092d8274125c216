"""Write what `run_package` needs: a packaged network, a cloud of points, and the network's results in Python.

    python examples/cpp/make.py unet build/cpp
    python examples/cpp/make.py encoder build/cpp
    python examples/cpp/make.py encoder build/cpp --gpu

It writes NETWORK.pt2, NETWORK_points.bin and NETWORK_expected.pt into the folder, and prints the command that compares
in C++. The weights are random: it is the numbers that are compared. With --gpu the package is NETWORK.pt, for the GPU
of this machine, and the results are those of `nn.capture`, whose time is printed too.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

import sparseconv as sc
from sparseconv import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from stand_ins.semantic_kitti import scan

#: the encoder's box along x, y and z [m]
LOW, HIGH = (-16.0, -16.0, -3.0), (16.0, 16.0, 1.0)


def unet(size: float) -> tuple[torch.nn.Module, list[str]]:
    """A U-Net on all voxels."""
    return nn.UNet(4, 19, channels=(16, 32, 64)), []


def encoder(size: float) -> tuple[torch.nn.Module, list[str]]:
    """The residual encoder of OpenPCDet's detectors, on voxels (z, y, x) of a box."""
    x, y, z = (round((b - a) / size) for a, b in zip(LOW, HIGH))
    box = ["--low", *map(str, LOW), "--high", *map(str, HIGH), "--zyx"]
    return nn.VoxelResBackBone8x(4, (z + 1, y, x)), box


#: calls whose median is printed: a GPU that was idle takes some tenths of a second to its usual pace
CALLS = 500
#: each with the edge of its voxels [m]
NETWORKS = {"unet": (unet, 0.2), "encoder": (encoder, 0.1)}


def voxels(points: torch.Tensor, size: float, in_box: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Points (M, 4) -> coords (N, 4) and the means of their four numbers (N, 4), as `run_package` makes them."""
    origin, where = (0.0, 0.0, 0.0), points[:, :3]
    if in_box:
        low, high = torch.tensor(LOW).double(), torch.tensor(HIGH).double()
        inside = ((where.double() >= low) & (where.double() < high)).all(1)
        points, origin = points[inside], LOW[::-1]
        where = points[:, :3].flip(1)
    grid, rows = sc.voxelize(where.contiguous(), size, origin=origin)
    return grid.coords, sc.ops.voxelize_features(points, rows, len(grid))


def on_cpu(net: torch.nn.Module, scene: tuple[torch.Tensor, torch.Tensor], path: Path) -> Callable[[], Any]:
    """Write a package for this CPU; a call of the program that it is made of."""
    program = sc.export.export(net, scene)
    sc.export.package(program, path)
    run = program.module()
    return lambda: run(*scene)


def on_gpu(net: torch.nn.Module, scene: tuple[torch.Tensor, torch.Tensor], path: Path) -> Callable[[], Any]:
    """Write a package for this GPU; a call of `nn.capture`."""
    coords, features = (t.cuda() for t in scene)
    sc.export.package_for_gpu(net.cuda(), (coords, features), path)
    x = sc.SparseTensor(sc.VoxelGrid(coords), features)
    if isinstance(net, nn.VoxelResBackBone8x):  # whose results lie on voxels that only the GPU counts
        fast, given = nn.capture(net), x
    else:
        fast, given = nn.capture(net, x), (coords, features)
    return lambda: fast(given)


@torch.no_grad()
def median(call: Callable[[], Any], repeat: int, gpu: bool) -> tuple[float, list[torch.Tensor]]:
    """The median time of calls that wait for the GPU [ms], and the results on the CPU."""
    took = []
    for _ in range(repeat):
        start = time.perf_counter()
        y = call()
        if gpu:
            torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - start))
    results = [y.features, y.grid.coords] if isinstance(y, sc.SparseTensor) else torch.utils._pytree.tree_leaves(y)
    return statistics.median(took), [result.detach().cpu() for result in results]


class Made(NamedTuple):
    """Files that `run_package` takes, its options, and the call in Python that gives the same."""

    files: list[Path]
    options: list[str]
    call: Callable[[], Any]


def write(network: str, folder: Path, beams: int, around: int, seed: int, gpu: bool) -> Made:
    """Write a package of one of the networks and a cloud; the last file, of results, is left to the caller."""
    torch.manual_seed(seed)
    points = torch.from_numpy(scan(np.random.default_rng(seed), beams=beams, around=around)[0])
    make, size = NETWORKS[network]
    net, box = make(size)
    scene = voxels(points, size, bool(box))
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / f"{network}{'.pt' if gpu else '.pt2'}"
    points.numpy().tofile(folder / f"{network}_points.bin")
    with torch.no_grad():
        call = (on_gpu if gpu else on_cpu)(net.eval(), scene, package)
    files = [package, *(folder / f"{network}{ending}" for ending in ("_points.bin", "_expected.pt"))]
    return Made(files, ["--size", str(size), *box, *(["--exact"] if gpu else [])], call)


def main(
    network: str,
    folder: Path,
    beams: int = 24,
    around: int = 240,
    seed: int = 0,
    gpu: Annotated[bool, typer.Option("--gpu", help="a package for the GPU of this machine")] = False,
) -> None:
    """Write a package of one of the networks, and what to compare."""
    if network not in NETWORKS:
        raise typer.BadParameter(f"the networks are {', '.join(NETWORKS)}; got {network}")
    made = write(network, folder, beams, around, seed, gpu)
    took, results = median(made.call, CALLS if gpu else 1, gpu)
    torch.save(results, made.files[-1])
    if gpu:
        print(f"nn.capture: {took:.3f} ms, the median of {CALLS}")
    print("run_package", *made.files, *made.options, *(["--repeat", CALLS] if gpu else []))


if __name__ == "__main__":
    typer.run(main)
