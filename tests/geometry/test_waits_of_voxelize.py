"""How often voxelize, a grid, a plan and a first step read a number back, where a card would be waited for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sparseconv import ConvolutionPlan, VoxelGrid, voxelize
from tests.launches import counted

POINTS = torch.rand(300, 3, generator=torch.Generator().manual_seed(0))


def test_few_numbers_are_read_back_on_the_way_to_a_first_step() -> None:
    with counted() as (_, waits):
        grid, rows = voxelize(POINTS, 0.2)
    assert len(rows) == len(POINTS)
    assert waits.total() <= 2  # the bounds of all points, the number of voxels; may only fall
    with counted() as (_, waits):
        grid = VoxelGrid(grid.coords, 1)
    assert waits.total() <= 2  # the bounds of all columns; whether a row occurs twice
    with counted() as (_, waits):
        plan = ConvolutionPlan(grid, 3)
    assert waits.total() <= 1
    x, weight = torch.ones(len(grid), 4, requires_grad=True), torch.ones(27, 4, 4, requires_grad=True)
    with counted() as (_, waits):
        plan.execute(x, weight).sum().backward()
    assert waits.total() <= 1
