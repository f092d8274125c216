"""Jobs that lie in one allocation, whose arrays become tensors when they are asked for."""

from __future__ import annotations

import torch

from sparseconv.geometry.gpu.jobs.jobs import Jobs
from sparseconv.gpu.arena import Arena, Kinds
from sparseconv.gpu.launcher import INTERPRETED
from sparseconv.gpu.program import Fixed

#: the arrays of jobs, as `PackedJobs.ARRAYS`
JOB_KINDS = Kinds((torch.int64, torch.int64, torch.int32, torch.int32))


def job_lengths(count: int, taps: int) -> tuple[int, ...]:
    """Those of the arrays of ``count`` jobs."""
    return count, count, count, taps + 1


class PackedJobs(Jobs):
    """Jobs in one allocation, from the ``first`` of its arrays on, which become tensors when they are asked for."""

    _arena: Arena
    _first: int
    ARRAYS = ("begin", "end", "order", "tap_jobs")

    def __init__(self, arena: Arena, first: int = 0) -> None:
        self.__dict__.update(_arena=arena, _first=first)

    @property
    def count(self) -> int:
        return self._arena.length_of(self._first)

    @property
    def one_each(self) -> bool:
        return self.count == self._arena.length_of(self._first + 3) - 1

    def fixed(self, in_rows: torch.Tensor, out_rows: torch.Tensor) -> Fixed:
        if INTERPRETED:
            return super().fixed(in_rows, out_rows)
        addresses = (in_rows.data_ptr(), out_rows.data_ptr(), *self._arena[self._first : self._first + 3])
        return Fixed.at(addresses, (), lambda: super(PackedJobs, self).fixed(in_rows, out_rows))

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in self.ARRAYS:
            raise AttributeError(name)
        array = self.__dict__[name] = self._arena.tensor(self._first + self.ARRAYS.index(name))
        return array
