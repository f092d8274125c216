"""Convolution, batch norm, residual and activation as one node: against torch's operations, and who may look inside.

Without a card the kernels run in Triton's interpreter, on networks whose convolutions run on the CPU.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import sparseconv as sc
from sparseconv import nn
from sparseconv.geometry import FixedGrid
from sparseconv.nn.fused import evaluation, joining, normalize, remaking, training
from sparseconv.nn.fused.fusion import concatenated, norm_act
from sparseconv.nn.synchronized import SyncBatchNorm
from tests.cases import TOLERANCE, error
from tests.nn.test_convolution import sparse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F = torch.nn.functional


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """The kernels serve CPU tensors too."""
    pytest.importorskip("triton")
    from sparseconv.gpu.launcher import INTERPRETED

    if DEVICE == "cpu" and not INTERPRETED:
        pytest.skip("Triton was imported before its interpreter was asked for")
    monkeypatch.setattr(normalize, "on_kernels", lambda x: x.dtype in normalize.DTYPES)


@pytest.fixture
def torchs(monkeypatch):
    """Call it to go back to torch's operations."""
    return lambda: monkeypatch.setattr(normalize, "on_kernels", lambda x: False)


def operands(rows, channels, dtype, offset=0.0, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x, residual, grad = (torch.randn(rows, channels, generator=gen).to(dtype) for _ in range(3))
    weight, bias = (torch.randn(channels, generator=gen) for _ in range(2))
    return [t.to(DEVICE) for t in (x + offset, residual, grad, weight, bias)]


def reference(x, residual, grad, weight, bias, slope):
    """y, the gradients, mean and variance in fp64, from the rounded operands."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias, residual)]
    wide, weight, bias, residual = leaves
    z = F.batch_norm(wide, None, None, weight, bias, True)
    z = z if residual is None else z + residual
    y = {0.0: F.relu, 1.0: lambda t: t}.get(slope, lambda t: F.leaky_relu(t, slope))(z)
    wanted = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad(y, wanted, grad.double()))
    found = [None if t is None else next(grads) for t in leaves]
    return y, *found, wide.mean(0), wide.var(0)


SHAPES = [(2, 16), (300, 32), (129, 40), (1000, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("affine", "joined", "slope"), [(1, 1, 0.0), (1, 0, 0.0), (0, 0, 0.1), (1, 1, 1.0), (0, 1, 0.1)]
)
def test_kernels_equal_torch(affine, joined, slope, dtype):
    for rows, channels in SHAPES:
        x, residual, grad, weight, bias = operands(rows, channels, dtype, 3.0)
        residual, weight, bias = residual if joined else None, weight if affine else None, bias if affine else None
        running = torch.zeros(channels), torch.ones(channels), torch.tensor(4)
        running = tuple(t.to(DEVICE) for t in running)
        norm = normalize.Norm(1e-5, 0.25, slope, running)
        y, kept = normalize.forward(x, weight, bias, residual, norm)
        shared = y if joined and slope != 1 else None
        got = [y, *normalize.backward(grad, x, shared, weight, bias, kept, norm)]
        *want, mean, var = reference(x, residual, grad, weight, bias, slope)
        for name, a, b in zip(("y", "x", "weight", "bias", "residual"), got, want):
            if b is not None and not (rows == 2 and name == "x"):  # two rows: a gradient of nothing but rounding
                assert error(a, b.cpu()) < TOLERANCE[dtype], (name, rows, channels)
        assert error(running[0], 0.25 * mean.cpu()) < 1e-5
        assert error(running[1], 0.75 + 0.25 * var.cpu()) < 1e-5
        assert running[2] == 5
        again = [*normalize.backward(grad, x, shared, weight, bias, kept, norm)]
        assert all(a is None or torch.equal(a, b) for a, b in zip(again, got[1:]))


def test_the_next_running_statistics_can_be_written_elsewhere():
    x = operands(300, 32, torch.float32, 3.0)[0]
    running = tuple(t.to(DEVICE) for t in (torch.zeros(32), torch.ones(32), torch.tensor(4)))
    onto = tuple(torch.full_like(t, float("nan")) for t in running[:2])
    for alive, rows in ((None, 300), (200, 200), (1, 1)):
        count = None if alive is None else torch.tensor([alive], dtype=torch.int32, device=DEVICE)
        normalize.forward(x, None, None, None, normalize.Norm(1e-5, 0.25, 1.0, running, count, onto))
        assert not running[0].any()
        assert (running[1] == 1).all()
        moved = rows > 1  # a single row has no variance
        assert error(onto[0], 0.25 * moved * x[:rows].double().mean(0).cpu()) < 1e-5
        var = x[:rows].double().var(0).cpu() if moved else torch.ones(32)
        assert error(onto[1], 0.75 + 0.25 * var) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("alive", [0, 1, 200, 300])
def test_dead_rows_become_zero_in_place(dtype, alive):
    whole = torch.randn(300, 40, device=DEVICE).to(dtype)
    count = torch.tensor([alive], dtype=torch.int32, device=DEVICE)
    views = {
        "whole": lambda t: t,
        "columns": lambda t: t[:, 8:24],
        "transposed": lambda t: t.T,
        "one": lambda t: t[:, :1],
    }
    for name, view in views.items():
        x = whole.clone()
        axis = int(name == "transposed")
        assert normalize.zero_dead_rows(view(x), count, axis)
        want = whole.clone()
        view(want).narrow(axis, alive, 300 - alive).zero_()
        assert torch.equal(x, want), name
    assert not normalize.zero_dead_rows(whole[:, :1].expand(300, 4), count, 0)
    assert not normalize.zero_dead_rows(whole.view(300, 8, 5), count, 0)


def test_results_are_written_whole_and_nothing_beside_them(monkeypatch):
    """Fresh memory full of NaN: every element of a result is written, and none of the workspace read before."""

    def poisoned(*args, like=torch.empty, **options):
        made = like(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    empty, empty_like = torch.empty, torch.empty_like
    x, residual, grad, weight, bias = operands(130, 24, torch.float32)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(*a, like=empty, **k))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(*a, like=empty_like, **k))
    norm = normalize.Norm(1e-5, 0.1, 0.0, None)
    y, kept = normalize.forward(x, weight, bias, residual, norm)
    grads = normalize.backward(grad, x, y, weight, bias, kept, norm)
    assert all(t.isfinite().all() for t in (y, kept[:48], *grads))


def test_a_mean_far_from_zero_keeps_its_variance():
    """Sums of squares would lose it: 10^4 standard deviations away, 10^8 of the variance."""
    x = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)).add(1e4).to(DEVICE)
    y, kept = normalize.forward(x, None, None, None, normalize.Norm(1e-9, 0.1, 1.0, None))
    assert error(kept[8:16], 1 / x.double().var(0, correction=0).sqrt().cpu()) < 1e-3
    assert error(y, ((x.double() - x.double().mean(0)) / x.double().std(0, correction=0)).cpu()) < 1e-3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
def test_infinities_and_nan_pass_as_through_torch(slope):
    """A scaler of gradients looks for them."""
    x, _, grad, weight, bias = operands(40, 8, torch.float32)
    x[3, 2], grad[5, 4], grad[6, 5] = float("nan"), float("inf"), float("nan")
    norm = normalize.Norm(1e-5, 0.1, slope, None)
    y, kept = normalize.forward(x, weight, bias, None, norm)
    want, *grads, _, _ = reference(x, None, grad, weight, bias, slope)
    assert torch.equal(y.isnan(), want.isnan())
    found = normalize.backward(grad, x, None, weight, bias, kept, norm)
    for a, b in zip(found, grads):
        assert b is None or torch.equal(a.isfinite(), b.isfinite())


def mixed(y):
    """A loss that no norm makes constant."""
    return (torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape) * y.square()).mean()


def train(net, x, loss=mixed):
    """Output, gradients of the input and of all parameters, and the state after one step."""
    net.zero_grad()
    features = x.features.clone().requires_grad_()
    y = net(x.with_features(features)).features
    loss(y).backward()
    return [y.detach(), features.grad, *(p.grad.clone() for p in net.parameters()), *(b.clone() for b in net.buffers())]


def network(activation=nn.ReLU, **options):
    torch.manual_seed(0)
    return nn.UNet(4, 3, channels=(8, 12), activation=activation, **options).to(DEVICE)


def close(got, want, limit=2e-5):
    for a, b in zip(got, want, strict=True):
        assert error(a, b.double().cpu()) < limit


@pytest.mark.parametrize(
    "make",
    [
        network,
        lambda: network(lambda: nn.LeakyReLU(0.1), block="bottleneck"),
        lambda: network(nn.GELU),
        lambda: network(torch.nn.ReLU, norm=lambda c: nn.BatchNorm(c, affine=False)),
        lambda: network(norm=lambda c: nn.BatchNorm(c, momentum=None)),
        lambda: network(norm=lambda c: nn.BatchNorm(c, track_running_stats=False)),
        lambda: nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.BatchNorm(8), nn.ReLU(), nn.BatchNorm(8)).to(DEVICE),
    ],
    ids=["unet", "bottleneck", "gelu", "plain", "cumulative", "untracked", "sequence"],
)
def test_networks_train_as_with_torchs_operations(make, torchs):
    net, x = make(), sparse(voxels=100).to(DEVICE)
    twin = copy.deepcopy(net)
    got = train(net, x) + train(net, x)
    torchs()
    close(got, train(twin, x) + train(twin, x), 2e-4)


def test_what_is_made_again_has_the_same_bits(monkeypatch):
    net, x = network(), sparse(voxels=100).to(DEVICE)
    twin = copy.deepcopy(net)
    kept = train(net, x)
    calls, again = [], normalize.again
    monkeypatch.setattr(normalize, "again", lambda *a: calls.append(1) or again(*a))
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", 0)
    got = train(twin, x)
    assert len(calls) == 5  # stem, down, and the first half of each block: what a residual joined is kept
    assert all(torch.equal(a, b) for a, b in zip(got, kept, strict=True))


@pytest.mark.parametrize("limit", [0, 1 << 60], ids=["made again", "kept"])
def test_twice_through_a_kept_graph(monkeypatch, limit):
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", limit)
    net, x = network(), sparse().to(DEVICE)
    loss = net(x).features.square().mean()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("limit", [0, 1 << 60], ids=["made again", "kept"])
def test_a_graph_goes_with_its_result(monkeypatch, limit):
    """Without waiting for the garbage collector, whose next visit may come after many scenes."""
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", limit)
    net, x = network(), sparse().to(DEVICE)
    gc.collect()
    gc.disable()
    try:
        y = net(x).features
        waiting, nodes = [y.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [before for before, _ in node.next_functions]
        ours = [node for node in nodes if hasattr(node, "stages")]
        left = [weakref.ref(node.recipe.z) for node in ours if node.recipe]
        assert len(ours) == 6  # stem, down, up, and one a block
        assert len(left) == 3  # blocks have a residual
        del y, node, nodes, waiting, ours
        assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()


@pytest.mark.parametrize("limit", [0, 1 << 60], ids=["made again", "kept"])
def test_second_derivative(monkeypatch, torchs, limit):
    """A penalty on the gradient of the input, as of a Wasserstein critic."""
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", limit)
    net, x = network(), sparse(voxels=60).to(DEVICE)

    def penalty():
        features = x.features.clone().requires_grad_()
        y = net(x.with_features(features)).features
        (grad,) = torch.autograd.grad(y.square().sum(), features, create_graph=True)
        return torch.autograd.grad(grad.square().mean(), list(net.parameters()), allow_unused=True)

    got = penalty()
    torchs()
    for a, b in zip(got, penalty(), strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b.double().cpu()) < 2e-3


def test_a_changed_norm_is_an_error(monkeypatch):
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", 0)
    net = nn.Sequential(nn.ConvBlock(4, 8), nn.ConvBlock(8, 8)).to(DEVICE)
    y = net(sparse().to(DEVICE)).features.sum()
    with torch.no_grad():
        net[0][1].weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        torch.autograd.grad(y, net[1][0].weight)


def test_a_result_changed_in_place_is_kept_as_it_is(monkeypatch, torchs):
    """Only what still is the node's own result may be made again by it."""
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", 0)

    class Doubled(nn.SparseModule):
        def __init__(self):
            super().__init__()
            self.first = nn.ConvBlock(4, 8)
            self.last = nn.ConvBlock(8, 8)
            self.double = lambda y: y.mul_(2)

        def forward(self, x):
            y = self.first(x)
            return self.last(y.with_features(self.double(y.features)))

    net, x = Doubled().to(DEVICE), sparse().to(DEVICE)
    twin = copy.deepcopy(net)
    twin.double = lambda y: y * 2
    got = train(net, x)
    torchs()
    close(got, train(twin, x))


def test_checkpointing_keeps_what_it_means_to_keep(monkeypatch):
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", 0)
    net, x = network().eval(), sparse().to(DEVICE)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm):
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    want = train(net, x)
    again = copy.deepcopy(net)
    forward = again.forward
    again.forward = lambda t: t.with_features(
        checkpoint(lambda f: forward(t.with_features(f)).features, t.features, use_reentrant=False)
    )
    assert all(torch.equal(a, b) for a, b in zip(train(again, x), want, strict=True))


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_hooks_see_every_module(kind, torchs):
    net, x, seen = nn.ConvBlock(4, 8).to(DEVICE), sparse().to(DEVICE), []
    twin = copy.deepcopy(net)
    for module in net:
        getattr(module, f"register_{kind}_hook")(lambda module, *_: seen.append(type(module).__name__))
    got = train(net, x)
    assert sorted(seen) == ["BatchNorm", "ReLU", "SubmanifoldConv"]
    torchs()
    close(got, train(twin, x))


