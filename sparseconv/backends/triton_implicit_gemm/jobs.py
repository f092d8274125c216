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
    """Cut pairs ordered by tap into about ``max_jobs`` jobs of like length, a multiple of ``quantum`` pairs each.

    Every tap has at least one job, empty if the tap is: its gradient is then written as zero.
    """
    counts = np.asarray(tap_counts, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    goal = max(1, -(-int(starts[-1]) // max(1, max_jobs)))
    parts = np.maximum(1, np.rint(counts / goal).astype(np.int64))
    length = -(-counts // parts)
    length = np.maximum(quantum, -(-length // quantum) * quantum)
    parts = np.maximum(1, -(-counts // length))
    tap_jobs = np.concatenate([[0], np.cumsum(parts)])
    tap = np.repeat(np.arange(len(counts)), parts)
    index = np.arange(tap_jobs[-1]) - tap_jobs[tap]
    begin = starts[tap] + index * length[tap]
    end = np.minimum(begin + length[tap], starts[tap + 1])
    order = np.argsort(index / parts[tap], kind="stable")

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
