"""Tell a frog's skeleton, nerves, eyes and organs apart, in two processes.

The voxels are all labelled tissue, pooled 4 x 4 x 4; the network sees how full each is and where it lies along the
body, above the belly, and off the midline. Two processes learn from slabs of the left half of the frog (DDP, batch
norms over both); the mirrored right half is held out. Run: python examples/packaged/frog_tissues.py
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loop import Task, options, reached, tile, train
from volumes import frog, pooled

CLASSES = ["organs", "eyes", "nerves", "skeleton"]
OF = {4: 1, 5: 1, 2: 2, 12: 2, 13: 3}
MIDDLE = 231 / 4


def task() -> Task:
    groups = np.zeros(256, np.uint8)
    for label, group in OF.items():
        groups[label] = group
    blocks = pooled(frog(), 4)
    full = (blocks > 0).mean(-1)
    inside = np.argwhere(full > 0)
    here = blocks[tuple(inside.T)]
    votes = np.stack([((groups[here] == g) & (here > 0)).sum(1) for g in range(len(CLASSES))], 1)
    target = torch.from_numpy(votes.argmax(1))
    coords = torch.from_numpy(inside)
    off = (coords[:, 1] - MIDDLE).abs()
    where = torch.stack([coords[:, 0] / 34, off / 60, coords[:, 2] / 125], 1)
    features = torch.cat([torch.from_numpy(full[tuple(inside.T)])[:, None], where], 1)
    mirrored = coords.clone()
    mirrored[:, 1] = (off - 0.5).round().long()
    left, right = coords[:, 1] < MIDDLE, coords[:, 1] >= MIDDLE
    cuts = torch.linspace(0, 126, 5)
    parts = [left & (coords[:, 2] >= a) & (coords[:, 2] < b) for a, b in itertools.pairwise(cuts)]
    return Task(
        "frog_tissues",
        [tile(mirrored[m], features[m], target[m]) for m in parts],
        [tile(mirrored[right], features[right], target[right])],
        CLASSES,
        target=0.70,
    )


def work(rank: int, folder: str, steps: int, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = train(task(), steps, output, rank, 2)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0 and not reached(found):
        raise SystemExit(1)


if __name__ == "__main__":
    given = options(__doc__ or "", 80)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(work, (meeting, given.steps, given.output), nprocs=2)
