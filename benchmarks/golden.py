"""Hashes of every array of kernel maps and their schedules, to compare two versions of the code bit by bit.

    python -m benchmarks.golden --json FILE [--device cuda|cpu] [--cases NAME ...] [--small] [--against FILE] [--arrays]

A hash is SHA-256 over names, dtypes, shapes and bytes of the arrays of one stage of a map: look-up table, edges, tap
lists, tiles, jobs, reached voxels. Every scene is taken in its given order of rows and shuffled, and its maps are made

    eager      from an ordinary grid;
    captured   from a grid of fixed size (`FixedGrid`), in a CUDA graph on a GPU;
    streams    the same, with maps on streams beside those of features, as `nn.capture` builds them (a GPU alone).

With ``--device cpu`` the maps are those of the CPU, which have no tiles and no jobs. With TRITON_INTERPRET=1 and
``--device cpu`` the small scenes go through the GPU's kernels in Triton's interpreter. ``--against`` compares with an
earlier file, and exits with 1 where a hash differs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseconv import Boundary, ConvolutionPlan, IndexRange, KernelMap, VoxelGrid
from sparseconv.geometry.edges import Window
from sparseconv.geometry.fixed_grid import FixedGrid

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DATA = Path(os.environ.get("SPARSECONV_BENCH_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
#: the scenes of the table of map times: rules, scans beside the checkout, and a volume that a package carries
SCENES = (
    "shell_64",
    "shell_128",
    "shell_256",
    "shell_512",
    "shell_1024",
    "lidar_ouster_os1_3sweeps_005",
    "tls_lonestar_005",
    "indoor_rooms_pcl_002",
    "shape_spot_256",
    "brain_mni152_2mm",
)
#: rows of a tile, transposed, groups of taps, rows sorted in runs
SCHEDULES = (
    (128, False, 1, False),
    (64, False, 1, False),
    (128, True, 1, False),
    (128, False, 3, False),
    (128, False, 1, True),
    (64, True, 1, True),
)
#: programs that share the pairs of a weight gradient at most
JOBS = (400, 40)
TILES = ("neighbors", "out_rows", "tile_counts", "tile_rows", "tile_taps", "tile_order", "slots")
LISTS = ("begin", "end", "order", "tap_jobs")
Arrays = dict[str, Any]


# ---- the adapter: where this version of the package keeps what is hashed


@cache
def _named(name: str) -> Any:
    """What the package calls ``name``, in whichever of its modules of maps that lies; None where nothing is."""
    import sparseconv

    for room in ("geometry", "backends", "gpu"):
        folder = Path(sparseconv.__file__).parent / room
        for info in pkgutil.walk_packages([str(folder)], f"sparseconv.{room}."):
            if "cupy" in info.name or "llvm" in info.name:
                continue
            module = importlib.import_module(info.name)
            found = getattr(module, name, None)
            if getattr(found, "__module__", None) == info.name:
                return found
    return None


def _map_by_kernels(fine: VoxelGrid, coarse: VoxelGrid, window: Window, boundary: Boundary) -> KernelMap:
    """The map that a GPU would build, of grids on the CPU, by the interpreter."""
    from sparseconv.geometry import edges

    torus = edges.torus_of(fine, window, boundary)
    most = None if fine.count is None else fine.most_pairs(coarse, window, boundary)  # type: ignore[attr-defined]
    source = _named("find_edges_on_gpu")(fine, coarse.coords, window, torus, most)
    identity, mirror = (None, None) if coarse is not fine else window.symmetry if torus is None else (None, None)
    sizes = len(fine), len(coarse), len(window.offsets)
    found = KernelMap(*sizes, source=source, identity_tap=identity, mirror=mirror)
    if fine.count is not None:
        found.num_pairs = fine.pairs_like(coarse, window, boundary)  # type: ignore[attr-defined]
    return found


def _reached_by_kernels(grid: VoxelGrid, window: Window, boundary: Boundary, to_fine: bool) -> torch.Tensor:
    from sparseconv.geometry import edges

    torus = edges.torus_of(None, window, boundary)
    torus = torus if to_fine else window.coarse_torus(torus)
    size = grid.batch_size, window.offsets, window.stride, torus
    return _named("reach")(grid.coords, grid.extent, *size, to_fine=to_fine)


def _looked_up(grid: VoxelGrid, coords: torch.Tensor) -> torch.Tensor:
    return _named("lookup")(grid.hash_table, coords).long() if INTERPRETED else grid.lookup(coords)


def _schedule(edges: KernelMap, form: tuple[int, bool, int, bool]) -> Any:
    schedule_of = _named("schedule_of")
    module = sys.modules[schedule_of.__module__]
    if INTERPRETED and hasattr(module, "_is_cuda"):
        vars(module)["_is_cuda"] = lambda device: True
    return schedule_of(edges, *form)


def _jobs(edges: KernelMap, most: int) -> Any:
    return _named("jobs_of")(edges, most)


def _compiled() -> None:
    """Wait for kernels that compile on threads of their own."""
    wait = _named("await_compilers")  # an earlier version's
    if wait is not None:
        wait()


def _beside(device: torch.device) -> Any:
    """What ``run()`` builds maps on: streams other than the current one."""
    return (_named("Aside") or _named("SideStreams"))(device)  # an earlier version's, or this one's


# ---- what is hashed


def stages(plan_map: KernelMap, fine: VoxelGrid, coarse: VoxelGrid, tiled: bool) -> Iterator[tuple[str, Arrays]]:
    """(stage, its arrays) of a map between two grids, in the order in which a training step asks for them."""
    edges, padded = plan_map, plan_map.padded
    if tiled:
        yield "tiles 128", _tiles(edges, SCHEDULES[0])
        yield f"jobs {JOBS[1]}", _lists(_jobs(edges, JOBS[1]))
    ins, outs, offsets = edges.half_pairs if edges.is_halved else (edges.in_rows, edges.out_rows, edges.tap_offsets)
    half = (edges.num_taps + 1) // 2 if edges.is_halved else edges.num_taps
    yield "half lists", {"in": ins, "out": outs, "offsets": offsets, "live": (offsets, half)}
    yield "lists", {
        "in": edges.in_rows, "out": edges.out_rows, "offsets": edges.tap_offsets,
        "live": (edges.tap_offsets, edges.num_taps),
    }  # fmt: skip
    yield "edges", {"neighbors": edges.neighbors}
    yield "symmetry", {"identity": edges.identity_tap, "mirror": edges.mirror, "meets all": edges.meets_all}
    back = edges.reverse()
    yield "reversed", {"neighbors": back.neighbors}
    if not padded:
        yield "counts", {"taps": edges.tap_counts, "pairs": edges.num_pairs, "coverage": edges.coverage}
    yield "grids", {"fine": fine.coords, "coarse": coarse.coords}
    if tiled:
        for form in SCHEDULES[1:]:
            yield "tiles {} transposed {} split {} runs {} in order False".format(*form), _tiles(edges, form)
        yield f"jobs {JOBS[0]}", _lists(_jobs(edges, JOBS[0]))


def table(grid: VoxelGrid) -> Iterator[tuple[str, Arrays]]:
    """What a grid's table answers: for its own rows, and for those a step aside along each axis."""
    found = {"own": _looked_up(grid, grid.coords)}
    for axis in range(1, grid.rank + 1):
        moved = grid.coords.clone()
        moved[:, axis] += 1
        found[f"axis {axis}"] = _looked_up(grid, moved)
    yield "table", found
    yield "extent", {"start": grid.extent.start, "end": grid.extent.end, "batch": grid.batch_size}


