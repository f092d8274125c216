"""What is built of the repository: one package, whoever builds it, and an archive of sources whose tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def wheel_of(source: Path, folder: Path) -> dict[str, bytes]:
    """The files of the wheel that is built of a folder of sources, without any network."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    (file,) = wheel.WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sources_of(folder: Path) -> Path:
    """The unpacked archive of sources."""
    sdist = pytest.importorskip("hatchling.builders.sdist")
    (file,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    return folder / Path(file).name.removesuffix(".tar.gz")


def packages_of(files: dict[str, bytes]) -> set[str]:
    return {name.split("/")[0] for name in files if not name.split("/")[0].endswith(".dist-info")}


def test_the_wheel_holds_one_package_whoever_builds_it(tmp_path):
    """`pip install .` builds it of the repository, `python -m build` and an index's users of the archive of sources."""
    of_repository = wheel_of(ROOT, tmp_path)
    assert packages_of(of_repository) == {"sparseconv"}
    assert not [name for name in of_repository if name.endswith((".json", ".png", ".npz", ".pyc"))]
    assert "sparseconv/py.typed" in of_repository
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sparseconv").rglob("*.py")}
    assert {name for name in of_repository if name.endswith(".py")} == here
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sparseconv" / "export" / "cpp").iterdir()}
    assert sources
    assert sources <= set(of_repository)  # of the operators of packages, which programs without Python build
    (entries,) = (text.decode() for name, text in of_repository.items() if name.endswith("entry_points.txt"))
    assert "sparseconv = sparseconv.__main__:main" in entries
    assert wheel_of(sources_of(tmp_path), tmp_path / "again") == of_repository


def test_the_archive_of_sources_holds_what_the_tests_read(tmp_path):
    sources = sources_of(tmp_path)
    for folder in ("tests", "docs", "benchmarks", "examples", "notebooks"):
        tracked = {
            path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".json")
        }
        assert [str(path) for path in sorted(tracked) if not (sources / path).is_file()] == []
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "constraints.txt", "mkdocs.yml"):
        assert (sources / name).is_file(), name


def test_torch_may_bring_its_own_triton():
    """PyTorch's wheel on PyPI requires an exact version of Triton: another exact one has pip refuse every command."""
    (line,) = re.findall(r"^triton\b(.*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert line.startswith("<="), line


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tests_of_the_archive_run_as_shipped(tmp_path):
    """In the unpacked archive, with the package that lies there: those that read pages, results and sources."""
    sources = sources_of(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    for file, chosen in (
        ("tests/test_house.py", "public or heavy or floors"),
        ("tests/docs/test_documentation.py", "links or left_out"),
        ("tests/benchmarks/test_frame.py", "well_formed or understood or without_marks"),
    ):
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", file, "-k", chosen]
        done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_bare_installation_has_its_command(tmp_path):
    """Without typer and rich, `sparseconv info` and `--version` print, and the others say what to install."""
    pytest.importorskip("hatchling")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--target", tmp_path, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir() if "-" not in path.name} == {"sparseconv", "bin"}
    hidden = tmp_path / "hidden"
    for package in ("typer", "rich"):
        (hidden / package).mkdir(parents=True)
        text = f"raise ModuleNotFoundError('No module named {package}', name='{package}')"
        (hidden / package / "__init__.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (hidden, tmp_path)))}
    for asked, code, word in (("info", 0, "backends for a plan on cpu"), ("--version", 0, "0.1.0"), ("demo", 1, "")):
        command = [tmp_path / "bin" / "sparseconv", asked]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert word in done.stdout
        assert ("pip install 'sparseconv[cli]'" in done.stderr) == (code == 1)


def test_the_oldest_versions_are_those_that_are_tried():
    """`make oldest` installs the least versions that pyproject.toml promises, and no others."""
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is of Python 3.11")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"]
    least = dict(entry.split(";")[0].strip().split(">=") for entry in asked)
    promised = (ROOT / "oldest.txt").read_text().split("# of packages")[0]
    lines = [line for line in promised.splitlines() if not line.startswith("#")]
    tried = dict(line.split("==") for line in lines)
    assert least.keys() == tried.keys()
    for name, version in least.items():
        assert f"{tried[name]}.".startswith(f"{version}."), f"{name}: {version} is promised, {tried[name]} is tried"


def test_the_readme_works_on_a_package_index(tmp_path, monkeypatch):
    """Where the publishing repository is named, no link or picture of the description is relative."""

    def description(folder: Path) -> str:
        return next(text.decode() for name, text in wheel_of(ROOT, folder).items() if name.endswith("METADATA"))

    links = re.compile(r"\]\(((?![a-z]+:|#)[^)\s]+)\)")
    text = description(tmp_path / "here")
    assert "\nProject-URL:" not in text
    assert links.findall(text)
    monkeypatch.setenv("SPARSECONV_REPOSITORY", "owner/name")
    text = description(tmp_path / "named")
    assert "\nProject-URL: Repository, https://github.com/owner/name" in text
    assert links.findall(text) == []
    assert "![" in text
    for path in re.findall(r"https://raw.githubusercontent.com/owner/name/v[^/]+/([^)\s]+)\)", text):
        assert (ROOT / path).is_file()
