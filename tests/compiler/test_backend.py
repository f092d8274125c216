"""torch.compile(..., backend="sparseconv") beside eager: values, gradients and buffers over scenes of many sizes.

Rows that are no voxels hold NaN in what is compiled (``poison``): whatever reads one of them shows it.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import sparseconv as sc
from sparseconv import nn
from sparseconv.interop.spconv.pytorch import SparseConv3d, SparseConvTensor

SIZES = (300, 280, 310, 700, 20)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def scene(seed: int, voxels: int) -> sc.SparseTensor:
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(0, 2, (voxels, 1), generator=generator)
    cells = torch.randint(0, 12, (voxels, 3), generator=generator)
    coords = torch.unique(torch.cat([items, cells], 1), dim=0)
    coords = coords[torch.randperm(len(coords), generator=generator)].int()
    features = torch.randn(len(coords), 4, generator=generator, dtype=torch.float64)
    return sc.SparseTensor(sc.VoxelGrid(coords, 3), features)  # the last item is empty


class Head(torch.nn.Module):
    """A convolution and a norm, and a function of their features."""

    def __init__(self, function: Any, **parts: torch.nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.function = nn.SubmanifoldConv(4, 8, 3), nn.BatchNorm(8), function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: sc.SparseTensor) -> Any:
        return self.function(self, self.norm(self.conv(x)))


def flat(found: Any) -> list[torch.Tensor]:
    if isinstance(found, sc.SparseTensor):
        return [found.features, found.grid.coords]
    return [found] if isinstance(found, torch.Tensor) else [t for part in found for t in flat(part)]


def step(module: torch.nn.Module, call: Any, x: sc.SparseTensor, trains: bool) -> list[torch.Tensor]:
    features = x.features.clone().requires_grad_(trains)
    module.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(trains):
        found = flat(call(sc.SparseTensor(x.grid, features)))
        if trains:
            loss = sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in found if t.requires_grad)
            loss.backward()  # type: ignore[union-attr]
    grads = [p.grad for p in module.parameters() if p.grad is not None] if trains else []
    return [t.detach().clone() for t in (*found, *([features.grad] if trains else []), *grads, *module.buffers())]


def compare(
    make: Any, *, trains: bool, sizes: tuple[int, ...] = SIZES, replays: bool = True, poison: bool = True
) -> torch.nn.Module:
    module = make().double().train(trains)
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="sparseconv", options={"poison": poison})
    for seed, voxels in enumerate(sizes):
        x = scene(seed, voxels)
        ours, theirs = step(module, compiled, x, trains), step(eager, eager, x, trains)
        assert len(ours) == len(theirs)
        for number, (mine, other) in enumerate(zip(ours, theirs)):
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype), number
            torch.testing.assert_close(
                mine, other, rtol=1e-9, atol=1e-9, msg=lambda text, number=number: f"number {number}: {text}"
            )
    if replays:
        assert "replayed" in nn.explain(module)
    return module


@pytest.mark.parametrize("trains", [True, False])
def test_a_u_net_is_one_program(trains: bool) -> None:
    module = compare(lambda: nn.UNet(4, 3, channels=(8, 16)), trains=trains)
    assert nn.explain(module).count("program") == 1


POOLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sum, then average": (lambda m, y: m["second"](m["first"](y)), {"first": nn.AvgPool(2), "second": nn.SumPool(2)}),
    "maximum": (lambda m, y: m["pool"](y), {"pool": nn.MaxPool(3, 2)}),
    "group and instance norm": (lambda m, y: m["b"](m["a"](y)), {"a": nn.GroupNorm(2, 8), "b": nn.InstanceNorm(8)}),
    "norm of channels that learns": (lambda m, y: m["other"](y), {"other": nn.LayerNorm(8)}),
    "mean of items": (lambda m, y: m["pool"](y), {"pool": nn.GlobalAvgPool()}),
    "maximum of items": (lambda m, y: m["pool"](y), {"pool": nn.GlobalMaxPool()}),
    "dense": (lambda m, y: y.to_dense(sc.IndexRange((0, -2, -1), (12, 12, 13))), {}),
}


def test_pools_and_norms_of_items() -> None:
    """All in one program, each of the same rows."""
    parts = {f"part{number}": torch.nn.ModuleDict(parts) for number, (_, parts) in enumerate(POOLS.values())}

    def all_of_them(m: Any, y: sc.SparseTensor) -> list[Any]:
        return [of(getattr(m, f"part{number}"), y) for number, (of, _) in enumerate(POOLS.values())]

    compare(lambda: Head(all_of_them, **copy.deepcopy(parts)), trains=True)


ROWS: dict[str, Any] = {
    "a number of rows": lambda m, y: y.features * (1 + 0.1 * math.log2(len(y.features) / 1000)),
    "a mean": lambda m, y: y.features - y.features.mean(0),
    "a sum": lambda m, y: y.features / (1 + y.features.abs().sum(0)),
    "a softmax": lambda m, y: y.features.softmax(0),
    "values beyond 0": lambda m, y: (
        y.features
        - (y.features - 9).max()
        - (y.features - 9).amax(0)
        - (y.features + 9).min()
        - (y.features + 9).amin(0)
    ),
    "a product over rows": lambda m, y: y.features.T @ y.features,
    "channels side by side": lambda m, y: torch.cat([y.features[:, 2:5], y.features.relu()], 1),
    "a norm of channels": lambda m, y: torch.nn.functional.layer_norm(y.features, (8,)),
}


def test_what_looks_along_the_rows_sees_live_ones() -> None:
    compare(lambda: Head(lambda m, y: [of(m, y) for of in ROWS.values()]), trains=True)


class Joining(torch.nn.Module):
    """What follows convolutions in evaluation: norms, residuals that are made before and after them, and activations
    with numbers; a vector, which is no residual, and a norm whose result is read twice, which joins nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(nn.SubmanifoldConv(4 if i == 0 else 8, 8, 3, bias=i == 1) for i in range(4))
        self.norms = torch.nn.ModuleList(nn.BatchNorm(8) for _ in range(3))
        self.shift = torch.nn.Parameter(torch.randn(8))
        for part in self.norms:
            for t in (part.weight, part.bias, part.running_mean, part.running_var):
                torch.nn.init.uniform_(t, 0.5, 2)

    def forward(self, x: sc.SparseTensor) -> list[torch.Tensor]:
        y = self.convs[0](x)
        z = self.convs[1](y)
        late = y.features.cos()
        z = self.norms[0](z).features
        w = self.norms[2](self.convs[3](y)).features
        return [
            torch.nn.functional.leaky_relu(z + late, 0.2),
            torch.nn.functional.leaky_relu(self.norms[1](self.convs[2](y)).features + y.features),
            (self.convs[2](y).features + self.shift).relu(),
            w.sigmoid() + w,
        ]


