"""Slow flow through random porous media, {train,test}/NNN.npz, by a lattice Boltzmann solver."""

from __future__ import annotations

from pathlib import Path

import numpy as np

VELOCITIES = np.array([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1], [1, 1], [-1, 1], [-1, -1], [1, -1]])  # (9, 2): x, y
WEIGHTS = np.array([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4, np.float32)
OPPOSITE = [0, 3, 4, 1, 2, 7, 8, 5, 6]


def write(folder: Path, train: int = 24, test: int = 6, size: int = 40, steps: int = 500, seed: int = 0) -> None:
    """In each file ``solid`` (size, size) bool and ``velocity`` (2, size, size) fp32, x then y; both on a torus."""
    rng = np.random.default_rng(seed)
    solid = np.stack([discs(rng, size) for _ in range(train + test)])
    velocity = flow(solid, steps)
    for split, rows in (("train", range(train)), ("test", range(train, train + test))):
        (folder / split).mkdir()
        for row in rows:
            np.savez(folder / split / f"{row:03d}.npz", solid=solid[row], velocity=velocity[:, row])


def discs(rng: np.random.Generator, size: int) -> np.ndarray:
    """About a third of the cells are solid, in discs on a torus."""
    y, x = np.mgrid[:size, :size]
    solid = np.zeros((size, size), bool)
    while solid.mean() < 0.3:
        at, radius = rng.uniform(0, size, 2), rng.uniform(0.06, 0.14) * size
        gap = [np.abs(a - b) for a, b in zip((y, x), at)]
        solid |= sum(np.minimum(g, size - g) ** 2 for g in gap) < radius**2
    return solid


def flow(solid: np.ndarray, steps: int, push: float = 1e-4) -> np.ndarray:
    """Velocity (2, N, Y, X) where a force ``push`` along x drives a fluid around solid (N, Y, X).

    D2Q9 with relaxation time 1, where collision is equilibrium, and walls that throw what enters them back.
    """
    wide = (slice(None), *[None] * solid.ndim)
    f = np.broadcast_to(WEIGHTS[wide], (9, *solid.shape)).copy()
    for _ in range(steps):
        density, velocity = _moments(f)
        along = np.tensordot(VELOCITIES.astype(np.float32), velocity, 1)
        square = (velocity**2).sum(0)
        equilibrium = WEIGHTS[wide] * density * (1 + 3 * along + 4.5 * along**2 - 1.5 * square)
        pushed = equilibrium + (3 * push * WEIGHTS * VELOCITIES[:, 0]).astype(np.float32)[wide]
        f = np.where(solid, f[OPPOSITE], pushed)
        for k, (x, y) in enumerate(VELOCITIES):
            f[k] = np.roll(f[k], (y, x), (-2, -1))
    return np.where(solid, 0, _moments(f)[1]).astype(np.float32)


def _moments(f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    density = f.sum(0)
    return density, np.tensordot(VELOCITIES.T.astype(np.float32), f, 1) / density
