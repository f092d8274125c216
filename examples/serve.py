"""Label a stream of LiDAR sweeps with a captured network: the delay of each, and memory that does not grow.

    python examples/serve.py --scans 100
    python examples/serve.py --points 'sequences/08/velodyne/*.bin' --checkpoint runs/semantic_kitti.pt --width 32

Files are KITTI's: float32 x, y, z [m] and remission. Without files, sweeps are generated. Every tenth of these has more
voxels than the graph has rows, or reaches farther than its extent.

On a GPU one CUDA graph of a fixed size answers every sweep that fits. Others are answered by the network itself, up to
a limit of voxels; over that a sweep is refused. Each delay is from points in host memory to labels in host memory. On a
CPU all calls are the network's own.
"""

from __future__ import annotations

import glob
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from semantic_kitti import CLASSES, read_points
from stand_ins import semantic_kitti as stand_in

import sparseconv as sc
from sparseconv import nn


@dataclass
class Answer:
    labels: torch.Tensor  # (M,) class of each point, on the CPU; empty where the sweep was refused
    how: str  # "captured", "eager" or "refused"
    voxels: int
    seconds: float


class Service:
    """A network in evaluation that labels one sweep after another.

    Args:
        net: from (N, 4) features to logits, in ``eval()`` and on its device.
        example: points (M, 4) of a typical sweep.
        voxel_size: [m].
        reach: voxels farther away along x or y than this do not fit the graph [m].
        max_voxels: rows of the graph.
        most_voxels: the largest sweep that is answered at all.
    """

    #: from the ground to roofs [m], as seen from the sensor
    HEIGHTS = (-6.0, 14.0)

    def __init__(
        self,
        net: torch.nn.Module,
        example: torch.Tensor,
        voxel_size: float,
        reach: float,
        max_voxels: int,
        most_voxels: int,
    ) -> None:
        self.net, self.voxel_size, self.most_voxels = net, voxel_size, most_voxels
        self.device = next(net.parameters()).device
        self.has_graph = self.device.type == "cuda"
        low, high = ((-reach, -reach, self.HEIGHTS[0]), (reach, reach, self.HEIGHTS[1]))
        self.extent = sc.IndexRange(*([int(v // voxel_size) for v in corner] for corner in (low, high)))
        x, _ = self._voxels(example)
        inside = (x.grid.coords[:, 1:] >= torch.tensor(self.extent.start, device=self.device)).all(1)
        inside &= (x.grid.coords[:, 1:] < torch.tensor(self.extent.end, device=self.device)).all(1)
        kept = x.grid.coords[inside][:max_voxels]
        example = sc.SparseTensor(sc.VoxelGrid(kept, 1, voxel_size), x.features[inside][:max_voxels])
        self.captured = nn.capture(net, example, max_voxels=max_voxels, extent=self.extent)

    def __call__(self, points: torch.Tensor) -> Answer:
        """Points (M, 4) on the CPU -> their classes."""
        start = time.perf_counter()
        x, rows = self._voxels(points)
        how = "refused" if len(x.grid) > self.most_voxels else "captured" if self._fits(x.grid) else "eager"
        labels = torch.empty(0, dtype=torch.int64)
        if how == "captured":
            logits = self.captured(x)
            try:
                self.captured.check()  # of this sweep: a coarser grid may lack rows, which the CPU does not see
            except RuntimeError:
                how = "eager"
        if how == "eager":
            with torch.no_grad():
                logits = self.net(x)
        if how != "refused":
            labels = logits.features.argmax(1)[rows].cpu()
        answer = Answer(labels, how, len(x.grid), time.perf_counter() - start)
        if how != "captured" and self.device.type == "cuda":
            torch.cuda.empty_cache()  # what a large sweep took is not kept for the next one
        return answer

    def _voxels(self, points: torch.Tensor) -> tuple[sc.SparseTensor, torch.Tensor]:
        """A sweep as voxels with the means of their points, and the voxel of each point."""
        points = points.to(self.device)
        grid, rows = sc.voxelize(points[:, :3].contiguous(), self.voxel_size)
        features = torch.cat([points[:, :3] / 20, points[:, 3:]], 1)
        return sc.SparseTensor(grid, sc.ops.voxelize_features(features, rows, len(grid))), rows

    def _fits(self, grid: sc.VoxelGrid) -> bool:
        fits = 0 < len(grid) <= self.captured.max_voxels and grid.extent.intersect(self.extent) == grid.extent
        return fits and self.has_graph


def generated(count: int, seed: int = 0, **sweep: int) -> Iterator[torch.Tensor]:
    """``count`` sweeps; every tenth is denser or reaches farther, in turn."""
    rng = np.random.default_rng(seed)
    sweep = {"beams": 24, "around": 480, **sweep}
    for number in range(count):
        unlike = {} if number % 10 != 9 else {"reach": 70.0} if number % 20 == 9 else {"around": 4 * sweep["around"]}
        yield torch.from_numpy(stand_in.scan(rng, **{**sweep, **unlike})[0])


def read(pattern: str, count: int) -> Iterator[torch.Tensor]:
    """The first ``count`` files of a pattern, in the order of their names."""
    files = sorted(glob.glob(pattern))[:count]
    if not files:
        raise typer.BadParameter(f"no file is called {pattern}")
    for file in files:
        yield torch.cat(read_points(Path(file)), 1)


def held(device: torch.device) -> str:
    """Memory now and at most, in words."""
    if device.type == "cuda":
        now, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
        return f"{now / 2**20:,.0f} MiB of the GPU held now, {most / 2**20:,.0f} at most"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB of the process at most"


def report(answers: list[Answer]) -> Iterator[str]:
    """The delays of each kind of answer."""
    for how in ("captured", "eager", "refused"):
        of = [answer for answer in answers if answer.how == how]
        if of:
            p50, p99 = np.percentile([1e3 * answer.seconds for answer in of], (50, 99))
            most = max(answer.voxels for answer in of)
            yield f"{how:>8}: {len(of):,} sweeps of up to {most:,} voxels, p50 {p50:.1f} ms, p99 {p99:.1f} ms"


def main(
    scans: Annotated[int, typer.Option(help="Sweeps to answer.", min=1)] = 100,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    points: Annotated[str | None, typer.Option(help="A pattern of .bin files; without one, generated sweeps.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Weights that semantic_kitti.py learnt.")] = None,
    variant: Annotated[str, typer.Option(help="Of MinkUNet, as in semantic_kitti.py.")] = "14",
    width: Annotated[int, typer.Option(help="Channels of the finest level.")] = 16,
    voxel_size: Annotated[float, typer.Option(help="[m]")] = 0.1,
    reach: Annotated[float, typer.Option(help="Of the graph, along x and y [m].")] = 52.0,
    max_voxels: Annotated[int | None, typer.Option(help="Rows of the graph; 1.5 times the first sweep's.")] = None,
    most_voxels: Annotated[int, typer.Option(help="Larger sweeps are refused.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Of the sweeps, and of the weights if there is no checkpoint.")] = 0,
) -> None:
    """Label sweeps one after another; print delays and memory."""
    torch.manual_seed(seed)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    planes = tuple(width * m for m in (1, 2, 4, 8, 8, 4, 3, 3))
    net = nn.MinkUNet(4, len(CLASSES), variant=variant, planes=planes, init_channels=width)
    if checkpoint is not None:
        net.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["net"])
    net = net.eval().to(device)
    sweeps = generated(scans, seed) if points is None else read(points, scans)
    first = next(sweeps)
    if max_voxels is None:
        max_voxels = int(1.5 * len(sc.voxelize(first[:, :3].contiguous(), voxel_size)[0]))
    service = Service(net, first, voxel_size, reach, max_voxels, most_voxels)
    if service.has_graph:
        print(f"captured for up to {service.captured.max_voxels:,} voxels within {service.extent}")
    else:
        print(f"on the {device} there is no graph: every call is the network's own")
    service(first)  # not counted: the first calls of a process load what later ones use
    print(f"before the stream: {held(service.device)}")
    answers = [service(first), *map(service, sweeps)]
    print(*report(answers), sep="\n")
    print(f" after the stream: {held(service.device)}")


if __name__ == "__main__":
    typer.run(main)
