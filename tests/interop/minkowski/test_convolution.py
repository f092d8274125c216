"""Every convolution against loops over coordinates: voxels, values, gradients, the place of every tap."""

from __future__ import annotations

import pytest
import torch

import sparseconv.interop.minkowski as ME
from tests.interop.minkowski.meaning import as_set, check_convolution, cloud, cross, cube, edges, strided

R = ME.RegionType


def tensor(requires_grad=True, **options):
    features, coords = cloud(**options)
    stride = options.get("stride", 1)
    return ME.SparseTensor(features.requires_grad_(requires_grad), coords, tensor_stride=stride)


CASES = [
    (3, 3, 1, 1, 1),
    (3, (2, 3, 1), (2, 1, 3), 1, 1),
    (3, 2, 2, 1, 2),
    (3, 3, 2, 2, 1),
    (3, 3, (2, 1, 2), 1, (2, 4, 6)),
    (3, 5, 3, 1, 1),
    (3, 1, 2, 1, 1),
    (3, 4, 1, 3, 2),
    (1, 3, 2, 1, 1),
    (2, (5, 2), 2, (2, 1), 1),
    (4, (3, 1, 2, 3), (1, 2, 2, 1), 1, 1),
]


def axes(value, rank):
    return (value,) * rank if isinstance(value, int) else value


@pytest.mark.parametrize(("rank", "kernel", "stride", "dilation", "tensor_stride"), CASES)
def test_convolution(rank, kernel, stride, dilation, tensor_stride):
    size, step, gap, start = (axes(v, rank) for v in (kernel, stride, dilation, tensor_stride))
    x = tensor(rank=rank, stride=start)
    layer = ME.MinkowskiConvolution(3, 4, kernel, stride, dilation, bias=True, dimension=rank).double()
    y = layer(x)
    coarse = [a * b for a, b in zip(start, step)]
    assert y.tensor_stride == coarse
    assert as_set(y.C) == strided(x.C, coarse)
    if max(step) == 1:
        assert y.coordinate_map_key == x.coordinate_map_key
        assert torch.equal(y.C, x.C)
    check_convolution(layer, x, y, edges(x.C, y.C, cube(size), [a * b for a, b in zip(gap, start)]))


@pytest.mark.parametrize(("rank", "kernel", "stride", "dilation", "tensor_stride"), CASES)
def test_transposed_convolution_onto_the_encoders_voxels(rank, kernel, stride, dilation, tensor_stride):
    size, gap, start = (axes(v, rank) for v in (kernel, dilation, tensor_stride))
    x = tensor(rank=rank, stride=start)
    down = ME.MinkowskiConvolution(3, 5, kernel, stride, dilation, dimension=rank).double()(x)
    down = down.like(torch.randn(len(down), 5, dtype=torch.float64, requires_grad=True))
    layer = ME.MinkowskiConvolutionTranspose(5, 4, kernel, stride, dilation, bias=True, dimension=rank).double()
    y = layer(down)
    assert y.coordinate_map_key == x.coordinate_map_key
    found = edges(y.C, down.C, cube(size), [a * b for a, b in zip(gap, start)])
    check_convolution(layer, down, y, found, transposed=True)


@pytest.mark.parametrize("kernel", [(2, 2, 2), (3, 3, 3), (2, 3, 4)])
@pytest.mark.parametrize("kind", [ME.MinkowskiConvolutionTranspose, ME.MinkowskiGenerativeConvolutionTranspose])
def test_transposed_convolution_onto_new_voxels(kernel, kind):
    x = tensor(points=12, stride=4)
    layer = kind(3, 4, kernel, 2, dimension=3).double()
    y = layer(x)
    assert y.tensor_stride == [2, 2, 2]
    taps = [tuple(2 * t for t in tap) for tap in cube(kernel)]
    wanted = {(int(b), *(int(c) + t for c, t in zip(at, tap))) for b, *at in x.C.tolist() for tap in taps}
    assert as_set(y.C) == wanted
    check_convolution(layer, x, y, edges(y.C, x.C, cube(kernel), (2, 2, 2)), transposed=True)
    again = kind(3, 4, kernel, 2, dimension=3).double()(x)
    new = kind is ME.MinkowskiGenerativeConvolutionTranspose
    assert (again.coordinate_map_key != y.coordinate_map_key) == new, "generative layers make voxels every time"


