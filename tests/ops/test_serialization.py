"""Codes along curves against a walk of the curve in plain Python, and orders of grids."""

from __future__ import annotations

import itertools

import pytest
import torch

import sparseconv as sc
from sparseconv import ops
from sparseconv.ops.serialization import ORDERS, _codes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def walk(order: str, rank: int, depth: int) -> list[tuple[int, ...]]:
    """The voxels of a cube of edge 2^depth in the order of the curve: from numbers to voxels, in bits."""
    cells = []
    for number in range(1 << rank * depth):
        if order.startswith("hilbert"):
            number ^= number >> 1
        bits = f"{number:0{rank * depth}b}" if depth else ""
        axes = [[int(b) for b in bits[axis::rank]] for axis in range(rank)]  # highest bit first
        if order.startswith("hilbert"):
            for level in reversed(range(depth)):
                for axis in reversed(range(rank)):
                    for below in range(level + 1, depth):
                        if axes[axis][level]:
                            axes[0][below] ^= 1
                        else:
                            axes[0][below], axes[axis][below] = axes[axis][below], axes[0][below]
        cell = [int("".join(map(str, axis)) or "0", 2) for axis in axes]
        if order.endswith("-trans"):
            cell[0], cell[1] = cell[1], cell[0]
        cells.append(tuple(cell))
    return cells


def cube(rank, depth, device="cpu"):
    """All voxels of a cube, shuffled."""
    cells = torch.tensor(list(itertools.product(range(1 << depth), repeat=rank)))
    cells = cells[torch.randperm(len(cells), generator=torch.Generator().manual_seed(depth))]
    return torch.cat([torch.zeros(len(cells), 1, dtype=torch.int64), cells], 1).to(device)


def some(count, rank, depth, batch=3, seed=0):
    """Distinct voxels, by batch item."""
    gen = torch.Generator().manual_seed(seed)
    coords = torch.randint(0, 1 << depth, (count, rank + 1), generator=gen)
    coords[:, 0] %= batch
    return torch.unique(coords, dim=0)[torch.randperm(len(torch.unique(coords, dim=0)), generator=gen)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rank", "depth"), [(2, 0), (2, 1), (2, 4), (3, 1), (3, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("order", ORDERS)
def test_codes_are_places_along_the_curve(order, rank, depth, device):
    coords = cube(rank, depth, device)
    codes = ops.serial_codes(coords, order, depth=depth)
    assert codes.dtype == torch.int64
    assert sorted(codes.tolist()) == list(range(1 << rank * depth))
    assert [tuple(c) for c in coords[codes.argsort(), 1:].tolist()] == walk(order, rank, depth)


@pytest.mark.parametrize(("rank", "depth"), [(1, 5), (2, 5), (3, 4), (4, 2)])
def test_neighbours_along_hilberts_curve_touch(rank, depth):
    coords = cube(rank, depth)
    along = coords[ops.serial_codes(coords, "hilbert", depth=depth).argsort(), 1:]
    assert along[0].tolist() == [0] * rank
    assert bool((along.diff(dim=0).abs().sum(1) == 1).all())


@pytest.mark.parametrize("order", ORDERS)
def test_codes_of_point_transformers(order):
    """Figures that Pointcept's own functions gave for these voxels, at depths 3 and 16."""
    coords = torch.tensor([[0, 1, 2, 3], [1, 7, 0, 5], [2, 4, 6, 1]])
    far = torch.tensor([[0, 40000, 123, 65535], [3, 1, 2, 3]])
    got = ops.serial_codes(coords, order, depth=3).tolist(), ops.serial_codes(far, order, depth=16).tolist()
    assert got == PUBLISHED[order]


PUBLISHED = {
    "hilbert": ([48, 952, 1311], [236315697704310, 844424930132004]),
    "hilbert-trans": ([38, 666, 1291], [75473467286646, 844424930131988]),
    "z": ([29, 869, 1425], [181261733574235, 844424930131997]),
    "z-trans": ([43, 723, 1441], [110736223165037, 844424930132011]),
}


@pytest.mark.parametrize(("rank", "depth"), [(2, 17), (2, 31), (3, 7), (3, 16), (3, 20), (4, 15)])
@pytest.mark.parametrize("order", ORDERS)
def test_a_coarser_voxel_has_the_code_of_its_parts(order, rank, depth):
    coords = some(500, rank, depth, batch=2)
    codes = ops.serial_codes(coords, order, depth=depth)
    assert len(codes.unique()) == len(codes)
    assert torch.equal(codes >> rank * depth, coords[:, 0])
    parents = coords.clone()
    parents[:, 1:] >>= 1
    assert torch.equal(ops.serial_codes(parents, order, depth=depth - 1), codes >> rank)


@pytest.mark.parametrize("order", ORDERS)
def test_a_depth_that_the_device_knows(order):
    coords = some(300, 3, 9)
    for depth in (9, 12):
        known = _codes(coords, order, torch.tensor(depth), 21, torch.tensor(False))
        assert torch.equal(known, ops.serial_codes(coords, order, depth=depth))


# ---- grids


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [2, 3])
def test_orders_of_a_grid(rank, device):
    grid = sc.VoxelGrid(some(400, rank, 6), batch_size=5).to(device)
    curves = ops.serialize(grid, ORDERS)
    assert (curves.orders, curves.depth, curves.signed) == (ORDERS, int(max(grid.extent.end)).bit_length(), False)
    rows = torch.arange(len(grid), device=device)
    for name, codes, order, inverse in zip(ORDERS, curves.codes, curves.order, curves.inverse):
        assert torch.equal(codes, ops.serial_codes(grid.coords, name, depth=curves.depth))
        assert bool((codes[order].diff() > 0).all())
        assert torch.equal(order[inverse], rows)
        assert torch.equal(grid.coords[order, 0], grid.coords[:, 0].sort().values)
    assert ops.serialize(grid, "hilbert").order[0] is curves.order[2]  # found once


