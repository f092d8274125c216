"""The plan's surface: what it knows, what it shares, what it refuses."""

from __future__ import annotations

import io
import pickle
import threading
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import sparseconv as sc
from sparseconv.plan import shared_plan
from sparseconv.plan.weights import by_tap
from tests.cases import CASES, build, operands


@pytest.fixture
def grid() -> sc.VoxelGrid:
    gen = torch.Generator().manual_seed(3)
    coords = torch.unique(torch.randint(-4, 4, (120, 3), generator=gen), dim=0)
    coords = coords[torch.randperm(len(coords), generator=gen)]
    return sc.VoxelGrid(torch.cat([torch.zeros(len(coords), 1, dtype=torch.int64), coords], 1))


# ---- the identity tap is known, not guessed


def test_the_identity_tap_is_known_for_the_same_grid_only(grid):
    assert sc.ConvolutionPlan(grid, 3).kernel_map.identity_tap == 13
    assert sc.ConvolutionPlan(grid, (1, 2, 3)).kernel_map.identity_tap == 1
    assert sc.ConvolutionPlan(grid, 3, padding=0).kernel_map.identity_tap == 0
    assert sc.ConvolutionPlan(grid, 3, padding=5).kernel_map.identity_tap is None
    assert sc.ConvolutionPlan(grid, taps=[(0, 0, 1), (0, 0, 0)]).kernel_map.identity_tap == 1
    assert sc.ConvolutionPlan(grid, 3, stride=2).kernel_map.identity_tap is None


def test_the_reverse_of_taps_in_any_order_mirrors_each(grid):
    edges = sc.ConvolutionPlan(grid, taps=[(0, 0, 1), (0, 0, 0), (1, 0, 0), (0, 0, -1), (-1, 0, 0)]).kernel_map
    assert (edges.identity_tap, edges.mirror) == (1, (3, 1, 4, 0, 2))
    table, plain = edges.neighbors, sc.KernelMap(edges.num_in, edges.num_out, 5, neighbors=edges.neighbors.clone())
    mirrored = sc.KernelMap(edges.num_in, edges.num_out, 5, neighbors=table, identity_tap=1, mirror=edges.mirror)
    assert torch.equal(mirrored.reverse().neighbors, plain.reverse().neighbors)
    assert mirrored.reverse().identity_tap == 1


@pytest.mark.parametrize("how", ["permuted", "shifted"])
def test_another_grid_of_equal_size_has_no_identity_tap(grid, how):
    """The centre-tap shortcut by sizes alone gives wrong numbers here."""
    rows = torch.randperm(len(grid)) if how == "permuted" else torch.arange(len(grid))
    coords = grid.coords[rows] + torch.tensor([0, 0, 0, int(how == "shifted")], dtype=torch.int32)
    other = sc.VoxelGrid(coords)
    plan = sc.ConvolutionPlan(grid, 3, target=other)
    assert plan.kernel_map.identity_tap is None
    x, w = torch.randn(len(grid), 3, dtype=torch.float64), torch.randn(27, 3, 2, dtype=torch.float64)
    everything = sc.ConvolutionPlan(grid, 3, target="full")
    want = everything.execute(x, w)
    row = everything.target.lookup(other.coords)
    got = plan.execute(x, w)
    assert torch.allclose(got[row >= 0], want[row[row >= 0]])
    assert not bool(got[row < 0].any())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_maps_are_partial_injections_and_reverse_in_place(case):
    plan = build(case)
    edges = plan.kernel_map
    assert edges.reverse().reverse() is edges
    assert edges.num_pairs == sum(edges.tap_counts) == int(edges.tap_offsets[-1])
    assert plan.max_pairs_per_tap == max(edges.tap_counts)
    assert int(plan.coverage.sum()) == edges.num_out
    assert int((plan.coverage * torch.arange(edges.num_taps + 1)).sum()) == edges.num_pairs
    for rows, size in ((edges.in_rows, edges.num_in), (edges.out_rows, edges.num_out)):
        assert rows.dtype == torch.int32
        for tap in range(edges.num_taps):
            own = rows[edges.tap_offsets[tap] : edges.tap_offsets[tap + 1]]
            assert len(own.unique()) == len(own)
        assert not len(rows) or (int(rows.min()) >= 0 and int(rows.max()) < size)
    for one in (edges, edges.reverse()):
        table = one.neighbors
        assert table.shape == (one.num_taps, one.num_out)
        live = table >= 0
        assert int(live.sum()) == one.num_pairs
        assert torch.equal(table[one.pair_taps.long(), one.out_rows.long()], one.in_rows)
    if edges.mirror is not None:
        assert torch.equal(edges.reverse().neighbors, edges.neighbors[list(edges.mirror)])
    if edges.identity_tap is not None:
        assert edges.neighbors[edges.identity_tap].tolist() == list(range(edges.num_out))


