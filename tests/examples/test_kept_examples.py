"""The examples run, resume to the same bits, and draw their curves; their scores are those of full runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"), [("brain_tissues", "nilearn"), ("cortex_folds", "nilearn"), ("frog_tissues", "pyvista")]
)
def test_an_example_resumes_and_draws(name, package, tmp_path):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    paths = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(FOLDER / "packaged" / f"{name}.py"), "--steps", "4", "--output", str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False, capture_output=True)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["resumed_equals"]
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["autzen_ground", "brain_tissues", "cortex_folds", "frog_tissues"])
def test_kept_results_reach_their_targets(name):
    found = json.loads((FOLDER / "results" / f"{name}.json").read_text())
    assert found["held_out_miou"] >= found["target"]
    assert found["resumed_equals"]
    assert (FOLDER / "results" / f"{name}.png").exists()


def test_two_sweeps_are_aligned_as_their_package_says():
    found = json.loads((FOLDER / "results" / "align_sweeps.json").read_text())
    assert all(error < target < start for error, target, start in zip(found["error"], found["target"], found["start"]))
    assert (FOLDER / "results" / "align_sweeps.png").exists()


def test_a_trained_potential_gives_its_own_numbers_by_products():
    found = json.loads((FOLDER / "results" / "crystal_forces.json").read_text())
    assert {"energy", "forces", "stress", "second"} == set(found["differ"])
    assert max(found["differ"].values()) <= found["target"]
    assert abs(found["edge"] / found["measured"] - 1) < 0.01
    assert (FOLDER / "results" / "crystal_forces.png").exists()


def test_layers_of_a_potential_are_sums_over_their_graph(monkeypatch):
    """Beside a loop over the terms, both gradients of a gradient included; an atom without bonds has none."""
    monkeypatch.syspath_prepend(str(FOLDER / "packaged"))
    import crystal_forces

    torch.manual_seed(0)
    wide = {"dtype": torch.float64}
    atoms, bonds, angles = (torch.randn(n, 4, requires_grad=True, **wide) for n in (5, 6, 9))
    weights = torch.randn(6, 4, requires_grad=True, **wide)
    layer = torch.nn.Module()
    layer.twoBody_atom = torch.nn.Sequential(torch.nn.Linear(12, 4, **wide), torch.nn.SiLU())
    layer.twoBody_bond = torch.nn.Sequential(torch.nn.Linear(16, 4, **wide), torch.nn.SiLU())
    layer.mlp_out = torch.nn.Linear(4, 4, bias=False, **wide)
    graph = torch.randint(4, (12, 2), dtype=torch.int32)
    bond = torch.randint(6, (12,), dtype=torch.int32)
    triples = torch.stack([torch.randint(5, (9,)), torch.randint(6, (9,)), torch.randint(6, (9,))], 1).int()

    def by_loops():
        atom_sums, bond_sums = [torch.zeros(4, **wide)] * 5, [torch.zeros(4, **wide)] * 6
        for (center, neighbor), b in zip(graph.tolist(), bond.tolist()):
            message = layer.twoBody_atom(torch.cat([atoms[center], bonds[b], atoms[neighbor]]))
            atom_sums[center] = atom_sums[center] + message * weights[b]
        for angle, (center, b, other) in enumerate(triples.tolist()):
            message = layer.twoBody_bond(torch.cat([bonds[b], bonds[other], angles[angle], atoms[center]]))
            bond_sums[b] = bond_sums[b] + message * weights[b] * weights[other]
        return [x + layer.mlp_out(torch.stack(s)) for x, s in ((atoms, atom_sums), (bonds, bond_sums))]

    common = {"atom_feas": atoms, "bond_feas": bonds, "bond_weights": weights}
    found = [
        crystal_forces.atom_update(layer, atom_graph=graph, directed2undirected=bond, **common),
        crystal_forces.bond_update(layer, angle_feas=angles, bond_graph=triples, **common),
    ]
    for one, other in zip(found, by_loops()):
        torch.testing.assert_close(one, other)
        seconds = []
        for result in (one, other):
            (first,) = torch.autograd.grad(result.square().sum(), bonds, create_graph=True)
            seconds += [torch.autograd.grad(first.square().sum(), [atoms, bonds, weights])]
        torch.testing.assert_close(*seconds)


def test_a_room_is_aligned_with_itself(monkeypatch):
    """Two walls and a floor that were turned and moved; the points come as a .ply holds them."""
    monkeypatch.syspath_prepend(str(FOLDER / "packaged"))
    import align_sweeps

    walls = 8 * torch.rand(3, 1500, 3, generator=torch.Generator().manual_seed(0))
    walls[range(3), :, range(3)] = 0
    cloud = torch.cat([walls.flatten(0, 1), torch.ones(4500, 1)], 1)
    head = b"ply\nformat binary_little_endian 1.0\nelement vertex 4500\nend_header\n"
    target = align_sweeps.sweep(head + cloud.numpy().tobytes())
    assert torch.equal(target, cloud[:, :3].double())
    pose = torch.tensor([0.01, -0.02, 0.02, 0.2, -0.1, 0.15], dtype=torch.float64)
    known = torch.eye(4, dtype=torch.float64)
    known[:3, :3], known[:3, 3] = align_sweeps.matrix(pose)
    source = (target - known[:3, 3]) @ known[:3, :3]
    before = align_sweeps.errors(torch.zeros_like(pose), known)
    after = align_sweeps.errors(align_sweeps.align(source, target, (1.0, 0.5, 0.25)), known)
    assert all(error < start / 4 for error, start in zip(after, before)), (before, after)


def test_the_brain_is_not_tested_on_the_mirror_image_of_what_it_learnt(monkeypatch):
    pytest.importorskip("nilearn")
    monkeypatch.syspath_prepend(str(FOLDER / "packaged"))
    import brain_tissues

    task = brain_tissues.task(8)
    learnt, held_out = ([tile.x.grid.coords[:, 1:] for tile in tiles] for tiles in (task.train, task.held_out))
    middle = torch.cat(learnt)[:, 0].double().mean()
    for slab in (*learnt, *held_out):  # both hemispheres of each
        assert bool((slab[:, 0] < middle).any() and (slab[:, 0] > middle).any())
    rows = [set(torch.cat(slabs)[:, 1].tolist()) for slabs in (learnt, held_out)]
    assert rows[0].isdisjoint(rows[1])  # a mirrored voxel lies in its own slab
