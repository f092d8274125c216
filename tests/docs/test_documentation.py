"""Every python block of every page runs: the blocks of a page in order, as one program, in a process of its own."""

from __future__ import annotations

import doctest
import inspect
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import sparseconv
from sparseconv.gpu.cuda_capability import AMD, LEAST, PTX_FROM
from tests.backends.test_triton_ahead_of_time import SHARED
from tests.docs.surface import public_functions
from tests.forked import Forks

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: a reader's environment has no interpreter of Triton, which the tests may have
READER = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
PROCESS = READER | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Where pages keep compiled kernels: the first that needs one compiles it for all."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """A process whose forks run pages: importing torch takes longer than most of them."""
    found = Forks(PROCESS, "torch, sparseconv")
    yield found
    found.close()


def street(folder: Path) -> None:
    """The cloud that the README's reader has: a road, two walls and a box, a line a point, its class last."""
    generator = torch.Generator().manual_seed(0)
    u, v = torch.rand(2, 1500, generator=generator)
    flat = torch.zeros(1500)
    road = torch.stack([20 * u, 6 * v, flat, flat], 1)
    walls = torch.stack([20 * u, 6 * (v > 0.5), 4 * v, flat + 1], 1)
    boxes = torch.stack([20 * u, 2 + v, 1 + flat, flat + 2], 1)
    np.savetxt(folder / "street.xyz", torch.cat([road, walls, boxes]).numpy(), fmt="%.3f")


# a thread of a group that outlives destroy_process_group can end the whole process with an error
GROUP_IS_GONE = """
from pathlib import Path
threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
assert "pt_gloo_runloop" not in threads, threads
"""


def run(page: Path, tmp_path: Path, cache: Path, forks: Forks) -> str:
    """What a page prints. From a file, since Triton reads the source of its functions; where a page says torchrun, as
    two ranks."""
    text = page.read_text()
    program = tmp_path / f"{page.stem}_page.py"
    ranks = "torchrun" in text
    program.write_text("\n".join([*BLOCK.findall(text), *([GROUP_IS_GONE] if ranks else [])]))
    env = PROCESS | {"SPARSECONV_CACHE_DIR": str(cache)}
    done = forks.run(program, folder=tmp_path, env=env, ranks=2 if ranks else 1)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=name)
def test_a_page_runs(page, tmp_path, cache, forks):
    if page.name == "README.md":
        street(tmp_path)
    printed = run(page, tmp_path, cache, forks)
    if page.name == "README.md":
        assert float(re.findall(r"accuracy on the other half: ([\d.]+)", printed)[0]) > 0.8
        assert (tmp_path / "street.png").stat().st_size > 5000
    if page.name == "how-it-works.md" or page.parent == ROOT / "docs" / "guides":  # they show all that they print
        assert printed == "".join(SHOWN.findall(page.read_text()))


def test_the_readme_begins_with_the_two_commands():
    """On its first screen, before anything else is asked of a reader."""
    first = (ROOT / "README.md").read_text().partition("\n## ")[0]
    commands = ("git clone", "&& cd sparseconv", "\nmake demo", "\nmake test")
    assert [command for command in commands if command not in first] == []
    targets = (ROOT / "Makefile").read_text()
    assert "\ndemo: " in targets
    assert "\ntest: " in targets


def test_the_readme_names_the_gpus():
    """The oldest one with PTX, and those that kernels are compiled for in the tests; then those without."""
    ((least, named),) = re.findall(r"compute capability ([\d.]+): (.*?)\)", (ROOT / "README.md").read_text())
    assert tuple(int(part) for part in least.split(".")) == PTX_FROM
    plain = (
        (ROOT / "README.md").read_text().partition("For Turing (")[2].partition(" they have been compiled, not run")[0]
    )
    assert re.findall(r"^[\d.]+|gfx\d+", plain) == [".".join(map(str, LEAST)), *AMD]
    support = (ROOT / "docs" / "support.md").read_text()
    table = [(int(a + b), names.split(", ")) for a, b, names in re.findall(r"(\d+)\.(\d) \((.*?)\)", support)]
    known = [next(arch for arch, names in table if gpu in names) for gpu in re.findall("`(.*?)`", named)]
    assert known == sorted(SHARED)


