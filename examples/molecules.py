"""Learn the energies and forces of a molecule with an equivariant network made of sparse products.

    python examples/molecules.py --data DIR --molecule ethanol
    python examples/molecules.py --stand-in

DIR is the folder ``rmd17`` with ``npz_data/rmd17_<molecule>.npz`` and ``splits/index_{train,test}_01.csv``. Positions
are in Angstrom, energies in kcal/mol. Forces are the negative gradient of the energy, so training takes a gradient of a
gradient; sparse products have derivatives to any order. Turning the molecule turns the forces and leaves the energy.
The score is the mean absolute error of a force component, in kcal/mol/Angstrom; guessing is a force of 0.

The real set (not run here) has 1,000 frames to train on and 1,000 to test; give it thousands of epochs, and fp64 for
the last digit.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from equivariant_tensor_product import ChannelwiseTensorProduct, Harmonics
from stand_ins import rmd17 as stand_in_set
from torch.utils.data import DataLoader, TensorDataset
from training import Run, begin, data_folder

from sparseconv.products import sparse_scale, sparse_scale_infos


def read(folder: Path, molecule: str, split: str) -> tuple[torch.Tensor, TensorDataset]:
    """Atomic numbers (A,); positions (N, A, 3), energies (N,), forces (N, A, 3) of a split, fp32 but the energies."""
    frames = np.load(folder / "npz_data" / f"rmd17_{molecule}.npz")
    rows = np.loadtxt(folder / "splits" / f"index_{split}_01.csv", dtype=int)
    positions, energies, forces = (torch.from_numpy(frames[name][rows]) for name in ("coords", "energies", "forces"))
    charges = torch.from_numpy(frames["nuclear_charges"].astype(np.int64))
    return charges, TensorDataset(positions.float(), energies.double(), forces.float())


class Potential(torch.nn.Module):
    """Rounds of messages between atoms; features (atoms, (l_max + 1)^2, channels) turn with the molecule.

    Atoms within ``cutoff`` are neighbors. A message couples the sender's feature with the spherical harmonics of the
    edge, and the length of the edge weighs each path of the coupling. The energy is a sum over atoms of what a small
    network reads off the invariant rows.
    """

    def __init__(self, charges: torch.Tensor, channels: int = 16, l_max: int = 2, rounds: int = 2, cutoff: float = 4.0):
        super().__init__()
        self.cutoff, self.channels = cutoff, channels
        kinds = charges.unique()
        self.register_buffer("kind", torch.searchsorted(kinds, charges))
        self.register_buffer("centres", torch.linspace(0.7, cutoff, 12))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones(()))
        irreps = tuple((ell, (-1) ** ell) for ell in range(l_max + 1))
        self.harmonics = Harmonics(l_max)
        self.product = ChannelwiseTensorProduct(irreps, irreps, irreps)
        paths = self.product.paths
        self.register_buffer("row_of_row", torch.tensor(paths.row_of_row))
        self.ell_of_row = [ell for ell in range(l_max + 1) for _ in range(2 * ell + 1)]
        self.embedding = torch.nn.Embedding(len(kinds), channels)

        def network(c_in: int, c_out: int) -> torch.nn.Sequential:
            return torch.nn.Sequential(torch.nn.Linear(c_in, 32), torch.nn.SiLU(), torch.nn.Linear(32, c_out))

        self.radial = torch.nn.ModuleList(network(12, len(paths.irrep_of_path) * channels) for _ in range(rounds))
        self.mix = torch.nn.ParameterList(
            torch.randn(l_max + 1, channels, channels) / sqrt(channels) for _ in range(rounds)
        )
        self.readout = network(channels * (rounds + 1), 1)

    def edges(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Receivers and senders among the B A atoms of positions (B, A, 3)."""
        with torch.no_grad():
            near = torch.cdist(positions, positions) < self.cutoff
            near &= ~torch.eye(positions.shape[1], dtype=torch.bool, device=positions.device)
            item, receiver, sender = near.nonzero().T
        return item * positions.shape[1] + receiver, item * positions.shape[1] + sender

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Energies (B,) in units of ``scale`` above ``mean``, of positions (B, A, 3)."""
        receiver, sender = self.edges(positions)
        flat, edge = positions.flatten(0, 1), torch.arange(len(receiver), device=positions.device)
        collect = sparse_scale_infos(edge, receiver, None, len(flat), len(edge))  # sums over the edges of an atom
        spread = sparse_scale_infos(sender, edge, None, len(edge), len(flat))  # gives an edge its sender's feature
        arrow = flat[sender] - flat[receiver]
        length = arrow.square().sum(1, keepdim=True).sqrt()
        sphere = self.harmonics(arrow / length)
        inside = length / self.cutoff
        fade = (1 - inside).clamp_min(0).square() * (1 + 2 * inside)
        waves = torch.exp(-4 * (length - self.centres) ** 2) * fade
        scalars = self.embedding(self.kind).repeat(len(positions), 1)
        feature = torch.nn.functional.pad(scalars[:, None], (0, 0, 0, sphere.shape[1] - 1))
        seen = [scalars]
        for radial, mix in zip(self.radial, self.mix):
            carried = sparse_scale(feature.flatten(1), *spread).unflatten(1, feature.shape[1:])
            weights = radial(waves).unflatten(1, (-1, self.channels)) * fade[..., None]
            paths = sparse_scale(self.product(carried, sphere, weights).flatten(1), *collect)
            paths = paths.unflatten(1, (-1, self.channels))
            joined = torch.zeros_like(feature).index_add(1, self.row_of_row, paths)
            feature = feature + torch.einsum("nrc,rcd->nrd", joined, mix[self.ell_of_row])
            seen.append(feature[:, 0])
        return self.readout(torch.cat(seen, 1)).view(positions.shape[:2]).sum(1)

    def energy_and_forces(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In units of ``scale`` and of ``scale`` a length; differentiable."""
        positions = positions.detach().requires_grad_()
        energy = self(positions)
        return energy, -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]


