"""Scenes put together in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparseconv.interop.arguments import lower_corners
from sparseconv.interop.torchsparse.conventions import Version, get_version
from sparseconv.interop.torchsparse.tensor import SparseTensor
from sparseconv.kinds import check_kind


def sparse_collate(inputs: list[SparseTensor]) -> SparseTensor:
    """Tensors with coordinates (N_b, 3), one a scene -> one tensor with coordinates (N, 4)."""
    for x in inputs:
        check_kind("each input", x, SparseTensor, "pass tensors of torchsparse's, one a scene")
    if len({x.stride for x in inputs}) != 1:
        raise ValueError(f"the tensors of a batch must have one stride; got {[x.stride for x in inputs]}")
    coords, feats = [], []
    for number, x in enumerate(inputs):
        own, rows = torch.as_tensor(x.coords), torch.as_tensor(x.feats)
        if own.ndim != 2 or own.shape[1] != 3 or rows.ndim != 2 or len(rows) != len(own):
            raise ValueError(
                "each input must have coords (N, 3), without the batch, and feats (N, C); got "
                f"{tuple(own.shape)} and {tuple(rows.shape)}"
            )
        item = torch.full_like(own[:, :1], number)
        joined = torch.cat([item, own] if get_version() is Version.FIRST else [own, item], 1)
        coords.append(lower_corners("coords", joined))
        feats.append(rows)
    if len({rows.shape[1] for rows in feats}) != 1:
        raise ValueError(f"the tensors of a batch must have as many channels; got {[tuple(f.shape) for f in feats]}")
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
