"""Packages for a GPU: what a scene of fixed size gives, what is refused, and on a GPU the bits of `nn.capture`."""

import re
import statistics
import time

import pytest
import torch
from torch.utils._pytree import tree_leaves

import sparseconv as sc
from sparseconv import export, nn
from sparseconv.export import gpu_package, packaging, sequence
from sparseconv.export.gpu_package import FIXED, VOXELS
from sparseconv.export.program import grid_of
from sparseconv.geometry.grid_cache import remember
from sparseconv.geometry.ranges import IndexRange
from tests.export.networks import EXTENT, network, scene, spconv_input
from tests.export.running import needs_a_compiler, run

#: calls whose median is compared
CALLS = 300


def test_the_sources_read_what_python_writes():
    """Kinds are numbers, and the same ones on both sides."""
    source = (packaging.CPP / "sequence.cpp").read_text()
    found = re.findall(r"enum (\w+) : int64_t \{ ([\w, ]+) \};", source)
    assert [name for name, _ in found] == ["StepKind", "ParameterKind", "ArgumentKind"]
    for _, names in found:
        for number, name in enumerate(names.split(", ")):
            assert getattr(sequence, name) == number
    source = (packaging.CPP / "gpu_network.cpp").read_text()
    assert f"FORM = {gpu_package.FORM};" in source
    assert f"VOXELS = {VOXELS}, FIXED = {FIXED};" in source
    written = set(re.findall(r'"(\w+)"', (packaging.CPP.parent / "gpu_package.py").read_text()))
    assert set(re.findall(r'(?:at|slot|contains)\("(\w+)"\)', source)) <= written


def test_refusals(tmp_path):
    net, _ = network("unet")
    given, path = scene(1), tmp_path / "net.pt"
    with pytest.raises(ValueError, match=r"a package for a GPU must end in .pt; got 'net.pt2'"):
        export.package_for_gpu(net, given, tmp_path / "net.pt2")
    with pytest.raises(ValueError, match=r"made on an NVIDIA GPU; got coords on cpu and features on cpu"):
        export.package_for_gpu(net, given, path)
    with pytest.raises(ValueError, match="is in training"):
        export.package_for_gpu(network("unet")[0].train(), given, path)
    with pytest.raises(ValueError, match="at least two voxels"):
        export.package_for_gpu(net, scene(1, rows=1), path)
    with pytest.raises(TypeError, match="net must be a Module"):
        export.package_for_gpu(lambda x: x, given, path)
    assert not list(tmp_path.iterdir())


# ---- a scene of fixed size, on a CPU


def fixed_run(net, rows=512, extent=None, make=None):
    coords, features = scene(1)
    like = sc.VoxelGrid(coords, 2)
    made = gpu_package._Run(net, like, features, rows, rows / len(coords), extent, make)
    return made, like, features


class Several(nn.SparseModule):
    """Results of all kinds."""

    def __init__(self):
        super().__init__()
        self.fine, self.coarse = nn.SubmanifoldConv(4, 8, 3), nn.Conv(8, 6, 2, stride=2)

    def forward(self, x):
        fine = self.fine(x)
        coarse = self.coarse(fine)
        dense = fine.to_dense((EXTENT, EXTENT, EXTENT))
        return {"levels": [fine, coarse], "plain": fine.features.relu(), "deep": coarse.features * 2, "dense": dense}


@torch.no_grad()
def test_results_are_cut_to_their_voxels():
    net = Several().eval()
    made, like, features = fixed_run(net)
    made._load(like.coords, features)
    status, results = made._body()
    fault, coarse = status.tolist()
    assert (made._rows, fault) == ([VOXELS, 1, 1, VOXELS, 1, FIXED], 0)
    alone = net(sc.SparseTensor(like, features))
    fine, deep = alone["levels"]
    voxels, found = len(like), iter(results)
    assert coarse == len(deep.grid)
    assert torch.allclose(next(found)[:voxels], fine.features, atol=1e-5)
    assert torch.allclose(next(found)[:coarse], deep.features, atol=1e-5)
    assert torch.equal(next(found)[:coarse], deep.grid.coords)
    assert torch.equal(next(found)[:voxels], results[0][:voxels].relu())
    assert torch.equal(next(found)[:coarse], results[1][:coarse] * 2)
    assert torch.allclose(next(found), alone["dense"], atol=1e-5)
    made._check(status, results)


