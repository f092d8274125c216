"""What plans will likely ask of a grid, before they do: kernels compiled, and the search of the last plan launched."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparseconv.geometry.gpu.hash_table.table import FUSED_ROWS, CoordinateTable, pack_shifts, rows_per_chunk
from sparseconv.geometry.gpu.pairs.pair_lists_3x3x3 import CUBE_PAIRS
from sparseconv.geometry.gpu.window.passes import SEARCH, search_constants, search_programs
from sparseconv.geometry.gpu.window.search import WindowSearch, search_window
from sparseconv.geometry.gpu.window.taps import KEY_BITS, TapWindow, bit_places
from sparseconv.geometry.gpu.window.window_3x3x3 import CUBE
from sparseconv.gpu.launcher import read_triton
from sparseconv.gpu.streams import current

#: the window that the last plan looked through from a grid's own rows, by device, until a search was launched for it
_asked: dict[int | None, TapWindow] = {}
_seen: set[int | None] = set()
#: what launches table and search of a new grid's rows, and what else the last map was asked for; by device
Whole = Callable[[torch.Tensor], "tuple[CoordinateTable, WindowSearch] | None"]
_whole: dict[int | None, Whole] = {}
#: rows from which and up to which lists are made of a search before they are asked for: of fewer the card is done
#: before the host could wait for it; those of more take much memory beside the last map's
LISTED_ROWS = 65_536, 1 << 22
#: what makes the lists that the last search was asked for, by device and kind
_lists: dict[int | None, dict[str, Callable[[WindowSearch], None]]] = {}


def expect_plans(coords: torch.Tensor) -> None:
    """Start to compile what the 3 x 3 x 3 map of ``coords`` (N, 4) takes, if they are the first on their device.

    Nearly every grid gets that map. Where the kernels lie in Triton's cache, this costs some milliseconds once.
    """
    device = coords.device
    if device.index in _seen:
        return
    n, columns = coords.shape
    offsets, shifts = CUBE
    if columns != len(shifts) or not 0 < n <= FUSED_ROWS:
        return
    _seen.add(device.index)
    read_triton()
    looks = (columns - 1, pack_shifts(shifts), bit_places(shifts), True, False, 27, 3)
    taps = len(offsets)
    together = search_programs(device, taps, n, True)[2]
    SEARCH.ahead(device, search_constants(looks, taps, n, taps, together))
    CUBE_PAIRS.ahead(device, (rows_per_chunk(n), True))


def expect_whole(device: torch.device, launch: Whole) -> None:
    """Have the next new grid's map launched whole, by a function of its rows that may decline with None."""
    _whole[device.index] = launch


def whole_ahead(coords: torch.Tensor) -> tuple[CoordinateTable, WindowSearch] | None:
    """Table and search of a new grid's rows in one launch with what else its map will likely be asked for.

    None where none is expected, or not such a one. A map of which nobody asks is the last one until somebody does.
    """
    index = coords.device.index
    launch = _whole.get(index)
    if launch is None or current() is not None:
        return None
    found = launch(coords)
    if found is not None:
        _whole.pop(index, None)
        _make_lists(found[1])
    return found


def expect_lists(search: WindowSearch, kind: str, make: Callable[[WindowSearch], None]) -> None:
    """Have lists made of the next new grid's search as of this one."""
    table = search.table
    if table is not None and table.is_given and _has_lists(search):
        _lists.setdefault(table.coords.device.index, {})[kind] = make


def _has_lists(search: WindowSearch) -> bool:
    return search.is_cube and LISTED_ROWS[0] < search.rows <= LISTED_ROWS[1]


def _make_lists(search: WindowSearch) -> None:
    """Make the lists that the last search was asked for, but those that were made with this one."""
    lists = _lists.pop(search.coords.device.index, None)
    if lists is not None and _has_lists(search):
        for kind, make in lists.items():
            if kind not in search.made:
                make(search)


def search_ahead(table: CoordinateTable) -> WindowSearch | None:
    """The search of a new grid's own rows that the last plan on its device asked for; None where none is expected.

    The host has the time: it would wait for what the table says of the rows. Of many rows it does wait: there are up to
    100 bytes of scratch memory a block, and it knows the blocks before the rows are in their places; they are sorted
    as the last schedule was, so that the card is not done with all that before the host comes to ask for more. A search
    of which nobody asks is the last one until a plan asks again.
    """
    device, (n, columns) = table.coords.device, table.coords.shape
    window = _asked.get(device.index)
    if window is None or len(window.stride) != columns - 1 or n == 0 or current() is not None:
        return None
    many = n > FUSED_ROWS
    if many and window.num_taps > KEY_BITS:  # a table of all edges is too much for what may be asked of nobody
        return None
    _asked.pop(device.index, None)
    search = search_window(table, table.coords, window, patient=many)
    _make_lists(search)
    return search


def own_search(table: CoordinateTable, window: TapWindow, ahead: WindowSearch | None) -> WindowSearch:
    """The search of a table's own rows: the one launched ``ahead``, where that is the one."""
    if table.unseen is None:
        _asked[table.coords.device.index] = window
    if ahead is not None and ahead.window is window and ahead.table is table:
        return ahead
    return search_window(table, table.coords, window)
