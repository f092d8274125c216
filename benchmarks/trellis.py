"""TRELLIS.2's own sparse autoencoders, unmodified under FlexGEMM's names, beside dense convolutions.

    python -m benchmarks.trellis --trellis DIR --json FILE

``--trellis`` is a checkout of TRELLIS.2, which is no part of this project. Both runs are of its files with the same
weights, in fp64, on the CPU. In the second its convolutions scatter their rows into a volume, and torch convolves that.
Casts to fp32 around norms and within blocks are left out. Modules that render or train are not imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from sparseconv.interop import flex_gemm

NEXT, DOWN, UP = "SparseConvNeXtBlock3d", "SparseResBlockS2C3d", "SparseResBlockC2S3d"
RES, NEAR_DOWN, NEAR_UP = "SparseResBlock3d", "SparseResBlockDownsample3d", "SparseResBlockUpsample3d"


def layout(widths: tuple[int, ...], blocks: tuple[int, ...], kinds: tuple[str, str, str]) -> dict[str, Any]:
    """What an encoder is made of; its decoder is the mirror of it."""
    return {"widths": widths, "blocks": blocks, "kinds": kinds}


#: name, layout, edge of the scene, voxels of each of its items, where the decoder has the voxels from
CASES: tuple[tuple[str, dict[str, Any], int, tuple[int, ...], str], ...] = (
    ("ConvNeXt blocks, subdivisions of the encoder", layout((16, 32, 64), (1, 1, 1), (NEXT, DOWN, UP)), 16, (300, 200),
     "cached"),
    ("ConvNeXt blocks, predicted subdivisions", layout((16, 32, 64), (1, 1, 1), (NEXT, DOWN, UP)), 16, (300, 200),
     "predicted"),
    ("ConvNeXt blocks, guided", layout((16, 32, 64), (1, 1, 1), (NEXT, DOWN, UP)), 16, (300, 200), "guided"),
    ("the same with recomputation", layout((16, 32, 64), (1, 1, 1), (NEXT, DOWN, UP)) | {"use_checkpoint": True}, 16,
     (300, 200), "cached"),
    ("residual blocks, nearest", layout((8, 16, 24), (1, 2, 1), (RES, NEAR_DOWN, NEAR_UP)), 16, (400,), "training"),
    ("the texture's, published widths", layout((64, 128, 256, 512, 1024), (0, 1, 1, 1, 1), (NEXT, DOWN, UP)), 16,
     (150,), "cached"),
)  # fmt: skip


def authors(folder: Path) -> Any:
    """The module of TRELLIS.2's autoencoders; its package without what renders and trains."""
    flex_gemm.install()
    package = types.ModuleType("trellis2")
    package.__path__ = [str(folder / "trellis2")]
    sys.modules["trellis2"] = package
    return importlib.import_module("trellis2.models.sc_vaes.sparse_unet_vae")


