"""``python -m benchmarks.streaming --voxels 50e6 --budget 20e9``: a U-Net over a shell larger than the card.

Prints the time of the streamed run and of its parts, and its peak of memory. ``--resident 20e6`` runs such a scene as a
whole, its voxels and features on the device: a voxel's time of the network and its maps alone. ``--whole`` compares the
bits with those of the whole scene, where that fits. ``--worlds 1 --worlds 2`` runs one rank, then two over
the same scene (strong) and over a scene twice as large (weak), each on its own card; ``--no-gather`` leaves each rank
what it computed. ``--mapped DIR`` keeps the scene
in mapped files there, and compares a strip of its result with the network's result for the voxels near that strip:

    python -m benchmarks.streaming --worlds 1 --worlds 2 --voxels 100e6 --budget 4e9 --out benchmarks/results/X.json
    python -m benchmarks.streaming --mapped /tmp/scene --voxels 1e9 --budget 19e9 --out benchmarks/results/X.json

After a run that compiles, the median of ``--rounds`` runs counts. Without a card it runs over gloo, to be tried out.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer

import sparseconv as sc
from sparseconv import nn
from sparseconv.gpu.launcher import await_compilers
from sparseconv.streaming import ranks, streamed
from sparseconv.streaming import run as streaming_run

#: the parts of a run before its first block, by the functions that they are; and waiting for other ranks, of all of it
BEGINNING = {
    "limits": (streamed.Scene, "of"),
    "copying": (streamed.Scene, "held_on"),
    "recording": (streamed, "recorded"),
    "blocks": (streaming_run, "Blocks"),
    "refining": (streaming_run.Blocks, "refine"),
    "measuring": (streaming_run.Run, "_measured"),
    "planning": (streaming_run, "chosen"),
    "counting": (streaming_run.Run, "_count"),
    "other ranks": (ranks.Ranks, "heard"),
}


#: width of the finest level
USUAL = 32
#: voxels that a mapped scene's strip has, and lines of voxels at its side that are not compared
STRIP, REACH = 20_000_000, 256


def surface(side: int, first: int, last: int) -> torch.Tensor:
    """Coordinates of some lines of a wavy surface of so many voxels a side, in lexicographic order."""
    a, b = torch.arange(first, last, dtype=torch.int32)[:, None], torch.arange(side, dtype=torch.int32)[None]
    height = (40 * torch.sin(a / 60) + 30 * torch.cos(b / 80)).int()
    return torch.stack([torch.zeros_like(height), a.expand_as(height), b.expand_as(height), height], -1).view(-1, 4)


def noise(voxels: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Repeated, since noise for all of them takes long; the same on every rank."""
    some = torch.randn(min(voxels, 2**20), channels, generator=torch.Generator().manual_seed(0)).to(dtype)
    return some.repeat(-(-voxels // len(some)), 1)[:voxels]


def shell(voxels: int, channels: int, dtype: torch.dtype) -> sc.SparseTensor:
    """A wavy surface in host memory."""
    side = int(voxels**0.5)
    coords = surface(side, 0, side)
    low, high = torch.aminmax(coords[:, 3])
    box = sc.IndexRange((0, 0, int(low)), (side, side, int(high) + 1))
    like = sc.VoxelGrid(coords[:1], 1)  # the rows are distinct by construction, and a check would sort all of them
    return sc.SparseTensor(like._known(coords, box), noise(len(coords), channels, dtype))


def files(folder: Path, voxels: int, channels: int, dtype: torch.dtype) -> tuple[np.memmap, np.memmap]:
    """The same surface as two files that are mapped to be read: coordinates of the fewest bytes, and features."""
    folder.mkdir(parents=True, exist_ok=True)
    side = int(voxels**0.5)
    kinds: dict[str, Any] = {
        "coords": np.int16 if side < 2**15 else np.int32,
        "features": torch.empty(0, dtype=dtype).numpy().dtype,
    }
    widths = {"coords": 4, "features": channels}
    made = {n: np.lib.format.open_memmap(folder / f"{n}.npy", "w+", kinds[n], (side * side, widths[n])) for n in kinds}
    lines = max(1, 2**22 // side)
    some = noise(lines * side, channels, dtype).numpy()
    for first in range(0, side, lines):
        last = min(side, first + lines)
        made["coords"][first * side : last * side] = surface(side, first, last).numpy()
        made["features"][first * side : last * side] = some[: (last - first) * side]
    del made
    coords, features = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in kinds)
    return coords, features


def strip_is_equal(net: nn.UNet, scene: tuple[np.memmap, np.memmap], got: torch.Tensor) -> bool:
    """Whether the first lines of a streamed result are the bits of the network's result for these lines alone."""
    side, device = int(len(got) ** 0.5), next(net.parameters()).device
    lines = min(side, STRIP // side)
    inner = side if lines == side else lines - REACH
    if inner <= 0:
        raise ValueError(f"a strip of {lines} lines has nothing that {REACH} lines at its side do not reach")
    coords, features = (torch.from_numpy(np.array(part[: lines * side])).to(device) for part in scene)
    with torch.no_grad():
        want = net(sc.SparseTensor(sc.VoxelGrid(coords.int(), 1), features)).features[: inner * side]
    return torch.equal(want.cpu(), got[: inner * side])


@contextmanager
def parts() -> Iterator[dict[str, float]]:
    """Seconds of the parts of a run before its blocks, each without those that it calls."""
    spent: dict[str, float] = {}
    open_: list[float] = []
    originals = [(owner, name, vars(owner)[name]) for owner, name in BEGINNING.values()]

    def timed(part: str, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            open_.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begun
                spent[part] = spent.get(part, 0.0) + took - open_.pop()
                if open_:
                    open_[-1] += took

        return called

    try:
        for part, (owner, name, original) in zip(BEGINNING, originals):
            bound = isinstance(original, classmethod)
            setattr(owner, name, timed(part, getattr(owner, name)) if bound else timed(part, original))
        yield spent
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def alone(net: nn.UNet, x: sc.SparseTensor) -> float:
    """Seconds of a scene that is on the network's device, its maps included; the best of three later runs."""
    device = next(net.parameters()).device
    coords, features, taken = x.grid.coords.to(device), x.features.to(device), []
    for _ in range(4):
        begun = time.perf_counter()
        net(sc.SparseTensor(sc.VoxelGrid(coords, x.grid.batch_size), features))
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


def measure(
    voxels: int,
    budget: int,
    kind: torch.dtype,
    device: torch.device,
    whole: bool,
    resident: int,
    channels: int,
    world: int,
    mapped: Path | None,
    gather: bool,
    rounds: int,
) -> list[dict[str, Any]]:
    """One scene by the ranks that are there, so many times after a run that is not counted."""
    torch.manual_seed(0)
    net = nn.UNet(4, 20, channels=[channels * 2**level for level in range(4)]).eval().to(device, kind)
    group = dist.group.WORLD if world > 1 else None
    on_gpu = device.type == "cuda"

    def streamed_once(x: Any) -> tuple[Any, dict[str, Any]]:
        seen: list[tuple[int, float]] = []
        begun = time.perf_counter()
        with parts() as spent:
            y = sc.stream(
                net,
                x,
                budget,
                progress=lambda done, total: seen.append((total, time.perf_counter() - begun)),
                group=group,
                gather=gather,
            )
        seconds = time.perf_counter() - begun
        return y, {"seconds": seconds, "first_block_s": seen[0][1], "blocks": seen[-1][0], "parts_s": spent}

    with torch.no_grad():
        x: Any = shell(voxels, 4, kind) if mapped is None else files(mapped, voxels, 4, kind)
        count = len(x.grid) if mapped is None else len(x[0])
        streamed_once(x)  # what is compiled and tuned once, for maps of this size
        if on_gpu:
            await_compilers()  # they take the interpreter's lock from the run
        every: list[dict[str, Any]] = []
        for _ in range(rounds):
            y: Any = None  # its pages go before the next result asks for some
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            if world > 1:
                dist.barrier()
            y, taken = streamed_once(x)
            if on_gpu:
                torch.cuda.synchronize()
                taken["peak_bytes"] = torch.cuda.max_memory_allocated()
            every.append(taken)
        found: dict[str, Any] = {"gather": gather, "voxels": count, "budget": budget, "channels": channels}
        found["dtype"] = str(kind)
        if resident:
            fits = shell(resident, 4, kind)
            found["alone_s"] = alone(net, fits) * count / len(fits.grid)
            del fits
        if mapped is not None:
            found |= {"same_bits_of_a_strip": strip_is_equal(net, x, y), "files": str(x[0].dtype)}
        if whole:
            begun = time.perf_counter()
            want = net(x.to(device)).features.cpu()
            found["whole_s"] = time.perf_counter() - begun
            found["same_bits"] = torch.equal(y.features, want if gather else want[y.rows])
    if not gather:
        found["rows"] = len(y.rows)
    return [taken | found for taken in every]


def worker(rank: int, world: int, port: int, jobs: list[tuple[str, int]], options: dict[str, Any], table: Any) -> None:
    """One rank: every scene of this number of ranks. The slowest rank's time counts."""
    device = torch.device(options["device"], rank) if options["device"] == "cuda" else torch.device(options["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    if Path("/dev/shm").is_dir():  # where the ranks meet: results in memory, as those of one rank are
        tempfile.tempdir = "/dev/shm"
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=300))
    names = ("budget", "kind", "whole", "resident", "channels", "mapped", "gather", "rounds")
    settings = {name: options[name] for name in names} | {"device": device, "world": world}
    for name, voxels in jobs:
        found = measure(voxels, **settings)
        every: list[Any] = [found]
        if world > 1:
            every = [None] * world
            dist.all_gather_object(every, found)
        if rank == 0:
            slowest = [max(each, key=lambda one: one["seconds"]) for each in zip(*every)]
            at = sorted(range(len(slowest)), key=lambda at: slowest[at]["seconds"])[len(slowest) // 2]
            row = slowest[at] | {"ranks": world, "seconds_by_round": [one["seconds"] for one in slowest]}
            row |= {f"{key}_by_rank": [one[at][key] for one in every] for key in ("seconds", "blocks", "parts_s")}
            table[row_name(name, world, settings["channels"], settings["gather"])] = row
            print(f"{name} on {world}: {json.dumps(row)}", flush=True)
    if world > 1:
        dist.destroy_process_group()


def row_name(scene: str, world: int, channels: int, gather: bool) -> str:
    """A row's name in the record: of the usual width and with a whole result, shorter.

    >>> row_name("strong", 2, 32, True), row_name("strong", 2, 64, False)
    ('strong_2', 'strong_parts_64_channels_2')
    """
    words = [scene, "" if gather else "parts", "" if channels == USUAL else f"{channels}_channels", str(world)]
    return "_".join(filter(None, words))


def main(
    voxels: Annotated[float, typer.Option(help="Voxels of the shell.")] = 50e6,
    budget: Annotated[float, typer.Option(help="Bytes that blocks may take.")] = 20e9,
    dtype: Annotated[str, typer.Option(help="Of features and weights.")] = "float16",
    device: Annotated[str, typer.Option(help="Where the network is.")] = "cuda",
    whole: Annotated[bool, typer.Option(help="Compare with the whole scene on the device.")] = False,
    resident: Annotated[float, typer.Option(help="Voxels of a scene on the device, for the compute alone.")] = 0,
    channels: Annotated[int, typer.Option(help="Width of the finest level.")] = USUAL,
    worlds: Annotated[list[int], typer.Option(help="Numbers of ranks.")] = [1],  # noqa: B006 (typer copies it)
    weak: Annotated[bool, typer.Option(help="Also scenes that grow with the ranks.")] = True,
    mapped: Annotated[Path | None, typer.Option(help="A folder for the scene's files; of one rank.")] = None,
    gather: Annotated[bool, typer.Option(help="Every rank gets the whole result; else what it computed.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Runs, of which the median counts.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON; other rows of an earlier run stay.")] = None,
) -> None:
    options = {"budget": int(budget), "kind": getattr(torch, dtype), "device": device, "whole": whole}
    options |= {"channels": channels, "resident": int(resident), "mapped": mapped, "gather": gather, "rounds": rounds}
    if mapped is not None and (whole or not gather or list(worlds) != [1]):
        raise typer.BadParameter("--mapped is for one rank that gets the whole result, and without --whole")
    kind_of_run = "strong" if mapped is None else "mapped"
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.dict()
        for world in worlds:
            jobs = [(kind_of_run, int(voxels))] + ([("weak", int(voxels) * world)] if weak and world > 1 else [])
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            torch.multiprocessing.spawn(worker, (world, port, jobs, options, shared), nprocs=world)
        table = dict(shared)
    one = table.get(row_name("strong", 1, channels, gather))
    for name, row in table.items():
        if one is not None and row["ranks"] > 1:
            share = one["seconds"] / row["seconds"]
            row["efficiency" if name.startswith("weak") else "speedup"] = share
        print(
            f"{name}: {row['voxels']:,} voxels, {row['blocks_by_rank']} blocks, budget {budget / 1e9:.1f} GB, {dtype}"
        )
        of = ", ".join(f"{seconds:.2f}" for seconds in row["seconds_by_round"])
        print(f"  {row['seconds']:.2f} s (of {of}), first block after {row['first_block_s']:.2f} s; before it:")
        for spent in row["parts_s_by_rank"]:
            print("  " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in spent.items()))
        print(f"  peak {row.get('peak_bytes', 0) / 1e9:.2f} GB")
        if "alone_s" in row:
            print(
                f"  network and maps alone {row['alone_s']:.2f} s: streamed {row['seconds'] / row['alone_s']:.2f} of it"
            )
        if "same_bits" in row:
            print(f"  whole {row['whole_s']:.2f} s, same bits: {row['same_bits']}")
        if "same_bits_of_a_strip" in row:
            print(f"  from mapped files ({row['files']}); same bits of a strip: {row['same_bits_of_a_strip']}")
        if "speedup" in row or "efficiency" in row:
            print(f"  against one rank: {row.get('speedup', row.get('efficiency')):.3f}")
    if out is not None:
        facts = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
        }
        before = json.loads(out.read_text())["results"] if out.exists() else {}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"facts": facts, "results": before | table}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