def force_error(net: Potential, loader: DataLoader) -> tuple[float, float]:
    """The mean absolute error of a force component, and its mean absolute value."""
    device, wrong, size, count = net.scale.device, 0.0, 0.0, 0
    for positions, _, forces in loader:
        _, found = net.energy_and_forces(positions.to(device))
        wrong += float((found.detach() * net.scale - forces.to(device)).abs().sum())
        size, count = size + float(forces.abs().sum()), count + forces.numel()
    return wrong / count, size / count


def train(folder: Path, output: Path, epochs: int, molecule: str = "ethanol", batch: int = 10, seed: int = 0) -> Run:
    """Train, score after each epoch, keep what is needed to continue."""
    device = begin(seed)
    charges, frames = read(folder, molecule, "train")
    loader = DataLoader(frames, batch, shuffle=True, drop_last=True)
    held_out = DataLoader(read(folder, molecule, "test")[1], 50)
    net = Potential(charges)
    net.mean, net.scale = frames.tensors[1].mean(), frames.tensors[2].square().mean().sqrt()
    net = net.to(device)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    run = Run(output, "molecules", net, optimizer, schedule)
    for _ in run.epochs(epochs):
        for batch_of in loader:  # in fp32: half precision would spoil the forces
            positions, energy, forces = (v.to(device) for v in batch_of)
            found, pull = net.energy_and_forces(positions)
            wanted = ((energy - net.mean) / net.scale).float()
            run.step(0.1 * (found - wanted).square().mean() + (pull - forces / net.scale).square().mean())
        error, size = force_error(net, held_out)
        run.finish_epoch(force_error=error, force=size)
    return run


def main(
    data: Annotated[Path | None, typer.Option(help="The folder rmd17.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    molecule: str = "ethanol",
    epochs: int = typer.Option(None, help="2,000, and 12 for the stand-in."),
    output: Path = Path("runs"),
    seed: int = 0,
) -> None:
    """Learn the forces of a molecule; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        run = train(folder, output, epochs or (12 if stand_in else 2000), molecule, seed=seed)
    print(run.summary("force_error", run.history[-1]["force"], "force error (kcal/mol/Å)"))


if __name__ == "__main__":
    typer.run(main)
