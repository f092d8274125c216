"""Equivariant tensor products as sparse products, and a small interatomic potential made of them.

A tensor product of two features that rotate with angular momenta l1 and l2 has a part of every l3 from |l1 - l2| to
l1 + l2. Its coefficients, those of Clebsch and Gordan, are a sparse table: rows of x meet rows of y and are summed
into rows of the result. That is what the products of sparseconv do, with all their derivatives, so forces (a gradient)
and their training (a gradient of a gradient) come for nothing.

Run it: ``python examples/equivariant_tensor_product.py`` trains a potential on a made-up Lennard-Jones set.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import factorial, sqrt

import torch
from torch import nn

from sparseconv.products import (
    SparseProductInfo,
    SparseScaleInfo,
    sparse_mul,
    sparse_outer,
    sparse_product_infos,
    sparse_scale,
    sparse_scale_infos,
    sparse_vecmat,
    sparse_vecsca,
)

Infos = tuple[SparseProductInfo, SparseProductInfo, SparseProductInfo]
#: (angular momentum, parity) of each block of 2l + 1 rows
Irreps = tuple[tuple[int, int], ...]


@cache
def clebsch_gordan(l1: int, l2: int, l3: int) -> torch.Tensor:
    """The real coupling (2 l1 + 1, 2 l2 + 1, 2 l3 + 1) of unit norm, rows ordered -l .. l, in fp64.

    Racah's formula for the complex basis, turned to real spherical harmonics.
    """
    f = factorial
    complex_basis = torch.zeros(2 * l1 + 1, 2 * l2 + 1, 2 * l3 + 1, dtype=torch.complex128)
    for m1 in range(-l1, l1 + 1):
        for m2 in range(max(-l2, -l3 - m1), min(l2, l3 - m1) + 1):
            m3 = m1 + m2
            front = (2 * l3 + 1) * f(l3 + l1 - l2) * f(l3 - l1 + l2) * f(l1 + l2 - l3) / f(l1 + l2 + l3 + 1)
            front *= f(l3 + m3) * f(l3 - m3) * f(l1 - m1) * f(l1 + m1) * f(l2 - m2) * f(l2 + m2)
            total = 0.0
            for k in range(max(0, l2 - l3 - m1, l1 - l3 + m2), min(l1 + l2 - l3, l1 - m1, l2 + m2) + 1):
                below = f(k) * f(l1 + l2 - l3 - k) * f(l1 - m1 - k) * f(l2 + m2 - k)
                total += (-1) ** k / (below * f(l3 - l2 + m1 + k) * f(l3 - l1 - m2 + k))
            complex_basis[m1 + l1, m2 + l2, m3 + l3] = sqrt(front) * total
    to_real = [_real_basis(ell) for ell in (l1, l2, l3)]
    real = torch.einsum("ai,bj,ck,abc->ijk", to_real[0], to_real[1], to_real[2].conj(), complex_basis)
    return (real / real.abs().square().sum().sqrt()).real


def _real_basis(ell: int) -> torch.Tensor:
    """Columns: the real spherical harmonics in terms of the complex ones, with the phase that makes couplings real."""
    q = torch.zeros(2 * ell + 1, 2 * ell + 1, dtype=torch.complex128)
    q[ell, ell] = 1
    for m in range(1, ell + 1):
        sign, half = (-1) ** m, torch.tensor([1, 1j], dtype=q.dtype) / sqrt(2)
        q[ell - m, ell + m], q[ell - m, ell - m] = half[0], -half[1]
        q[ell + m, ell + m], q[ell + m, ell - m] = sign * half[0], sign * half[1]
    return (-1j) ** ell * q


@dataclass(frozen=True)
class Paths:
    """All couplings of two sets of irreps onto a third: T terms, and R rows that keep the paths apart."""

    index1: list[int]  # (T,) rows of the first input
    index2: list[int]  # (T,) rows of the second
    index_out: list[int]  # (T,) rows, 2 l3 + 1 for each path
    scale: list[float]  # (T,) coupling, times sqrt(2 l3 + 1): unit variance in, unit variance out
    path_of_row: list[int]  # (R,)
    irrep_of_path: list[int]  # which irrep of the output each path leads to
    row_of_row: list[int]  # (R,) the row of the output that each row is a part of


def rows(irreps: Irreps) -> int:
    """Rows of a feature: 2l + 1 for each irrep."""
    return sum(2 * ell + 1 for ell, _ in irreps)


def couple(irreps1: Irreps, irreps2: Irreps, irreps_out: Irreps) -> Paths:
    """Every path that angular momentum and parity allow, ordered by its output."""
    starts = [[rows(irreps[:i]) for i in range(len(irreps))] for irreps in (irreps1, irreps2, irreps_out)]
    paths = Paths([], [], [], [], [], [], [])
    for i3, (l3, parity3) in enumerate(irreps_out):
        for i1, (l1, parity1) in enumerate(irreps1):
            for i2, (l2, parity2) in enumerate(irreps2):
                if parity1 * parity2 != parity3 or not abs(l1 - l2) <= l3 <= l1 + l2:
                    continue
                first = len(paths.path_of_row)
                coupling = clebsch_gordan(l1, l2, l3) * sqrt(2 * l3 + 1)
                for m1, m2, m3 in (coupling.abs() > 1e-10).nonzero().tolist():
                    paths.index1.append(starts[0][i1] + m1)
                    paths.index2.append(starts[1][i2] + m2)
                    paths.index_out.append(first + m3)
                    paths.scale.append(float(coupling[m1, m2, m3]))
                paths.path_of_row.extend([len(paths.irrep_of_path)] * (2 * l3 + 1))
                paths.row_of_row.extend(range(starts[2][i3], starts[2][i3] + 2 * l3 + 1))
                paths.irrep_of_path.append(i3)
    return paths


class _OnDevice(nn.Module):
    """A module whose infos follow it to another device."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        device = fn(torch.empty(0)).device
        for name, value in vars(self).items():
            if isinstance(value, tuple) and value and isinstance(value[0], SparseProductInfo | SparseScaleInfo):
                setattr(self, name, tuple(info.to(device) for info in value))
        return self


