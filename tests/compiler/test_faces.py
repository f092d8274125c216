"""Networks under the names of other libraries, compiled by the backend "sparseconv" beside eager ones."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import sparseconv as sc
import sparseconv.interop.flex_gemm as flex_gemm
import sparseconv.interop.minkowski as ME
import sparseconv.interop.spconv.pytorch as spconv
import sparseconv.interop.torchsparse as torchsparse
import sparseconv.interop.torchsparse.nn as spnn
from sparseconv import nn
from sparseconv.nn import accelerated

SIZES = (300, 210, 320, 40, 305, 90)
SHAPE = [13, 12, 11]


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scene(number: int, items: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (N, 4) fp64 and coords (N, 4) int32, the batch first, in no order."""
    generator = torch.Generator().manual_seed(number)
    size = SIZES[number % len(SIZES)]
    columns = [torch.randint(0, n, (size, 1), generator=generator) for n in (items, *SHAPE)]
    coords = torch.unique(torch.cat(columns, 1), dim=0)
    coords = coords[torch.randperm(len(coords), generator=generator)].int()
    return torch.randn(len(coords), 4, dtype=torch.float64, generator=generator), coords


def numbers(results) -> list[torch.Tensor]:
    results = results if isinstance(results, (tuple, list)) else [results]
    return [r if isinstance(r, torch.Tensor) else r.features if hasattr(r, "features") else r.feats for r in results]


def run(net, call, number, training):
    net.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(training):
        made = numbers(call(*scene(number)))
    if training:
        sum(t.square().sum() for t in made).backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return [t.detach() for t in made], grads, [b.clone() for b in net.buffers()]


def compare(net, make=lambda call, f, c: call(f, c), training=True, replays=True):
    """Results, gradients and buffers of a network and of its compiled copy, dead rows being NaN in the latter."""
    net = net.double().train(training)
    other = copy.deepcopy(net)
    compiled = torch.compile(net, backend="sparseconv", options={"poison": True})
    for number in range(len(SIZES)):
        ours = run(net, lambda f, c: make(compiled, f, c), number, training)
        theirs = run(other, lambda f, c: make(other, f, c), number, training)
        for got, wanted, atol in zip(ours, theirs, (1e-12, 1e-11, 1e-12)):
            assert len(got) == len(wanted)
            for a, b in zip(got, wanted):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=atol)
    if replays:
        assert "replayed" in nn.explain(net), nn.explain(net)


class OfSpconv(torch.nn.Module):
    shape = SHAPE

    def __init__(self):
        super().__init__()
        self.stem = spconv.SparseSequential(
            spconv.SubMConv3d(4, 8, 3, bias=False, indice_key="a"), torch.nn.BatchNorm1d(8), torch.nn.ReLU()
        )
        self.same = spconv.SubMConv3d(8, 8, 3, indice_key="a")
        self.down = spconv.SparseSequential(
            spconv.SparseConv3d(8, 12, 3, 2, 1, indice_key="d"), spconv.SparseBatchNorm(12), spconv.SparseReLU()
        )
        self.up = spconv.SparseInverseConv3d(12, 8, 3, indice_key="d")
        self.one = spconv.SubMConv3d(16, 8, 1)
        self.end = spconv.SparseConv3d(8, 6, (3, 1, 1), (2, 1, 1), 0)

    def layers(self, x):
        fine = self.same(self.stem(x))
        fine = fine + self.stem(x)
        coarse = self.down(fine)
        up = self.up(coarse)
        both = self.one(up.replace_feature(torch.cat([up.features, fine.features], 1)))
        return both.features, self.end(both).dense(), coarse.features

    def forward(self, f, c):
        return self.layers(spconv.SparseConvTensor(f, c, self.shape, 2))


class OfTensors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.same = spconv.SubMConv3d(4, 8, 3, indice_key="a")
        self.down = spconv.SparseConv3d(8, 12, 3, 2, 1, indice_key="d")
        self.up = spconv.SparseInverseConv3d(12, 8, 3, indice_key="d")

    def forward(self, x):
        coarse = self.down(self.same(x))
        return self.up(coarse), coarse.features


@pytest.mark.parametrize("training", [True, False])
def test_spconv(training):
    compare(OfSpconv(), training=training)


def test_spconv_of_tensors_that_were_made_before():
    kept = []

    def make(call, f, c):
        x = spconv.SparseConvTensor(f, c, SHAPE, 2)
        if len(kept) % 3 == 1:
            x.voxels
        before = dict(vars(x))
        made = call(x)
        kept.append(x)
        if call is not None and not isinstance(call, OfTensors):
            assert vars(x) == before
        return made

    compare(OfTensors(), make)


