"""Packages run without Python: a C++ program's results are the network's, and its operators refuse what Python's do."""

import re
import sys
from pathlib import Path

import pytest
import torch

import sparseconv as sc
from sparseconv import export
from sparseconv.compiler import operators
from sparseconv.export import packaging
from sparseconv.plan.shared import shared_plan
from sparseconv.torch_private import pytree
from tests.export import operator_cases
from tests.export.networks import network, scene
from tests.export.running import ROOT, needs_a_compiler, run

#: random scenes for all operators
CASES = 200
#: sums of products in another order, by the largest value
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def test_the_sources_have_pythons_operators():
    """The interface that a saved program calls is one, whoever serves it."""
    source = (packaging.CPP / "operators.cpp").read_text()
    offered = re.findall(r"offer<\w+>\(library,\s*((?:\"[^\"]*\"\s*)+)\)", source)
    mine = ["".join(re.findall(r'"([^"]*)"', words)) for words in offered]
    assert sorted(mine) == sorted(operators.SCHEMAS)


def test_the_sources_have_the_activations_that_packages_may_call():
    source = (packaging.CPP / "functions.cpp").read_text()
    assert set(re.findall(r'name == "(\w+)"', source)) == set(packaging.ACTIVATIONS) - {""}
    assert {name for name, _ in operator_cases.ACTIVATIONS} == set(packaging.ACTIVATIONS)


def test_a_package_gives_none_for_an_empty_list():
    """AOTInductor passes lists without a number so."""
    coords, x = scene(1)
    grid = operators._grid(coords, 2, None, None)
    plan = operators._plan(grid, None, [3] * 3, None, [1] * 3, [1] * 3, None, "same", None, "absent", None, "auto")
    y = operators._execute(plan, x, torch.ones(27, 4, 2), None, None, coords, 1, "relu", None)
    assert torch.equal(y, sc.ConvolutionPlan(sc.VoxelGrid(coords, 2), 3).execute(x, torch.ones(27, 4, 2)).relu())


def test_refusals(tmp_path, monkeypatch):
    class After(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.weight, self.function = torch.nn.Parameter(torch.ones(27, 4, 4)), function

        def forward(self, x):
            return shared_plan(x.grid, 3).execute(x.features, self.weight, epilogue=self.function)

    @torch.library.custom_op("somebody::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x + x

    doubled.register_fake(torch.empty_like)

    class Foreign(torch.nn.Module):
        def forward(self, x):
            return doubled(x.features)

    def program(function):
        return export.export(After(function).eval(), scene(1))

    path = tmp_path / "net.pt2"
    with pytest.raises(ValueError, match="activation 'softplus' has no C"):
        export.package(program(sc.pointwise.softplus), path)
    with pytest.raises(ValueError, match=r"somebody\.doubled\.default has no C"):
        export.package(export.export(Foreign().eval(), scene(1)), path)
    good = program(sc.pointwise.relu)
    with pytest.raises(ValueError, match=r"name must end in .pt2; got 'net.so'"):
        export.package(good, tmp_path / "net.so")
    with pytest.raises(TypeError, match=r"export\.export returns one"):
        export.package(good.module(), path)
    other = torch.export.export(torch.nn.Linear(3, 2).eval(), (torch.randn(2, 3),))
    with pytest.raises(ValueError, match=r"made of a program \(coords, features\)"):
        export.package(other, path)
    monkeypatch.setattr(packaging, "compile_package", lambda *_: False)
    with pytest.raises(RuntimeError, match="has no AOTInductor"):
        export.package(good, path)
    monkeypatch.setattr(packaging, "compile_package", lambda _, path, __: Path(path).write_bytes(b"") == 0)
    monkeypatch.setattr(packaging, "load_package", lambda _: lambda *inputs: good.module()(*inputs) + 1)
    with pytest.raises(ValueError, match="differs from the program on the example, in result 0"):
        export.package(good, path)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_package_leaves_the_file_of_before(tmp_path, monkeypatch):
    def interrupted(program, made, words):
        Path(made).write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(packaging, "compile_package", interrupted)
    (tmp_path / "net.pt2").write_text("of before")
    grid = sc.VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]]))
    program = sc.export.export(sc.nn.SubmanifoldConv(4, 4, 3).eval(), (grid.coords, torch.randn(2, 4)))
    with pytest.raises(KeyboardInterrupt):
        sc.export.package(program, tmp_path / "net.pt2")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("net.pt2", "of before")]


def test_a_folder_that_is_not_there_is_told_before_any_work(tmp_path, monkeypatch):
    def worked(*arguments, **options):
        raise AssertionError("it has begun")

    grid = sc.VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]]))
    net, example = sc.nn.SubmanifoldConv(4, 4, 3).eval(), (grid.coords, torch.randn(2, 4))
    program = sc.export.export(net, example)
    monkeypatch.setattr(torch.export, "export", worked)
    monkeypatch.setattr("sparseconv.export.packaging.compile_package", worked)
    for write in (lambda: sc.export.export(net, example, tmp_path / "no" / "net.pt2"),
                  lambda: sc.export.package(program, tmp_path / "no" / "net.pt2")):  # fmt: skip
        with pytest.raises(ValueError, match=r"does not exist: create it, or write net\.pt2 elsewhere"):
            write()


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    typer = pytest.importorskip("typer")
    from sparseconv.cli import package_program

    with pytest.raises(typer.Exit):
        package_program(tmp_path / "absent.pt2", tmp_path / "net.pt2")
    assert "there is no file" in capsys.readouterr().err


