"""`quantize`: networks against themselves in floating point, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.backends.float8 import FLOAT8, Float8Rescale
from sparseconv.backends.registry import backend
from sparseconv.quantization.float8 import narrowed
from sparseconv.quantization.layers import Combine, Quantize
from tests.quantization.test_arithmetic import home


def scene(seed: int = 0, channels: int = 4, points: int = 400) -> sc.SparseTensor:
    g = torch.Generator().manual_seed(seed)
    grid, _ = sc.voxelize(torch.rand(points, 3, generator=g), 0.12)
    return sc.SparseTensor(grid, torch.randn(len(grid), channels, generator=g))


def lived_in(net: torch.nn.Module) -> torch.nn.Module:
    """A network whose norms have seen scenes."""
    net.train()
    with torch.no_grad():
        for seed in range(2):
            net(scene(seed))
    return net.eval()


def features(y) -> torch.Tensor:
    return y.features if isinstance(y, sc.SparseTensor) else y


NETWORKS = {
    "unet": lambda: nn.UNet(4, 5, channels=(8, 16)),
    "leaky bottlenecks": lambda: nn.UNet(
        4, 5, channels=(8, 16), block="bottleneck", activation=lambda: nn.LeakyReLU(0.1)
    ),
    "minkunet": lambda: nn.MinkUNet(4, 5, variant="14", planes=(8,) * 8, init_channels=8),
    "spunet": lambda: nn.SpUNet(4, 5, base_channels=8, channels=(8, 16, 16, 8), layers=(1,) * 4),
    "second": lambda: nn.SecondEncoder(4, (9, 9, 9), last_padding=1),
    "voxel resnet": lambda: nn.VoxelResBackBone8x(4, (9, 9, 9), last_padding=1),
    "pools, generative": lambda: nn.Sequential(
        nn.ConvBlock(4, 16),
        nn.MaxPool(2),
        nn.ConvBlock(16, 16),
        nn.AvgPool(2),
        nn.BatchNorm(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(),
        nn.ConvTranspose(16, 8, 2, stride=2),
        nn.LeakyReLU(0.2),
        nn.SumPool(2),
        torch.nn.Linear(8, 3),
    ),
    "groups": lambda: nn.Sequential(nn.ConvBlock(4, 16), nn.ConvBlock(16, 32, groups=2), nn.Linear(32, 3)),
}


SLOW = ("leaky bottlenecks", "minkunet", "spunet", "second")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in NETWORKS])
def test_a_network_in_integers_is_close_and_always_the_same(name):
    torch.manual_seed(0)
    net = lived_in(NETWORKS[name]())
    small, x = sc.quantize(net, [scene(seed) for seed in range(3)]), scene(7)
    with torch.no_grad():
        want, found = features(net(x)), features(small(x))
    assert found.dtype == torch.float32
    assert not small.wide
    assert (found - want).square().mean().sqrt() < 0.04 * want.std()
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert torch.equal(features(small(x)), found)
    finally:
        torch.set_num_threads(threads)
    order = torch.randperm(len(x.grid), generator=torch.Generator().manual_seed(1))
    shuffled = sc.SparseTensor(sc.VoxelGrid(x.coords[order]), x.features[order])
    y, turned = small(x), small(shuffled)
    assert torch.equal(turned.features[turned.grid.lookup(y.coords).long()], y.features)


@pytest.mark.parametrize("backend_name", ["numpy_gather_scatter", "triton_implicit_gemm"])
def test_backends_agree_on_a_network(backend_name):
    torch.manual_seed(0)
    net = lived_in(nn.Sequential(nn.ConvBlock(4, 8), nn.ResidualBlock(8, 8), nn.Linear(8, 3)))
    small, x = sc.quantize(net, [scene()]), scene(7, points=60)
    want = small(x).features
    device = home(backend_name)
    small.use_backend(backend_name)
    assert torch.equal(small.to(device)(scene(7, points=60).to(device)).features.cpu(), want)
    with pytest.raises(ValueError, match="no backend 'none'"):
        small.use_backend("none")


def test_it_copies_pickles_loads_and_moves():
    net = lived_in(NETWORKS["unet"]())
    small, x = sc.quantize(net, [scene()]), scene(7)
    want = small(x).features
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    other = sc.quantize(lived_in(NETWORKS["unet"]()), [scene(3)])
    assert not torch.equal(other(x).features, want)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    copies = [other, copy.deepcopy(small), pickle.loads(pickle.dumps(small)), copy.deepcopy(small).to("cpu")]
    copies += [copy.deepcopy(small).half(), copy.deepcopy(small).double()]
    for one in copies:
        assert torch.equal(one(x).features, want)
    weights = {name: value for name, value in small.state_dict().items() if name.endswith("weight")}
    assert len(weights) == 11
    assert {w.dtype for w in weights.values()} == {torch.int8}
    assert not list(small.parameters())


def test_the_network_stays_as_it_is():
    net = lived_in(NETWORKS["unet"]())
    state, x = copy.deepcopy(net.state_dict()), scene(7)
    with torch.no_grad():
        want = net(x).features
        sc.quantize(net, [scene()])
        assert torch.equal(net(x).features, want)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_layers_are_kept():
    net = lived_in(NETWORKS["unet"]())
    small, x = sc.quantize(net, [scene()], keep=["first", "last", "encoder.1"]), scene(7)
    assert small.wide == ("stem.0", "encoder.1", "head")
    kept = dict(net.named_modules())
    for step in small.steps:
        if step.kind == "wide":
            own = dict(step.layer.named_parameters())
            assert all(torch.equal(value, own[name]) for name, value in kept[step.name].named_parameters())
    with torch.no_grad():
        assert (small(x).features - net(x).features).square().mean().sqrt() < 0.03 * net(x).features.std()


def test_a_percentile_clips():
    net = lived_in(nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.ReLU(), nn.Linear(8, 3)))
    x = scene()
    x.features[0, 0] = 1000
    scales = []
    for percentile in (None, 99.0):
        small = sc.quantize(net, [x], percentile=percentile)
        step = next(step for step in small.steps if isinstance(step, Quantize))
        scales.append(1 / float(step.inverse.view(torch.float32)))
    assert scales[0] == pytest.approx(1000 / 127)
    assert scales[1] < 0.05


def test_a_user_module_with_sums_and_concatenations_of_its_own():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.SubmanifoldConv(4, 8, 3) for _ in range(3))
            self.head = nn.SubmanifoldConv(16, 3, 1)

        def forward(self, x):
            a, b = self.a(x), self.b(x)
            a = torch.nn.functional.leaky_relu(a + self.c(x) * 1 if False else a + b, 0.1)
            return {"scores": self.head(a.cat(b)), "name": "own"}

    torch.manual_seed(0)
    net, x = Own().eval(), scene(7)
    small = sc.quantize(net, [scene()])
    assert any(isinstance(step, Combine) for step in small.steps)
    with torch.no_grad():
        want, found = net(x), small(x)
    assert found["name"] == "own"
    assert (found["scores"].features - want["scores"].features).abs().max() < 0.05 * want["scores"].features.std() * 3


def test_what_has_no_integer_form_is_named():
    net = nn.Sequential(nn.ConvBlock(4, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    with pytest.raises(ValueError) as caught:
        sc.quantize(net, [scene()])
    assert "keep=['1', '3']" in str(caught.value)
    assert "gelu" in str(caught.value)
    small = sc.quantize(net, [scene()], keep=["1", "3"])
    assert small.wide == ("1", "3")
    with torch.no_grad():
        assert (small(scene()).features - net(scene()).features).abs().max() < 0.2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scenes": []}, "at least one scene"),
        ({"keep": ["nothing"]}, r"keep names \['nothing'\]"),
        ({"percentile": 20}, "percentile is above 50"),
        ({"net": nn.UNet(4, 5, channels=(8,))}, "is in training: call net.eval"),
    ],
)
def test_wrong_arguments(change, words):
    given = {"net": nn.UNet(4, 5, channels=(8,)).eval(), "scenes": [scene()]} | change
    with pytest.raises(ValueError, match=words):
        sc.quantize(given.pop("net"), given.pop("scenes"), **given)


def test_numbers_that_are_not_finite_do_not_calibrate():
    x = scene()
    x.features[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        sc.quantize(nn.SubmanifoldConv(4, 8, 3).eval(), [x])


def test_a_layer_whose_sums_could_overflow_is_named():
    net = nn.Sequential(nn.SubmanifoldConv(4, 5000, 1), nn.SubmanifoldConv(5000, 1, 3)).eval()
    with pytest.raises(ValueError, match="27 taps of 5000 channels per group"):
        sc.quantize(net, [scene(points=5)])


def test_there_is_no_gradient():
    small, x = sc.quantize(lived_in(NETWORKS["unet"]()), [scene()]), scene(7)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="has no gradient"):
        small(x)
    with torch.no_grad():
        small(x)
    with pytest.raises(TypeError, match="takes a SparseTensor in floating point"):
        small(x.features)


def test_an_empty_scene():
    small = sc.quantize(lived_in(NETWORKS["unet"]()), [scene()])
    grid = sc.VoxelGrid(torch.zeros(0, 4, dtype=torch.int32), 1)
    assert small(sc.SparseTensor(grid, torch.zeros(0, 4))).features.shape == (0, 5)


@pytest.mark.parametrize("name", ["unet", "pools, generative"])
def test_a_network_in_float8(name):
    torch.manual_seed(0)
    net = lived_in(NETWORKS[name]())
    small, x = sc.quantize(net, [scene(seed) for seed in range(3)], dtype="fp8"), scene(7)
    with torch.no_grad():
        want, found = features(net(x)), features(small(x))
    assert (found - want).square().mean().sqrt() < 0.1 * want.std()
    copies = [pickle.loads(pickle.dumps(small)), copy.deepcopy(small).half()]
    copies[0].load_state_dict(small.state_dict())
    for one in copies:
        assert torch.equal(features(one(x)), found)


def test_float8_is_put_side_by_side_as_bytes():
    """Values that are put side by side share a scale, and the result is what rescaling them on fp32 gives."""
    torch.manual_seed(0)
    small = sc.quantize(lived_in(nn.UNet(4, 5, channels=(16, 16, 16))), [scene()], dtype="fp8")
    steps = [step for step in small.modules() if getattr(step, "operation", "") == "cat"]
    assert len(steps) == 2
    for step in steps:
        assert len({*step.scales}) == 1
        bits = torch.arange(256, dtype=torch.uint8)
        every = bits[~bits.view(FLOAT8).isnan()].view(FLOAT8)[:, None]
        grid = sc.VoxelGrid(torch.nn.functional.pad(torch.arange(len(every))[:, None], (1, 2)), 1)
        values = {
            slot: sc.SparseTensor(grid, every if at else every.view(torch.uint8).flip(0).view(FLOAT8))
            for at, slot in enumerate(step.inputs)
        }
        found = step.run(values).features
        assert found.dtype == FLOAT8
        wide = torch.cat([values[slot].features.float() * step.scales[0] for slot in step.inputs], 1)
        assert torch.equal(found.float(), narrowed(wide / step.scales[0]).float())


def test_dtypes_that_there_are():
    with pytest.raises(ValueError, match=r"dtype is torch\.int8 or torch\.float8_e4m3fn"):
        sc.quantize(nn.SubmanifoldConv(4, 8, 3).eval(), [scene()], dtype=torch.int16)


@pytest.mark.parametrize("groups", [1, 2])
def test_triton_multiplies_float8(groups):
    """Sums of small integers are exact; their way back is compared where e4m3 holds every result."""
    plan = sc.ConvolutionPlan(scene(points=40).grid, 3)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (plan.num_in, 16 * groups), generator=g).float().to(FLOAT8)
    weight = torch.randint(-8, 9, (27, 16, 16 * groups), generator=g).float().to(FLOAT8)
    bias, residual = torch.arange(16.0 * groups), torch.full((plan.num_in, 16 * groups), 2.0).to(FLOAT8)
    triton, numpy = backend("triton_implicit_gemm"), backend("numpy_gather_scatter")
    want = numpy.float8(x, weight, plan.kernel_map, groups, bias)
    there = sc.ConvolutionPlan(scene(points=40).grid.to(home("triton_implicit_gemm")), 3).kernel_map
    a, b, c, d, big = (t.to(there.device) for t in (x, weight, bias, residual, torch.full((16 * groups,), 1e6)))
    assert torch.equal(triton.float8(a, b, there, groups, c).cpu().float(), want.float())
    signs = Float8Rescale(torch.full((16 * groups,), 1e6), 0.5, 0.0)  # all but zero sums end at 0 or 448
    want = numpy.float8(x, weight, plan.kernel_map, groups, bias, signs, residual).float()
    assert torch.equal(triton.float8(a, b, there, groups, c, Float8Rescale(big, 0.5, 0.0), d).cpu().float(), want)
    assert set(want.unique().tolist()) <= {0.0, 1.0, 448.0}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_networks_on_a_card(dtype):
    torch.manual_seed(0)
    net = lived_in(NETWORKS["unet"]())
    small, x = sc.quantize(net, [scene(seed) for seed in range(3)], dtype=dtype), scene(7)
    want, found = small(x).features, small.to("cuda")(x.to("cuda")).features.cpu()
    if dtype == "int8":
        assert torch.equal(found, want)
    assert (found - want).square().mean().sqrt() < 0.02 * want.std()


class _Twice(nn.SparseModule):
    """Two convolutions, and something between them."""

    def __init__(self, between) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.SubmanifoldConv(4, 8, 3), nn.SubmanifoldConv(8, 8, 3), between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


def _zeroed(y: sc.SparseTensor) -> sc.SparseTensor:
    y.features[:, :4] = 0
    return y


def _capped(y: sc.SparseTensor) -> sc.SparseTensor:
    values = y.features
    values[values > 1] = 1
    return y


def _filled(y: sc.SparseTensor) -> sc.SparseTensor:
    rows = torch.zeros(len(y.grid), 8)
    rows[:] = y.features
    return y.with_features(rows)


def _mirrored(y: sc.SparseTensor) -> sc.SparseTensor:
    coords = y.grid.coords * torch.tensor([1, -1, 1, 1], dtype=torch.int32)
    return sc.SparseTensor(sc.VoxelGrid(coords, 1), y.features)


@pytest.mark.parametrize("between", [_zeroed, _capped, _filled])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_an_assignment_to_rows_is_seen(between, dtype):
    with pytest.raises(ValueError, match=r"__setitem__ is called on rows.*name that in keep"):
        sc.quantize(_Twice(between).eval(), [scene()], dtype=dtype)


def test_features_that_move_to_other_voxels_are_refused():
    with pytest.raises(ValueError, match="_Twice cannot be quantized"):
        sc.quantize(_Twice(_mirrored).eval(), [scene()])


@pytest.mark.parametrize(
    "between",
    [
        lambda y: y.with_features(torch.cat(tensors=[y.features, y.features], dim=1)[:, :8]),
        lambda y: y.with_features(torch.mul(input=y.features, other=2)),
    ],
)
def test_functions_called_by_keywords_are_named(between):
    with pytest.raises(ValueError, match="no integer form"):
        sc.quantize(_Twice(between).eval(), [scene()])


def test_functions_called_by_keywords_are_recorded():
    class Net(nn.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv = nn.SubmanifoldConv(4, 8, 3)

        def forward(self, x):
            y = self.conv(x)
            both = torch.add(input=y.features, other=torch.relu(y.features))
            return y.with_features(torch.cat(tensors=(both, y.features), axis=1))

    net, x = Net().eval(), scene(3)
    with torch.no_grad():
        want = net(x).features
    assert (sc.quantize(net, [scene(), x])(x).features - want).norm() < 0.05 * want.norm()


class _Masking(nn.SparseModule):
    def forward(self, x, mask):
        return x.with_features(x.features * mask)


class _Returning(nn.SparseModule):
    """A network that hands on something of its scene."""

    def __init__(self, what) -> None:
        super().__init__()
        self.conv, self.mask, self.what = nn.Conv(4, 8, 2, stride=2), _Masking(), what
        self.back = nn.InverseConv(8, 4, 2, stride=2)
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x):
        y = self.conv(x)
        return {
            "grid": lambda: (y, y.grid),
            "count": lambda: (y, len(x.grid)),
            "onto a grid": lambda: self.back(y, onto=x.grid),
            "mask": lambda: self.mask(y, torch.ones(len(y.grid), 1)),
            "gain": lambda: self.mask(y, self.gain),
            "share": lambda: self.mask(y, 1 / len(x.grid)),
        }[self.what]()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("grid", "it returns a .*Grid that may depend on the voxels"),
        ("count", "it returns an int that may depend on the voxels"),
        ("share", "what it does depends on the number of voxels"),
        ("onto a grid", "back is called with a VoxelGrid of the scene"),
        ("mask", "what it does depends on the number of voxels"),
    ],
)
def test_nothing_of_a_calibration_scene_stays(what, words):
    """A grid, a mask or a number of the last scene would be that of every later call."""
    with pytest.raises(ValueError, match=words):
        sc.quantize(_Returning(what).eval(), [scene(0), scene(1)], keep=["back", "mask"])


def test_parameters_may_be_handed_to_a_kept_layer():
    small = sc.quantize(_Returning("gain").eval(), [scene(0), scene(1)], keep=["mask"])
    assert small(scene(2)).features.isfinite().all()


def test_scenes_without_voxels_do_not_calibrate_alone():
    empty = sc.SparseTensor(sc.VoxelGrid(torch.zeros(0, 4, dtype=torch.int32), 1), torch.zeros(0, 4))
    net = nn.SubmanifoldConv(4, 8, 3).eval()
    with pytest.raises(ValueError, match="at least one scene with voxels"):
        sc.quantize(net, [empty, empty])
    assert sc.quantize(net, [empty, scene()])(scene()).channels == 8


@pytest.mark.parametrize("scenes", [None, scene(), (scene().grid.coords, scene().features), [{"x": 1}]])
def test_what_are_no_scenes(scenes):
    with pytest.raises(TypeError, match="scenes"):
        sc.quantize(nn.SubmanifoldConv(4, 8, 3).eval(), scenes)
