"""The package without one or another private name of torch: it imports, and a plan gives the same numbers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import sparseconv
from sparseconv import nn, torch_private
from tests.forked import printed

ROOT = Path(sparseconv.__file__).parent
SOURCE = (ROOT / "torch_private.py").read_text()
NAMES = re.findall(r"private\(\s*\"([^\"]+)\"", SOURCE)
PRIVATE = r"torch\._[a-z]\w*|torch\._C|from torch\.[\w.]*\b_[a-z]\w*|forward_ad\._[a-z]\w*|torch\.utils import _[a-z]"
#: of its modules, whatever begins with one line below: torch.utils._pytree, torch.nn.modules.batchnorm._BatchNorm
PRIVATE += r"|torch(?:\.[a-z]\w*)+\._[A-Za-z]\w*"

#: one process imports torch, and a child of it for each name runs without that one
SCRIPT = """
import os, sys, traceback
from functools import reduce
import torch
import torch.utils._pytree, torch.utils._python_dispatch

torch.set_num_threads(1)


def run():
    import sparseconv as sc
    from sparseconv import nn
    torch.manual_seed(0)
    grid = sc.VoxelGrid(torch.nn.functional.pad(torch.unique(torch.randint(0, 6, (60, 3)), dim=0), (1, 0)))
    plan, x = sc.ConvolutionPlan(grid, 3, backend="numpy_gather_scatter"), torch.randn(len(grid), 4, requires_grad=True)
    w = torch.randn(27, 4, 8, requires_grad=True)
    y = plan.execute(x, w, epilogue=sc.pointwise.relu)
    y.square().sum().backward()
    (first,) = torch.autograd.grad(plan.execute(x, w).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    whole = torch.func.grad(lambda v: plan.execute(v, w).square().sum())(x.detach())
    with torch.autocast("cpu", torch.bfloat16):
        half = plan.execute(x, w)
    assert half.dtype == torch.bfloat16
    net = nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.BatchNorm(8), nn.ReLU())
    trained = net(sc.SparseTensor(grid, x.detach())).features
    with torch.no_grad():
        seen = net.eval()(sc.SparseTensor(grid, x.detach())).features
    return [t.detach().double().sum().item() for t in (y, x.grad, w.grad, second, whole, half, trained, seen)]


def without(paths):
    kept, modules = [], {}
    for path in paths:
        if path.startswith("sys.modules "):
            name = path.split()[1]
            modules[name], sys.modules[name] = sys.modules[name], None
            continue
        *owners, name = path.split(".")
        owner = reduce(lambda o, n: getattr(o, n, None), owners, torch)
        if hasattr(owner, name):
            kept.append((owner, name, getattr(owner, name)))
            delattr(owner, name)
    import sparseconv.torch_private
    for one in kept:  # torch itself goes on with its own
        setattr(*one)
    sys.modules.update(modules)


for path in sys.argv[1:]:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            without([one for one in path.split("+") if one])
            said = repr(run())
        except BaseException:
            said = traceback.format_exc()
        os.write(write, said.encode()[-4000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(path, "=", pipe.read().replace(chr(10), " | "), flush=True)
    os.wait()
"""


HIDDEN = [*NAMES, "autograd.forward_ad._current_level"]
HIDDEN += ["sys.modules torch.utils._pytree", "sys.modules torch.utils._python_dispatch"]


@pytest.mark.skipif(sys.platform == "win32", reason="a system without fork")
@pytest.mark.parametrize(
    "missing",
    [["+".join(HIDDEN)], pytest.param(HIDDEN, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
    ids=["all at once", "one by one"],
)
def test_a_plan_and_a_network_run_without_them(missing):
    assert len(NAMES) > 15
    (_, want), *found = (line.split(" = ", 1) for line in printed("-c", SCRIPT, "", *missing).splitlines())
    assert len(found) == len(missing)
    for names, said in found:
        assert said.startswith("["), f"without torch.{names}: {said}"
        assert json.loads(said) == pytest.approx(json.loads(want), rel=1e-4, abs=1e-4), names


NEWER = r" needs torch 2\.11 or newer; this is .*: update torch, or run the network eagerly, which this version does"
COORDS = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.int32)


def test_what_needs_a_newer_torch_is_refused_by_name(monkeypatch):
    """Before anything is traced, changed or written."""
    from sparseconv.compiler import backend

    monkeypatch.setattr(torch_private, "VERSION", (2, 8))
    net = nn.UNet(4, 3, channels=(4, 8)).eval()
    with pytest.raises(RuntimeError, match=r"sparseconv\.export\.export" + NEWER):
        sparseconv.export.export(net, (COORDS, torch.randn(2, 4)))
    with pytest.raises(RuntimeError, match=r"torch\.compile\(backend='sparseconv'\)" + NEWER):
        backend.sparseconv(torch.fx.symbolic_trace(torch.nn.ReLU()), [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match=r"nn\.capture without an example\)" + NEWER):
        nn.capture(net)
    with pytest.raises(RuntimeError, match=r"sc\.accelerate .*" + NEWER):
        sparseconv.accelerate(net)
    assert net._compiled_call_impl is None


def test_a_trace_by_an_older_torch_names_the_one_that_it_needs(monkeypatch):
    """Where it meets the first voxels; and Dynamo's settings are as before."""
    pytest.importorskip("torch._functorch.aot_autograd", exc_type=ImportError)  # of 2.6, not with Triton 3.6
    from sparseconv.compiler import backend, settings

    monkeypatch.setattr(torch_private, "VERSION", (2, 8))
    before = {name: getattr(torch._dynamo.config, name, None) for name in settings.WANTED}
    # torch.compile is skipped in tests with an older torch
    compiled = torch._dynamo.optimize(backend.sparseconv)(nn.UNet(4, 3, channels=(4, 8)).eval())
    with pytest.raises(Exception, match=r"torch\.compile\(backend='sparseconv'\)" + NEWER):
        compiled(sparseconv.SparseTensor(sparseconv.VoxelGrid(COORDS), torch.randn(2, 4)))
    assert before == {name: getattr(torch._dynamo.config, name, None) for name in settings.WANTED}


def test_private_names_are_in_one_file():
    """And those of Dynamo, AOTAutograd and ATen, of which a backend of torch.compile is made, in its room."""
    of_dynamo = set((ROOT / "compiler").glob("*.py"))
    for path in ROOT.rglob("*.py"):
        if path.name != "torch_private.py" and path not in of_dynamo:
            names = re.findall(PRIVATE, path.read_text())
            assert not [n for n in names if n not in ("torch._dynamo",)], (path, names)


def test_trees_of_plain_containers():
    from sparseconv.torch_private import _flatten, _map, _unflatten

    tree = {"a": [1, (2, 3)], "b": 4, "c": ()}
    leaves, form = _flatten(tree)
    assert leaves == [1, 2, 3, 4]
    assert _unflatten(leaves, form) == tree
    assert _map(lambda v: 10 * v, tree) == {"a": [10, (20, 30)], "b": 40, "c": ()}
    assert _map(str, tree, lambda v: isinstance(v, list)) == {"a": "[1, (2, 3)]", "b": "4", "c": ()}
    assert _flatten(tree)[1] == _flatten({"a": [5, (6, 7)], "b": 8, "c": ()})[1]
    assert _flatten(tree)[1] != _flatten([1, 2])[1]
