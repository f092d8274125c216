"""Exported programs: the same bits in another process, for scenes of any size, and refusals in words."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.compiler import operators
from sparseconv.export import program
from sparseconv.plan.shared import shared_plan
from tests.export.networks import LARGE, MADE, network, scene

ROOT = Path(__file__).parents[2]
SIZES = (150, 333, 2, 1, 0)
#: what runs elsewhere: no class of any network is there
ELSEWHERE = """
import sys, torch, sparseconv
folder, names, sizes = sys.argv[1], sys.argv[2].split(","), range(int(sys.argv[3]))
torch.set_num_threads(int(sys.argv[4]))  # sums over rows are cut by threads
if sys.argv[5]:  # the CPU that the tests are held to
    from sparseconv.backends.registry import backend
    from tests.cpus import CPUS
    backend("llvm_implicit_gemm").target = CPUS[sys.argv[5]].target
for name in names:
    run = torch.export.load(f"{folder}/{name}.pt2").module()
    for size in sizes:
        results = run(*torch.load(f"{folder}/{size}.pt"))
        torch.save(torch.utils._pytree.tree_leaves(results), f"{folder}/{name}_{size}.pt")
"""


def run_elsewhere(folder, names, cpu):
    for number, rows in enumerate(SIZES):
        torch.save(scene(number + 5, rows), folder / f"{number}.pt")
    command = [sys.executable, "-c", ELSEWHERE, str(folder), ",".join(names), str(len(SIZES))]
    command += [str(torch.get_num_threads()), cpu or ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]


def leaves(tree):
    return program.pytree.tree_leaves(tree)


def check(folder, names, cpu):
    for name in names:
        net, wrap = network(name)
        sc.export.export(net, scene(1), folder / f"{name}.pt2", make=wrap)
    run_elsewhere(folder, names, cpu)
    for name in names:
        net, wrap = network(name)
        for number in range(len(SIZES)):
            x = wrap(*torch.load(folder / f"{number}.pt"))
            with torch.no_grad():
                want = program.plain(net(x), x)
            got = torch.load(folder / f"{name}_{number}.pt")
            assert len(got) == len(leaves(want))
            for mine, theirs in zip(got, leaves(want), strict=True):
                assert torch.equal(mine, theirs), (name, number)


def test_the_same_bits_in_another_process(tmp_path, pytestconfig):
    check(tmp_path, list(MADE), pytestconfig.getoption("--cpu"))


@pytest.mark.slow
def test_large_networks_in_another_process(tmp_path, pytestconfig):
    check(tmp_path, list(LARGE), pytestconfig.getoption("--cpu"))


def test_a_module_that_makes_its_grid_exports_by_torch_alone():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.SubmanifoldConv(4, 8, 3)

        def forward(self, coords, features):
            grid = sc.VoxelGrid(coords, 2, voxel_size=0.5)
            return self.conv(sc.SparseTensor(grid, features)).features, grid.positions()

    net, rows = Net().eval(), {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        exported = torch.export.export(net, scene(1), dynamic_shapes=(rows, rows), strict=False)
        coords, features = scene(2, 40)
        for mine, theirs in zip(exported.module()(coords, features), net(coords, features), strict=True):
            assert torch.equal(mine, theirs)


def test_weights_are_the_programs_own():
    net, wrap = network("unet")
    ready = sc.export.export(net, scene(1), make=wrap).module()
    before = ready(*scene(2))
    with torch.no_grad():
        for parameter in ready.parameters():
            parameter.mul_(2)
    assert not torch.equal(ready(*scene(2)), before)


def test_nothing_outlives_a_call():
    net, wrap = network("pools")
    ready = sc.export.export(net, scene(1), make=wrap).module()
    gc.collect()
    before = len(operators._owners)
    for seed in range(3):
        ready(*scene(seed))
    gc.collect()
    assert len(operators._owners) == before


@pytest.fixture(scope="module")
def layer():
    """An exported layer."""
    net = nn.Sequential(nn.SubmanifoldConv(4, 8, 3)).eval()
    return sc.export.export(net, scene(1)).module()


@pytest.mark.parametrize(
    ("coords", "kind", "words"),
    [
        (torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]]), ValueError, "rows 0 and 1 of coords are the same voxel"),
        (torch.tensor([[0, 1, 1, 1], [2, 1, 1, 2]]), ValueError, "batch item 2"),
        (torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2.5]]), TypeError, "integers"),
    ],
    ids=["duplicates", "batch", "floats"],
)
def test_a_program_refuses_what_a_grid_refuses(coords, kind, words, layer):
    with pytest.raises(kind, match=words):
        layer(coords, torch.randn(2, 4))


PAGE = (ROOT / "docs" / "export.md").read_text()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run, c, f: run(c, f[:, :3]), "Guard failed: features.size()[1] == 4"),
        (lambda run, c, f: run(c, f[1:]), "Guard failed: features.size()[0] == coords.size()[0]"),
        (lambda run, c, f: run(c[:, 1:].contiguous(), f), "Guard failed: coords.size()[1] == 4"),
        (lambda run, c, f: run(c.long(), f), "Tensor dtype mismatch! Expected: Int, Got: long int"),
        (lambda run, c, f: run(c, f.half()), "x is torch.float16 but the weight is torch.float32"),
        (lambda run, c, f: run(torch.cat([c, c + torch.eye(4)[0].int()]), f.repeat(2, 1)), "coords name batch item"),
        (lambda run, c, f: run(c), "Trying to flatten user inputs"),
    ],
    ids=["channels", "rows", "axes", "dtype of coords", "dtype of features", "batch", "arguments"],
)
def test_what_a_program_says_is_on_its_page(call, words, layer):
    """Most of these are torch's own words: where a release changes them, the page has to follow."""
    assert f"| `{words}" in PAGE
    grid = sc.VoxelGrid(scene(1)[0])
    with pytest.raises((AssertionError, RuntimeError, TypeError, ValueError)) as error:
        call(layer, grid.coords, torch.randn(len(grid), 4))
    assert words in str(error.value)


