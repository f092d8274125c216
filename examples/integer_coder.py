"""Compress a point cloud without loss on one machine and read it on any other: the network computes in integers.

    pip install constriction
    python examples/integer_coder.py train NET [--steps 60]
    python examples/integer_coder.py encode NET POINTS.npy FILE [--backend NAME] [--threads N]
    python examples/integer_coder.py decode NET FILE POINTS.npy [--backend NAME] [--threads N]

The octree and its predictor are those of `occupancy_coder.py`, whose two ends must agree on every probability to the
last bit, and therefore on machine, version and threads. Here the predictor is `sc.quantize`d. Its logits are the same
bytes everywhere. Their softmax is in integers too: powers of two from a table that whole numbers alone make. So a file
written by one backend is read by another. POINTS are voxels (N, 3) int32; decoding gives them in lexicographic order.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path

import numpy as np
import torch
import typer
from occupancy_coder import Predictor, collate, decode, encode, features, with_batch
from torch.nn import functional as F

import sparseconv as sc

STEPS = 16  # parts of a factor of two of a probability
app = typer.Typer(add_completion=False)


@cache
def powers() -> np.ndarray:
    """floor(2^24 * 2^(-n / STEPS)) for n from 0: by roots of whole numbers, 1 where it would be less."""
    root = 1 << 512  # 2^(1 / STEPS) in units of 2^-512, by square roots of square roots
    root <<= 1
    for _ in range(STEPS.bit_length() - 1):
        root = math.isqrt(root << 512)
    values, now = [], 1 << (24 + 512)
    for _ in range(24 * STEPS):
        values.append(now >> 512)
        now = (now << 512) // root
    return np.array(values, np.int64)


class IntegerPredictor:
    """A quantized `Predictor`, called as `encode` and `decode` call it."""

    def __init__(self, net: sc.quantization.QuantizedNetwork) -> None:
        self.net = net

    def probabilities(self, octree_so_far: list[torch.Tensor], occupancy: list[torch.Tensor]) -> np.ndarray:
        """(N, 255) fp64 whole numbers over their sum, for the last level of nodes."""
        level = len(octree_so_far) - 1
        nodes, above = octree_so_far[-1], (octree_so_far[-2], occupancy[-1]) if level else (None, None)
        x = sc.SparseTensor(sc.VoxelGrid(with_batch(nodes)), features(nodes, *above, level))
        logits = self.net(x).features.cpu().numpy()
        scaled = np.floor(logits * np.float32(STEPS / math.log(2))).astype(np.int64)  # one product, rounded alike
        below = np.minimum(scaled.max(1, keepdims=True) - scaled, len(powers()) - 1)
        weights = np.maximum(powers()[below], 1)
        return weights / weights.sum(1, keepdims=True)


def cloud(seed: int, points: int = 3000) -> torch.Tensor:
    """Voxels (N, 3) of a bumpy ground, distinct and sorted."""
    g = torch.Generator().manual_seed(seed)
    xy = torch.rand(points, 2, generator=g) * 64
    waves = torch.rand(4, generator=g)
    z = 8 + 4 * torch.sin(xy[:, 0] * (0.05 + 0.1 * waves[0])) + 3 * torch.cos(xy[:, 1] * (0.05 + 0.1 * waves[1]))
    return torch.cat([xy, z[:, None]], 1).floor().int().unique(dim=0)


def trained(steps: int, width: int = 16) -> sc.quantization.QuantizedNetwork:
    """A predictor that has seen some clouds, in integers."""
    torch.manual_seed(0)
    net = Predictor(width)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for step in range(steps):
        x, symbols, _ = collate([cloud(step)])
        loss = F.cross_entropy(net(x).features, symbols)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return sc.quantize(net.eval(), [collate([cloud(1000 + seed)])[0] for seed in range(4)])


def loaded(path: Path, backend: str, threads: int) -> IntegerPredictor:
    torch.set_num_threads(threads or torch.get_num_threads())
    # a pickle of one's own: such a file may run anything, so take none from others
    return IntegerPredictor(torch.load(path, weights_only=False).use_backend(backend))


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@app.command("train")
def train_command(net: Path, steps: int = 60) -> None:
    """Train a small predictor on generated clouds and keep it in integers."""
    torch.save(trained(steps), net)


@app.command("encode")
def encode_command(net: Path, points: Path, file: Path, backend: str = "auto", threads: int = 0) -> None:
    """Write a file, and print SHA-256 of the voxels and bits per voxel."""
    coords = torch.from_numpy(np.load(points)).int().unique(dim=0)
    data = encode(loaded(net, backend, threads), coords)
    file.write_bytes(data)
    print(f"{sha(coords.numpy().tobytes())} {len(coords)} voxels, {8 * len(data) / len(coords):.3f} bits per voxel")


@app.command("decode")
def decode_command(net: Path, file: Path, points: Path, backend: str = "auto", threads: int = 0) -> None:
    """Read a file, write its voxels, and print their SHA-256."""
    coords = decode(loaded(net, backend, threads), file.read_bytes())
    np.save(points, coords.numpy())
    print(f"{sha(coords.numpy().tobytes())} {len(coords)} voxels")


if __name__ == "__main__":
    app()
