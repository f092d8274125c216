"""Which jobs a command means: the first table of the targets for a GPU, a short list for a CPU, subsets of either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.layers import measure
from benchmarks.layers.measure import EVERYONE
from benchmarks.layers.report import targets
from sparseconv.bench.command import HERE
from sparseconv.bench.measure import FORWARD, MAP, STEP, Job

Grid = tuple[tuple[str, Sequence[int]], ...]

#: cases and channels of the CPU's table; in the quick one every package that it needs is on the index
CPU_CASES: Grid = (("lidar_ouster_os1_3sweeps_005", (16, 64, 128)), ("lidar_ouster_os2_010", (16, 64)))
CPU_CASES += (("shape_spot_256", (64,)), ("indoor_rooms_pcl_002", (64,)), ("brain_mni152_2mm", (16, 64)))
CPU_QUICK: Grid = tuple(HERE["cpu"].items())
#: seconds of the quick table, shared by its implementations; under five minutes with what stands around them
QUICK_BUDGET = 200.0
GPU_QUICK = (("shell_256", (256,)), ("shell_512", (32,)), ("lidar_ouster_os1_3sweeps_005", (64,)))
#: how a figure grows with N, C and occupancy, each along one line
SCALING: Grid = (("shell_64", (64,)), ("shell_128", (64,)), ("shell_256", (32, 64, 128, 256)), ("shell_512", (64,)))
SCALING += tuple((f"uniform_{percent}_128", (64,)) for percent in (1, 3, 10, 30, 100))
SCALING += (("plane_1024", (64,)), ("rings_128_4096", (64,)))
#: the same lines on a CPU, and the case and the edges of the kernels along which either grows with K
CPU_SCALING: Grid = (("shell_32", (32,)), ("shell_64", (16, 32, 64, 128)), ("shell_128", (32,)), ("shell_256", (32,)))
CPU_SCALING += tuple((f"uniform_{percent}_48", (32,)) for percent in (1, 3, 10, 30, 100))
KERNELS = (1, 3, 5, 7)
#: channels at which a map is timed that only the first step completes: the step is short beside it
MAP_CHANNELS = 32


def first_table() -> Grid:
    """Cases and channels of the first table of the targets."""
    found: dict[str, list[int]] = {}
    for cell in targets()["layers"]:
        found.setdefault(cell["case"], []).append(cell["channels"])
    return tuple(found.items())


def chosen(grid: Grid, cases: Sequence[str], channels: Sequence[int]) -> Grid:
    """The grid's cases of these names (all without any); a case that it has not, at these channels or 64."""
    if not cases and not channels:
        return grid
    known = dict(grid)
    return tuple((case, channels or known.get(case, (64,))) for case in (cases or known))


def layer_jobs(
    grid: Grid,
    implementations: Sequence[str],
    dtypes: Sequence[str],
    device: str,
    seconds: float,
    shuffled: bool,
    quantities: Sequence[str] = measure.ASKED,
) -> list[Job]:
    """Jobs by implementation. The first dtype gets every quantity and, if asked, shuffled rows; the others forward and
    step. Maps are timed once a case, at few channels."""
    maps = tuple(q for q in quantities if q in (MAP, measure.CAPTURED_MAP))
    layers = tuple(q for q in quantities if q not in maps)
    jobs = []
    for name in implementations:
        for case, channels in grid:
            for order in (False, True) if shuffled else (False,):
                for c in channels:
                    wanted = layers
                    if order:
                        wanted = tuple(q for q in layers if q in (FORWARD, STEP))
                    if wanted:
                        jobs.append(Job(name, case, c, dtypes[0], order, wanted, device, seconds))
                if maps:
                    c = min(MAP_CHANNELS, *channels, 512)
                    jobs.append(Job(name, case, c, dtypes[0], order, maps, device, seconds))
        for dtype in dtypes[1:]:
            wanted = tuple(q for q in layers if q in (FORWARD, STEP))
            if wanted:
                jobs += [Job(name, case, c, dtype, False, wanted, device, seconds / 2) for case, cs in grid for c in cs]
    return jobs


def with_lines(
    jobs: Sequence[Job], implementations: Sequence[str], dtype: str, device: str, seconds: float
) -> list[Job]:
    """Jobs, and those of `scaling_jobs` whose forward and step are not among them."""
    shapes = {replace(job, quantities=(), seconds=0.0) for job in jobs if {FORWARD, STEP} <= {*job.quantities}}
    lines = scaling_jobs(implementations, dtype, device, seconds)
    return [*jobs, *(job for job in lines if replace(job, quantities=(), seconds=0.0) not in shapes)]


def scaling_jobs(implementations: Sequence[str], dtype: str, device: str, seconds: float) -> list[Job]:
    """Forward and step along N, along C, along occupancy, and along K."""
    grid, case, c = (SCALING, "shell_128", 64) if device == "cuda" else (CPU_SCALING, "shell_64", 32)
    wanted = (FORWARD, STEP)
    jobs = []
    for name in implementations:
        jobs += [Job(name, of, many, dtype, False, wanted, device, seconds) for of, cs in grid for many in cs]
        jobs += [Job(name, case, c, dtype, False, wanted, device, seconds, kernel) for kernel in KERNELS]
    return list(dict.fromkeys(jobs))


def named(implementations: Sequence[str], compare: bool, device: str) -> list[str]:
    """The implementations asked for; with ``compare``, ours and every other one that has kernels for the device."""
    if not compare:
        return list(implementations) or ["sparseconv"]
    others = [name for name, kind in EVERYONE.items() if ":" not in name and device in kind.devices]
    return list(dict.fromkeys([*implementations, *others]))
