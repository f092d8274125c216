"""The search that is launched before a plan asks for it, in Triton's interpreter or on a card."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparseconv.geometry.gpu import prefetch
from sparseconv.geometry.gpu.hash_table import table as hash_table
from sparseconv.geometry.gpu.hash_table.table import CoordinateTable, build_table, read_table
from sparseconv.geometry.gpu.order import sort_ahead
from sparseconv.geometry.gpu.prefetch import own_search, search_ahead
from sparseconv.geometry.gpu.window import search as window_search
from sparseconv.geometry.gpu.window.taps import TapWindow, encode_window
from sparseconv.gpu import launcher
from tests.geometry.triton_cases import CASES

DEVICE = torch.device("cpu") if launcher.INTERPRETED else torch.device("cuda", 0)
CUBE, PLANE = CASES[3], CASES[1]
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


@pytest.fixture(autouse=True)
def _nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_asked", {})
    monkeypatch.setattr(sort_ahead, "_sorted", {})
    monkeypatch.setattr(window_search, "_blocks", {})


def table_of(rank: int = 3) -> CoordinateTable:
    return build_table((CUBE if rank == 3 else PLANE).source(device=DEVICE))


def cube() -> TapWindow:
    return encode_window(CUBE.offsets, (1, 1, 1), None, DEVICE)


def test_nothing_is_launched_before_a_plan_has_asked() -> None:
    assert search_ahead(table_of()) is None


def test_the_next_grid_gets_the_search_that_the_last_plan_asked_for() -> None:
    first = own_search(table_of(), cube(), None)
    table = table_of()
    ahead = search_ahead(table)
    assert ahead is not None
    assert ahead.table is table
    assert own_search(table, cube(), ahead) is ahead
    assert torch.equal(ahead.neighbors, first.neighbors)
    assert ahead.pending.read() == first.pending.read()


def test_a_search_of_which_nobody_asks_is_the_last_one() -> None:
    own_search(table_of(), cube(), None)
    assert search_ahead(table_of()) is not None
    assert search_ahead(table_of()) is None
    own_search(table_of(), cube(), None)
    assert search_ahead(table_of()) is not None


def test_a_plan_through_another_window_searches_for_itself() -> None:
    own_search(table_of(), cube(), None)
    table = table_of()
    ahead = search_ahead(table)
    line = encode_window(((0, 0, 0), (0, 0, 1)), (1, 1, 1), None, DEVICE)
    found = own_search(table, line, ahead)
    assert found is not ahead
    assert found.window is line
    after = search_ahead(table_of())
    assert after is not None
    assert after.window is line


def test_a_search_of_another_table_is_not_taken() -> None:
    own_search(table_of(), cube(), None)
    ahead = search_ahead(table_of())
    assert own_search(table_of(), cube(), ahead) is not ahead


def test_grids_of_another_rank_are_not_searched() -> None:
    own_search(table_of(), cube(), None)
    assert search_ahead(table_of(rank=2)) is None


@pytest.fixture
def _many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefetch, window_search, hash_table):
        monkeypatch.setattr(module, "FUSED_ROWS", 10)


@pytest.mark.usefixtures("_many_rows")
def test_many_rows_are_searched_when_their_blocks_are_known() -> None:
    first = own_search(table_of(), cube(), None)
    table = build_table(CUBE.source(device=DEVICE), reported=True)
    ahead = search_ahead(table)
    assert ahead is not None
    assert own_search(table, cube(), ahead) is ahead
    assert torch.equal(ahead.neighbors, first.neighbors)
    assert ahead.pending.read() == first.pending.read()
    low, high = read_table(table)
    blocks = table.read["blocks"]
    assert ahead.around is not None
    assert ahead.around.shape == (blocks, 27)
    assert blocks < len(table.coords)
    assert (low, high) == (tuple(table.coords.amin(0).tolist()), tuple(table.coords.amax(0).tolist()))
    assert not table.has_duplicates


@pytest.mark.usefixtures("_many_rows")
@pytest.mark.parametrize("guessed", [0.02, 0.9])
def test_blocks_of_many_rows_are_searched_before_their_number_is_known(guessed: float) -> None:
    """That of the last grid is expected; where there are more, their surroundings are found again."""
    first = own_search(table_of(), cube(), None)
    table = build_table(CUBE.source(device=DEVICE), reported=True)
    window_search._blocks[table.coords.device.index] = guessed
    ahead = search_ahead(table)
    assert ahead is not None
    assert ahead.around is not None
    read_table(table)
    blocks = table.read["blocks"]
    assert len(ahead.around) == max(blocks, int(1.125 * guessed * len(table.coords)))
    assert torch.equal(ahead.neighbors, first.neighbors)
    assert ahead.pending.read() == first.pending.read()
    assert window_search._blocks[table.coords.device.index] == blocks / len(table.coords)


@pytest.mark.skipif(not launcher.INTERPRETED, reason="on a card orders are addresses")
@pytest.mark.usefixtures("_many_rows")
@pytest.mark.parametrize("chunk_rows", [None, 16])
def test_many_rows_are_sorted_as_the_last_schedule_was(chunk_rows: int | None) -> None:
    first = own_search(table_of(), cube(), None)
    assert search_ahead(table_of())._ahead is None  # no schedule was asked for yet
    own_search(table_of(), cube(), None)
    want = torch.as_tensor(first.ordered(chunk_rows)).clone()
    ahead = search_ahead(table_of())
    assert ahead._ahead is not None
    begun = ahead._ahead[1]
    assert ahead.ordered(chunk_rows) is begun
    assert torch.equal(begun, want.view(-1))
    assert torch.equal(ahead.ordered(chunk_rows), want)  # and whoever asks again
    own_search(table_of(), cube(), None)
    other = search_ahead(table_of())
    assert not torch.equal(other.ordered(16 if chunk_rows is None else None).view(-1), want.view(-1))
    own_search(table_of(), cube(), None)
    unwanted = search_ahead(table_of())
    assert unwanted._ahead is not None
    unwanted.release()
    assert unwanted._ahead is None
    own_search(table_of(), cube(), None)
    assert search_ahead(table_of())._ahead is None  # nobody asked for the last one


@pytest.mark.usefixtures("_many_rows")
def test_edges_of_many_rows_are_not_all_written_down_for_nobody() -> None:
    every = encode_window(tuple(itertools.product(range(-1, 2), range(-1, 2), range(-2, 2))), (1, 1, 1), None, DEVICE)
    own_search(table_of(), every, None)
    assert search_ahead(table_of()) is None