# ---- in C++


class InHalves(torch.nn.Module):
    """A network under autocast, whose graph torch.export keeps apart."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


def alike(mine, theirs):
    if not theirs.is_floating_point() or theirs.numel() == 0:
        return torch.equal(mine, theirs)
    off = (mine.double() - theirs.double()).abs().max()
    return mine.shape == theirs.shape and bool(off <= ROUNDING[theirs.dtype] * theirs.double().abs().max())


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_operators_in_cpp(built, tmp_path):
    """Every operator on random scenes of all ranks, windows, boundaries and dtypes; the rows in the same order."""
    script, library = Path(operator_cases.__file__), built / "operators" / "libsparseconv_operators.so"
    run(sys.executable, script, library, tmp_path / "results.pt", CASES)
    found, refused = torch.load(tmp_path / "results.pt")
    assert set(refused) == set(operator_cases.wrong())
    for seed, results in enumerate(found):
        for number, (mine, theirs) in enumerate(zip(results, operator_cases.results(seed), strict=True)):
            assert mine.dtype == theirs.dtype
            assert alike(mine, theirs), (seed, number)


def test_operators_in_python_refuse_the_same():
    assert set(operator_cases.refused()) == set(operator_cases.wrong())


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["unet", "autocast", "spconv", "pools", "written", "second", "residual"])
def test_a_network_in_cpp(name, built, tmp_path):
    net, wrap = network("unet" if name == "autocast" else name)
    net = InHalves(net).eval() if name == "autocast" else net
    program, path = export.export(net, scene(1), make=wrap), tmp_path / "net.pt2"
    assert export.package(program, path) == path
    for rows in (333, 1, 0):
        given = scene(5, rows)
        torch.save(list(given), tmp_path / "scene.pt")
        torch.save(pytree.tree_leaves(program.module()(*given)), tmp_path / "expected.pt")
        said = run(built / "run_package", path, tmp_path / "scene.pt", tmp_path / "expected.pt")
        assert "equal to what was expected" in said
    coords, features = scene(5)
    torch.save([coords[[0, 1, 0]], features[:3]], tmp_path / "scene.pt")
    assert "rows 0 and 2 of coords are the same voxel" in run(
        built / "run_package", path, tmp_path / "scene.pt", expect=2
    )
    torch.save([coords + 2, features], tmp_path / "scene.pt")
    assert "batch_size is 2" in run(built / "run_package", path, tmp_path / "scene.pt", expect=2)
    for wrong, words in (
        ([coords.long(), features], "coords must be of type Int; got Long"),
        ([coords[:, :3], features], "coords must be (150, 4)"),
        ([coords, features.double()], "features must be of type Float; got Double"),
        ([coords, features[:, :3]], "features must be (150, 4)"),
        ([coords, features[:99]], "features must be (150, 4)"),
    ):
        torch.save(wrong, tmp_path / "scene.pt")
        assert words in run(built / "run_package", path, tmp_path / "scene.pt", expect=2)


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["unet", "encoder"])
def test_from_points_in_cpp(name, built, tmp_path):
    make = [sys.executable, ROOT / "examples" / "cpp" / "make.py", name, tmp_path, "--beams", 12, "--around", 120]
    command = next(line for line in run(*make).splitlines() if line.startswith("run_package")).split()
    assert "equal to what was expected" in run(built / command[0], *command[1:])
    expected = torch.load(tmp_path / f"{name}_expected.pt")
    torch.save([expected[0] + 0.01, *expected[1:]], tmp_path / f"{name}_expected.pt")
    assert "not what was expected" in run(built / command[0], *command[1:], expect=1)
    assert "points become voxels of --size" in run(built / command[0], *command[1:3], expect=2)
    assert "there is no file" in run(built / command[0], tmp_path / "absent.pt2", *command[2:], expect=2)


@pytest.mark.parametrize("kind", ["missing", "text", "truncated", "a checkpoint", "changed"])
def test_a_file_that_is_no_program(kind, tmp_path, capsys):
    coords, features = torch.tensor([[0, 0], [0, 1]]), torch.ones(2, 2)
    net = sc.nn.SubmanifoldConv(2, 3, 3, rank=1).eval()
    path = tmp_path / "net.pt2"
    if kind == "text":
        path.write_bytes(b"hello")
    elif kind == "a checkpoint":
        torch.save({"a": torch.ones(2)}, path)
    elif kind != "missing":
        export.export(net, (coords, features), path)
        whole = path.read_bytes()
        path.write_bytes(
            whole[: len(whole) // 2] if kind == "truncated" else whole.replace(b"sparseconv", b"sparsecomv")
        )
    with pytest.raises(ValueError, match=r"no file|is damaged, or was not written by"):
        packaging.package(path, tmp_path / "out.pt2")
    assert not (tmp_path / "out.pt2").exists()
