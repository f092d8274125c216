"""The CPU engine against spconv's CPU wheel, side by side in one run.

    python benchmarks/cpu.py [--data FOLDER] [--channels 16 32 64 128] [--rounds 9] [--out FILE] [--add]

Submanifold kernel 3 in fp32. Before a case is timed, the values of both are compared with one thread (spconv's CPU
results change from run to run with more). Then the two take turns, so that a disturbance of the machine meets both;
the least and the median of the runs that no other process interrupted are kept. *Map* is from coordinates to everything
that a training step needs: ours includes what the backend derives from the edges; *plan* is ours without that. A step
begins without gradients, as after an optimiser's ``zero_grad``. Peak memory is the rise of the process's high-water
mark (VmHWM) over its resident size before a step, after freed memory went back to the system.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import sparseconv as sc
from sparseconv import memory
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
    memory.release()
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


QUIET = 0.03  # seconds after which a process's idle threads sleep
TURN = 3  # counted calls of a turn


class Ours:
    """One case at one width, through this library."""

    def __init__(self, coords: torch.Tensor, channels: int) -> None:
        self.coords, (self.x, weight, self.g) = coords, operands(coords, channels)
        self.weight = weight.requires_grad_()
        self.plan = sc.ConvolutionPlan(sc.VoxelGrid(coords), 3)

    def forward(self) -> torch.Tensor:
        return self.plan.execute(self.x, self.weight)

    def map(self) -> torch.Tensor:
        return sc.ConvolutionPlan(sc.VoxelGrid(self.coords), 3).execute(self.x, self.weight)

    def plan_alone(self) -> sc.ConvolutionPlan:
        return sc.ConvolutionPlan(sc.VoxelGrid(self.coords), 3)

    def forget(self) -> None:
        self.x.grad = self.weight.grad = None

    def weight_grad(self) -> torch.Tensor | None:
        return self.weight.grad

    def workspace(self) -> int:
        return self.plan.workspace_bytes(*self.weight.shape[1:])


class Spconv:
    """The same through spconv, whose first convolution builds its map."""

    plan_alone = workspace = None

    def __init__(self, coords: torch.Tensor, channels: int) -> None:
        self.spconv, self.coords, (self.x, weight, self.g) = load_spconv(), coords, operands(coords, channels)
        self.shape = (coords[:, 1:].max(0).values + 1).tolist()
        self.layer = self.spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key="map")
        with torch.no_grad():
            self.layer.weight.copy_(weight.permute(2, 0, 1).reshape(self.layer.weight.shape))
            self.known = self.run(None).indice_dict

    def run(self, known):  # type: ignore[no-untyped-def]
        return self.layer(self.spconv.SparseConvTensor(self.x, self.coords, self.shape, 1, indice_dict=known))

    def forward(self) -> torch.Tensor:
        return self.run(self.known).features

    def map(self) -> torch.Tensor:
        return self.run(None).features

    def forget(self) -> None:
        self.x.grad = self.layer.weight.grad = None

    def weight_grad(self) -> torch.Tensor:
        channels = self.g.shape[1]
        return self.layer.weight.grad.reshape(channels, 27, channels).permute(1, 2, 0)


def operands(coords: torch.Tensor, channels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (N, C), which wants a gradient, weight (27, C, C) and dL/dy (N, C): the same in every process."""
    torch.manual_seed(0)
    x, g = torch.randn(len(coords), channels, requires_grad=True), torch.randn(len(coords), channels)
    return x, torch.randn(27, channels, channels) / (27 * channels) ** 0.5, g