@pytest.mark.parametrize("order", ORDERS)
def test_voxels_below_zero_keep_their_cells(order):
    """They are moved by half of the curve's edge, so cells are those of floor(c / 2)."""
    coords = some(300, 3, 6)
    coords[:, 1:] -= 21
    grid = sc.VoxelGrid(coords)
    curves = ops.serialize(grid, order)
    moved = grid.coords.long()
    moved[:, 1:] += 1 << curves.depth >> 1
    assert curves.signed
    assert curves.depth == 7
    assert torch.equal(curves.codes[0], ops.serial_codes(moved, order, depth=curves.depth))
    assert ops.serialize(grid, order, depth=9).depth == 9


@pytest.mark.parametrize("low", [0, -5])
def test_coarser_grids_have_the_order_of_their_parts(low):
    coords = some(300, 3, 3)
    coords[:, 1:] += low
    grid = sc.VoxelGrid(coords)
    curves = ops.serialize(grid, ORDERS)
    for levels in range(1, 6):  # past the last level, where one voxel is left, or one on each side of 0
        coarse = grid.coarsen(1 << levels)
        parents = grid.coords.clone()
        parents[:, 1:] >>= levels
        rows = torch.empty(len(coarse), dtype=torch.int64)
        rows[coarse.lookup(parents)] = torch.arange(len(grid))
        got = curves.coarser(coarse, levels, rows)
        want = ops.serialize(coarse, ORDERS, depth=got.depth)
        assert got.depth == max(curves.depth - levels, int(low < 0))
        for mine, theirs in zip((*got.codes, *got.order, *got.inverse), (*want.codes, *want.order, *want.inverse)):
            assert torch.equal(mine, theirs)


def test_shuffled_curves():
    grid = sc.VoxelGrid(some(50, 3, 4))
    curves = ops.serialize(grid, ORDERS)
    torch.manual_seed(3)
    turns = torch.randperm(4).tolist()
    torch.manual_seed(3)
    shuffled = curves.shuffled()
    assert shuffled.orders == tuple(ORDERS[t] for t in turns)
    for t, codes, order, inverse in zip(turns, shuffled.codes, shuffled.order, shuffled.inverse):
        assert codes is curves.codes[t]
        assert order is curves.order[t]
        assert inverse is curves.inverse[t]


