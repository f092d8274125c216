"""A stand-in for SemanticKITTI: sequences/NN/{velodyne/*.bin, labels/*.label}."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stand_ins.street import KINDS, street

#: the raw label of each kind
RAW = dict(zip(KINDS, [0, 40, 48, 72, 50, 10, 70, 71, 80, 30]))
MOVING_CAR, LANE_MARKING, OUTLIER = 252, 60, 1


def write(folder: Path, train: int = 8, valid: int = 2, seed: int = 0, **sweep: int) -> None:
    """``train`` scans over the sequences 00 and 01, ``valid`` scans in sequence 08."""
    rng = np.random.default_rng(seed)
    places = [(f"{n % 2:02d}", n // 2) for n in range(train)] + [("08", n) for n in range(valid)]
    for sequence, number in places:
        points, label = scan(rng, **sweep)
        for kind, suffix, values in (("velodyne", "bin", points), ("labels", "label", label)):
            path = folder / "sequences" / sequence / kind / f"{number:06d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            values.tofile(path)


def scan(rng: np.random.Generator, **sweep: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (M, 4) float32 with remission; labels (M,) uint32, the instance in the upper 16 bits."""
    seen = street(rng, **sweep)
    raw = np.array([RAW[kind] for kind in KINDS])[seen.kind]
    raw[(raw == RAW["car"]) & (seen.instance % 2 == 1)] = MOVING_CAR
    raw[(raw == RAW["road"]) & (np.abs(seen.points[:, 1]) < 0.15)] = LANE_MARKING
    raw[rng.random(len(raw)) < 0.01] = OUTLIER
    thing = np.isin(seen.kind, [KINDS.index("car"), KINDS.index("person")])
    label = (raw + (np.where(thing, seen.instance, 0) << 16)).astype(np.uint32)
    return np.concatenate([seen.points, seen.remission[:, None]], 1), label