def _tiles(edges: KernelMap, form: tuple[int, bool, int, bool]) -> Arrays:
    schedule, (block_m, transposed, split, in_runs) = _schedule(edges, form), form
    turned = None  # taps of the other direction, which earlier versions kept with some of the schedules
    if transposed and edges.mirror is not None:
        turned = _schedule(edges, (block_m, False, split, in_runs)).tile_taps
    elif (block_m, transposed, split) == (128, False, 1) and edges.is_halved:
        turned = 26 - schedule.tile_taps
    arrays = {name: getattr(schedule, name) for name in TILES}
    return {"rows of a tile": schedule.block_m, **arrays, "turned_taps": turned}


def _lists(jobs: Any) -> Arrays:
    return {name: getattr(jobs, name) for name in LISTS}


def digest(value: Any) -> str:
    """SHA-256 of an array's dtype, shape and bytes, or of a plain value's text."""
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    told = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    told.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return told.hexdigest()


@dataclass
class Hashes:
    """Digests by case and stage; by array too, where that is asked for."""

    by_array: bool = False
    found: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, case: str, stage: str, arrays: Arrays) -> None:
        """Hash one stage; lists that are longer than their edges are cut to these first."""
        live = arrays.pop("live", None)
        if live is not None:
            count = int(live[0][live[1]])
            arrays |= {side: arrays[side][:count] for side in ("in", "out")}
        each = {name: digest(value) for name, value in arrays.items()}
        into = self.found.setdefault(case, {})
        into[stage] = hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()[:32]
        if self.by_array:
            into |= {f"{stage} / {name}": value[:32] for name, value in each.items()}


