"""Compiled kernels in a file: what is refused, where nothing may be written, and that a launch finds them elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("triton")
from sparseconv.gpu.precompile import MANIFEST, Gpu, find_step, pack, unpack
from tests.forked import printed

HERE = Gpu("a GPU", (9, 0), 132)
KERNEL = "A" * 52


def cache_of(folder: Path, kernels: int = 2) -> Path:
    """What Triton keeps of kernels, and other things beside it."""
    for number in range(kernels):
        place = folder / (KERNEL[:-1] + "234567"[number])
        place.mkdir(parents=True)
        (place / "kernel.cubin").write_bytes(b"\x7fELF" + bytes([number]))
        (place / "kernel.json").write_text("{}")
        (place / "library.so").write_bytes(b"\x7fELF")
        (place / "tmp.pid_1").mkdir()
        paths = {name: str(place / name) for name in ("kernel.cubin", "kernel.json")}
        (place / "__grp__kernel.json").write_text(json.dumps({"child_paths": paths}))
    (folder / "something else").mkdir()
    return folder


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    assert pack(cache_of(tmp_path / "from"), tmp_path / "kernels.zip", HERE) == 2
    return tmp_path / "kernels.zip"


def changed(packed: Path, entries: dict[str, bytes], **manifest) -> Path:
    """The file with other entries and another manifest."""
    with zipfile.ZipFile(packed) as old:
        kept = {name: old.read(name) for name in old.namelist()}
    kept[MANIFEST] = json.dumps({**json.loads(kept[MANIFEST]), **manifest}).encode()
    new = packed.with_name("changed.zip")
    with zipfile.ZipFile(new, "w") as archive:
        for name, data in (kept | entries).items():
            archive.writestr(name, data)
    return new


@pytest.mark.parametrize("card", [HERE, HERE._replace(name="its sister"), None])
def test_kernels_lie_where_triton_looks_for_them(packed: Path, tmp_path: Path, card) -> None:
    there = tmp_path / "to" / "a cache"
    assert unpack(packed, there, card) == 2
    assert unpack(packed, there, card) == 2  # what lies there is replaced
    names = sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file())
    assert len(names) == 6
    assert not [name for name in names if name.endswith((".so", ".partial"))]
    for group in there.glob("*/__grp__*"):
        for name, path in json.loads(group.read_text())["child_paths"].items():
            assert Path(path) == group.parent / name
            assert Path(path).exists()


@pytest.mark.parametrize(
    ("manifest", "card", "said"),
    [
        ({}, HERE._replace(capability=(8, 0)), "another GPU, a GPU .compute capability 9.0, 132"),
        ({}, HERE._replace(processors=114), "this is a GPU .compute capability 9.0, 114 multiprocessors"),
        ({"triton": "1.0"}, HERE, "made with triton 1.0; here is triton"),
        ({"sparseconv": "9"}, None, "made with sparseconv 9; here is sparseconv"),
        ({"format": 2}, HERE, "made with format 2; here is format 1"),
    ],
)
def test_a_file_for_something_else_is_refused(packed: Path, tmp_path: Path, manifest, card, said) -> None:
    with pytest.raises(ValueError, match=said):
        unpack(changed(packed, {}, **manifest), tmp_path / "to", card)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../out.cubin",
        "/tmp/out.cubin",
        f"{KERNEL}/../out.cubin",
        f"{KERNEL}/a/out.cubin",
        f"{KERNEL}/library.so",
        f"{KERNEL}/..",
        f"{KERNEL}\\out.cubin",
        "kernel.cubin",
        f"{KERNEL[:-1]}/kernel.cubin",
    ],
)
def test_nothing_is_written_of_a_file_with_other_names(packed: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a file of a compiled kernel"):
        unpack(changed(packed, {name: b"x"}), tmp_path / "to", HERE)
    assert not (tmp_path / "to").exists()


def test_the_files_of_a_group_cannot_be_elsewhere(packed: Path, tmp_path: Path) -> None:
    group = json.dumps({"child_paths": {"../../kernel.cubin": "/etc/passwd"}}).encode()
    unpack(changed(packed, {f"{KERNEL}/__grp__kernel.json": group}), tmp_path / "to", HERE)
    found = json.loads((tmp_path / "to" / KERNEL / "__grp__kernel.json").read_text())["child_paths"]
    assert found == {"kernel.cubin": str(tmp_path / "to" / KERNEL / "kernel.cubin")}


def test_files_that_are_none_are_refused(packed: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.zip"
    short.write_bytes(packed.read_bytes()[:-40])
    (tmp_path / "text").write_text("no archive")
    data = bytearray(packed.read_bytes())
    data[data.index(b"ttir") if b"ttir" in data else len(data) // 2] ^= 0xFF
    (tmp_path / "flipped.zip").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "bare.zip", "w") as archive:
        archive.writestr("a", "b")
    for name in ("short.zip", "text", "flipped.zip", "bare.zip"):
        with pytest.raises(ValueError, match="is not a file of compiled kernels"):
            unpack(tmp_path / name, tmp_path / "to", HERE)
    for group in (b"[]", b"{}", b"no", b'{"child_paths": 3}', b"\xff"):
        with pytest.raises(ValueError, match="is not a file of compiled kernels"):
            unpack(changed(packed, {f"{KERNEL}/__grp__kernel.json": group}), tmp_path / "to", HERE)
    with pytest.raises(ValueError, match="is not a file of compiled kernels"):
        unpack(changed(packed, {}, capability=3), tmp_path / "to", HERE)
    assert not (tmp_path / "to").exists()
    with zipfile.ZipFile(packed, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{KERNEL}/large.cubin", bytes(80 << 20))
    with pytest.raises(ValueError, match="unfolds to"):
        unpack(packed, tmp_path / "to", HERE)
    assert not (tmp_path / "to").exists()


def test_a_changed_byte_is_noticed_or_of_no_matter(tmp_path: Path) -> None:
    """A byte of a compressed stream, too, which zlib has errors of its own for."""
    folder = tmp_path / "from" / KERNEL
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(bytes(range(256)) + b"again and " * 400)
    assert pack(tmp_path / "from", tmp_path / "kernels.zip", HERE) == 1
    whole = (tmp_path / "kernels.zip").read_bytes()
    for place in range(0, len(whole), 3):
        data = bytearray(whole)
        data[place] ^= 0xFF
        (tmp_path / "changed.zip").write_bytes(data)
        try:
            assert unpack(tmp_path / "changed.zip", tmp_path / "to", HERE) == 1
        except ValueError:
            continue
        assert (tmp_path / "to" / KERNEL / "kernel.cubin").read_bytes() == (folder / "kernel.cubin").read_bytes()


def test_an_empty_cache_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no compiled kernel"):
        pack(tmp_path, tmp_path / "kernels.zip", HERE)
    assert list(tmp_path.iterdir()) == []


#: Triton compiles for Hopper without a GPU, and tells whether its cache had the kernel
SCRIPT = """
import json
from contextlib import nullcontext
from types import SimpleNamespace
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