def test_what_follows_a_convolution_is_joined_to_it() -> None:
    compare(Joining, trains=False, sizes=(200, 150, 210))


class AmongRegions(torch.nn.Module):
    """A layer norm that learns: its gradient joins rows of an earlier region with those of a later one, as do the
    products of rows, since the concatenation along the rows ends the region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv(4, 8, 3), torch.nn.LayerNorm(8), nn.Conv(8, 8, 3)

    def forward(self, x: sc.SparseTensor) -> Any:
        rows = self.norm(self.first(x).features)
        y = self.second(x.with_features(rows - rows.mean(0))).features
        return torch.cat([y, y.softmax(0), rows.mean(0, keepdim=True), rows.T @ y])


@pytest.mark.parametrize("poison", [True, False])
def test_sums_over_rows_of_two_regions(poison: bool) -> None:
    compare(AmongRegions, trains=True, sizes=(600, 580, 610, 900, 40, 590), poison=poison)


TABLE = torch.linspace(-1, 1, 5000, dtype=torch.float64)[:, None].repeat(1, 8)
#: what a client makes of features (N, 8) and a number of rows
COUNTS: dict[str, Any] = {
    "by what a term is multiplied": lambda y, n: torch.add(y, y.relu(), alpha=n),
    "by what a product is multiplied": lambda y, n: torch.addcmul(y, y, y, value=n),
    "by what a matrix is multiplied": lambda y, n: torch.addmm(y, y, TABLE[:8].to(y.dtype), beta=n),
    "what a tensor is filled with": lambda y, n: y * y.new_full((8,), n) + torch.full_like(y, n),
    "a tensor": lambda y, n: y * torch.tensor(n),
    "the end of a line": lambda y, n: y * torch.linspace(0, n, 8, dtype=y.dtype),
    "a place in a table": lambda y, n: y * TABLE[n] * TABLE[n // 4],
    "a root": lambda y, n: y / math.sqrt(n),
    "what stands elsewhere": lambda y, n: torch.where(y > 0, y, n),
    "a fraction beside integers": lambda y, n: y.argmax(1) * (1.0 / n),
    "beside halves": lambda y, n: y.half() * (n / 7),
    "more than 64 bits": lambda y, n: y * (float(n**9) * 1e-22),
    "among the results": lambda y, n: (y, torch.full((3,), n)),
}


@pytest.mark.parametrize("level", ["of the scene", "of a coarser grid"])
def test_numbers_of_rows_are_those_of_the_scene(level: str) -> None:
    def function(module: Any, y: sc.SparseTensor) -> Any:
        y = module.down(y) if level == "of a coarser grid" else y
        rows = y.features.shape[0]
        return [t for found in COUNTS.values() for t in listed(found(y.features, rows))]

    compare(lambda: Head(function, down=nn.Conv(8, 8, 2, stride=2)), trains=True)


def listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


#: each with its dtype, which `compare` asks for
INTEGERS: dict[str, Any] = {
    "a sum of integers": lambda y: (y.argmax(1).sum(0), (y > 0).sum(), (y > 0).sum(0)),
    "a largest integer": lambda y: (y.argmax(1).amax(0), y.argmin(1).max()),
    "a mean in another dtype": lambda y: y.float().mean(0, dtype=torch.float64),
    "a choice from each row": lambda y: y.gather(1, y.argmax(1, keepdim=True)),
    "pieces of each row": lambda y: torch.cat([*y.split([3, 5], 1), *y.chunk(2, 1)], 1),
    "a column": lambda y: y[:, 0] * y[:, -1],
    "rows side by side": lambda y: (y.T.reshape(-1), y.flatten()),
    "channels in rows": lambda y: y.T.reshape(y.shape),
}


def test_what_is_known_of_rows_has_its_dtype_and_layout() -> None:
    def function(module: Any, y: sc.SparseTensor) -> Any:
        of_coords = (y.grid.coords.sum(0), y.features.gather(1, y.grid.coords[:, 1:2].long().clamp_max(7)))
        return [t for found in INTEGERS.values() for t in listed(found(y.features))] + list(of_coords)

    compare(lambda: Head(function), trains=True)


OTHERS: dict[str, Any] = {
    "a mask": lambda m, y: y.features[y.features[:, 0] > 0],
    "the first rows": lambda m, y: y.features[:16],
    "rows in order": lambda m, y: y.features.sort(0, descending=True).values,  # NaN would come first
    "a branch on rows": lambda m, y: y.features if len(y.features) > 100 else y.features * 2,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_region_holds_runs_beside_it(name: str) -> None:
    compare(lambda: Head(OTHERS[name]), trains=True, replays=False)


def test_few_voxels_and_none() -> None:
    compare(lambda: Head(lambda m, y: y), trains=True, sizes=(300, 1, 2, 300, 1, 3), replays=False)


class ThereAndBack(nn.SparseModule):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv(4, 8, 2, stride=2), nn.InverseConv(8, 4, 2, stride=2)

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        return self.up(self.down(x), onto=x)


def test_other_backends_of_torch_compile_take_new_scenes() -> None:
    net = ThereAndBack().double()
    compiled = torch.compile(net, backend="eager")
    for seed, voxels in enumerate(SIZES):
        x = scene(seed, voxels)
        torch.testing.assert_close(compiled(x).features, net(x).features)


def test_two_calls_before_their_gradients() -> None:
    module = Head(lambda m, y: y.features.tanh()).double()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="sparseconv")
    for seed in range(4):
        for call in (compiled, eager):
            first, second = call(scene(seed, 300)), call(scene(seed + 10, 250))
            (first.sum() + (second * 2).square().sum()).backward()
    for mine, other in zip(module.parameters(), eager.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_gradients_have_gradients() -> None:
    module = Head(lambda m, y: y.features.tanh()).double()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="sparseconv")
    for seed in range(3):
        for call in (compiled, eager):
            x = scene(seed, 200)
            z = x.features.clone().requires_grad_()
            (grad,) = torch.autograd.grad(call(sc.SparseTensor(x.grid, z)).square().sum(), z, create_graph=True)
            grad.square().sum().backward()
    for mine, other in zip(module.parameters(), eager.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-9)
    for mine, other in zip(module.buffers(), eager.buffers()):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_a_hook_of_every_module_is_called() -> None:
    module = Head(lambda m, y: m.linear(y.features), linear=torch.nn.Linear(8, 8)).double().eval()
    compiled = torch.compile(module, backend="sparseconv")
    x = scene(0, 100)
    plain = [compiled(x) for _ in range(3)][-1]
    of_linear = torch.nn.modules.module.register_module_forward_hook(
        lambda part, given, found: found * 3 if isinstance(part, torch.nn.Linear) else None
    )
    try:
        torch.testing.assert_close(compiled(x), plain * 3)
    finally:
        of_linear.remove()


def test_settings_of_dynamo_are_as_before() -> None:
    config = torch._dynamo.config
    before = (config.capture_scalar_outputs, config.assume_static_by_default, config.skip_nnmodule_hook_guards)
    compare(lambda: Head(lambda m, y: y), trains=False, sizes=(100, 90))
    assert before == (config.capture_scalar_outputs, config.assume_static_by_default, config.skip_nnmodule_hook_guards)


def test_unknown_options_are_refused() -> None:
    module = Head(lambda m, y: y).double()
    with pytest.raises(Exception, match="options"):
        torch.compile(module, backend="sparseconv", options={"poisson": True})(scene(0, 50))


def trained(call: Any, module: torch.nn.Module, x: sc.SparseTensor, around: Any = None) -> list[torch.Tensor]:
    """Result and gradients of one step, whose forward pass is called within ``around``."""
    module.zero_grad(set_to_none=True)
    features = x.features.clone().requires_grad_()

    def run(features: torch.Tensor) -> torch.Tensor:
        found = call(sc.SparseTensor(x.grid, features))
        return found if isinstance(found, torch.Tensor) else found.features

    y = run(features) if around is None else around(run, features)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return [y.detach(), features.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


def checkpointed(run: Any, features: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(run, features, use_reentrant=False)


def on_cpu(run: Any, features: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return run(features)


@pytest.mark.parametrize("around", [checkpointed, on_cpu])
def test_what_others_save_is_what_eager_calls_save(around: Any) -> None:
    module = Head(lambda m, y: y).double()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="sparseconv")
    for seed, voxels in enumerate(SIZES):
        x = scene(seed, voxels)
        for mine, other in zip(trained(compiled, module, x, around), trained(eager, eager, x, around)):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
        for mine, other in zip(trained(compiled, module, x), trained(eager, eager, x)):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_gradients_that_are_asked_for_twice() -> None:
    module = Head(lambda m, y: y).double()
    compiled = torch.compile(module, backend="sparseconv")
    for seed, voxels in enumerate(SIZES):
        module.zero_grad(set_to_none=True)
        loss = compiled(scene(seed, voxels)).features.square().sum()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in module.parameters()]  # type: ignore[union-attr]
        loss.backward()
        for grad, p in zip(once, module.parameters()):
            torch.testing.assert_close(p.grad, 2 * grad)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_weight_that_is_written_to_before_the_backward_pass_is_an_error() -> None:
    module = Head(lambda m, y: y).double()
    compiled = torch.compile(module, backend="sparseconv")
    for seed, voxels in enumerate(SIZES):
        x = scene(seed, voxels)
        loss = compiled(sc.SparseTensor(x.grid, x.features.requires_grad_())).features.square().sum()
        with torch.no_grad():
            module.conv.weight.mul_(2)
        with pytest.raises(RuntimeError, match="was written to after the forward pass"):
            torch.autograd.grad(loss, x.features, create_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


LOOKS: dict[str, Any] = {
    "where voxels lie": lambda m, y: y.features * y.grid.extent.shape[0],
    "how many an item has": lambda m, y: y.features * y.grid.batch_counts[0],
    "the edges of a map": lambda m, y: y.features * m.conv.plan(y).kernel_map.neighbors.amax(),
}


GRIDS: dict[str, Any] = {
    "union": lambda g: g.union(g.dilate(1)),
    "intersection": lambda g: g.dilate(1).intersection(g),
    "difference": lambda g: g.dilate(1).difference(g),
    "coarsen": lambda g: g.coarsen(2),
    "refine": lambda g: g.refine(2),
    "dilate": lambda g: g.dilate(1),
    "sorted": lambda g: g.sorted("morton")[0],
    "cat": lambda g: sc.VoxelGrid.cat([g, g.dilate(1)]),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_made_of_a_programs_grids(name: str) -> None:
    def parts(m: Any, y: sc.SparseTensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = GRIDS[name](m.down(y).grid)
        return y.features * 2, made.coords * made.batch_size

    compare(lambda: Head(parts, down=nn.Conv(8, 4, 3, stride=2)), trains=False, replays=False, sizes=(200, 150, 210))


@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_at_voxels_runs_eagerly(name: str) -> None:
    compare(lambda: Head(LOOKS[name]), trains=True, replays=False)


class Thinned(torch.nn.Module):
    """A norm over what a layer of kernel size 1 and stride 2 keeps, which is nothing of voxels at odd places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv(4, 4, 1, stride=2), nn.BatchNorm(4), nn.ReLU(), nn.SubmanifoldConv(4, 2, 3))

    def forward(self, x: sc.SparseTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x).features, x.features * 2


