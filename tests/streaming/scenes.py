"""Scenes and networks for tests of streaming, and a run that is cut wherever a test wants."""

from __future__ import annotations

from typing import Any

import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.streaming import run
from sparseconv.streaming.phases import Program


def scene(
    rank: int = 3, count: int = 600, batch: int = 2, channels: int = 4, seed: int = 0, dtype=torch.float32
) -> Any:
    """Voxels of a few thick curves, shuffled, with negative coordinates."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-1, 2, (count, rank), generator=generator)
    places = steps.cumsum(0) + torch.randint(0, 2, (count, rank), generator=generator)
    items = torch.randint(0, batch, (count, 1), generator=generator)
    coords = torch.unique(torch.cat([items, places], 1), dim=0).int()
    coords = coords[torch.randperm(len(coords), generator=generator)]
    features = torch.randn(len(coords), channels, generator=generator).to(dtype)
    return sc.SparseTensor(sc.VoxelGrid(coords, batch, voxel_size=0.5, origin=0.25), features)


class Squeeze(nn.SparseModule):
    """Every voxel is scaled by a gate of its batch item, as squeeze-and-excitation does."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool, self.gate = nn.GlobalAvgPool(), torch.nn.Linear(channels, channels)

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        gate = torch.sigmoid(self.gate(self.pool(x)))
        return x.with_features(x.features * gate[x.coords[:, 0].long()])


class Pruned(nn.SparseModule):
    """Voxels that a layer likes, doubled in number on the way."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.up = nn.SubmanifoldConv(channels, 4, 3), nn.ConvTranspose(4, 4, 2, stride=2)
        self.last = nn.SubmanifoldConv(4, 2, 3)

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        y = self.up(self.conv(x))
        return self.last(y.subset(y.features[:, 0] > 0))


class Several(nn.SparseModule):
    """Results on several grids, and a maximum of each item."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fine, self.down = nn.SubmanifoldConv(channels, 4, 3), nn.Conv(4, 6, 3, stride=2)
        self.full, self.pool = nn.Conv(6, 4, 3, target="full"), nn.GlobalMaxPool()

    def forward(self, x: sc.SparseTensor) -> dict[str, Any]:
        fine = self.fine(x)
        coarse = self.full(self.down(fine))
        return {"fine": fine, "coarse": coarse, "most": self.pool(coarse), "rows": fine.features[:, 1:3]}


NETWORKS = {
    "conv": lambda: nn.Sequential(nn.SubmanifoldConv(4, 6, 3), nn.ReLU(inplace=True), nn.SubmanifoldConv(6, 4, 3)),
    "unet": lambda: nn.UNet(4, 5, channels=(8, 12)),
    "deep": lambda: nn.UNet(4, 3, channels=(4, 6, 8), block="plain"),
    "bottleneck": lambda: nn.UNet(4, 3, channels=(8, 8), block="bottleneck", down_kernel=3),
    "spunet": lambda: nn.SpUNet(4, 3, base_channels=4, channels=(4,) * 4, layers=(1,) * 4),
    "minkunet": lambda: nn.MinkUNet(4, 3, variant="14", planes=(4,) * 8, init_channels=4),
    "second": lambda: nn.SecondEncoder(4, (41, 32, 32)),
    "resnet": lambda: nn.ResNet(4, 3, depth=14, planes=(4,) * 4),
    "convnext": lambda: nn.ConvNeXtUNet(4, 3, channels=(4, 8), blocks=(1, 1), kernel_size=3),
    "pools": lambda: nn.Sequential(nn.MaxPool(2), nn.SubmanifoldConv(4, 4, 3), nn.AvgPool(3, 2), nn.SumPool(2)),
    "pruned": lambda: Pruned(4),
    "several": lambda: Several(4),
}


def forced(monkeypatch: Any, cuts: int, rows: int) -> None:
    """Let every run be cut at so many places, and take blocks of so few voxels."""
    from sparseconv.streaming import blocks as trees
    from sparseconv.streaming import planning

    def fine(coords: Any, extent: Any, limit: int, store: Any, piece: int, *others: Any) -> Any:
        return trees.Blocks(coords, extent, rows, store, min(piece, 100), *others)

    def chosen(program: Program, sample: Any, blocks: Any, budget: int, batch_size: int, learns: bool) -> Any:
        cut = Program(program.steps, program.results, planning.cuts(program, cuts))
        assert len(blocks.leaves) > 2 or rows >= blocks.root.size
        return cut, [blocks.chosen(lambda block: block.size <= rows) for _ in cut.phases]

    monkeypatch.setattr(run, "chosen", chosen)
    monkeypatch.setattr(run, "Blocks", fine)


def same(got: Any, want: Any) -> None:
    """Equal structures, voxels in equal order, and equal bits."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, sc.SparseTensor):
        assert torch.equal(got.coords, want.coords)
        assert (got.grid.batch_size, got.grid.voxel_size) == (want.grid.batch_size, want.grid.voxel_size)
        assert got.grid.origin == want.grid.origin
        same(got.features, want.features)
    else:
        assert got.dtype == want.dtype
        assert torch.equal(got, want), float((got - want).abs().max())
