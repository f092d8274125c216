"""Convolution modules against torch's dense ones on full grids, and how they find their plans."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.plan import shared_plan
from tests.cases import Case, error, random_grid

CONV = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
CONV_TRANSPOSE = {1: torch.nn.ConvTranspose1d, 2: torch.nn.ConvTranspose2d, 3: torch.nn.ConvTranspose3d}


def full(rank: int, channels: int, extent: int = 5) -> tuple[torch.Tensor, sc.SparseTensor]:
    """The same numbers dense and sparse, with a gradient to the dense ones."""
    dense = torch.randn(2, channels, *(extent,) * rank, dtype=torch.float64, requires_grad=True)
    grid = sc.VoxelGrid(torch.ones_like(dense[:, 0]).nonzero())
    return dense, sc.SparseTensor(grid, dense.movedim(1, -1).reshape(-1, channels))


def copy_from(module: nn.SparseModule, dense: torch.nn.Module, transposed: bool = False) -> None:
    """torch's (C_out, C_in/G, *kernel), or (C_in, C_out/G, *kernel) of a transposed layer, into (K, C_in/G, C_out)."""
    weight, groups = dense.weight.detach(), dense.groups
    if transposed:
        c_in, c_out = weight.shape[:2]
        weight = weight.reshape(groups, c_in // groups, c_out, -1).permute(3, 1, 0, 2).flatten(2)
    else:
        weight = weight.flatten(2).permute(2, 1, 0)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(dense.bias)


def sparse(channels: int = 4, rank: int = 3, voxels: int = 50, dtype=torch.float32) -> sc.SparseTensor:
    grid = random_grid(Case("any", rank=rank, voxels=voxels, extent=6))
    return sc.SparseTensor(grid, torch.randn(len(grid), channels, dtype=dtype))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "dilation", "groups"), [(3, 1, 1), (5, 1, 1), (3, 2, 2), (1, 1, 4)])
def test_submanifold_equals_torch(rank, kernel, dilation, groups):
    dense, x = full(rank, 4)
    theirs = CONV[rank](4, 8, kernel, padding="same", dilation=dilation, groups=groups, dtype=torch.float64)
    ours = nn.SubmanifoldConv(4, 8, kernel, dilation=dilation, groups=groups, rank=rank, dtype=torch.float64)
    copy_from(ours, theirs)
    check(ours(x), theirs(dense), dense, ours, theirs)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "groups"), [(2, 2, 1), (3, 2, 2), (2, 3, 1)])
def test_strided_equals_torch(rank, kernel, stride, groups):
    dense, x = full(rank, 4)
    theirs = CONV[rank](4, 6, kernel, stride, groups=groups, dtype=torch.float64)
    ours = nn.Conv(
        *(4, 6, kernel), stride=stride, groups=groups, padding=0, boundary="forbid", rank=rank, dtype=torch.float64
    )
    copy_from(ours, theirs)
    check(ours(x), theirs(dense), dense, ours, theirs)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "groups"), [(2, 2, 1), (3, 2, 2), (3, 1, 1)])
def test_transposed_equals_torch(rank, kernel, stride, groups):
    dense, x = full(rank, 4, 4)
    theirs = CONV_TRANSPOSE[rank](4, 6, kernel, stride, groups=groups, dtype=torch.float64)
    ours = nn.ConvTranspose(*(4, 6, kernel), stride=stride, groups=groups, padding=0, rank=rank, dtype=torch.float64)
    copy_from(ours, theirs, transposed=True)
    check(ours(x), theirs(dense), dense, ours, theirs)


def check(got: sc.SparseTensor, want: torch.Tensor, dense: torch.Tensor, ours, theirs) -> None:
    """Values and the gradients of the input, the weight (in sum, its layout being another) and the bias."""
    got = got.to_dense(want.shape[2:])
    assert error(got, want) < 1e-12
    grad = torch.randn_like(want)
    mine = torch.autograd.grad(got, (dense, ours.weight, ours.bias), grad, retain_graph=True)
    other = torch.autograd.grad(want, (dense, theirs.weight, theirs.bias), grad)
    assert error(mine[0], other[0]) < 1e-12
    assert error(mine[1].flatten().sort().values, other[1].flatten().sort().values) < 1e-10
    assert error(mine[2], other[2]) < 1e-10


