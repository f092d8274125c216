"""The GPU kernels, in Triton's interpreter where there is no GPU, against the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from sparseconv.products import schedule, sparse_scale_info  # noqa: E402
from sparseconv.products.schedule import table_text, work_items  # noqa: E402
from sparseconv.products.table import PRODUCTS  # noqa: E402
from tests.products import oracle  # noqa: E402
from tests.products.cases import (  # noqa: E402
    CASES,
    PRODUCT_NAMES,
    TOLERANCE,
    Case,
    gathered,
    inputs,
    listed,
    random_case,
    relative_error,
)

interpreted = triton.knobs.runtime.interpret if hasattr(triton, "knobs") else False
pytestmark = pytest.mark.skipif(
    not (interpreted or torch.cuda.is_available()),
    reason="needs a GPU, or TRITON_INTERPRET=1 from the start",
)
DEVICE = "cpu" if interpreted else "cuda"
FLAGS = list(itertools.product([False, True], repeat=3))


def terms_of(info):
    """What a kernel is given, with the table of small structures that infos on a GPU carry."""
    info = info.to(DEVICE)
    terms = info.terms
    columns = (info.scale, info.index1, info.index2, info.seg_out, info.gather_index, info.index_out)
    return terms._replace(table=table_text(*columns))


def run(name, x, y, info, accumulated, dtype=None, unroll=False):
    """The GPU path of a product on inputs with or without batch."""
    from sparseconv.products.gpu import sums as gpu

    row = PRODUCTS[name]
    batched1, batched2 = x.dim() == len(row.axes1) + 2, y.dim() == len(row.axes2) + 2
    dtype = torch.promote_types(x.dtype, y.dtype) if dtype is None else dtype
    if accumulated and batched1 != batched2:
        x, y = (x.sum(0) if batched1 else x), (y.sum(0) if batched2 else y)
        batched1 = batched2 = False
    x, y = (x if batched1 else x[None]).to(DEVICE), (y if batched2 else y[None]).to(DEVICE)
    summed = accumulated and batched1 and batched2
    threshold, gpu._UNROLLED = gpu._UNROLLED, 0 if unroll else 1 << 60
    try:
        out = gpu.segment_product(row, x, y, terms_of(info), summed, dtype).cpu()
    finally:
        gpu._UNROLLED = threshold
    return out if (batched1 or batched2) and not summed else out[0]


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that nothing wrote reads as NaN."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def filled(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: filled(empty(*args, **kwargs)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: filled(new_empty(*args, **kwargs)))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("batch", [3, 18])
@pytest.mark.parametrize("name", PRODUCT_NAMES)
@pytest.mark.parametrize("case", [c for c in CASES if len(c.triples) < 100], ids=lambda case: case.name)
def test_integers_are_exact(case, name, batch):
    info = case.infos(torch.float32)[0]
    for shared1, shared2, accumulated in FLAGS if case is CASES[0] else FLAGS[: 7 : 3 if batch == 3 else 2]:
        x, y = inputs(name, case, shared1, shared2, batch=batch, dtype=torch.float32, integers=True)
        expected = oracle.product(name, x, y, case.triples, case.out_size, accumulated)
        assert torch.equal(run(name, x, y, info, accumulated), expected)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("axes", "runs"),
    [
        ({"a": 3, "b": 5, "c": 7}, [(2, 1), (2, 6), (17, 0), (17, 1), (17, 2)]),
        ({"a": 17, "b": 66, "c": 130}, [(2, 6), (17, 0), (17, 1)]),  # each flag and each batch with several tiles
    ],
    ids=["narrow", "wide"],
)
@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_wide_channels_and_both_batches(name, axes, runs):
    case = CASES[0]
    info = case.infos(torch.float32)[0]
    for batch, flags in runs:
        shared1, shared2, accumulated = FLAGS[flags]
        x, y = inputs(name, case, shared1, shared2, batch=batch, axes=axes, dtype=torch.float32, integers=True)
        expected = oracle.product(name, x, y, case.triples, case.out_size, accumulated)
        assert torch.equal(run(name, x, y, info, accumulated), expected)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["mul", "vecsca", "scavec", "inner"])
@pytest.mark.parametrize("case", [c for c in CASES if len(c.triples) < 100], ids=lambda case: case.name)
def test_kernels_written_for_the_structure(case, name):
    info = case.infos(torch.float32)[0]
    for shared1, shared2, _ in FLAGS[:6:2]:
        x, y = inputs(name, case, shared1, shared2, batch=19, dtype=torch.float32, integers=True)
        expected = oracle.product(name, x, y, case.triples, case.out_size)
        assert torch.equal(run(name, x, y, info, False, unroll=True), expected)


@pytest.mark.parametrize("sizes", [(2, 3, 9), (9, 3, 2), (3, 9, 2)], ids=["out", "x", "y"])
@pytest.mark.parametrize("name", ["mul", "vecsca", "scavec", "inner"])
def test_each_operand_may_be_the_one_that_passes_by(name, sizes):
    case = random_case("streamed", 30, sizes[2], sizes[0], sizes[1], seed=2)
    info = case.infos(torch.float64)[0]
    x, y = inputs(name, case, False, False, batch=21, axes={"a": 1, "b": 1, "c": 150})
    out = run(name, x, y, info, False, unroll=True)
    expected = oracle.product(name, x, y, case.triples, case.out_size)
    assert relative_error(out, expected) < TOLERANCE[torch.float64]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["mul", "vecsca", "scavec", "inner"])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], random_case("wide", 30, 9, 3, 4)], ids=lambda case: case.name)
def test_pairs_of_gradients_and_sums_of_products(case, name, monkeypatch):
    from sparseconv.products.gpu import sums as gpu

    monkeypatch.setattr(gpu, "_UNROLLED", 0)
    axes = {"a": 1, "b": 1, "c": 150}
    x, y, x2, y2 = (
        t.to(DEVICE)
        for seed in (1, 2)
        for t in inputs(name, case, False, False, batch=17, axes=axes, dtype=torch.float32, integers=True, seed=seed)
    )
    x, y = x.requires_grad_(), y.requires_grad_()
    expected = oracle.product(name, x, y, case.triples, case.out_size)
    grad = torch.randint(-2, 3, expected.shape, device=DEVICE).float()
    wanted = torch.autograd.grad(expected, (x, y), grad)
    terms = terms_of(case.infos(torch.float32)[0])
    row = PRODUCTS[name]
    for g, w in zip(gpu.gradient_pair(x.detach(), y.detach(), grad, terms), wanted):
        assert torch.equal(g, w)
    total = expected + oracle.product(name, x2, y2, case.triples, case.out_size)
    assert torch.equal(gpu.product_sum(row, x.detach(), y.detach(), x2, y2, terms), total)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", PRODUCT_NAMES)
@pytest.mark.parametrize("way", ["gathered", "listed", "seg_out", "index1", "index2 scale"])
def test_infos_written_otherwise(name, way):
    case = CASES[0]
    info = case.infos(torch.float32)[0]
    if way == "gathered":
        info = gathered(info)
    elif way == "listed":
        info = gathered(listed(info))
    else:
        rows = [list(range(6)) if field in way else [0, 0, 1, 3, 3, 3] for field in ("index1", "index2", "seg_out")]
        case = Case(way, list(zip(*rows, [1.0] * 6)), 6, 6, 6)
        info = replace(case.infos(torch.float32)[0], **dict.fromkeys(way.split()))
    for batch, accumulated in ((2, False), (2, True), (16, False), (16, True)):
        x, y = inputs(name, case, False, False, batch=batch, dtype=torch.float32, integers=True)
        expected = oracle.product(name, x, y, case.triples, case.out_size, accumulated)
        assert torch.equal(run(name, x, y, info, accumulated), expected)
    x, y = inputs(name, case, True, True, dtype=torch.float32, integers=True)
    assert torch.equal(run(name, x, y, info, False), oracle.product(name, x, y, case.triples, case.out_size))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_long_segments_are_cut_and_joined(name, monkeypatch):
    # 140 terms in one row beside rows of none and of few: three pieces of at most 64, joined in their order; kernels
    # are told where pieces begin and end, and `work_items` is tested with those of 512
    monkeypatch.setattr(schedule, "_PIECE", 64)
    triples = [(t % 7, t % 5, 2, float(t % 3 - 1)) for t in range(140)] + [(1, 1, 0, 2.0), (2, 3, 4, -1.0)]
    case = Case("uneven", triples, 5, 7, 5)
    info = case.infos(torch.float32)[0]
    small = {"a": 2, "b": 3, "c": 4}
    x, y = inputs(name, case, True, True, axes=small, dtype=torch.float32, integers=True)
    expected = oracle.product(name, x, y, triples, 5)
    assert torch.equal(run(name, x, y, info, False), expected)
    x, y = inputs(name, case, False, True, batch=2, axes=small, dtype=torch.float32, integers=True)
    assert torch.equal(run(name, x, y, listed(info), False), oracle.product(name, x, y, triples, 5))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_other_dtypes(name, dtype):
    case = CASES[0]
    axes = {"a": 17, "b": 9, "c": 7}
    for batch, accumulated, shared2 in ((2, False, False), (20, False, True), (20, True, False)):
        x, y = inputs(name, case, False, shared2, batch=batch, axes=axes, dtype=dtype)
        expected = oracle.product(name, x.double(), y.double(), case.triples, case.out_size, accumulated)
        out = run(name, x, y, case.infos(torch.float32)[0], accumulated)
        assert out.dtype == dtype
        assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(2,), (20,), (1,)])
def test_the_scale(shape):
    from sparseconv.products.gpu import sums as gpu

    case = CASES[0]
    pairs = [(i, m, s) for i, _, m, s in case.triples]
    index, _, index_out, scale = case.columns()
    info = sparse_scale_info(index, index_out, scale, case.out_size, case.in1_size).to(DEVICE)
    x = torch.randint(-2, 3, (*shape, case.in1_size, 9)).float()
    out = gpu.segment_scale(x.to(DEVICE), info.terms, x.dtype).cpu()
    assert torch.equal(out, oracle.scale(x, pairs, case.out_size))


def test_work_items_cover_every_term_once():
    lengths = torch.tensor([0, 3, 5000, 0, 512, 513, 1, 0, 1600])
    seg = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    items, joins, slots = work_items(seg, None, int(seg[-1]))
    seen = torch.zeros(int(seg[-1]), dtype=torch.int64)
    slot_rows = {}
    for first, last, row in joins.tolist():
        slot_rows.update(dict.fromkeys(range(first, last) if row >= 0 else (), row))
    assert len(slot_rows) <= slots
    rows_written = [row for _, _, row in joins.tolist() if row >= 0]
    for begin, end, row in items.tolist():
        if row == -1:
            continue
        seen[begin:end] += 1
        assert end - begin <= 512
        owner = row if row >= 0 else slot_rows[-2 - row]
        assert int(seg[owner]) <= begin <= end <= int(seg[owner + 1])
        rows_written += [row] * (row >= 0)
    assert bool((seen == 1).all())
    assert sorted(rows_written) == list(range(len(lengths)))


@pytest.mark.gpu
def test_two_runs_on_the_card_give_the_same_bits():
    case = random_case("uneven", 100_000, 3, 500, 400, seed=5)
    info = case.infos(torch.float32)[0]
    for name in PRODUCT_NAMES:
        x, y = inputs(name, case, False, False, batch=4, dtype=torch.float32)
        assert torch.equal(run(name, x, y, info, True), run(name, x, y, info, True))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [2, 33])
@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_the_card_and_the_cpu_agree_to_the_second_order(name, batch):
    import sparseconv.products as sp

    function = getattr(sp, f"sparse_{name}")
    case = CASES[0]
    infos = case.infos()
    moved = [info.to("cuda") for info in infos]
    for shared1, shared2, accumulated in FLAGS:
        x, y = (t.requires_grad_() for t in inputs(name, case, shared1, shared2, batch=batch))
        xc, yc = (t.detach().cuda().requires_grad_() for t in (x, y))
        results = []
        for a, b, three in ((x, y, infos), (xc, yc, moved)):
            out = function(a, b, *three, accumulated)
            grads = torch.autograd.grad(out.square().sum(), (a, b), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), (a, b))
            results.append([t.detach().cpu() for t in (out, *grads, *second)])
        for got, wanted in zip(results[1], results[0]):
            assert got.shape == wanted.shape
            assert relative_error(got, wanted) < TOLERANCE[torch.float64]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mul", "inner", "outer", "vecmat"])
def test_addresses_beyond_two_to_the_thirty_one(name):
    # 2^31 elements and more in the second input, of which the first and the last rows are used
    dense = (8, 8) if name == "vecmat" else (64,)
    rows = 2**31 // 64 + 100
    y = torch.empty(rows, *dense, dtype=torch.float16)
    y[[0, -1]] = torch.randint(-2, 3, (2, *dense)).half()
    x = torch.randint(-2, 3, (2, dense[0])).half()
    triples = [(0, 0, 0, 1.0), (1, rows - 1, 1, 2.0), (0, rows - 1, 0, 1.0)]
    info = Case("far", triples, 2, 2, rows).infos(torch.float32)[0]
    near = [(i, min(j, 1), m, s) for i, j, m, s in triples]
    expected = oracle.product(name, x.float(), y[[0, -1]].float(), near, 2)
    assert torch.equal(run(name, x, y, info, False).float(), expected)
