"""The work list of the weight gradient: each tap's pairs cut into runs in proportion to their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparseconv.geometry.kernel_map import KernelMap

#: pairs of one job are a multiple of this
JOB_QUANTUM = 128


@dataclass(frozen=True)
class Jobs:
    """J runs of pairs; job j sums pairs [begin[j], end[j]) of one tap; jobs of a tap are neighbours in number."""

    begin: torch.Tensor  # (J,) int64
    end: torch.Tensor  # (J,) int64
    order: torch.Tensor  # (J,) int32: the order of launch; jobs over the same rows of different taps run together
    tap_jobs: torch.Tensor  # (K + 1,) int32: tap k owns the jobs [tap_jobs[k], tap_jobs[k + 1])
    count: int

    @property
    def one_each(self) -> bool:
        """Whether every tap has exactly one job, so that a job's sum is the gradient and nothing is left to reduce."""
        return self.count == self.tap_jobs.shape[0] - 1


def cut_jobs(tap_counts: Sequence[int], max_jobs: int, quantum: int, device: torch.device) -> Jobs:
    """Cut pairs ordered by tap into ``max_jobs`` jobs at most, the longest of them as short as that allows.

    Every tap has at least one job, empty if the tap is (its gradient is then written as zero), so there are at least
    as many jobs as taps. Lengths are multiples of ``quantum``: all programs of a launch finish together.
    """
    counts = np.asarray(tap_counts, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    low, high = 1, max(1, -(-int(counts.max(initial=0)) // quantum))  # in quanta: too short or just right, long enough
    while low < high:
        middle = (low + high) // 2
        if np.maximum(1, -(-counts // (middle * quantum))).sum() <= max_jobs:
            high = middle
        else:
            low = middle + 1
    length = high * quantum
    parts = np.maximum(1, -(-counts // length))
    tap_jobs = np.concatenate([[0], np.cumsum(parts)])
    tap = np.repeat(np.arange(len(counts)), parts)
    index = np.arange(tap_jobs[-1]) - tap_jobs[tap]
    share = -(-counts // (parts * quantum)) * quantum  # a tap's pairs spread evenly over its jobs
    begin = np.minimum(starts[tap] + index * share[tap], starts[tap + 1])
    end = np.minimum(begin + share[tap], starts[tap + 1])
    order = np.lexsort((begin - end, index / parts[tap]))

    def put(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

    return Jobs(
        put(begin, torch.int64),
        put(end, torch.int64),
        put(order, torch.int32),
        put(tap_jobs, torch.int32),
        int(tap_jobs[-1]),
    )


def jobs_of(kernel_map: KernelMap, max_jobs: int) -> Jobs:
    """The map's jobs, cut on first use and kept with the map."""
    key = ("jobs", max_jobs)
    jobs = kernel_map.prepared.get(key)
    if jobs is None:
        jobs = cut_jobs(kernel_map.tap_counts, max_jobs, JOB_QUANTUM, kernel_map.in_rows.device)
        kernel_map.prepared[key] = jobs
    return jobs
