"""Pointcept's point transformers at the sizes of their classes, PT-v3m1, m2 (Sonata), m3 (Utonia), LitePT.

Stand-ins, where a package is missing: torch_scatter's ``segment_csr`` by `torch.segment_reduce`, timm's DropPath,
flash-attn by torch's attention on each patch. With fp64 the casts to fewer bits before attention are left out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.clients.scenes import Client, Setting, indoor_rows
from benchmarks.clients.standing_in import Registry, module

#: size of a voxel in metres, which makes the points that m3 turns by
VOXEL = 0.02


def segment_csr(src: torch.Tensor, indptr: torch.Tensor, reduce: str) -> torch.Tensor:
    """torch_scatter's reduction of sorted rows."""
    return torch.segment_reduce(src, reduce, offsets=indptr, axis=0)


def varlen(
    qkv: torch.Tensor, ends: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None
) -> Any:
    """flash-attn's packed attention of sequences (T, 3, H, C), by torch's."""
    if len(qkv) == (len(ends) - 1) * max_seqlen:
        q, k, v = qkv.unflatten(0, (-1, max_seqlen)).permute(2, 0, 3, 1, 4)
        return _attention(q, k, v, dropout_p, softmax_scale).transpose(1, 2).flatten(0, 1)
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist()):
        q, k, v = qkv[start:end].permute(1, 2, 0, 3)
        parts.append(_attention(q, k, v, dropout_p, softmax_scale).transpose(0, 1))
    return torch.cat(parts)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, scale: float | None) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)


class _DropPath(torch.nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * (x.new_empty(len(x), 1).bernoulli_(1 - self.share) / (1 - self.share))


@contextlib.contextmanager
def kept_in_fp64() -> Iterator[None]:
    """Casts of fp64 numbers to bf16, fp16 and fp32 have no effect."""
    to: Callable[..., torch.Tensor] = torch.Tensor.to

    def cast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        fewer = args[:1] == (torch.bfloat16,) and tensor.dtype == torch.float64
        return tensor if fewer else to(tensor, *args, **kwargs)

    def unless_fp64(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: tensor if tensor.dtype == torch.float64 else change(tensor)

    with (
        patch.object(torch.Tensor, "to", cast),
        patch.object(torch.Tensor, "half", unless_fp64(torch.Tensor.half)),
        patch.object(torch.Tensor, "float", unless_fp64(torch.Tensor.float)),
    ):
        yield


def authors(folder: Path) -> dict[str, Any]:
    """The classes of Pointcept's own files by name, on what is imported as ``spconv``."""
    module("torch_scatter", segment_csr=segment_csr)
    module("flash_attn", flash_attn_varlen_qkvpacked_func=varlen)
    module("timm")
    module("timm.layers", DropPath=_DropPath, trunc_normal_=torch.nn.init.trunc_normal_)
    models = folder / "pointcept" / "models"
    for name in ("pointcept", "pointcept.engines", "pointcept.models", "pointcept.models.utils"):
        module(name)
    module("pointcept.engines.hooks", HookBase=object)
    module("pointcept.models.builder", MODELS=Registry())
    module("pointcept.models.point_prompt_training", PDNorm=None)
    misc = module("pointcept.models.utils.misc", models / "utils" / "misc.py")

    utils = sys.modules["pointcept.models.utils"]
    utils.__dict__.update({k: v for k, v in misc.__dict__.items() if not k.startswith("__")})
    utils.__path__ = [str(models / "utils")]
    module("pointcept.models.utils.structure", models / "utils" / "structure.py")
    module("pointcept.models.modules", models / "modules.py")
    files = {
        "m1": "point_transformer_v3/point_transformer_v3m1_base",
        "m2": "point_transformer_v3/point_transformer_v3m2_sonata",
        "m3": "point_transformer_v3/point_transformer_v3m3_utonia",
        "litept": "litept/litept_v1",
    }
    for name in ("point_transformer_v3", "litept"):
        module(f"pointcept.models.{name}")
    made = {
        name: module(f"pointcept.models.{file.split('/')[0]}.{name}", models / f"{file}.py")
        for name, file in files.items()
        if (models / f"{file}.py").is_file()  # older checkouts have no m3, no LitePT
    }
    return {name: found.LitePT if name == "litept" else found.PointTransformerV3 for name, found in made.items()}


def transformer(setting: Setting, kind: str, items: int = 1, **options: Any) -> Client:
    """A network of Pointcept by its name in `authors`, without a head: features of each voxel."""
    made = authors(setting.clients / "pointcept")[kind](6, **options)

    def segment(net: torch.nn.Module, scene: Any) -> torch.Tensor:
        x, cells, ends = scene
        torch.manual_seed(0)  # the order of curves is drawn in each call
        given = {"feat": x, "grid_coord": cells, "coord": VOXEL * cells.to(x.dtype), "offset": ends}
        with kept_in_fp64():
            found: torch.Tensor = net(given).feat
        return found

    return Client(made.to(setting.device), indoor_rows(setting, items), segment)
