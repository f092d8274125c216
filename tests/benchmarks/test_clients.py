"""The benchmark of clients, on a network of two layers that needs no client's files."""

from __future__ import annotations

import functools
import itertools
import json
import sys

import numpy as np
import pytest
import torch

from benchmarks.clients import __main__ as command
from benchmarks.clients import equality, networks
from benchmarks.clients.pcdet import _in_boxes
from benchmarks.clients.pointcept import _scatter, _voxel_grid
from benchmarks.clients.scenes import Client, Setting, indoor, lidar, loss_of, tensors
from benchmarks.clients.standing_in import Registry, conv_layer, module, norm_layer
from benchmarks.clients.transformers import kept_in_fp64, segment_csr, varlen
from sparseconv.interop.spconv import pytorch as spconv


class Tiny(torch.nn.Module):
    """A submanifold and a strided layer, with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.net = spconv.SparseSequential(
            spconv.SubMConv3d(4, 8, 3, bias=True, indice_key="a"),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            spconv.SparseConv3d(8, 8, 3, stride=2, padding=1, bias=False),
            torch.nn.BatchNorm1d(8),
        )

    def forward(self, x, coords, shape, items):
        return self.net(spconv.SparseConvTensor(x, coords, shape, items))


def tiny(setting: Setting) -> Client:
    scenes, size = lidar(setting, 4)
    shape = [int(n) for n in size[::-1]]

    def call(net, scene):
        y = net(*scene, shape, 2)
        return y, y.features[:1] * 2

    return Client(Tiny().to(setting.device), scenes, call)


@pytest.fixture
def setting(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for name in ("lidar_ouster_os2_010", "indoor_rooms_pcl_002"):
        np.savez(tmp_path / f"{name}.npz", coords=rng.integers(-12, 12, (300, 3)))
    monkeypatch.setitem(networks.CLIENTS, "tiny", tiny)
    return Setting(tmp_path, tmp_path, "cpu", scans=2, reach=8)


# ---- stand-ins


def test_a_file_becomes_a_module_that_finds_what_is_stood_in_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    file = tmp_path / "net.py"
    file.write_text("from ..registry import KINDS\n\n\n@KINDS.register_module()\nclass Net:\n    pass\n")
    for name in ("stranger", "stranger.models"):
        module(name)
    module("stranger.registry", KINDS=Registry())
    made = module("stranger.models.net", file)
    assert made.Net.__name__ == "Net"
    assert sys.modules["stranger"].models.net is made


def test_a_registry_is_filled_in_each_way():
    registry = Registry()
    assert registry.register_module(Tiny) is Tiny
    assert registry.register_module()(Tiny) is Tiny
    assert registry.register_module("tiny")(Tiny) is Tiny
    registry._register_module(spconv.SubMConv3d, "SubMConv3d", force=True)
    cfg = {"type": "SubMConv3d", "indice_key": "a"}
    layer = conv_layer(registry)(cfg, 3, 5, 3, stride=1, bias=False)
    assert (layer.out_channels, layer.indice_key, layer.bias) == (5, "a", None)
    assert cfg == {"type": "SubMConv3d", "indice_key": "a"}


def test_a_norm_takes_its_options_and_refuses_an_unknown_type():
    name, norm = norm_layer({"type": "BN1d", "eps": 1e-3, "momentum": 0.01}, 6)
    assert (name, norm.eps, norm.momentum, norm.num_features) == ("bn", 1e-3, 0.01, 6)
    with pytest.raises(ValueError, match="GN"):
        norm_layer({"type": "GN"}, 6)


# ---- scenes


def test_scenes_are_distinct_cells_of_the_grid_batch_first(setting):
    scenes, size = lidar(setting, 5, items=3)
    assert (len(scenes), size.tolist()) == (2, [16, 16, 40])
    x, coords = scenes[0]
    assert x.shape == (len(coords), 5)
    assert coords.dtype == torch.int32
    assert coords[:, 0].unique().tolist() == [0, 1, 2]
    assert len(coords.unique(dim=0)) == len(coords)
    assert bool((coords[:, 1:] >= 0).all())
    assert bool((coords[:, 1:] < torch.tensor(size[::-1].copy())).all())  # z first
    assert not torch.equal(coords, lidar(setting, 5, items=3)[0][1][1])


def test_an_indoor_scan_is_kept_whole_unless_a_reach_is_given(setting):
    near, whole = indoor(setting), indoor(setting._replace(reach=None), items=2)
    assert [len(parts) for parts in whole] == [2, 2]
    assert len(near[0][0]) < len(whole[0][0])
    assert whole[0][0].amin(0).tolist() == [0, 0, 0]


def test_a_loss_takes_each_part_of_an_answer():
    y = torch.ones(3, 2)
    sparse = spconv.SparseConvTensor(2 * y, torch.tensor([[0, 0, 0, k] for k in range(3)]).int(), [1, 1, 3], 1)
    assert [t.mean().item() for t in tensors((y, sparse))] == [1.0, 2.0]
    assert loss_of((y, sparse)).item() == 500.0
    assert loss_of(y).item() == 100.0


# ---- values


def test_parameters_are_filled_alike_whatever_they_were():
    one, other = Tiny().double(), Tiny().double()
    with torch.no_grad():
        other.net[0].weight.mul_(3)
    equality.fill(one)
    equality.fill(other)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert 0.5 < one.net[1].weight.mean().item() < 1.5
    assert -0.5 < one.net[1].bias.mean().item() < 0.5


def test_a_step_that_is_written_equals_itself(setting, tmp_path, capsys):
    file = tmp_path / "step.pt"
    (written,) = equality.equal(file, ["tiny"], setting, "one")
    (row,) = equality.equal(file, ["tiny"], setting, "other")
    assert written["voxels"] == row["voxels"] > 50
    assert (row["library"], row["with"]) == ("other", "one")
    assert (row["output"], row["evaluated"], row["buffer"], row["gradient"]) == (0, 0, 0, 0)
    assert row["gradients"] == 8  # of the features, two weights, a bias, and two for each norm
    assert row["of_rounding_alone"] == 1  # the bias before a norm
    assert "tiny" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["output 0", "evaluated 1", "gradient of net.0.weight", "buffer net.1.running_mean"])
def test_a_difference_is_seen_in_each_kind(setting, kind):
    theirs = equality.step(networks.make("tiny", setting))
    mine = {name: value.clone() for name, value in theirs.items()}
    mine[kind] = mine[kind] * 1.25
    row = equality.differences(mine, theirs)
    assert row.pop(kind.split()[0]) == pytest.approx(0.25)
    assert sum(row[k] for k in ("output", "evaluated", "gradient", "buffer") if k in row) == 0
    mine[kind] = mine[kind] * float("nan")
    assert np.isnan(equality.differences(mine, theirs)[kind.split()[0]])


def test_a_gradient_that_should_be_rounding_alone_is_seen(setting):
    theirs = equality.step(networks.make("tiny", setting))
    mine = {**theirs, "gradient of net.0.bias": torch.ones(8, dtype=torch.float64)}
    row = equality.differences(mine, theirs)
    assert row["worst_gradient"] == "gradient of net.0.bias"
    assert row["gradient"] > 1


def test_steps_of_other_networks_are_refused(setting):
    theirs = equality.step(networks.make("tiny", setting))
    mine = dict(theirs)
    mine["output 0"] = mine["output 0"][:1]
    with pytest.raises(ValueError, match="output 0: shapes"):
        equality.differences(mine, theirs)
    del mine["output 0"]
    with pytest.raises(ValueError, match="output 0"):
        equality.differences(mine, theirs)


# ---- what stands in for operators


def test_rows_are_reduced_by_their_index():
    src, index = torch.randn(20, 3), torch.arange(20) * 7 % 4
    for reduce in ("sum", "mean"):
        want = torch.stack([getattr(src[index == i], reduce)(0) for i in range(4)])
        torch.testing.assert_close(_scatter(src, index, reduce=reduce), want)
    ends = torch.tensor([0, 3, 4, 20])
    want = torch.stack([src[a:b].amax(0) for a, b in itertools.pairwise(ends)])
    torch.testing.assert_close(segment_csr(src, ends, "max"), want)


def test_cells_are_numbered_apart():
    points, batch = torch.rand(50, 3) * 9 - 3, torch.randint(0, 2, (50,))
    numbers = _voxel_grid(points, 2.5, batch)
    cells = torch.cat([batch[:, None], ((points - points.amin(0)) / 2.5).floor().long()], 1)
    same = (cells[:, None] == cells[None]).all(2)
    assert torch.equal(numbers[:, None] == numbers[None], same)


def test_points_lie_in_their_boxes():
    boxes = torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0], [5, 5, 5, 1, 2, 4, 0]]])
    points = torch.tensor([[[0.9, 0.9, -0.9], [5.4, 4.1, 6.9], [5.6, 5, 5], [3, 3, 3]]])
    assert _in_boxes(points, boxes).tolist() == [[0, 1, -1, -1]]


@pytest.mark.parametrize("ends", [[0, 4, 5, 10], [0, 5, 10]])
def test_packed_attention_is_attention_of_each_sequence(ends):
    qkv = torch.randn(10, 3, 2, 4)
    y = varlen(qkv, torch.tensor(ends, dtype=torch.int32), 5, 0.0, 0.3)
    for a, b in itertools.pairwise(ends):
        q, k, v = qkv[a:b].unbind(1)
        weights = (torch.einsum("ihc,jhc->hij", q, k) * 0.3).softmax(2)
        torch.testing.assert_close(y[a:b], torch.einsum("hij,jhc->ihc", weights, v))


def test_fp64_is_kept_and_no_other_dtype():
    with kept_in_fp64():
        wide, single = torch.ones(2).double(), torch.ones(2)
        assert wide.half().dtype == wide.float().dtype == wide.to(torch.bfloat16).dtype == torch.float64
        assert single.half().dtype == torch.float16
        assert (single.to(torch.bfloat16).dtype, wide.to(torch.float32).dtype) == (torch.bfloat16, torch.float32)
    assert torch.ones(2).double().half().dtype == torch.float16


# ---- the command


def run(monkeypatch, folder, *words):
    there = ["--library", "sparseconv", "--clients", str(folder), "--data", str(folder), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.clients", *there, "--client", "tiny", *words])
    monkeypatch.setattr("sparseconv.interop.spconv.install", lambda: None)
    monkeypatch.setitem(sys.modules, "spconv.constants", sys.modules["sparseconv.interop.spconv"].constants)
    command.main()


def test_times_are_written_row_by_row(setting, tmp_path, monkeypatch):
    file = tmp_path / "times.json"
    words = ["--json", str(file), "--accelerate", "--check", "--reach", "8", "--repeats", "2", "--dtype", "fp32"]
    run(monkeypatch, tmp_path, *words)
    found = json.loads(file.read_text())
    (row,) = found["rows"]
    assert (row["client"], row["result_off"], row["gradients_off"]) == ("tiny", 0, 0)
    assert row["step"]["ms"] > 0 < row["inference"]["ms"]
    assert "sc.accelerate" in row["explained"] or "replayed" in row["explained"]
    assert "--reach 8" in found["facts"]["command"]
    assert str(tmp_path) not in found["facts"]["command"]


@pytest.mark.slow
def test_a_compiled_network_is_measured_beside_eager(setting, tmp_path, monkeypatch):
    file = tmp_path / "compiled.json"
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # no C++ compiler
    run(monkeypatch, tmp_path, "--json", str(file), "--compiled", "--reach", "8", "--repeats", "2", "--dtype", "fp32")
    (row,) = json.loads(file.read_text())["rows"]
    assert row["compiled"]["step"]["ms"] > 0 < row["compiled"]["inference"]["ms"]
    assert all(count > 0 for count in row["compiled"]["breaks"].values())
    assert row["compiled"]["graphs"] >= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --json FILE for times"),
        (("--json", "a", "--compiled", "--accelerate"), "--compiled measures"),
        (("--equal", "a", "--device", "cuda"), "--device cpu, too"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, said, setting, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, *words)
    assert said in capsys.readouterr().err
