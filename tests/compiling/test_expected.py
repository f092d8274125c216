"""What is known of a network's layers before they run, against what they then ask for."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.backends.base import Request
from sparseconv.backends.triton_implicit_gemm import recipe as recipes
from sparseconv.backends.triton_implicit_gemm.config import conv_candidates, weight_grad_candidates
from sparseconv.backends.triton_implicit_gemm.conv_recipe import ConvRecipe
from sparseconv.backends.triton_implicit_gemm.weight_grad_recipe import WeightGradRecipe
from sparseconv.geometry.gpu.jobs.jobs import JOB_QUANTUM, most_jobs
from sparseconv.gpu import cooperative
from sparseconv.gpu import launcher as launching
from sparseconv.gpu.program import Program
from sparseconv.nn import ahead
from sparseconv.plan.convolution import ConvolutionPlan
from tests.interop.scenes import scene

CARD = torch.device("cuda", 0)


def network() -> torch.nn.Module:
    """Two strides of two kinds, back from one of them, windows of 27 and of 125 taps, a layer of one tap."""
    return spconv.SparseSequential(
        spconv.SubMConv3d(5, 32, 5, padding=1, bias=False, indice_key="stem"),
        spconv.SparseConv3d(32, 64, 2, 2, bias=False, indice_key="down1"),
        spconv.SubMConv3d(64, 64, 3, bias=False, indice_key="level1"),
        spconv.SubMConv3d(64, 64, 3, bias=False, indice_key="level1"),
        spconv.SparseConv3d(64, 128, 3, 2, 1, bias=False, indice_key="down2"),
        spconv.SubMConv3d(128, 256, 3, bias=False, indice_key="level2"),
        spconv.SubMConv3d(256, 128, 1, bias=False),
        spconv.SparseInverseConv3d(128, 64, 3, indice_key="down2", bias=False),
        spconv.SubMConv3d(64, 96, 3, bias=False, indice_key="level1"),
        spconv.SparseInverseConv3d(96, 32, 2, indice_key="down1", bias=False),
        spconv.SparseConv3d(32, 32, (3, 1, 1), (2, 1, 1), bias=True),
    )


@pytest.fixture
def asked(monkeypatch) -> list:
    """(kernel map, channels in, channels out) of the layers of a network that ran on the CPU."""
    calls = []
    execute = ConvolutionPlan.execute

    def noted(plan, x, weight, *args, **options):
        y = execute(plan, x, weight, *args, **options)
        calls.append((plan.kernel_map, x.shape[1], y.shape[1]))
        return y

    monkeypatch.setattr(ConvolutionPlan, "execute", noted)
    return calls


def expected(layers, indices, shape, dtype=torch.float16) -> list:
    made = [layer.made_layer() for layer in layers]
    return list(ahead.expected_layers(made, ahead.Level.of(indices, shape), 2, dtype))


def run() -> tuple:
    gc.collect()
    ahead._made.clear()
    net = network()
    layers = [made() for made in ahead._made]
    features, indices, shape, batch = scene(voxels=1500, extent=16)
    with torch.no_grad():
        net(spconv.SparseConvTensor(features, indices, shape, batch))
    return layers, indices, shape, net


def test_rows_pairs_and_channels_are_known_before_a_layer_runs(asked) -> None:
    layers, indices, shape, _ = run()
    found = expected(layers, indices, shape)
    assert len(found) == len(asked) == 10
    for layer, (kernel_map, c_in, c_out) in zip(found, asked):
        sizes = layer.map
        rows = (sizes.num_out, sizes.num_in) if layer.turned else (sizes.num_in, sizes.num_out)
        assert rows == (kernel_map.num_in, kernel_map.num_out)
        assert (layer.c_in, layer.c_out, sizes.num_taps) == (c_in, c_out, kernel_map.num_taps)
        if not sizes.same:
            assert sizes.num_pairs == kernel_map.num_pairs
    assert [layer.turned for layer in found] == [False] * 6 + [True, False, True, False]
    assert found[0].takes_gradient is False
    assert found[-1].bias is torch.float32


class Named(nn.SparseModule):
    """A network whose layers are made in the order in which they run; the first stride keeps its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.SubmanifoldConv(4, 16, 5)
        self.down1 = nn.Conv(16, 16, 2, stride=2)
        self.block1 = nn.ResidualBlock(16, 32)
        self.down2 = nn.Conv(32, 48, 3, stride=2)
        self.block2 = nn.ResidualBlock(48, 64)
        self.up2 = nn.InverseConv(64, 40, 3, stride=2)
        self.block3 = nn.ResidualBlock(72, 32)
        self.up1 = nn.InverseConv(32, 16, 2, stride=2)
        self.last = nn.SubmanifoldConv(32, 16, 3)

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        fine = self.stem(x)
        middle = self.block1(self.down1(fine))
        coarse = self.block2(self.down2(middle))
        middle = self.block3(middle.cat(self.up2(coarse, onto=middle)))
        return self.last(fine.cat(self.up1(middle, onto=fine)))


