"""The brain as voxels, and the pieces of its training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("nilearn")

from sparseconv import SparseTensor, VoxelGrid
from sparseconv.demo.learn import Scan, Segmenter, brightness_alone, dice, majority, train, turned_grids
from sparseconv.demo.plans import plans_in_use
from sparseconv.demo.volume import Brain, load_brain, template
from sparseconv.nn import UNet


@pytest.fixture(scope="module")
def brain():
    return load_brain(8.0)


def test_voxels_are_means_over_blocks_of_the_template(brain):
    t1, affine = template("t1", None)
    rng = np.random.default_rng(0)
    for row in rng.integers(0, len(brain), 20):
        low = np.array(brain.grid.origin) + 8.0 * brain.grid.coords[row, 1:].numpy()
        start = np.round(low + 0.5 - affine[:3, 3]).astype(int)
        block = t1[tuple(slice(max(0, s), max(0, s + 8)) for s in start)]
        assert float(brain.intensity[row]) == pytest.approx(block[block > 0].mean() / 255, rel=1e-5)


def test_the_template_mirrors_its_halves_and_the_split_does_not(brain):
    t1, _ = template("t1", None)
    assert (t1 == t1[::-1]).all()
    front, cut = brain.front()
    y = brain.grid.positions()[:, 1]
    assert (y[front] > cut).all()
    assert (y[~front] < cut).all()
    assert 0.4 < front.float().mean() < 0.6


def test_too_small_voxels_and_a_missing_template(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        load_brain(0.5)
    with pytest.raises(ImportError, match="is missing"):
        load_brain(8.0, folder=tmp_path)


def test_turned_grids_are_the_same_shape_elsewhere(brain):
    grids = turned_grids(brain.grid, 5, torch.Generator().manual_seed(0))
    assert grids[0] is brain.grid
    shapes = [torch.pdist(g.coords[:50, 1:].double()) for g in grids]
    assert all(torch.equal(s, shapes[0]) for s in shapes)
    assert len({tuple(g.coords[:50].flatten().tolist()) for g in grids}) == 5


def test_dice_and_baselines_by_hand():
    grid = VoxelGrid(torch.tensor([[0, n, 0, 0] for n in range(6)]))
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    view = Scan(Brain(grid, torch.zeros(6), labels), torch.tensor([0.1, 0.1, 0.5, 0.5, 0.5, 0.9]))
    assert majority(view, view).tolist() == [1] * 6
    assert brightness_alone(view, view).tolist() == labels.tolist()
    assert dice(torch.tensor([0, 1, 1, 1, 1, 1]), labels) == pytest.approx([2 / 3, 6 / 8, 0.0])


def test_training_lowers_the_loss_and_an_interruption_ends_it(brain):
    torch.manual_seed(0)
    view = Scan(brain, brain.intensity)
    model = Segmenter(view)
    seen = []
    course = train(model, brain, 0.05, 12, torch.Generator().manual_seed(0), lambda c: seen.append(c.losses[-1]))
    assert seen == course.losses
    assert sum(course.losses[-3:]) < 0.8 * sum(course.losses[:3])

    def stop(course):
        if len(course.losses) == 2:
            raise KeyboardInterrupt

    course = train(model, brain, 0.05, 12, torch.Generator().manual_seed(0), stop)
    assert course.interrupted
    assert len(course.losses) == 2
    torch.testing.assert_close(model.shares(view).sum(1), torch.ones(len(brain)))


def test_every_layer_is_found_among_the_plans(brain):
    net = UNet(1, 3, (4, 8, 8), block="plain")
    uses = plans_in_use(net, SparseTensor(brain.grid, brain.intensity[:, None]), "mm")
    assert [u.name for u in uses][:3] == ["8 mm 3×3×3", "8 → 16 mm 2×2×2", "16 mm 3×3×3"]
    assert sum(u.layers for u in uses) == 1 + 3 + 2 + 2 + 2
    assert len({id(u.plan) for u in uses}) == len(uses) == 7
    assert uses[0].c_in == 8  # the decoder's, wider than the stem's
    assert net.training