@pytest.mark.parametrize("trains", [True, False])
def test_norms_over_no_rows_have_gradients(trains: bool) -> None:
    module = Thinned().double()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module.train(trains), backend="sparseconv", options={"poison": True})
    eager.train(trains)
    for seed, at in enumerate((1, 0, 1, 0)):
        cells = scene(seed, 150).grid.coords
        cells[:, 1:] = 2 * cells[:, 1:] + at
        x = sc.SparseTensor(sc.VoxelGrid(cells), torch.randn(len(cells), 4, dtype=torch.float64))
        for mine, other in zip(step(module, compiled, x, True), step(eager, eager, x, True), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


class Switch(torch.nn.Module):
    """Two layers, between which Dynamo ends its graph, and a flag that it guards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.SubmanifoldConv(4, 4, 3), nn.SubmanifoldConv(4, 2, 3)
        self.doubled = False

    def forward(self, x: sc.SparseTensor) -> sc.SparseTensor:
        y = self.first(x)
        if self.doubled:
            y = sc.SparseTensor(y.grid, 2 * y.features)
        torch._dynamo.graph_break()
        return self.second(y)


def test_explain_names_graph_breaks_and_the_guard_of_a_recompilation() -> None:
    module = Switch().double()
    compiled = torch.compile(module, backend="sparseconv")
    compiled(scene(0, 200))
    line = Switch.forward.__code__.co_firstlineno + 4
    assert f"test_backend.py:{line}]" in nn.explain(module)
    assert "recompiled" not in nn.explain(module)
    module.doubled = True
    compiled(scene(1, 200))
    assert "recompiled, since this did not hold: self.doubled == False" in nn.explain(module)


def test_sizes_that_happen_to_agree_are_two_sizes() -> None:
    conv = nn.SubmanifoldConv(4, 2, 3).double()

    def call(x: sc.SparseTensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return conv(x).features, 2 * boxes

    compiled = torch.compile(call, backend="sparseconv")
    for seed, more in enumerate((0, 3, 1)):
        x = scene(seed, 150)
        boxes = torch.ones(len(x.grid) + more, 4)
        assert compiled(x, boxes)[1].sum() == 8 * len(boxes)
    assert nn.explain(conv).count("program") == 1, nn.explain(conv)


class Chosen(torch.nn.Module):
    """Stages whose results are wanted by number, as in many backbones, and a list that holds a count of calls."""

    def __init__(self, stages: Any) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(nn.SubmanifoldConv(4, 4, 3) for _ in range(4))
        self.stages, self.calls = stages, 0

    def forward(self, x: sc.SparseTensor, more: Any = ()) -> list[torch.Tensor]:
        found = []
        self.calls += 1
        for number, conv in enumerate(self.convs):
            x = conv(x)
            if (
                number in self.stages
                or number in more
                or 3 in [self.calls, self.calls - 1]
                or (3, 0) in [(self.calls, 0)]
            ):
                found.append(x.features)
        return [*found, x.features * 2]


@pytest.mark.parametrize("stages", [(1, 3), [0, 2], {1, 2}, {3: "last"}, range(2), ((1, 0), 2)])
def test_what_a_list_holds_is_what_it_holds(stages: Any) -> None:
    module = Chosen(stages).double()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="sparseconv", options={"poison": True})
    for seed in range(6):
        x = scene(seed, 150)
        more = [seed % 4] if seed % 2 else ()
        for mine, other in zip(compiled(x, more), eager(x, more), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


class Strided(torch.nn.Module):
    """A layer whose stride is changed, and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = SparseConv3d(4, 2, 3, stride=2, bias=False), 0

    def forward(self, x: SparseConvTensor) -> torch.Tensor:
        self.calls += 1
        return self.conv(x).features * self.calls


def test_integers_of_layers_are_guarded_and_those_of_other_modules_are_numbers() -> None:
    module = Strided().double()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="sparseconv")
    for seed in range(6):
        if seed == 4:
            module.conv.stride = eager.conv.stride = [1, 1, 2]
        x = scene(seed, 150)
        given = [SparseConvTensor(x.features, x.grid.coords.int(), [12, 12, 12], 2) for _ in range(2)]
        torch.testing.assert_close(compiled(given[0]), eager(given[1]), rtol=1e-9, atol=1e-9)
    # the count is a constant until it has changed once
    assert nn.explain(module).count("program") == 3, nn.explain(module)


