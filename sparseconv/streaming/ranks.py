"""The ranks that stream one scene together: which blocks each computes, and what they tell one another."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
#: bytes that are added over the ranks together: a scene's rows need not be on the device at once
PIECE = 2**26


class Ranks:
    """The processes of a group that stream one scene; without a group, this one alone.

    What blocks leave lies in files that all ranks see. The group carries words, the ends of phases, and gradients: by
    tensors on ``device``, so that gloo and NCCL do alike.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh | None) -> Ranks:
        """Of a group, or of the one dimension of a mesh. Raises ValueError where torch.distributed is not there."""
        if group is None:
            return cls(None, 0, 1)
        from sparseconv.distributed.grid import group_of  # takes torch.distributed.checkpoint along

        found = group_of(group)
        return cls(found, dist.get_rank(found), dist.get_world_size(found))

    def agreed(self, work: Callable[[], tuple[T, dict[str, Any]]]) -> T:
        """What ``work`` makes, once no rank failed and all say the same of it: see `distributed.agreement.agreed`."""
        if self.group is None:
            return work()[0]
        from sparseconv.distributed.agreement import agreed

        return agreed(work, self.group)

    def heard(self, said: Any) -> list[Any]:
        """What each rank says, in their order."""
        if self.group is None:
            return [said]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, said, group=self.group)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks leave as soon as all are done. What one raises is raised there, and its words on the others."""
        own = None
        try:
            yield
        except Exception as error:  # whatever it is, the others must hear of it
            own = error
        words = self.heard(None if own is None else f"{type(own).__name__}: {own}")
        if own is not None:
            raise own
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(words) if text is not None]
        if failed:
            raise RuntimeError("; ".join(failed))

    def share(self, costs: Sequence[float]) -> list[int]:
        """Which of these tasks are this rank's, in order, so that the costs of all ranks come out alike."""
        return shared_out(costs, self.size)[self.rank]

    def summed(self, mine: dict[Any, torch.Tensor], device: torch.device) -> dict[Any, torch.Tensor]:
        """The sums over all ranks of tensors by their names; what a rank does not name is zero there."""
        if self.group is None:
            return mine
        kinds: dict[Any, Any] = {}
        for said in self.heard({name: (tuple(t.shape), t.dtype, t.is_cuda) for name, t in mine.items()}):
            kinds |= said
        made = {}
        for name in sorted(kinds):
            shape, dtype, is_on_device = kinds[name]
            where = device if is_on_device else torch.device("cpu")
            total = mine[name].contiguous() if name in mine else torch.zeros(shape, dtype=dtype, device=where)
            for piece in total.view(-1).split(max(1, PIECE // total.itemsize)):
                moved = piece.to(device)
                dist.all_reduce(moved, group=self.group)
                piece.copy_(moved)
            made[name] = total
        return made


#: no others
ALONE = Ranks(None, 0, 1)


def shared_out(costs: Sequence[float], size: int) -> list[list[int]]:
    """Tasks for ``size`` workers: the longest first, each to whoever has least to do. The largest sum is at most a
    third over the least possible (Graham, 1969).

    >>> shared_out([2.0, 3.0, 1.0, 4.0], 2)
    [[2, 3], [0, 1]]
    """
    made: list[list[int]] = [[] for _ in range(size)]
    loads = [(0.0, worker) for worker in range(size)]
    for task in sorted(range(len(costs)), key=lambda at: -costs[at]):
        load, worker = heapq.heappop(loads)
        made[worker].append(task)
        heapq.heappush(loads, (load + costs[task], worker))
    return [sorted(tasks) for tasks in made]
