"""The sorts, with a launch for each digit and in a search's own, against torch's; in the interpreter or on a card."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparseconv.geometry.gpu.hash_table.table import build_table
from sparseconv.geometry.gpu.order.row_order import row_order
from sparseconv.geometry.gpu.pairs.found_edges import FoundEdges
from sparseconv.geometry.gpu.window import passes as search_passes
from sparseconv.geometry.gpu.window import search as window_search
from sparseconv.geometry.gpu.window.found import ORDER
from sparseconv.geometry.gpu.window.search import search_window
from sparseconv.geometry.gpu.window.taps import encode_window
from sparseconv.gpu import launcher, warp_asm
from sparseconv.gpu.launcher import pointer
from sparseconv.gpu.radix_sort import sort
from sparseconv.gpu.radix_sort.kernels import MARK, clear_lists, sort_together
from sparseconv.gpu.radix_sort.sort import HELD, TOGETHER_WARPS, Passes, most_together, ticket_behind
from tests.geometry.concurrent_programs import beside
from tests.geometry.triton_cases import CASES

DEVICE = "cpu" if launcher.INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


def order_of(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """The order of keys (N,), by scratch memory in which all states of tiles seem to be there."""
    passes = Passes(len(keys), bits)
    scratch = torch.full((passes.words,), -1, dtype=torch.int64, device=keys.device)
    order = torch.full((len(keys),), -1, dtype=torch.int32, device=keys.device)
    passes.launch(pointer(keys), pointer(scratch), pointer(order), keys.device)
    return order.long()


def skewed(n: int, bits: int, values: int, share: float, seed: int) -> torch.Tensor:
    """Keys (N,), about a ``share`` of them of ``values`` values, the others of any."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(0, 2**bits, (values,), generator=generator)
    keys = torch.randint(0, 2**bits, (n,), generator=generator)
    often = torch.rand(n, generator=generator) < share
    return torch.where(often, few[torch.randint(0, values, (n,), generator=generator)], keys).int().to(DEVICE)


@given(
    n=st.one_of(st.integers(1, 700), st.sampled_from([3071, 3072, 3073, 4095, 4096, 4097, 9000])),
    bits=st.sampled_from([1, 7, 8, 9, 10, 16, 27, 28, 31]),
    values=st.sampled_from([1, 2, 40, 1000]),
    share=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 1000),
)
@example(n=12_289, bits=31, values=1000, share=0.7, seed=0)
@example(n=12_300, bits=27, values=3, share=0.9, seed=1)
@settings(max_examples=15)
def test_the_order_is_that_of_a_stable_sort(n: int, bits: int, values: int, share: float, seed: int) -> None:
    keys = skewed(n, bits, values, share, seed)
    assert torch.equal(order_of(keys, bits), torch.sort(keys, stable=True).indices)


@pytest.mark.slow
def test_tiles_past_those_that_a_thread_looks_at_together() -> None:
    keys = skewed(60_000, 31, 1000, 0.7, seed=2)
    assert torch.equal(order_of(keys, 31), torch.sort(keys, stable=True).indices)


@pytest.mark.parametrize("value", [0, 2**31 - 1])
def test_equal_keys_stay_in_order(value: int) -> None:
    keys = torch.full((5000,), value, dtype=torch.int32, device=DEVICE)
    assert order_of(keys, 31).tolist() == list(range(5000))


def test_a_search_of_many_rows_is_put_in_the_order_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_search, "FUSED_ROWS", 0)
    case = CASES[3]
    table = build_table(case.source(device=DEVICE))
    search = search_window(table, table.coords, encode_window(case.offsets, (1,) * 3, None, table.coords.device))
    order = row_order(search)
    assert isinstance(order, torch.Tensor)
    assert order.dtype == torch.int32
    assert torch.equal(order.long(), torch.sort(search.keys, stable=True).indices)


@triton.jit
def together_kernel(keys_ptr, lines_ptr, order_ptr, barriers_ptr, n, share, PROGRAMS: tl.constexpr):
    clear_lists(lines_ptr, n, share, 1, 9)
    sort_beside(PROGRAMS, keys_ptr, lines_ptr, order_ptr, barriers_ptr, n, share, 3, 9, TOGETHER_WARPS, HELD)


def sort_beside(programs: int, *args: object) -> None:
    beside(programs, lambda own: sort_together(own, programs, *args))