# ---- sharing


def test_transposing_twice_comes_home(grid):
    plan = sc.ConvolutionPlan(grid, 2, stride=2)
    again = plan.transpose().transpose()
    assert again.kernel_map is plan.kernel_map
    assert (again.source, again.target, again.is_transposed) == (plan.source, plan.target, False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_pickle(case):
    plan = build(case)
    x, w, _ = operands(plan, case)
    for other in (pickle.loads(pickle.dumps(plan)), through_a_file(plan)):
        assert torch.equal(other.execute(x, w), plan.execute(x, w))
        assert repr(other) == repr(plan)


def through_a_file(thing):
    """What `torch.load` makes of it by default, which runs no code of the file's."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_grids_and_tensors_load_without_their_code(grid):
    named = sc.VoxelGrid(grid.coords, 3, voxel_size=0.5, origin=(1.0, 2.0, 3.0))
    x = sc.SparseTensor(named, torch.randn(len(grid), 4))
    for one in (named, named.coarsen(2), sc.ConvolutionPlan(named, 3, stride=2).target):
        other = through_a_file(one)
        assert torch.equal(other.coords, one.coords)
        assert repr(other) == repr(one)
        assert torch.equal(other.lookup(one.coords), torch.arange(len(one)))
    found = through_a_file({"x": x, "map": sc.ConvolutionPlan(named, 3).kernel_map})
    assert torch.equal(found["x"].features, x.features)
    assert torch.equal(found["map"].neighbors, sc.ConvolutionPlan(named, 3).kernel_map.neighbors)
    assert found["x"].grid.batch_counts.tolist() == [len(grid), 0, 0]


def test_what_a_damaged_file_says_is_refused(grid):
    """Kernels read the rows that a map names, and searches the cells that a grid's bounds span, without a look."""
    x = sc.SparseTensor(grid, torch.randn(len(grid), 4))
    for changed in (grid.coords.clone().index_fill_(1, torch.tensor([0]), 7), grid.coords.float(), grid.coords[:, :1]):
        other = through_a_file(grid)
        other.coords = changed
        with pytest.raises((ValueError, TypeError)):
            through_a_file(other)
    moved = through_a_file(grid)
    moved._low, moved._high, moved.coords = (0, 0, 0, 0), (0, 1, 1, 1), moved.coords * 3
    assert torch.equal(through_a_file(moved).lookup(grid.coords * 3), torch.arange(len(grid)))
    longer = through_a_file(x)
    longer.__dict__["features"] = torch.randn(3, 4)
    with pytest.raises(ValueError, match="one row per voxel"):
        through_a_file(longer)
    ins, outs, offsets = sc.ConvolutionPlan(grid, 3).kernel_map.pairs
    for pairs in (
        (ins + 1, outs, offsets),
        (ins - 1, outs, offsets),
        (ins, outs + 1, offsets),
        (ins, outs[:-1], offsets),
        (ins.long(), outs, offsets),
        (ins, outs, offsets + 1),
        (ins, outs, offsets.flip(0)),
        (ins, outs, offsets[:-1]),
    ):
        plan = through_a_file(sc.ConvolutionPlan(grid, 3))
        plan.kernel_map.__dict__["pairs"] = pairs
        with pytest.raises((ValueError, RuntimeError), match="damaged"):
            through_a_file(plan)
    for name, value in (("identity_tap", 27), ("mirror", (0,) * 27), ("num_in", 3), ("num_out", 3), ("num_taps", 26)):
        plan = through_a_file(sc.ConvolutionPlan(grid, 3))
        plan.kernel_map.__dict__[name] = value
        with pytest.raises(ValueError, match="damaged"):
            through_a_file(plan)


def test_one_plan_serves_many_threads(grid):
    plan = sc.ConvolutionPlan(grid, 3)
    xs = [torch.randn(len(grid), 8) for _ in range(8)]
    w = torch.randn(27, 8, 8)
    want = [plan.execute(x, w) for x in xs]
    got: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        for _ in range(5):
            got[i] = plan.execute(xs[i], w)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(got[i], want[i]) for i in range(8))


