"""The operation as torch sees it: registration, compilation, autocast, and no work that nobody asked for."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.optests import generate_tests

import sparseconv as sc
from sparseconv.autograd import edges_tensor
from sparseconv.backends.registry import choose
from tests.cases import CASES, build, named, operands
from tests.ranks import on_ranks


class Layer(torch.nn.Module):
    """A layer that holds its plan, as a user would write one."""

    def __init__(self, plan: sc.ConvolutionPlan, c_in: int, c_out: int) -> None:
        super().__init__()
        self.plan = plan
        self.weight = torch.nn.Parameter(torch.randn(plan.num_taps, c_in, c_out) * 0.1)
        self.bias = torch.nn.Parameter(torch.randn(c_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plan.execute(x, self.weight, self.bias)


def network() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    plan = build(CASES[3])
    down = sc.ConvolutionPlan(plan.source, 2, stride=2)
    net = torch.nn.Sequential(
        Layer(plan, 4, 8), torch.nn.ReLU(), Layer(down, 8, 8), torch.nn.ReLU(), Layer(down.transpose(), 8, 4)
    )
    return net, torch.randn(len(plan.source), 4)


@pytest.mark.parametrize("case", named("submanifold", "strided_overlap", "grouped", "inverse", "no_pairs"), ids=str)
def test_opcheck(case, monkeypatch):
    """torch checks operators on copies of their tensors; a copy of that for the edges would refer to no map."""
    copied = generate_tests.clone_input
    monkeypatch.setattr(generate_tests, "clone_input", lambda t: t if hasattr(t, "kernel_map") else copied(t))
    plan = build(case)
    x, w, g = operands(plan, case)
    edges = edges_tensor(plan.kernel_map)
    bias = torch.randn(case.c_out, dtype=torch.float64)
    for t in (x, w, g, bias):
        t.requires_grad_()
    ops, groups = torch.ops.sparseconv, case.groups
    for operator, tensors, rest in (
        (ops.convolution, (x, w, bias), (edges, groups, False, "auto")),
        (ops.convolution, (x, w, None), (edges, groups, False, "auto")),
        (ops.convolution, (g, w, None), (edges, groups, True, "auto")),
        (ops.weight_gradient, (x, g), (edges, groups, plan.num_taps, "auto")),
    ):
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operator, (*tensors, *rest), test_utils=checks)


def test_compiled_networks_are_one_graph_and_equal():
    net, x = network()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = x.requires_grad_()
    want, got = net(x), compiled(x)
    assert torch.allclose(want, got)
    cotangent = torch.randn_like(want)
    inputs = (x, *net.parameters())
    for a, b in zip(torch.autograd.grad(want, inputs, cotangent), torch.autograd.grad(got, inputs, cotangent)):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("case", named("strided_overlap", "grouped"), ids=str)
def test_compiled_graphs_have_second_derivatives(case):
    """Where torch runs the graph as it is; sums of integers, so that both are equal to the bit."""
    plan = build(case)
    given = [t.requires_grad_() for t in operands(plan, case, integers=True)]
    along = operands(plan, case, integers=True, seed=7)[:2]
    found = []
    for call in (plan.execute, torch.compile(lambda x, w: plan.execute(x, w), backend="eager", fullgraph=True)):
        x, w, g = given
        first = torch.autograd.grad(call(x, w), (x, w), g, create_graph=True)
        found.append([*first, *torch.autograd.grad(first, given, along)])
    assert len(found[0]) == 5
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_compiled_under_autocast():
    net, x = network()
    with torch.autocast("cpu", torch.bfloat16):
        want = net(x)
        got = torch.compile(net, fullgraph=True, backend="aot_eager")(x)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(want.float(), got.float(), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_obeys_the_dtype_asked(dtype):
    net, x = network()
    with torch.autocast("cpu", dtype):
        y = net(x)
        assert y.dtype == dtype
        wide = net[0].plan.execute(x.double(), net[0].weight.double())
        assert wide.dtype == torch.float64
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in net.parameters())
    assert torch.allclose(net(x), y.float(), atol=0.2)


@pytest.mark.parametrize("backend", ["numpy_gather_scatter", "auto"])
def test_what_is_within_a_call_is_not_cast(backend, monkeypatch):
    """A convolution of halves sums in fp32 under autocast too, forward and back; the state of autocast is kept."""
    grid = sc.VoxelGrid(torch.cartesian_prod(*map(torch.arange, (1, 6, 6, 6))))
    plan = sc.ConvolutionPlan(grid, 3, backend=backend)
    x, w, g = torch.randn(len(grid), 24), torch.randn(27, 24, 40), torch.randn(len(grid), 40).bfloat16()
    halves = [t.bfloat16().requires_grad_() for t in (x, w)]
    want = [y := plan.execute(*halves), *torch.autograd.grad(y, halves, g)]
    with torch.autocast("cpu", torch.bfloat16):
        again = [t.detach().requires_grad_() for t in halves]
        got = [y := plan.execute(*again), *torch.autograd.grad(y, again, g)]
        assert torch.is_autocast_enabled("cpu")
        monkeypatch.setattr(type(choose(plan.request(24, 40, torch.bfloat16), backend)), "forward", None)
        with pytest.raises(TypeError, match="not callable"):
            plan.execute(x, w)
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_only_the_gradients_asked_for_are_computed(monkeypatch):
    net, x = network()
    asked: list[str] = []
    layer = net[0]
    serving = type(choose(layer.plan.request(x.shape[1], layer.weight.shape[2], x.dtype)))
    for verb in ("input_grad", "weight_grad", "gradients"):
        real = getattr(serving, verb)

        def noted(*args, verb=verb, real=real):
            before = len(asked)
            found = real(*args)
            asked[before:] = [verb]  # and none of the verbs that it asked itself
            return found

        monkeypatch.setattr(serving, verb, noted)
    layer(x).sum().backward()
    assert asked == ["weight_grad"]
    asked.clear()
    layer(x.requires_grad_()).sum().backward()
    assert asked == ["gradients"]
    asked.clear()
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert asked == ["input_grad"]
    asked.clear()
    layer.bias.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert asked == []


def test_functional_call_and_grad():
    net, x = network()
    parameters = {k: v.detach() for k, v in net.named_parameters()}

    def loss(p):
        return torch.func.functional_call(net, p, (x,)).square().mean()

    got = torch.func.grad(loss)(parameters)
    loss_value = net(x).square().mean()
    for (name, _), want in zip(net.named_parameters(), torch.autograd.grad(loss_value, net.parameters())):
        assert torch.allclose(got[name], want, atol=1e-6)


def test_hessians_through_torch_func():
    """The second derivative through nested transforms is the one of double backward."""
    case = named("strided_overlap")[0]
    plan = build(case)
    x, w, g = operands(plan, case)

    def loss(w):
        return (plan.execute(x, w).square() * g).sum()

    along = torch.randn_like(w)
    got = torch.func.grad(lambda v: (torch.func.grad(loss)(v) * along).sum())(w)
    leaf = w.clone().requires_grad_()
    first = torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0]
    want = torch.autograd.grad((first * along).sum(), leaf)[0]
    assert torch.allclose(got, want)
    for hessian in (torch.func.jacrev(torch.func.grad(loss))(w), torch.func.hessian(loss)(w)):
        assert torch.allclose((hessian * along).sum((3, 4, 5)), want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batches_under_vmap_are_those_of_a_loop(case):
    """Of features, weights in either layout, biases, and of all at once; their gradients, one for each of the batch."""
    plan = build(case)
    xs, ws, gs = (torch.stack(several) for several in zip(*(operands(plan, case, seed=seed) for seed in (3, 4, 5))))
    biases = torch.randn(3, case.c_out, dtype=torch.float64)
    vmap, grad, run = torch.func.vmap, torch.func.grad, plan.execute

    def loss(x, w, g):
        return (run(x, w).square() * g).sum()

    def same(got, want):
        torch.testing.assert_close(got, torch.stack(want), rtol=1e-9, atol=1e-9)

    same(vmap(run, (1, None))(xs.movedim(0, 1), ws[0]), [run(x, ws[0]) for x in xs])
    same(vmap(run, (None, 2))(xs[0], ws.movedim(0, 2)), [run(xs[0], w) for w in ws])
    same(vmap(run, out_dims=1)(xs, ws, biases).movedim(1, 0), [run(*several) for several in zip(xs, ws, biases)])
    same(vmap(run, (None, None, 0))(xs[0], ws[0], biases), [run(xs[0], ws[0], b) for b in biases])

    def pulled(w):
        return torch.func.vjp(lambda x: run(x, w), xs[0])[1](gs[0])[0]

    same(vmap(pulled)(ws), [pulled(w) for w in ws])
    nested = vmap(lambda x: vmap(lambda w: run(x, w))(ws))(xs)
    same(nested, [torch.stack([run(x, w) for w in ws]) for x in xs])
    for argument in (0, 1):
        one = grad(loss, argument)
        same(vmap(one)(xs, ws, gs), [one(*several) for several in zip(xs, ws, gs)])
        same(vmap(one, (None, 0, None))(xs[0], ws, gs[0]), [one(xs[0], w, gs[0]) for w in ws])
    if plan.kernel_size is not None and len(plan.kernel_size) > 1:
        theirs = ws.permute(0, 3, 2, 1).reshape(3, case.c_out, -1, *plan.kernel_size)
        same(vmap(run, (None, 0))(xs[0], theirs), [run(xs[0], w) for w in theirs])


def test_jacobians_are_the_convolution_itself():
    case = named("submanifold")[0]
    plan = build(case)
    x, w, _ = operands(plan, case)
    slopes, moved = torch.func.jacrev(plan.execute)(x, w), torch.randn_like(x)
    assert torch.allclose((slopes * moved).sum((2, 3)), plan.execute(moved, w))
    assert torch.allclose(torch.func.jacfwd(plan.execute)(x, w), slopes)


@pytest.mark.parametrize("case", named("submanifold", "strided_overlap", "grouped", "inverse", "no_pairs"), ids=str)
def test_forward_mode_is_the_product_rule(case):
    plan = build(case)
    x, w, g = operands(plan, case)
    along_x, along_w = torch.randn_like(x), torch.randn_like(w)
    bias, along_bias = torch.randn(2, case.c_out, dtype=torch.float64)
    jvp, run = torch.func.jvp, plan.execute
    y, slope = jvp(run, (x, w, bias), (along_x, along_w, along_bias))
    assert torch.allclose(y, run(x, w, bias))
    assert torch.allclose(slope, run(along_x, w, along_bias) + run(x, along_w))
    assert torch.allclose(jvp(lambda x: run(x, w, bias), (x,), (along_x,))[1], run(along_x, w))
    assert torch.allclose(jvp(lambda b: run(x, w, b), (bias,), (along_bias,))[1], along_bias.expand_as(g))

    def loss(w):
        return (run(x, w, bias).pow(3) * g).sum()

    forward = torch.func.grad(lambda w: jvp(loss, (w,), (along_w,))[1])(w)
    assert torch.allclose(forward, jvp(torch.func.grad(loss), (w,), (along_w,))[1])


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_an_ensemble_under_vmap(activation):
    case = named("submanifold")[0]
    plan = build(case)
    x, w, _ = operands(plan, case)
    epilogue = activation and getattr(sc.pointwise, activation)
    bias, residual = torch.randn(case.c_out).double(), torch.randn(plan.kernel_map.num_out, case.c_out).double()
    ws, ones = torch.stack([w, -w, 2 * w]), torch.ones(3, dtype=torch.float64)

    def loss(w, one):
        return plan.execute(x, w, bias, residual=one * residual, epilogue=epilogue).square().mean()

    got = torch.func.vmap(torch.func.grad_and_value(loss))(ws, ones)
    for item, several in enumerate(zip(ws, ones)):
        for one, want in zip(got, torch.func.grad_and_value(loss)(*several)):
            assert torch.allclose(one[item], want)


def test_what_a_transform_left_behind_is_what_it_wrapped():
    case = named("submanifold")[0]
    plan = build(case)
    x, w, g = (t.requires_grad_() for t in operands(plan, case))
    left: list[torch.Tensor] = []

    def loss(x):
        left.append(x)
        return plan.execute(x, w.detach()).sum()

    torch.func.grad(loss)(x)
    got = torch.autograd.grad(plan.execute(left[0], w), (x, w), g)
    for a, b in zip(got, torch.autograd.grad(plan.execute(x, w), (x, w), g)):
        assert torch.equal(a, b)


def test_checkpointing_recomputes_the_same():
    net, x = network()
    want = torch.autograd.grad(net(x).square().sum(), net.parameters())
    y = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
    for a, b in zip(want, torch.autograd.grad(y.square().sum(), net.parameters())):
        assert torch.equal(a, b)


def test_a_map_lives_as_long_as_its_graph():
    case = CASES[3]
    plan = build(case)
    x, w, g = operands(plan, case)
    y = plan.execute(x.requires_grad_(), w)
    del plan
    y.backward(g)
    assert bool(x.grad.isfinite().all())
    with pytest.raises(RuntimeError, match="but this one is not"):
        torch.ops.sparseconv.convolution(x, w, None, torch.zeros(5, 5), 1, False, "auto")


def gradients_of_a_rank() -> list:
    net, x = network()
    wrapped = torch.nn.parallel.DistributedDataParallel(net)
    wrapped(x * (torch.distributed.get_rank() + 1)).sum().backward()
    del wrapped
    torch.distributed.barrier()  # nobody leaves while the other still talks
    return [p.grad.numpy() for p in net.parameters()]


def test_data_parallel_training_in_two_processes():
    got = on_ranks(2, gradients_of_a_rank)
    net, x = network()
    parts = [torch.autograd.grad(net(x * scale).sum(), net.parameters()) for scale in (1, 2)]
    for grads in got:
        for grad, one, two in zip(grads, *parts):
            assert torch.allclose(torch.from_numpy(grad), (one + two) / 2, atol=1e-4)
