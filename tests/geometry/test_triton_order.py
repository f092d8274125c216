"""The radix sort against torch's; in the interpreter or on a GPU."""

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

from sparseconv.geometry.gpu.row_order import row_order
from sparseconv.geometry.gpu.search import ORDER, search_window
from sparseconv.geometry.gpu.table import build_table
from sparseconv.geometry.gpu.taps import encode_window
from sparseconv.gpu import launcher
from sparseconv.gpu import radix_sort as sort
from sparseconv.gpu.launcher import pointer
from sparseconv.gpu.radix_sort import Passes
from sparseconv.gpu.warp_ptx import look_back
from tests.geometry.triton_cases import CASES


@triton.jit
def before_kernel(states_ptr, out_ptr, BINS: tl.constexpr):
    digit = tl.arange(0, BINS)
    tl.store(out_ptr + digit, look_back(states_ptr + digit, BINS))


DEVICE = "cpu" if launcher.INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


def order_of(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """The order of keys (N,), by scratch memory in which all states of tiles seem to be there."""
    passes = Passes(len(keys), bits, keys.device)
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


def test_counts_before_a_tile_are_summed_back_to_the_last_sum_of_all() -> None:
    of_tile, of_all, bins = 1 << 30, -1 << 31, 32
    states = torch.full((20, bins), of_tile + 1, dtype=torch.int32)  # a tile of one line of each digit, or a sum
    want = torch.empty(bins, dtype=torch.int32)
    for digit in range(bins):
        last = 18 - digit % 12
        states[last, digit] = of_all + 100 * digit
        want[digit] = 100 * digit + 19 - last
    states, out = states.to(DEVICE), torch.empty_like(want, device=DEVICE)
    before_kernel[1,](states[19:], out, bins, num_warps=1)
    assert torch.equal(out.cpu(), want)


@pytest.mark.slow
def test_tiles_past_those_that_a_thread_looks_at_together() -> None:
    keys = skewed(60_000, 31, 1000, 0.7, seed=2)
    assert torch.equal(order_of(keys, 31), torch.sort(keys, stable=True).indices)


@pytest.mark.parametrize("value", [0, 2**31 - 1])
def test_equal_keys_stay_in_order(value: int) -> None:
    keys = torch.full((5000,), value, dtype=torch.int32, device=DEVICE)
    assert order_of(keys, 31).tolist() == list(range(5000))


@pytest.mark.parametrize("n", [1, 3072, 5000])
def test_the_digits_that_a_search_has_counted_serve_its_sort(n: int) -> None:
    cells = torch.randperm(32**3, generator=torch.Generator().manual_seed(n))[:n]
    table = build_table(torch.stack([cells & 0, cells >> 10, cells >> 5 & 31, cells & 31], 1).int().to(DEVICE))
    search = search_window(table, table.coords, encode_window(CASES[3].offsets, (1,) * 3, None, table.coords.device))
    row_order(search)
    order = search.found[1].tensor(ORDER)[:n]
    assert torch.equal(order.long(), torch.sort(search.keys[0], stable=True).indices)


@pytest.mark.parametrize("offsets", [((0, 0, 0), (0, 0, 1), (1, 0, 0)), CASES[5].offsets], ids=["three", "cross"])
def test_other_windows_are_sorted_by_launches_of_their_own(offsets: tuple[tuple[int, ...], ...]) -> None:
    table = build_table(CASES[3].source(device=DEVICE))
    search = search_window(table, table.coords, encode_window(offsets, (1,) * 3, None, table.coords.device))
    row_order(search)
    order = search.found[1].tensor(ORDER)[: search.rows]
    assert torch.equal(order.long(), torch.sort(search.keys[0], stable=True).indices)


@pytest.mark.parametrize(("groups", "n", "dtype"), [(2, 50, torch.int32), (1, 50, torch.int64), (1, 0, torch.int32)])
def test_other_keys_are_sorted_by_torch(groups: int, n: int, dtype: torch.dtype) -> None:
    keys = torch.randint(0, 9, (groups, n), dtype=dtype, device=DEVICE)
    assert torch.equal(sort.sort_rows(keys).long(), torch.sort(keys, stable=True).indices)


@pytest.mark.parametrize(("n", "bits", "dtype"), [(1, 1, torch.int32), (3000, 12, torch.int32), (500, 40, torch.int64)])
def test_distinct_keys_are_those_of_torch(n: int, bits: int, dtype: torch.dtype) -> None:
    keys = torch.randint(0, 2**bits // 2 + 1, (n,), generator=torch.Generator().manual_seed(n), dtype=dtype).to(DEVICE)
    first, numbers = sort.unique_keys(keys, bits)
    want, inverse = torch.unique(keys, return_inverse=True)
    assert torch.equal(keys[first], want)
    assert torch.equal(numbers, inverse)
    assert all(not (keys[:row] == keys[row]).any() for row in first.tolist()[:50])
