"""What is the CPU engine's own: chunks that hold every edge once, no read of unwritten memory, the same bits."""

from __future__ import annotations

import multiprocessing
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparseconv as sc
from sparseconv import memory
from sparseconv.backends import cpu_products, cpu_threads
from sparseconv.backends import numpy_gather_scatter as engine
from sparseconv.backends.base import Request
from sparseconv.backends.edge_chunks import edge_chunks
from sparseconv.backends.numpy_gather_scatter import NumpyGatherScatter
from sparseconv.geometry.kernel_map import KernelMap

BACKEND = NumpyGatherScatter()


def random_map(seed: int, num_in: int, num_out: int, taps: int, identity: int | None = None) -> KernelMap:
    """Each tap a random partial injection, in no order of rows; tap 0 is dead where there are several."""
    rng = np.random.default_rng(seed)
    ins, outs, counts = [], [], [0]
    for tap in range(taps):
        count = int(rng.integers(0, min(num_in, num_out) + 1)) if tap or taps == 1 else 0
        a, b = rng.permutation(num_in)[:count], rng.permutation(num_out)[:count]
        if tap == identity:
            a = b = np.arange(num_out)
        ins.append(a), outs.append(b), counts.append(len(a))
    rows = (torch.from_numpy(np.concatenate(r).astype(np.int32)) for r in (ins, outs))
    pairs = (*rows, torch.tensor(counts).cumsum(0))
    return KernelMap(num_in, num_out, taps, pairs=pairs, identity_tap=identity)


def plain(x: torch.Tensor, w: torch.Tensor, kernel_map: KernelMap) -> torch.Tensor:
    """The definition, an edge at a time, in fp64."""
    y = torch.zeros(kernel_map.num_out, w.shape[2], dtype=torch.float64)
    for tap, i, o in zip(*(t.tolist() for t in (kernel_map.pair_taps, kernel_map.in_rows, kernel_map.out_rows))):
        y[o] += x[i].double() @ w[tap].double()
    return y


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 40),
    taps=st.integers(1, 9),
    edges=st.integers(1, 60),
    tile=st.sampled_from([1, 4]),
    own=st.booleans(),
)
def test_chunks_hold_every_edge_once(seed, rows, taps, edges, tile, own):
    identity = taps - 1 if own else None
    kernel_map = random_map(seed, rows, rows, taps, identity)
    cut = edge_chunks(kernel_map, edges, tile)
    assert edge_chunks(kernel_map, edges, tile) is cut
    found, next_row = [], 0
    for chunk in cut:
        assert chunk.start == next_row
        assert chunk.start % tile == 0
        next_row = chunk.stop
        tap_at = {place: tap for tap, a, _, b in chunk.taps for place in range(a, b)}
        assert len(chunk.in_rows) == len(tap_at)
        assert chunk.padding.tolist() == [place for _, _, a, b in chunk.taps for place in range(a, b)]
        assert chunk.tile_taps.tolist() == [tap_at[p] for p in range(0, len(tap_at), tile)]
        assert chunk.tile_offsets.diff().tolist() == [chunk.tile_taps.tolist().count(tap) for tap in range(taps)]
        for row, (a, b) in enumerate(zip(chunk.offsets[:-1], chunk.offsets[1:]), chunk.start):
            places = chunk.slots[a:b].tolist()
            assert [tap_at[p] for p in places] == sorted(tap_at[p] for p in places)
            found += [(tap_at[p], int(chunk.in_rows[p]), row) for p in places]
            assert all(chunk.out_rows[p] == row for p in places)
    assert next_row == rows
    edges_of = zip(*(t.tolist() for t in (kernel_map.pair_taps, kernel_map.in_rows, kernel_map.out_rows)))
    assert sorted(found) == sorted(e for e in edges_of if e[0] != identity)


