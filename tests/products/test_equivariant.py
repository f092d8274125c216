"""The equivariant tensor products of the example against e3nn, with their gradients, up to l = 4."""

from __future__ import annotations

import pytest
import torch

from examples.equivariant_tensor_product import (
    ChannelwiseTensorProduct,
    FullyConnectedTensorProduct,
    Harmonics,
    Potential,
    clebsch_gordan,
    configurations,
    couple,
    lennard_jones,
    rows,
    train,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


@pytest.fixture
def double():
    """e3nn keeps its couplings in the default dtype of the moment it is made."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def irreps(l_max):
    """0e + 1o + 2e + ..., as spherical harmonics have them."""
    return tuple((ell, (-1) ** ell) for ell in range(l_max + 1))


def written(blocks, channels):
    """The same irreps in e3nn's words, each ``channels`` times."""
    return " + ".join(f"{channels}x{ell}{'e' if parity == 1 else 'o'}" for ell, parity in blocks)


def channels_last(flat, blocks, channels):
    """(N, sum of channels * (2l + 1)) of e3nn as (N, rows, channels)."""
    parts, start = [], 0
    for ell, _ in blocks:
        width = channels * (2 * ell + 1)
        parts.append(flat[:, start : start + width].unflatten(1, (channels, 2 * ell + 1)).transpose(1, 2))
        start += width
    return torch.cat(parts, 1)


def orders(function, inputs):
    """The value, its gradients, and the gradients of the sum of their squares."""
    out = function(*inputs)
    seed = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    first = torch.autograd.grad(out, inputs, seed, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    return [out, *first, *second]


def test_couplings_are_those_of_e3nn():
    o3 = pytest.importorskip("e3nn.o3")
    for l1 in range(5):
        for l2 in range(5):
            for l3 in range(abs(l1 - l2), min(4, l1 + l2) + 1):
                wanted = o3.wigner_3j(l1, l2, l3, dtype=torch.float64)
                torch.testing.assert_close(clebsch_gordan(l1, l2, l3), wanted, **CLOSE)


def test_harmonics_are_those_of_e3nn():
    o3 = pytest.importorskip("e3nn.o3")
    unit = torch.nn.functional.normalize(torch.randn(7, 3, dtype=torch.float64), dim=1)
    wanted = o3.spherical_harmonics(list(range(5)), unit, False, normalization="component")
    torch.testing.assert_close(Harmonics(4, torch.float64)(unit), wanted, **CLOSE)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("l_max", [2, 4])
def test_channelwise_equals_e3nn_to_the_second_order(l_max):
    o3 = pytest.importorskip("e3nn.o3")
    blocks, channels = irreps(l_max), 3
    ours = ChannelwiseTensorProduct(blocks, blocks, blocks, torch.float64)
    order, outputs = [], []
    for l3, parity in blocks:  # our paths go by their output, then by their inputs
        for i, (l1, p1) in enumerate(blocks):
            for j, (l2, p2) in enumerate(blocks):
                if p1 * p2 == parity and abs(l1 - l2) <= l3 <= l1 + l2:
                    order.append((i, j, len(outputs), "uvu", False))
                    outputs.append((l3, parity))
    theirs = o3.TensorProduct(written(blocks, channels), written(blocks, 1), written(outputs, channels), order)
    flat = torch.randn(5, channels * rows(blocks), dtype=torch.float64, requires_grad=True)
    y = torch.randn(5, rows(blocks), dtype=torch.float64, requires_grad=True)
    got = orders(lambda x, y: ours(channels_last(x, blocks, channels), y), (flat, y))
    wanted = orders(lambda x, y: channels_last(theirs(x, y), outputs, channels), (flat, y))
    for g, w in zip(got, wanted):
        torch.testing.assert_close(g, w, **CLOSE)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("l_max", [1, 4])
def test_fully_connected_equals_e3nn_to_the_second_order(l_max):
    o3 = pytest.importorskip("e3nn.o3")
    blocks, channels = irreps(l_max), (3, 2, 4)
    ours = FullyConnectedTensorProduct(blocks, blocks, blocks, channels, torch.float64)
    theirs = o3.FullyConnectedTensorProduct(*(written(blocks, c) for c in channels))
    place = {}
    for i3, (l3, p3) in enumerate(blocks):
        for i1, (l1, p1) in enumerate(blocks):
            for i2, (l2, p2) in enumerate(blocks):
                if p1 * p2 == p3 and abs(l1 - l2) <= l3 <= l1 + l2:
                    place[i1, i2, i3] = len(place)
    paths = [place[path.i_in1, path.i_in2, path.i_out] for path in theirs.instructions]
    assert sorted(paths) == list(range(len(ours.weights)))
    weights = ours.weights.detach()[paths].flatten()
    x, y = (torch.randn(3, c * rows(blocks), dtype=torch.float64, requires_grad=True) for c in channels[:2])
    got = orders(
        lambda x, y: ours(channels_last(x, blocks, channels[0]), channels_last(y, blocks, channels[1])), (x, y)
    )
    wanted = orders(lambda x, y: channels_last(theirs(x, y, weights), blocks, channels[2]), (x, y))
    for g, w in zip(got, wanted):
        torch.testing.assert_close(g, w, **CLOSE)


def test_eleven_paths_of_the_benchmark():
    paths = couple(irreps(2), irreps(2), irreps(2))
    assert len(paths.irrep_of_path) == 11
    assert len(paths.path_of_row) == 35
    assert len(paths.index1) == 83


def test_energies_do_not_turn_and_forces_do():
    torch.manual_seed(0)
    model = Potential(channels=2, dtype=torch.float64)
    positions = configurations(2, torch.Generator().manual_seed(0), torch.float64).requires_grad_()
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))  # a rotation or a reflection
    turned = (positions.detach() @ turn.T).requires_grad_()
    energies = [model(p) for p in (positions, turned)]
    forces = [torch.autograd.grad(e.sum(), p)[0] for e, p in zip(energies, (positions, turned))]
    torch.testing.assert_close(*energies, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(forces[0] @ turn.T, forces[1], rtol=1e-8, atol=1e-9)
    assert torch.autograd.gradcheck(model, (positions,), fast_mode=True)
    assert torch.autograd.gradgradcheck(model, (positions,), fast_mode=True)


def test_the_made_up_forces_are_gradients():
    positions = configurations(1, torch.Generator().manual_seed(1), torch.float64)
    _, forces = lennard_jones(positions)
    step = torch.zeros_like(positions)
    step[0, 3, 1] = 1e-5
    slope = (lennard_jones(positions + step)[0] - lennard_jones(positions - step)[0]) / 2e-5
    torch.testing.assert_close(-slope[0], forces[0, 3, 1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_potential_learns_energies_and_forces():
    found = train(report=0)
    assert found["energy_after"] < 0.15 < 0.5 < found["energy_before"]
    assert found["forces_after"] < 0.15 < 0.5 < found["forces_before"]
