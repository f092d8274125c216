"""What was last asked of a map of given rows: the one record that predicts, for each device and stream of grids."""

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


#: a device's number and a stream's address
Place = tuple[int | None, int]
_last: dict[Place, MapRequest] = {}


def remember(search: WindowSearch, block_m: int | None = None, jobs: int | None = None) -> None:
    """Have the next grid where this one was made searched as this one was, with these lists, if it has given rows."""
    place = None if search.table is None else search.table.given_at
    if place is None or current() is not None:
        return
    request = _last.get(place)
    if request is None or request.window is not search.window:
        request = _last[place] = MapRequest(search.window)
    if block_m is not None:
        request.block_m = block_m
    if jobs is not None:
        request.jobs = jobs


def take(place: Place) -> MapRequest | None:
    """The last request, which is forgotten: speculation is switched off after one unused result."""
    return None if current() is not None else _last.pop(place, None)


def place_of(device: torch.device) -> Place:
    """That of a grid which is made now."""
    return device.index, 0 if INTERPRETED else current_stream(device.index)
