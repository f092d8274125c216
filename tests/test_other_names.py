"""Errors of names that other libraries have say what to use here, and that exists."""

from __future__ import annotations

import operator
import re

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.kinds import ATTRIBUTES, MODULES

GRID = sc.VoxelGrid(torch.tensor([[0, 1, 2], [0, 1, 3]]))
TENSOR = sc.SparseTensor(GRID, torch.zeros(2, 3))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_other_sparse_tensors(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': use x.") as error:
        getattr(TENSOR, name)
    there = re.search(r"use x\.([\w.]+)", str(error.value))[1]
    assert operator.attrgetter(there)(TENSOR) is not None


def test_an_attribute_that_nobody_has():
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        TENSOR.nonsense
    assert not hasattr(TENSOR, "is_cuda")


def test_every_module_that_is_named_exists():
    assert [name for name in MODULES.values() if name not in nn.__all__] == []


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("SubMConv3d", "use sparseconv.nn.SubmanifoldConv"),
        ("SubMConv2d", "use sparseconv.nn.SubmanifoldConv, with rank=2"),
        ("SparseInverseConv3d", "use sparseconv.nn.InverseConv"),
        ("SparseSequential", "use sparseconv.nn.Sequential"),
        ("MinkowskiConvolution", "use sparseconv.nn.Conv"),
        ("Conv3d", "use sparseconv.nn.Conv; of dense tensors it is torch.nn.Conv3d"),
        ("BatchNorm1d", "use sparseconv.nn.BatchNorm; of dense tensors it is torch.nn.BatchNorm1d"),
        ("Parameter", "torch's is torch.nn.Parameter"),
    ],
)
def test_modules_of_other_libraries(name, advice):
    with pytest.raises(AttributeError) as error:
        getattr(nn, name)
    assert str(error.value) == f"module 'sparseconv.nn' has no attribute '{name}': {advice}"


def test_a_module_that_nobody_has():
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        nn.nonsense


def test_features_of_points_in_the_place_of_voxels():
    plan = sc.ConvolutionPlan(GRID, 3)
    for use in (lambda x: sc.SparseTensor(GRID, x), lambda x: plan.execute(x, torch.zeros(9, 3, 1))):
        with pytest.raises(ValueError, match=r"got \(5, 3\): sparseconv.ops.voxelize_features\(features, point_rows"):
            use(torch.zeros(5, 3))


def test_features_before_the_grid():
    with pytest.raises(TypeError, match=r"the grid comes first, SparseTensor\(grid, features\)"):
        sc.SparseTensor(torch.zeros(2, 3), GRID)


def test_both_results_of_voxelize_in_the_place_of_the_grid():
    both = sc.voxelize(torch.rand(5, 2), 0.5)
    for use in (lambda: sc.ConvolutionPlan(both, 3), lambda: sc.SparseTensor(both, torch.zeros(5, 3))):
        with pytest.raises(TypeError, match="voxelize returns two things, grid, point_rows ="):
            use()


def test_coords_in_the_place_of_a_target():
    with pytest.raises(TypeError, match=r"got .{1,80}: pass VoxelGrid\(coords\)"):
        sc.ConvolutionPlan(GRID, 3, target=torch.zeros(500, 3, dtype=torch.int32))


def test_a_linear_layer_names_its_channels():
    with pytest.raises(ValueError, match=r"Linear was made for 5 channels; got features \(2, 3\)"):
        nn.Linear(5, 2)(TENSOR)
