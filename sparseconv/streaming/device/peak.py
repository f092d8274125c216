"""What a GPU's memory held at most, without a reset of torch's own count: that is the user's."""

from __future__ import annotations

import torch


class Peak:
    """The most bytes allocated on a GPU since `begin`; 0 on a CPU.

    torch's peak only grows. Where it has grown since `begin`, it is the answer; else the most that marks have seen is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._before, self._marked = device, 0, 0

    def now(self) -> int:
        return self._allocated("current")

    def begin(self) -> None:
        self._before, self._marked = self._allocated("peak"), self.now()

    def mark(self) -> None:
        self._marked = max(self._marked, self.now())

    def most(self) -> int:
        highest = self._allocated("peak")
        return highest if highest > self._before else max(self._marked, self.now())

    def _allocated(self, which: str) -> int:
        if self.device.type != "cuda":
            return 0
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)  # a twentieth of `memory_allocated`'s time
        return int(stats["allocated_bytes"]["all"][which]) if stats else 0
