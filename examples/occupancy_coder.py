"""Compress LiDAR scans without loss: a sparse network predicts an octree, an arithmetic coder writes it down.

    pip install constriction
    python examples/occupancy_coder.py --data DIR --workers 8
    python examples/occupancy_coder.py --stand-in

DIR is SemanticKITTI's folder ``dataset``; labels are not read. A scan becomes voxels, and these the leaves of an
octree. Level by level, the network sees all nodes of a level and says how likely each of the 255 occupancies of its
eight children is. Both ends run it on what the decoder has already read. So the network's probabilities are never sent,
and its size in bits is the cross-entropy that it was trained on. The score is bits per voxel, of files that were
written and read back equal. The chance level is a fixed table of how often each occupancy occurs.

Probabilities must agree to the last bit at both ends: use one machine, one version, as many threads. Convolutions give
the same bits in every run for the same grid. The real set (not run here) at 2 cm needs 13 levels.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Annotated

import constriction
import numpy as np
import torch
import typer
from semantic_kitti import SPLITS, read_points
from stand_ins import semantic_kitti as stand_in_set
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from training import Run, begin, data_folder

import sparseconv as sc
from sparseconv import nn

LEVELS = 16  # at most
MODEL = constriction.stream.model.Categorical(perfect=False)
CHILDREN = torch.cartesian_prod(*[torch.arange(2)] * 3).int()  # (8, 3), child k has bit k of an occupancy


class Octree:
    """The nodes of each level, coarsest first, in lexicographic order, with what each has: a byte of its children."""

    def __init__(self, coords: torch.Tensor, depth: int) -> None:
        """coords (N, 3) int32, distinct, from 0 to 2^depth - 1."""
        self.depth = depth
        self.nodes = [(coords >> (depth - level)).unique(dim=0) for level in range(depth + 1)]
        self.occupancy = [occupancy_of(a, b) for a, b in zip(self.nodes, self.nodes[1:])]


def occupancy_of(nodes: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
    """Bytes (N,), 1 to 255, of nodes (N, 3) whose children are given."""
    rows = sc.VoxelGrid(with_batch(nodes)).lookup(with_batch(children >> 1))
    bit = ((children & 1) * torch.tensor([4, 2, 1])).sum(1)
    return torch.zeros(len(nodes), dtype=torch.int64).index_add(0, rows, 1 << bit)


def children_of(nodes: torch.Tensor, occupancy: torch.Tensor) -> torch.Tensor:
    """The next level's nodes, in lexicographic order: the inverse of `occupancy_of`."""
    parent, child = ((occupancy[:, None] >> torch.arange(8)) & 1).nonzero().T
    return (2 * nodes[parent] + CHILDREN[child]).unique(dim=0)


def with_batch(coords: torch.Tensor, item: int = 0) -> torch.Tensor:
    return F.pad(coords, (1, 0), value=item)


def features(
    nodes: torch.Tensor, above: torch.Tensor | None, occupancy: torch.Tensor | None, level: int
) -> torch.Tensor:
    """What the decoder knows of each node: which child it is, its siblings, its level; (N, 16 + LEVELS)."""
    octant = F.one_hot(((nodes & 1) * torch.tensor([4, 2, 1])).sum(1).long(), 8)
    siblings = torch.zeros(len(nodes), 8, dtype=torch.int64)
    if above is not None:
        byte = occupancy[sc.VoxelGrid(with_batch(above)).lookup(with_batch(nodes >> 1))]
        siblings = (byte[:, None] >> torch.arange(8)) & 1
    depth = F.one_hot(torch.full((len(nodes),), level), LEVELS)
    return torch.cat([octant, siblings, depth], 1).float()