@pytest.mark.skipif(not launcher.INTERPRETED, reason="on a card a search does this")
@pytest.mark.parametrize(
    ("n", "programs", "values", "share"),
    [(1, 3, 1, 0.0), (127, 2, 9, 1.0), (640, 5, 1000, 0.7), (641, 5, 1, 1.0), (700, 4, 1000, 0.7), (3840, 3, 40, 0.7)],
)
def test_programs_that_are_all_there_sort_together(n: int, programs: int, values: int, share: float) -> None:
    keys, passes = skewed(n, 27, values, share, seed=n), Passes(n, 27, programs, together=True)
    assert n <= most_together(programs)
    stale = MARK.value * (1 + 2**32)  # counts of nothing, as if they had been told
    scratch = torch.full((passes.words + programs * warp_asm.ROOM // 8,), stale, dtype=torch.int64)
    order = torch.full((ticket_behind(n) + 1,), -1, dtype=torch.int32)
    together_kernel[(1,)](keys, scratch, order, torch.zeros(2, dtype=torch.int32), n, passes.share, programs)
    assert torch.equal(order[:n].long(), torch.sort(keys, stable=True).indices)
    assert int(order[-1]) == 0


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1023, 1024, 1025, 2600])
def test_a_search_of_few_rows_sorts_them_too(n: int) -> None:
    cells = torch.randperm(16**3, generator=torch.Generator().manual_seed(n))[:n]
    coords = torch.stack([cells & 0, cells >> 8, cells >> 4 & 15, cells & 15], 1).int().to(DEVICE)
    table = build_table(coords)
    search = search_window(table, table.coords, encode_window(CASES[3].offsets, (1,) * 3, None, table.coords.device))
    place, scratch = row_order(search), search.found[1]
    order = scratch.tensor(ORDER)[:n]
    assert (search.ticket is None) == (launcher.INTERPRETED and n > most_together(1))
    assert place.data_ptr() == order.data_ptr() if launcher.INTERPRETED else place == order.data_ptr()
    assert torch.equal(order.long(), torch.sort(search.keys[0], stable=True).indices)
    search = FoundEdges(search.released(), n).searched()  # made anew
    row_order(search)
    assert torch.equal(search.found[1].tensor(ORDER)[:n], order)
    assert search.ticket is None or int(search.found[1].tensor(ORDER)[-1]) == 0


@pytest.mark.parametrize("n", [1, 3072, 5000])
def test_the_digits_that_a_search_has_counted_serve_a_sort_of_its_own(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = search_passes.search_programs  # as in a run whose maps have streams of their own
    monkeypatch.setattr(window_search, "search_programs", lambda *args: programs(*args[:-1], False))
    cells = torch.randperm(32**3, generator=torch.Generator().manual_seed(n))[:n]
    table = build_table(torch.stack([cells & 0, cells >> 10, cells >> 5 & 31, cells & 31], 1).int().to(DEVICE))
    search = search_window(table, table.coords, encode_window(CASES[3].offsets, (1,) * 3, None, table.coords.device))
    assert search.ticket is None
    row_order(search)
    order = search.found[1].tensor(ORDER)[:n]
    assert torch.equal(order.long(), torch.sort(search.keys[0], stable=True).indices)


@pytest.mark.parametrize("offsets", [((0, 0, 0), (0, 0, 1), (1, 0, 0)), CASES[5].offsets], ids=["three", "cross"])
def test_other_windows_are_sorted_by_launches_of_their_own(offsets: tuple[tuple[int, ...], ...]) -> None:
    table = build_table(CASES[3].source(device=DEVICE))
    search = search_window(table, table.coords, encode_window(offsets, (1,) * 3, None, table.coords.device))
    assert search.ticket is None
    row_order(search)
    order = search.found[1].tensor(ORDER)[: search.rows]
    assert torch.equal(order.long(), torch.sort(search.keys[0], stable=True).indices)


@pytest.mark.parametrize(("groups", "n", "dtype"), [(2, 50, torch.int32), (1, 50, torch.int64), (1, 0, torch.int32)])
def test_other_keys_are_sorted_by_torch(groups: int, n: int, dtype: torch.dtype) -> None:
    keys = torch.randint(0, 9, (groups, n), dtype=dtype, device=DEVICE)
    assert torch.equal(sort.sort_rows(keys).long(), torch.sort(keys, stable=True).indices)