def dense(
    feats: torch.Tensor, coords: torch.Tensor, shape: Any, weight: torch.Tensor, bias: Any, cache: Any, dilation: Any
) -> tuple[torch.Tensor, str]:
    """A submanifold convolution by torch's convolution of the whole volume."""
    places = tuple(coords.long().t())
    volume = feats.new_zeros(shape[0], *shape[2:], feats.shape[1]).index_put(places, feats).movedim(-1, 1)
    padding = tuple(d * (k // 2) for k, d in zip(weight.shape[1:4], dilation))
    found = torch.nn.functional.conv3d(volume, weight.movedim(-1, 1), bias, padding=padding, dilation=dilation)
    return found.movedim(1, -1)[places], "dense"


def pair(vae: Any, options: dict[str, Any], way: str) -> torch.nn.ModuleDict:
    """An encoder and its decoder, with weights that are nowhere zero."""
    torch.manual_seed(0)
    (block, down, up), widths, blocks = options["kinds"], list(options["widths"]), list(options["blocks"])
    args = [{"use_checkpoint": options.get("use_checkpoint", False)}] * len(widths)
    kinds, steps = [block] * len(widths), len(widths) - 1
    encoder = vae.SparseUnetVaeEncoder(6, widths, 8, blocks, kinds, [down] * steps, args)
    decoder = vae.SparseUnetVaeDecoder(
        6, widths[::-1], 8, blocks[::-1], kinds, [up] * steps, args, pred_subdiv=way in ("predicted", "training")
    )
    nets = torch.nn.ModuleDict({"encoder": encoder, "decoder": decoder}).double()
    with torch.no_grad():
        for parameter in nets.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for net in (encoder, decoder):
        net.dtype = torch.float64
    return nets


def run(sp: Any, nets: torch.nn.ModuleDict, coords: torch.Tensor, x: torch.Tensor, way: str) -> list[torch.Tensor]:
    """Everything that comes out: the latent, the decoded features, subdivisions; voxels as the last one."""
    encoder, decoder = (nets[name] for name in ("encoder", "decoder"))
    latent = encoder(sp.SparseTensor(x, coords))
    if way == "predicted":
        alone = sp.SparseTensor(latent.feats, latent.coords)  # without what the encoder found
        y, subdivisions = decoder.eval()(alone, return_subs=True)
        return [latent.feats, y.feats, *(s.feats for s in subdivisions), y.coords]
    if way == "guided":
        alone = sp.SparseTensor(latent.feats, latent.coords)
        guides, at, levels = [], latent.coords, sum(1 for _ in decoder.get_submodule("blocks").children())
        for step in range(levels - 1):
            kept = torch.rand(len(at), 8, generator=torch.Generator().manual_seed(step)) - 0.6
            guides.append(sp.SparseTensor(kept.double(), at))
            parents, children = (kept > 0).nonzero(as_tuple=True)
            moves = torch.stack([children * 0, children & 1, children >> 1 & 1, children >> 2], 1)
            at = (at[parents] * torch.tensor([1, 2, 2, 2]) + moves).int()
        y = decoder(alone, guide_subs=guides)
        return [latent.feats, y.feats, y.coords]
    if way == "training":
        y, _, subdivisions = decoder(latent)
        return [latent.feats, y.feats, *(s.feats for s in subdivisions), y.coords]
    y = decoder(latent)
    return [latent.feats, y.feats, y.coords]


def differences(vae: Any, options: dict[str, Any], edge: int, counts: tuple[int, ...], way: str) -> dict[str, Any]:
    """Of the outputs, the input's gradient and the worst parameter's, each over the largest number (or norm)."""
    sp = importlib.import_module("trellis2.modules.sparse")
    backend = importlib.import_module("trellis2.modules.sparse.conv.conv_flex_gemm")
    norm = importlib.import_module("trellis2.modules.norm")
    nets, gen = pair(vae, options, way), torch.Generator().manual_seed(0)
    coords = []
    for item, rows in enumerate(counts):
        cells = torch.randperm(edge**3, generator=gen)[:rows]
        coords.append(torch.stack([torch.full((rows,), item), cells // edge**2, cells // edge % edge, cells % edge], 1))
    places = torch.cat(coords).int()
    features = torch.randn(len(places), 6, generator=gen, dtype=torch.float64)
    runs, calls = [], []

    def counted(*given: Any) -> Any:
        calls.append(given[5] is not None)  # whether a cache came along
        return flex_gemm.ops.spconv.sparse_submanifold_conv3d(*given)

    for convolve in (counted, dense):
        x = features.clone().requires_grad_()
        with (
            patch.object(backend, "sparse_submanifold_conv3d", convolve),
            patch.object(norm, "manual_cast", lambda tensor, dtype: tensor),
        ):
            *outputs, at = run(sp, nets, places, x, way)
            parts = [(y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in outputs]
            total = torch.stack(parts).sum()
            grads = torch.autograd.grad(total, [x, *nets.parameters()], allow_unused=True)
        runs.append((outputs, at, grads))
    (got, mine, grads), (want, theirs, asked) = runs
    assert torch.equal(mine, theirs)
    worst = 0.0
    for own, other in zip(grads[1:], asked[1:], strict=True):
        if other is not None:
            size = float(other.norm())
            worst = max(worst, float((own - other).norm()) / (size if size > 1e-9 else 1.0))
    return {
        "parameters": sum(p.numel() for p in nets.parameters()),
        "voxels": [len(places), len(mine)],
        "convolutions": len(calls),
        "with a cache": sum(calls),
        "output": max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(got, want)),
        "input's gradient": float((grads[0] - asked[0]).abs().max() / asked[0].abs().max()),
        "worst parameter's": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trellis", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    vae = authors(args.trellis)
    found = {}
    for name, options, edge, counts, way in CASES:
        found[name] = differences(vae, options, edge, counts, way)
        print(f"{name:45}", {k: f"{v:.1e}" if isinstance(v, float) else v for k, v in found[name].items()}, flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
