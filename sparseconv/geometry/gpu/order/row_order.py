"""Target rows in an order in which neighbours share most of their taps: by a radix sort of their keys.

    in:  a `WindowSearch`, with the sort keys of its rows
    out: rows (N_out,) int32, in a stable order of the keys

Keys (2, 6, 1) give the order (2, 0, 1): row 2 with its one tap, row 0 with one more, then row 1.
"""

from __future__ import annotations

import torch

from sparseconv.geometry.gpu.order.row_keys import row_keys
from sparseconv.geometry.gpu.window.found import LINES, ORDER, SORT_KEYS, WindowSearch
from sparseconv.geometry.gpu.window.taps import KEY_BITS
from sparseconv.gpu.launcher import Pointer
from sparseconv.gpu.radix_sort.sort import sort_rows
from sparseconv.gpu.streams import building


def row_order(search: WindowSearch, chunk_rows: int | None = None) -> torch.Tensor | Pointer:
    """Rows in the order of their `keys`: (1, N_out), or where a search has sorted them the place of (N_out,) int32.

    ``chunk_rows``: in the order of the keys of runs of so many rows, see `row_keys`.
    """
    if chunk_rows is None and search.table is not None and search.window.num_taps <= KEY_BITS:
        scratch = search.found[1]
        with building():
            if search.passes is None:
                return sort_rows(scratch.tensor(SORT_KEYS).view(1, -1), search.window.key_bits)
            search.passes.launch(scratch[SORT_KEYS], scratch[LINES], scratch[ORDER], search.coords.device)
        return scratch[ORDER]
    with building():
        return sort_rows(row_keys(search, search.window.all_taps, None, chunk_rows))
