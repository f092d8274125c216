"""A scene block by block is the whole scene, to the bit."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparseconv as sc
from sparseconv import nn
from sparseconv.trace.boxes import within
from tests.streaming.scenes import NETWORKS, forced, same, scene
from tests.trees import that_look_into_sparse_tensors


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("cuts", "rows"), [(0, 300), (0, 10**9), (2, 200), (100, 300)])
def test_blocks_are_the_whole(name, cuts, rows, monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS[name]().eval(), scene()
    forced(monkeypatch, cuts, rows)
    with torch.no_grad():
        same(sc.stream(net, x, 10**9), net(x))


@pytest.mark.parametrize("name", ["conv", "several", "pruned"])
def test_a_result_lies_on_a_grid_of_its_own_where_trees_look_into_sparse_tensors(name, monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS[name]().eval(), scene()
    forced(monkeypatch, 0, 300)
    with that_look_into_sparse_tensors(), torch.no_grad():
        same(sc.stream(net, x, 10**9), net(x))


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_coordinates_of_any_integers_give_the_same_bits(kind, monkeypatch):
    torch.manual_seed(0)
    net, x = NETWORKS["conv"]().eval(), scene()
    coords = x.coords.clone()
    coords[:, 1:] += 100 - coords[:, 1:].amin(0)  # within uint8, and about the middle of int8
    coords[:, 1:] -= 0 if kind == torch.uint8 else 130
    assert int(coords.min()) >= torch.iinfo(kind).min
    assert int(coords.max()) <= torch.iinfo(kind).max
    forced(monkeypatch, 0, 100)
    with torch.no_grad():
        want = sc.stream(net, (coords, x.features), 10**9)
        got = sc.stream(net, (coords.to(kind), x.features), 10**9)
        same(got, want)
        same(got, net(sc.SparseTensor(sc.VoxelGrid(coords, 2), x.features)).features)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_a_box_wider_than_the_integers_of_coords(kind):
    coords = torch.tensor([[0, 5], [1, 7], [1, 120]]).to(kind)
    for box, want in [
        (((0, -(2**40)), (2, 2**40)), [True, True, True]),
        (((-3, 6), (2, 40_000)), [False, True, True]),
        (((0, 2**40), (2, 2**41)), [False, False, False]),
        (((0, -(2**41)), (2, -(2**40))), [False, False, False]),
        (((1, -300), (2, 8)), [False, True, False]),
    ]:
        assert within(coords, sc.IndexRange(*box)).tolist() == want


@given(
    st.integers(1, 4),
    st.integers(1, 200),
    st.integers(1, 3),
    st.integers(0, 10**6),
    st.sampled_from([10**5, 3 * 10**5, 10**6, 10**9]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_scene_within_any_budget(rank, count, batch, seed, budget, dtype):
    x = scene(rank, count, batch, seed=seed, dtype=dtype)
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.SubmanifoldConv(4, 4, 3, rank=rank),
        nn.BatchNorm(4),
        nn.ReLU(),
        nn.Conv(4, 6, 3, stride=2, rank=rank),
        nn.SubmanifoldConv(6, 4, 3, dilation=2, rank=rank),
    )
    net = net.to(dtype).eval()
    with torch.no_grad():
        want = net(x)
        try:
            got = sc.stream(net, x, budget)
        except ValueError as error:
            assert "allow at least that" in str(error)  # noqa: PT017
            assert budget < 10**9
        else:
            same(got, want)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("name", ["unet", "second", "resnet", "several", "pruned"])
def test_an_empty_scene_and_one_voxel(name, count):
    torch.manual_seed(0)
    x = sc.SparseTensor(sc.VoxelGrid(torch.full((count, 4), 3), 4), torch.randn(count, 4))
    net = NETWORKS[name]().eval()
    with torch.no_grad():
        want = net(x)
        got = sc.stream(net, x, 10**7)
    if name == "resnet" and count:  # a product of one row is summed in another order
        torch.testing.assert_close(got, want)
    else:
        same(got, want)


def test_arrays_and_mapped_files(tmp_path):
    import numpy as np

    x, net = scene(), NETWORKS["several"]().eval()
    np.save(tmp_path / "coords.npy", x.coords.numpy())
    np.save(tmp_path / "features.npy", x.features.numpy())
    pair = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("coords", "features")]
    with torch.no_grad():
        want, got = net(x), sc.stream(net, pair, 2 * 10**6)
    same(got["fine"], want["fine"].features)
    features, coords = got["coarse"]
    assert torch.equal(coords, want["coarse"].coords)
    same(features, want["coarse"].features)
    same(got["most"], want["most"])


def test_progress_counts_blocks(monkeypatch):
    x, seen = scene(), []
    forced(monkeypatch, 0, 100)
    with torch.no_grad():
        sc.stream(NETWORKS["conv"]().eval(), x, 10**9, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 3
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]


def test_no_value_beyond_its_box_is_used(monkeypatch):
    """Rows that are not right are poisoned as soon as they are made: no result may be NaN."""
    from sparseconv.streaming.work import Values, Work
    from sparseconv.trace.boxes import within
    from sparseconv.trace.program import InputRows, Step

    class Poisoned(Values):
        def __setitem__(self, number, value):
            if isinstance(number, int) and number >= 0 and self.steps[number].is_rows:
                step: Step = self.steps[number]
                if value.__class__ is torch.Tensor and value.is_floating_point():
                    grid, box = self[step.place], self.boxes.get(number)
                    wrong = torch.ones(len(grid), dtype=torch.bool) if box is None else ~within(grid.coords, box)
                    value = value.masked_fill(wrong[:, None], float("nan"))
                assert not isinstance(step, InputRows) or step.number == 1
            super().__setitem__(number, value)

    original = Work.run

    def run(self, values, boxes):
        poisoned = Poisoned(values.shared)
        poisoned.steps, poisoned.boxes = self.program.steps, boxes
        dict.update(poisoned, values)
        original(self, poisoned, boxes)
        dict.update(values, poisoned)

    monkeypatch.setattr(Work, "run", run)
    forced(monkeypatch, 3, 200)
    for name in ("unet", "second", "convnext", "pools", "several"):
        torch.manual_seed(0)
        net, x = NETWORKS[name]().eval(), scene()
        with torch.no_grad():
            same(sc.stream(net, x, 10**9), net(x))


def test_a_bar_is_drawn_of_the_blocks(monkeypatch, capsys):
    net, x = NETWORKS["conv"]().eval(), scene()
    forced(monkeypatch, 0, 100)
    counts = []
    with torch.no_grad():
        want = sc.stream(net, x, 10**9, progress=lambda *at: counts.append(at))
        assert capsys.readouterr().out == ""
        same(sc.stream(net, x, 10**9, progress=False), want)
        assert capsys.readouterr().out == ""
        same(sc.stream(net, x, 10**9, progress=True), want)
    done, total = counts[-1]
    assert done == total > 2
    assert f"{total}/{total} blocks" in capsys.readouterr().out


def test_progress_that_cannot_be_told(monkeypatch):
    net, x = NETWORKS["conv"]().eval(), scene()
    with torch.no_grad():
        with pytest.raises(TypeError, match="progress must be True or a function of"):
            sc.stream(net, x, 10**9, progress="bar")
        monkeypatch.setitem(sys.modules, "rich.progress", None)
        with pytest.raises(ImportError, match=r"pip install 'sparseconv\[cli\]'"):
            sc.stream(net, x, 10**9, progress=True)


def test_a_scene_in_a_file_of_safetensors(tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    net, x = NETWORKS["conv"]().eval(), scene()
    forced(monkeypatch, 0, 100)
    safetensors.save_file({"coords": x.coords, "features": x.features}, tmp_path / "scene.safetensors")
    held = safetensors.load_file(tmp_path / "scene.safetensors")
    with torch.no_grad():
        got = sc.stream(net, (held["coords"], held["features"]), 10**9, batch_size=2)
        assert torch.equal(got, net(x).features)