def steps(make: Any, scenes: list[sc.SparseTensor], change: Any = lambda module, number: None) -> None:
    """Training steps, of which each draws the same random numbers, beside eager: results, gradients, and errors."""
    module = make().double()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="sparseconv", options={"poison": True})
    for number, x in enumerate(scenes):
        found = []
        for of, call in ((module, compiled), (eager, eager)):
            change(of, number)
            of.zero_grad(set_to_none=True)
            torch.manual_seed(number)
            try:
                first = flat(call(x))[0]
                first.square().sum().backward()
                found.append([first.detach(), *(p.grad for p in of.parameters()), torch.rand(1)])
            except RuntimeError as error:
                found.append([str(type(error))])
        assert len(found[0]) == len(found[1])
        for mine, other in zip(*found):
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
            else:
                assert mine == other  # an error; or a parameter that no gradient reaches


SCENES = [scene(seed, voxels) for seed, voxels in enumerate((300, 280, 700, 290))]


def test_what_no_gradient_reaches_has_none() -> None:
    parts = {"first": torch.nn.Linear(8, 3), "second": torch.nn.Linear(8, 3)}
    steps(lambda: Head(lambda m, y: (m.first(y.features), m.second(y.features)), **parts), SCENES)


def test_a_largest_value_of_no_row_is_an_error() -> None:
    nothing = SCENES[0].subset(torch.zeros(len(SCENES[0].grid), dtype=torch.bool))
    steps(lambda: Head(lambda m, y: y.features - y.features.max()), [*SCENES[:2], nothing, SCENES[3]])


