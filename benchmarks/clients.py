"""Networks that people have, unmodified, under spconv and under this library's names for it: steps on new scans.

    python -m benchmarks.clients --clients DIR --data DIR --library spconv --json FILE
    python -m benchmarks.clients --clients DIR --data DIR --library sparseconv --accelerate --json FILE

``--clients`` is a folder with the clients' own files, which are not part of this project: OpenPCDet's
``spconv_backbone.py`` and ``spconv_utils.py`` in ``pcdet/``, Pointcept's ``spconv_unet_v1m1_base.py``. Every call is on
another of eight rotations of a scan, rows shuffled. Times are medians of CUDA events, in ms; compare runs of one
machine alone. With ``--device cpu`` they are of the wall clock, with all threads. With ``--check`` results and
gradients of the accelerated network are compared with the eager ones'.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import resource
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

SCANS = 8
CLIENTS = ("second", "second_res", "spunet", "second_b8", "spunet_b6")


class Client(NamedTuple):
    """A network, its scenes, and how it is called on one."""

    net: torch.nn.Module
    scenes: list[Any]
    call: Callable[[torch.nn.Module, Any], torch.Tensor]


def _module(name: str, path: Path | None = None, **attributes: Any) -> Any:
    """A module made of one file, so that a client needs nothing of its package but what is stood in for here."""
    made: Any = types.ModuleType(name)
    made.__path__ = []
    made.__dict__.update(attributes)
    sys.modules[name] = made
    if "." in name:
        setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], made)
    if path is not None:
        made.__package__ = name.rpartition(".")[0]
        exec(compile(path.read_text(), str(path), "exec"), made.__dict__)
    return made


class _Registry:
    def register_module(self, *_: Any, **__: Any) -> Callable[[type], type]:
        return lambda kind: kind


def _offset_to_batch(offset: torch.Tensor) -> torch.Tensor:
    counts = torch.diff(offset, prepend=offset.new_zeros(1))
    return torch.arange(len(counts), device=offset.device).repeat_interleave(counts)


def load_clients(folder: Path) -> tuple[Any, Any]:
    """OpenPCDet's backbones and Pointcept's SpUNet, from their files."""
    for name in ("pcdet", "pcdet.utils", "pcdet.models", "pcdet.models.backbones_3d", "pointcept", "pointcept.models"):
        _module(name)
    _module("pcdet.utils.spconv_utils", folder / "pcdet" / "spconv_utils.py")
    detectors = _module("pcdet.models.backbones_3d.spconv_backbone", folder / "pcdet" / "spconv_backbone.py")
    _module("pointcept.models.builder", MODELS=_Registry())
    _module("pointcept.models.utils", offset2batch=_offset_to_batch)
    stand_ins: tuple[tuple[str, dict[str, Any]], ...] = (
        ("torch_geometric", {}),
        ("torch_geometric.utils", {"scatter": None}),
        ("timm", {}),
        ("timm.layers", {"trunc_normal_": torch.nn.init.trunc_normal_}),
    )
    for name, attributes in stand_ins:
        try:
            importlib.import_module(name)
        except ImportError:
            _module(name, **attributes)
    return detectors, _module("pointcept.models.spunet", folder / "spconv_unet_v1m1_base.py")


def rotated(file: Path, crop: tuple[np.ndarray, np.ndarray] | None, device: str) -> list[torch.Tensor]:
    """Eight rotations of a scan about the vertical axis, voxels (N, 3) int32 in shuffled order."""
    points = np.load(file)["coords"].astype(np.float64)
    points -= np.median(points, 0)
    found = []
    for turn in range(SCANS):
        angle = 2 * np.pi * turn / SCANS
        cos, sin = np.cos(angle), np.sin(angle)
        cells = np.floor(points @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]).T).astype(np.int64)
        if crop is None:
            cells -= cells.min(0)
        else:
            low, high = crop
            cells = cells[((cells >= low) & (cells < high)).all(1)] - low
        cells = np.unique(cells, axis=0)
        cells = cells[np.random.default_rng(turn).permutation(len(cells))]
        found.append(torch.from_numpy(cells).int().to(device))
    return found


def _batched(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.cat([torch.full_like(p[:, :1], b), p], 1) for b, p in enumerate(parts)]).contiguous()


def make(name: str, detectors: Any, spunet: Any, data: Path, device: str) -> Client:
    """A client by its name."""
    torch.manual_seed(0)
    if name.startswith("second"):
        low, high = np.array([-752, -752, -20]), np.array([752, 752, 20])
        scans = [s.flip(1) for s in rotated(data / "lidar_ouster_os2_010.npz", (low, high), device)]
        items = 8 if name.endswith("b8") else 2
        scenes: list[Any] = []
        for turn in range(SCANS):
            coords = _batched([scans[(turn + 3 * item) % SCANS] for item in range(items)])
            scenes.append((torch.randn(len(coords), 4, device=device), coords))
        kind = detectors.VoxelResBackBone8x if name == "second_res" else detectors.VoxelBackBone8x
        net = kind(types.SimpleNamespace(get=lambda key, default=None: default), 4, np.array([1504, 1504, 40]))

        def detect(net: torch.nn.Module, scene: Any) -> torch.Tensor:
            batch = {"voxel_features": scene[0], "voxel_coords": scene[1], "batch_size": items}
            dense: torch.Tensor = net(batch)["encoded_spconv_tensor"].dense()
            return dense

        return Client(net.to(device), scenes, detect)
    scans = rotated(data / "indoor_rooms_pcl_002.npz", None, device)
    items = 6 if name.endswith("b6") else 1
    scenes = []
    for turn in range(SCANS):
        parts = [scans[(turn + item) % SCANS] for item in range(items)]
        ends = torch.tensor([len(p) for p in parts], device=device).cumsum(0)
        cells = torch.cat(parts)
        scenes.append((torch.randn(len(cells), 6, device=device), cells, ends))

    def segment(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        logits: torch.Tensor = net({"grid_coord": scene[1], "feat": scene[0], "offset": scene[2]})
        return logits

    return Client(spunet.SpUNetBase(6, 20).to(device), scenes, segment)


def timed(run: Callable[[Any], Any], scenes: list[Any], repeats: int) -> dict[str, float]:
    """Median of CUDA events and of the wall clock, ms a call; on a CPU the median of the wall clock."""
    if not scenes[0][0].is_cuda:
        run(scenes[0])
        walls = []
        for at in range(repeats):
            began = time.perf_counter()
            run(scenes[at % len(scenes)])
            walls.append(1e3 * (time.perf_counter() - began))
        return {"ms": round(sorted(walls)[len(walls) // 2], 1), "least_ms": round(min(walls), 1)}
    for scene in scenes:
        run(scene)
    torch.cuda.synchronize()
    spans, began = [], time.perf_counter()
    for at in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(scenes[at % len(scenes)])
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / repeats * 1e3
    times = sorted(a.elapsed_time(b) for a, b in spans)
    return {"ms": round(times[len(times) // 2], 3), "wall_ms": round(wall, 3)}


def busy(run: Callable[[Any], Any], scenes: list[Any]) -> dict[str, float]:
    """How long the card works a call, in ms, and launches a call, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for scene in scenes:
            run(scene)
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in record.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    total, until = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return {"busy_ms": round(total / 1e3 / len(scenes), 3), "kernels": round(len(spans) / len(scenes))}


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean() * 100