class Predictor(nn.SparseModule):
    """Logits of the 255 occupancies of each node, from all nodes of its level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvBlock(16 + LEVELS, width, 3),
            nn.ResidualBlock(width, width),
            nn.ResidualBlock(width, width, dilation=2),
            nn.Linear(width, 255),
        )

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        return self.net(x)

    @torch.no_grad()
    def probabilities(self, octree_so_far: list[torch.Tensor], occupancy: list[torch.Tensor]) -> np.ndarray:
        """(N, 255) fp32 for the last level of nodes, from these and from the occupancies above."""
        device, level = next(self.parameters()).device, len(octree_so_far) - 1
        nodes, above = octree_so_far[-1], (octree_so_far[-2], occupancy[-1]) if level else (None, None)
        x = sc.SparseTensor(sc.VoxelGrid(with_batch(nodes)), features(nodes, *above, level))
        return self.eval()(x.to(device)).features.float().softmax(1).cpu().numpy()


def encode(net: Predictor, coords: torch.Tensor) -> bytes:
    """Distinct voxels (N, 3) int32 in any order -> a file: depth, origin, and one arithmetic code."""
    low = coords.amin(0)
    depth = max(1, int((coords - low).max()).bit_length())
    tree, coder = Octree(coords - low, depth), constriction.stream.queue.RangeEncoder()
    for level in range(depth):
        probabilities = net.probabilities(tree.nodes[: level + 1], tree.occupancy[:level])
        coder.encode(tree.occupancy[level].sub(1).int().numpy(), MODEL, probabilities)
    return struct.pack("<B3i", depth, *low.tolist()) + coder.get_compressed().astype("<u4").tobytes()


def decode(net: Predictor, data: bytes) -> torch.Tensor:
    """A file -> its voxels (N, 3) int32, in lexicographic order."""
    depth, *low = struct.unpack_from("<B3i", data)
    decoder = constriction.stream.queue.RangeDecoder(np.frombuffer(data, "<u4", offset=13).astype(np.uint32))
    nodes, occupancy = [torch.zeros(1, 3, dtype=torch.int32)], []
    for _ in range(depth):
        symbols = decoder.decode(MODEL, net.probabilities(nodes, occupancy))
        occupancy.append(torch.from_numpy(symbols).long() + 1)
        nodes.append(children_of(nodes[-1], occupancy[-1]))
    return nodes[-1] + torch.tensor(low, dtype=torch.int32)


class Scans(Dataset):
    """The voxels (N, 3) of one scan an item."""

    def __init__(self, folder: Path, split: str, voxel_size: float) -> None:
        self.voxel_size = voxel_size
        names = [f"{number:02d}" for number in SPLITS[split]]
        self.files = [p for name in names for p in sorted((folder / "sequences" / name / "velodyne").glob("*.bin"))]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return sc.voxelize(read_points(self.files[index])[0], self.voxel_size)[0].coords[:, 1:]


def collate(scans: list[torch.Tensor]) -> tuple[sc.SparseTensor, torch.Tensor, int]:
    """Every level of every scan is a batch item of its own; runs in the workers."""
    coords, inputs, symbols = [], [], []
    for scan in scans:
        scan = scan - scan.amin(0) + torch.randint(32, (3,), dtype=torch.int32)  # the octree cuts elsewhere each time
        tree = Octree(scan, max(1, int(scan.max()).bit_length()))
        for level, nodes in enumerate(tree.nodes[:-1]):
            above = (tree.nodes[level - 1], tree.occupancy[level - 1]) if level else (None, None)
            coords.append(nodes)
            inputs.append(features(nodes, *above, level))
            symbols.append(tree.occupancy[level] - 1)
    return sc.SparseTensor.from_list(coords, inputs), torch.cat(symbols), sum(map(len, scans))


def validate(net: Predictor, scans: Scans) -> float:
    """Bits a voxel of whole files, each read back and compared."""
    bits = voxels = 0
    for index in range(len(scans)):
        data = encode(net, scans[index])
        if not torch.equal(decode(net, data), scans[index]):  # both in lexicographic order
            raise AssertionError(f"{scans.files[index]} was not read back as it was written")
        bits, voxels = bits + 8 * len(data), voxels + len(scans[index])
    return bits / voxels


def fixed_table(train: Scans, test: Scans) -> float:
    """Bits a voxel of the test scans, with the frequencies of occupancies in the training scans for probabilities."""
    counts, bits, voxels = torch.ones(255, dtype=torch.float64), 0.0, 0
    for scans, learn in ((train, True), (test, False)):
        for index in range(len(scans)):
            coords = scans[index] - scans[index].amin(0)
            symbols = torch.cat(Octree(coords, int(coords.max()).bit_length()).occupancy) - 1
            if learn:
                counts += torch.bincount(symbols, minlength=255)
            else:
                bits, voxels = bits - float((counts / counts.sum()).log2()[symbols].sum()), voxels + len(coords)
    return bits / voxels


def train(
    folder: Path, output: Path, epochs: int, batch: int, width: int, voxel_size: float, workers: int = 0, seed: int = 0
) -> tuple[Run, float]:
    """Train, write and read files after each epoch, keep what is needed to continue."""
    device = begin(seed)
    scans, held_out = Scans(folder, "train", voxel_size), Scans(folder, "valid", voxel_size)
    loader = DataLoader(scans, batch, shuffle=True, collate_fn=collate, num_workers=workers)
    net = Predictor(width).to(device)  # not captured as graphs, so that both ends take the same way to the same bits
    optimizer = torch.optim.AdamW(net.parameters())
    steps = epochs * len(loader)
    run = Run(output, "occupancy_coder", net, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, steps))
    for _ in run.epochs(epochs):
        net.train()
        for x, symbols, voxels in loader:
            with run.autocast():
                logits = net(x.to(device)).features
            nats = F.cross_entropy(logits.float(), symbols.to(device), reduction="sum")
            run.step(nats / voxels / np.log(2))
        run.finish_epoch(bits_a_voxel=validate(net, held_out))
    return run, fixed_table(scans, held_out)


def main(
    data: Annotated[Path | None, typer.Option(help="The folder 'dataset' of SemanticKITTI.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    epochs: int = typer.Option(None, help="50, and 20 for the stand-in."),
    batch: int = typer.Option(None, help="Scans per batch: 2, and 1 for the stand-in."),
    width: int = typer.Option(None, help="Channels: 64, and 32 for the stand-in."),
    voxel_size: float = typer.Option(None, help="[m]: 0.02, and 0.25 for the stand-in."),
    workers: int = 0,
    output: Path = Path("runs"),
    seed: int = 0,
) -> None:
    """Compress LiDAR scans without loss; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        size = (20, 1, 32, 0.25) if stand_in else (50, 2, 64, 0.02)
        size = [given or default for given, default in zip((epochs, batch, width, voxel_size), size)]
        run, table = train(folder, output, *size, workers, seed)
    print(run.summary("bits_a_voxel", table))


if __name__ == "__main__":
    typer.run(main)