def test_every_tap_has_its_place():
    """An impulse in each tap of an asymmetric kernel moves a single voxel by that tap."""
    for region, kernel, taps in ((R.HYPER_CUBE, (3, 2, 5), cube), (R.HYPER_CROSS, (3, 1, 5), cross)):
        generator = ME.KernelGenerator(kernel, region_type=region, dimension=3)
        layer = ME.MinkowskiConvolution(1, 1, kernel_generator=generator, dimension=3)
        assert generator.taps().tolist() == [list(tap) for tap in taps(kernel)]
        whole = torch.cartesian_prod(*[torch.arange(-5, 6)] * 3)
        coords = torch.cat([torch.zeros(len(whole), 1), whole], 1).int()
        lone = (whole == torch.tensor([1, -1, 2])).all(1)
        x = ME.SparseTensor(lone[:, None].float(), coords)
        for place, tap in enumerate(taps(kernel)):
            with torch.no_grad():
                layer.kernel.zero_()[place] = 1
            out = layer(x)
            assert out.C[out.F[:, 0] == 1, 1:].tolist() == [[1 - tap[0], -1 - tap[1], 2 - tap[2]]]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_cross(stride):
    x = tensor(stride=2)
    kernel = ME.KernelGenerator((3, 5, 1), stride, 2, region_type=R.HYPER_CROSS, dimension=3)
    assert ME.KernelGenerator((3, 5, 1), stride, 2, region_type=1, dimension=3).region_type is kernel.region_type
    layer = ME.MinkowskiConvolution(3, 4, kernel_generator=kernel, dimension=3).double()
    assert layer.kernel.shape == (7, 3, 4)
    y = layer(x)
    check_convolution(layer, x, y, edges(x.C, y.C, cross((3, 5, 1)), (4, 4, 4)))


def test_custom_taps():
    taps = torch.tensor([[0, 0], [2, -1], [0, 3]])
    x = tensor(rank=2, stride=(2, 1))
    kernel = ME.KernelGenerator(3, region_type=R.CUSTOM, region_offsets=taps, dimension=2)
    layer = ME.MinkowskiConvolution(3, 4, kernel_generator=kernel, dimension=2).double()
    check_convolution(layer, x, layer(x), edges(x.C, x.C, [tuple(t) for t in taps.tolist()], (2, 1)))


def test_a_cube_in_space_and_a_cross_in_time():
    types = [R.HYPER_CUBE, R.HYPER_CUBE, R.HYPER_CROSS]
    kernel = ME.KernelGenerator(3, region_type=R.HYBRID, axis_types=types, dimension=3)
    plane = [(0, 0), (-1, 0), (1, 0), (0, -1), (-1, -1), (1, -1), (0, 1), (-1, 1), (1, 1)]
    # centre, copies along axis 0, then copies of all those along axis 1: per tap -1 and +1; arms at last
    wanted = [(0, 0, 0), (-1, 0, 0), (1, 0, 0)]
    wanted += [(a, b, 0) for a in (0, -1, 1) for b in (-1, 1)] + [(0, 0, -1), (0, 0, 1)]
    assert {tap[:2] for tap in wanted[:9]} == set(plane)
    assert kernel.taps().tolist() == [list(tap) for tap in wanted]
    x = tensor()
    layer = ME.MinkowskiConvolution(3, 4, kernel_generator=kernel, dimension=3).double()
    check_convolution(layer, x, layer(x), edges(x.C, x.C, wanted, (1, 1, 1)))