# ---- scenes


@dataclass(frozen=True)
class Small:
    """A scene of few rows and the window that is moved over it."""

    name: str
    rank: int
    kernel: int | None
    spread: int = 5
    batch: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    generative: bool = False


CROSS = ((0, 0, 0), (0, 0, 5), (0, -5, 0), (3, 0, 0), (0, 0, 1))
SMALL = (
    Small("cube of 3", 3, 3),
    Small("batch of 3", 3, 3, batch=3),
    Small("wide cube of 3", 3, 3, spread=40),
    Small("down by 2", 3, 2, options=(("stride", 2),)),
    Small("strided cube of 3", 3, 3, options=(("stride", 2),)),
    Small("dilated", 3, 3, options=(("dilation", 2),)),
    Small("periodic", 3, 3, options=(("boundary", "periodic"),)),
    Small("periodic, strided", 3, 3, options=(("boundary", "periodic"), ("stride", 2))),
    Small("cube of 5", 3, 5),
    Small("cross", 3, None, options=(("taps", CROSS),)),
    Small("one tap, strided", 3, 1, options=(("stride", 2),)),
    Small("up by 2", 3, 2, options=(("stride", 2),), generative=True),
    Small("up, periodic", 3, 3, options=(("boundary", "periodic"), ("stride", 2)), generative=True),
    Small("line", 1, 3, spread=60),
    Small("plane", 2, 3, spread=8, batch=2),
    Small("rank 4", 4, 2, spread=3),
    Small("window of 81", 4, 3, spread=3),
    Small("far apart", 3, 3, spread=2**18),
)


def small_scene(case: Small, rows: int, device: torch.device) -> torch.Tensor:
    """Distinct rows, some coordinates negative, in lexicographic order; of three batch items the second is empty."""
    generator = torch.Generator().manual_seed(len(case.name))
    grown = round(case.spread * max(1.0, rows / 150) ** (1 / case.rank))
    coords = torch.randint(-grown, grown, (2 * rows, 1 + case.rank), generator=generator)
    coords[:, 0] = coords[:, 0].abs() % case.batch
    coords[:, 0] += (coords[:, 0] == 1).long() * (case.batch == 3)
    return torch.unique(coords, dim=0)[:rows].int().contiguous().to(device)


def scene(name: str, device: torch.device) -> torch.Tensor | None:
    """The coordinates (N, 4) int32 of a case in lexicographic order; None where it is not here."""
    if name.startswith("shell_"):
        coords = _shell(int(name[6:]), device)
    elif name == "brain_mni152_2mm":
        if (DATA / f"{name}.npz").exists():
            coords = torch.from_numpy(np.load(DATA / f"{name}.npz")["coords"])
        elif find_spec("nilearn"):
            from nilearn.datasets import load_mni152_template

            coords = torch.from_numpy(np.argwhere(np.asarray(load_mni152_template(resolution=2).dataobj) > 0))
        else:
            return None
    elif not (DATA / f"{name}.npz").exists():
        return None
    else:
        coords = torch.from_numpy(np.load(DATA / f"{name}.npz")["coords"])
    return torch.nn.functional.pad(coords.int().to(device), (1, 0)).contiguous()


