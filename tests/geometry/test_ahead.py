"""What is compiled ahead of a map, against what its passes launch, in Triton's interpreter."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")
from sparseconv.geometry.gpu import ahead
from sparseconv.geometry.gpu.hash_table import table as hash_table
from sparseconv.geometry.gpu.pairs.pair_lists import half_pairs_of, pairs_of
from sparseconv.geometry.gpu.tiles.build import build_schedule
from sparseconv.geometry.gpu.window import search as window_search
from sparseconv.geometry.gpu.window.taps import encode_window
from sparseconv.gpu import launcher as launching

pytestmark = pytest.mark.skipif(not launching.INTERPRETED, reason="compares the interpreter's launches")
CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch) -> tuple[set, set]:
    """(kernel, constants) of what was compiled ahead, and of what was launched."""
    begun: set = set()
    launched: set = set()
    call = launching.Launcher.__call__

    def launch(self, device, grid, args, constants=()):
        launched.add((self.function.fn.__name__, constants))
        call(self, device, grid, args, constants)

    monkeypatch.setattr(launching.Launcher, "__call__", launch)
    monkeypatch.setattr(
        launching.Launcher, "ahead", lambda self, device, constants: begun.add((self.function.fn.__name__, constants))
    )
    return begun, launched


@pytest.mark.parametrize(
    ("size", "stride", "many", "in_runs"),
    [
        pytest.param(*window, many, in_runs, marks=pytest.mark.slow if name == "5" and in_runs else ())
        for name, window in {
            "cube": (3, 1),
            "flat": ((3, 1, 3), 1),
            "2 by 2": (2, 2),
            "3 by 2": (3, 2),
            "5": (5, 1),
        }.items()
        for many in (False, True)
        for in_runs in (False, True)
    ],
)
def test_what_is_launched_was_compiled_ahead(asked, monkeypatch, size, stride, many, in_runs) -> None:
    begun, launched = asked
    if many:
        for module in (hash_table, window_search, ahead):
            monkeypatch.setattr(module, "FUSED_ROWS", 0)
    sides = (size,) * 3 if isinstance(size, int) else size
    offsets = tuple(itertools.product(*(range(-((n - 1) // 2), n // 2 + 1) for n in sides)))
    gen = torch.Generator().manual_seed(0)
    coords = torch.unique(torch.randint(0, 9, (300, 4), generator=gen, dtype=torch.int32), dim=0)
    coords[:, 0] = 0
    coords = torch.unique(coords, dim=0)
    target = coords if stride == 1 else torch.unique(coords // torch.tensor([1, stride, stride, stride]), dim=0).int()
    strides = (stride,) * 3
    if in_runs:  # even of so few rows
        monkeypatch.setattr("sparseconv.geometry.gpu.order.row_keys.key_room", lambda *_: (64, 27, 0))
    table = hash_table.build_table(coords, reported=True)
    same = stride == 1
    search = window_search.search_window(
        table, table.coords if same else target, encode_window(offsets, strides, None, CPU)
    )
    build_schedule(search, 64, chunk_rows=64 if in_runs else None)
    (half_pairs_of if search.is_cube else pairs_of)(search)
    ahead.tables_ahead(CPU, 4, len(coords))
    expected = ahead.ExpectedMap(offsets, strides, same, len(coords), len(target), 3 * len(target))
    expected.ahead(CPU)
    expected.tiles_ahead(CPU, 64, in_runs)
    assert len(launched) >= 4
    assert launched <= begun, sorted(launched - begun)