def test_a_scene_that_does_not_fit_draws_its_random_numbers_once() -> None:
    """It has as many voxels as there is room for, and more coarser ones, which are found behind the dropout."""
    parts = {"drop": torch.nn.Dropout(0.5), "down": nn.Conv(8, 8, 2, stride=2), "last": nn.SubmanifoldConv(8, 8, 3)}
    dense = [x.subset((x.grid.coords[:, 1:] < 6).all(1)) for x in (scene(seed, 3000) for seed in range(3))]
    scenes = [*dense[:2], scene(3, 500), dense[2]]
    steps(lambda: Head(lambda m, y: m.last(m.down(y.with_features(m.drop(y.features)))), **parts), scenes)


def test_numbers_that_gradients_alone_are_made_of() -> None:
    def function(module: Any, y: sc.SparseTensor) -> Any:
        return torch.add(y.features, y.features.tanh(), alpha=module.power)

    def change(module: Any, number: int) -> None:
        module.power = 2 + number % 3

    steps(lambda: Head(function), [*SCENES, *SCENES], change)


def test_rows_of_two_grids_that_differ_do_not_meet() -> None:
    far = [
        sc.SparseTensor(sc.VoxelGrid(x.grid.coords * x.grid.coords.new_tensor([1, 4, 4, 4]), 2), x.features)
        for x in SCENES
    ]
    parts = {"a": nn.Conv(8, 8, 2, stride=2), "b": nn.Conv(8, 8, 2, stride=2, padding=1)}
    steps(lambda: Head(lambda m, y: m.a(y).features + m.b(y).features, **parts), [*far[:3], SCENES[0], far[3]])