@pytest.fixture
def poisoned(monkeypatch):
    """Every uninitialised array of the engine is full of NaN, and chunks are small."""

    class Poison:
        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def empty(shape, dtype):
            return np.full(shape, 0xFF if np.issubdtype(dtype, np.integer) else np.nan, dtype)

    for room in (cpu_products, memory):
        monkeypatch.setattr(room, "np", Poison())
    monkeypatch.setattr(engine, "_chunk_edges", lambda *_: 100)
    vars(cpu_products._buffers).clear()
    yield
    vars(cpu_products._buffers).clear()


def choose_libraries(monkeypatch, onednn: bool) -> None:
    """oneDNN, as on an AMD CPU, or MKL, as on an Intel one."""
    chosen = torch.ops.mkldnn._linear_pointwise.default if onednn else None
    monkeypatch.setattr(cpu_products, "linear", lambda: chosen)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize(("c_in", "c_out"), [(3, 5), (16, 16), (32, 32), (40, 24)])
@pytest.mark.parametrize("identity", [None, 2])
def test_integers_to_the_bit_from_poisoned_memory(poisoned, monkeypatch, identity, c_in, c_out, onednn):
    choose_libraries(monkeypatch, onednn)
    kernel_map = random_map(3, 90, 90, 5, identity)
    x, g = torch.randint(-2, 3, (90, c_in)).float(), torch.randint(-2, 3, (90, c_out)).float()
    w, bias = torch.randint(-2, 3, (5, c_in, c_out)).float(), torch.randint(-2, 3, (c_out,)).float()
    want = plain(x, w, kernel_map) + bias
    assert torch.equal(BACKEND.forward(x, w, kernel_map, 1, bias).double(), want)
    dx = BACKEND.input_grad(g, w, kernel_map, 1)
    assert torch.equal(dx.double(), plain(g, w.transpose(1, 2), kernel_map.reverse()))
    dw = BACKEND.weight_grad(x, g, kernel_map, 1)
    want_dw = torch.zeros_like(w)
    for tap, i, o in zip(*(t.tolist() for t in (kernel_map.pair_taps, kernel_map.in_rows, kernel_map.out_rows))):
        want_dw[tap] += x[i][:, None] * g[o]
    assert torch.equal(dw, want_dw)
    both = BACKEND.gradients(x, w, g, kernel_map, 1)
    assert torch.equal(both[0], dx)
    assert torch.equal(both[1], dw)


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_both_gradients_of_a_mirrored_map(groups):
    """Their one walk goes over the map itself, whose taps are the mirrored ones."""
    rows = torch.randperm(60)[:40].sort().values
    grid = sc.VoxelGrid(torch.nn.functional.pad(rows[:, None], (1, 0)))
    kernel_map = sc.ConvolutionPlan(grid, 3).kernel_map
    assert kernel_map.mirror is not None
    x, g = torch.randint(-2, 3, (40, 16)).float(), torch.randint(-2, 3, (40, 32 if groups == 1 else 16)).float()
    w = torch.randint(-2, 3, (3, 16 // groups, g.shape[1])).float()
    grad_x, grad_w = BACKEND.gradients(x, w, g, kernel_map, groups)
    assert torch.equal(grad_x, BACKEND.input_grad(g, w, kernel_map, groups))
    assert torch.equal(grad_w, BACKEND.weight_grad(x, g, kernel_map, groups))
    assert grad_x.is_contiguous()
    assert grad_w.is_contiguous()


@pytest.mark.parametrize("channels", [8, 32])
def test_padding_carries_nothing(channels):
    """Row 0 pads the tiles: a NaN in it must reach only the outputs that it has edges to."""
    kernel_map = random_map(5, 70, 70, 4)
    x, w = torch.randn(70, channels), torch.randn(4, channels, channels)
    x[0] = float("nan")
    touched = set(kernel_map.out_rows[kernel_map.in_rows == 0].tolist())
    y = BACKEND.forward(x, w, kernel_map, 1)
    assert {row for row in range(70) if y[row].isnan().any()} == touched
    g = torch.randn(70, channels)
    met = set(kernel_map.pair_taps[kernel_map.in_rows == 0].tolist())
    dw = BACKEND.weight_grad(x, g, kernel_map, 1)
    assert {tap for tap in range(4) if dw[tap].isnan().any()} == met
    g[0] = float("inf")
    met = set(kernel_map.pair_taps[kernel_map.out_rows == 0].tolist())
    dw = BACKEND.gradients(x.nan_to_num(), w, g, kernel_map, 1)[1]
    assert {tap for tap in range(4) if not dw[tap].isfinite().all()} == met


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 1023, 1024, 5000])
@pytest.mark.parametrize("shape", [(32, 48), (64, 64), (24, 100)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_are_exact_on_either_side_of_the_choice(monkeypatch, rows, shape, turned, onednn):
    chosen = torch.ops.mkldnn._linear_pointwise.default if onednn else None
    monkeypatch.setattr(cpu_products, "linear", lambda: chosen)
    x, g = torch.randint(-2, 3, (rows, shape[0])).float(), torch.randint(-2, 3, (rows, shape[1])).float()
    w = torch.randint(-2, 3, shape).float()
    w = w.t().contiguous().t() if turned else w
    out = torch.full((rows, shape[1]), float("nan"))
    cpu_products.multiply(x, w, out)
    assert torch.equal(out.double(), x.double() @ w.double())
    total = torch.ones(shape)
    cpu_products.accumulate_gram(x, g, total)
    assert torch.equal(total.double(), x.double().t() @ g.double() + 1)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize(("onednn", "taken"), [(1.0, False), (0.7, False), (0.6, True)])
def test_the_library_that_multiplies_is_the_one_well_ahead(monkeypatch, onednn, taken):
    seconds = iter([1.0, onednn])  # BLAS is asked first
    monkeypatch.setattr(cpu_products, "_least", lambda call: next(seconds))
    assert (cpu_products.linear.__wrapped__() is not None) == taken


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("edges", [0, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_by_row(fill, edges, dtype):
    offsets = torch.tensor([0, 0, edges // 3, edges // 3, edges], dtype=torch.int32)
    slots = torch.randint(0, 500, (edges,), dtype=torch.int32)
    rows = torch.randint(-9, 9, (500, 24)).to(dtype)
    want = torch.stack([rows[slots[a:b]].sum(0) for a, b in pairwise(offsets)])
    out = torch.full((4, 24), float("nan") if fill else 2.0, dtype=dtype)
    cpu_products.add_sums(rows, slots, offsets, out, fill)
    assert torch.equal(out, want + (0 if fill else 2))


@pytest.mark.parametrize("channels", [8, 64])
def test_the_same_bits_whatever_ran_before(channels):
    kernel_map = random_map(7, 3000, 3000, 9, 4)
    x, g, w = torch.randn(3000, channels), torch.randn(3000, channels), torch.randn(9, channels, channels)

    def verbs() -> list[torch.Tensor]:
        return [
            BACKEND.forward(x, w, kernel_map, 1),
            BACKEND.input_grad(g, w, kernel_map, 1),
            BACKEND.weight_grad(x, g, kernel_map, 1),
            *BACKEND.gradients(x, w, g, kernel_map, 1),
        ]

    first = verbs()
    other = random_map(8, 5000, 400, 3)
    BACKEND.forward(torch.randn(5000, 96), torch.randn(3, 96, 7), other, 1)
    vars(cpu_products._buffers).clear()
    assert all(torch.equal(a, b) for a, b in zip(first, verbs()))


@pytest.fixture
def threads():
    """Every call is worth sharing; torch's number of threads is put back."""
    kept, shared = torch.get_num_threads(), engine.SHARED
    engine.SHARED = 0
    yield torch.set_num_threads
    engine.SHARED = shared
    torch.set_num_threads(kept)


@pytest.mark.parametrize("channels", [8, 32])
@pytest.mark.parametrize("groups", [1, 4])
def test_integers_to_the_bit_with_any_number_of_threads(threads, channels, groups):
    kernel_map = random_map(11, 900, 900, 9, 4)
    x, g = torch.randint(-2, 3, (900, channels)).float(), torch.randint(-2, 3, (900, channels)).float()
    w = torch.randint(-2, 3, (9, channels // groups, channels)).float()

    def verbs() -> list[torch.Tensor]:
        return [
            BACKEND.forward(x, w, kernel_map, groups),
            BACKEND.input_grad(g, w, kernel_map, groups),
            BACKEND.weight_grad(x, g, kernel_map, groups),
            *BACKEND.gradients(x, w, g, kernel_map, groups),
        ]

    threads(1)
    alone = verbs()
    for number in (2, 3):
        threads(number)
        assert all(torch.equal(a, b) for a, b in zip(alone, verbs()))
        assert torch.get_num_threads() == number


def test_a_fault_in_one_thread_is_raised_by_the_call():
    def work(part: int) -> None:
        if part == 2:
            raise ValueError("part 2")

    with pytest.raises(ValueError, match="part 2"):
        cpu_threads.share(work, range(5), 2)


def test_parts_run_once_each_and_alone(threads):
    threads(2)
    seen: list[tuple[int, int, bool]] = []
    cpu_threads.share(lambda part: seen.append((part, torch.get_num_threads(), torch.is_grad_enabled())), range(20), 2)
    assert sorted(seen) == [(part, 1, False) for part in range(20)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_makes_its_own_threads():
    def once() -> None:
        cpu_threads.share(lambda part: None, range(4), 2)

    once()
    child = multiprocessing.get_context("fork").Process(target=once)
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_results_own_their_memory():
    """Buffers are used again; results are not."""
    kernel_map = random_map(9, 50, 50, 3)
    w = torch.randn(3, 8, 8)
    one = BACKEND.forward(torch.randn(50, 8), w, kernel_map, 1)
    kept = one.clone()
    BACKEND.forward(torch.randn(50, 8), w, kernel_map, 1)
    assert torch.equal(one, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_in", "num_out", "c_in", "c_out"), [(0, 0, 4, 4), (5, 0, 4, 4), (5, 5, 0, 4), (5, 5, 4, 0)]
)
def test_empty_in_every_way(dtype, num_in, num_out, c_in, c_out):
    kernel_map = random_map(1, num_in, num_out, 3)
    bias = torch.arange(c_out).to(dtype)
    y = BACKEND.forward(
        torch.ones(num_in, c_in, dtype=dtype), torch.ones(3, c_in, c_out, dtype=dtype), kernel_map, 1, bias
    )
    assert y.shape == (num_out, c_out)
    assert y.dtype == dtype
    if c_in == 0:
        assert torch.equal(y, bias.expand(num_out, c_out))
    dw = BACKEND.weight_grad(y.new_ones(num_in, c_in), y.new_ones(num_out, c_out), kernel_map, 1)
    assert dw.shape == (3, c_in, c_out)
    assert dw.dtype == dtype
    both = BACKEND.gradients(
        y.new_ones(num_in, c_in), y.new_ones(3, c_in, c_out), y.new_ones(num_out, c_out), kernel_map, 1
    )
    assert [(t.shape, t.dtype) for t in both] == [((num_in, c_in), dtype), ((3, c_in, c_out), dtype)]
    assert not any(t.any() for t in (*both, dw))


def test_the_workspace_is_bounded_by_the_chunk():
    few, many = (random_map(2, n, n, 5) for n in (2_000, 200_000))
    sizes = [BACKEND.workspace_bytes(Request(m, torch.device("cpu"), torch.float32, 64, 64)) for m in (few, many)]
    assert sizes[0] < sizes[1] < 64 << 20
