"""Run a trained interatomic potential, CHGNet, on sparse products, and compare with its own layers.

The package chgnet carries the weights of a graph network for crystals, trained on relaxations of the Materials Project.
Its layers sum messages over the bonds of an atom, and over the angles of a bond. Here each of these sums is one
`sparse_mul`. Compared on silicon: energies, forces, stresses, and the gradient of the squared forces with respect to
the weights, which is a gradient of a gradient. The edge of the cell of least energy is compared with a measurement.

    pip install chgnet==0.4.2 matplotlib
    python examples/packaged/crystal_forces.py
"""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from loop import COLORS, options

from sparseconv.products import sparse_mul, sparse_product_infos

#: edge of silicon's cubic cell [Å] as measured (CODATA), and how near the potential has to come, as a part of it
MEASURED, NEAR = 5.431, 0.01
#: how far the two ways may differ, as a part of the largest number; CHGNet computes in fp32
TARGET = 1e-4


def weighted_sum(x: torch.Tensor, y: torch.Tensor, row: torch.Tensor, onto: torch.Tensor, size: int) -> torch.Tensor:
    """z[onto[t]] += x[t] * y[row[t]], for x (T, C) and y (N, C): z (size, C)."""
    terms = torch.arange(len(row), device=x.device)
    return sparse_mul(x, y, *sparse_product_infos(terms, row, onto, None, size, len(x), len(y)))


def atom_update(layer, *, atom_feas, bond_feas, bond_weights, atom_graph, directed2undirected):
    """What chgnet's AtomConv computes: messages from the neighbors of each atom."""
    (atom, neighbor), bond = atom_graph.long().T, directed2undirected.long()
    messages = layer.twoBody_atom(torch.cat([atom_feas[atom], bond_feas[bond], atom_feas[neighbor]], 1))
    return atom_feas + layer.mlp_out(weighted_sum(messages, bond_weights, bond, atom, len(atom_feas)))


def bond_update(layer, *, atom_feas, bond_feas, bond_weights, angle_feas, bond_graph):
    """What chgnet's BondConv computes: messages from the bonds that meet each bond at an atom."""
    atom, bond, other = bond_graph.long().T
    messages = layer.twoBody_bond(torch.cat([bond_feas[bond], bond_feas[other], angle_feas, atom_feas[atom]], 1))
    return bond_feas + layer.mlp_out(bond_weights * weighted_sum(messages, bond_weights, other, bond, len(bond_feas)))


def potential(products: bool):
    """CHGNet 0.3.0 with its trained weights, by its own layers or by sparse products."""
    from chgnet.model import CHGNet

    net = CHGNet.load(model_name="0.3.0", use_device="cpu", verbose=False)
    if products:
        for layers, update in ((net.atom_conv_layers, atom_update), (net.bond_conv_layers, bond_update)):
            for layer in layers:
                layer.forward = partial(update, layer)
    return net


def results(net, crystal) -> dict[str, torch.Tensor]:
    """Energy [eV per atom], forces [eV/Å] and stress [GPa], and the gradient of the squared forces to the weights."""
    found = net([net.graph_converter(crystal)], task="efs")
    (forces,), (stress,) = found["f"], found["s"]
    weights = [w for w in net.parameters() if w.requires_grad]
    gradients = torch.autograd.grad(forces.square().mean(), weights, allow_unused=True)
    second = torch.cat([g.flatten() for g in gradients if g is not None])
    return {"energy": found["e"].detach(), "forces": forces.detach(), "stress": stress.detach(), "second": second}


def draw(edges: np.ndarray, energies: list[list[float]], both: list[dict[str, torch.Tensor]], path: Path) -> None:
    """Energy over the edge of the cell; forces one way over forces the other way."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(edges, energies[0], color=COLORS[0], lw=1, label="chgnet's layers")
    left.plot(edges, energies[1], "o", color=COLORS[1], ms=4, label="sparse products")
    left.axvline(MEASURED, color="gray", ls=":", label="measured edge")
    left.set(xlabel="edge of the cubic cell [Å]", ylabel="energy [eV per atom]", title="silicon")
    left.legend()
    one, other = (found["forces"].flatten() for found in both)
    right.axline((0, 0), slope=1, color="gray", lw=1)
    right.plot(one, other, "o", color=COLORS[1], ms=3)
    right.set(xlabel="force, chgnet's layers [eV/Å]", ylabel="force, sparse products", title="64 atoms, displaced")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(output: Path) -> bool:
    from pymatgen.core import Lattice, Structure

    silicon = Structure.from_spacegroup("Fd-3m", Lattice.cubic(MEASURED), ["Si"], [[0, 0, 0]])
    nets = [potential(products) for products in (False, True)]
    edges = np.linspace(5.3, 5.6, 13)
    energies = []
    for net in nets:
        crystals = [silicon.copy() for _ in edges]
        for crystal, edge in zip(crystals, edges):
            crystal.scale_lattice(edge**3)
        energies.append([float(found["e"]) for found in net.predict_structure(crystals, task="e")])
    fitted = np.polynomial.Polynomial.fit(edges, energies[1], 4)
    slopes = [float(root.real) for root in fitted.deriv().roots() if abs(root.imag) < 1e-9]
    edge = min((root for root in slopes if edges[0] < root < edges[-1]), key=fitted)

    crystal = silicon * (2, 2, 2)
    offsets = np.random.default_rng(0).normal(0, 0.1, (len(crystal), 3))
    for atom, offset in enumerate(offsets):
        crystal.translate_sites([atom], offset, frac_coords=False)
    both = [results(net, crystal) for net in nets]
    differ = {name: float((both[1][name] - want).abs().max() / want.abs().max()) for name, want in both[0].items()}
    found = {
        "task": "crystal_forces",
        "atoms": len(crystal),
        "edge": round(edge, 3),
        "measured": MEASURED,
        "largest_force": round(float(both[0]["forces"].abs().max()), 3),
        "differ": {name: float(f"{value:.1e}") for name, value in differ.items()},
        "target": TARGET,
    }
    output.mkdir(parents=True, exist_ok=True)
    draw(edges, energies, both, output / "crystal_forces.png")
    (output / "crystal_forces.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))
    return max(differ.values()) <= TARGET and abs(edge / MEASURED - 1) <= NEAR


if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        raise SystemExit(0 if main(options(__doc__ or "").output) else 1)