def test_outputs_at_given_coordinates():
    x = tensor()
    _, coords = cloud(seed=5, stride=2, batch=1)
    layer = ME.MinkowskiConvolution(3, 4, 3, 2, dimension=3).double()
    y = layer(x, coords)
    assert y.tensor_stride == [2, 2, 2]
    assert torch.equal(y.C, coords)
    check_convolution(layer, x, y, edges(x.C, coords, cube((3, 3, 3)), (1, 1, 1)))
    by_key, by_tensor = layer(x, y.coordinate_map_key), layer(x, y)
    assert torch.equal(by_key.F, y.F)
    assert torch.equal(by_tensor.F, y.F)
    assert by_key.coordinate_map_key == y.coordinate_map_key
    one = ME.MinkowskiConvolution(3, 4, 1, dimension=3).double()
    some = torch.cat([x.C[::3], coords[:5]])
    there = (some[:, None] == x.C).all(2).double()
    assert torch.allclose(one(x, some).F, there @ x.F @ one.kernel)
    with pytest.raises(TypeError, match="SparseTensor"):
        layer(x, [1, 2])


def test_coordinates_that_are_no_multiples_of_the_tensor_stride():
    features, coords = cloud()
    x = ME.SparseTensor(features.requires_grad_(), coords, tensor_stride=2)
    assert torch.equal(x.C, coords)
    layer = ME.MinkowskiConvolution(3, 4, 3, 2, dimension=3).double()
    y = layer(x)
    assert as_set(y.C) == strided(coords, (4, 4, 4))
    check_convolution(layer, x, y, edges(coords, y.C, cube((3, 3, 3)), (2, 2, 2)))
    back = ME.MinkowskiConvolutionTranspose(4, 3, 3, 2, dimension=3).double()
    z = back(y)
    assert z.coordinate_map_key == x.coordinate_map_key
    inner = y.like(y.F.detach().requires_grad_())
    check_convolution(back, inner, back(inner), edges(coords, y.C, cube((3, 3, 3)), (2, 2, 2)), transposed=True)
    up = ME.MinkowskiGenerativeConvolutionTranspose(3, 4, 2, 2, dimension=3).double()
    made = up(x)
    check_convolution(up, x, made, edges(made.C, coords, cube((2, 2, 2)), (1, 1, 1)), transposed=True)


def test_expanded_outputs():
    x = tensor(points=10)
    layer = ME.MinkowskiConvolution(3, 4, 3, 2, expand_coordinates=True, dimension=3).double()
    y = layer(x)
    around = {(b, *(c + t for c, t in zip(at, tap))) for b, *at in x.C.tolist() for tap in cube((3, 3, 3))}
    assert as_set(y.C) == {c for c in around if all(v % 2 == 0 for v in c[1:])}
    check_convolution(layer, x, y, edges(x.C, y.C, cube((3, 3, 3)), (1, 1, 1)))


def test_channelwise():
    x = tensor(stride=2)
    layer = ME.MinkowskiChannelwiseConvolution(3, (2, 3, 1), 2, bias=True, dimension=3).double()
    assert layer.kernel.shape == (6, 3)
    full = ME.MinkowskiConvolution(3, 3, (2, 3, 1), 2, bias=True, dimension=3).double()
    with torch.no_grad():
        full.kernel.copy_(torch.diag_embed(layer.kernel))
        full.bias.copy_(layer.bias)
    y, wanted = layer(x), full(x)
    assert torch.allclose(y.F, wanted.F, atol=1e-12)
    got = torch.autograd.grad(y.F.square().sum(), [x.F, layer.kernel])
    want = torch.autograd.grad(wanted.F.square().sum(), [x.F, full.kernel])
    assert torch.allclose(got[0], want[0], atol=1e-12)
    assert torch.allclose(got[1], want[1].diagonal(dim1=1, dim2=2), atol=1e-12)


def test_layers_share_voxels_and_plans():
    x = tensor(requires_grad=False)
    first = ME.MinkowskiConvolution(3, 4, 2, 2, dimension=3).double()(x)
    second = ME.MinkowskiConvolution(3, 6, 3, 2, dimension=3).double()(x)
    pooled = ME.MinkowskiMaxPooling(2, 2, dimension=3)(x)
    assert first.coordinate_map_key == second.coordinate_map_key == pooled.coordinate_map_key
    manager, kernel = x.coordinate_manager, ME.KernelGenerator(2, 2, dimension=3)
    ends = x.coordinate_map_key, first.coordinate_map_key
    assert manager.plan(*ends, kernel) is manager.plan(*ends, kernel)
    assert manager.plan(*ends, kernel).target is manager.plan(*ends, ME.KernelGenerator(3, 2, dimension=3)).target
    back = manager.plan(*ends[::-1], kernel, True)
    assert back is manager.plan(*ends[::-1], kernel, True)
    assert back.target is manager.plan(*ends, kernel).source


