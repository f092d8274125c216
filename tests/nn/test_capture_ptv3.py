"""Captured point transformers: replays by a stand-in of graphs give the results and gradients of eager calls."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from tests.nn.test_capture_module import DEVICE, _graphs, coords_of, features_of  # noqa: F401
from tests.nn.test_ptv3 import M3, SMALL


@pytest.mark.parametrize("variant", ["m1", "m2", "m3"])
def test_steps_on_scenes_of_many_sizes_equal_eager_ones(variant):
    torch.manual_seed(0)
    options = SMALL | {
        "order": "hilbert",
        "variant": variant,
        "enc_patch_size": (16, 16, 16),
        "dec_patch_size": (16, 16),
    }
    options |= M3 if variant == "m3" else {}
    eager = nn.PointTransformerV3(4, **options).to(DEVICE)
    captured = nn.PointTransformerV3(4, **options).to(DEVICE)
    captured.load_state_dict(eager.state_dict())
    nn.capture(captured)
    for seed, voxels in enumerate((300, 250, 310, 200, 280, 150)):
        results = []
        for net in (eager, captured):
            coords = coords_of(seed, voxels)
            x = features_of(seed, coords).requires_grad_()
            y = net(sc.SparseTensor(sc.VoxelGrid(coords, 2), x))
            net.zero_grad()
            y.features.square().mean().backward()
            results.append([y.features, x.grad, *(p.grad for p in net.parameters())])
        for mine, theirs in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-4)
    assert "4 replays" in nn.explain(captured), nn.explain(captured)