def test_functional_transforms_and_other_tensors_go_around():
    net = nn.ConvBlock(4, 8, norm=lambda c: nn.BatchNorm(c, track_running_stats=False)).to(DEVICE)
    x = sparse().to(DEVICE)
    want = train(net, x, lambda y: y.square().sum())
    state = {name: p.detach() for name, p in net.named_parameters()}
    grads = torch.func.grad(lambda s: torch.func.functional_call(net, s, (x,)).features.square().sum())(state)
    close(list(grads.values()), want[2 : 2 + len(state)])
    wide = copy.deepcopy(net).double()
    assert wide(x.to(dtype=torch.float64)).dtype == torch.float64


def test_grads_of_other_strides_and_one_row():
    """A sum's gradient is one column spread out; a slice's has rows apart; a single voxel has no variance."""
    net, x = nn.BatchNorm(8).to(DEVICE), sparse(8).to(DEVICE)
    ramp = torch.linspace(0, 1, len(x.grid), device=DEVICE)
    losses = [
        lambda y: (y.sum(1) * ramp).sum(),
        lambda y: mixed(torch.cat([y, y], 1)[:, 3:11]),
        lambda y: mixed(y.t()),
    ]
    for loss in losses:
        twin = copy.deepcopy(net).double()
        close(train(net, x, loss), train(twin, x.to(dtype=torch.float64), loss), 1e-3)
    one = sparse(8, voxels=1).to(DEVICE)
    assert torch.equal(net(one).features[0], net.bias)