def test_spconv_within_a_shape_that_is_read_from_the_coordinates():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3), torch.nn.BatchNorm1d(8))
            self.d, self.e = spconv.SparseConv3d(8, 8, 3, 2, 1), spconv.SparseConv3d(8, 8, 3, 2, 1)

        def forward(self, f, c):
            shape = torch.clamp(c[:, 1:].amax(0) + 1, min=8).tolist()
            return self.e(self.d(self.a(spconv.SparseConvTensor(f, c, shape, c[:, 0].amax().item() + 1))))

    net = Net().double()
    compiled = torch.compile(copy.deepcopy(net), backend="sparseconv", options={"poison": True})
    for number in range(4):
        ours, theirs = compiled(*scene(number)), net(*scene(number))
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-12, atol=1e-12)
        assert torch.equal(ours.indices, theirs.indices)
        assert (ours.spatial_shape, ours.batch_size) == (theirs.spatial_shape, theirs.batch_size)
    assert "replayed" in nn.explain(compiled._orig_mod)


def test_a_tensor_of_spconv_that_left_goes_on():
    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = spconv.SubMConv3d(4, 8, 3, indice_key="a")
            self.d = spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="d")
            self.u = spconv.SparseInverseConv3d(8, 4, 3, indice_key="d")
            self.b = spconv.SubMConv3d(8, 8, 3, indice_key="b")

        def forward(self, f, c):
            return self.d(self.a(spconv.SparseConvTensor(f, c, SHAPE, 2)))

    net = Encoder().double()
    compiled = torch.compile(net, backend="sparseconv")
    for number in range(4):
        f, c = scene(number)
        ours, theirs = compiled(f, c), net(f, c)
        assert torch.equal(ours.indices, theirs.indices)
        assert ours.spatial_shape == theirs.spatial_shape
        assert ours.indice_dict.keys() == theirs.indice_dict.keys()
        for layer in (net.b, net.u):
            ours, theirs = layer(ours), layer(theirs)
            torch.testing.assert_close(ours.features, theirs.features, rtol=1e-12, atol=1e-12)
        assert torch.equal(ours.indices, theirs.indices)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [spconv.SparseInverseConv3d(4, 4, 3, indice_key="none")],
        lambda: [spconv.SubMConv3d(4, 4, 3, indice_key="a"), spconv.SubMConv3d(4, 4, 5, indice_key="a")],
        lambda: [spconv.SubMConv3d(5, 4, 3)],
    ],
)
def test_errors_of_spconv_are_those_of_eager_layers(layers):
    net = spconv.SparseSequential(*layers()).double()

    def call(x, indices):
        return net(spconv.SparseConvTensor(x, indices, SHAPE, 2)).features

    with pytest.raises((ValueError, RuntimeError)) as eager:
        call(*scene(0))
    with pytest.raises((ValueError, RuntimeError)) as compiled:
        torch.compile(call, backend="sparseconv")(*scene(0))
    assert type(compiled.value) is type(eager.value)
    assert str(compiled.value) == str(eager.value)


def test_indices_outside_of_the_shape_are_an_error_in_the_program_too():
    net = spconv.SubMConv3d(4, 4, 3).double()

    @torch.compile(backend="sparseconv")
    def call(x, indices):
        return net(spconv.SparseConvTensor(x, indices, SHAPE, 2)).features

    for number in range(3):
        call(*scene(number))
    f, c = scene(0)
    c[5, 1] = SHAPE[0]
    with pytest.raises(ValueError, match="must lie within spatial_shape"):
        call(f, c)


class OfMinkowski(torch.nn.Module):
    def __init__(self):
        super().__init__()
        make = {"dimension": 3}
        self.c, self.n = ME.MinkowskiConvolution(4, 8, kernel_size=3, **make), ME.MinkowskiBatchNorm(8)
        self.d = ME.MinkowskiConvolution(8, 8, kernel_size=2, stride=2, **make)
        self.e = ME.MinkowskiConvolution(8, 8, kernel_size=3, dilation=2, bias=True, **make)
        self.u = ME.MinkowskiConvolutionTranspose(8, 8, kernel_size=2, stride=2, **make)
        self.r, self.f = ME.MinkowskiReLU(), ME.MinkowskiConvolution(16, 5, kernel_size=1, bias=True, **make)

    def forward(self, x):
        y = self.r(self.n(self.c(x)))
        z = self.u(self.r(self.e(self.d(y))))
        return self.f(ME.cat(z + y, y)).F


def tensor_of_minkowski(call, f, c):
    return call(ME.SparseTensor(f, c))


