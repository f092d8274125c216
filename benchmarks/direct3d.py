"""Direct3D-S2's own autoencoder of sparse distances, unmodified under torchsparse's names, beside dense convolutions.

    python -m benchmarks.direct3d --direct3d DIR --json FILE

``--direct3d`` is a checkout of Direct3D-S2, which is no part of this project. Both runs are of its files with the same
weights, in fp64, on the CPU. In the second its convolutions scatter their rows into a volume, and torch convolves that.
Attention is torch's in place of flash-attn's. Casts to fp32 around norms are left out. It ends before the mesh.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.clients.__main__ import machine
from benchmarks.clients.equality import differences, fill
from benchmarks.clients.standing_in import module, unless_installed
from benchmarks.clients.transformers import kept_in_fp64, varlen
from sparseconv.interop import torchsparse

#: name, edge of the scene, voxels of each of its items, options of the autoencoder
CASES: tuple[tuple[str, int, tuple[int, ...], dict[str, Any]], ...] = (
    ("two items", 32, (900, 600), {}),
    ("one item, with recomputation", 32, (700,), {"use_checkpoint": True}),
)
PACKAGE, SPARSE = "direct3d_s2", "direct3d_s2.modules.sparse"


def packed(qkv: torch.Tensor) -> torch.Tensor:
    """flash-attn's attention of windows of one size (B, N, 3, H, C), by torch's."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def authors(folder: Path) -> Any:
    """The class of the autoencoder, with torchsparse as it chooses itself, without what makes meshes of its answers."""
    torchsparse.install()
    module("flash_attn", flash_attn_varlen_qkvpacked_func=varlen, flash_attn_qkvpacked_func=packed)
    unless_installed("trimesh")
    unless_installed("skimage", measure=None)
    for name in (PACKAGE, f"{PACKAGE}.models", f"{PACKAGE}.models.autoencoders"):
        module(name).__path__ = [str(folder / name.replace(".", "/"))]
    attention: Any = types.ModuleType("of its diffusion alone, in Triton")
    attention.SpatialSparseAttention = None
    name = f"{SPARSE}.attention.spatial_sparse_attention"
    sys.modules[f"{name}.module.spatial_sparse_attention"] = attention
    return importlib.import_module(f"{PACKAGE}.models.autoencoders.ss_vae").SparseSDFVAE


def dense(layer: Any, x: Any) -> Any:
    """The layer by torch's convolution of the whole volume: every one here keeps its voxels."""
    if layer.stride != (1, 1, 1) or layer.transposed:
        raise ValueError(f"no stand-in for {layer}")
    places = tuple(x.C.long().t())
    edges = [int(places[axis].max()) + 1 for axis in range(4)]
    volume = x.F.new_zeros(*edges, x.F.shape[1]).index_put(places, x.F).movedim(-1, 1)
    taps = layer.kernel.view(*layer.kernel_size[::-1], layer.in_channels, layer.out_channels)  # first axis fastest
    found = torch.nn.functional.conv3d(volume, taps.permute(4, 3, 2, 1, 0), layer.bias, padding=layer.padding)
    return torchsparse.SparseTensor(found.movedim(1, -1)[places], x.C, x.stride)


def step(net: Any, places: torch.Tensor, convolve: Callable[..., Any] | None) -> dict[str, torch.Tensor]:
    """Latents, distances, and the gradients of their sum with fixed weights."""
    x = torch.randn(len(places), 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    batch = {"sparse_sdf": x, "sparse_index": places[:, 1:], "batch_idx": places[:, 0], "factor": 1.0}
    kind = torchsparse.nn.Conv3d
    found: dict[str, torch.Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    net.zero_grad()
    with kept_in_fp64(), patch.object(kind, "forward", convolve or kind.forward):
        latent, posterior = net.encode(batch, sample_posterior=False)
        y = net.decoder(latent, factor=1.0)
        for name, part in (("latents", posterior.parameters), ("distances", y.feats)):
            total = total + (part * torch.linspace(-1, 1, part.numel(), dtype=part.dtype).view_as(part)).sum()
            found[f"output {name}"] = part.detach()
        total.backward()
    assert x.grad is not None
    found["gradient of the features"] = x.grad
    found.update({f"gradient of {n}": p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
    return found | {"places": y.coords.double()}


def compare(vae: Any, edge: int, counts: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Of the outputs and of the worst gradient, each in the norm of its tensor."""
    net = vae(embed_dim=16, resolution=edge, **options).double()
    fill(net)
    for part in (net.encoder, net.decoder):
        part.dtype = torch.float64
    with torch.no_grad():
        net.decoder.out_layer.weight.mul_(0.1)  # so that its tanh is nowhere flat
    parts, gen = [], torch.Generator().manual_seed(0)
    for item, rows in enumerate(counts):
        cells = torch.randperm(edge**3, generator=gen)[:rows]
        parts.append(torch.stack([torch.full((rows,), item), cells // edge**2, cells // edge % edge, cells % edge], 1))
    places = torch.cat(parts).int()
    ours, theirs = step(net, places, None), step(net, places, dense)
    at = theirs.pop("places")
    assert torch.equal(ours.pop("places"), at)
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "voxels": [len(places), len(at)],
        **differences(ours, theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direct3d", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    vae = authors(args.direct3d)
    command = "python -m benchmarks.direct3d --direct3d DIR"
    found: dict[str, Any] = {"facts": {**machine("cpu"), "torch": torch.__version__, "command": command}, "rows": []}
    for name, edge, counts, options in CASES:
        found["rows"].append({"name": name, **compare(vae, edge, counts, options)})
        print(found["rows"][-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