def test_frozen_parts_get_no_gradient(torchs):
    net, x = nn.Sequential(nn.ConvBlock(4, 8), nn.ConvBlock(8, 8)).to(DEVICE), sparse().to(DEVICE)
    for parameter in (net[0][0].weight, net[1][1].weight, net[1][1].bias):
        parameter.requires_grad_(False)
    twin = copy.deepcopy(net)
    grads = []
    for n in (net, twin):
        n(x).features.square().sum().backward()
        grads.append([p.grad for p in n.parameters()])
        torchs()
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b.double().cpu()) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
def test_a_norm_in_evaluation_is_one_launch(dtype, adds, monkeypatch):
    monkeypatch.setattr(F, "batch_norm", None)
    for rows, channels in ((1, 16), *SHAPES):
        x, _, residual, weight, bias = operands(rows, channels, dtype, 3.0)
        residual = residual if adds else None
        norm = torch.nn.BatchNorm1d(channels, affine=channels != 40, device=DEVICE).eval()
        norm.running_mean, norm.running_var = weight + 3, bias.square() + 0.1
        before = copy.deepcopy(norm.state_dict())
        given = norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps
        assert evaluation.settled(x, *given) is None, "a gradient may be asked for"
        with torch.inference_mode():
            for slope in (0.0, 1.0):
                y = evaluation.settled(x, *given, slope, residual)
                z = (x.double() - norm.running_mean) / (norm.running_var.double() + norm.eps).sqrt()
                z = z if norm.weight is None else z * norm.weight + norm.bias
                z = z if residual is None else z + residual.double()
                assert y.dtype == dtype
                assert error(y, (F.relu(z) if slope == 0 else z).cpu()) < TOLERANCE[dtype]
        assert all(torch.equal(a, b) for a, b in zip(before.values(), norm.state_dict().values()))
    with torch.no_grad():
        assert evaluation.settled(x[:0], *given) is None
        assert evaluation.settled(x.double(), *given) is None


