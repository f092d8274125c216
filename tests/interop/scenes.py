"""Random voxels for spconv's kind of tensors, and the real library where it is installed."""

from __future__ import annotations

import pytest
import torch


def scene(rank=3, voxels=150, extent=8, batch=2, channels=5, seed=0, dtype=torch.float32):
    """features (N, C), indices (N, 1+D) int32 in a random order, spatial shape, batch size."""
    gen = torch.Generator().manual_seed(seed)
    picked = torch.randperm(batch * extent**rank, generator=gen)[:voxels]
    coords = []
    for _ in range(rank):
        coords.append(picked % extent)
        picked = picked // extent
    features = torch.randn(len(picked), channels, generator=gen, dtype=dtype)
    return features, torch.stack([picked, *coords], 1).int(), [extent] * rank, batch


def real_spconv():
    """The library itself, its request for a CUDA stream stubbed; skips where it is not installed."""
    pytest.importorskip("spconv")
    import spconv.pytorch as real
    from spconv.pytorch import cppcore, functional, ops

    for module in (cppcore, functional, ops):
        module.get_current_stream = lambda: 0
    return real
