"""Scenes put together in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparseconv.interop.torchsparse.conventions import Version, get_version
from sparseconv.interop.torchsparse.tensor import SparseTensor


def sparse_collate(inputs: list[SparseTensor]) -> SparseTensor:
    """Tensors with coordinates (N_b, 3), one a scene -> one tensor with coordinates (N, 4)."""
    if len({x.stride for x in inputs}) != 1:
        raise ValueError(f"the tensors of a batch must have one stride; got {[x.stride for x in inputs]}")
    coords, feats = [], []
    for number, x in enumerate(inputs):
        own = torch.as_tensor(x.coords)
        item = torch.full_like(own[:, :1], number)
        coords.append(torch.cat([item, own] if get_version() is Version.FIRST else [own, item], 1).int())
        feats.append(torch.as_tensor(x.feats))
    return SparseTensor(torch.cat(feats), torch.cat(coords), inputs[0].stride)


def sparse_collate_fn(inputs: list[Any]) -> Any:
    """A ``collate_fn``: dictionaries of tensors, arrays and others -> one of batches, stacked arrays and lists."""
    if not isinstance(inputs[0], dict):
        return inputs
    batch: dict[str, Any] = {}
    for name, first in inputs[0].items():
        values = [scene[name] for scene in inputs]
        if isinstance(first, dict):
            batch[name] = sparse_collate_fn(values)
        elif isinstance(first, (np.ndarray, torch.Tensor)):
            batch[name] = torch.stack([torch.as_tensor(v) for v in values])
        else:
            batch[name] = sparse_collate(values) if isinstance(first, SparseTensor) else values
    return batch
