"""What Swin3D has compiled of its own, by torch: attention in windows, and the search for near points."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.clients.standing_in import module, unless_installed

PARTS = "Swin3D.sparse_dl"
#: sizes of its example of a segmentation
PUBLISHED: dict[str, Any] = {
    "depths": [2, 4, 9, 4, 4], "channels": [48, 96, 192, 384, 384], "num_heads": [6, 6, 12, 24, 24],
    "window_sizes": [5, 7, 7, 7, 7], "quant_size": 4, "drop_path_rate": 0.0, "up_k": 3, "num_classes": 20,
    "first_down_stride": 3, "upsample": "linear_attn",
}  # fmt: skip


class Attention:
    """Softmax over the pairs of each window, with embeddings of the pairs' quantised differences.

        logit = q . (k + query_table[d]) + k . key_table[d]        y = sum of softmax * (v + value_table[d])

    A table's entry is the sum over the columns of the coordinates of the one at floor(difference + half of its length).
    """

    @staticmethod
    def apply(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_table: torch.Tensor, key_table: torch.Tensor,
        value_table: torch.Tensor, sizes: torch.Tensor, indices: list[torch.Tensor], *_: Any,
    ) -> torch.Tensor:  # fmt: skip
        windows, members, first_pairs, first_rows, rows, places = (
            t if t.is_floating_point() else t.long() for t in indices
        )
        pair = torch.arange(len(windows)) - first_pairs[windows]
        count, begin = members[windows], first_rows[windows]
        ours = begin + torch.div(pair, count, rounding_mode="floor")
        theirs = begin + pair % count
        heads, channels = q.shape[1:]
        query, key = rows[ours], rows[theirs]

        def embedded(table: torch.Tensor) -> torch.Tensor:
            parts = table.split(sizes.tolist())
            found = torch.zeros(len(windows), heads, channels, dtype=table.dtype)
            for axis, part in enumerate(parts):
                entries = part.view(-1, heads, channels)
                difference = places[ours, axis] - places[theirs, axis] + len(entries) // 2
                found = found + entries[difference.clamp(0, len(entries) - 1).long()]
            return found

        logits = (q[query] * (k[key] + embedded(query_table)) + k[key] * embedded(key_table)).sum(-1)
        largest = logits.new_full(q.shape[:2], -torch.inf)
        largest = largest.index_reduce(0, query, logits.detach(), "amax")
        weights = (logits - largest[query]).exp()
        total = torch.zeros_like(largest).index_add(0, query, weights)
        values = weights[..., None] * (v[key] + embedded(value_table))
        return torch.zeros_like(q).index_add(0, query, values) / total[..., None]


class Nearest:
    """The rows of the nearest points of the same batch item, and their distances; ends of items are given."""

    @staticmethod
    def apply(
        count: int, points: torch.Tensor, queries: torch.Tensor, ends: torch.Tensor, query_ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, distances = [], []
        begin, query_begin = 0, 0
        for end, query_end in zip(ends.tolist(), query_ends.tolist()):
            apart = torch.cdist(queries[query_begin:query_end], points[begin:end])
            found, at = apart.topk(min(count, end - begin), largest=False)
            short = (0, count - found.shape[1])  # the kernel leaves row 0 far away where there are too few
            rows.append(torch.nn.functional.pad(at + begin, short))
            distances.append(torch.nn.functional.pad(found, short, value=1e5))
            begin, query_begin = end, query_end
        return torch.cat(rows).int(), torch.cat(distances)


class _DropPath(torch.nn.Module):
    """Leaves out rows by torch's generator, in training."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * (torch.rand(len(x), 1) >= self.rate) / (1 - self.rate)


def parts(folder: Path) -> None:
    """Modules in place of those that are compiled, and packages without what they import besides."""
    unless_installed("timm")
    unless_installed("timm.models")
    unless_installed("timm.models.layers", DropPath=_DropPath, trunc_normal_=torch.nn.init.trunc_normal_)
    for name in ("Swin3D", "Swin3D.modules", "Swin3D.models", PARTS, f"{PARTS}.attn"):
        module(name).__path__ = [str(folder / name.replace(".", "/"))]
    compiled: Any = types.ModuleType("its own extension, of which nothing is called")
    sys.modules[f"{PARTS}.attn_cuda"] = sys.modules[PARTS].attn_cuda = compiled  # type: ignore[attr-defined]
    module(f"{PARTS}.knn", KNN=Nearest)
    __import__(f"{PARTS}.attn.attn_coff")
    sys.modules[f"{PARTS}.attn.attn_coff"].SelfAttnAIOFunction = Attention  # type: ignore[attr-defined]


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Tensors that its files send to a card stay."""
    with (
        patch.object(torch.cuda, "IntTensor", lambda numbers: torch.tensor(numbers, dtype=torch.int32)),
        patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
    ):
        yield
