"""What was last asked of a map of given rows: the one record that predicts, for each device and stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparseconv.geometry.gpu.window.found import WindowSearch
from sparseconv.geometry.gpu.window.taps import TapWindow
from sparseconv.gpu.launcher import INTERPRETED
from sparseconv.gpu.streams import current
from sparseconv.torch_private import current_stream


@dataclass(eq=False)
class MapRequest:
    """A window over a grid's own rows, and its lists: tiles of ``block_m`` rows (0: none) and so many jobs."""

    window: TapWindow
    block_m: int = 0
    jobs: int = 0


_last: dict[tuple[int | None, int], MapRequest] = {}


def remember(search: WindowSearch, block_m: int | None = None, jobs: int | None = None) -> None:
    """Have the next grid on this stream searched as this one was, with these lists, where it has given rows."""
    table, window = search.table, search.window
    if table is None or not table.is_given or current() is not None:
        return
    place = _place(table.coords.device)
    request = _last.get(place)
    if request is None or request.window is not window:
        request = _last[place] = MapRequest(window)
    if block_m is not None:
        request.block_m = block_m
    if jobs is not None:
        request.jobs = jobs


def take(device: torch.device) -> MapRequest | None:
    """The last request, which is forgotten: speculation is switched off after one unused result."""
    return None if current() is not None else _last.pop(_place(device), None)


def _place(device: torch.device) -> tuple[int | None, int]:
    return device.index, 0 if INTERPRETED else current_stream(device.index)
