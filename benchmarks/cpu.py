"""The CPU engine against spconv's CPU wheel, side by side in one run.

    python benchmarks/cpu.py [--data FOLDER] [--channels 16 32 64 128] [--rounds 9] [--out FILE] [--add]

Submanifold kernel 3 in fp32. Before a case is timed, the values of both are compared with one thread (spconv's CPU
results change from run to run with more). Then the two take turns, so that a disturbance of the machine meets both;
the least and the median of the runs that no other process interrupted are kept. *Map* is from coordinates to everything
that a training step needs: ours includes what the backend derives from the edges; *plan* is ours without that. Peak
memory is the rise of the process's high-water mark (VmHWM) over its resident size before a step, after freed memory
went back to the system.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import sparseconv as sc
from sparseconv.backends import cpu_products, cpu_threads

CASES = ("lidar_ouster_os1_3sweeps_005", "lidar_ouster_os2_010", "indoor_rooms_pcl_002", "shape_spot_256")


Times = tuple[float, float, int]  # least and median milliseconds, undisturbed runs


@dataclass
class Row:
    """Times of ours and of spconv by what was timed, peak bytes of a step, the largest error."""

    case: str
    voxels: int
    pairs: int
    channels: int
    ours: dict[str, Times]
    spconv: dict[str, Times]
    ours_peak: int | None
    spconv_peak: int | None
    workspace: int
    error: float


def coordinates(data: Path | None, names: list[str]) -> dict[str, torch.Tensor]:
    """Case -> coords (N, 4) int32, batch first: from the folder, or the brain volume that nilearn carries."""
    if data is not None:
        found = {name: np.load(data / f"{name}.npz")["coords"] for name in names}
    else:
        from nilearn.datasets import load_mni152_template

        brain = np.asarray(load_mni152_template(resolution=2).dataobj)
        found = {"mni152_2mm": np.argwhere(brain > 0)}
    return {
        name: torch.from_numpy(np.pad(points.astype(np.int32), ((0, 0), (1, 0)))).contiguous()
        for name, points in found.items()
    }


def load_spconv():  # type: ignore[no-untyped-def]
    """spconv.pytorch, its question for a CUDA stream answered, since a CPU-only torch has none."""
    import spconv.pytorch as spconv
    from spconv.pytorch import cppcore, functional, ops

    for module in (cppcore, ops, functional):
        if hasattr(module, "get_current_stream"):
            module.get_current_stream = lambda: 0
    return spconv


def resident(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(call: Callable[[], object]) -> int | None:
    """Bytes that a call adds to the resident size at its highest."""
    if platform.system() != "Linux":
        return None
    vars(cpu_products._buffers).clear()
    cpu_threads._pool.cache_clear()  # its threads end, and give their buffers back
    gc.collect()
    time.sleep(0.1)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    after = resident("VmHWM")
    return None if before is None or after is None else max(0, after - before)


def preemptions() -> int:
    """How often the system took the processor from a thread of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def take_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Least and median milliseconds of each call and how many counted, after one round that does not.

    Where at least three runs of a call were not interrupted by another process, only those count. With one thread the
    clock is the processor time, which waiting for others does not lengthen.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    spent: dict[str, list[tuple[bool, float]]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            before, start = preemptions(), clock()
            call()
            taken = 1e3 * (clock() - start)
            spent[name].append((preemptions() == before, taken))
    kept = {}
    for name, runs in spent.items():
        calm = [taken for alone, taken in runs[1:] if alone]
        times = calm if len(calm) >= 3 else [taken for _, taken in runs[1:]]
        kept[name] = (min(times), statistics.median(times), len(calm))
    return kept


def measure(spconv, case: str, coords: torch.Tensor, channels: int, rounds: int, threads: int) -> Row:  # type: ignore[no-untyped-def]
    """One case at one width: values compared, then everything timed in turns."""
    rows, shape = len(coords), (coords[:, 1:].max(0).values + 1).tolist()
    torch.manual_seed(0)
    x, g = torch.randn(rows, channels, requires_grad=True), torch.randn(rows, channels)
    theirs = spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key="map")
    weight = theirs.weight.detach().reshape(channels, 27, channels).permute(1, 2, 0).contiguous().requires_grad_()

    def spconv_map():  # type: ignore[no-untyped-def]
        with torch.no_grad():
            tensor = spconv.SparseConvTensor(x.detach(), coords, shape, 1)
            return theirs(tensor).indice_dict

    def our_plan() -> sc.ConvolutionPlan:
        return sc.ConvolutionPlan(sc.VoxelGrid(coords), 3)

    known, plan = spconv_map(), our_plan()

    def spconv_forward() -> torch.Tensor:
        return theirs(spconv.SparseConvTensor(x, coords, shape, 1, indice_dict=known)).features

    def spconv_inference() -> torch.Tensor:
        with torch.no_grad():
            return spconv_forward()

    def our_inference() -> torch.Tensor:
        with torch.no_grad():
            return plan.execute(x, weight)

    def our_first() -> torch.Tensor:
        with torch.no_grad():
            return our_plan().execute(x, weight)

    torch.set_num_threads(1)
    results = []
    for run, w in ((spconv_forward, theirs.weight), (lambda: plan.execute(x, weight), weight)):
        x.grad = w.grad = None
        y = run()
        y.backward(g)
        dw = w.grad if w is weight else w.grad.reshape(channels, 27, channels).permute(1, 2, 0)
        results.append((y.detach(), x.grad, dw.clone()))
    torch.set_num_threads(threads)
    error = max(float((a - b).abs().max() / b.square().mean().sqrt()) for a, b in zip(*reversed(results)))
    if not error < 1e-3:
        raise SystemExit(f"{case} at {channels} channels: ours and spconv differ by {error:.2g} of the rms; not timed")

    times = take_turns(
        {
            "spconv forward": spconv_inference,
            "our forward": our_inference,
            "spconv step": lambda: spconv_forward().backward(g),
            "our step": lambda: plan.execute(x, weight).backward(g),
            "spconv map + forward": spconv_map,
            "our map + forward": our_first,
            "our plan": our_plan,
        },
        rounds,
    )
    # spconv builds its map in its first convolution: the map is what that call takes beyond a forward pass
    for who in ("spconv", "our"):
        both, forward = times[f"{who} map + forward"], times[f"{who} forward"]
        times[f"{who} map"] = (both[0] - forward[0], both[1] - forward[1], min(both[2], forward[2]))

    def of(who: str) -> dict[str, Times]:
        return {name.removeprefix(f"{who} "): value for name, value in times.items() if name.startswith(who)}

    return Row(
        case,
        rows,
        plan.kernel_map.num_pairs,
        channels,
        of("our"),
        of("spconv"),
        peak(lambda: plan.execute(x, weight).backward(g)),
        peak(lambda: spconv_forward().backward(g)),
        plan.workspace_bytes(channels, channels, torch.float32),
        error,
    )


