"""Segment a human brain into grey matter, white matter and the rest, from its T1 image alone.

The voxels are those of the MNI152 template inside the skull, pooled to 3 mm. They are cut into six slabs of as many
voxels, from the back of the head to its front, across both hemispheres. The network learns from every other slab and is
judged on the rest. A hemisphere would be nearly the mirror image of the one it learnt from; a slab is not.
Run: python examples/packaged/brain_tissues.py
"""

from __future__ import annotations

import numpy as np
import torch
from loop import Task, options, reached, tile, train
from volumes import brain, pooled

#: slabs to learn from, and slabs that are only ever looked at
SPLIT = (0, 2, 4), (1, 3, 5)


def task(millimetres: int = 3) -> Task:
    t1, gm, wm = (pooled(v, millimetres).mean(-1) for v in brain())
    inside = np.argwhere(t1 > 10)
    rest = 255 - gm - wm
    labels = np.stack([gm, wm, rest], -1).argmax(-1)
    coords = torch.from_numpy(inside)
    value = torch.from_numpy(t1[tuple(inside.T)] / 128 - 1)[:, None]
    target = torch.from_numpy(labels[tuple(inside.T)])
    y = coords[:, 1]
    slabs = torch.bucketize(y, torch.quantile(y.double(), torch.linspace(0, 1, 7, dtype=torch.float64)[1:-1]))
    learnt, held_out = (
        [tile(coords[m], value[m], target[m]) for m in (slabs == n for n in numbers)] for numbers in SPLIT
    )
    return Task(
        "brain_tissues",
        learnt,
        held_out,
        ["grey", "white", "rest"],
        target=0.80,
    )


if __name__ == "__main__":
    given = options(__doc__ or "", 60, 3)
    raise SystemExit(0 if reached(train(task(given.millimetres), given.steps, given.output)) else 1)
