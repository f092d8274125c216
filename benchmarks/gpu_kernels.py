"""Check and time the GPU kernels, one configuration at a time, on shells and on voxel files.

    python benchmarks/gpu_kernels.py check conv weight host --data FOLDER --out FILE.json [--cases shell256,...]

Shells are the voxels within 1.25 of a sphere's surface in a RES^3 cube; a folder of .npz files with ``coords`` (N, 3)
gives the real cases. Times are medians of CUDA-event times in ms; nothing is reported for a kernel whose result is off.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseconv.backends.base import Request
from sparseconv.backends.triton_implicit_gemm import backend as implicit_gemm
from sparseconv.backends.triton_implicit_gemm.config import (
    ConvConfig,
    WeightGradConfig,
    conv_candidates,
    weight_grad_candidates,
)
from sparseconv.backends.triton_implicit_gemm.conv_recipe import ConvRecipe
from sparseconv.backends.triton_implicit_gemm.weight_grad_recipe import WeightGradRecipe
from sparseconv.geometry.gpu.tiles.schedule import WorkLists
from sparseconv.geometry.kernel_map import KernelMap
from tests.twins import build_schedule

#: (case, channels) of the comparison with other libraries
CASES = [
    ("shell1024", 64),
    ("shell512", 32),
    ("shell512", 128),
    ("shell256", 256),
    ("shell128", 512),
    ("shell64", 1024),
    ("lidar_ouster_os1_3sweeps_005", 32),
    ("lidar_ouster_os1_3sweeps_005", 64),
    ("tls_lonestar_005", 64),
    ("indoor_rooms_pcl_002", 64),
    ("shape_spot_256", 64),
    ("brain_mni152_2mm", 64),
    ("brain_mni152_2mm", 128),
]
#: (case, channels) of layers so wide that groups of taps may pay for their sums, and beside them
WIDE = [("shell64", 1024), ("shell128", 1024), ("lidar_ouster_os1_3sweeps_005", 1024)]
WIDE += [("shell128", 512), ("lidar_ouster_os1_3sweeps_005", 512), ("brain_mni152_2mm", 512)]
RESULTS: list[dict] = []


def shell(res: int) -> torch.Tensor:
    axis = torch.arange(res, device="cuda").float() - res / 2 + 0.5
    parts = []
    for start in range(0, res, 16):
        x = axis[start : start + 16]
        d = (x[:, None, None] ** 2 + axis[None, :, None] ** 2 + axis[None, None, :] ** 2).sqrt()
        part = torch.nonzero((d <= res / 2) & (d >= res / 2 - 1.25)).int()
        part[:, 0] += start
        parts.append(part)
    return torch.cat(parts)


def morton(coords: torch.Tensor) -> torch.Tensor:
    key = torch.zeros(len(coords), dtype=torch.int64, device=coords.device)
    c = (coords - coords.amin(0)).long()
    for bit in range(15):
        for axis in range(3):
            key |= ((c[:, axis] >> bit) & 1) << (3 * bit + 2 - axis)
    return torch.sort(key, stable=True).indices


def submanifold(coords: torch.Tensor, side: int = 3) -> KernelMap:
    half = side // 2
    c = coords.long() - coords.amin(0).long() + half
    size = c.amax(0) + half + 1
    key = (c[:, 0] * size[1] + c[:, 1]) * size[2] + c[:, 2]
    ordered, rows = torch.sort(key)
    table = torch.empty(side**3, len(c), dtype=torch.int32, device=coords.device)
    tap = 0
    span = range(-half, half + 1)
    for dx in span:
        for dy in span:
            for dz in span:
                want = key + (dx * size[1] + dy) * size[2] + dz
                at = torch.searchsorted(ordered, want).clamp_(max=len(c) - 1)
                table[tap] = torch.where(ordered[at] == want, rows[at], -1).int()
                tap += 1
    taps = side**3
    return KernelMap(
        len(c), len(c), taps, neighbors=table, identity_tap=taps // 2, mirror=tuple(range(taps - 1, -1, -1))
    )


@functools.lru_cache(maxsize=2)
def load(case: str, data: str) -> tuple[torch.Tensor, KernelMap]:
    if case.startswith("shell"):
        coords = shell(int(case[5:]))
    else:
        coords = torch.from_numpy(np.load(Path(data) / f"{case}.npz")["coords"]).cuda().int()
    return coords, submanifold(coords)


def reference(x, w, g, kernel_map):
    """Forward and both gradients tap by tap, in fp64 from the rounded operands."""
    start = 0
    y = torch.zeros(kernel_map.num_out, w.shape[2], dtype=torch.float64, device=x.device)
    dx = torch.zeros(kernel_map.num_in, x.shape[1], dtype=torch.float64, device=x.device)
    dw = torch.zeros(w.shape, dtype=torch.float64, device=x.device)
    groups = x.shape[1] // w.shape[1]
    ci, co = w.shape[1], w.shape[2] // groups
    for tap, count in enumerate(kernel_map.tap_counts):
        ins = kernel_map.in_rows[start : start + count].long()
        outs = kernel_map.out_rows[start : start + count].long()
        start += count
        xt, gt, wt = x[ins].double(), g[outs].double(), w[tap].double()
        for group in range(groups):
            a, b = slice(group * ci, (group + 1) * ci), slice(group * co, (group + 1) * co)
            y[outs, b] += xt[:, a] @ wt[:, b]
            dx[ins, a] += gt[:, b] @ wt[:, b].t()
            dw[tap][:, b] = xt[:, a].t() @ gt[:, b]
    return y, dx, dw


def error(got, want) -> float:
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def timed(run: Callable[[], object], seconds: float = 0.06) -> float:
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = int(min(60, max(5, seconds / max(1e-5, time.perf_counter() - begin))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for a, b in events:
        a.record()
        run()
        b.record()
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in events]))


def note(**row) -> None:
    RESULTS.append(row)
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def operands(kernel_map, c_in, c_out, dtype, groups=1):
    x = torch.randn(kernel_map.num_in, c_in, device="cuda").to(dtype)
    w = (torch.randn(kernel_map.num_taps, c_in // groups, c_out, device="cuda") * 0.1).to(dtype)
    g = torch.randn(kernel_map.num_out, c_out, device="cuda").to(dtype)
    return x, w, g


def compile_all(steps: Sequence[Any]) -> None:
    """Compile steps on all cores; a step that fails to compile fails again when it is run."""

    def one(step):
        try:
            step.compile()
        except Exception:
            return

    with ThreadPoolExecutor(14) as pool:
        list(pool.map(one, steps))


def conv_step(config, kernel_map, x, w, transposed, out):
    c_in, c_out = (out.shape[1], x.shape[1]) if transposed else (x.shape[1], out.shape[1])
    work = implicit_gemm.work_of(Request(kernel_map, x.device, x.dtype, c_in, c_out), True, transposed)
    return ConvRecipe(config, work, x, w, transposed).bind(kernel_map)


def check(data: str) -> None:
    """Every candidate of every verb, over dtypes, odd channels, groups and 125 taps, against fp64."""
    coords = shell(48)
    coords = coords[torch.randperm(len(coords), device="cuda")]
    small, large = submanifold(coords), submanifold(coords[:3000], 5)
    down = coords // 2
    unique, rows = torch.unique(down, dim=0, return_inverse=True)
    taps = (coords - 2 * unique[rows].int()).long()
    tap = (taps[:, 0] * 2 + taps[:, 1]) * 2 + taps[:, 2]
    order = torch.argsort(tap, stable=True)
    offsets = torch.cat([torch.zeros(1, device="cuda"), torch.bincount(tap, minlength=8).cumsum(0)]).long()
    strided = KernelMap(len(coords), len(unique), 8, pairs=(order.int(), rows[order].int(), offsets))
    limits = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}
    shapes = [(64, 64, 1), (32, 32, 1), (128, 128, 1), (256, 256, 1), (96, 160, 1), (16, 48, 1), (4, 32, 1), (5, 7, 1)]
    shapes += [(512, 256, 1), (64, 64, 2), (64, 64, 64), (48, 96, 48), (40, 72, 1), (12, 20, 4)]
    runs = []
    for kernel_map, name in (
        (small, "submanifold"),
        (strided, "strided"),
        (strided.reverse(), "inverse"),
        (large, "125"),
    ):
        for dtype in limits:
            several = shapes if dtype == torch.float16 else shapes[:1] + shapes[6:8]
            for c_in, c_out, groups in several if name == "submanifold" else several[:1]:
                x, w, g = operands(kernel_map, c_in, c_out, dtype, groups)
                want = reference(x, w, g, kernel_map)
                for verb, wanted in zip(("forward", "input_grad", "weight_grad"), want):
                    transposed = verb == "input_grad"
                    aligned = c_in * x.element_size() % 16 == 0 and c_out * x.element_size() % 16 == 0
                    request = Request(kernel_map, x.device, dtype, c_in, c_out, groups)
                    work = implicit_gemm.work_of(request, aligned, transposed)
                    many: Sequence[Any] = (
                        weight_grad_candidates(work) if verb == "weight_grad" else conv_candidates(work)
                    )
                    for config in many:
                        out = torch.full(wanted.shape, float("nan"), dtype=dtype, device="cuda")
                        if verb == "weight_grad":
                            step: Any = WeightGradRecipe(config, work, x, g, kernel_map.num_taps).bind(kernel_map)
                            arguments: tuple[torch.Tensor, ...] = (x, g, out)
                        else:
                            source = g if transposed else x
                            step = ConvRecipe(config, work, source, w, transposed).bind(kernel_map)
                            arguments = (source, w, out, source, source)
                        label = dict(check=name, dtype=str(dtype), shape=(c_in, c_out, groups), verb=verb)
                        runs.append((step, arguments, out, wanted, limits[dtype], {**label, "config": short(config)}))
    begin = time.perf_counter()
    compile_all([step for step, *_ in runs])
    note(compiled=len(runs), seconds=time.perf_counter() - begin)
    worst = 0.0
    for step, arguments, out, wanted, limit, label in runs:
        try:
            step(*arguments)
            e = error(out, wanted)
            first = out.clone()
            out.fill_(float("nan"))
            step(*arguments)
            same = torch.equal(first, out)
        except Exception as problem:
            note(**label, failed=repr(problem)[:300])
            continue
        worst = max(worst, e / limit)
        if not same or not e < limit:
            note(**label, error=e, same_bits=same)
    note(check="done", worst_error_over_limit=worst)


def conv_sweep(c: int) -> list[ConvConfig]:
    bk = min(c, 64)
    if c <= 128:
        found = [ConvConfig(128, c, bk, 4, s, gluon=True) for s in (2, 3)]
        found += [ConvConfig(128, c, bk, 8, 2, gluon=True), ConvConfig(64, c, bk, 4, 2, gluon=True)]
        return found
    return [ConvConfig(128, 256, 64, 8, 3, gluon=True)]


def conv(data: str, cases) -> None:
    for case, c in cases:
        coords, kernel_map = load(case, data)
        x, w, g = operands(kernel_map, c, c, torch.float16)
        out = torch.empty_like(g)
        orders: dict[str, dict[str, Any]] = {"gray": {}}
        if kernel_map.num_out >= 500_000 and c <= 128:
            near = morton(coords)
            orders["rows32k"] = {"chunk_rows": 32768}
            for rows in (8192, 32768, 131072):
                orders[f"morton{rows // 1024}k"] = {"chunk_rows": rows, "base_order": near}
            orders["morton"] = {"chunk_rows": 128, "base_order": near}
        for order, options in orders.items():
            kernel_map.prepared.clear()
            tiles = build_schedule(kernel_map.neighbors, 27, 128, **options)
            kernel_map.work_lists = WorkLists(bases={bool(options): tiles})
            waste = float(tiles.tile_counts.sum()) * 128 / kernel_map.num_pairs
            note(case=case, c=c, order=order, waste=waste)
            expected: dict[bool, Any] = {}
            for transposed in (False, True):
                configs = [replace(k, chunked=bool(options)) for k in conv_sweep(c)]
                configs = configs[:1] if transposed else configs
                compile_all([conv_step(k, kernel_map, x, w, transposed, out) for k in configs])
                for config in configs:
                    try:
                        step = conv_step(config, kernel_map, x, w, transposed, out)
                        out.fill_(float("nan"))
                        run = functools.partial(step, x, w, out, x, x)
                        run()
                        want = expected.setdefault(transposed, out.clone())
                        e = error(out, want)
                        ms = timed(run) if e < 2e-3 else float("nan")
                        note(
                            case=case,
                            c=c,
                            order=order,
                            dgrad=transposed,
                            config=short(config),
                            ms=ms,
                            tflops=2e-9 * kernel_map.num_pairs * c * c / ms,
                            err=e,
                        )
                    except Exception as problem:
                        note(case=case, c=c, config=short(config), failed=repr(problem)[:200])


def weight32(data: str, cases) -> None:
    """Tiles of the weight gradient of single numbers, with and without tf32."""
    n = 132
    tiles: dict[bool, list[tuple[Any, ...]]] = {
        True: [(64, 64, 16, 2, 3, 8 * n), (64, 64, 64, 4, 2, 3 * n, True), (128, 128, 32, 4, 2, 8 * n, True)],
        False: [(64, 64, 32, 4, 3, 8 * n), (64, 64, 16, 2, 4, 6 * n), (64, 128, 16, 4, 3, 12 * n)],
    }
    for case, c in (("shell256", 256), ("shell512", 64)):
        _, kernel_map = load(case, data)
        x, w, g = operands(kernel_map, c, c, torch.float32)
        out = torch.empty_like(w)
        for tf32, several in tiles.items():
            torch.backends.cuda.matmul.allow_tf32 = tf32
            work = implicit_gemm.work_of(Request(kernel_map, x.device, x.dtype, c, c), True)
            configs = [WeightGradConfig(*tile) for tile in several if max(tile[:2]) <= c]
            compile_all([WeightGradRecipe(k, work, x, g, 27).bind(kernel_map) for k in configs])
            for config in configs:
                step = WeightGradRecipe(config, work, x, g, kernel_map.num_taps).bind(kernel_map)
                ms = timed(functools.partial(step, x, g, out))
                note(case=case, c=c, tf32=tf32, wgrad32=short(config), ms=ms)
        torch.backends.cuda.matmul.allow_tf32 = False


def short(config) -> str:
    if isinstance(config, ConvConfig):
        tag = "G" if config.gluon else "P"
        return f"{tag}{config.block_m}x{config.block_n}x{config.block_k}w{config.warps}s{config.stages}" + (
            "copy" if config.weight_copy else ""
        )
    tag = "G" if config.gluon else "P"
    tile = f"{config.block_i}x{config.block_o}x{config.block_p}"
    return f"{tag}{tile}w{config.warps}s{config.stages}n{config.programs // 132}"


def weight_sweep(c: int) -> list[WeightGradConfig]:
    n = 132
    if c <= 64:
        found = [WeightGradConfig(64, c, 128, 4, s, k * n, True) for s in (2, 3) for k in (2, 3, 4, 6, 8)]
    else:
        found = [WeightGradConfig(128, 128, 64, 8, s, k * n, True) for s in (2, 3) for k in (2, 4, 6, 8, 16)]
    return found


def weight(data: str, cases) -> None:
    for case, c in cases:
        _, kernel_map = load(case, data)
        kernel_map.prepared.clear()
        kernel_map.work_lists = WorkLists()
        x, w, g = operands(kernel_map, c, c, torch.float16)
        out = torch.empty_like(w)
        want = None
        work = implicit_gemm.work_of(Request(kernel_map, x.device, x.dtype, c, c), True)
        steps = [WeightGradRecipe(k, work, x, g, 27).bind(kernel_map) for k in weight_sweep(c)]
        compile_all(steps)
        del steps
        for config in weight_sweep(c):
            try:
                step = WeightGradRecipe(config, work, x, g, kernel_map.num_taps).bind(kernel_map)
                out.fill_(float("nan"))
                run = functools.partial(step, x, g, out)
                run()
                want = out.clone() if want is None else want
                e = error(out, want)
                ms = timed(run) if e < 2e-3 else float("nan")
                note(case=case, c=c, wgrad=short(config), ms=ms, err=e)
            except Exception as problem:
                note(case=case, c=c, wgrad=short(config), failed=repr(problem)[:200])


def host(data: str) -> None:
    """First-call time, host time of a launch, graph capture, and no synchronisation."""
    coords = shell(64)
    kernel_map = submanifold(coords)
    x, w, g = operands(kernel_map, 64, 64, torch.float16)
    backend = implicit_gemm.TritonImplicitGemm()
    begin = time.perf_counter()
    backend.forward(x, w, kernel_map, 1)
    torch.cuda.synchronize()
    t1 = time.perf_counter()
    backend.input_grad(g, w, kernel_map, 1)
    torch.cuda.synchronize()
    t2 = time.perf_counter()
    backend.weight_grad(x, g, kernel_map, 1)
    torch.cuda.synchronize()
    t3 = time.perf_counter()
    note(first_call_s=t3 - begin, forward_s=t1 - begin, input_grad_s=t2 - t1, weight_grad_s=t3 - t2)
    key: Any
    for key, timings in backend._tuner.timings.items():
        note(tuned=key[0][0], timings=[(short(config), round(ms, 4)) for config, ms in timings])
    torch.cuda.set_sync_debug_mode("error")
    for name, run in {
        "forward": lambda: backend.forward(x, w, kernel_map, 1),
        "input_grad": lambda: backend.input_grad(g, w, kernel_map, 1),
        "weight_grad": lambda: backend.weight_grad(x, g, kernel_map, 1),
        "empty": lambda: torch.empty(10, device="cuda"),
    }.items():
        run()
        best = 1e9
        for _ in range(10):
            t = time.perf_counter()
            for _ in range(20):
                run()
            best = min(best, (time.perf_counter() - t) / 20)
            time.sleep(0.002)
        note(host=name, us=best * 1e6)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    want = backend.forward(x, w, kernel_map, 1)
    with torch.cuda.graph(graph):
        y = backend.forward(x, w, kernel_map, 1)
        dx = backend.input_grad(y, w, kernel_map, 1)
        dw = backend.weight_grad(x, y, kernel_map, 1)
    y.fill_(0)
    graph.replay()
    torch.cuda.synchronize()
    note(graph=torch.equal(y, want), finite=bool(torch.isfinite(dx).all() and torch.isfinite(dw).all()))


def dtypes(data: str, cases) -> None:
    """The three verbs as the backend chooses them, in every dtype; fp32 with and without tf32."""
    from sparseconv.backends.cupy_gather_scatter.backend import CupyGatherScatter

    for case, c in (("shell256", 256), ("shell512", 64), ("lidar_ouster_os1_3sweeps_005", 64)):
        _, kernel_map = load(case, data)
        runs = [(torch.float16, False), (torch.bfloat16, False), (torch.float32, True), (torch.float32, False)]
        for dtype, tf32 in runs:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            x, w, g = operands(kernel_map, c, c, dtype)
            for backend in (implicit_gemm.TritonImplicitGemm(), CupyGatherScatter()):
                note(
                    case=case,
                    c=c,
                    dtype=str(dtype),
                    tf32=tf32,
                    backend=backend.name,
                    **verbs(backend, kernel_map, x, w, g, 0.1),
                )
        torch.backends.cuda.matmul.allow_tf32 = False
    _, kernel_map = load("shell64", data)
    x, w, g = operands(kernel_map, 64, 64, torch.float64)
    note(case="shell64", c=64, dtype="fp64", backend="cupy", **verbs(CupyGatherScatter(), kernel_map, x, w, g, 0.1))


def verbs(backend, kernel_map, x, w, g, seconds: float) -> dict:
    return {
        "forward": timed(lambda: backend.forward(x, w, kernel_map, 1), seconds),
        "input_grad": timed(lambda: backend.input_grad(g, w, kernel_map, 1), seconds),
        "weight_grad": timed(lambda: backend.weight_grad(x, g, kernel_map, 1), seconds),
    }


def few(data: str, cases) -> None:
    """Few rows: splitting the taps against smaller tiles."""
    for res, c in ((16, 256), (24, 512), (32, 128), (32, 256), (48, 512), (64, 1024)):
        kernel_map = submanifold(shell(res))
        x, w, g = operands(kernel_map, c, c, torch.float16)
        out = torch.empty_like(g)
        n = min(c, 256)
        configs = [ConvConfig(128, n, 64, 8 if n == 256 else 4, 3, gluon=True)]
        configs += [ConvConfig(64, k, 64, 4, 3, gluon=True) for k in (64, 128)]
        configs += [replace(config, split=3) for config in configs] + [replace(configs[1], split=9)]
        compile_all([conv_step(k, kernel_map, x, w, False, out) for k in configs])
        want = None
        for config in configs:
            run = functools.partial(conv_step(config, kernel_map, x, w, False, out), x, w, out, x, x)
            out.fill_(float("nan"))
            run()
            want = out.clone() if want is None else want
            note(
                rows=kernel_map.num_out,
                c=c,
                config=short(config) + f"/{config.split}",
                ms=graph_timed(run),
                err=error(out, want),
            )


def graph_timed(run) -> float:
    """Milliseconds of a launch inside a replayed graph of 20."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    return timed(graph.replay, 0.03) / 20