def machine(threads: int) -> dict[str, object]:
    """What a figure depends on."""
    model = platform.processor()
    if platform.system() == "Linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "threads": threads,
        "clock": "processor time" if threads == 1 else "wall",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "load": None if platform.system() == "Windows" else os.getloadavg(),
    }


def show(rows: list[Row], console: Console) -> None:
    """A line a case: ms of ours, and how many times faster than spconv."""
    table = Table(title="CPU: ours in ms (times faster than spconv in the same run); least of all rounds")
    for head in ("case", "C", "forward", "step", "map", "map + forward", "peak MB (spconv)"):
        table.add_column(head, justify="left" if head == "case" else "right")
    for row in rows:
        cells = [f"{row.ours[k][0]:.1f} ({row.spconv[k][0] / row.ours[k][0]:.2f}x)" for k in ("forward", "step", "map")]
        whole = "map + forward"
        cells.append(f"{row.ours[whole][0]:.1f} ({row.spconv[whole][0] / row.ours[whole][0]:.2f}x)")
        memory = "" if row.ours_peak is None else f"{row.ours_peak / 1e6:.0f} ({(row.spconv_peak or 0) / 1e6:.0f})"
        table.add_row(row.case, str(row.channels), *cells, memory)
    console.print(table)


def main() -> None:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=beside if beside.is_dir() else None)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--channels", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/cpu-N-threads.json")
    parser.add_argument("--add", action="store_true", help="keep the rows in --out that this run does not measure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spconv, console = load_spconv(), Console(width=140)
    if args.out is None:
        plural = "" if args.threads == 1 else "s"
        args.out = Path(__file__).parent / "results" / f"cpu-{args.threads}-thread{plural}.json"
    rows = [Row(**row) for row in json.loads(args.out.read_text())["rows"]] if args.add and args.out.is_file() else []
    for case, coords in coordinates(args.data, args.cases).items():
        for channels in args.channels:
            rows = [row for row in rows if (row.case, row.channels) != (case, channels)]
            rows.append(measure(spconv, case, coords, channels, args.rounds, args.threads))
            console.print(f"{case} C {channels}: done", style="dim")
            record = {"machine": machine(args.threads), "rows": [asdict(row) for row in rows]}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    show(rows, console)


if __name__ == "__main__":
    main()
