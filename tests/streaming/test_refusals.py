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
        with pytest.raises(ValueError, match="same voxel"):
            sc.stream(net, (x.coords[[0, 0]], x.features[[0, 0]]), 10**9)