def _shell(size: int, device: torch.device) -> torch.Tensor:
    """Voxels within 1.25 of the surface of the sphere inscribed in a cube, in integers."""
    axis = 2 * torch.arange(size, device=device) - (size - 1)  # in half voxels
    outer, inner = size**2, round((size - 2.5) ** 2)
    parts = []
    for first in range(0, size, 16):
        square = (axis[first : first + 16, None, None] ** 2) + (axis[None, :, None] ** 2) + (axis[None, None] ** 2)
        found = torch.nonzero((square <= outer) & (square >= inner)).int()
        found[:, 0] += first
        parts.append(found)
    return torch.cat(parts)


def orders(coords: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The rows as they are given, and shuffled."""
    yield "given", coords
    order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(0)).to(coords.device)
    yield "shuffled", coords[order].contiguous()


def padded(coords: torch.Tensor, more: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and dead ones behind them, and the number of the first."""
    dead = coords.new_full((more, coords.shape[1]), -1)
    return torch.cat([coords, dead]), torch.tensor([len(coords)], dtype=torch.int32, device=coords.device)


# ---- maps of one scene, made in every way


def hash_scene(
    hashes: Hashes, name: str, coords: torch.Tensor, batch: int, window: Small, ways: tuple[str, ...], tiled: bool
) -> None:
    """Add the hashes of one window over one scene."""
    for order, rows in orders(coords):
        for way in ways:
            case = f"{name} | {order} | {way}"
            if way in ("captured", "streams"):
                _hash_fixed(hashes, case, rows, batch, window, way == "streams", tiled)
            else:
                _hash_eager(hashes, case, rows, batch, window, tiled)


def _options(window: Small, grid: VoxelGrid) -> dict[str, Any]:
    options = dict(window.options)
    if options.get("boundary") == "periodic":
        size = [2 * -(-(n + 1) // 2) for n in grid.extent.shape]
        if window.generative:
            start, size = tuple(2 * v for v in grid.extent.start), [2 * n for n in size]
        else:
            start = grid.extent.start
        options["boundary"] = Boundary.periodic(IndexRange(start, tuple(a + n for a, n in zip(start, size))))
    return options


def _plan(grid: VoxelGrid, window: Small, options: dict[str, Any]) -> tuple[KernelMap, VoxelGrid, VoxelGrid]:
    """The map from fine to coarse, and these grids."""
    if INTERPRETED:
        plan = Window.of(grid.rank, window.kernel, options.get("stride", 1), options.get("dilation", 1),
                         taps=options.get("taps"))  # fmt: skip
        boundary = options.get("boundary") or Boundary.absent()
        if not plan.is_strided:
            return _map_by_kernels(grid, grid, plan, boundary), grid, grid
        if grid.count is not None:
            other = grid.reached(plan, boundary, to_fine=window.generative)  # type: ignore[attr-defined]
        else:
            reached = _reached_by_kernels(grid, plan, boundary, window.generative)
            other = VoxelGrid(reached, grid.batch_size)
        fine, coarse = (other, grid) if window.generative else (grid, other)
        return _map_by_kernels(fine, coarse, plan, boundary), fine, coarse
    make = ConvolutionPlan.transposed if window.generative else ConvolutionPlan
    made = make(grid, window.kernel, **options)
    straight = made.transpose() if window.generative else made
    return straight.kernel_map, straight.source, straight.target


def _hash_eager(hashes: Hashes, case: str, rows: torch.Tensor, batch: int, window: Small, tiled: bool) -> None:
    grid = VoxelGrid(rows, batch)
    edges, fine, coarse = _plan(grid, window, _options(window, grid))
    for stage, arrays in (*stages(edges, fine, coarse, tiled), *table(grid)):
        hashes.add(case, stage, arrays)


def _hash_fixed(
    hashes: Hashes, case: str, rows: torch.Tensor, batch: int, window: Small, beside: bool, tiled: bool
) -> None:
    example = VoxelGrid(rows, batch)
    options = _options(window, example)
    more = max(10, len(rows) // 50)

    def step() -> tuple[FixedGrid, list[tuple[str, Arrays]]]:
        extent = options["boundary"].extent if "boundary" in options else None
        if extent is not None and window.generative:
            extent = IndexRange(tuple(v // 2 for v in extent.start), tuple(v // 2 for v in extent.end))
        grid = FixedGrid(coords, count, example, room=2.0, extent=extent)
        edges, fine, coarse = _plan(grid, window, options)
        # lists of a reversed map and of the whole are made of those before: a graph keeps what it wrote
        return grid, [*stages(edges, fine, coarse, tiled)]

    coords, count = padded(rows, more)
    if coords.is_cuda:
        grid, found = _captured(step, coords.device, beside)
    else:
        grid, found = step()
    hashes.add(case, "fault", {"fault": grid.fault, "count": grid.count})
    for stage, arrays in found:
        hashes.add(case, stage, arrays)


def _captured(step: Callable[[], Any], device: torch.device, beside: bool) -> Any:
    """What a step finds, replayed from a CUDA graph that was captured of it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()  # the example's maps, and all kernels
        torch.cuda.synchronize(device)
        _compiled()
        graph, side = torch.cuda.CUDAGraph(), _beside(device) if beside else None
        context = nullcontext() if side is None else side.run()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"), context:
            found = step()
        graph.replay()
    torch.cuda.synchronize(device)
    found[1].append(("graph", {}))
    found[0].golden_graph = graph  # whose memory the arrays are
    return found


def hash_all(
    names: list[str], rows: int, device: torch.device, by_array: bool = False, small: Sequence[Small] = SMALL
) -> Hashes:
    """The hashes of the scenes of these names, and of small ones of so many rows."""
    hashes = Hashes(by_array)
    tiled = device.type == "cuda" or INTERPRETED
    ways: tuple[str, ...] = ("eager", "captured")
    if tiled:
        ways = ("eager", "captured", "streams") if device.type == "cuda" else ("eager", "captured")
    for case in small:
        coords = small_scene(case, rows, device)
        hash_scene(hashes, case.name, coords, case.batch, case, ways, tiled)
    for name, stride in itertools.product(names, (1, 2)):
        found = scene(name, device)
        if found is None:
            print(f"{name} is not here", file=sys.stderr)
            continue
        window = Small(name, 3, 3) if stride == 1 else Small(name, 3, 2, options=(("stride", 2),))
        if stride == 2 and name == "shell_1024":
            continue
        hash_scene(hashes, f"{name}, {window.kernel} by {stride}", found, 1, window, ways, tiled)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}, {window.kernel} by {stride}", file=sys.stderr, flush=True)
    return hashes


def differences(found: dict[str, dict[str, str]], want: dict[str, dict[str, str]]) -> list[str]:
    """What two sets of hashes do not agree on; cases and stages that only one has count too."""
    said = []
    for case in sorted(found.keys() | want.keys()):
        mine, theirs = found.get(case, {}), want.get(case, {})
        both = sorted(mine.keys() | theirs.keys())
        said += [f"{case} | {stage}" for stage in both if mine.get(stage) != theirs.get(stage)]
    return said


def run(
    out: Path | None = None,
    against: Path | None = None,
    device: str | None = None,
    cases: list[str] | None = None,
    small: bool = False,
    rows: int | None = None,
    by_array: bool = False,
) -> int:
    """Hash, write and compare; 1 where a hash differs from those in ``against``."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)
    rows = rows or (4000 if place.type == "cuda" else 150)
    names = [] if small or INTERPRETED else list(cases or SCENES)
    hashes = hash_all(names, rows, place, by_array)
    found = {"torch": torch.__version__, "device": str(place), "rows": rows, "hashes": hashes.found}
    print(f"{sum(map(len, hashes.found.values()))} hashes of {len(hashes.found)} maps")
    if out:
        out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if against is None:
        return 0
    other = differences(hashes.found, json.loads(against.read_text())["hashes"])
    print("\n".join(["all hashes agree"] if not other else [f"{len(other)} hashes differ:", *other]))
    return int(bool(other))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the hashes here")
    parser.add_argument("--against", type=Path, help="compare with the hashes in this file")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU, where there is one")
    parser.add_argument("--cases", nargs="*", help="scenes besides the small ones; default: all ten")
    parser.add_argument("--small", action="store_true", help="the small scenes alone")
    parser.add_argument("--rows", type=int, help="rows of a small scene")
    parser.add_argument("--arrays", action="store_true", help="a hash of every single array, too")
    args = parser.parse_args()
    return run(args.json, args.against, args.device, args.cases, args.small, args.rows, args.arrays)


if __name__ == "__main__":
    sys.exit(main())