def unet() -> torch.nn.Module:
    """Layers of all levels are made before the strides that lead to these."""
    return nn.UNet(4, 5, channels=(16, 32, 64))


@pytest.mark.parametrize("make", [unet, Named])
@pytest.mark.parametrize("shift", [0, -37])
def test_layers_of_this_library_are_known_by_their_channels(make, shift, asked) -> None:
    gc.collect()
    ahead._made.clear()
    net = make().eval()
    layers = [made() for made in ahead._made]
    coords = scene(voxels=1500, extent=16)[1]
    coords[:, 1:] += shift
    features = torch.randn(len(coords), 4)
    with torch.no_grad():
        net(sc.SparseTensor(sc.VoxelGrid(coords), features))
    found = expected(layers, coords, None)

    def told(layer) -> tuple:
        rows = (layer.map.num_in, layer.map.num_out)[:: -1 if layer.turned else 1]
        return (*rows, layer.map.num_taps, layer.c_in, layer.c_out)

    kernels = [(m.num_in, m.num_out, m.num_taps, *channels) for m, *channels in asked]
    assert sorted(map(told, found)) == sorted(k for k in kernels if k[2] > 1)
    strided = {layer.map for layer in found if not layer.map.same}
    assert len(strided) == 2
    assert all(one.num_pairs in {m.num_pairs for m, *_ in asked} for one in strided)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.ConvTranspose(4, 4, 2, stride=2),
        lambda: nn.SubmanifoldConv(4, 4, taps=[[0, 0, 0], [0, 0, 2]]),
        lambda: nn.SubmanifoldConv(4, 4, 3, boundary="periodic"),
    ],
)
def test_of_some_layers_nothing_is_said(make) -> None:
    assert make().made_layer() is None


def test_what_is_expected_is_what_recipes_compile(asked, monkeypatch) -> None:
    monkeypatch.setattr(recipes, "card_of", lambda _: (132, (9, 0)))
    monkeypatch.setattr(cooperative, "_processors", lambda _: 132)
    monkeypatch.setattr(launching, "compilers_for", lambda _: SimpleNamespace(is_usable=True))
    begun: set = set()
    monkeypatch.setattr(Program, "ahead", lambda program, _: begun.add(_told(program)))
    layers, indices, shape, _ = run()
    finest = SimpleNamespace(coords=SimpleNamespace(device=CARD, shape=indices.shape))
    found = expected(layers, indices, shape)
    monkeypatch.setattr(ahead, "expected_layers", lambda *_: found)
    ahead.compile_layers(layers, finest, 2, torch.float16)  # type: ignore[arg-type]
    needed = set()
    for kernel_map, c_in, c_out in asked:
        request = Request(kernel_map, CARD, torch.float16, c_in, c_out)
        x, y = (torch.empty(1, c, dtype=torch.float16) for c in (c_in, c_out))
        weight = torch.empty(kernel_map.num_taps, c_in, c_out, dtype=torch.float16)
        bias = torch.empty(c_out) if (c_in, c_out) == (32, 32) else None
        for transposed in (False, True)[: 1 + (c_in > 5)]:
            work = recipes.work_of(request, c_in > 5, transposed)
            config = conv_candidates(work)[0]
            recipe = ConvRecipe(config, work, y if transposed else x, weight, transposed, None if transposed else bias)
            parts = recipe._parts(min(config.split, kernel_map.num_taps))
            needed |= {_told(recipe._program(part, False)[0]) for part in parts}
            needed |= {_told(recipe._combination(config.split))} if parts[0].to_slots else set()
        work = recipes.work_of(request, c_in > 5)
        sums = WeightGradRecipe(weight_grad_candidates(work)[0], work, x, y, kernel_map.num_taps)
        jobs = most_jobs(kernel_map.num_taps, kernel_map.num_pairs, sums._max_jobs, JOB_QUANTUM)
        needed.add(_told(sums._program(jobs == kernel_map.num_taps, False)[0]))
        needed |= set() if jobs == kernel_map.num_taps else {_told(sums._reduction())}
    assert len(needed) > 20
    assert needed <= begun