def compare(client: Client, other: torch.nn.Module, autocast: Any) -> dict[str, float]:
    """The largest difference of results, and of all gradients together, as parts of their norms."""
    worst = {"result_off": 0.0, "gradients_off": 0.0}
    for scene in client.scenes:
        found = []
        for net in (client.net, other):
            net.zero_grad(set_to_none=True)
            with autocast():
                y = client.call(net, scene)
            loss_of(y).backward()
            grads = torch.cat([p.grad.double().flatten() for p in net.parameters() if p.grad is not None])
            found.append((y.detach().double(), grads))
        (y, g), (y2, g2) = found
        worst["result_off"] = max(worst["result_off"], float((y - y2).norm() / y2.norm()))
        worst["gradients_off"] = max(worst["gradients_off"], float((g - g2).norm() / g2.norm()))
    return {key: float(f"{value:.3g}") for key, value in worst.items()}


def measure(args: argparse.Namespace, name: str, dtype: str, detectors: Any, spunet: Any) -> dict[str, Any]:
    began = time.perf_counter()
    client = make(name, detectors, spunet, args.data, args.device)
    net, scenes, call = client
    on_cuda = args.device == "cuda"
    row: dict[str, Any] = {"client": name, "dtype": dtype, "library": args.library, "accelerated": args.accelerate}
    row["voxels"] = [len(s[1]) for s in scenes]
    twin = copy.deepcopy(net) if args.check else None
    if args.accelerate:
        import sparseconv as sc

        sc.accelerate(net)

    def autocast() -> Any:
        kind = torch.float16 if dtype == "fp16" else torch.bfloat16
        return torch.autocast(args.device, kind, enabled=dtype in ("fp16", "bf16"))

    def forward(scene: Any) -> torch.Tensor:
        with autocast():
            return call(net, scene)

    def step(scene: Any) -> None:
        net.zero_grad(set_to_none=True)
        loss_of(forward(scene)).backward()

    if args.check and twin is not None:
        row.update(compare(client, twin, autocast))
        twin = None
    if not on_cuda:
        began = time.perf_counter()  # the scans are no part of a first step
        step(scenes[0])
        row["first_s"] = round(time.perf_counter() - began, 2)
        row["step"] = timed(step, scenes, args.repeats)
        row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
        net.eval()
        with torch.inference_mode():
            row["inference"] = timed(forward, scenes, args.repeats)
        return row
    step(scenes[0])
    torch.cuda.synchronize()
    row["first_s"] = round(time.perf_counter() - began, 1)
    for scene in scenes[:4]:
        step(scene)
    torch.cuda.synchronize()
    row["five_s"] = round(time.perf_counter() - began, 1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row["step"] = timed(step, scenes, args.repeats)
    row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    row["allocated_mib"] = round(torch.cuda.memory_allocated() / 2**20)
    row["reserved_mib"] = round(torch.cuda.memory_reserved() / 2**20)
    if args.busy:
        row["step"] |= busy(step, scenes)
    net.eval()
    try:
        with torch.inference_mode():
            row["inference"] = timed(forward, scenes, args.repeats)
            if args.busy:
                row["inference"] |= busy(forward, scenes)
    except RuntimeError as error:  # of a library that has no kernel for it
        row["inference_error"] = str(error).strip().splitlines()[-1][:200]
    if args.accelerate:
        from sparseconv import nn

        row["explained"] = nn.explain(net)
    return row


def machine(device: str) -> dict[str, Any]:
    """The card, or the CPU with its instructions and threads."""
    if device == "cuda":
        return {"card": torch.cuda.get_device_name()}
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": names[0].partition(":")[2].strip(), "capability": capability, "threads": torch.get_num_threads()}


def _spelled(args: argparse.Namespace) -> list[str]:
    """The arguments of a run, folders by what they hold."""
    words = ["--library", args.library, "--clients", "CLIENTS", "--data", "DATA", "--json", args.json.name]
    words += ["--device", "cpu"] if args.device == "cpu" else []
    words += [f"--{flag}" for flag in ("accelerate", "check", "busy") if getattr(args, flag)]
    return [*words, "--client", *args.client, "--dtype", *args.dtype, "--repeats", str(args.repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("spconv", "sparseconv"), required=True)
    parser.add_argument("--clients", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--client", nargs="+", choices=CLIENTS, default=list(CLIENTS[:3]))
    parser.add_argument("--dtype", nargs="+", choices=("fp16", "bf16", "tf32", "fp32"), default=["fp16"])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--debug", action="store_true", help="say where a capture failed")
    args = parser.parse_args()
    if args.debug:
        logging.basicConfig(level=logging.DEBUG)
    warnings.filterwarnings("ignore")
    if args.library == "sparseconv":
        from sparseconv.interop import spconv

        spconv.install()
    elif args.device == "cpu":
        from benchmarks.cpu import load_spconv

        load_spconv()
    constants: Any = importlib.import_module("spconv.constants")
    constants.SPCONV_ALLOW_TF32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    detectors, spunet = load_clients(args.clients)
    facts = {
        **machine(args.device),
        "torch": torch.__version__,
        "command": " ".join(["python -m benchmarks.clients", *_spelled(args)]),
    }
    rows = []
    for name in args.client:
        for dtype in args.dtype:
            try:
                row = measure(args, name, dtype, detectors, spunet)
            except Exception as error:
                if args.repeats < 5:
                    raise
                row = {"client": name, "dtype": dtype, "library": args.library, "error": repr(error)[:400]}
            print(json.dumps(row), flush=True)
            rows.append(row)
            args.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
            if args.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
