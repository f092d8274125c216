"""A stand-in for ScanNet v2: scans/sceneNNNN_NN/*_vh_clean_2.ply and *.labels.ply, and the two lists of scenes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from plyfile import PlyData, PlyElement

#: NYU40 label, color and size [m] of what stands in a room; 40 is "otherprop", which the benchmark leaves out
THINGS = {
    "bed": (4, (190, 90, 90), (2.0, 1.6, 0.5)),
    "chair": (5, (150, 110, 60), (0.5, 0.5, 0.9)),
    "sofa": (6, (70, 90, 160), (1.8, 0.8, 0.7)),
    "table": (7, (170, 140, 90), (1.2, 0.8, 0.75)),
    "bookshelf": (10, (110, 70, 40), (0.8, 0.3, 1.9)),
    "otherprop": (40, (120, 200, 120), (0.3, 0.3, 0.3)),
}
WALL, FLOOR, UNLABELLED = 1, 2, 0


def write(folder: Path, train: int = 8, valid: int = 2, seed: int = 0, step: float = 0.1) -> None:
    """Rooms of boxes, sampled on a grid of ``step`` [m]."""
    rng = np.random.default_rng(seed)
    names = {
        "train": [f"scene{n:04d}_00" for n in range(train)],
        "val": [f"scene{100 + n:04d}_00" for n in range(valid)],
    }
    for split, scenes in names.items():
        (folder / f"scannetv2_{split}.txt").write_text("".join(f"{name}\n" for name in scenes))
        for name in scenes:
            place = folder / "scans" / name
            place.mkdir(parents=True)
            write_scene(place / f"{name}_vh_clean_2", *room(rng, step))


def write_scene(path: Path, points: np.ndarray, colours: np.ndarray, labels: np.ndarray, faces: np.ndarray) -> None:
    """The two files of a scene, binary and little-endian, with the properties that ScanNet's have."""
    shape = [("x", "<f4"), ("y", "<f4"), ("z", "<f4")] + [(c, "u1") for c in ("red", "green", "blue", "alpha")]
    for suffix, extra in ((".ply", []), (".labels.ply", [("label", "<u2")])):
        vertex = np.empty(len(points), shape + extra)
        for axis, name in enumerate("xyz"):
            vertex[name] = points[:, axis]
        for channel, name in enumerate(("red", "green", "blue")):
            vertex[name] = colours[:, channel]
        vertex["alpha"] = 255
        if extra:
            vertex["label"] = labels
        face = np.empty(len(faces), [("vertex_indices", "<i4", (3,))])
        face["vertex_indices"] = faces
        parts = [PlyElement.describe(vertex, "vertex"), PlyElement.describe(face, "face")]
        PlyData(parts, text=False, byte_order="<").write(f"{path}{suffix}")


def room(rng: np.random.Generator, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Vertices (V, 3) [m], z up, colors (V, 3) uint8, NYU40 labels (V,), triangles (F, 3)."""
    wide, deep = rng.uniform(3.5, 5, 2)
    parts = [(_sheet((0, 0, 0), (wide, 0, 0), (0, deep, 0), step), FLOOR, (140, 120, 100))]
    for start, along in (((0, 0, 0), (wide, 0, 0)), ((0, 0, 0), (0, deep, 0)), ((wide, 0, 0), (0, deep, 0))):
        parts.append((_sheet(start, along, (0, 0, 2.4), step), WALL, (200, 200, 190)))
    for _ in range(rng.integers(5, 9)):
        label, colour, size = list(THINGS.values())[rng.integers(len(THINGS))]
        size = np.array(size) * rng.uniform(0.85, 1.15, 3)
        corner = np.array([*(rng.uniform(0.1, room - side - 0.1) for room, side in zip((wide, deep), size)), 0])
        x, y, z = np.diag(size)
        for start, u, v in ((z, x, y), (0 * x, x, z), (y, x, z), (0 * x, y, z), (x, y, z)):
            parts.append((_sheet(corner + start, u, v, step), label, colour))
    points, faces, labels, colours, count = [], [], [], [], 0
    for (vertices, triangles), label, colour in parts:
        points.append(vertices + rng.normal(0, 0.006, vertices.shape))
        faces.append(triangles + count)
        labels.append(np.where(rng.random(len(vertices)) < 0.02, UNLABELLED, label))
        colours.append(np.clip(colour + rng.normal(0, 35, vertices.shape), 0, 255))
        count += len(vertices)
    everything = [np.concatenate(v) for v in (points, colours, labels, faces)]
    return tuple(v.astype(t) for v, t in zip(everything, ("f4", "u1", "u2", "i4")))


def _sheet(start, u, v, step: float) -> tuple[np.ndarray, np.ndarray]:
    """A parallelogram as vertices (V, 3) about ``step`` apart, and triangles (F, 3)."""
    start, u, v = (np.asarray(a, float) for a in (start, u, v))
    n, m = (int(np.ceil(np.linalg.norm(a) / step)) + 1 for a in (u, v))
    a, b = (g.ravel() for g in np.meshgrid(np.linspace(0, 1, n), np.linspace(0, 1, m), indexing="ij"))
    rows = np.arange(n * m).reshape(n, m)
    corners = [rows[:-1, :-1], rows[1:, :-1], rows[:-1, 1:], rows[1:, 1:]]
    first, second, third, fourth = (c.ravel() for c in corners)
    triangles = np.concatenate([np.stack([first, second, third], 1), np.stack([second, fourth, third], 1)])
    return start + a[:, None] * u + b[:, None] * v, triangles
