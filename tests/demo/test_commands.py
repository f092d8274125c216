"""The commands from outside: what they print, write and refuse."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

typer = pytest.importorskip("typer")
pytest.importorskip("nilearn")
from typer.testing import CliRunner  # noqa: E402

from sparseconv.cli import app  # noqa: E402
from tests import forked  # noqa: E402
from tests.forked import printed  # noqa: E402

PNG = b"\x89PNG\r\n\x1a\n"
ROOT = Path(__file__).parents[2]


def run(*arguments):
    """The command's result, its words joined so that line breaks do not matter."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    return result, " ".join(result.output.split())


def outside(*arguments, code=None, **options):
    """The command in a process of its own."""
    start = ["-c", code] if code else ["-m", "sparseconv"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, *start, *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


@pytest.mark.parametrize("asked", ["", "convert", "bench", "demo", "compile", "export"])
def test_help_needs_no_torch(asked):
    """Which takes seconds to import."""
    program = (
        "import sys; sys.argv = ['sparseconv', *sys.argv[1:]]\n"
        "from sparseconv.__main__ import main\n"
        "try: main()\n"
        "finally: sys.stderr.write(str('torch' in sys.modules))\n"
    )
    said, loaded = outside(*filter(None, [asked, "--help"]), code=program).communicate(timeout=500)
    assert "Usage: " in said
    assert loaded.endswith("False"), loaded


def test_info_names_versions_and_every_backend():
    from sparseconv.backends.registry import BACKENDS

    said = printed("-m", "sparseconv", "info")
    for word in ("sparseconv", "python", "torch", "numpy", "triton", "cupy", *BACKENDS):
        assert word in said
    assert "chosen" in said


@pytest.mark.slow
def test_a_short_brain_is_the_same_for_the_same_seed(tmp_path):
    for name in ("one.png", "two.png"):
        options = ("--steps", 2, "--voxel-size", 12, "--seed", 5, "--device", "cpu")
        result, said = run("demo", *options, "--output", tmp_path / name)
        assert result.exit_code == 0, said
        for word in (
            "MNI152",
            "Plans",
            "pairs",
            "majority class",
            "brightness alone",
            "sparse U-Net",
            "ms per step",
            "chosen",
        ):
            assert word in said
    picture = (tmp_path / "one.png").read_bytes()
    assert picture.startswith(PNG)
    assert picture == (tmp_path / "two.png").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "two.png"]


def test_a_cloud(tmp_path):
    np.save(tmp_path / "cloud.npy", np.random.default_rng(0).normal(size=(3000, 3)) * [9, 4, 1])
    result, said = run(
        "demo", "--points", tmp_path / "cloud.npy", "--output", tmp_path / "cloud.png", "--device", "cpu"
    )
    assert result.exit_code == 0, said
    for word in ("3,000 points", "chosen from the extent", "Plans", "forward", "backward", "the plans of a new scene"):
        assert word in said
    assert re.search(r"The first step took [0-9.]+ s longer, because kernels are compiled once", said), (
        said
    )  # apart from speed
    assert (tmp_path / "cloud.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("points", [np.zeros((1, 3)), np.ones((50, 3)), np.arange(9.0).reshape(3, 3) * 1e6])
def test_clouds_of_a_few_points(tmp_path, points):
    np.save(tmp_path / "few.npy", points)
    result, said = run("demo", "--points", tmp_path / "few.npy", "--output", tmp_path / "few.png", "--device", "cpu")
    assert result.exit_code == 0, said
    assert (tmp_path / "few.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--points", "none.npy"], "there is no file none.npy"),
        (["--points", "cloud.e57"], "has none of the known suffixes"),
        (["--output", "no/such/folder.png"], "does not exist: create it"),
        (["--output", "picture.bmpx"], "a picture's name must end with .png"),
        (["--voxel-size", "-1"], "--voxel-size must be positive"),
        (["--voxel-size", "0.5"], "voxels of 1 mm, so voxel_size must be at least 1"),
        (["--device", "abacus"], "--device must be cpu, cuda"),
        (["--device", "cuda:99"], "PyTorch sees"),
    ],
)
def test_refusals_are_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    result, said = run("demo", *arguments)
    assert result.exit_code == 1
    assert said.startswith("error: ")
    assert sentence in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_one_sentence_names_it(package):
    code = f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['demo']; "
    done = forked.run("-c", code + "from sparseconv.__main__ import main; main()")
    assert (done.returncode, done.stdout) == (1, "")
    first, second, *_ = done.stderr.splitlines()
    assert f"needs {package}: pip install 'sparseconv[cli]'" in first
    assert "sparseconv info" in second