class Detector(torch.nn.Module):
    """A network of spconv's layers that makes its tensor of a batch, as OpenPCDet's do."""

    def __init__(self):
        super().__init__()
        self.inner = network("spconv")[0]

    def forward(self, batch):
        x = spconv_input(batch["voxel_coords"].int(), batch["voxel_features"])
        return batch | self.inner(x)


def batch(coords, features):
    return {"voxel_coords": coords, "voxel_features": features, "batch_size": 2}


@torch.no_grad()
@pytest.mark.parametrize(("kind", "make"), [(lambda: network("spconv")[0], spconv_input), (Detector, batch)])
def test_networks_of_spconvs_layers_lie_on_the_scene(kind, make):
    net = kind().eval()
    made, like, features = fixed_run(net, make=make, extent=IndexRange.of_shape((EXTENT,) * 3))
    made._load(like.coords, features)
    status, results = made._body()
    made._check(status, results)
    assert int(status[0]) == 0
    assert len(made._rows) == (8 if make is batch else 6)
    assert made._rows.count(FIXED) == 1


@torch.no_grad()
def test_a_network_that_mixes_rows_is_refused():
    class Mixing(nn.SparseModule):
        def forward(self, x):
            return x.with_features(x.features - x.features.mean(0))

    made, like, features = fixed_run(Mixing().eval())
    made._load(like.coords, features)
    with pytest.raises(ValueError, match="the rows that are no voxels change the network's result"):
        made._check(*made._body())


@torch.no_grad()
def test_an_example_outside_of_the_extent_is_refused():
    made, like, features = fixed_run(Several().eval(), extent=IndexRange.of_shape((EXTENT, EXTENT, 5)))
    made._load(like.coords, features)
    with pytest.raises(RuntimeError, match="the example does not fit: a voxel lies outside of the extent"):
        made._check(*made._body())


# ---- on a GPU, in C++


class Dense(torch.nn.Module):
    """An encoder seen from above: a result of a size that no scene changes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner.to_bev(self.inner(x))


class Pooled(nn.SparseModule):
    """Pools, and torch's own modules between layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.max, self.avg = nn.SubmanifoldConv(4, 16, 3), nn.MaxPool(2), nn.AvgPool(3, stride=2)
        self.norm, self.mix = torch.nn.LayerNorm(16), torch.nn.Linear(16, 8)

    def forward(self, x):
        y = self.conv(x)
        y = y.with_features(torch.nn.functional.gelu(self.norm(y.features)))
        return self.max(y), self.avg(y), self.mix(y.features)


MADE = {
    "unet": lambda: network("unet")[0],
    "several": Several,
    "pooled": Pooled,
    "residual": lambda: network("residual")[0],
    "bev": lambda: Dense(network("residual")[0]),
    "wide": lambda: nn.UNet(4, 5, channels=(64, 128, 256)),
    "spconv": lambda: network("spconv")[0],
    "detector": Detector,
}
#: how inputs are made of coords and features, where they are no `SparseTensor`
INPUTS = {"spconv": spconv_input, "detector": batch}


#: those whose results nn.capture returns, bit by bit; it has none on coarser voxels
CAPTURED = ("unet", "bev", "wide")


@torch.no_grad()
def eager(net, coords, features, make):
    """What a package returns for a scene, as the network computes it."""
    grid, found = sc.VoxelGrid(coords, 2), []
    remember(grid.coords, grid)
    for leaf in leaves(net(make(grid.coords, features) if make else sc.SparseTensor(grid, features))):
        own = grid_of(leaf)
        if own is None:
            found += [leaf] if isinstance(leaf, torch.Tensor) else []
        else:
            found += [leaf.features] if own is grid else [leaf.features, own.coords]
    return found


def leaves(results):
    return tree_leaves(results, is_leaf=lambda leaf: grid_of(leaf) is not None)


