"""Every row of the table of layouts by an impulse for each tap, against where that library keeps that number."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import sparseconv as sc
from sparseconv.interop.layouts import LAYOUTS, hyper_cross_taps, permute, saved_to_krsc

C_IN, C_OUT = 2, 3
KERNELS = [(3, 5, 1), (2, 3, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1)]


def first_fastest(t, k):
    return t[0] + k[0] * (t[1] + k[1] * t[2])


def last_fastest(t, k):
    return t[2] + k[2] * (t[1] + k[1] * t[0])


def place(library, t, i, o, k):
    """(shape of the parameter, index in it) of the number that multiplies channel i into o through tap t."""
    volume = math.prod(k)
    if library == "spconv":
        if volume == 1:  # the memory of (C_out, 1, 1, 1, C_in) read as (C_in, C_out)
            flat = i * C_OUT + o
            return (C_OUT, 1, 1, 1, C_IN), (flat // C_IN, 0, 0, 0, flat % C_IN)
        return (C_OUT, *k, C_IN), (o, *t, i)
    if library == "flexgemm":
        return (C_OUT, *k, C_IN), (o, *t, i)
    if library == "spconv-rskc":
        return (*k, C_OUT, C_IN), (*t, o, i)
    if library == "spconv-rsck":
        return (*k, C_IN, C_OUT), (*t, i, o)
    if library in ("fvdb", "torch"):
        if volume == 1 and library == "fvdb":
            return (C_OUT, C_IN), (o, i)
        return (C_OUT, C_IN, *k), (o, i, *t)
    if library in ("minkowski", "torchsparse"):
        if volume == 1:
            return (C_IN, C_OUT), (i, o)
        first = library == "minkowski" or volume % 2 == 1
        return (volume, C_IN, C_OUT), ((first_fastest if first else last_fastest)(t, k), i, o)
    assert library in ("warpconvnet", "sparseconv")
    return (volume, C_IN, C_OUT), (last_fastest(t, k), i, o)


def impulse(library, t, i, o, k):
    shape, index = place(library, t, i, o, k)
    weight = torch.zeros(shape)
    weight[index] = 1
    return weight


def test_the_definitions_cover_the_table():
    assert {name for name in LAYOUTS if place(name, (0, 0, 0), 0, 0, (3, 3, 3))} == set(LAYOUTS)


@pytest.mark.parametrize("k", KERNELS, ids=str)
@pytest.mark.parametrize("library", LAYOUTS)
def test_an_impulse_moves_a_voxel_through_its_tap(library, k):
    grid = sc.VoxelGrid(torch.tensor([[0, 10, 20, 30]]))
    plan = sc.ConvolutionPlan(grid, k, target="full", padding=0)
    for t in itertools.product(*map(range, k)):
        for i, o in itertools.product(range(C_IN), range(C_OUT)):
            ours = permute(impulse(library, t, i, o, k), library, "sparseconv", kernel_size=k)
            x = torch.zeros(1, C_IN)
            x[0, i] = 1
            y = plan.execute(x, ours)
            ((row, channel),) = y.nonzero().tolist()
            # fine = coarse + tap: the voxel at fine is seen from coarse = fine - tap
            assert plan.target.coords[row].tolist() == [0, 10 - t[0], 20 - t[1], 30 - t[2]]
            assert (channel, float(y[row, channel])) == (o, 1.0)


@pytest.mark.parametrize("k", KERNELS, ids=str)
@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(LAYOUTS, 2)), ids=lambda v: v)
def test_between_any_two(a, b, k):
    """Numbers 0, 1, 2, ... by (tap, i, o), put where each library keeps them."""
    weights = {name: torch.zeros(place(name, (0, 0, 0), 0, 0, k)[0]) for name in (a, b)}
    for n, (*t, i, o) in enumerate(itertools.product(*map(range, (*k, C_IN, C_OUT)))):
        for name, weight in weights.items():
            weight[place(name, tuple(t), i, o, k)[1]] = n
    size = k if len(set(k)) > 1 else None  # cubes are found without being told
    got = permute(weights[a], a, b, kernel_size=size)
    assert torch.equal(got, weights[b])
    assert got.is_contiguous()


def test_groups():
    """WarpConvNet's (V, G, C_in/G, C_out/G) against ours, group by group through a real plan."""
    groups, k = 2, (3, 1, 2)
    weight = torch.randn(6, groups, 2, 3)
    ours = permute(weight, "warpconvnet", "sparseconv", kernel_size=k, groups=groups)
    assert torch.equal(permute(ours, "sparseconv", "warpconvnet", kernel_size=k, groups=groups), weight)
    grid = sc.VoxelGrid(torch.randint(0, 4, (20, 4)).unique(dim=0) * torch.tensor([0, 1, 1, 1]), duplicates="first")
    x = torch.randn(len(grid), 4)
    whole = sc.ConvolutionPlan(grid, k, groups=groups).execute(x, ours)
    each = sc.ConvolutionPlan(grid, k)
    for g in range(groups):
        part = each.execute(x[:, 2 * g : 2 * g + 2], weight[:, g].contiguous())
        torch.testing.assert_close(whole[:, 3 * g : 3 * g + 3], part)
    with pytest.raises(ValueError, match="no grouped"):
        permute(ours, "sparseconv", "minkowski", kernel_size=k, groups=groups)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_other_ranks(rank):
    k = (3, 2, 1, 2)[:rank]
    weight = torch.randn(math.prod(k), C_IN, C_OUT)
    for name in LAYOUTS:
        there = permute(weight, "sparseconv", name, kernel_size=k, rank=rank)
        assert torch.equal(permute(there, name, "sparseconv", kernel_size=k, rank=rank), weight)
    assert permute(weight, "sparseconv", "spconv", kernel_size=k, rank=rank).shape == (C_OUT, *k, C_IN)


def test_minkowskis_hyper_cross_is_a_list_of_taps():
    taps = hyper_cross_taps(3, 2)
    assert taps[:5] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (-2, 0, 0), (-1, 0, 0)]
    grid = sc.VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 0, 2, 0]]))
    plan = sc.ConvolutionPlan(grid, taps=taps)
    weight = torch.zeros(len(taps), 1, 1)
    weight[taps.index((0, 2, 0))] = 1
    assert plan.execute(torch.tensor([[1.0], [5.0]]), weight).tolist() == [[5.0], [0.0]]


def test_what_spconv_saved_in_its_other_layouts():
    krsc = torch.randn(C_OUT, 3, 1, 2, C_IN)
    assert torch.equal(saved_to_krsc(krsc.movedim(0, -2), "RSKC"), krsc)
    assert torch.equal(saved_to_krsc(krsc.movedim(0, -1), "RSCK"), krsc)
    assert saved_to_krsc(krsc, "KRSC") is krsc


@pytest.mark.parametrize(
    ("shape", "library", "options", "words"),
    [
        ((15, 2, 3), "minkowski", {}, "no cube"),
        ((15, 2, 3), "minkowski", {"kernel_size": 3}, "27 taps"),
        ((3, 3, 3, 3, 2), "spconv", {"kernel_size": 5}, "asked for"),
        ((3, 3, 3, 2), "spconv", {}, r"C_out, k0, k1, k2, C_in"),
        ((27, 2, 3), "pytorch3d", {}, "no layout"),
    ],
)
def test_errors(shape, library, options, words):
    with pytest.raises(ValueError, match=words):
        permute(torch.zeros(shape), library, "sparseconv", **options)