def test_without_the_extra_there_is_help():
    code = "import sys; sys.modules['typer'] = None; sys.argv[1:] = ['--help']; "
    done = forked.run("-c", code + "from sparseconv.__main__ import main; main()")
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip install 'sparseconv[cli]': demo, bench, convert, compile, export" in done.stdout


@pytest.mark.parametrize("asked", ["info", "--version"])
def test_a_bare_installation_says_what_a_bug_report_needs(asked):
    """Without typer, rich, or any other package of an extra."""
    code = f"import sys; sys.modules.update(typer=None, rich=None, click=None); sys.argv[1:] = [{asked!r}]; "
    done = forked.run("-c", code + "from sparseconv.__main__ import main; main()")
    said = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert "sparseconv" in said
    assert "0.1.0" in said
    assert ("backends for a plan on cpu" in said) == (asked == "info")
    typed = run(asked)[0].output
    assert [line for line in typed.splitlines() if "=" not in line] == [
        line for line in said.splitlines() if "=" not in line
    ]


def test_a_report_comes_where_something_is_broken(monkeypatch):
    """A backend that cannot even be asked, and a grid that cannot be made, are lines of the report."""
    from sparseconv import geometry, info
    from sparseconv.backends import registry

    def broken(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(registry, "backend", broken)
    assert set(info.backends(torch.device("cpu")).values()) == {
        "no: OSError: libcuda.so.1: cannot open shared object file"
    }
    monkeypatch.setattr(geometry, "VoxelGrid", broken)
    assert all("a plan cannot be made" in said for said in info.backends(torch.device("cpu")).values())


@pytest.mark.parametrize("module", ["sparseconv.cli", "sparseconv.info"])
def test_an_interruption_of_an_import_is_one_word(monkeypatch, capsys, module):
    from sparseconv import __main__

    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == module:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["sparseconv", "info" if module == "sparseconv.info" else "demo"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert (ended.value.code, capsys.readouterr()) == (130, ("", "stopped\n"))


@pytest.mark.parametrize(("steps", "said"), [(0, "stopped; nothing was written"), (2, "Press Ctrl-C again to quit.")])
def test_an_interruption_of_the_demonstration(tmp_path, monkeypatch, steps, said):
    """Before the first step it ends at once; later it scores and draws what was learnt."""
    loss, losses = torch.nn.functional.cross_entropy, []

    def interrupted(*arguments):
        if len(losses) == steps:
            raise KeyboardInterrupt
        losses.append(loss(*arguments))
        return losses[-1]

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", interrupted)
    picture = tmp_path / "early.png"
    result, output = run("demo", "--voxel-size", 12, "--device", "cpu", "--output", picture)
    assert (result.exit_code, said in output) == (130, True), output
    assert picture.exists() == (steps > 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is another signal there")
def test_an_interruption_keeps_what_was_reached(tmp_path):
    picture = tmp_path / "early.png"
    process = outside(
        *("demo", "--steps", 100_000, "--voxel-size", 12, "--device", "cpu", "--output", picture),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job would ignore it
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Why, for the costliest" in line:
            break
    time.sleep(20)  # kernels are compiled before the first step
    process.send_signal(signal.SIGINT)
    said, complaints = process.communicate(timeout=500)
    assert process.returncode == 130, complaints
    assert "until interrupted" in " ".join(said.split())
    assert "Traceback" not in complaints
    assert picture.read_bytes().startswith(PNG)
    assert [p.name for p in tmp_path.iterdir()] == ["early.png"]


@pytest.mark.slow
def test_the_whole_demonstration_beats_both_baselines(tmp_path):
    result, said = run("demo", "--device", "cpu", "--output", tmp_path / "demo.png")
    assert result.exit_code == 0, said
    means = {
        name: float(said.split(name)[1].split()[3]) for name in ("majority class", "brightness alone", "sparse U-Net")
    }
    assert means["sparse U-Net"] > means["brightness alone"] + 0.1 > means["majority class"]