def test_layers_share_plans_through_the_grid(grid):
    down = shared_plan(grid, 2, stride=2)
    assert shared_plan(grid, [2, 2, 2], stride=(2, 2, 2)) is down
    assert shared_plan(grid, 3) is not shared_plan(grid, 3, dilation=2)
    assert shared_plan(grid, 3, groups=4).kernel_map is shared_plan(grid, 3).kernel_map
    assert shared_plan(down.target, 3).source is down.target
    crosses = [shared_plan(grid, taps=t) for t in ([(0, 0, 0)], torch.tensor([[0, 0, 0]]))]
    assert crosses[0] is crosses[1]


# ---- weights


def test_both_layouts_give_the_same_and_gradients_reach_the_tensor_given(grid):
    plan = sc.ConvolutionPlan(grid, (1, 2, 3), groups=2)
    x = torch.randn(len(grid), 4)
    foreign = torch.randn(6, 2, 1, 2, 3, requires_grad=True)
    native = foreign.detach().flatten(2).permute(2, 1, 0).contiguous().requires_grad_()
    one, two = plan.execute(x, foreign), plan.execute(x, native)
    assert torch.equal(one, two)
    one.square().sum().backward()
    two.square().sum().backward()
    assert torch.allclose(foreign.grad.flatten(2).permute(2, 1, 0), native.grad, atol=1e-5)


def test_a_foreign_layout_is_packed_from_the_weight_as_it_is(grid):
    plan = sc.ConvolutionPlan(grid, 3)
    x = torch.randn(len(grid), 4)
    w = torch.randn(5, 4, 3, 3, 3)
    with torch.no_grad():
        first = plan.execute(x, w)
        w.mul_(2)  # as an optimiser steps, in place
        assert torch.allclose(plan.execute(x, w), 2 * first, atol=1e-5)
        w.data.mul_(2)  # as a teacher follows, which no version of the tensor tells
        assert torch.allclose(plan.execute(x, w), 4 * first, atol=1e-5)
        w.numpy()[:] *= 0.25
        assert torch.allclose(plan.execute(x, w), first, atol=1e-5)
        w.data = torch.zeros_like(w)
        assert not bool(plan.execute(x, w).any())
    parameter = torch.nn.Parameter(torch.randn(5, 4, 3, 3, 3))
    optimiser = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(2):
        plan.execute(x, parameter).square().mean().backward()
        before = parameter.detach().clone()
        optimiser.step()
        optimiser.zero_grad()
        assert not torch.equal(parameter, before)
    with torch.inference_mode():
        assert plan.execute(x, torch.zeros(5, 4, 3, 3, 3)).shape == (len(grid), 5)


# ---- words


def test_a_plan_reads_well(grid):
    assert repr(sc.ConvolutionPlan(grid, 3)).startswith("ConvolutionPlan(submanifold 3x3x3, ")
    assert "stride 2x2x2" in repr(sc.ConvolutionPlan(grid, 2, stride=2).transpose())
    assert "7 taps" in repr(sc.ConvolutionPlan(grid, taps=[(0, 0, i) for i in range(7)]))
    text = str(sc.ConvolutionPlan(grid, 3).explain(torch.zeros(len(grid), 8), torch.zeros(27, 8, 16)))
    assert "numpy_gather_scatter: could serve" in text
    for word in ("8 -> 16 channels", "llvm_implicit_gemm: chosen", "GFLOP", "workspace"):
        assert word in text


def test_workspace_is_stated(grid):
    plan = sc.ConvolutionPlan(grid, 3)
    assert plan.workspace_bytes(8, 16) > 0
    assert plan.workspace_bytes(8, 16, torch.float64) >= plan.workspace_bytes(8, 16)