target = GPUTarget("cuda", 90, 32)
driver.set_active(SimpleNamespace(
    get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device=0: 0
))
torch.cuda.device, torch.cuda.current_device = (lambda _: nullcontext()), (lambda: 0)
from sparseconv.gpu.transposing import _launcher as transposing
hits = []
knobs.compilation.listener = lambda src, cache_hit, **_: hits.append(cache_hit)
transposing(torch.float32, torch.float16).compile((64,))
print(json.dumps(hits))
"""


def compiled(cache: Path) -> list[bool]:
    """Whether a process of its own found its kernel in a cache."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(cache)
    found: list[bool] = json.loads(printed("-c", SCRIPT, env=variables).splitlines()[-1])
    return found


def test_a_launch_on_another_machine_finds_what_was_packed(tmp_path: Path) -> None:
    assert compiled(tmp_path / "cache") == [False]
    assert pack(tmp_path / "cache", tmp_path / "kernels.zip", HERE) == 1
    unpack(tmp_path / "kernels.zip", tmp_path / "to", HERE)
    assert compiled(tmp_path / "to") == [True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give MODULE:FUNCTION"),
        (["a:b", "--unpack", "c"], "give MODULE:FUNCTION"),
        (["--unpack", "c", "--pack", "d"], "give MODULE:FUNCTION"),
        (["--unpack", "nowhere.zip"], "nowhere.zip"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, said, tmp_path, monkeypatch) -> None:
    from typer.testing import CliRunner

    from sparseconv.cli import app

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["compile", *arguments])
    assert done.exit_code == 1
    assert said in done.stderr


def test_a_step_is_a_function_of_a_module(monkeypatch) -> None:
    assert find_step("math:sqrt")
    for step, said in (("math", "MODULE:FUNCTION"), ("math:pi", "no function"), ("math:", "MODULE:FUNCTION")):
        with pytest.raises(ValueError, match=said):
            find_step(step)
    with pytest.raises(ImportError):
        find_step("no_such_module:step")


@pytest.mark.gpu
def test_the_command_packs_what_a_step_runs(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "job.py").write_text(
        "import torch, sparseconv as sc\n"
        "def step():\n"
        "    at = torch.randint(0, 64, (20000, 4)).int()\n"
        "    at[:, 0] = 0\n"
        "    grid = sc.VoxelGrid(at.unique(dim=0).cuda())\n"
        "    x = sc.SparseTensor(grid, torch.randn(grid.num_voxels, 16).cuda().half())\n"
        "    sc.nn.SubmanifoldConv(16, 32, 3).cuda().half()(x).features.sum().backward()\n"
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "sparseconv", "compile"]
    for more in (["job:step", "--pack", "kernels.zip"], ["--unpack", "kernels.zip"]):
        subprocess.run([*command, *more], cwd=tmp_path, check=True, timeout=250)
    assert list((tmp_path / "cache").glob("*/conv_kernel.cubin"))