def step(data: str, cases) -> None:
    """The three verbs as the backend runs them, timed choice beside the estimate alone, with the memory they take."""
    for case, c in cases:
        _, kernel_map = load(case, data)
        kernel_map.prepared.clear()
        kernel_map.work_lists = WorkLists()
        x, w, g = operands(kernel_map, c, c, torch.float16)
        row = {}
        for tuned in ("1", "0"):
            os.environ["SPARSECONV_AUTOTUNE"] = tuned
            for key in [k for k in kernel_map.prepared if isinstance(k, tuple) and k[0] in ("conv", "weight_grad")]:
                del kernel_map.prepared[key]
            backend = implicit_gemm.TritonImplicitGemm()
            begin = time.perf_counter()
            verbs(backend, kernel_map, x, w, g, 0.0)
            row[f"first_s{tuned}"] = time.perf_counter() - begin
            times = verbs(backend, kernel_map, x, w, g, 0.6 if tuned == "1" else 0.2)
            row.update({f"{verb}{tuned}": ms for verb, ms in times.items()})
            row[f"sum{tuned}"] = sum(times.values())
        os.environ["SPARSECONV_AUTOTUNE"] = "1"
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = backend.forward(x, w, kernel_map, 1)
        dx, dw = backend.gradients(x, w, y, kernel_map, 1)
        row["peak_mib"] = (torch.cuda.max_memory_allocated() - base) / 2**20
        row["results_mib"] = sum(t.numel() * t.element_size() for t in (y, dw, dx)) / 2**20
        del y, dw, dx
        note(case=case, c=c, **row)


