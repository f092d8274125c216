"""Whole checkpoints: there, back, and every way in which a file can be wrong."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.interop import LAYOUTS, convert, convert_state, load, read, write
from sparseconv.interop.command import app
from tests.interop.scenes import scene


def network():
    """A network of ours with a box kernel, one of one tap, a norm, a linear layer, and widths that differ."""
    return nn.Sequential(
        nn.SubmanifoldConv(5, 6, 3, bias=True),
        nn.SubmanifoldConv(6, 4, (3, 1, 5), bias=False),
        nn.BatchNorm(4),
        nn.SubmanifoldConv(4, 7, 1),
        nn.Linear(7, 3),
    ).eval()


def randomised(module):
    for p in module.parameters():
        torch.nn.init.normal_(p)
    for b in module.buffers():
        if b.is_floating_point():
            torch.nn.init.uniform_(b, 0.5, 1.5)
    return module


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("library", LAYOUTS)
def test_there_and_back_through_files(library, suffix, tmp_path):
    net = randomised(network())
    sizes = {"1.*": (3, 1, 5)}
    write(net.state_dict(), tmp_path / "ours.pth")
    report = convert(tmp_path / "ours.pth", tmp_path / f"theirs{suffix}", "sparseconv", library, kernel_sizes=sizes)
    assert report.convolutions == 3
    assert f"sparseconv -> {library}" in str(report)
    one_tap = {"3.weight": 1} if library == "fvdb" else {}
    back = convert(
        tmp_path / f"theirs{suffix}",
        tmp_path / "back.pth",
        library,
        "sparseconv",
        kernel_sizes={**sizes, **one_tap},
    )
    assert back.convolutions == 3
    assert not list(tmp_path.glob("*.part"))
    state = read(tmp_path / "back.pth")
    assert sorted(state) == sorted(net.state_dict())
    for key, value in net.state_dict().items():
        assert torch.equal(state[key], value), key


def test_a_network_of_spconvs_gives_its_numbers_here():
    theirs = randomised(
        spconv.SparseSequential(
            spconv.SubMConv3d(5, 6, 3),
            spconv.SubMConv3d(6, 4, (3, 1, 5), bias=False),
            torch.nn.BatchNorm1d(4),
            spconv.SubMConv3d(4, 7, 1),
            torch.nn.Linear(7, 3),
        ).eval()
    )
    ours = network()
    load(ours, theirs.state_dict(), "spconv")
    x = spconv.SparseConvTensor(*scene())
    torch.testing.assert_close(ours(x.to_sparse_tensor()).features, theirs(x).features, atol=1e-4, rtol=1e-4)


def test_strided_layers_of_one_tap_are_named():
    layer = randomised(spconv.SparseConv3d(5, 7, 1, 2, bias=False))
    ours = nn.Conv(5, 7, 1, stride=2, bias=False)
    load(ours, layer.state_dict(), "spconv", strided_one_tap=["weight"])
    x = spconv.SparseConvTensor(*scene())
    y = ours(x.to_sparse_tensor())
    want = layer(x)
    torch.testing.assert_close(y.features[y.grid.lookup(want.indices)], want.features)


def test_minkowskis_names_and_shapes():
    state = {
        "conv.kernel": torch.randn(27, 4, 8),
        "conv.bias": torch.randn(1, 8),
        "conv_in.kernel": torch.randn(15, 8, 8),
        "bn.bn.weight": torch.randn(8),
        "bn.bn.bias": torch.randn(8),
        "bn.bn.running_mean": torch.randn(8),
        "bn.bn.running_var": torch.rand(8),
        "bn.bn.num_batches_tracked": torch.tensor(3),
        "final.kernel": torch.randn(8, 20),
        "final.bias": torch.randn(1, 20),
        "head.linear.weight": torch.randn(5, 20),
        "head.linear.bias": torch.randn(5),
    }
    ours, report = convert_state(state, "minkowski", "sparseconv", kernel_sizes={"conv_in.*": (3, 1, 5)})
    assert {k: tuple(v.shape) for k, v in ours.items()} == {
        "conv.weight": (27, 4, 8),
        "conv.bias": (8,),
        "conv_in.weight": (15, 8, 8),
        "bn.weight": (8,),
        "bn.bias": (8,),
        "bn.running_mean": (8,),
        "bn.running_var": (8,),
        "bn.num_batches_tracked": (),
        "final.weight": (1, 8, 20),
        "final.bias": (20,),
        "head.weight": (5, 20),
        "head.bias": (5,),
    }
    assert report.notes == ()
    _, report = convert_state({"down.kernel": torch.randn(8, 4, 8)}, "minkowski", "sparseconv")
    assert any("padding 0" in note for note in report.notes)
    back, _ = convert_state(ours, "sparseconv", "minkowski", kernel_sizes={"conv_in.*": (3, 1, 5)})
    assert {k: tuple(v.shape) for k, v in back.items() if k in state} == {
        k: tuple(v.shape) for k, v in state.items() if not k.startswith("head.linear.bias")
    }
    for key in set(back) & set(state):
        assert torch.equal(back[key], state[key]), key


def test_renaming_and_collisions():
    state = {"a.weight": torch.zeros(27, 2, 3), "b.weight": torch.zeros(27, 2, 3)}
    renamed, _ = convert_state(state, "sparseconv", "spconv", rename=lambda key: "net." + key)
    assert list(renamed) == ["net.a.weight", "net.b.weight"]
    with pytest.raises(ValueError, match=r"two tensors become 'w'.*b.weight"):
        convert_state(state, "sparseconv", "spconv", rename=lambda key: "w")


# ---- wrong files


@pytest.mark.parametrize(
    ("state", "from_", "words"),
    [
        ({"a.kernel": (27, 2, 3)}, "spconv", r"a.kernel \(27, 2, 3\).*could be minkowski, torchsparse"),
        ({"a.weight": (3, 3, 3, 3, 2)}, "minkowski", r"a.weight \(3, 3, 3, 3, 2\).*spconv"),
        ({"a.kernel": (27, 2, 3), "b.weight": (3, 2, 3, 3)}, "minkowski", r"b.weight.*skip"),
        ({"fc.weight": (10, 4)}, "spconv", r"no convolution.*fc.weight \(10, 4\).*no library"),
        ({"a.kernel": (12, 2, 3)}, "torchsparse", r"a.kernel \(12, 2, 3\).*no cube"),
        ({"a.weight": (27, 2, 2, 3)}, "warpconvnet", r"a.weight \(27, 2, 2, 3\).*groups"),
        ({}, "spconv", "no convolution"),
    ],
)
def test_foreign_weights_are_named(state, from_, words):
    with pytest.raises(ValueError, match=words):
        convert_state({k: torch.zeros(s) for k, s in state.items()}, from_, "sparseconv")


def test_patterns_that_match_nothing_are_an_error():
    state = {"a.weight": torch.zeros(27, 2, 3)}
    for option in ({"skip": ["z*"]}, {"kernel_sizes": {"z": 3}}, {"groups": {"z": 2}}):
        with pytest.raises(ValueError, match=r"no key matches z.*a\.weight"):
            convert_state(state, "sparseconv", "spconv", **option)


def test_dense_layers_are_skipped_by_name():
    state = {"a.weight": torch.zeros(3, 3, 3, 3, 2), "dense.weight": torch.randn(4, 2, 3, 3, 3)}
    got, report = convert_state(state, "spconv", "sparseconv", skip=["dense.*"])
    assert got["a.weight"].shape == (27, 2, 3)
    assert torch.equal(got["dense.weight"], state["dense.weight"])
    assert report.convolutions == 1


def test_loading_names_every_difference_and_loads_nothing():
    net = network()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state = {k: v.clone() + 1 for k, v in before.items()}
    state["0.weight"] = torch.zeros(27, 5, 8)
    state["9.weight"] = state.pop("4.weight")
    with pytest.raises(
        ValueError, match=r"1 missing: 4.weight \(3, 7\).*1 unknown: 9.weight.*0.weight is \(27, 5, 8\)"
    ):
        load(net, state, "sparseconv", kernel_sizes={"1.*": (3, 1, 5)})
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_file_is_never_run(tmp_path):
    trap = tmp_path / "ran"
    with open(tmp_path / "evil.pth", "wb") as file:
        pickle.dump({"a.weight": Bomb(str(trap))}, file)
    torch.save({"a.weight": Bomb(str(trap))}, tmp_path / "evil2.pth")
    torch.save(network(), tmp_path / "module.pth")
    for name in ("evil.pth", "evil2.pth", "module.pth"):
        with pytest.raises(ValueError, match=rf"{name} holds more than tensors"):
            read(tmp_path / name)
    assert not trap.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_truncated_missing_and_strange_files(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    write(network().state_dict(), path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"a{suffix}"):
            read(path)
    with pytest.raises(ValueError, match="no checkpoint"):
        read(tmp_path / "none.pth")


def test_what_training_programs_wrap_around_parameters(tmp_path):
    state = {"a.weight": torch.zeros(27, 2, 3)}
    torch.save({"epoch": 3, "optimizer": {"lr": 0.1}, "model_state": state}, tmp_path / "a.pth")
    assert list(read(tmp_path / "a.pth")) == ["a.weight"]
    torch.save({"epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "b.pth")
    with pytest.raises(ValueError, match="without tensors"):
        read(tmp_path / "b.pth")
    torch.save([torch.zeros(3)], tmp_path / "c.pth")
    with pytest.raises(ValueError, match="got list"):
        read(tmp_path / "c.pth")


# ---- the command


def test_the_command(tmp_path):
    write(network().state_dict(), tmp_path / "a.pth")
    options = ["--from", "sparseconv", "--to", "spconv", "--kernel", "1.*=3x1x5"]
    done = CliRunner().invoke(app, [str(tmp_path / "a.pth"), str(tmp_path / "b.safetensors"), *options])
    assert done.exit_code == 0, done.output
    assert "3 convolutions permuted" in done.output
    assert read(tmp_path / "b.safetensors")["1.weight"].shape == (4, 3, 1, 5, 6)
    done = CliRunner().invoke(app, [str(tmp_path / "a.pth"), str(tmp_path / "c.pth"), "--from", "minkowski"])
    assert done.exit_code == 1
    assert "0.weight" in done.output
    assert not (tmp_path / "c.pth").exists()


def test_importing_the_room_is_light():
    heavy = ("triton", "cupy", "rich", "typer", "safetensors")
    program = f"import sys, sparseconv.interop; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