def test_the_inverse_goes_back_over_the_edges_of_its_encoder():
    x = sparse()
    down, up = nn.Conv(4, 8, 2, stride=2), nn.InverseConv(8, 4, 2, stride=2)
    coarse = nn.SubmanifoldConv(8, 8, 3)(down(x))
    y = up(coarse, onto=x)
    assert y.grid is x.grid
    plan = shared_plan(x.grid, 2, stride=2)
    assert plan.target is coarse.grid
    assert torch.equal(y.features, plan.transpose().execute(coarse.features, up.weight, up.bias))
    assert up(coarse, onto=x.grid).grid is x.grid


def test_the_inverse_of_a_full_and_of_a_given_target():
    x = sparse()
    wide = nn.Conv(4, 8, 3, target="full")(x)
    assert len(wide.grid) > len(x.grid)
    assert nn.InverseConv(8, 4, 3, target="full")(wide, onto=x).grid is x.grid
    given = x.grid.coarsen(2)
    coarse = nn.Conv(4, 8, 3, stride=2)(x, target=given)
    assert coarse.grid is given
    assert nn.InverseConv(8, 4, 3, stride=2)(coarse, onto=x).grid is x.grid


@pytest.mark.parametrize("layer", [nn.Conv, nn.InverseConv])
def test_a_layer_is_given_no_target_but_full(layer):
    with pytest.raises(ValueError, match="target is 'full' or None here"):
        layer(4, 8, 3, target="whole")


def test_the_inverse_refuses_a_grid_that_it_did_not_come_from():
    x = sparse()
    coarse = nn.Conv(4, 8, 2, stride=2)(x)
    with pytest.raises(ValueError, match="the layer that it undoes"):
        nn.InverseConv(8, 4, 3, stride=3)(coarse, onto=x)
    with pytest.raises(TypeError, match="onto="):
        nn.InverseConv(8, 4, 2, stride=2)(coarse)


def test_layers_of_equal_geometry_share_one_map():
    x = sparse(6)
    nn.SubmanifoldConv(6, 6, 3)(x)
    nn.SubmanifoldConv(6, 12, (3, 3, 3), groups=3)(x)
    nn.MaxPool(3, 1)(x)
    maps = {id(plan.kernel_map) for plan in x.grid.derived.values() if isinstance(plan, sc.ConvolutionPlan)}
    assert len(maps) == 1


def test_generative_onto_a_given_grid():
    x = sparse(rank=2)
    target = x.grid.refine(2)
    y = nn.ConvTranspose(4, 3, 2, stride=2, rank=2)(x, target=target)
    assert y.grid is target
    everywhere = nn.ConvTranspose(4, 3, 2, stride=2, rank=2)(x)
    assert set(map(tuple, everywhere.grid.coords.tolist())) == set(map(tuple, target.coords.tolist()))


@pytest.mark.parametrize(
    ("make", "plan_of"),
    [
        (lambda: nn.SubmanifoldConv(4, 6, 3), lambda g: sc.ConvolutionPlan(g, 3)),
        (lambda: nn.Conv(4, 6, 2, stride=2), lambda g: sc.ConvolutionPlan(g, 2, stride=2)),
        (lambda: nn.ConvTranspose(4, 6, 2, stride=2), lambda g: sc.ConvolutionPlan.transposed(g, 2, stride=2)),
        (lambda: nn.MaxPool(2), lambda g: sc.ConvolutionPlan(g, 2, stride=2)),
        (lambda: nn.AvgPool(2), lambda g: sc.ConvolutionPlan(g, 2, stride=2)),
        (lambda: nn.SumPool(2), lambda g: sc.ConvolutionPlan(g, 2, stride=2)),
    ],
)
def test_plain_features_with_a_plan(make, plan_of):
    x, module = sparse(), make()
    plan = plan_of(x.grid)
    y = module(x.features, plan=plan)
    assert isinstance(y, torch.Tensor)
    assert torch.equal(y, module(x).features)
    assert module(x, plan=plan).grid is plan.target
    with pytest.raises(TypeError, match="together with plan="):
        module(x.features)