def test_the_page_on_stability_names_the_least_versions():
    """Those that pip asks for."""
    asked, page = (ROOT / "pyproject.toml").read_text(), (ROOT / "docs" / "stability.md").read_text()
    for package in ("torch", "triton"):
        (least,) = re.findall(rf'"{package}>=([\d.]+)', asked)
        assert re.search(rf"^\| {package} \|.*\| {re.escape(least)} and later \|$", page, re.MULTILINE)


def test_no_block_of_python_is_left_out():
    """Blocks are found by their fence, so a fence that is indented or spelled otherwise would not be run."""
    for page in PAGES:
        fences = re.findall(r"^\s*[`~]{3,}\s*\{?\.?(?:py|python3?)\b", page.read_text(), re.MULTILINE)
        assert len(fences) == len(BLOCK.findall(page.read_text())), page


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL))
    missing = [link for link in links if "://" not in link and not (page.parent / link.partition("#")[0]).exists()]
    assert missing == []


# ---- the reference

REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
LISTED = set(re.findall(r"\w+", " ".join(re.findall(r"members: \[(.*?)\]", REFERENCE))))
LISTED |= {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE)}


@pytest.mark.parametrize("module", sparseconv.MODULES)
def test_every_public_name_is_documented(module):
    """It stands in docs/api, and has a docstring with an example."""
    room = import_module(f"sparseconv.{module}")
    assert [name for name in room.__all__ if name not in LISTED] == []
    things = {name: getattr(room, name) for name in room.__all__ if callable(getattr(room, name))}
    assert [name for name, thing in things.items() if ">>>" not in (thing.__doc__ or "")] == []


def test_pages_name_the_public_modules():
    """README, the page on stability, and `sparseconv.MODULES` the same."""
    (readme,) = re.findall("^- Public modules: (.*);", (ROOT / "README.md").read_text(), re.MULTILINE)
    (stable,) = re.findall(r"^\| (`sc\.distributed`.*?) \|", (ROOT / "docs" / "stability.md").read_text(), re.MULTILINE)
    for words in (readme, stable):
        assert re.findall(r"`sc\.(\w+)`", words) == list(sparseconv.MODULES)


def test_examples_of_functions_that_a_call_makes_run():
    """Those that `pointwise_dynamic` made: doctest finds functions and classes alone."""
    operations = import_module("sparseconv.pointwise.operations.activations")
    for name in sparseconv.pointwise.__all__:
        thing = getattr(sparseconv.pointwise, name)
        if isinstance(thing, sparseconv.pointwise.PointwiseDynamicFunction):
            test = doctest.DocTestParser().get_doctest(thing.__doc__, {**vars(operations), name: thing}, name, None, 0)
            assert test.examples
            assert doctest.DocTestRunner().run(test).failed == 0


#: public functions that take what they are given on by name, and to whom
HANDED_ON = {
    "sparseconv.distributed.network.Sharded.forward": "the module's own forward",
    "sparseconv.nn.models.ptv3.PointTransformerV3.__init__": "PointTransformerOptions, which has more than 20",
    "sparseconv.plan.convolution.ConvolutionPlan.__call__": "an error that says what to call",
    "sparseconv.plan.convolution.ConvolutionPlan.replaced": "the plan's own parts",
    "sparseconv.plan.shared.shared_plan": "ConvolutionPlan, or its transposed",
    "sparseconv.pointwise.function.PointwiseDynamicFunction.__call__": "outputs by number, out0= and so on",
    "sparseconv.pointwise.function.PointwiseDynamicFunction.__init__": "Evaluation, which is no name for users",
    "sparseconv.pointwise.function.PointwiseDynamicFunction.kernel_path": "outputs by number, out0= and so on",
    "sparseconv.viz.slices.show_slice": "matplotlib's imshow",
    "sparseconv.viz.solid.scatter3d": "matplotlib's scatter",
}


def test_signatures_are_explicit():
    found = {
        name
        for name, function in public_functions().items()
        if any(part.kind == part.VAR_KEYWORD for part in inspect.signature(function).parameters.values())
    }
    assert found == set(HANDED_ON)
