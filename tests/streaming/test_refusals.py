"""What cannot be streamed is named with its place, before anything is run."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.geometry import Boundary
from tests.streaming.scenes import forced, same, scene


class Rows(nn.SparseModule):
    """A function of rows, as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        return x.with_features(self.function(x.features))


REFUSED = {
    "sum of all rows": (lambda f: f - f.sum(0), "sum over dim=0"),
    "sum of everything": (lambda f: f - f.sum(), "sum without dim="),
    "sorted rows": (lambda f: f.sort(0).values, "sort over dim=0"),
    "a softmax over rows": (lambda f: torch.softmax(f, 0), "softmax over dim=0"),
    "attention": (lambda f: torch.softmax(f @ f.T, 1) @ f, "torch's"),
    "the first row": (lambda f: f + f[0], "rows are chosen by their number"),
    "a value read": (lambda f: f * f[:, 0].max(0).values.item(), "max over dim=0"),
    "a look": (lambda f: f if bool((f > 0).all()) else -f, "without dim="),
    "the number of rows": (lambda f: f / f.shape[0], "depends on the number of voxels"),
    "numpy": (lambda f: torch.from_numpy(f.detach().numpy()), "reads the values"),
    "random numbers": (lambda f: torch.nn.functional.dropout(f, 0.5), "random numbers"),
    "a cumulative sum": (lambda f: f.cumsum(0), "cumsum over dim=0"),
    "rolled rows": (lambda f: torch.roll(f, 1, 0), "not known to make each row of one row"),
    "columns over all rows": (lambda f: f.renorm(2, 1, 0.1), "not known to make each row of one row"),
    "flipped rows": (lambda f: f.flip(1, 0), "flip over dim=(1, 0)"),
    "drawn choices": (lambda f: torch.nn.functional.gumbel_softmax(f, dim=1), "random numbers"),
    "drawn in place": (lambda f: f.clone().normal_(), "normal_ is called on rows"),
    "as many classes as there are": (lambda f: torch.nn.functional.one_hot((f[:, 0] > 9).long()), "num_classes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_mix_rows(name):
    function, words = REFUSED[name]
    net = nn.Sequential(nn.SubmanifoldConv(4, 4, 3), nn.Sequential(Rows(function)))
    with torch.no_grad(), pytest.raises(ValueError, match="cannot be streamed") as caught:
        sc.stream(net, scene(count=50), 10**9, progress=lambda *_: pytest.fail("a block was run"))
    assert words in str(caught.value)
    assert "1.0 (Rows)" in str(caught.value)


ALLOWED = {
    "channels": lambda f: torch.cat([f[:, :2], f[:, 2:].square()], 1),
    "norm of a row": lambda f: f / f.norm(dim=1, keepdim=True),
    "heads": lambda f: torch.softmax(f.view(f.shape[0], 2, 2), 2).flatten(1),
    "in place": lambda f: f.clone().mul_(2.0).add_(1.0),
    "a mask": lambda f: torch.where(f > 0, f, 0.1 * f),
    "split": lambda f: torch.cat(list(reversed(f.chunk(2, 1))), 1),
    "doubles": lambda f: f.double().exp().float(),
    "largest": lambda f: f * f.max(1, keepdim=True).values,
}


@pytest.mark.parametrize("name", ALLOWED)
def test_functions_of_rows(name, monkeypatch):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.SubmanifoldConv(4, 4, 3), Rows(ALLOWED[name])), scene()
    forced(monkeypatch, 0, 100)
    with torch.no_grad():
        same(sc.stream(net, x, 10**9), net(x))


def written(look, change):
    """Features after ``change`` of what ``look`` sees of them."""

    def function(f):
        f = f.clone()
        change(look(f))
        return f

    return function


LOOKS = {
    "a slice": lambda f: f[:, :2],
    "a chunk": lambda f: f.chunk(2, 1)[0],
    "a view": lambda f: f.view(-1, 2, 2),
    "the same": lambda f: f.detach(),
    "no copy": lambda f: f.float(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_writing_into_shared_memory(name):
    net = nn.Sequential(nn.SubmanifoldConv(4, 4, 3), Rows(written(LOOKS[name], lambda part: part.mul_(2.0))), nn.ReLU())
    with torch.no_grad(), pytest.raises(ValueError, match="writes in place into a tensor that another one shares"):
        sc.stream(net, scene(count=50), 10**9)


def test_a_chunk_that_is_written_is_not_its_neighbour(monkeypatch):
    def function(f):
        a, b = f.clone().chunk(2, 1)
        a.mul_(2.0)
        return torch.cat([a, b], 1)

    net, x = Rows(function), scene()
    forced(monkeypatch, 0, 100)
    with torch.no_grad():
        same(sc.stream(net, x, 10**9), net(x))


def test_writing_in_place_keeps_the_dtype(monkeypatch):
    weight, x = torch.full((4,), 1.001), scene(dtype=torch.bfloat16)
    net = Rows(lambda f: f.clone().add_(weight).gt_(0.5))
    forced(monkeypatch, 0, 100)
    with torch.no_grad():
        same(sc.stream(net, x, 10**9), net(x))


class Means(nn.SparseModule):
    """Means of items, by a function of the module and these."""

    def __init__(self, function) -> None:
        super().__init__()
        self.pool, self.function = nn.GlobalAvgPool(), function
        self.register_buffer("kept", torch.zeros(2, 4))

    def forward(self, x: sc.SparseTensor) -> torch.Tensor:
        return self.function(self, self.pool(x))


def test_means_that_are_written_in_place(monkeypatch):
    def doubled(_, means):
        means.mul_(2.0)
        return means

    net, x = Means(doubled), scene(dtype=torch.float64)
    forced(monkeypatch, 0, 100)
    with torch.no_grad():
        torch.testing.assert_close(sc.stream(net, x, 10**9), net(x))
        with pytest.raises(ValueError, match="a tensor that is not made of rows"):
            sc.stream(Means(lambda net, means: net.kept.mul_(0.9).add_(means)), x, 10**9)


class Returns(nn.SparseModule):
    """Something beside the features."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: sc.SparseTensor) -> tuple:
        return x, self.function(x)


class Boxed:
    def __init__(self, value) -> None:
        self.value = value


@pytest.mark.parametrize(
    "function",
    [
        lambda x: len(x.features),
        lambda x: x.grid,
        lambda x: x.with_features(torch.ones(len(x.features), 1)),
        lambda x: Boxed(x.features),
        lambda x: [1] * len(x.features),
    ],
    ids=["a count", "a grid", "new rows", "an object", "a list"],
)
def test_results_that_are_the_sample_s(function):
    with torch.no_grad(), pytest.raises(ValueError, match="Returns cannot be streamed: it returns"):
        sc.stream(Returns(function), scene(count=50), 10**9)


def test_results_that_are_always_the_same():
    x, weight = scene(count=50), torch.ones(3)
    for value in (None, 3, "name", weight):
        with torch.no_grad():
            assert sc.stream(Returns(lambda _, value=value: value), x, 10**9)[1] is value


def test_geometry_that_needs_the_whole():
    x = scene(count=50)
    with torch.no_grad():
        for layer, words in (
            (nn.SubmanifoldConv(4, 4, 3, boundary=Boundary.periodic((999,) * 3)), "'periodic' looks at the whole"),
            (nn.SubmanifoldConv(4, 4, 3, boundary="forbid"), r"give Boundary.forbid\(extent\)"),
            (nn.ToDense(), "which voxels the whole scene has"),
        ):
            with pytest.raises(ValueError, match=words) as caught:
                sc.stream(nn.Sequential(nn.ReLU(), layer), x, 10**9)
            assert f"1 ({type(layer).__name__})" in str(caught.value)


def test_an_extent_of_its_own_is_met(monkeypatch):
    torch.manual_seed(0)
    x = scene()
    box = sc.IndexRange((-5, -5, -5), (12, 12, 12))
    net = nn.SubmanifoldConv(4, 3, 3, boundary=Boundary.forbid(box))
    forced(monkeypatch, 0, 60)
    with torch.no_grad():
        got, want = sc.stream(net, x, 10**9), net(x)
    assert torch.equal(got.coords, want.coords)  # a block whose windows all fit sums its own voxel first
    torch.testing.assert_close(got.features, want.features)


def test_arguments():
    net, x = nn.SubmanifoldConv(4, 4, 3), scene(count=20)
    with torch.no_grad():
        with pytest.raises(TypeError, match="net must be a Module"):
            sc.stream(lambda x: x, x, 10**9)
        with pytest.raises(TypeError, match=r"x must be a SparseTensor or a pair"):
            sc.stream(net, x.features, 10**9)
        with pytest.raises(ValueError, match="features must be"):
            sc.stream(net, (x.coords, x.features[1:]), 10**9)
        with pytest.raises(TypeError, match="coords must be integers"):
            sc.stream(net, (x.coords.float(), x.features), 10**9)
        with pytest.raises(ValueError, match="batch_size is 1"):
            sc.stream(net, (x.coords, x.features), 10**9, batch_size=1)
        with pytest.raises(ValueError, match="coords is an array with negative strides"):
            sc.stream(net, (x.coords.numpy()[::-1], x.features), 10**9)
        with pytest.raises(ValueError, match="same voxel"):
            sc.stream(net, (x.coords[[0, 0]], x.features[[0, 0]]), 10**9)