# ---- refusals


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda g: sc.ConvolutionPlan(g), ValueError, "either kernel_size"),
        (lambda g: sc.ConvolutionPlan(g, 3, taps=[(0, 0, 0)]), ValueError, "either kernel_size"),
        (lambda g: sc.ConvolutionPlan(g, (3, 3)), ValueError, "one for each axis"),
        (lambda g: sc.ConvolutionPlan(g, 0), ValueError, "at least 1"),
        (lambda g: sc.ConvolutionPlan(g, 3, stride=0), ValueError, "stride must be at least 1"),
        (lambda g: sc.ConvolutionPlan(g, 3, dilation=-1), ValueError, "dilation must be at least 1"),
        (lambda g: sc.ConvolutionPlan(g, 3.0), TypeError, "kernel_size must be one integer"),
        (lambda g: sc.ConvolutionPlan(g, taps=[]), ValueError, "non-empty"),
        (lambda g: sc.ConvolutionPlan(g, taps=[(0, 0)]), ValueError, r"\(K, 3\)"),
        (lambda g: sc.ConvolutionPlan(g, taps=[(0, 0, 0), (0, 0, 0)]), ValueError, "distinct"),
        (lambda g: sc.ConvolutionPlan(g.coords, 3), TypeError, "VoxelGrid"),
        (lambda g: sc.ConvolutionPlan(g, 3, groups=0), ValueError, "groups"),
        (lambda g: sc.ConvolutionPlan(g, 3, backend="cudnn"), ValueError, "numpy_gather_scatter"),
        (lambda g: sc.ConvolutionPlan(g, 3, target="same"), ValueError, "'full'"),
        (lambda g: sc.ConvolutionPlan(g, 3, boundary="periodic"), ValueError, "extent"),
        (lambda g: sc.ConvolutionPlan(g, 3, boundary="negative"), ValueError, "-1 is a voxel"),
        (lambda g: sc.ConvolutionPlan(g, 3, boundary="wrap"), ValueError, "'periodic'"),
        (lambda g: sc.ConvolutionPlan(g, 3, boundary=sc.Boundary.periodic((2, 2, 2))), ValueError, "leaves"),
        (
            lambda g: sc.ConvolutionPlan(
                g, 3, stride=2, boundary=sc.Boundary.periodic(sc.IndexRange((-5, -5, -5), (6, 6, 6)))
            ),
            ValueError,
            "multiple of the stride",
        ),
        (lambda g: sc.ConvolutionPlan(g, 3, boundary="forbid", target=g), ValueError, "leave the extent"),
        (lambda g: sc.ConvolutionPlan.transposed(g, 2, stride=2, boundary="forbid"), ValueError, "extent"),
        (
            lambda g: sc.ConvolutionPlan.transposed(g, 3, target=g, boundary=sc.Boundary.forbid((2, 2, 2))),
            ValueError,
            "the boundary forbids indices outside",
        ),
        (
            lambda g: sc.ConvolutionPlan(g, 3, target=sc.VoxelGrid(g.coords, batch_size=2)),
            ValueError,
            "same batch_size",
        ),
        (
            lambda g: sc.ConvolutionPlan(g, 3, target=sc.VoxelGrid(torch.zeros(1, 3, dtype=torch.int32))),
            ValueError,
            "same rank",
        ),
    ],
)
def test_plans_that_cannot_be(grid, make, error, message):
    with pytest.raises(error, match=message):
        make(grid)


def test_calls_that_cannot_be(grid):
    plan = sc.ConvolutionPlan(grid, 3)
    n = len(grid)
    x, w = torch.zeros(n, 4), torch.zeros(27, 4, 6)

    def refuses(error, message, *args, by=plan):
        with pytest.raises(error, match=message):
            by.execute(*args)

    refuses(ValueError, "one row per voxel", torch.zeros(n + 1, 4), w)
    refuses(ValueError, "one row per voxel", torch.zeros(4), w)
    refuses(TypeError, "floating", torch.zeros(n, 4, dtype=torch.int32), w)
    refuses(ValueError, "takes 4", torch.zeros(n, 5), w)
    refuses(ValueError, "K = 27", x, torch.zeros(8, 4, 6))
    refuses(ValueError, "must be", x, torch.zeros(27, 24))
    refuses(ValueError, "permute", x, torch.zeros(6, 3, 3, 3, 4))  # spconv's layout
    refuses(ValueError, r"bias must be \(6,\)", x, w, torch.zeros(5))
    refuses(TypeError, "cast one, or use torch.autocast", x, w.double())
    refuses(TypeError, "bias is", x, w, torch.zeros(6, dtype=torch.float16))
    refuses(ValueError, "plan is on cpu but x is on meta", x.to("meta"), w)
    refuses(ValueError, "multiple of groups", x, torch.zeros(27, 1, 6), by=plan.with_groups(4))
    line = sc.ConvolutionPlan(sc.VoxelGrid(torch.tensor([[0, 1], [0, 2]])), 3)
    refuses(ValueError, r"permute\(2, 1, 0\)", torch.zeros(2, 4), torch.zeros(6, 4, 3), by=line)
    named = sc.ConvolutionPlan(grid, 3, backend="numpy_gather_scatter")
    refuses(
        ValueError,
        "asked for by name, but it has no arithmetic",
        x.to(torch.float8_e5m2),
        w.to(torch.float8_e5m2),
        by=named,
    )