def chain(data: str, wanted: Sequence[str]) -> None:
    """One group of taps, groups side by side, groups one after another: in turns and back, so that all run under load.

    A variant counts if it agrees with the first one, and its launches, one right behind another, with each other.
    """
    for case, c in WIDE:
        if wanted and case not in wanted and f"{case}:{c}" not in wanted:
            continue
        _, kernel_map = load(case, data)
        x, w, _ = operands(kernel_map, c, c, torch.float16)
        out, one = torch.empty_like(x), ConvConfig(128, 256, 64, 8, 3, gluon=True, bulk=True)
        variants = {"one group": one, "in order": replace(one, in_order=True), "side by side": replace(one, split=3)}
        variants |= {f"chain, turns {t}": replace(one, split=3, turns=t) for t in (1, 2, 4) if c // 256 % t == 0}
        for transposed in (False, True):
            steps = {name: conv_step(k, kernel_map, x, w, transposed, out) for name, k in variants.items()}
            compile_all(list(steps.values()))
            want: torch.Tensor | None = None
            windows: dict[str, list[float]] = {name: [] for name in steps}
            for name, run in steps.items():
                run(x, w, out.fill_(float("nan")), x, x)
                first = out.clone()
                want = first if want is None else want
                assert error(first, want) < 2e-3, name
                for _ in range(40):
                    out.fill_(float("nan"))
                    for _ in range(3):
                        run(x, w, out, x, x)
                    assert torch.equal(out, first), name
            for turn in range(12):
                for name in list(steps)[:: -1 if turn % 2 else 1]:
                    windows[name].append(timed(functools.partial(steps[name], x, w, out, x, x)))
            note(case=case, c=c, dgrad=transposed, **{name: float(np.median(ms)) for name, ms in windows.items()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "parts", nargs="+", choices=["check", "conv", "weight", "host", "dtypes", "few", "step", "weight32", "chain"]
    )
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", default=None)
    parser.add_argument("--cases", default="")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.cases.split(",") if name]
    cases = [(case, c) for case, c in CASES if not wanted or case in wanted or f"{case}:{c}" in wanted]
    begin = time.perf_counter()
    for part in arguments.parts:
        if part in ("conv", "weight", "dtypes", "few", "step", "weight32"):
            {"conv": conv, "weight": weight, "weight32": weight32, "dtypes": dtypes, "few": few, "step": step}[part](
                arguments.data, cases
            )
        elif part == "chain":
            chain(arguments.data, wanted)
        else:
            {"check": check, "host": host}[part](arguments.data)
        print(f"-- {part}: {time.perf_counter() - begin:.1f} s", flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(RESULTS, default=str))


if __name__ == "__main__":
    main()
