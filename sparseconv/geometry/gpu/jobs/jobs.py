"""The work list of the weight gradient: each tap's pairs cut into runs in proportion to their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.streams import appending, listing

#: pairs of one job are a multiple of this
JOB_QUANTUM = 128


@dataclass(frozen=True)
class Jobs:
    """J runs of pairs; job j sums pairs [begin[j], end[j]) of one tap; jobs of a tap are neighbours in number.

    Of a map that `is_halved`, begin and end of the taps behind the middle one are -1 less those of the same pairs in
    the list of the mirrored tap: they are read with input and output exchanged.

    J is known without reading the counts of the taps: jobs from ``tap_jobs[K]`` on are empty and belong to no tap.
    """

    begin: torch.Tensor  # (J,) int64
    end: torch.Tensor  # (J,) int64
    order: torch.Tensor  # (J,) int32: the order of launch; jobs over the same rows of different taps run together
    tap_jobs: torch.Tensor  # (K + 1,) int32: tap k owns the jobs [tap_jobs[k], tap_jobs[k + 1])

    @property
    def count(self) -> int:
        """J."""
        return self.begin.shape[0]

    @property
    def one_each(self) -> bool:
        """Whether every tap has exactly one job, so that a job's sum is the gradient and nothing is left to reduce."""
        return self.count == self.tap_jobs.shape[0] - 1


def jobs_of(kernel_map: KernelMap, max_jobs: int) -> Jobs:
    """The map's jobs, ``max_jobs`` at most or one a tap, cut on first use and kept with the map."""
    count = most_jobs(kernel_map.num_taps, kernel_map.num_pairs, max_jobs, JOB_QUANTUM)
    key = ("jobs", count)
    jobs = kernel_map.prepared.get(key)
    if jobs is None:
        kernels, fused = _on_gpu()
        jobs = fused.jobs_made(kernel_map, count)
        if jobs is None:
            source = kernel_map.source
            with listing() if source is None else appending(source.moment):
                offsets = kernel_map.tap_offsets if source is None else source.offsets()
                jobs = kernels.cut_jobs_on_device(offsets, count, JOB_QUANTUM, kernel_map.is_halved)
        kernel_map.prepared[key] = jobs
    return jobs


@cache
def _on_gpu() -> tuple[Any, Any]:
    from sparseconv.geometry.gpu import fused  # Triton is loaded where it is used
    from sparseconv.geometry.gpu.jobs import kernels

    return kernels, fused


def most_jobs(num_taps: int, num_pairs: int, max_jobs: int, quantum: int) -> int:
    """J: no more than asked for, than there are runs of a quantum of pairs, and than there are taps."""
    return max(num_taps, min(max_jobs, num_taps + num_pairs // quantum))


# ---- readable twin


def cut_jobs(tap_counts: Sequence[int], count: int, quantum: int, halved: bool = False) -> Jobs:
    """Cut pairs ordered by tap into ``count`` jobs, the longest of them as short as that allows.

    Every tap has at least one job, empty if the tap is (its gradient is then written as zero), so there are at least
    as many jobs as taps. Lengths are multiples of ``quantum``: all programs of a launch finish together. Jobs run in
    the order of how far into their tap they begin.
    """
    counts = np.asarray(tap_counts, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    low, high = 1, max(1, -(-int(counts.max(initial=0)) // quantum))  # in quanta: too short or just right, long enough
    while low < high:
        middle = (low + high) // 2
        if np.maximum(1, -(-counts // (middle * quantum))).sum() <= count:
            high = middle
        else:
            low = middle + 1
    parts = np.maximum(1, -(-counts // (high * quantum)))
    tap_jobs = np.concatenate([[0], np.cumsum(parts)])
    tap = np.repeat(np.arange(len(counts)), parts)
    index = np.arange(tap_jobs[-1]) - tap_jobs[tap]
    share = -(-counts // (parts * quantum)) * quantum  # a tap's pairs spread evenly over its jobs
    begin = np.minimum(starts[tap] + index * share[tap], starts[tap + 1])
    end = np.minimum(begin + share[tap], starts[tap + 1])
    order = np.lexsort((tap, index / parts[tap]))
    if halved:
        moved, turned = starts[len(counts) - 1 - tap] - starts[tap], tap > (len(counts) - 1) // 2
        begin, end = (np.where(turned, -1 - (side + moved), side) for side in (begin, end))
    empty = count - len(tap)
    return Jobs(
        torch.from_numpy(np.pad(begin, (0, empty))),
        torch.from_numpy(np.pad(end, (0, empty))),
        torch.from_numpy(np.concatenate([order, np.arange(len(tap), count)])).int(),
        torch.from_numpy(tap_jobs).int(),
    )