def test_a_transposed_plan_onto_a_grid_within_the_extent():
    coarse, fine = (sc.VoxelGrid(torch.tensor([[0, i] for i in range(n)])) for n in (3, 4))
    edge = sc.Boundary.forbid((4,))
    given = sc.ConvolutionPlan.transposed(coarse, 3, stride=2, target=fine, boundary=edge)
    full = sc.ConvolutionPlan.transposed(coarse, 3, stride=2, boundary=edge)
    assert torch.equal(given.target.coords, full.target.coords)
    assert torch.equal(given.kernel_map.neighbors, full.kernel_map.neighbors)


def test_arrays_of_numpy_are_one_spelling_too(grid):
    taps = [(0, 0, 0), (0, 1, 0)]
    assert shared_plan(grid, taps=np.array(taps)) is shared_plan(grid, taps=taps)
    assert shared_plan(grid, np.array([3, 3, 3])) is shared_plan(grid, np.int64(3)) is shared_plan(grid, 3)


def test_a_map_of_other_shapes_is_refused():
    rows = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"neighbors must be \(3, 2\)"):
        sc.KernelMap(3, 2, 3, neighbors=rows[None].expand(3, 3))
    with pytest.raises(ValueError, match=r"\(P,\) and \(4,\) for 3 taps"):
        sc.KernelMap(3, 3, 3, pairs=(rows, rows, torch.tensor([0, 1, 3])))
    with pytest.raises(ValueError, match=r"\(P,\) and \(2,\) for 1 taps"):
        sc.KernelMap(3, 3, 1, pairs=(rows, rows[:2], torch.tensor([0, 3])))


# ---- weights packed once, and weights of which the layout is ambiguous


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
def test_packed_weights_give_what_the_weight_gives(grid, dtype, groups):
    plan = sc.ConvolutionPlan(grid, (1, 2, 3), groups=groups)
    x, bias = torch.randn(len(grid), 4).to(dtype), torch.randn(6).to(dtype)
    foreign = torch.randn(6, 4 // groups, 1, 2, 3).to(dtype)
    by_tap = foreign.flatten(2).permute(2, 1, 0)
    want = plan.execute(x, by_tap.contiguous(), bias)
    for weight in (foreign, by_tap, by_tap.contiguous()):
        packed = plan.pack(weight)
        assert (packed.shape, packed.dtype, packed.device) == (by_tap.shape, dtype, x.device)
        assert torch.equal(plan.execute(x, packed, bias), want)
        assert torch.equal(plan.execute(x, pickle.loads(pickle.dumps(packed)), bias), want)
        assert packed.to("cpu") is packed
        assert str(plan.explain(x, packed)) == str(plan.explain(x, weight))
    elsewhere = sc.ConvolutionPlan(grid.coarsen(2), (1, 2, 3), groups=groups)  # a weight is of no scene
    assert elsewhere.execute(x[: elsewhere.num_in], packed).shape == (elsewhere.num_in, 6)


def test_packed_weights_are_frozen(grid):
    plan = sc.ConvolutionPlan(grid, 3)
    x, weight = torch.randn(len(grid), 4), torch.randn(27, 4, 6)
    packed, want = plan.pack(weight), plan.execute(x, weight)
    weight.zero_()
    assert torch.equal(plan.execute(x, packed), want)
    with pytest.raises(AttributeError):
        packed._tensor = weight


def test_packed_weights_give_gradients_to_the_others_alone(grid):
    plan = sc.ConvolutionPlan(grid, 3)
    x, bias = (torch.randn(*shape, requires_grad=True) for shape in ((len(grid), 4), (6,)))
    weight = torch.nn.Parameter(torch.randn(27, 4, 6))
    with pytest.raises(ValueError, match=r"requires gradients, .*no_grad\(\), .*pack weight.detach\(\)"):
        plan.execute(x, plan.pack(weight))
    with torch.no_grad():
        assert torch.equal(plan.execute(x, plan.pack(weight)), plan.execute(x, weight))
    with torch.inference_mode():
        packed = plan.pack(weight.detach())
    plan.execute(x, packed, bias).square().sum().backward()
    want = torch.autograd.grad(plan.execute(x, weight, bias).square().sum(), (x, bias))
    assert torch.equal(x.grad, want[0])
    assert torch.equal(bias.grad, want[1])


def test_packed_weights_of_another_layout_or_dtype_are_refused(grid):
    plan = sc.ConvolutionPlan(grid, 3)
    x, packed = torch.randn(len(grid), 4), plan.pack(torch.randn(27, 4, 6))
    for other, words in (
        (sc.ConvolutionPlan(grid, (27, 1, 1)), r"kernel_size \(27, 1, 1\), .* for kernel_size \(3, 3, 3\)"),
        (sc.ConvolutionPlan(grid, taps=plan.window.offsets), r"27 explicit taps, .* for kernel_size \(3, 3, 3\)"),
        (plan.with_groups(2), "groups=2, but .* for 1"),
    ):
        with pytest.raises(ValueError, match=words):
            other.execute(x, packed)
        with pytest.raises(ValueError, match="pack them by this plan"):
            other.explain(x, packed)
    with pytest.raises(TypeError, match=r"computes in torch.float64, but .* packed in torch.float32: pack weight.to"):
        plan.execute(x.double(), packed)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match=r"computes in torch.bfloat16, but"):
            plan.execute(x, packed)
        halves = plan.pack(torch.randn(27, 4, 6).bfloat16())
        assert plan.execute(x, halves).dtype == torch.bfloat16
        assert torch.equal(plan.execute(x.half(), halves), plan.execute(x.half().bfloat16(), halves))
        with pytest.raises(TypeError, match=r"computes in torch.bfloat16, but .* packed in torch.float16"):
            plan.execute(x.half(), plan.pack(torch.randn(27, 4, 6).half()))
        with pytest.raises(TypeError, match=r"computes in torch.float64, but .* packed in torch.bfloat16"):
            plan.execute(x.double(), halves)
    with pytest.raises(ValueError, match=r"x has 4 channels"):
        plan.execute(x, plan.pack(torch.randn(27, 6, 4)))
    for weight, error in ((torch.randn(9, 4, 6), ValueError), (torch.ones(27, 4, 6).long(), TypeError), (3, TypeError)):
        with pytest.raises(error, match="weight"):
            plan.pack(weight)