def serve(engine: type[Ours | Spconv], coords: torch.Tensor, channels: int, threads: int, questions) -> None:  # type: ignore[no-untyped-def]
    """The life of a process: a question comes through the pipe, its answer goes back."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    run = engine(coords, channels)

    def step() -> None:
        run.forget()
        run.forward().backward(run.g)

    calls: dict[str, Callable[[], object]] = {"forward": torch.no_grad()(run.forward), "step": step}
    calls["map + forward"] = torch.no_grad()(run.map)
    if run.plan_alone is not None:
        calls["plan"] = run.plan_alone
    for question in iter(questions.recv, None):
        if isinstance(question, Path):
            torch.set_num_threads(1)
            y = run.forward()
            y.backward(run.g)
            torch.save((y.detach(), run.x.grad, run.weight_grad()), question)
            torch.set_num_threads(threads)
            questions.send(list(calls))
        elif question == "peak":
            questions.send(peak(step))
        elif question == "workspace":
            questions.send(run.workspace and run.workspace())
        else:
            calls[question]()
            spent = []
            for _ in range(TURN):
                before, start = preemptions(), clock()
                calls[question]()
                taken = 1e3 * (clock() - start)
                spent.append((preemptions() == before, taken))
            time.sleep(QUIET)
            questions.send(spent)


def summary(runs: list[tuple[bool, float]]) -> Times:
    """Of runs (undisturbed, milliseconds); where at least three were not interrupted, only those count."""
    calm = [taken for alone, taken in runs if alone]
    times = calm if len(calm) >= 3 else [taken for _, taken in runs]
    return min(times), statistics.median(times), len(calm)


def measure(case: str, coords: torch.Tensor, channels: int, rounds: int, threads: int) -> Row:
    """One case at one width: values compared, then everything timed in turns."""
    spawn, pipes, processes = multiprocessing.get_context("spawn"), {}, []
    for engine in (Ours, Spconv):
        pipes[engine], end = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(engine, coords, channels, threads, end), daemon=True))
        processes[-1].start()
        end.close()

    def ask(engine: type[Ours | Spconv], question: object):  # type: ignore[no-untyped-def]
        pipes[engine].send(question)
        return pipes[engine].recv()

    with tempfile.TemporaryDirectory() as folder:
        files = {engine: Path(folder) / engine.__name__ for engine in pipes}
        calls = {engine: ask(engine, file) for engine, file in files.items()}
        ours, theirs = (torch.load(file) for file in files.values())
    error = max(float((a - b).abs().max() / b.square().mean().sqrt()) for a, b in zip(ours, theirs))
    if not error < 1e-3:
        raise SystemExit(f"{case} at {channels} channels: ours and spconv differ by {error:.2g} of the rms; not timed")
    del ours, theirs

    times: dict[type, dict[str, Times]] = {}
    spent: dict[tuple[type, str], list[tuple[bool, float]]]
    spent = {(engine, call): [] for engine, names in calls.items() for call in names}
    for _ in range(-(-rounds // TURN)):
        for call in calls[Ours]:
            for engine in pipes:
                if call in calls[engine]:
                    spent[engine, call] += ask(engine, call)
    for engine in pipes:
        found = {call: summary(spent[engine, call]) for call in calls[engine]}
        # spconv builds its map in its first convolution: the map is what that call takes beyond a forward pass
        both, forward = found["map + forward"], found["forward"]
        found["map"] = (both[0] - forward[0], both[1] - forward[1], min(both[2], forward[2]))
        times[engine] = found
    peaks = {engine: ask(engine, "peak") for engine in pipes}
    workspace = ask(Ours, "workspace")
    for engine, process in zip(pipes, processes):
        pipes[engine].send(None)
        process.join()
    pairs = sc.ConvolutionPlan(sc.VoxelGrid(coords), 3).kernel_map.num_pairs
    return Row(
        case,
        len(coords),
        pairs,
        channels,
        times[Ours],
        times[Spconv],
        peaks[Ours],
        peaks[Spconv],
        workspace,
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
    console = Console(width=140)
    if args.out is None:
        plural = "" if args.threads == 1 else "s"
        args.out = Path(__file__).parent / "results" / f"cpu-{args.threads}-thread{plural}.json"
    rows = [Row(**row) for row in json.loads(args.out.read_text())["rows"]] if args.add and args.out.is_file() else []
    for case, coords in coordinates(args.data, args.cases).items():
        for channels in args.channels:
            rows = [row for row in rows if (row.case, row.channels) != (case, channels)]
            rows.append(measure(case, coords, channels, args.rounds, args.threads))
            console.print(f"{case} C {channels}: done", style="dim")
            record = {"machine": machine(args.threads), "rows": [asdict(row) for row in rows]}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    show(rows, console)


if __name__ == "__main__":
    main()
