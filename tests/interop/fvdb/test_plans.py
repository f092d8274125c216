"""fVDB's plans against loops over coordinates, torch's dense convolutions and each other."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sparseconv import VoxelGrid
from sparseconv.interop.fvdb import (
    ConvolutionCoverageWarning,
    ConvolutionPlan,
    ConvolutionTopologyPolicy,
    ConvolutionTopologyProvenance,
    GridBatch,
    JaggedTensor,
    convolution_plan,
    nn,
)
from sparseconv.nn import pack
from tests import oracle
from tests.forked import printed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _warnings_are_new():
    convolution_plan._WARNED_INCOMPLETE_COVERAGE_GEOMETRIES.clear()


def grid(device="cpu", items=(40, 0, 25), seed=0, **options):
    """Voxels of a batch, one item of which is empty."""
    gen = torch.Generator().manual_seed(seed)
    cells = [torch.unique(torch.randint(-4, 5, (n, 3), generator=gen), dim=0) for n in items]
    cells = [c[torch.randperm(len(c), generator=gen)].to(device) for c in cells]
    return GridBatch.from_ijk(JaggedTensor(cells), **options)


def rows(grid):
    return grid.voxel_grid.coords.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride"),
    [((3, 3, 3), 1), ((2, 2, 2), 2), ((4, 1, 3), (1, 2, 3)), ((1, 2, 1), (3, 2, 1)), ((1,) * 3, 1)],
)
def test_plans_are_the_relation(kernel, stride, transposed, given, device):
    source = grid(device)
    target = grid(device, (30, 20, 0), 1, voxel_sizes=_scale(stride, transposed)) if given else None
    make = ConvolutionPlan.from_grid_batch_transposed if transposed else ConvolutionPlan.from_grid_batch
    plan = make(kernel, stride, source, target, acknowledge_incomplete_coverage=True)
    step, taps = (stride,) * 3 if isinstance(stride, int) else stride, oracle.window_taps(kernel)
    padding = tuple((k - 1) // 2 for k in kernel)
    found = rows(plan.target_grid_batch)
    if not given:
        wanted = (oracle.fine_voxels if transposed else oracle.coarse_voxels)(rows(source), taps, step, padding)
        assert sorted(map(tuple, found.tolist())) == wanted
    fine, coarse = (found, rows(source)) if transposed else (rows(source), found)
    edges = oracle.edges(fine, coarse, taps, step, padding)
    edges = [(k, c, f) for k, f, c in edges] if transposed else edges
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(source.total_voxels, 2, generator=gen, dtype=torch.float64).to(device).requires_grad_()
    w = torch.randn(5, 2, *kernel, generator=gen, dtype=torch.float64).to(device).requires_grad_()
    y = plan.execute(JaggedTensor.from_data_and_offsets(x, source.joffsets), w)
    assert y.lshape == plan.target_grid_batch.num_voxels.tolist()
    by_tap = w.detach().cpu().flatten(2).permute(2, 1, 0).numpy()
    wanted = oracle.convolve(x.detach().cpu().numpy(), by_tap, edges, len(found))
    assert np.allclose(y.jdata.detach().cpu().numpy(), wanted, atol=1e-12)
    grad = torch.randn(y.jdata.shape, generator=gen, dtype=torch.float64).to(device)
    dx, dw = (t.cpu().numpy() for t in torch.autograd.grad(y.jdata, (x, w), grad))
    assert np.allclose(dx, oracle.input_grad(grad.cpu().numpy(), by_tap, edges, len(x)), atol=1e-12)
    wanted = oracle.weight_grad(x.detach().cpu().numpy(), grad.cpu().numpy(), edges, len(by_tap))
    assert np.allclose(torch.from_numpy(dw).flatten(2).permute(2, 1, 0).numpy(), wanted, atol=1e-12)
    report = plan.coverage_report
    for side, count, column in (("input", len(x), 1), ("output", len(found), 2)):
        degrees = np.bincount([edge[column] for edge in edges], minlength=count)
        kinds, counts = np.unique(degrees, return_counts=True)
        assert getattr(report, f"{side}_degree_histogram") == tuple(zip(kinds.tolist(), counts.tolist()))
        assert getattr(report, f"{side}_zero_count") == int((degrees == 0).sum())
    back = ConvolutionPlan.from_plan_transposed(plan)
    assert np.allclose(
        back.execute(y.jagged_like(grad), w.transpose(0, 1)).jdata.detach().cpu().numpy(), dx, atol=1e-12
    )
    assert back.source_grid_batch is plan.target_grid_batch
    assert back.coverage_report.input_degree_histogram == report.output_degree_histogram
    assert ConvolutionPlan.from_plan_transposed(back).coverage_report is report
    assert back.topology_provenance is ConvolutionTopologyProvenance.EXACT_TRANSPOSE


def _scale(stride, transposed):
    step = torch.tensor(stride, dtype=torch.float64).expand(3)
    return 1 / step if transposed else step


def test_a_plan_of_this_librarys_grids_is_torchs_convolution():
    coords = (torch.rand(1, 6, 7, 5, generator=torch.Generator().manual_seed(0)) < 0.4).nonzero().int()
    own = VoxelGrid(coords, voxel_size=0.1)
    plan = ConvolutionPlan.from_grid_batch(3, 1, own, own)
    assert plan.source_grid_batch.voxel_grid is own
    assert plan.has_fixed_topology
    x, w = torch.randn(len(own), 3, dtype=torch.float64), torch.randn(4, 3, 3, 3, 3, dtype=torch.float64)
    volume = own.to_dense(x, (6, 7, 5))
    wanted = F.conv3d(volume, w, padding=1).permute(0, 2, 3, 4, 1)[tuple(coords.long().t())]
    assert torch.allclose(plan.execute(x, w), wanted)
    coarse = ConvolutionPlan.from_grid_batch(2, 2, own, own.coarsen(2), strict_output_coverage=True)
    assert coarse.transform_compatibility.compatible


def test_derivatives_of_any_order():
    source = grid(items=(5,))
    plan = ConvolutionPlan.from_grid_batch(2, 2, source)
    x = torch.randn(source.total_voxels, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plan.execute, (x, w))
    assert torch.autograd.gradgradcheck(plan.execute, (x, w))


def test_what_a_plan_says_of_itself():
    source = grid(voxel_sizes=[0.5, 1.0, 2.0], origins=[3.0, -2.0, 7.0])
    plan = ConvolutionPlan.from_grid_batch((4, 3, 2), 2, source, channel_pairs=((2, 3), (4, 5)))
    assert plan.geometry.padding_before == [1, 1, 0]
    assert plan.geometry.padding_after == [2, 1, 1]
    assert plan.geometry.kernel_volume == 24
    assert plan.kernel_size.tolist() == [4, 3, 2]
    assert plan.topology_policy is ConvolutionTopologyPolicy.COMPLETE
    assert plan.valid_usage(2, 3, (4, 3, 2), 2, False)
    assert not plan.valid_usage(3, 2, (4, 3, 2), 2, False)
    assert not plan.valid_usage(2, 3, (4, 3, 2), 2, True)
    assert not plan.valid_usage(2, 3, (4, 3, 2), 1, False)
    assert not plan.valid_usage(2, 3, 4, 2, False)
    assert ConvolutionPlan.from_plan_transposed(plan).valid_usage(3, 2, (4, 3, 2), 2, True)
    target = plan.target_grid_batch
    assert target.voxel_sizes.tolist() == [[1, 2, 4]] * 3
    assert target.origins.tolist() == source.origins.tolist()
    assert ConvolutionPlan.from_grid_batch(1, 1, source).target_grid_batch is source


def test_layers_take_fvdbs_weights():
    source = grid()
    x = JaggedTensor.from_data_and_offsets(torch.randn(source.total_voxels, 2), source.joffsets)
    down = ConvolutionPlan.from_grid_batch(2, 2, source)
    layer, back = nn.SparseConv3d(2, 3, 2, 2), nn.SparseConvTranspose3d(3, 2, 2, 2)
    y = layer(x, down)
    assert torch.equal(y.jdata, down.execute(x, layer.weight).jdata + layer.bias)
    assert back(y, ConvolutionPlan.from_plan_transposed(down)).lshape == x.lshape
    one = nn.SparseConv3d(2, 3, 1, bias=False)
    assert {name: tuple(value.shape) for name, value in one.state_dict().items()} == {"weight": (3, 2)}
    plan = ConvolutionPlan.from_grid_batch(1, 1, source)
    assert torch.allclose(one(x, plan).jdata, x.jdata @ one.weight.t(), atol=1e-6)
    for packed, geometry in ((layer, down), (one, plan)):
        want = packed(x, geometry).jdata
        pack(packed)
        assert torch.equal(packed(x, geometry).jdata, want)
        assert packed.weight.permute(*range(2, packed.weight.ndim), 1, 0).is_contiguous()
    with pytest.raises(ValueError, match="another layer"):
        back(y, down)


def test_windows_with_gaps_are_warned_of_once():
    source = grid()
    with pytest.warns(ConvolutionCoverageWarning, match=r"axes \[0\]"):
        ConvolutionPlan.from_grid_batch((1, 2, 2), 2, source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ConvolutionPlan.from_grid_batch((1, 2, 2), 2, source)
        ConvolutionPlan.from_grid_batch((1, 1, 2), 2, source, acknowledge_incomplete_coverage=True)
        ConvolutionPlan.from_grid_batch(3, 2, source)


def test_empty():
    none = GridBatch.from_ijk(JaggedTensor(torch.zeros(0, 3, dtype=torch.int64)))
    for make in (ConvolutionPlan.from_grid_batch, ConvolutionPlan.from_grid_batch_transposed):
        plan = make(3, 2, none)
        assert plan.execute(torch.zeros(0, 2), torch.zeros(4, 2, 3, 3, 3)).shape == (0, 4)
        assert plan.coverage_report.input_degree_histogram == ()
        assert plan.coverage_report.output_zero_fraction == 0


def test_rows_of_a_batch():
    jagged = JaggedTensor([torch.ones(2, 3), torch.zeros(0, 3), torch.ones(1, 3)])
    assert (jagged.lshape, jagged.jidx.tolist(), len(jagged)) == ([2, 0, 1], [0, 0, 2], 3)
    assert ((jagged + jagged) * 2 - 1).jdata.tolist() == [[3.0] * 3] * 3
    assert (jagged - JaggedTensor(jagged.unbind())).jdata.abs().sum() == 0
    assert (jagged / 2)[2].jdata.tolist() == [[0.5] * 3]
    assert jagged.to(torch.float16).dtype == torch.float16
    twice = GridBatch.from_ijk(JaggedTensor([torch.tensor([[0, 0, 1], [0, 0, 0], [0, 0, 1]])]))
    assert twice.ijk.jdata.tolist() == [[0, 0, 1], [0, 0, 0]]


def _wrong():
    source, other = grid(), grid(items=(40, 3))
    x, w = torch.ones(source.total_voxels, 2), torch.ones(3, 2, 3, 3, 3)
    make = ConvolutionPlan.from_grid_batch
    plan = make(3, 1, source, channel_pairs=((2, 3),))
    jagged = JaggedTensor.from_data_and_offsets(x, source.joffsets)
    turned = JaggedTensor(list(x.split(jagged.lshape[::-1])))
    complete, restricted = ConvolutionTopologyPolicy
    apart = grid(origins=[1.0, 0.0, 0.0], voxel_sizes=2)
    half = grid(origins=[0.5, 0.0, 0.0], voxel_sizes=2)
    far = GridBatch.from_ijk(JaggedTensor([torch.tensor([[99, 99, 99]])] * 3))
    return [
        (lambda: make(3, 2, source, other), ValueError, "same batch size"),
        (lambda: make(3, 2, source, source), ValueError, "voxel size mismatch"),
        (lambda: make(3, 2, source, apart), ValueError, "nonzero integer"),
        (lambda: make(3, 2, source, half), ValueError, "fractional"),
        (lambda: make(3, 2, source, source.coarsened_grid(2)), ValueError, "fractional"),
        (lambda: make(3, 3, source, source.coarsened_grid(3)), ValueError, "nonzero integer"),
        (lambda: make(0, 1, source), ValueError, "kernel_size"),
        (lambda: make(3, (1, 2), source), ValueError, "stride"),
        (lambda: make(3, 1, source.ijk), TypeError, "source_grid"),
        (lambda: make(3, 1, source, topology_policy=restricted), ValueError, "explicit target_grid"),
        (lambda: make(3, 1, source, source, topology_policy=complete), ValueError, "target_grid=None"),
        (lambda: make(3, 1, source, topology_policy="complete"), TypeError, "ConvolutionTopologyPolicy"),
        (lambda: make(3, 1, source, expert_config={"backend": "dense"}), ValueError, "disabled"),
        (lambda: make(3, 1, source, expert_config={"backend": "fast"}), ValueError, "backend"),
        (lambda: make(3, 1, source, channel_pairs=((2, 0),)), ValueError, "channel_pairs"),
        (lambda: make(3, 1, source, far, strict_output_coverage=True), ValueError, "3 zero-degree output"),
        (lambda: plan.execute(x, w), ValueError, "3 batch items"),
        (lambda: plan.execute(JaggedTensor(x), w), ValueError, "3 batch items"),
        (lambda: plan.execute(turned, w), ValueError, "those of the source"),
        (lambda: jagged + turned, ValueError, "those of the other"),
        (lambda: plan.execute(jagged, w[..., 0]), ValueError, "weights must be"),
        (lambda: plan.execute(jagged, w.transpose(0, 1)), ValueError, "channel pairs"),
        (lambda: plan.execute(jagged.to(torch.float64), w), TypeError, "cast one"),
        (lambda: plan.execute([x], w), TypeError, "data"),
        (lambda: ConvolutionPlan.from_plan_transposed(plan.plan), TypeError, "plan"),
        (lambda: GridBatch.from_ijk(torch.zeros(1, 3)), TypeError, "ijk"),
        (lambda: GridBatch.from_ijk(JaggedTensor(torch.zeros(1, 3))), ValueError, "integers"),
        (lambda: grid(voxel_sizes=0), ValueError, "positive"),
        (lambda: grid(voxel_sizes=[1.0, 2.0]), ValueError, "one number, three"),
        (lambda: GridBatch.from_voxel_grid(VoxelGrid(torch.zeros(1, 3).int())), ValueError, "three axes"),
        (lambda: JaggedTensor([torch.ones(1, 2), torch.ones(1, 3)]), ValueError, "rows alone"),
        (lambda: JaggedTensor([]), TypeError, "made of a tensor"),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_places_in_voxels_and_as_lengths(device):
    sizes, origins = torch.tensor([[0.5, 1, 2], [1, 1, 1], [0.25, 3, 1]]), torch.tensor([[3.0, -2, 7]]).expand(3, 3)
    voxels = grid(device, voxel_sizes=sizes, origins=origins)
    cells = JaggedTensor([torch.tensor([[1.0, -2, 3], [0, 0, 0]]), torch.zeros(0, 3), torch.tensor([[2.0, 1, -1]])])
    cells = cells.to(device)
    cells.jdata.requires_grad_()
    places = voxels.voxel_to_world(cells)
    assert places.jdata.tolist() == [[3.5, -4, 13], [3, -2, 7], [3.5, 1, 6]]
    assert torch.equal(voxels.world_to_voxel(places).jdata, cells.jdata)
    places.jdata.sum().backward()
    assert torch.equal(cells.jdata.grad.cpu(), sizes[[0, 0, 2]])
    assert voxels.voxel_to_world(voxels.ijk).dtype == torch.float32
    coarse = voxels.conv_grid(2, 2)
    twice = JaggedTensor([part * 2 for part in cells.unbind()])
    assert torch.equal(coarse.voxel_to_world(cells).jdata, voxels.voxel_to_world(twice).jdata)
    with pytest.raises(ValueError, match="3 items"):
        voxels.voxel_to_world(JaggedTensor([torch.zeros(2, 3)]))


def test_what_is_wrong_is_said():
    for call, kind, words in _wrong():
        with pytest.raises(kind, match=words):
            call()


@pytest.mark.parametrize("ends", [[0, 2], [1, 5], [0, 4, 2, 5], [[0, 5]], [5], [0.0, 5.0]])
def test_offsets_are_looked_at(ends):
    """Rows past the last end belonged to no item, and nobody missed them."""
    data = torch.randn(5, 2)
    with pytest.raises(ValueError, match="offsets must"):
        JaggedTensor.from_data_and_offsets(data, torch.tensor(ends))
    assert JaggedTensor.from_data_and_offsets(data, torch.tensor([0, 2, 2, 5])).lshape == [2, 0, 3]
    with pytest.raises(ValueError, match="1 voxels"):
        GridBatch.from_ijk(JaggedTensor(torch.zeros(1, 3).int())).jagged_like(torch.tensor(1.0))


def test_install():
    code = """
import sys
from sparseconv.interop import fvdb as ours
ours.install()
import fvdb
import fvdb.nn as fvnn
from fvdb import ConvolutionPlan, GridBatch, JaggedTensor
from fvdb.convolution_plan import ConvolutionCoverageReport
assert fvdb is ours and fvnn.SparseConv3d is ours.nn.SparseConv3d
ours.uninstall()
assert not [name for name in sys.modules if name.split(".")[0] == "fvdb"]
"""
    printed("-c", code)


def test_a_trace_of_tensors_is_refused():
    def run(x, ijk):
        grid = GridBatch.from_ijk(JaggedTensor(ijk))
        return ConvolutionPlan.from_grid_batch(3, 1, grid, grid).execute(x, torch.ones(2, 4, 3, 3, 3))

    with pytest.raises(RuntimeError, match=r"use torch\.export"):
        torch.jit.trace(run, (torch.ones(2, 4), torch.tensor([[0, 0, 0], [0, 0, 1]])))