def test_minkowski():
    compare(OfMinkowski(), tensor_of_minkowski)


def test_minkowski_merges_points_before_the_program():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fine = ME.MinkowskiConvolution(4, 8, kernel_size=3, dimension=3)
            self.coarse = ME.MinkowskiConvolution(8, 8, kernel_size=2, stride=2, dimension=3)

        def forward(self, f, c):
            return self.coarse(self.fine(ME.SparseTensor(f, c))).F

    compare(Net(), lambda call, f, c: call(torch.cat([f, f[:9]]), torch.cat([c, c[:9]])))


class Pooled(torch.nn.Module):
    """Pools before any layer that has weights, of as many channels as no coordinates have columns."""

    def __init__(self, face):
        super().__init__()
        self.face, self.head = face, torch.nn.Linear(4, 3)
        self.pool = {
            "nn": lambda: nn.MaxPool(2),
            "spconv": lambda: spconv.SparseMaxPool3d(2, 2),
            "minkowski": lambda: ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3),
        }[face]()

    def forward(self, x):
        x = self.pool(x)
        return self.head(x.F if self.face == "minkowski" else x.features)


@pytest.mark.parametrize("face", ["nn", "spconv", "minkowski"])
def test_networks_that_begin_with_a_pool(face):
    make = {
        "nn": lambda call, f, c: call(sc.SparseTensor(sc.VoxelGrid(c, 2), f)),
        "spconv": lambda call, f, c: call(spconv.SparseConvTensor(f, c, [16, 16, 16], 2)),
        "minkowski": tensor_of_minkowski,
    }[face]
    compare(Pooled(face), make)


class Strided(torch.nn.Module):
    """MinkowskiEngine's: strided layers that begin a network, beside one another, and a way back to the input."""

    def __init__(self, mode):
        super().__init__()
        self.mode, make = mode, {"stride": 2, "dimension": 3}
        self.a, self.b = (ME.MinkowskiConvolution(4, 8, kernel_size=k, **make) for k in (2, 3))
        self.up = ME.MinkowskiConvolutionTranspose(8, 4, kernel_size=2, **make)

    def forward(self, x):
        if self.mode == "sum":
            return (self.a(x) + self.b(x)).F
        y = self.up(self.a(x))
        return (y + x).F if self.mode == "skip" else ME.cat(y, x).F


@pytest.mark.parametrize("mode", ["sum", "skip", "cat"])
def test_minkowski_networks_that_begin_with_a_stride(mode):
    compare(Strided(mode), tensor_of_minkowski)


class OverItems(torch.nn.Module):
    """MinkowskiEngine's: what is reduced over whole batch items and given back to their voxels, between two layers."""

    def __init__(self, kind):
        super().__init__()
        make = {"dimension": 3}
        self.kind, self.a = kind, ME.MinkowskiConvolution(4, 8, kernel_size=3, **make)
        self.b = ME.MinkowskiConvolution(8, 8, kernel_size=2, stride=2, **make)
        self.norm, self.all = ME.MinkowskiInstanceNorm(8), ME.MinkowskiBroadcastMultiplication()
        self.pool = ME.MinkowskiGlobalMaxPooling() if kind == "max" else ME.MinkowskiGlobalAvgPooling()

    def forward(self, x):
        y = self.a(x)
        return self.b(self.norm(y) if self.kind == "norm" else self.all(y, self.pool(y))).F


@pytest.mark.parametrize("kind", ["norm", "max", "mean"])
def test_minkowski_layers_over_batch_items(kind):
    def make(call, f, c):
        c = torch.where(c[:, :1] * (torch.arange(4) == 0) == 1, c + 1, c)  # items 0 and 2: nothing lies in 1
        return call(ME.SparseTensor(f, c.int()))

    net = OverItems(kind)
    compare(net, make)
    assert "graph break" not in nn.explain(net)


class OfTorchsparse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.n, self.r = spnn.Conv3d(4, 8, 3), spnn.BatchNorm(8), spnn.ReLU(True)
        self.d, self.e = spnn.Conv3d(8, 8, 2, stride=2), spnn.Conv3d(8, 8, 3)
        self.t = spnn.Conv3d(8, 8, 3, stride=2, padding=1)
        self.v = spnn.Conv3d(8, 8, 3, stride=2, padding=1, transposed=True)
        self.u = spnn.Conv3d(8, 8, 2, stride=2, transposed=True)

    def forward(self, x):
        y = self.r(self.n(self.c(x)))
        z = self.e(self.d(y))
        z = z + self.v(self.t(z))
        return torchsparse.cat([self.u(z), y]).F