def alone(module: Any, y: sc.SparseTensor) -> Any:
    torch._dynamo.graph_break()
    return INSIDE["a checkpoint"](module, y)


INSIDE: dict[str, Any] = {
    "a checkpoint": lambda m, y: torch.utils.checkpoint.checkpoint(m.part, y.features, use_reentrant=False),
    "a checkpoint beside results that share memory": lambda m, y: (
        INSIDE["a checkpoint"](m, y),
        y.features,
        y.features[:2],
    ),
    "a checkpoint without sparse layers": alone,
    "a condition on a tensor": lambda m, y: torch.cond(
        y.features.sum() > 0, lambda z: z.cumsum(0), lambda z: z - z.mean(0), (y.features,)
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_operators_on_functions(name: str) -> None:
    parts = {"part": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))}
    steps(lambda: Head(INSIDE[name], **parts), SCENES)


def test_a_buffer_that_is_assigned_what_was_written_to_it() -> None:
    def function(module: Any, y: sc.SparseTensor) -> Any:
        module.seen += len(y.features)
        return y.features / module.seen

    def make() -> torch.nn.Module:
        module = Head(function)
        module.register_buffer("seen", torch.zeros(1))
        return module

    compare(make, trains=True)
    compare(make, trains=False)


def test_activations_are_part_of_the_program() -> None:
    names = "ReLU LeakyReLU PReLU ELU CELU SELU GELU SiLU Mish Hardswish Hardtanh Hardsigmoid ReLU6 Softplus Softshrink"
    made = [getattr(torch.nn, name)() for name in (*names.split(), "Hardshrink", "Tanh", "Sigmoid", "Softsign")]
    made += [torch.nn.GELU(approximate="tanh"), torch.nn.PReLU(8), torch.nn.Threshold(0.1, 0.0)]
    parts = {"acts": torch.nn.ModuleList(made)}
    module = compare(
        lambda: Head(lambda m, y: [f(y.features) for f in m.acts], **parts), trains=True, sizes=(200, 150, 210)
    )
    assert "ends the region" not in nn.explain(module), nn.explain(module)