@needs_a_compiler
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [*MADE, "wide in fp16"])
def test_in_cpp_on_a_gpu(name, built, tmp_path):
    torch.manual_seed(0)
    name, _, half = name.partition(" in ")
    dtype = torch.float16 if half else torch.float32
    net = MADE[name]().eval().cuda().to(dtype)
    coords, features = (t.cuda() for t in scene(1))
    features, path, box = features.to(dtype), tmp_path / "net.pt", IndexRange.of_shape((EXTENT,) * 3)
    size, make = {"max_voxels": 512, "extent": box}, INPUTS.get(name)
    assert export.package_for_gpu(net, (coords, features), path, make=make, **size) == path
    like = sc.SparseTensor(sc.VoxelGrid(coords, 2), features)
    fast = nn.capture(net, like, **size) if name in CAPTURED else None
    for rows in (333, 1, 0, 512):
        given = scene(5, rows)
        x = given[0].cuda(), given[1].cuda().to(dtype)
        torch.save([x[0].cpu(), x[1].cpu()], tmp_path / "scene.pt")
        expected = leaves(fast(x)) if fast is not None else eager(net, *x, make)
        torch.save([t.cpu() for t in expected], tmp_path / "expected.pt")
        more = ["--exact"] if fast is not None else []
        said = run(built / "run_package", path, tmp_path / "scene.pt", tmp_path / "expected.pt", "--repeat", 3, *more)
        assert "equal to what was expected" in said


@needs_a_compiler
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_cpp_refuses_on_a_gpu(built, tmp_path):
    net, path = network("unet")[0].cuda(), tmp_path / "net.pt"
    given = tuple(t.cuda() for t in scene(1))
    export.package_for_gpu(net, given, path, max_voxels=256, extent=IndexRange.of_shape((EXTENT,) * 3))
    coords, features = scene(5)
    for wrong, words in (
        (scene(5, 257), "the scene has 257 voxels, and this package takes at most 256"),
        ((coords + torch.tensor([0, EXTENT, 0, 0]).int(), features), "a voxel lies outside of the extent"),
        ((coords[[0, 1, 0]], features[:3]), "occurs twice"),
        ((coords + torch.tensor([2, 0, 0, 0]).int(), features), "outside of the extent or the batch"),
        ((coords.long(), features), "coords must be of type Int; got Long"),
        ((coords[:, :3], features), "coords must be (150, 4)"),
        ((coords, features.double()), "features must be of type Float; got Double"),
        ((coords, features[:99]), "features must be (150, 4)"),
    ):
        torch.save(list(wrong), tmp_path / "scene.pt")
        assert words in run(built / "run_package", path, tmp_path / "scene.pt", expect=2)
    torch.save([coords, features], tmp_path / "scene.pt")
    assert "there is no file" in run(built / "run_package", tmp_path / "absent.pt", tmp_path / "scene.pt", expect=2)
    said = run(built / "run_package", tmp_path / "scene.pt", tmp_path / "scene.pt", expect=2)
    assert "is no package that sparseconv.export.package_for_gpu wrote" in said
    made = torch.load(path)
    for key, value, words in (
        ("capability", [1, 0], "of compute capability 1.0, and this GPU is a"),
        ("torch", "1.0", "was made with torch 1.0, and this program with"),
        ("sparseconv_gpu_package", 99, "has form 99, and this program reads form 1"),
    ):
        torch.save(made | {key: value}, tmp_path / "other.pt")
        assert words in run(built / "run_package", tmp_path / "other.pt", tmp_path / "scene.pt", expect=2)


@needs_a_compiler
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cpp_is_as_fast_as_the_captured_network(built, tmp_path):
    torch.manual_seed(0)
    grid, _ = sc.voxelize(torch.rand(200_000, 3).cuda() * torch.tensor([1.0, 1.0, 0.1]).cuda(), voxel_size=0.01)
    net, path = nn.UNet(4, 20, channels=(32, 64, 128, 256)).half().eval().cuda(), tmp_path / "net.pt"
    x = sc.SparseTensor(grid, torch.randn(len(grid), 4).cuda().half())
    export.package_for_gpu(net, (grid.coords, x.features), path)
    fast, took = nn.capture(net, x), []
    for _ in range(CALLS):
        start = time.perf_counter()
        expected = fast((grid.coords, x.features))
        torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - start))
    torch.save([grid.coords.cpu(), x.features.cpu()], tmp_path / "scene.pt")
    torch.save([expected.cpu()], tmp_path / "expected.pt")
    files = path, tmp_path / "scene.pt", tmp_path / "expected.pt"
    said = run(built / "run_package", *files, "--exact", "--repeat", CALLS)
    mine = float(re.search(r"network: ([\d.]+) ms", said).group(1))
    assert mine <= 1.1 * statistics.median(took), (mine, statistics.median(took))