def _told(program: Program) -> tuple:
    constants = sorted((name, str(value)) for name, value in program.constants.items())
    return program.kernel.__name__, tuple(map(str, program.types)), tuple(constants), program.warps, program.stages


def test_layers_are_expected_once_and_only_on_a_card() -> None:
    ahead._made.clear()
    net = spconv.SparseSequential(spconv.SubMConv3d(5, 8, 3))
    net(spconv.SparseConvTensor(*scene()))
    assert [made() for made in ahead._made] == [net[0]]  # nothing began: the call was on a CPU
    del net
    gc.collect()
    assert [made() for made in ahead._made] == [None]


def test_layers_that_never_run_on_a_card_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(ahead, "MOST_NOTED", 4)
    ahead._made.clear()
    kept = [spconv.SubMConv3d(4, 4, 3) for _ in range(9)]
    assert len(ahead._made) <= 4
    assert ahead._made[-1]() is kept[-1]


@pytest.mark.gpu
def test_after_its_first_call_began_a_step_compiles_nothing_more(tmp_path) -> None:
    from triton import knobs

    torch.manual_seed(0)
    compiled: list = []
    monkey = pytest.MonkeyPatch()
    monkey.setattr(knobs.cache, "dir", str(tmp_path))
    monkey.setattr(
        knobs.compilation,
        "listener",
        lambda src, cache_hit, **_: None if cache_hit else compiled.append((src.name, src.constants)),
    )
    try:
        ahead._made.clear()
        net = network().cuda()
        features, indices, shape, batch = scene(voxels=60_000, extent=64)
        x = spconv.SparseConvTensor(features.cuda(), indices.cuda(), shape, batch)
        with torch.autocast("cuda", torch.float16):
            ahead.begin(x.features, x.indices, batch, shape)
            launching.await_compilers()
            before = len(compiled)
            y = net(x).features
        y.float().sum().backward()
        torch.cuda.synchronize()
        assert compiled[before:] == []
    finally:
        monkey.undo()


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
def test_after_its_first_call_began_a_network_of_this_library_compiles_few_more(training, tmp_path) -> None:
    from triton import knobs

    torch.manual_seed(0)
    compiled: list = []
    monkey = pytest.MonkeyPatch()
    monkey.setattr(knobs.cache, "dir", str(tmp_path))
    monkey.setattr(
        knobs.compilation, "listener", lambda src, cache_hit, **_: None if cache_hit else compiled.append(src.name)
    )
    try:
        ahead._made.clear()
        net = nn.UNet(4, 5, channels=(16, 32, 64)).cuda().train(training)
        coords = scene(voxels=60_000, extent=64)[1].cuda()
        x = sc.SparseTensor(sc.VoxelGrid(coords), torch.randn(len(coords), 4, device="cuda"))
        with torch.set_grad_enabled(training), torch.autocast("cuda", torch.float16):
            assert ahead.is_due(x.features)
            ahead.begin(x.features, coords, 2)
            assert not ahead.is_due(x.features)
            launching.await_compilers()
            compiled.clear()
            y = net(x).features
        if training:
            y.float().sum().backward()
        torch.cuda.synchronize()
        assert "conv_kernel" not in compiled
        assert "weight_grad_kernel" not in compiled
    finally:
        monkey.undo()