def test_a_submanifold_kernel_is_a_plan_of_its_own_kind():
    """A cube of 3 keeps the order of a plan's taps, so that whatever is fast for those is fast here."""
    x = tensor(requires_grad=False)
    plan = x.coordinate_manager.plan(x.key, x.key, ME.KernelGenerator(3, dimension=3))
    assert plan.kernel_size == (3, 3, 3)
    assert plan.kernel_map.identity_tap == 13


def test_shapes_of_parameters():
    conv = ME.MinkowskiConvolution
    shapes = {n: tuple(p.shape) for n, p in conv(3, 4, 3, bias=True, dimension=3).state_dict().items()}
    assert shapes == {"kernel": (27, 3, 4), "bias": (1, 4)}
    assert tuple(conv(3, 4, 1, dimension=3).kernel.shape) == (3, 4)
    assert tuple(conv(3, 4, 1, 2, dimension=3).kernel.shape) == (1, 3, 4)
    assert conv(3, 4, 3, has_bias=True, dimension=3).bias.shape == (1, 4)


def test_functions_of_features_and_kernel():
    x = tensor()
    layer = ME.MinkowskiConvolution(3, 4, 3, 2, dimension=3).double()
    key = ME.CoordinateMapKey(4)
    args = (layer.kernel_generator, layer.convolution_mode, x.key, key, x.coordinate_manager)
    out = ME.MinkowskiConvolutionFunction.apply(x.F, layer.kernel, *args)
    assert torch.equal(out, layer(x).F)
    assert key.get_tensor_stride() == [2, 2, 2]
    assert torch.autograd.gradgradcheck(
        lambda f, k: ME.MinkowskiConvolutionFunction.apply(f, k, *args), (x.F, layer.kernel), atol=1e-6
    )


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ME.MinkowskiConvolution(3, 4, 3), ValueError, "dimension"),
        (lambda: ME.KernelGenerator(0, dimension=3), ValueError, "kernel_size"),
        (lambda: ME.KernelGenerator([3, 3], dimension=3), ValueError, "3 of them"),
        (lambda: ME.KernelGenerator(3, region_type="cube", dimension=3), TypeError, "region_type"),
        (lambda: ME.KernelGenerator(3, region_type=True, dimension=3), TypeError, "region_type"),
        (lambda: ME.KernelGenerator(3, region_type=7, dimension=3), ValueError, "region_type"),
        (lambda: ME.KernelGenerator(2, region_type=R.HYPER_CROSS, dimension=3), ValueError, "odd"),
        (lambda: ME.KernelGenerator(3, region_type=R.CUSTOM, dimension=3), ValueError, "region_offsets"),
        (lambda: ME.KernelGenerator(3, region_offsets=[[1, 1]], dimension=2), ValueError, "CUSTOM"),
        (lambda: ME.KernelGenerator(3, region_type=R.HYBRID, dimension=2), ValueError, "axis_types"),
        (lambda: ME.MinkowskiConvolution(3, 4, 3, dimension=2)(tensor()), ValueError, "dimension=2"),
        (lambda: ME.MinkowskiConvolution(5, 4, 3, dimension=3)(tensor()), ValueError, "5 channels"),
        (lambda: ME.MinkowskiConvolution(3, 4, 3, dimension=3)(torch.zeros(2, 3)), TypeError, "SparseTensor"),
        (lambda: ME.MinkowskiConvolutionTranspose(3, 4, 2, 2, dimension=3)(tensor()), ValueError, "multiple"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_no_voxel():
    x = ME.SparseTensor(torch.zeros(0, 3), torch.zeros(0, 4, dtype=torch.int32))
    net = torch.nn.Sequential(
        ME.MinkowskiConvolution(3, 4, 3, dimension=3),
        ME.MinkowskiConvolution(4, 5, 2, 2, dimension=3),
        ME.MinkowskiConvolutionTranspose(5, 6, 2, 2, bias=True, dimension=3),
    )
    assert net(x).F.shape == (0, 6)