def test_a_number_names_nothing_elsewhere():
    grid = sc.VoxelGrid(scene(1)[0])
    made = operators.handle((grid,))
    assert operators.held_by(made, sc.VoxelGrid) is grid
    with pytest.raises(ValueError, match="in the process that made it"):
        operators.held_by(made + 1, sc.VoxelGrid)
    with pytest.raises(ValueError, match="ConvolutionPlan is wanted"):
        operators.held_by(made, sc.ConvolutionPlan)
    with pytest.raises(ValueError, match="int64 tensor"):
        operators.held_by(made.float(), sc.VoxelGrid)
    number = made.clone()
    del made, grid
    with pytest.raises(ValueError, match="nothing here"):
        operators.held_by(number, sc.VoxelGrid)


def test_operators_check_what_they_are_given():
    """A file that somebody changed runs no other function, and reads no row that is not there."""
    ops, coords = torch.ops.sparseconv, scene(1)[0]
    rows, grid = len(coords), operators.handle((sc.VoxelGrid(coords),))
    plan = ops.plan(grid, None, [3] * 3, [], [1] * 3, [1] * 3, None, "", [], "absent", [], "auto")
    x, weight = torch.randn(rows, 4), torch.randn(27, 4, 6)
    call = (plan, x, weight, None, None, coords, 1)
    for name in ("banana", "pointwise_dynamic", "__name__"):
        with pytest.raises(ValueError, match="activation must be a function"):
            ops.execute(*call, name, [])
    assert ops.execute(*call, "relu", []).min() == 0
    for short in (x[:5], x.new_ones(0, 4), x[0]):
        with pytest.raises(ValueError, match=f"{rows}"):
            ops.execute(plan, short, *call[2:], "", [])
        with pytest.raises(ValueError, match=f"{rows}"):
            ops.pool(plan, short, coords, "sum")
        with pytest.raises(ValueError, match=f"{rows}"):
            ops.max_pool(plan, short, coords)
        with pytest.raises(ValueError, match=f"{rows}"):
            ops.pool_items(grid, short, 1, "max")
        with pytest.raises(ValueError, match=f"{rows}"):
            ops.standardise_items(grid, short, 2, 1e-5)
        with pytest.raises(ValueError, match=f"{rows}"):
            ops.to_dense(grid, short, 1, [0] * 3, [9] * 3)
    for how in (lambda: ops.pool(plan, x, coords, "banana"), lambda: ops.pool_items(grid, x, 1, "banana")):
        with pytest.raises(ValueError, match="how must be one of"):
            how()


def test_refusals(tmp_path):
    net, _ = network("unet")
    with pytest.raises(ValueError, match=r"is in training: call net.eval\(\)"):
        sc.export.export(net.train(), scene(1), tmp_path / "net.pt2")
    net.eval()
    with pytest.raises(ValueError, match="at least two voxels"):
        sc.export.export(net, scene(1, rows=1))
    with pytest.raises(ValueError, match=r"\(coords, features\)"):
        sc.export.export(net, scene(1)[:1])

    class Reads(torch.nn.Module):
        def forward(self, x):
            return x.features.sum() + shared_plan(x.grid, 3).kernel_map.num_pairs

    class Random(torch.nn.Module):
        def forward(self, x):
            return x.features + torch.rand_like(x.features)

    class Built(torch.nn.Module):
        def forward(self, x):
            return sc.ConvolutionPlan(x.grid, 3).execute(x.features, torch.ones(27, 4, 4))

    for bad, words in (
        (Reads(), "no edges to look at"),
        (Built(), "shared_plan"),
        (Random(), "differs from the network"),
    ):
        with pytest.raises(ValueError, match=words):
            sc.export.export(bad.eval(), scene(1), tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


def test_writing_a_program_follows_no_link(tmp_path):
    net, wrap = network("unet")
    victim, out = tmp_path / "victim", tmp_path / "net.pt2"
    victim.write_text("mine")
    out.symlink_to(victim)
    sc.export.export(net, scene(1), out, make=wrap)
    assert victim.read_text() == "mine"
    assert not out.is_symlink()
    assert torch.export.load(out).module()(*scene(2)) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.pt2", "victim"]


def test_autocast_within_the_network():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network("unet")[0]

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    net = Net().eval()
    ready = sc.export.export(net, scene(1)).module()
    coords, features = scene(2, 70)
    with torch.no_grad():
        want = net(sc.SparseTensor(sc.VoxelGrid(coords, 2), features)).features
    assert want.dtype == torch.bfloat16
    assert torch.equal(ready(coords, features), want)