def test_norm_and_relu_of_a_sequence_are_one_launch_in_inference(monkeypatch, torchs):
    import sparseconv.interop.spconv.pytorch as spconv

    called = []
    monkeypatch.setattr(normalize, "settled", lambda *a, of=normalize.settled: called.append(1) or of(*a))
    norms = [torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.BatchNorm1d(6), torch.nn.GELU()]
    net = spconv.SparseSequential(*norms).to(DEVICE).eval()
    for norm in net[0], net[2]:
        norm.running_mean.uniform_(-1, 1)
    indices = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 4, 4]], dtype=torch.int32, device=DEVICE)
    x = spconv.SparseConvTensor(torch.randn(3, 6, device=DEVICE), indices, [8, 8], 1)
    with torch.no_grad():
        y = net(x).features
        assert called == [1]
        hook = net[0].register_forward_hook(lambda *_: None)
        net(x)
        hook.remove()
        assert called == [1]
        torchs()
        assert error(y, net(x).features.double().cpu()) < TOLERANCE[torch.float32]


def test_inference_after_a_step_sees_the_new_statistics():
    """Running statistics are written by a kernel; whoever keeps weights folded with them must learn of it."""
    net, x = nn.ConvBlock(4, 8).to(DEVICE), sparse().to(DEVICE)
    with torch.no_grad():
        before = net.eval()(x).features
        net.train()(x)
        after = net.eval()(x).features
        apart = F.relu(net[1](net[0](x).features))
    assert not torch.equal(before, after)
    close([after], [apart])


