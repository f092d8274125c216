"""The benchmark of clients, on a network of two layers that needs no client's files."""

from __future__ import annotations

import functools
import json
import sys

import numpy as np
import pytest
import torch

from benchmarks.clients import __main__ as command
from benchmarks.clients import equality, networks
from benchmarks.clients.scenes import Client, Setting, indoor, lidar, loss_of, tensors
from benchmarks.clients.standing_in import Registry, conv_layer, module, norm_layer
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
    assert "graphs need an NVIDIA GPU" in row["explained"]
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
