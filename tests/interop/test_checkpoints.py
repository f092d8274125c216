"""Whole checkpoints: there, back, and every way in which a file can be wrong."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import re
import zipfile

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.cli import app
from sparseconv.interop import LAYOUTS, convert, convert_state, load, read, write
from tests.forked import printed
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
    with pytest.raises(ValueError):  # however the class is called, it is not looked up
        read(tmp_path / "evil2.pth", ignore_classes=["posix.mkdir", "os.mkdir", "nt.mkdir"])
    assert not trap.exists()


def training_checkpoint(**more):
    """What training programs save: parameters, optimizer, scheduler, numbers of numpy, states of generators."""
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {
        "state_dict": {"a.weight": torch.randn(16, 3, 3, 3, 4)},
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(),
        "epoch": 3,
        "best_metric_value": np.float64(0.7),
        "steps": np.int64(1000),
        "confusion": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "random": (random.getstate(), np.random.RandomState(0).get_state(), torch.get_rng_state()),
        **more,
    }


def test_a_training_checkpoint_with_a_numpy_number_opens(tmp_path):
    torch.save(training_checkpoint(), tmp_path / "a.pth")
    assert list(read(tmp_path / "a.pth")) == ["a.weight"]
    convert(tmp_path / "a.pth", tmp_path / "b.pth", "spconv", "sparseconv")
    assert read(tmp_path / "b.pth")["a.weight"].shape == (27, 4, 16)


def test_other_classes_are_named_and_left_aside_where_that_is_asked(tmp_path):
    made = training_checkpoint(args=argparse.Namespace(lr=0.1, bomb=Bomb(str(tmp_path / "ran"))))
    torch.save(made, tmp_path / "a.pth")
    with pytest.raises(
        ValueError, match=r"a\.pth .*objects of argparse\.Namespace, posix\.mkdir\. Name .*ignore_classes"
    ):
        read(tmp_path / "a.pth")
    with pytest.raises(ValueError, match="posix"):
        read(tmp_path / "a.pth", ignore_classes=["argparse.Namespace"])
    torch.save(training_checkpoint(args=argparse.Namespace(lr=0.1)), tmp_path / "a.pth")
    state = read(tmp_path / "a.pth", ignore_classes=["argparse.Namespace"])
    assert torch.equal(state["a.weight"], torch.load(tmp_path / "a.pth", weights_only=False)["state_dict"]["a.weight"])
    options = ["--from", "spconv", "--ignore-class", "argparse.Namespace"]
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "a.pth"), str(tmp_path / "b.pth"), *options])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "ran").exists()


# ---- weights of another order


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 3, 3, 4, 16), (3, 3, 3, 16, 32)],
        [(3, 3, 3, 3, 16), (3, 3, 3, 16, 16)],  # the first alone could be either
        [(3, 1, 1, 64, 128)],
        [(1, 1, 1, 64, 128)],
        [(3, 1, 1, 4, 8)],
        [(5, 5, 5, 1, 8)],
    ],
)
def test_an_old_spconv_checkpoint_is_never_garbled(tmp_path, shapes):
    old = {f"{n}.weight": torch.randn(shape) for n, shape in enumerate(shapes)}
    write(old, tmp_path / "old.pth")
    with pytest.raises(ValueError, match=r"is no weight of spconv.*1\.x.*\(\*kernel, C_in, C_out\): use spconv-rsck"):
        convert(tmp_path / "old.pth", tmp_path / "new.pth", "spconv", "sparseconv")
    assert not (tmp_path / "new.pth").exists()
    for name in ("spconv-rsck", "spconv1"):
        convert(tmp_path / "old.pth", tmp_path / "new.pth", name, "sparseconv")
        for key, weight in read(tmp_path / "new.pth").items():
            assert torch.equal(weight, old[key].flatten(0, 2)), key


def test_a_new_spconv_checkpoint_is_never_taken_for_an_old_one(tmp_path):
    for shape in [
        (16, 3, 3, 3, 4),
        (64, 1, 1, 1, 64),
        (128, 3, 1, 1, 64),
        (1, 3, 3, 3, 16),
        (3, 3, 3, 3, 16),
        (8, 7, 7, 7, 1),
    ]:
        convert_state({"a.weight": torch.zeros(shape)}, "spconv", "sparseconv")
    for shape in [(16, 3, 3, 3, 4), (64, 1, 1, 1, 64), (128, 3, 1, 1, 64)]:
        for name in ("spconv-rsck", "spconv-rskc"):
            with pytest.raises(ValueError, match=r"\(C_out, \*kernel, C_in\): use spconv\."):
                convert_state({"a.weight": torch.zeros(shape)}, name, "sparseconv")
    odd = {"a.weight": torch.zeros(3, 3, 3, 5, 16)}  # three channels out of a box of 3 x 3 x 5, which must be said
    with pytest.raises(ValueError, match="kernel_sizes"):
        convert_state(odd, "spconv", "sparseconv")
    ours, _ = convert_state(odd, "spconv", "sparseconv", kernel_sizes={"a.*": (3, 3, 5)})
    assert ours["a.weight"].shape == (45, 16, 3)


# ---- files that ask for more, and links


def test_archives_are_held_to_their_checksums_and_sizes(tmp_path):
    path = tmp_path / "a.pth"
    write({"a.weight": torch.randn(27, 8, 8)}, path)
    whole = path.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"its archive is damaged.*CRC"):
        read(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(500 << 20))
    with pytest.raises(ValueError, match="unfolds to 524,288,000 bytes"):
        read(path)
    torch.save({"a.weight": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(ValueError, match="unfolds to 4,398,046,511,104 bytes"):
        read(path)
    path.write_bytes(whole)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[0], b"another")
    with pytest.raises(ValueError, match="two of its members are called"):
        read(path)
    torch.save({"a.weight": torch.eye(3).to_sparse()}, path)
    with pytest.raises(ValueError, match="plain tensors"):
        read(path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_writing_a_checkpoint_follows_no_link(tmp_path, suffix):
    victim, out = tmp_path / "victim", tmp_path / f"o{suffix}"
    for name in (out.name, out.name + ".part"):
        victim.write_text("mine")
        os.symlink(victim, tmp_path / name)
    write({"a": torch.ones(3)}, out)
    assert victim.read_text() == "mine"
    assert not out.is_symlink()
    assert torch.equal(read(out)["a"], torch.ones(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["victim", out.name, out.name + ".part"])
    before = out.read_bytes()
    with pytest.raises(TypeError, match="'a' is a str"):
        write({"a": "no tensor"}, out)
    assert out.read_bytes() == before
    if suffix == ".pth":  # as any new file's; safetensors keeps its own to their owner
        umask = os.umask(0)
        os.umask(umask)
        assert out.stat().st_mode & 0o777 == 0o666 & ~umask


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


@pytest.mark.parametrize("text", [b"1 2 3\n", b"\x17\xe3 noise", b""])
def test_a_file_of_another_kind_is_called_no_checkpoint(tmp_path, text):
    (tmp_path / "cloud.pth").write_bytes(text)
    with pytest.raises(ValueError, match="cannot be read, truncated or not a checkpoint"):
        read(tmp_path / "cloud.pth")


# ---- the command


def test_the_command(tmp_path):
    write(network().state_dict(), tmp_path / "a.pth")
    options = ["--from", "sparseconv", "--to", "spconv", "--kernel", "1.*=3x1x5"]
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "a.pth"), str(tmp_path / "b.safetensors"), *options])
    assert done.exit_code == 0, done.output
    assert "3 convolutions permuted" in done.output
    assert read(tmp_path / "b.safetensors")["1.weight"].shape == (4, 3, 1, 5, 6)
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "a.pth"), str(tmp_path / "c.pth"), "--from", "minkowski"])
    assert done.exit_code == 1
    assert "0.weight" in done.output
    assert not (tmp_path / "c.pth").exists()


def test_the_command_checks_libraries_before_it_reads(tmp_path):
    for option in ("--from", "--to"):
        done = CliRunner().invoke(
            app, ["convert", str(tmp_path / "none.pth"), str(tmp_path / "c.pth"), option, "nonsense"]
        )
        assert (done.exit_code, "no layout 'nonsense'" in done.output) == (1, True)


@pytest.mark.parametrize(("name_in", "name_out"), [("a.onnx", "b.pth"), ("a.pth", "b.onnx"), ("a.pth", "b")])
def test_the_command_refuses_other_suffixes(name_in, name_out, tmp_path):
    done = CliRunner().invoke(app, ["convert", str(tmp_path / name_in), str(tmp_path / name_out), "--from", "spconv"])
    assert (done.exit_code, "checkpoints end with .pth" in " ".join(done.output.split())) == (1, True), done.output


def test_the_command_lists_every_library_and_spconv_first():
    (option,) = (part for part in typer.main.get_command(app).commands["convert"].params if part.name == "from_")
    said = option.help.partition(":")[2]
    assert said.startswith(" spconv,")
    assert set(LAYOUTS) <= set(re.findall(r"[\w-]+", said))


def test_the_command_looks_for_the_folder_before_it_reads(tmp_path):
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path / "none.pth"), str(tmp_path / "no" / "c.pth"), "--from", "spconv"]
    )
    assert (done.exit_code, "does not exist: create it" in " ".join(done.output.split())) == (1, True), done.output


def test_the_command_tells_published_networks(tmp_path):
    keys = {"conv_input.0": (16, 3, 3, 3, 4), "conv1.0.0": (16, 3, 3, 3, 16), "conv4.2.0": (64, 3, 3, 3, 64)}
    write({f"backbone_3d.{key}.weight": torch.zeros(shape) for key, shape in keys.items()}, tmp_path / "a.pth")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "a.pth"), str(tmp_path / "b.pth"), "--quiet"])
    assert done.exit_code == 0, done.output
    assert "openpcdet/second under backbone_3d.: sparseconv.nn.second.SecondEncoder" in done.output
    assert read(tmp_path / "b.pth")["backbone_3d.conv4.2.0.weight"].shape == (27, 64, 64)
    write(network().state_dict(), tmp_path / "c.pth")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "c.pth"), str(tmp_path / "d.pth")])
    assert done.exit_code == 1
    assert "the keys are of no family there is" in done.output
    assert not (tmp_path / "d.pth").exists()


def test_importing_the_room_is_light():
    heavy = ("triton", "cupy", "rich", "typer", "safetensors")
    program = f"import sys, sparseconv.interop; print([m for m in {heavy} if m in sys.modules])"
    assert printed("-c", program).strip() == "[]"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_any_plain_tensor_is_written_as_it_reads(suffix, tmp_path):
    """Tied weights, views of other tensors, and numbers that torch holds conjugated or negated."""
    base = torch.randn(40, 3)
    state = {
        "tied": base,
        "again": base,
        "part": torch.randn(10_000)[:2],
        "overlapping": base[1:],
        "turned": base.T,
        "expanded": torch.ones(1, 1).expand(300, 400),
        "conjugated": (base + 1j).conj(),
        "negated": (base + 1j * base).conj().imag,
        "parameter": torch.nn.Parameter(base),
        "none": torch.zeros(0, 3),
    }
    if suffix == ".safetensors" and torch.complex64 not in pytest.importorskip("safetensors.torch")._SIZE:
        del state["conjugated"]  # before 0.5
    path = tmp_path / f"net{suffix}"
    write(state, path)
    found = read(path)
    assert list(found) == list(state) or sorted(found) == sorted(state)
    for key, value in state.items():
        assert torch.equal(found[key], value.detach().resolve_conj().resolve_neg()), key
    assert path.stat().st_size < 500_000 + 20_000


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({1: torch.ones(2)}, TypeError, "by key, a str; 1 is a Tensor"),
        ({"a": torch.eye(3).to_sparse()}, TypeError, "dense in memory"),
        ({"a": torch.ones(2, device="meta")}, ValueError, "device meta"),
        ({"a": 3}, TypeError, "'a' is a int"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(suffix, state, error, words, tmp_path):
    with pytest.raises(error, match=words):
        write(state, tmp_path / f"net{suffix}")
    assert not list(tmp_path.iterdir())


def test_numbers_that_safetensors_does_not_know_are_named(tmp_path, monkeypatch):
    """Complex ones, for an older version of it."""
    known = pytest.importorskip("safetensors.torch")
    monkeypatch.setattr(known, "_SIZE", {torch.float32: 4})
    with pytest.raises(
        ValueError, match=r"safetensors [\d.]+ does not hold torch\.complex64: update it, or write a \.pt"
    ):
        write({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex64)}, tmp_path / "net.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state", [[torch.ones(2)], {"c.kernel": 1}, {1: torch.ones(27, 4, 8)}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(TypeError, match=r"state must be a Mapping|by key, a str"):
        convert_state(state, "minkowski", "sparseconv")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_numbers_of_another_kind_are_not_loaded(dtype):
    """Integers would lose their scale, and complex numbers a half of them."""
    net = nn.SubmanifoldConv(4, 8, 3)
    before = net.weight.detach().clone()
    with pytest.raises(ValueError, match=f"weight is .* {dtype}, should be .* torch.float32"):
        load(net, {"weight": torch.ones(8, 3, 3, 3, 4).to(dtype), "bias": torch.zeros(8)}, "spconv")
    assert torch.equal(net.weight, before)


def test_classes_to_ignore_are_a_list(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "net.pt")
    with pytest.raises(TypeError, match="ignore_classes must be a list"):
        read(tmp_path / "net.pt", ignore_classes="argparse.Namespace")