@pytest.mark.parametrize("low", [0, -9])
def test_grids_of_fixed_size(low):
    """Live rows come first, in the order of an ordinary grid."""
    coords = some(60, 3, 5).int()
    coords[:, 1:] += low
    grid = sc.VoxelGrid(coords)
    padded = torch.cat([coords, torch.full((20, 4), -1, dtype=torch.int32)])
    fixed = sc.geometry.FixedGrid(padded, torch.tensor([len(coords)], dtype=torch.int32), grid)
    want, got = ops.serialize(grid, ORDERS), ops.serialize(fixed, ORDERS)
    assert (int(got.depth), bool(got.signed)) == (want.depth, want.signed)
    for codes, order, theirs, rows in zip(got.codes, got.order, want.codes, want.order):
        assert torch.equal(codes[: len(grid)], theirs)
        assert torch.equal(order[: len(grid)], rows)
    shuffled = got.shuffled()
    assert sorted(order[0].item() for order in shuffled.order) == sorted(order[0].item() for order in got.order)


def test_no_voxel():
    grid = sc.VoxelGrid(torch.zeros(0, 4).int(), 2)
    curves = ops.serialize(grid, ORDERS)
    assert curves.depth == 0
    assert [len(rows) for rows in (*curves.codes, *curves.order, *curves.inverse)] == [0] * 12
    assert ops.serial_codes(grid.coords, "hilbert", depth=3).shape == (0,)


def test_errors():
    coords = torch.tensor([[0, 1, 2, 8]])
    with pytest.raises(ValueError, match=r"order must be one of 'z', .*'peano'"):
        ops.serial_codes(coords, "peano", depth=4)
    with pytest.raises(ValueError, match=r"depth 3 holds indices 0 .. 7, but the voxels reach from 1 to 8"):
        ops.serial_codes(coords, depth=3)
    with pytest.raises(ValueError, match=r"reach from -1 to 0"):
        ops.serial_codes(torch.tensor([[0, -1, 0]]), depth=3)
    with pytest.raises(ValueError, match=r"need 66 bits, a code has 63"):
        ops.serial_codes(coords, depth=22)
    with pytest.raises(ValueError, match=r"batch items .* start at 0"):
        ops.serial_codes(torch.tensor([[-1, 0, 0]]), depth=3)
    with pytest.raises(TypeError, match="must be integers"):
        ops.serial_codes(coords.float(), depth=3)
    with pytest.raises(ValueError, match=r"coords must be \(N, 1\+D\)"):
        ops.serial_codes(coords[0], depth=3)
    with pytest.raises(ValueError, match="use 'z'"):
        ops.serialize(sc.VoxelGrid(torch.tensor([[0, 1]])), "z-trans")
    with pytest.raises(ValueError, match="at least one curve"):
        ops.serialize(sc.VoxelGrid(torch.tensor([[0, 1, 1]])), ())
    with pytest.raises(ValueError, match=r"depth 3 holds indices -4 .. 3"):
        ops.serialize(sc.VoxelGrid(torch.tensor([[0, -5, 1]])), depth=3)
    with pytest.raises(TypeError, match="grid must be a VoxelGrid"):
        ops.serialize(coords)
    with pytest.raises(ValueError, match="levels must be at least 0"):
        ops.serialize(sc.VoxelGrid(torch.tensor([[0, 1]])), "z").coarser(sc.VoxelGrid(coords), -1, torch.arange(1))


@pytest.mark.parametrize("name", ["z", "hilbert"])
def test_a_signed_line_of_all_bits(name):
    """Codes are the places along the line, and not below 0."""
    rows = [-3, 5, -(2**31), 2**31 - 2]
    grid = sc.VoxelGrid(torch.tensor([[0, row] for row in rows]))
    for depth in (33, 62, 63):
        assert ops.serialize(grid, name, depth=depth).codes[0].tolist() == [row + 2 ** (depth - 1) for row in rows]
