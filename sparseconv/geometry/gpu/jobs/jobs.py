"""The work list of the weight gradient: each tap's pairs cut into runs in proportion to their number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparseconv.gpu.program import Fixed

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

    def fixed(self, in_rows: torch.Tensor, out_rows: torch.Tensor) -> Fixed:
        """What a launch over the jobs of these pairs takes."""
        return Fixed((in_rows, out_rows, self.begin, self.end, self.order))


def most_jobs(num_taps: int, num_pairs: int, max_jobs: int, quantum: int) -> int:
    """J: no more than asked for, than there are runs of a quantum of pairs, and than there are taps."""
    return max(num_taps, min(max_jobs, num_taps + num_pairs // quantum))
