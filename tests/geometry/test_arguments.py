"""What grids and plans refuse, in words, before anything is built: wrong kinds, missing columns, large numbers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import sparseconv as sc
import sparseconv.interop.minkowski as ME
import sparseconv.interop.spconv.pytorch as spconv
import sparseconv.interop.torchsparse as torchsparse
from sparseconv import Boundary, ConvolutionPlan, IndexRange, VoxelGrid, nn
from sparseconv.geometry.edges import find_edges
from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.geometry.window import MOST_TAPS, Window

LAST = 2**31 - 2  # the largest voxel index
GRID = VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1], [1, 4, 2]]))
POINTS = torch.rand(5, 3)
QUANTISED = torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint32)


def _fixed() -> FixedGrid:
    return FixedGrid(GRID.coords, torch.tensor([3]).int(), GRID)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: VoxelGrid(GRID.coords.numpy()), "torch.Tensor"),
        (lambda: VoxelGrid(GRID.coords.tolist()), "torch.Tensor"),
        (lambda: VoxelGrid(None), "torch.Tensor"),
        (lambda: VoxelGrid(GRID), "torch.Tensor"),
        (lambda: VoxelGrid(GRID.coords.to_sparse()), "to_dense"),
        (lambda: VoxelGrid(QUANTISED), "dequantize"),
        (lambda: VoxelGrid(GRID.coords.to("meta")), "meta"),
        (lambda: VoxelGrid(GRID.coords.to(torch.complex64)), "integers"),
        (lambda: VoxelGrid(GRID.coords.to(torch.uint64)), "integers"),
        (lambda: VoxelGrid(GRID.coords, batch_size=2.5), "batch_size must be an integer"),
        (lambda: VoxelGrid(GRID.coords, batch_size="2"), "batch_size must be an integer"),
        (lambda: VoxelGrid(GRID.coords, batch_size=-1), "batch_size"),
        (lambda: VoxelGrid(GRID.coords, batch_size=2**40), "batch_size"),
        (lambda: VoxelGrid(GRID.coords, voxel_size=float("nan")), "finite"),
        (lambda: VoxelGrid(GRID.coords, voxel_size=float("inf")), "finite"),
        (lambda: VoxelGrid(GRID.coords, voxel_size="0.1"), "one number"),
        (lambda: VoxelGrid(GRID.coords, voxel_size={0.1, 0.2}), "one number"),
        (lambda: VoxelGrid(GRID.coords, origin=(0.0, float("inf"))), "finite"),
        (lambda: VoxelGrid(GRID.coords, origin=GRID), "one number"),
        (lambda: VoxelGrid(GRID.coords, duplicates=["first"]), "'first'"),
        (lambda: GRID.lookup([[0, 0, 0]]), "torch.Tensor"),
        (lambda: GRID.lookup(GRID.coords.numpy()), "torch.Tensor"),
        (lambda: GRID.lookup(GRID.coords.to_sparse()), "to_dense"),
        (lambda: GRID.lookup(None), "torch.Tensor"),
        (lambda: GRID.subset([True, False, True]), "torch.Tensor"),
        (lambda: GRID.union(GRID.coords), "VoxelGrid"),
        (lambda: GRID.difference(None), "VoxelGrid"),
        (lambda: VoxelGrid.cat([GRID, None]), "VoxelGrid"),
        (lambda: VoxelGrid.cat([None]), "VoxelGrid"),
        (lambda: VoxelGrid.cat(GRID), "sequence"),
        (lambda: VoxelGrid.cat(grid for grid in [GRID]), "sequence"),
        (lambda: GRID.coarsen(1.5), "one integer"),
        (lambda: GRID.refine({2}), "one integer"),
        (lambda: GRID.dilate("1"), "one integer"),
        (lambda: GRID.to("banana"), "banana"),
        (lambda: GRID.to("meta"), "meta"),
        (lambda: GRID.to(1.5), "device"),
        (lambda: GRID.to(None), "device"),
        (lambda: GRID.to_dense([1.0]), "torch.Tensor"),
        (lambda: GRID.to_dense(torch.ones(3, 1), (2.5, 2)), "one integer"),
        (lambda: GRID.to_dense(torch.ones(3, 1), 9.0), "one integer"),
        (lambda: GRID.to_dense(torch.ones(3, 1), IndexRange((0,), (9,))), "leaves the box"),
        (lambda: VoxelGrid.from_dense(np.ones((1, 1, 3))), "torch.Tensor"),
        (lambda: sc.voxelize(np.zeros((3, 3)), 1.0), "torch.Tensor"),
        (lambda: sc.voxelize(POINTS.to_sparse(), 1.0), "to_dense"),
        (lambda: sc.voxelize(POINTS, float("nan")), "finite"),
        (lambda: sc.voxelize(POINTS, None), "one number"),
        (lambda: sc.voxelize(POINTS, 0.1, batch=[0] * 5), "torch.Tensor"),
        (lambda: sc.voxelize(POINTS, 0.1, batch=np.zeros(5)), "torch.Tensor"),
        (lambda: sc.voxelize(POINTS, 0.1, batch_size=2.5), "batch_size"),
        (lambda: sc.voxelize(POINTS, 0.1, origin=float("nan")), "finite"),
        (lambda: ConvolutionPlan(GRID.coords, 3), "source must be a VoxelGrid"),
        (lambda: ConvolutionPlan(sc.SparseTensor(GRID, torch.ones(3, 1)), 3), "source must be a VoxelGrid"),
        (lambda: ConvolutionPlan(GRID, {3}), "kernel_size"),
        (lambda: ConvolutionPlan(GRID, "3"), "kernel_size"),
        (lambda: ConvolutionPlan(GRID, 2.5), "kernel_size"),
        (lambda: ConvolutionPlan(GRID, 3, groups=1.5), "groups"),
        (lambda: ConvolutionPlan(GRID, 3, groups="2"), "groups"),
        (lambda: ConvolutionPlan(GRID, 3, groups=0), "groups"),
        (lambda: ConvolutionPlan(GRID, 3, groups=None), "groups"),
        (lambda: ConvolutionPlan(GRID, 3).with_groups(2.0), "groups"),
        (lambda: ConvolutionPlan(GRID, 3, deterministic="x"), "deterministic"),
        (lambda: ConvolutionPlan.transposed(GRID, 2, stride=2, deterministic=1), "deterministic"),
        (lambda: ConvolutionPlan(GRID, 3, backend=None), "backend"),
        (lambda: ConvolutionPlan(GRID, 3, backend=["auto"]), "backend"),
        (lambda: ConvolutionPlan(GRID, 3, boundary=["absent"]), "boundary"),
        (lambda: ConvolutionPlan(GRID, 3, boundary=None), "boundary"),
        (lambda: ConvolutionPlan(GRID, 3, boundary=Boundary.forbid((9,))), "2 axes"),
        (lambda: ConvolutionPlan(GRID, 3, boundary=Boundary("absent", (9, 9))), "has no end"),
        (lambda: ConvolutionPlan(GRID, 3, target=GRID.coords), "target"),
        (lambda: ConvolutionPlan(GRID, 3, target="all"), "target"),
        (lambda: ConvolutionPlan.transposed(GRID, 2, stride=2, target="full"), "target"),
        (lambda: ConvolutionPlan(GRID, taps=5), "taps"),
        (lambda: ConvolutionPlan(GRID, taps=[1, 2]), "taps"),
        (lambda: ConvolutionPlan(GRID, taps=[(0.5, 1)]), "taps"),
        (lambda: ConvolutionPlan(GRID, taps=torch.ones(2, 2)), "taps"),
        (lambda: ConvolutionPlan(GRID, 3).to("banana"), "banana"),
        (lambda: FixedGrid([1], torch.tensor([1]).int(), GRID), "torch.Tensor"),
        (lambda: FixedGrid(GRID.coords, torch.tensor([3]).int(), GRID, room=float("inf")), "finite"),
        (lambda: _fixed().to_dense(torch.ones(2, 1)), r"features must be \(3, C\)"),
        (lambda: _fixed().to_dense(torch.ones(3, 1), (9,)), "one integer or 2"),
        (lambda: _fixed().to_dense(torch.ones(3, 1), IndexRange((0,), (9,))), "leaves the box"),
        (lambda: sc.SparseTensor(GRID, [1, 2, 3]), "torch.Tensor"),
        (lambda: sc.SparseTensor(GRID, torch.ones(3, 1).to_sparse()), "to_dense"),
    ],
)
def test_wrong_kinds_are_refused_in_words(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_device_that_is_not_there():
    for call in (GRID.to, ConvolutionPlan(GRID, 3).to):
        with pytest.raises(ValueError, match="cuda"):
            call("cuda")


@pytest.mark.parametrize(
    "size", [0.5, np.float32(0.5), torch.tensor(0.5), (0.5, 0.5), np.full(2, 0.5), torch.full((2,), 0.5)]
)
def test_sizes_come_in_every_kind_of_number(size):
    assert VoxelGrid(GRID.coords, voxel_size=size).voxel_size == (0.5, 0.5)


# ---- a batch column that is not there, and columns that are too many


def test_a_missing_batch_column_is_named():
    voxels = torch.tensor([[0, 7, 7], [3, 0, 1], [5, 2, 2]])
    grid = VoxelGrid(voxels)
    x = sc.SparseTensor(grid, torch.randn(3, 4))
    for call in (
        lambda: nn.SubmanifoldConv(4, 8, 3)(x),
        lambda: VoxelGrid(voxels, batch_size=1),
        lambda: VoxelGrid(voxels - 1),
        lambda: VoxelGrid(voxels, voxel_size=(0.1, 0.1, 0.2)),
        lambda: ConvolutionPlan(grid, (3, 3, 3)),
        lambda: spconv.SparseConvTensor(x.features, voxels.int(), [8, 8, 8], 1),
        lambda: ME.MinkowskiConvolution(4, 8, 3, dimension=3)(ME.SparseTensor(x.features, voxels.int())),
    ):
        with pytest.raises(ValueError, match=r"batch column: torch.nn.functional.pad\(coords, \(1, 0\)\)"):
            call()
    whole = VoxelGrid(torch.nn.functional.pad(voxels, (1, 0)))
    assert nn.SubmanifoldConv(4, 8, 3)(sc.SparseTensor(whole, torch.randn(3, 4))).channels == 8


def test_exchanged_rows_and_columns_are_named():
    with pytest.raises(ValueError, match="transpose them"):
        sc.voxelize(torch.rand(3, 50), 0.1)
    with pytest.raises(ValueError, match=r"coords\.T"):
        VoxelGrid(torch.zeros(4, 50, dtype=torch.int32))
    with pytest.raises(ValueError, match="other columns are features"):
        sc.voxelize(torch.rand(50, 6), 0.1)
    assert sc.voxelize(torch.rand(3, 3), 0.1)[0].rank == 3  # may well be three points


def test_a_fourth_column_is_asked_about():
    points = torch.rand(20, 4)
    with pytest.warns(UserWarning, match="intensity"):
        grid, _ = sc.voxelize(points, 0.5)
    with pytest.raises(ValueError, match="Columns that are no position are features"):
        nn.SubmanifoldConv(2, 2, 3)(sc.SparseTensor(grid, torch.randn(len(grid), 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sc.voxelize(points, (0.5,) * 4)[0].rank == 4
        assert sc.voxelize(points[:, :3], 0.5)[0].rank == 3


# ---- numbers past 32 bits


def line(*places: int) -> VoxelGrid:
    return VoxelGrid(torch.tensor([[0, place] for place in places]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: line(LAST + 1),
        lambda: VoxelGrid(torch.tensor([[0, LAST + 1]], dtype=torch.int32)),
        lambda: ConvolutionPlan.transposed(line(2**30), 2, stride=4),
        lambda: ConvolutionPlan.transposed(line(-(2**30)), 2, stride=4),
        lambda: ConvolutionPlan(line(LAST), 3, target="full"),
        lambda: ConvolutionPlan(line(0), 3, padding=2**31, target="full"),
        lambda: ConvolutionPlan(line(0), 3, dilation=2**31),
        lambda: ConvolutionPlan(line(0), 3, dilation=2**30 + 1, padding=0),
        lambda: ConvolutionPlan(line(0), 3, stride=2**31),
        lambda: ConvolutionPlan(line(0), 3, stride=10**25),
        lambda: ConvolutionPlan(line(0), taps=[(0,), (2**31,)]),
        lambda: ConvolutionPlan(line(0), 3, boundary=Boundary.periodic((2**31,))),
        lambda: ConvolutionPlan(line(0), 3, boundary=Boundary.forbid((2**40,))),
        lambda: line(0).coarsen(2**31),
        lambda: line(2**30).refine(4),
        lambda: line(0).refine(2**31 - 1),
        lambda: line(LAST).dilate(1),
        lambda: line(0).dilate(2**31),
        lambda: FixedGrid(line(0).coords, torch.tensor([1]).int(), line(0), extent=(2**32,)),
        lambda: FixedGrid(line(2**30).coords, torch.tensor([1]).int(), line(2**30)).reached(
            Window.of(1, 2, 4), Boundary.absent(), to_fine=True
        ),
    ],
)
def test_what_leaves_32_bits_is_refused(call):
    with pytest.raises(ValueError, match=r"32 bits|more than 134,217,728"):
        call()


def test_what_just_fits_is_right():
    assert line(5, -5, LAST, 1 - 2**31).coarsen(2**31 - 1).coords.tolist() == [[0, -1], [0, 0]]
    assert ConvolutionPlan(line(LAST - 1, 0), 3, target="full").target.coords[-1].tolist() == [0, LAST]
    edge = line(LAST)
    assert edge.lookup(torch.tensor([[0, LAST]])).tolist() == [0]
    assert edge.lookup(edge.coords).tolist() == [0]
    assert ConvolutionPlan(edge, 3).kernel_map.num_pairs == 1
    assert FixedGrid(edge.coords, torch.tensor([1]).int(), edge).fault.tolist() == [0]
    many = line(*range(0, 600, 7))
    narrow = torch.tensor([[0, 0], [0, 7], [0, 8], [0, 70]])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        assert many.lookup(narrow.to(dtype)).tolist() == [0, 1, -1, 10]


# ---- lattices


def test_voxels_off_their_torus_are_refused():
    torus = Boundary.periodic((4,))
    fine = line(0, 1, 2, 3)
    for call in (
        lambda: ConvolutionPlan.transposed(line(0, 4), 1, boundary=torus),
        lambda: ConvolutionPlan.transposed(line(0, 2), 2, stride=2, boundary=torus),
        lambda: ConvolutionPlan.transposed(line(0, 2), 2, stride=2, boundary=torus, target=fine),
        lambda: ConvolutionPlan(fine, 2, stride=2, boundary=torus, target=line(0, 2)),
        lambda: ConvolutionPlan(fine, 3, boundary=torus, target=line(-1)),
    ):
        with pytest.raises(ValueError, match="leaves"):
            call()
    assert ConvolutionPlan(fine, 2, stride=2, boundary=torus, target=line(0, 1)).kernel_map.num_pairs == 4


def test_a_target_on_another_lattice_is_refused():
    coords, coarse = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 2, 3]]), torch.tensor([[0, 0, 0], [0, 1, 1]])
    grid = VoxelGrid(coords, voxel_size=0.1, origin=(1.0, 2.0))
    for size, origin in ((0.1, (1.0, 2.0)), (0.2, (1.0, 2.1)), (0.2, 0.0), ((0.2, 0.1), (1.0, 2.0))):
        other = VoxelGrid(coarse, voxel_size=size, origin=origin)
        for call in (
            lambda target: ConvolutionPlan(grid, 2, stride=2, target=target),
            lambda target: ConvolutionPlan(grid, 2, stride=2, target=target, boundary="forbid"),
            lambda target: ConvolutionPlan.transposed(target, 2, stride=2, target=grid),
        ):
            with pytest.raises(ValueError, match="with that origin"):
                call(other)
    with pytest.raises(ValueError, match="with that origin"):
        ConvolutionPlan(grid, 3, target=VoxelGrid(coarse, voxel_size=0.3))
    third = VoxelGrid(coarse, voxel_size=0.3, origin=(1.0, 2.0))  # 3 * 0.1 is not 0.3 to the last bit
    for target in (VoxelGrid(coarse), VoxelGrid(coarse, voxel_size=0.2, origin=(1.0, 2.0)), grid.coarsen(2)):
        assert ConvolutionPlan(grid, 2, stride=2, target=target).target is target
    assert ConvolutionPlan(grid, 3, stride=3, target=third).target is third
    unplaced = VoxelGrid(coords)
    assert ConvolutionPlan(unplaced, 2, stride=2, target=VoxelGrid(coarse, voxel_size=0.7)).num_in == 3
    back = ConvolutionPlan.transposed(grid.coarsen(2), 2, stride=2, target=grid)
    assert find_edges(grid, grid.coarsen(2), back.window, back.boundary).num_pairs == back.kernel_map.num_pairs


# ---- windows


def test_windows_have_a_bound_on_their_taps():
    for rank, kernel in ((2, 400), (3, 400), (4, 14), (1, MOST_TAPS + 1), (3, 2**40)):
        with pytest.raises(ValueError, match=f"more than {MOST_TAPS}"):
            Window.of(rank, kernel)
    with pytest.raises(ValueError, match=f"more than {MOST_TAPS}"):
        Window.of(1, None, taps=torch.arange(MOST_TAPS + 1)[:, None])
    for rank, kernel in ((3, 5), (3, 7), (3, 11), (1, 4096), (2, 181), (1, MOST_TAPS)):
        assert len(Window.of(rank, kernel).offsets) == kernel**rank


def test_one_tap_beside_its_voxel_does_not_meet_all():
    plan = ConvolutionPlan(line(0, 1, 5), 1, padding=1)
    assert (plan.kernel_map.num_pairs, plan.kernel_map.meets_all) == (1, False)
    assert plan.kernel_map.num_pairs == len(plan.kernel_map.in_rows)
    for whole in (ConvolutionPlan(line(0, 1, 5), 1), ConvolutionPlan(line(0, 1, 5), 2, stride=2)):
        assert whole.kernel_map.meets_all
        assert whole.kernel_map.num_pairs == len(whole.kernel_map.in_rows) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_positions_whose_numbers_are_further_apart_than_voxels(dtype):
    near = torch.rand(50, 3).to(dtype)
    assert torch.equal(sc.voxelize(near, 0.1)[0].coords, sc.voxelize(near.double(), 0.1)[0].coords)
    with pytest.raises(ValueError, match=rf"points are {dtype}, whose numbers near 3\d\d.* apart, but voxels are 0.05"):
        sc.voxelize(torch.tensor([[0.0, 0.0], [1.0, -300.0]]).to(dtype), 0.05)
    with pytest.raises(ValueError, match="keep positions in float64"):
        sc.voxelize(torch.tensor([[600.0]]).to(dtype), 0.1, origin=600.0)


def test_far_positions_in_float32_are_voxels_with_a_warning():
    points = torch.tensor([[4e6, 0.0], [4e6 + 0.25, 0.0]])
    with pytest.warns(UserWarning, match=r"numbers near 4e\+06 are 0.25 apart, but voxels are 0.1 wide"):
        assert len(sc.voxelize(points, 0.1)[0]) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sc.voxelize(points, 0.25)
        sc.voxelize(points.double(), 0.1)
        sc.voxelize(torch.zeros(2, 2), 0.1)


def rows_of(scenes: list[int], seed: int = 0) -> torch.Tensor:
    """Sorted voxels in 3 axes of scenes of so many points, the batch item first."""
    generator = torch.Generator().manual_seed(seed)
    items = [torch.unique(torch.randint(0, 20, (count, 3), generator=generator), dim=0) for count in scenes]
    return torch.cat([torch.nn.functional.pad(item, (1, 0), value=b) for b, item in enumerate(items)])


@pytest.mark.parametrize("scenes", [[3000], [900, 5, 700]])
def test_a_batch_column_that_comes_last_is_noticed(scenes):
    first = rows_of(scenes)
    last = first.roll(-1, 1)
    with pytest.warns(UserWarning, match=r"20 batch items.*last column is.*coords.roll\(1, 1\).*batch_size=") as seen:
        VoxelGrid(last)
    assert seen[0].filename == __file__
    assert torch.equal(last.roll(1, 1), first)
    with pytest.raises(ValueError, match=r"batch item 19, but batch_size is .*coords.roll\(1, 1\)"):
        VoxelGrid(last, batch_size=len(scenes))
    with pytest.raises(ValueError, match=r"start at 0; got -1\..*coords.roll\(1, 1\)"):
        VoxelGrid(last - torch.tensor([1, 0, 0, 0]))


def test_a_batch_column_that_comes_first_is_not_warned_of():
    many = rows_of([60] * 12)
    flat = torch.unique(many * torch.tensor([1, 1, 1, 0]), dim=0)  # all scenes in the plane 0 of the last axis
    low = torch.unique(many // torch.tensor([1, 1, 1, 5]), dim=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for coords in (rows_of([3000]), many, low, low[torch.randperm(len(low))], many[:0], many[:1]):
            VoxelGrid(coords)
        VoxelGrid(flat, batch_size=12)
        VoxelGrid(torch.tensor([[0, 0, 0], [1, 0, 0]]))
        VoxelGrid.cat([VoxelGrid(flat, 12), VoxelGrid(flat, 12)]).coarsen(2).to("cpu")


def test_the_limit_of_coordinates_is_the_stated_one():
    VoxelGrid(torch.tensor([[0, 2**31 - 2]]))
    for value in (2**31 - 1, 2**31):
        with pytest.raises(ValueError, match=f"from -2147483648 to 2147483646.*got values from .* to {value}"):
            VoxelGrid(torch.tensor([[0, value]]))


def test_a_volume_without_batch_is_noticed():
    volume = torch.zeros(8, 8, 8)
    volume[2:4, 2:4, 2:4] = 1
    for make in (VoxelGrid.from_dense, sc.SparseTensor.from_dense):
        with pytest.warns(
            UserWarning, match=r"8 batch items of 8 channels along one axis.*dense\[None, None\]"
        ) as seen:
            make(volume)
        assert seen[0].filename == __file__
        with pytest.raises(ValueError, match=r"rank=3 spatial axes; got \(8, 8, 8\)"):
            make(volume, rank=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(volume, rank=1)
            make(volume[None, None], rank=3)
    assert len(sc.SparseTensor.from_dense(volume[None, None]).grid) == 8


@pytest.mark.parametrize(
    "make",
    [
        lambda f, c: spconv.SparseConvTensor(f, c, [9, 9, 9], 1),
        ME.SparseTensor,
        ME.TensorField,
        torchsparse.SparseTensor,
    ],
)
def test_features_and_coordinates_that_are_exchanged(make):
    coords = rows_of([50]).int()
    features = torch.randn(len(coords), 4)
    make(features, coords)
    with pytest.raises(TypeError, match=r"features first, but they are torch.int32 .* torch.float32: exchange the two"):
        make(coords, features)