def test_a_compiler_takes_packed_weights(grid):
    plan = sc.ConvolutionPlan(grid, 3)
    x, packed = torch.randn(len(grid), 4), plan.pack(torch.randn(6, 4, 3, 3, 3))
    compiled = torch.compile(lambda x: plan.execute(x, packed), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), plan.execute(x, packed))


def test_a_weight_that_fits_two_layouts_is_warned_of(grid):
    plan = sc.ConvolutionPlan(grid, 3)
    x, weight = torch.randn(len(grid), 3), torch.randn(8, 3, 3, 3, 3)
    for use in (lambda: plan.execute(x, weight), lambda: plan.pack(weight), lambda: plan.explain(x, weight)):
        with pytest.warns(UserWarning, match=r"\(8, 3, 3, 3, 3\) is taken in torch's layout .* spconv's") as seen:
            use()
        assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = plan.execute(x, weight.flatten(2).permute(2, 1, 0))  # as the warning says
        assert not torch.equal(said, plan.execute(x, weight.flatten(1, -2).permute(1, 2, 0)))
        plan.execute(torch.randn(len(grid), 4), torch.randn(8, 4, 3, 3, 3))
        sc.ConvolutionPlan(grid, (3, 3, 1)).execute(x, torch.randn(8, 3, 3, 3, 1))
        one = sc.ConvolutionPlan(grid, 1)
        one.execute(x[:, :1], torch.randn(8, 1, 1, 1, 1))
    with pytest.warns(UserWarning, match="torch's layout"):
        assert torch.equal(said, plan.execute(x, weight))


def test_a_weight_packed_for_a_call_is_contiguous(grid):
    plan, x = sc.ConvolutionPlan(grid, 3), torch.randn(len(grid), 4)
    for weight in (torch.randn(8, 4, 3, 3, 3), torch.randn(27, 8, 4).transpose(1, 2)):
        for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            with context:
                taps = plan.operands(x, weight)[1]
                assert taps.is_contiguous()
                assert torch.equal(taps, by_tap(weight, (3, 3, 3), 27).to(taps.dtype))
