"""What was last asked of a map of given rows: the one record that predicts, for each device and stream."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparseconv.geometry.gpu.window.found import WindowSearch
from sparseconv.geometry.gpu.window.taps import TapWindow
from sparseconv.gpu.launcher import INTERPRETED
from sparseconv.gpu.streams import current
from sparseconv.torch_private import current_stream


@dataclass(frozen=True)
class MapRequest:
    """A window over a grid's own rows, and its lists: tiles of ``block_m`` rows (0: none) and so many jobs."""

    window: TapWindow
    block_m: int = 0
    jobs: int = 0


_last: dict[tuple[int | None, int], MapRequest] = {}


def remember(search: WindowSearch, block_m: int | None = None, jobs: int | None = None) -> None:
    """Have the next grid on this stream searched as this one was, with these lists, where it has given rows."""
    if search.table is None or not search.table.is_given or current() is not None:
        return
    place = _place(search.coords.device)
    last = _last.get(place)
    if last is None or last.window is not search.window:
        last = MapRequest(search.window)
    _last[place] = replace(
        last, block_m=last.block_m if block_m is None else block_m, jobs=last.jobs if jobs is None else jobs
    )


def take(device: torch.device) -> MapRequest | None:
    """The last request, which is forgotten: speculation is switched off after one unused result."""
    return None if current() is not None else _last.pop(_place(device), None)


def _place(device: torch.device) -> tuple[int | None, int]:
    return device.index, 0 if INTERPRETED else current_stream(device.index)
