"""The work lists of a kernel map on a GPU: schedules and jobs, made on first use and kept with the map."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from sparseconv.geometry.gpu.lists import JOB_QUANTUM, Jobs, Schedule, ScheduleForm, most_jobs, plane_groups
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.streams import edge_stream, list_stream

#: rows that are sorted together where rows must stay near their neighbors: a few megabytes of features
CHUNK_ROWS = 32_768


def schedule_of(
    kernel_map: KernelMap,
    block_m: int,
    transposed: bool = False,
    split: int = 1,
    chunked: bool = False,
) -> Schedule:
    """The map's schedule at a tile size; transposed: of the reversed edges.

    A map with a mirror symmetry is its own reverse with the taps exchanged, so its one table serves both directions.
    ``split``: taps in so many groups with a row order each. ``chunked``: rows sorted inside runs of neighboring rows,
    and tiles launched in order. Where every output row has one edge, no tile has two taps and neither makes a
    difference.
    """
    if transposed and kernel_map.mirror is None:
        return schedule_of(kernel_map.reverse(), block_m, False, split, chunked)
    form = ScheduleForm(block_m, transposed, split, chunked)
    schedules = kernel_map.work_lists.schedules
    schedule = schedules.get(form)
    if schedule is None:
        # launches hold addresses: what another thread has kept meanwhile is never replaced
        schedule = schedules.setdefault(form, (_turned if transposed else _schedule)(kernel_map, form))
    return schedule


def jobs_of(kernel_map: KernelMap, max_jobs: int) -> Jobs:
    """The map's jobs, ``max_jobs`` at most or one per tap."""
    count = most_jobs(kernel_map.num_taps, kernel_map.num_pairs, max_jobs, JOB_QUANTUM)
    jobs = kernel_map.work_lists.jobs.get(count)
    if jobs is None:
        source = kernel_map.source
        with list_stream() if source is None else edge_stream(source.moment):
            offsets = kernel_map.tap_offsets if source is None else source.offsets()
            jobs = _kernels()[1].cut_jobs_on_device(offsets, count, JOB_QUANTUM, kernel_map.is_halved)
        jobs = kernel_map.work_lists.jobs.setdefault(count, jobs)
    return jobs


@cache
def _kernels() -> tuple[Any, Any]:
    from sparseconv.geometry.gpu import schedule, wgrad_splits  # Triton is loaded where it is used

    return schedule, wgrad_splits


def _schedule(kernel_map: KernelMap, form: ScheduleForm) -> Schedule:
    build, _ = _kernels()
    if build.meets_once(kernel_map):
        if form.split > 1 or form.chunked:
            return schedule_of(kernel_map, form.block_m)
        return build.one_tap_schedule(kernel_map, form.block_m)
    if form.split > 1:
        return build.schedule_on_gpu(kernel_map, form.block_m, plane_groups(kernel_map.num_taps, form.split))
    return build.schedule_on_gpu(kernel_map, form.block_m, None, CHUNK_ROWS if form.chunked else None)


def _turned(kernel_map: KernelMap, form: ScheduleForm) -> Schedule:
    """The schedule of the reversed edges of a map with a mirror symmetry: the same with other weight taps."""
    straight = schedule_of(kernel_map, form.block_m, False, form.split, form.chunked)
    return replace(straight, tile_taps=_mirrored(straight.tile_taps, kernel_map))


def _mirrored(tile_taps: torch.Tensor, kernel_map: KernelMap) -> torch.Tensor:
    """The mirrored tap of each."""
    mirror = kernel_map.mirror or ()
    last = len(mirror) - 1
    if all(tap == last - place for place, tap in enumerate(mirror)):
        return last - tile_taps
    taps = kernel_map.work_lists.mirror = _on_device(mirror, tile_taps.device)  # a graph that reads it keeps the map
    return taps[tile_taps.long()]


@lru_cache(maxsize=64)
def _on_device(mirror: tuple[int, ...], device: torch.device) -> torch.Tensor:
    taps = torch.tensor(mirror, dtype=torch.int32)
    return (taps.pin_memory() if device.type == "cuda" else taps).to(device, non_blocking=True)
