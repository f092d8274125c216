"""Real scans and volumes: plans equal to the oracle on sampled rows, to the bit on integers."""

from __future__ import annotations

import itertools

import pytest
import torch

import sparseconv as sc
from tests import oracle, real


@pytest.fixture(scope="module", params=real.NAMES)
def scene(request) -> sc.VoxelGrid:
    reason = real.missing(request.param)
    if reason:
        pytest.skip(reason)
    return sc.VoxelGrid(real.load(request.param))


def sampled_edges(fine, coarse, window, rows):
    """The oracle's edges of some output rows: a dictionary of the whole scene, loops over the sampled rows."""
    sample = coarse.coords[rows].tolist()
    edges = oracle.edges(fine.coords.tolist(), sample, window.offsets, window.stride, (0,) * fine.rank)
    return edges, len(sample)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [(3, {}), (2, {"stride": 2}), (3, {"dilation": 3})],
    ids=["submanifold", "strided", "dilated"],
)
def test_sampled_rows(scene, kernel, options):
    plan = sc.ConvolutionPlan(scene, kernel, **options)
    gen = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (len(scene), 4), generator=gen).float()
    w = torch.randint(-2, 3, (plan.num_taps, 4, 3), generator=gen).float()
    y = plan.execute(x, w)
    rows = torch.randint(len(plan.target), (300,), generator=gen)
    edges, count = sampled_edges(scene, plan.target, plan.window, rows)
    want = torch.from_numpy(oracle.convolve(x.numpy(), w.numpy(), edges, count)).float()
    assert torch.equal(y[rows], want)


def test_all_orders_of_rows_give_the_same(scene):
    """Sorted rows and shuffled rows: the same voxels, the same numbers, the same gradients of the weight."""
    gen = torch.Generator().manual_seed(2)
    ordered, rows = scene.sorted("morton")
    x = torch.randint(-2, 3, (len(scene), 2), generator=gen).double()
    w = torch.randint(-2, 3, (27, 2, 3), generator=gen).double().requires_grad_()
    one, two = (sc.ConvolutionPlan(g, 3).execute(f, w) for g, f in ((scene, x), (ordered, x[rows])))
    assert torch.equal(one[rows], two)
    g = torch.randint(-2, 3, one.shape, generator=gen).double()
    assert torch.equal(torch.autograd.grad(one, w, g)[0], torch.autograd.grad(two, w, g[rows])[0])


def test_a_strided_plan_covers_every_voxel_once(scene):
    down = sc.ConvolutionPlan(scene, 2, stride=2)
    assert down.kernel_map.num_pairs == len(scene)
    assert len(down.target) == len({tuple(c) for c in (scene.coords // torch.tensor([1, 2, 2, 2])).tolist()})
    corners = itertools.product((0, 1), repeat=3)
    assert [tuple(o) for o in down.window.offsets] == list(corners)