class FromCoordinates(OfTorchsparse):
    def forward(self, f, c):
        return super().forward(torchsparse.SparseTensor(f, c))


def test_torchsparse():
    compare(OfTorchsparse(), lambda call, f, c: call(torchsparse.SparseTensor(f, c)), training=False)


class Looped(torch.nn.Module):
    """torchsparse's layers in a loop, where a graph break would leave the whole loop to Python."""

    def __init__(self):
        super().__init__()
        self.stages = torch.nn.ModuleList([spnn.Conv3d(4, 8, 3), spnn.LeakyReLU(), spnn.Conv3d(8, 8, 2, stride=2)])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x.F


def test_torchsparse_in_a_loop_is_one_program_where_voxels_are_known():
    def make(call, f, c):
        x = torchsparse.SparseTensor(f, c)
        x.prepare_for_trace()
        return call(x)

    net = Looped()
    compare(net, make)
    assert nn.explain(net).count("program") == 1
    assert "graph break" not in nn.explain(net)


def test_torchsparse_from_coordinates():
    compare(FromCoordinates())


def test_torchsparse_within_a_range():
    extent = (2, *SHAPE)
    compare(OfTorchsparse(), lambda call, f, c: call(torchsparse.SparseTensor(f, c, 1, extent)))


class OfFlexGemm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.d = (torch.nn.Parameter(torch.randn(*shape) / 8) for shape in (
            (8, 3, 3, 3, 4), (8, 3, 3, 3, 8), (6, 2, 2, 2, 8)
        ))  # fmt: skip
        self.bias, self.norm = torch.nn.Parameter(torch.randn(8)), torch.nn.LayerNorm(8)

    def forward(self, f, c):
        shape = torch.Size([2, 4, *SHAPE])
        y, found = flex_gemm.ops.spconv.sparse_submanifold_conv3d(f, c, shape, self.a, self.bias)
        y = torch.nn.functional.silu(self.norm(y))
        z, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(y, c, shape, self.b, None, found)
        return flex_gemm.ops.spconv.sparse_conv3d(y + z, c, shape, self.d, stride=2)[0]


def test_flex_gemm():
    compare(OfFlexGemm())


class OfAssignments(torch.nn.Module):
    """Indices and features are assigned to tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b = spconv.SubMConv3d(4, 8, 3), spconv.SubMConv3d(8, 8, 3)
        self.c = spnn.Conv3d(8, 8, 3)

    def forward(self, f, c):
        x = self.a(spconv.SparseConvTensor(f, c, SHAPE, 2))
        x.indices = c.flip(0)
        y = self.b(x)
        z = torchsparse.SparseTensor(y.features, c)
        z.F = torch.relu(z.F)
        z.F = z.F * 3
        return y.features, z.F, self.c(z).F


def test_what_is_assigned_to_a_tensor_is_read():
    compare(OfAssignments())


class OfBatches(OfSpconv):
    """Called with a batch of a data loader, names of frames among it, to which it adds what it finds. The shape is an
    array, as OpenPCDet has it."""

    def __init__(self):
        super().__init__()
        self.shape = np.array(SHAPE)

    def forward(self, batch):
        found = super().forward(batch["features"], batch["coords"])
        batch.update({"found": found, "count": len(batch["frame_id"])})
        return batch


@pytest.mark.parametrize("options", [{}, {"guard_filter_fn": accelerated.watched}], ids=["all", "watched"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_batch_with_arrays_of_numpy_is_one_program(mode, options):
    net = OfBatches().double().eval()
    other = copy.deepcopy(net)
    compiled = torch.compile(net, backend="sparseconv", options={"poison": True, **options})
    for number in range(3):
        batches = []
        for call in (compiled, other):
            features, coords = scene(number)
            frames = np.array([f"{number:06d}.{item}" for item in range(2)])
            boxes = np.ones((2, 3 + number, 8))
            with mode():
                batches.append(call({"frame_id": frames, "features": features, "coords": coords, "boxes": boxes}))
                if torch.is_grad_enabled():
                    sum(t.sum() for t in numbers(batches[-1]["found"])).backward()
        ours, theirs = batches
        assert list(ours) == list(theirs)
        assert ours["count"] == 2
        assert ours["boxes"].tolist() == theirs["boxes"].tolist()
        assert ours["frame_id"].tolist() == [f"{number:06d}.0", f"{number:06d}.1"]
        torch.testing.assert_close(numbers(ours["found"]), numbers(theirs["found"]))
    assert nn.explain(net).count("program") == 1
    assert "2 of 3 calls replayed" in nn.explain(net)
