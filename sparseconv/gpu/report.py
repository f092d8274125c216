"""Numbers on their way from a kernel to the CPU."""

from __future__ import annotations

import torch

from sparseconv.gpu.launcher import pointer
from sparseconv.torch_private import is_capturing


class Report:
    """Integers (L,) int64 that a kernel writes on a device. Queue more work between `send` and `read`: nobody waits.

    >>> report = Report(2, torch.device("cpu"))
    >>> _ = report.values.copy_(torch.tensor([3, 4]))  # as a kernel does
    >>> report.send()
    >>> report.read()
    [3, 4]
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.values = torch.empty(length, dtype=torch.int64, device=device)
        self.pointer = pointer(self.values)
        self._event: torch.cuda.Event | None = None

    def send(self) -> None:
        """Copy the integers to the CPU, behind the kernel in the current stream of its device."""
        device = self.values.device
        self.values = self.values.to("cpu", non_blocking=True)  # into pinned memory, which PyTorch keeps until then
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    @property
    def has_arrived(self) -> bool:
        """Whether `read` would wait for nothing; False while a CUDA graph is captured, when no event may be asked."""
        return self._event is None or (not is_capturing() and self._event.query())

    def read(self) -> list[int]:
        """The integers, after `send`; waits for the copy, and raises RuntimeError where a kernel failed."""
        if self._event is not None:
            self._event.synchronize()
        values: list[int] = self.values.tolist()
        return values
