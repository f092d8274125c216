"""Blocks choose their kernels by the sizes of the whole scene's maps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparseconv as sc
from sparseconv import nn
from sparseconv.backends import registry
from sparseconv.backends.base import Backend, Request
from sparseconv.backends.triton_implicit_gemm import backend as triton_backend
from sparseconv.backends.triton_implicit_gemm.backend import problem_size
from sparseconv.backends.triton_implicit_gemm.config import (
    ConvConfig,
    ProblemSize,
    conv_candidates,
    order_of_sums,
    steady_rows,
)
from sparseconv.backends.triton_implicit_gemm.recipe import interpreted
from sparseconv.geometry.kernel_map import KernelMap, MapSizes
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.streaming.run import Run
from tests.streaming.scenes import NETWORKS, forced, scene


def sizes_of(kernel_map: KernelMap) -> MapSizes:
    return MapSizes(kernel_map.num_in, kernel_map.num_out, kernel_map.num_pairs)


def watched(monkeypatch, run) -> list[tuple[MapSizes, MapSizes | None]]:
    """The sizes of the map of each convolution of a run, and of the map that it says to be a part of."""
    seen, plain = [], ConvolutionPlan.execute

    def execute(plan, *args, **kwargs):
        seen.append((sizes_of(plan.kernel_map), plan.kernel_map.part_of))
        return plain(plan, *args, **kwargs)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(ConvolutionPlan, "execute", execute)
        run()
    return seen


KNOWN = ("unet", "deep", "spunet", "minkunet", "second", "resnet", "convnext", "several")


@pytest.mark.parametrize(("name", "cuts"), [*((name, 0) for name in KNOWN), ("deep", 2), ("several", 2)])
def test_each_block_knows_the_sizes_of_the_whole_scene_s_maps(name, cuts, monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS[name]().eval(), scene()
    monkeypatch.setattr(Backend, "steady_rows", lambda self, request: math.inf)
    forced(monkeypatch, cuts, 200)
    want = [sizes for sizes, _ in watched(monkeypatch, lambda: net(x))]
    got = watched(monkeypatch, lambda: sc.stream(net, x, 10**9))[2 * len(want) :]  # behind two samples
    assert len(got) > len(want)
    assert all(own.num_out <= part_of.num_out for own, part_of in got)
    if cuts:
        assert {part_of for _, part_of in got} == set(want)
    else:
        assert [part_of for _, part_of in got] == want * (len(got) // len(want))


def test_only_what_may_decide_is_counted(monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS["deep"]().eval(), scene()
    counted, plain = [], Run._count
    monkeypatch.setattr(Run, "_count", lambda run, *ranks: (plain(run, *ranks), counted.append(len(run.uncertain))))
    forced(monkeypatch, 0, 100)
    for least, grids in ((0, 0), (1, 0), (10_000, 2), (math.inf, 2 + 7)):
        monkeypatch.setattr(Backend, "steady_rows", lambda self, request, least=least: least)
        seen = watched(monkeypatch, lambda: sc.stream(net, x, 10**9))
        assert counted.pop() == grids
        assert len(x.grid) in {part_of.num_out for _, part_of in seen if part_of is not None}


def test_a_scene_in_one_block_is_its_own_whole(monkeypatch):
    net, x = NETWORKS["unet"]().eval(), scene()
    assert {part_of for _, part_of in watched(monkeypatch, lambda: sc.stream(net, x, 10**9))} == {None}


def test_voxels_that_features_choose_have_no_known_sizes(monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS["pruned"]().eval(), scene()
    monkeypatch.setattr(Backend, "steady_rows", lambda self, request: math.inf)
    forced(monkeypatch, 0, 100)
    want = [sizes for sizes, _ in watched(monkeypatch, lambda: net(x))]
    got = [part_of for _, part_of in watched(monkeypatch, lambda: sc.stream(net, x, 10**9))]
    assert got[2 * len(want) :][:3] == [*want[:2], None]


def by_rows(a: numpy.ndarray, b: numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
    """A product whose rows are summed in one order, wherever they lie; a BLAS has several."""
    a, b = a.astype(dtype), b.astype(dtype)
    out = numpy.zeros((a.shape[0], b.shape[1]), dtype)
    for k in range(a.shape[1]):
        out += a[:, k, None] * b[k]
    return out


@pytest.mark.skipif(not interpreted(), reason="on a card its own tests compare bits")
@pytest.mark.slow
@pytest.mark.parametrize("knows", [True, False])
def test_rows_of_small_blocks_are_summed_as_in_a_large_map(knows, monkeypatch):
    """A card of four multiprocessors: the whole keeps it busy, blocks do not, and of few tiles taps are split."""
    name = "triton_implicit_gemm"
    monkeypatch.setattr(registry, "BACKENDS", {name: registry.BACKENDS[name]})
    for kept in ("_recipes", "_latest"):
        monkeypatch.setattr(registry.backend(name), kept, {})
    monkeypatch.setattr(triton_backend, "problem_size", lambda *args: replace(problem_size(*args), processors=4))
    monkeypatch.setattr(numpy, "matmul", by_rows)
    if not knows:
        monkeypatch.setattr(Run, "_count", lambda *_: None)
    torch.manual_seed(0)
    net = nn.Sequential(nn.SubmanifoldConv(8, 16, 3), nn.Conv(16, 16, 2, stride=2), nn.SubmanifoldConv(16, 16, 3))
    net, x = net.eval().half(), scene(count=800, channels=8).half()
    forced(monkeypatch, 0, 250)
    with torch.no_grad():
        assert torch.equal(sc.stream(net, x, 10**9).features, net(x).features) == knows


# ---- the choice


def map_of(rows: int, pairs: int, taps: int = 27) -> KernelMap:
    neighbors = torch.full((taps, rows), -1, dtype=torch.int32)
    neighbors.view(-1)[:pairs] = 0
    return KernelMap(1, rows, taps, neighbors=neighbors)


CHANNELS = [(4, 32), (32, 32), (64, 128), (128, 128), (256, 256), (512, 256), (1024, 1024), (1024, 512), (256, 1024)]


@given(
    st.sampled_from(CHANNELS),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(1, 300),
    st.integers(0, 27),
    st.integers(1, 10**8),
    st.floats(0.04, 1),
    st.booleans(),
)
def test_a_part_is_the_whole_map_s_work(channels, dtype, rows, degree, whole_rows, density, transposed):
    part, pairs = map_of(rows, rows * degree), round(27 * density * whole_rows)
    part.part_of = MapSizes(whole_rows, whole_rows, pairs)
    whole = map_of(1, 1)
    whole.num_in = whole.num_out = whole_rows
    whole.num_pairs = pairs
    works = [problem_size(Request(m, torch.device("cpu"), dtype, *channels), True, transposed) for m in (part, whole)]
    assert works[0] == works[1]
    assert conv_candidates(works[0]) == conv_candidates(works[1])
    back = part.reverse().reverse()
    assert back is part
    assert part.reverse().part_of == part.part_of


@given(
    st.sampled_from(CHANNELS),
    st.sampled_from([1, 8, 27, 125]),
    st.sampled_from([(torch.float16, "tf32"), (torch.float32, "tf32"), (torch.float32, "ieee"), (torch.int8, "tf32")]),
    st.booleans(),
    st.sampled_from([(132, (9, 0)), (108, (8, 0)), (148, (10, 0)), (16, (7, 5))]),
    st.lists(st.floats(0, 27), min_size=2, max_size=4),
)
def test_from_steady_rows_on_sums_have_one_order(channels, taps, kind, aligned, card, octaves):
    layer = ProblemSize(kind[0], 0, taps, *channels, 1, aligned, *card, precision=kind[1])
    least = steady_rows(layer)
    orders = set()
    for octave in octaves:
        rows = 2 ** (round(4 * math.log2(max(1.0, least) * 2**octave)) / 4)  # as `problem_size` has them
        orders.add(order_of_sums(conv_candidates(replace(layer, num_rows=round(rows)))[0]))
    assert len(orders) == 1


def test_what_decides_the_order_of_sums():
    tile = ConvConfig(128, 64, 64, 4, 3, gluon=True)
    assert order_of_sums(tile) == order_of_sums(replace(tile, tma_weights=True, morton_runs=True, stages=2))
    for change in ({"tap_groups": 3}, {"block_k": 32}):
        assert order_of_sums(tile) != order_of_sums(replace(tile, **change))
    few, many = ProblemSize(torch.float16, 9_000, 27, 64, 64, 1, True), 300_000
    assert conv_candidates(few)[0].tap_groups == 3
    assert conv_candidates(replace(few, num_rows=many))[0].tap_groups == 1