class Joined(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.SubmanifoldConv(4, 8, 3)

    def forward(self, a: sc.SparseTensor, b: sc.SparseTensor) -> Any:
        return (self.conv(a) + self.conv(b)).features


def test_tensors_on_two_grid_objects_are_joined_where_the_voxels_are_the_same() -> None:
    module = Joined().double().eval()
    compiled = torch.compile(module, backend="sparseconv")
    for x in SCENES:
        like = sc.SparseTensor(sc.VoxelGrid(x.grid.coords.clone(), 3), x.features * 2)
        torch.testing.assert_close(compiled(x, like), module(x, like), rtol=1e-9, atol=1e-9)
        moved = sc.SparseTensor(sc.VoxelGrid(x.grid.coords.flip(0), 3), x.features)
        with pytest.raises(ValueError, match="different voxels"):
            compiled(x, moved)


def test_attention_over_all_rows_views_tensors_as_they_lie() -> None:
    def attend(m: Any, y: sc.SparseTensor) -> torch.Tensor:
        rows = y.features[None]
        return m.attention(rows, rows, rows, need_weights=False)[0][0]

    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    compare(lambda: Head(attend, attention=attention), trains=True, sizes=(60, 55, 150, 57), replays=False)


VIEWS: dict[str, Any] = {
    "of a result": lambda m, y: (y.features, y.features[:, :2]),
    "of an argument": lambda m, y: (y.features, y.grid.coords[:, 1:]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_results_that_share_memory_run_eagerly(name: str) -> None:
    module = compare(lambda: Head(VIEWS[name]), trains=True, replays=False)
    assert "runs eagerly: result" in nn.explain(module)


def test_an_argument_among_the_results_is_that_argument() -> None:
    module = Head(lambda m, y: y.features)
    compiled = torch.compile(lambda x, more: (module(x), more), backend="sparseconv")
    for seed, voxels in enumerate(SIZES):
        x, more = scene(seed, voxels), torch.randn(3, requires_grad=True)
        x = sc.SparseTensor(x.grid, x.features.float())
        y, same = compiled(x, more)
        assert same is more
        y.sum().backward()


def test_threads_take_turns() -> None:
    from concurrent.futures import ThreadPoolExecutor

    module = Head(lambda m, y: y.features).double().eval()
    compiled = torch.compile(module, backend="sparseconv")
    scenes = [scene(seed, 200 + 10 * seed) for seed in range(8)]
    with torch.no_grad():
        expected = [module(x) for x in scenes]
        compiled(scenes[-1]), compiled(scenes[-1])

    def call(number: int) -> bool:
        with torch.no_grad():
            return torch.allclose(compiled(scenes[number % 8]), expected[number % 8])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(64)))
