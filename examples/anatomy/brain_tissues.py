"""Segment a human brain into grey matter, white matter and the rest, from its T1 image alone.

The voxels are those of the MNI152 template inside the skull, pooled to 3 mm. The network learns from slabs of the back
of the head and is judged on the front: the other hemisphere would be nearly the mirror image of what it learnt.
Run: python examples/anatomy/brain_tissues.py
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from loop import Task, options, reached, tile, train
from volumes import brain, pooled


def task(millimetres: int = 3) -> Task:
    t1, gm, wm = (pooled(v, millimetres).mean(-1) for v in brain())
    inside = np.argwhere(t1 > 10)
    rest = 255 - gm - wm
    labels = np.stack([gm, wm, rest], -1).argmax(-1)
    coords = torch.from_numpy(inside)
    value = torch.from_numpy(t1[tuple(inside.T)] / 128 - 1)[:, None]
    target = torch.from_numpy(labels[tuple(inside.T)])
    y = coords[:, 1]  # from the back of the head to its front, across both hemispheres
    middle = int(y.median())
    cuts = torch.linspace(0, middle, 4)
    parts = [(y >= a) & (y < b) for a, b in itertools.pairwise(cuts)]
    front = y >= middle
    return Task(
        "brain_tissues",
        [tile(coords[m], value[m], target[m]) for m in parts],
        [tile(coords[front], value[front], target[front])],
        ["grey", "white", "rest"],
        target=0.80,
    )


if __name__ == "__main__":
    given = options(__doc__ or "", 60, 3)
    raise SystemExit(0 if reached(train(task(given.millimetres), given.steps, given.output)) else 1)