@pytest.mark.parametrize("voxels", [0, 1])
@pytest.mark.parametrize(
    "module",
    [
        nn.SubmanifoldConv(4, 5, 3),
        nn.Conv(4, 5, 3, stride=2),
        nn.Conv(4, 5, 3, target="full"),
        nn.ConvTranspose(4, 5, 2),
    ],
    ids=lambda m: type(m).__name__,
)
def test_no_voxel_and_one(module, voxels):
    x = sparse(voxels=voxels)
    module.zero_grad()
    y = module(x)
    y.features.sum().backward()
    assert y.channels == 5
    assert y.grid.batch_size == x.grid.batch_size
    assert module.bias.grad.tolist() == [float(len(y.grid))] * 5


def test_weights_start_as_those_of_torch():
    torch.manual_seed(0)
    ours, theirs = nn.SubmanifoldConv(32, 64, 3, groups=2), torch.nn.Conv3d(32, 64, 3, groups=2)
    for a, b in ((ours.weight, theirs.weight), (ours.bias, theirs.bias)):
        bound = (27 * 16) ** -0.5
        assert a.abs().max() <= bound
        assert b.abs().max() <= bound
        assert abs(a.std() / b.std() - 1) < (0.02 if a.numel() > 100 else 0.4)
        assert abs(a.mean()) < 0.2 * bound


def test_state_travels():
    x = sparse()
    module = nn.SubmanifoldConv(4, 6, taps=[(0, 0, 0), (0, 0, 1), (1, 0, 0)], bias=False)
    other = nn.SubmanifoldConv(4, 6, taps=torch.tensor([[0, 0, 0], [0, 0, 1], [1, 0, 0]]), bias=False)
    other.load_state_dict(module.state_dict())
    want = module(x).features
    for same in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same(x).features, want)
    double = module.to(torch.float64)(x.to(dtype=torch.float64))
    assert error(double.features, want.double()) < 2e-5
    assert list(module.state_dict()) == ["weight"]
    assert "4, 6, taps=3, bias=False" in repr(module)


def test_repr_says_what_is_not_the_default():
    module = nn.Conv(4, 6, (3, 1), stride=2, dilation=2, padding=1, groups=2, rank=2)
    assert repr(module) == ("Conv(4, 6, kernel_size=(3, 1), stride=2, dilation=2, padding=1, groups=2, rank=2)")
    assert repr(nn.MaxPool(2)) == "MaxPool(kernel_size=2, stride=2)"


def test_errors_say_what_to_do():
    x, module = sparse(), nn.SubmanifoldConv(4, 6, 3)
    with pytest.raises(TypeError, match="derive from SparseModule"):
        module(x.features)
    with pytest.raises(TypeError, match="takes a SparseTensor"):
        module([1, 2])
    with pytest.raises(ValueError, match="made for 4 channels"):
        module(sparse(5))
    with pytest.raises(ValueError, match="pass rank=2"):
        module(sparse(rank=2))
    with pytest.raises(ValueError, match="multiples of groups"):
        nn.SubmanifoldConv(4, 6, 3, groups=4)
    with pytest.raises(ValueError, match="rank is the number of spatial axes"):
        nn.SubmanifoldConv(4, 6, 3, rank=5)
    with pytest.raises(ValueError, match="either kernel_size"):
        nn.SubmanifoldConv(4, 6)
    with pytest.raises(TypeError, match="no stride"):
        nn.SubmanifoldConv(4, 6, 3, stride=2)
    with pytest.raises(ValueError, match="27"):
        module(x, plan=sc.ConvolutionPlan(x.grid, 5))
    with pytest.raises(ValueError, match="with_groups"):
        module(x, plan=sc.ConvolutionPlan(x.grid, 3, groups=2))
    with pytest.raises(ValueError, match="the plan starts from"):
        module(x, plan=sc.ConvolutionPlan(sparse(voxels=50).grid.sorted()[0], 3))
    with pytest.raises(TypeError, match="expected a VoxelGrid"):
        nn.Conv(4, 6, 2, stride=2)(x, target=3)