class ChannelwiseTensorProduct(_OnDevice):
    """z[n, path and m3, c] = sum over m1, m2 of C[m1, m2, m3] x[n, m1, c] y[n, m2], each channel for itself.

    x is (N, rows(irreps1), C), y (N, rows(irreps2)), the result (N, R, C), R rows of all paths. ``weights``
    (N, paths, C) weighs each path and channel, as the radial part of an interatomic potential does.
    """

    def __init__(
        self, irreps1: Irreps, irreps2: Irreps, irreps_out: Irreps, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.paths = couple(irreps1, irreps2, irreps_out)
        size, paths = len(self.paths.path_of_row), self.paths
        scale = torch.tensor(paths.scale, dtype=dtype)
        sizes = (size, rows(irreps1), rows(irreps2))
        self.infos: Infos = sparse_product_infos(paths.index1, paths.index2, paths.index_out, scale, *sizes)
        each = list(range(size))
        self.weighing: Infos = sparse_product_infos(
            each, paths.path_of_row, each, None, size, size, len(paths.irrep_of_path)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        z = sparse_vecsca(x, y, *self.infos)
        return z if weights is None else sparse_mul(z, weights, *self.weighing)


class FullyConnectedTensorProduct(_OnDevice):
    """z[n, m3, w] = sum over paths, u, v, m1, m2 of W[path, u, v, w] C[m1, m2, m3] x[n, m1, u] y[n, m2, v] / norm.

    x is (N, rows(irreps1), U), y (N, rows(irreps2), V), the result (N, rows(irreps_out), W). Two products: an outer one
    over the coupling, and one of vectors and matrices over the paths, whose matrices are the weights.
    """

    def __init__(
        self,
        irreps1: Irreps,
        irreps2: Irreps,
        irreps_out: Irreps,
        channels: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        paths = couple(irreps1, irreps2, irreps_out)
        size = len(paths.path_of_row)
        fan_in = [paths.irrep_of_path.count(i) * channels[0] * channels[1] for i in paths.irrep_of_path]
        scale = torch.tensor(paths.scale, dtype=dtype)
        sizes = (size, rows(irreps1), rows(irreps2))
        self.infos: Infos = sparse_product_infos(paths.index1, paths.index2, paths.index_out, scale, *sizes)
        norm = torch.tensor([1 / sqrt(fan_in[path]) for path in paths.path_of_row], dtype=dtype)
        self.mixing: Infos = sparse_product_infos(
            list(range(size)), paths.path_of_row, paths.row_of_row, norm, rows(irreps_out), size, len(fan_in)
        )
        self.weights = nn.Parameter(torch.randn(len(fan_in), channels[0] * channels[1], channels[2], dtype=dtype))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pairs = sparse_outer(x, y, *self.infos)
        return sparse_vecmat(pairs.flatten(-2), self.weights, *self.mixing)


class Harmonics(_OnDevice):
    """Spherical harmonics of unit vectors up to l_max, (N, (l_max + 1)^2), made by coupling the vector with itself."""

    def __init__(self, l_max: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        steps = []
        for ell in range(2, l_max + 1):
            coupling = clebsch_gordan(ell - 1, 1, ell)
            top = torch.zeros(2 * ell - 1, dtype=torch.float64)
            top[ell - 1] = sqrt(2 * ell - 1)  # along the axis only m = 0 lives, with length sqrt(2 l + 1)
            scale = sqrt(2 * ell + 1) / (top @ coupling[:, 1] * sqrt(3.0)).norm()
            i, j, m = (coupling.abs() > 1e-10).nonzero().T.tolist()
            values = (coupling[i, j, m] * scale).to(dtype)
            steps.append(sparse_product_infos(i, j, m, values, 2 * ell + 1, 2 * ell - 1, 3))
        self.l_max = l_max
        for ell, infos in enumerate(steps, start=2):
            setattr(self, f"step{ell}", infos)

    def forward(self, unit: torch.Tensor) -> torch.Tensor:
        one = torch.ones_like(unit[:, :1])
        first = unit * sqrt(3.0)
        parts = [one, first]
        for ell in range(2, self.l_max + 1):
            parts.append(sparse_vecsca(parts[-1][..., None], first, *getattr(self, f"step{ell}"))[..., 0])
        return torch.cat(parts[: self.l_max + 1], 1)


class Potential(_OnDevice):
    """An energy of atoms from two rounds of equivariant messages between neighbors; forces are its gradient."""

    def __init__(
        self, channels: int = 8, l_max: int = 2, cutoff: float = 2.5, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.cutoff, self.l_max, self.channels = cutoff, l_max, channels
        irreps: Irreps = tuple((ell, (-1) ** ell) for ell in range(l_max + 1))
        self.harmonics = Harmonics(l_max, dtype)
        self.product = ChannelwiseTensorProduct(irreps, irreps, irreps, dtype)
        paths = self.product.paths
        self.first = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, (l_max + 1) * channels)).to(dtype)
        self.second = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, len(paths.irrep_of_path) * channels)).to(
            dtype
        )
        scalars = channels * (1 + paths.irrep_of_path.count(0))
        self.scalar_rows = [r for r, path in enumerate(paths.path_of_row) if paths.irrep_of_path[path] == 0]
        self.readout = nn.Sequential(nn.Linear(scalars, 32), nn.SiLU(), nn.Linear(32, 1)).to(dtype)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Energies (B,) of B configurations of A atoms, positions (B, A, 3)."""
        batch, atoms, _ = positions.shape
        with torch.no_grad():
            near = torch.cdist(positions, positions) < self.cutoff
            near &= ~torch.eye(atoms, dtype=torch.bool, device=positions.device)
            item, receiver, sender = near.nonzero().T
        flat, nodes = positions.reshape(-1, 3), batch * atoms
        receiver, sender = item * atoms + receiver, item * atoms + sender
        edge = torch.arange(len(receiver), device=positions.device)
        collect = sparse_scale_infos(edge, receiver, None, nodes, len(edge))  # sums over the edges of an atom
        spread = sparse_scale_infos(sender, edge, None, len(edge), nodes)  # gives each edge its sender's feature
        arrow = flat[sender] - flat[receiver]
        length = arrow.square().sum(1, keepdim=True).sqrt()
        radial = self._radial(length)
        sphere = self.harmonics(arrow / length)
        weights = self.first(radial).unflatten(1, (self.l_max + 1, self.channels))
        rows_of = [ell for ell in range(self.l_max + 1) for _ in range(2 * ell + 1)]
        messages = sphere[..., None] * weights[:, rows_of] * self._fade(length)[..., None]
        feature = sparse_scale(messages.flatten(1), *collect).unflatten(1, messages.shape[1:])
        carried = sparse_scale(feature.flatten(1), *spread).unflatten(1, feature.shape[1:])
        weights = self.second(radial).unflatten(1, (-1, self.channels)) * self._fade(length)[..., None]
        coupled = self.product(carried, sphere, weights)[:, self.scalar_rows]
        scalars = sparse_scale(coupled.flatten(1), *collect)
        energy = self.readout(torch.cat([feature[:, 0], scalars], 1))
        return energy.view(batch, atoms).sum(1)

    def _fade(self, length: torch.Tensor) -> torch.Tensor:
        inside = length / self.cutoff
        return (1 - inside).clamp_min(0).square() * (1 + 2 * inside)

    def _radial(self, length: torch.Tensor) -> torch.Tensor:
        centres = torch.linspace(0.7, self.cutoff, 8, device=length.device, dtype=length.dtype)
        return torch.exp(-((length - centres) ** 2) / 0.1)


def lennard_jones(positions: torch.Tensor, cutoff: float = 2.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Energies (B,) and forces (B, A, 3) of a smoothly cut Lennard-Jones potential, in its own units."""
    positions = positions.detach().requires_grad_()
    pair = torch.triu_indices(positions.shape[1], positions.shape[1], 1)
    length = (positions[:, pair[0]] - positions[:, pair[1]]).norm(dim=-1)
    inside = (length / cutoff).clamp_max(1)
    sixth = length**-6
    energy = (4 * (sixth * sixth - sixth) * (1 - inside).square() * (1 + 2 * inside)).sum(1)
    forces = -torch.autograd.grad(energy.sum(), positions)[0]
    return energy.detach(), forces


def configurations(count: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Clusters of eight atoms: a cube of side 1.15, each atom moved by about 0.07."""
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.15], dtype=dtype)] * 3)
    return corners + 0.07 * torch.randn(count, 8, 3, generator=generator, dtype=dtype)


def train(steps: int = 300, device: str = "cpu", seed: int = 0, report: int = 50) -> dict[str, float]:
    """Trains on energies and forces; returns the errors on fresh clusters before and after, in the data's spread."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    data, fresh = configurations(64, generator), configurations(32, generator)
    model = Potential().to(device)
    sets = {}
    energy, forces = lennard_jones(data)
    mean, spread_e, spread_f = energy.mean(), energy.std(), forces.std()
    for name, positions in (("train", data), ("fresh", fresh)):
        energy, forces = lennard_jones(positions)
        sets[name] = [t.to(device) for t in (positions, (energy - mean) / spread_f, forces / spread_f)]
    ratio = float(spread_e / spread_f)

    def errors(name: str, create_graph: bool) -> tuple[torch.Tensor, torch.Tensor]:
        positions, energy, forces = sets[name]
        positions = positions.detach().requires_grad_()
        predicted = model(positions)
        pull = -torch.autograd.grad(predicted.sum(), positions, create_graph=create_graph)[0]
        return (predicted - energy).square().mean() / ratio**2, (pull - forces).square().mean()

    def score() -> tuple[float, float]:
        energy, forces = errors("fresh", False)
        return float(energy.detach().sqrt()), float(forces.detach().sqrt())

    before = score()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        energy, forces = errors("train", True)
        (energy + forces).backward()
        optimizer.step()
        schedule.step()
        if report and (step + 1) % report == 0:
            now = score()
            print(
                f"step {step + 1}: error of fresh energies {now[0]:.3f}, of fresh forces {now[1]:.3f} of their spread"
            )
    after = score()
    return dict(zip(("energy_before", "forces_before", "energy_after", "forces_after"), before + after))


if __name__ == "__main__":
    print(train())