def test_statistics_that_a_step_moves_have_changed_for_whoever_saved_them():
    norm, x = nn.BatchNorm(4).to(DEVICE), sparse().to(DEVICE)
    saved = x.features.clone().requires_grad_()
    y = F.batch_norm(saved, norm.running_mean, norm.running_var)
    norm(x.with_features(x.features.clone().requires_grad_()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_halves_keep_their_parameters_dtype():
    net, x = network().half(), sparse(voxels=60).to(DEVICE, torch.float16)
    if DEVICE == "cpu":  # torch's CPU kernels have no half cross products of every kind
        net, x = network().bfloat16(), x.to(dtype=torch.bfloat16)
    got = train(net, x)
    want = train(copy.deepcopy(net).double(), x.to(dtype=torch.float64))
    assert all(a.dtype == x.dtype for a in got if a.is_floating_point())
    assert error(got[0], want[0].cpu()) < 0.1


# ---- dead rows


LIVE = [(300, 300), (300, 170), (1000, 2), (1000, 1), (300, 0)]


def poisoned(*tensors, live):
    """The same with NaN in all rows from ``live`` on."""
    made = [None if t is None else t.clone() for t in tensors]
    for t in made:
        if t is not None:
            t[live:] = float("nan")
    return made


@pytest.mark.parametrize("channels", [32, 5])
@pytest.mark.parametrize(("affine", "joined", "slope"), [(1, 1, 0.0), (1, 0, 0.0), (0, 0, 0.1), (1, 1, 1.0)])
def test_dead_rows_have_no_part_in_a_norm(affine, joined, slope, channels):
    """The kernels on the first rows of larger arrays, a number that the device knows, against the rows alone."""
    for rows, live in LIVE:
        x, residual, grad, weight, bias = operands(rows, channels, torch.float32, 3.0)
        residual, weight, bias = residual if joined else None, weight if affine else None, bias if affine else None
        dead = poisoned(x, residual, grad, live=live)
        running = [t.to(DEVICE) for t in (torch.zeros(channels), torch.ones(channels), torch.tensor(4))]
        count = torch.tensor([live], dtype=torch.int32, device=DEVICE)
        norm = normalize.Norm(1e-5, 0.25, slope, tuple(running), count)
        y, kept = normalize.forward(dead[0], weight, bias, dead[1], norm)
        shared = y if joined and slope != 1 else None
        grads = normalize.backward(dead[2], dead[0], shared, weight, bias, kept, norm)
        if not joined:
            assert torch.equal(normalize.again(dead[0], weight, bias, kept, norm), y)
        for t in (y, grads[0], grads[3]) if shared is not None else (y, grads[0]):
            assert torch.equal(t[live:], torch.zeros_like(t[live:]))
        if live < 2:
            assert [t.tolist() for t in running] == [[0.0] * channels, [1.0] * channels, 4]
            assert all(t is None or t.isfinite().all() for t in (y, *grads[:3]))
            continue
        alone = [None if t is None else t[:live] for t in (x, residual, grad)]
        *want, mean, var = reference(alone[0], alone[1], alone[2], weight, bias, slope)
        for name, a, b in zip(("y", "x", "weight", "bias", "residual"), (y, *grads), want):
            if b is not None and not (live == 2 and name == "x"):
                assert error(a[:live] if a.ndim == 2 else a, b.cpu()) < 2e-5, (name, rows, live)
        assert error(running[0], 0.25 * mean.cpu()) < 1e-5
        assert error(running[1], 0.75 + 0.25 * var.cpu()) < 1e-5
        assert running[2] == 5


def fixed(grid, live):
    """The first ``live`` rows, and dead ones after them."""
    dead = grid.coords.clone()
    dead[live:] = -1
    return FixedGrid(dead, torch.tensor([live], dtype=torch.int32, device=grid.device), grid)


@pytest.mark.parametrize("width", [8, 12], ids=["identity", "linear"])
def test_gradients_that_meet_at_a_block_s_input_are_one(width, monkeypatch, torchs):
    """On a grid of fixed size: the convolution's is written onto the skip's, or the linear layer's added in place."""
    x, live = sparse(8, voxels=90).to(DEVICE), 70
    torch.manual_seed(0)
    block = nn.ResidualBlock(8, width).to(DEVICE)
    ramp = torch.linspace(-1, 1, 90 * width, device=DEVICE).view(90, width)
    nodes, joined = [], []
    branched, onto = joining.branched, training.adjoint_onto
    monkeypatch.setattr("sparseconv.nn.fused.fusion.branched", lambda *a: nodes.append(branched(*a)) or nodes[-1])
    monkeypatch.setattr(training, "adjoint_onto", lambda *a: joined.append(1) or onto(*a))
    results = []
    for kernels in (True, False):
        if not kernels:
            torchs()
        net, leaf = copy.deepcopy(block), x.features.clone().requires_grad_()
        y = net(sc.SparseTensor(fixed(x.grid, live), leaf * 1)).features
        (y[:live] * ramp[:live]).sum().backward()
        results.append([y[:live].detach(), leaf.grad[:live], *(p.grad for p in net.parameters()), *net.buffers()])
    assert len(joined) == (width == 8)
    assert [node is not None for node in nodes] == ([] if width == 8 else [True])
    for a, b in zip(*results, strict=True):
        assert error(a, b.double().cpu()) < 1e-4


def test_a_branched_tensor_has_second_derivatives():
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 3, generator=gen), torch.nn.Parameter(torch.randn(4, 3, generator=gen))
    x = x.to(DEVICE, torch.float64).requires_grad_()
    weight = torch.nn.Parameter(weight.detach().to(DEVICE, torch.float64))
    assert torch.autograd.gradcheck(lambda x, w: joining._Forked.apply(x, w, None), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: joining._Forked.apply(x, w, None), (x, weight))
    assert joining.branched(x.detach(), weight) is None


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm(6),
        lambda: nn.BatchNorm(6, momentum=None),
        lambda: nn.BatchNorm(6, affine=False, track_running_stats=False),
        lambda: SyncBatchNorm(6),
    ],
    ids=["plain", "cumulative", "untracked", "synchronised"],
)
def test_a_module_leaves_dead_rows_out(make, kernels, torchs):
    if not kernels:
        torchs()
    x = sparse(6, voxels=100).to(DEVICE)
    for live in (70, 2, 1, 0):
        net, dtype = make().to(DEVICE), torch.float32 if kernels else torch.float64
        net, few = net.to(dtype), sc.VoxelGrid(x.grid.coords[:live], x.grid.batch_size)
        twin, (dead,) = copy.deepcopy(net), poisoned(x.features.to(dtype), live=live)
        ramp = torch.linspace(-1, 1, 6 * 100, device=DEVICE, dtype=dtype).view(100, 6)
        results = []
        for module, grid, rows in ((net, fixed(x.grid, live), dead), (twin, few, dead[:live])):
            leaf = rows.clone().requires_grad_()
            y = module(sc.SparseTensor(grid, leaf)).features
            (y[:live] * ramp[:live]).sum().backward()
            results.append([y[:live], leaf.grad[:live], *(p.grad for p in module.parameters()), *module.buffers()])
            assert torch.equal(y[live:], torch.zeros_like(y[live:]))
            assert torch.equal(leaf.grad[live:], torch.zeros_like(y[live:]))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, **({"atol": 2e-3, "rtol": 1e-4} if kernels else {}))


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_second_derivatives_leave_dead_rows_out(kernels, torchs):
    x, found = sparse(6, voxels=100).to(DEVICE), []
    twin = nn.BatchNorm(6).to(DEVICE)
    torch.nn.init.normal_(twin.weight)
    if not kernels:
        torchs()
    for grid in (fixed(x.grid, 70), sc.VoxelGrid(x.grid.coords[:70], x.grid.batch_size)):
        (dead,) = poisoned(x.features, live=70)
        leaf = dead[: len(grid)].clone().requires_grad_()
        y = norm_act(sc.SparseTensor(grid, leaf), twin, nn.ReLU()).features[:70]
        (grad,) = torch.autograd.grad(mixed(y), leaf, create_graph=True)
        found.append([y, *torch.autograd.grad(grad.square().sum() + y.sum(), [leaf, *twin.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got[:70] if got.ndim == 2 else got, want, atol=1e-5, rtol=1e-4)
        assert got.ndim == 1 or not got[70:].any()


@pytest.mark.parametrize("activation", [None, nn.ReLU()], ids=["linear", "relu"])
def test_a_residual_leaves_dead_rows_out(activation):
    x = sparse(6, voxels=100).to(DEVICE)
    grid, (dead, seed) = fixed(x.grid, 70), poisoned(x.features, torch.ones_like(x.features), live=70)
    leaves = [dead.clone().requires_grad_() for _ in range(2)]
    y = norm_act(
        sc.SparseTensor(grid, leaves[0]), nn.BatchNorm(6).to(DEVICE), activation, sc.SparseTensor(grid, leaves[1])
    )
    for t in (y.features, *torch.autograd.grad(y.features, leaves, seed)):
        assert t.isfinite().all()
        assert not t[70:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.GroupNorm(2, 6), lambda: nn.InstanceNorm(6), nn.GlobalSumPool, nn.GlobalAvgPool, nn.GlobalMaxPool],
)
def test_norms_and_pools_of_items_leave_dead_rows_out(make, dtype):
    """Rows of two items in any order and of an empty one, then dead rows of NaN."""
    x = sparse(6, voxels=100).to(DEVICE)
    coords = x.grid.coords[:70].clone()
    coords[::3, 0] = 2
    whole, module = sc.VoxelGrid(coords, 3), make().to(DEVICE)
    features = torch.cat([x.features[:70], torch.full_like(x.features[:30], torch.nan)]).to(dtype)
    found = []
    for grid, rows in ((fixed(sc.VoxelGrid(torch.cat([coords, x.grid.coords[70:]]), 3), 70), 100), (whole, 70)):
        leaf = features[:rows].clone().requires_grad_()
        y = module(sc.SparseTensor(grid, leaf))
        y = y.features if isinstance(y, sc.SparseTensor) else y
        own = y[:70] if len(y) == rows else y
        seed = torch.linspace(-1, 1, own.numel(), device=DEVICE, dtype=torch.float64).view_as(own).to(dtype)
        (grad,) = torch.autograd.grad(own, leaf, seed)
        found.append([own.detach(), grad[:70]])
        assert not grad[70:].any()
        assert own.dtype == dtype
    for a, b in zip(*found, strict=True):
        assert error(a, b.double().cpu()) < {torch.float16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-10}[dtype]


# ---- on a card


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_card_with_many_rows(dtype):
    for rows, channels in ((100_003, 32), (30_000, 96), (5_000, 256)):
        x, residual, grad, weight, bias = operands(rows, channels, dtype, 3.0)
        for joined, slope in ((True, 0.0), (False, 0.0), (False, 1.0)):
            norm = normalize.Norm(1e-5, 0.1, slope, None)
            added = residual if joined else None
            y, kept = normalize.forward(x, weight, bias, added, norm)
            got = [y, *normalize.backward(grad, x, y if joined else None, weight, bias, kept, norm)]
            want = reference(x, added, grad, weight, bias, slope)
            for a, b in zip(got, want):
                off = 0.0 if b is None else float((a.double() - b).norm() / b.norm())
                assert off < {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6}[dtype] * 5
            twice = normalize.forward(x, weight, bias, added, norm)
            assert all(
                torch.equal(a, b) for a, b in zip((twice[0], twice[1][: 2 * channels]), (y, kept[: 2 * channels]))
            )


@pytest.mark.gpu
def test_a_captured_step_replays_to_the_same_bits():
    """Nothing waits for the host and nothing is to be reset: a step at fixed geometry is one CUDA graph."""
    net, x = network().half(), sparse(voxels=100).to(DEVICE, torch.float16)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm):
            norm.momentum = 0.0

    def step():
        loss = net(x).features.float().square().mean()
        return loss, torch.autograd.grad(loss, list(net.parameters()))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.gpu
def test_a_step_keeps_less(torchs):
    grid, _ = sc.voxelize(torch.rand(400_000, 3, device="cuda"), voxel_size=0.01)
    x = sc.SparseTensor(grid, torch.randn(len(grid), 4, device="cuda", dtype=torch.float16))
    net, kept = nn.UNet(4, 3, channels=(32, 64)).cuda().half(), []
    net(x).features.float().mean().backward()
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        y = net(x)
        kept.append(torch.cuda.memory_allocated() - before)
        del y
        torchs()
    assert kept[0] < 0.8 * kept[1]


def on_fixed_rows(live=70):
    x = sparse(voxels=90).to(DEVICE)
    return sc.SparseTensor(fixed(x.grid, live), x.features)


@pytest.mark.parametrize("width", [8, 5], ids=["aligned", "odd"])
def test_a_concatenation_is_made_again_to_the_same_bits(width, monkeypatch):
    """On a grid of fixed size, but for the finest, neither it nor what was raised to its level is kept; both gradients
    of it read one."""
    torch.manual_seed(0)
    net, x = nn.UNet(4, 3, channels=(6, width, 12)).to(DEVICE), on_fixed_rows()
    twin = copy.deepcopy(net)
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", 1 << 60)
    kept = train(net, x)
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", 0)
    made, run, whole = [], joining.Parts.run, []
    monkeypatch.setattr(joining.Parts, "run", lambda self: made.append(1) or run(self))
    cat = torch.cat

    def seen(*args, **options):
        y = cat(*args, **options)
        if y.shape[1:] == (2 * width,):
            whole.append(StorageWeakRef(y.untyped_storage()))
        return y

    monkeypatch.setattr(torch, "cat", seen)
    loss = mixed(twin(x).features)
    assert [kept.expired() for kept in whole] == [True]
    loss.backward()
    assert len(made) == 1
    for p, want in zip(twin.parameters(), kept[2:], strict=False):
        assert torch.equal(p.grad, want)


def test_a_remade_concatenation_through_a_kept_graph_and_twice_differentiated(monkeypatch, torchs):
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", 0)
    net, x = nn.UNet(4, 3, channels=(6, 8, 12)).to(DEVICE), on_fixed_rows()

    def penalty():
        features = x.features.clone().requires_grad_()
        y = net(x.with_features(features)).features
        (grad,) = torch.autograd.grad(y[:70].square().sum(), features, create_graph=True)
        loss = grad[:70].square().mean()
        first = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, retain_graph=True)
        second = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))
        return second

    loss = net(x).features[:70].square().mean()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match=r"retain_graph|second time"):
        torch.autograd.grad(loss, list(net.parameters()))
    got = penalty()
    torchs()
    for a, b in zip(got, penalty(), strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b.double().cpu()) < 2e-3


def test_features_changed_after_they_were_concatenated_are_an_error(monkeypatch):
    monkeypatch.setattr(remaking, "RECOMPUTED_BYTES", 0)
    x = on_fixed_rows()
    first, last = nn.ConvBlock(4, 8).to(DEVICE), nn.ConvBlock(12, 8).to(DEVICE)
    skip = x.features.clone()
    y = last(concatenated(x.with_features(skip), first(x))).features
    skip.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y[:70].sum().backward()


def test_a_gradient_takes_the_place_of_what_is_read_for_the_last_time():
    x, residual, grad, weight, bias = operands(130, 24, torch.float32)
    norm = normalize.Norm(1e-5, 0.1, 0.0, None)
    for y in (None, normalize.forward(x, weight, bias, residual, norm)[0]):
        kept = normalize.forward(x, weight, bias, None if y is None else residual, norm)[1]
        want = normalize.backward(grad, x, y, weight, bias, kept.clone(), norm)
        spent = x.clone()
        got = normalize.backward(grad, spent, y, weight, bias, kept.clone(), norm, True)
        assert got[0].data_ptr() == spent.data_ptr()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
