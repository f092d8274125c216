"""Clocks of a client's calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def timed(run: Callable[[Any], Any], scenes: list[Any], repeats: int) -> dict[str, float]:
    """Median of CUDA events and of the wall clock, ms per call; on a CPU the median of the wall clock."""
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
    """How long the GPU works a call, in ms, and launches per call, by torch's profiler."""
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
