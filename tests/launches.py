"""How often a part of a test launches a kernel, and how often the host reads what a card leaves (and may wait)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparseconv.gpu.launcher import Launcher
from sparseconv.gpu.report import Report

#: what reads a number back, or has a result of a size that the host must learn first
WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select"}


class _Waits(TorchDispatchMode):
    """Counts torch's own calls that wait for a card."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING:
            self._found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Launches by kernel, and waits by what waits, within."""
    launches: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    call, read = Launcher.__call__, Report.read

    def launched(self: Launcher, *args: Any) -> None:
        launches[self.function.__name__] += 1
        call(self, *args)

    def waited(self: Report) -> list[int]:
        waits["report"] += 1
        waits["tolist"] -= 1  # its own
        return read(self)

    tolist = torch.Tensor.tolist

    def listed(self: torch.Tensor) -> Any:
        waits["tolist"] += 1
        return tolist(self)

    with (
        patch.object(torch.Tensor, "tolist", listed),
        patch.object(Launcher, "__call__", launched),
        patch.object(Report, "read", waited),
        _Waits(waits),
    ):
        yield launches, waits
