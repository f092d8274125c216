"""A stand-in for ModelNet40: <class>/{train,test}/<class>_NNNN.off, furniture of boxes and frustums."""

from __future__ import annotations

from pathlib import Path

import numpy as np

Mesh = tuple[np.ndarray, np.ndarray]  # vertices (V, 3), triangles (F, 3)


def write(folder: Path, train: int = 12, test: int = 4, seed: int = 0) -> None:
    """``train`` and ``test`` meshes of each class; every second header runs into its counts, as some real ones do."""
    rng = np.random.default_rng(seed)
    for name, make in SHAPES.items():
        for number in range(train + test):
            split = "train" if number < train else "test"
            path = folder / name / split / f"{name}_{number + 1:04d}.off"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_off(path, *joined(make(rng)), glued=number % 2 == 1)


def write_off(path: Path, vertices: np.ndarray, triangles: np.ndarray, glued: bool = False) -> None:
    lines = [f"{'OFF' if glued else 'OFF' + chr(10)}{len(vertices)} {len(triangles)} 0"]
    lines += [" ".join(f"{v:.9g}" for v in row) for row in vertices.astype(np.float32)]
    lines += [f"3 {a} {b} {c}" for a, b, c in triangles]
    path.write_text("\n".join(lines) + "\n")


def joined(meshes: list[Mesh]) -> Mesh:
    starts = np.cumsum([0, *(len(vertices) for vertices, _ in meshes)])
    faces = [triangles + start for (_, triangles), start in zip(meshes, starts)]
    return np.concatenate([vertices for vertices, _ in meshes]), np.concatenate(faces)


def frustum(x: float, y: float, z: float, low: float, high: float, height: float, sides: int = 16) -> Mesh:
    """From radius ``low`` at z to radius ``high`` above it, closed."""
    angle = 2 * np.pi * (np.arange(sides) + 0.5) / sides
    ring = np.stack([np.cos(angle), np.sin(angle), 0 * angle], 1)
    ends = np.array([[x, y, z], [x, y, z + height]])
    vertices = np.concatenate([ends[0] + low * ring, ends[1] + high * ring, ends])
    here, then = np.arange(sides), (np.arange(sides) + 1) % sides
    bottom, top = np.full(sides, 2 * sides), np.full(sides, 2 * sides + 1)
    quads = [(here, then, sides + here), (then, sides + then, sides + here), (then, here, bottom)]
    return vertices, np.concatenate([np.stack(t, 1) for t in (*quads, (sides + here, sides + then, top))])


def box(x: float, y: float, z: float, wide: float, deep: float, height: float) -> Mesh:
    """Centered at x, y, standing on z."""
    vertices, triangles = frustum(0, 0, 0, np.sqrt(0.5), np.sqrt(0.5), 1, sides=4)
    return vertices * [wide, deep, height] + [x, y, z], triangles


def _legs(rng: np.random.Generator, wide: float, deep: float, height: float) -> list[Mesh]:
    thick = rng.uniform(0.05, 0.09)
    spots = [(a * (wide - thick) / 2, b * (deep - thick) / 2) for a in (-1, 1) for b in (-1, 1)]
    return [box(x, y, 0, thick, thick, height) for x, y in spots]


def _table(rng: np.random.Generator) -> list[Mesh]:
    wide, deep, height = rng.uniform((1.0, 0.6, 0.5), (1.6, 1.0, 0.8))
    return [*_legs(rng, wide, deep, height), box(0, 0, height, wide, deep, 0.06)]


def _chair(rng: np.random.Generator) -> list[Mesh]:
    wide, deep, height, back = rng.uniform((0.4, 0.4, 0.4, 0.4), (0.55, 0.55, 0.5, 0.6))
    seat = [*_legs(rng, wide, deep, height), box(0, 0, height, wide, deep, 0.06)]
    return [*seat, box(0, deep / 2 - 0.03, height + 0.06, wide, 0.06, back)]


def _bed(rng: np.random.Generator) -> list[Mesh]:
    wide, deep, height = rng.uniform((1.2, 1.9, 0.3), (1.8, 2.2, 0.5))
    return [box(0, 0, 0, wide, deep, height), box(0, deep / 2, 0, wide, 0.08, height + rng.uniform(0.3, 0.6))]


def _bookshelf(rng: np.random.Generator) -> list[Mesh]:
    wide, deep, height = rng.uniform((0.7, 0.25, 1.5), (1.1, 0.4, 2.1))
    boards = [box(0, 0, z, wide, deep, 0.04) for z in np.linspace(0, height, rng.integers(4, 7))]
    return [*boards, *(box(x, 0, 0, 0.04, deep, height) for x in (-wide / 2, wide / 2))]


def _bottle(rng: np.random.Generator) -> list[Mesh]:
    radius, height = rng.uniform((0.12, 0.5), (0.18, 0.8))
    neck = frustum(0, 0, height * 0.85, radius * 0.35, radius * 0.3, height * 0.25)
    return [
        frustum(0, 0, 0, radius, radius, height * 0.65),
        frustum(0, 0, height * 0.65, radius, radius * 0.35, height * 0.2),
        neck,
    ]


def _cone(rng: np.random.Generator) -> list[Mesh]:
    radius, height = rng.uniform((0.3, 0.6), (0.5, 1.0))
    return [frustum(0, 0, 0, radius, 0.02, height)]


def _monitor(rng: np.random.Generator) -> list[Mesh]:
    wide, height, foot = rng.uniform((0.6, 0.35, 0.1), (0.9, 0.5, 0.2))
    return [box(0, 0, foot, wide, 0.05, height), box(0, 0, 0, 0.06, 0.06, foot), box(0, 0, 0, wide / 3, 0.2, 0.03)]


def _lamp(rng: np.random.Generator) -> list[Mesh]:
    height, radius = rng.uniform((1.0, 0.2), (1.6, 0.3))
    shade = frustum(0, 0, height, radius, radius * 0.6, rng.uniform(0.25, 0.4))
    return [frustum(0, 0, 0, radius * 0.8, radius * 0.8, 0.04), frustum(0, 0, 0, 0.03, 0.03, height), shade]


#: under names that ModelNet40 has
SHAPES = {"bed": _bed, "bookshelf": _bookshelf, "bottle": _bottle, "chair": _chair, "cone": _cone, "lamp": _lamp,
          "monitor": _monitor, "table": _table}  # fmt: skip
