"""Dense arrays by one kernel: the same numbers and gradients as by torch's own operations."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
from sparseconv.geometry.gpu.dense import Box, to_dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scene(rank, channels, dtype):
    gen = torch.Generator().manual_seed(rank)
    coords = torch.cat(
        [torch.randint(0, 3, (90, 1), generator=gen), torch.randint(-2, 5, (90, rank), generator=gen)], 1
    )
    coords = torch.unique(coords, dim=0).int()
    features = torch.randint(-9, 9, (len(coords), channels), generator=gen).to(dtype)
    return coords.to(DEVICE), features.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rank", "channels"), [(1, 1), (2, 33), (3, 40), (4, 3)])
def test_the_kernel_writes_what_torch_writes_and_gathers_it_back(rank, channels, dtype):
    coords, features = scene(rank, channels, dtype)
    want = sc.VoxelGrid(coords.cpu(), 3).to_dense(features.cpu(), sc.IndexRange((-2,) * rank, (5,) * rank))
    features.requires_grad_()
    found = to_dense(features, coords, Box(3, (-2,) * rank, (7,) * rank))
    assert found.is_contiguous()
    assert torch.equal(found.detach().cpu(), want)
    weight = torch.arange(want.numel(), device=DEVICE).reshape(want.shape).remainder(7).to(dtype)
    (grad,) = torch.autograd.grad((found * weight).sum(), features)
    at = (coords[:, 0], slice(None), *(coords[:, 1:].long() + 2).unbind(1))
    assert torch.equal(grad, weight.movedim(1, -1)[(coords[:, 0].long(), *at[2:])])


def test_rows_outside_of_the_box_are_left_out_and_get_no_gradient():
    coords = torch.tensor([[0, 0], [0, 5], [-1, -1], [1, 2]], dtype=torch.int32, device=DEVICE)
    features = torch.ones(4, 2, device=DEVICE, requires_grad=True)
    found = to_dense(features, coords, Box(2, (0,), (3,)))
    assert found.sum().item() == 4
    found.sum().backward()
    assert features.grad[:, 0].tolist() == [1, 0, 0, 1]


def test_second_derivatives():
    coords = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1], [1, 2, 0]], dtype=torch.int32, device=DEVICE)
    features = torch.linspace(-1, 1, 12, dtype=torch.float64, device=DEVICE).reshape(4, 3)  # the last lies outside
    box = Box(2, (0, 0), (2, 2))
    assert torch.autograd.gradgradcheck(lambda x: to_dense(x, coords, box).square(), features.requires_grad_())
