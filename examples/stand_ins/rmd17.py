"""A stand-in for rMD17: npz_data/rmd17_ethanol.npz and splits/index_{train,test}_01.csv; a made-up force field."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

CHARGES = np.array([6, 6, 8, 1, 1, 1, 1, 1, 1], np.uint8)
ETHANOL = np.array([
    [-0.888, 0.167, -0.027], [0.466, -0.511, -0.037], [1.431, 0.322, 0.586], [-0.848, 1.117, -0.570],
    [-1.647, -0.470, -0.490], [-1.196, 0.398, 0.998], [0.792, -0.722, -1.060], [0.425, -1.456, 0.514],
    [1.467, 1.155, 0.085],
])  # fmt: skip


def write(folder: Path, train: int = 160, test: int = 60, seed: int = 0) -> None:
    """Frames in Angstrom, kcal/mol and kcal/mol/Angstrom, in any orientation."""
    rng = np.random.default_rng(seed)
    turns = np.linalg.qr(rng.normal(size=(train + test, 3, 3)))[0]
    coords = (ETHANOL + rng.normal(0, 0.06, (train + test, 9, 3))) @ turns
    energies, forces = field(torch.from_numpy(coords))
    (folder / "npz_data").mkdir()
    np.savez(folder / "npz_data" / "rmd17_ethanol.npz", nuclear_charges=CHARGES, coords=coords,
             energies=energies.numpy() - 97000, forces=forces.numpy())  # fmt: skip
    (folder / "splits").mkdir()
    order = rng.permutation(train + test)
    for split, rows in (("train", order[:train]), ("test", order[train:])):
        (folder / "splits" / f"index_{split}_01.csv").write_text("".join(f"{row}\n" for row in rows))


def field(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Energies (N,) and forces (N, 9, 3): Morse bonds, springs between second neighbors, softer ones farther away."""
    coords = coords.detach().requires_grad_()
    i, j = torch.triu_indices(9, 9, 1)
    rest = torch.from_numpy(ETHANOL)
    rest = (rest[i] - rest[j]).norm(dim=1)
    length = (coords[:, i] - coords[:, j]).norm(dim=2)
    bond = rest < torch.where((torch.from_numpy(CHARGES)[i] == 1) | (torch.from_numpy(CHARGES)[j] == 1), 1.2, 1.6)
    morse = 90 * (1 - torch.exp(-1.9 * (length - rest))) ** 2
    spring = torch.where(rest < 2.3, 40.0, 4.0) * (length - rest) ** 2
    energy = torch.where(bond, morse, spring).sum(1)
    return energy.detach(), -torch.autograd.grad(energy.sum(), coords)[0]
