"""Batch norms in captured steps take a residual and a ReLU with them, where nothing else reads what lies between."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.nn.capturing import joining, padding
from tests.nn.test_capture_module import DEVICE, _graphs, coords_of, features_of, replays, same  # noqa: F401

relu, add = torch.nn.functional.relu, torch.Tensor.__add__


def plain(net, x):
    return relu(net.norm(x))


def in_place(net, x):
    return net.active(net.norm(x))


def residual(net, x):
    return relu(net.norm(x) + x)


def residual_in_place(net, x):
    y = net.norm(x)
    y += net.other(x)
    return torch.relu_(y)


def residual_later(net, x):
    return torch.relu(torch.add(net.other(x), net.norm(x)))


def residual_of_two_norms(net, x):
    return relu(net.norm(net.other(x)) + net.second(x))


def only_a_norm(net, x):
    return net.norm(x)


def another_activation(net, x):
    return torch.nn.functional.leaky_relu(net.norm(x), 0.1)


def both(net, x):
    y = net.norm(x)
    return relu(y) + y


def twice(net, x):
    y = net.norm(x)
    return relu(y) + relu(y)


def read_before(net, x):
    y = net.norm(x)
    return relu(y) * y.detach().tanh()


def sum_is_used_twice(net, x):
    y = net.norm(x) + x
    return relu(y) + y


def added_to_itself(net, x):
    y = net.norm(x)
    return relu(y + y)


def a_row_is_added(net, x):
    return relu(net.norm(x) + net.other.bias)


def scaled_sum(net, x):
    return relu(torch.add(net.norm(x), x, alpha=2))


def of_other_dtype(net, x):
    return relu(net.norm(x) + x.double()).to(x.dtype)


def no_sum_after(net, x):
    return net.norm(x) + x


JOINED = {
    plain: [joining.Joined(False)],
    in_place: [joining.Joined(False)],
    residual: [joining.Joined(True)],
    residual_in_place: [joining.Joined(True)],
    residual_later: [joining.Joined(True)],
    residual_of_two_norms: [joining.Joined(True), None],
}
APART = [
    *(only_a_norm, another_activation, both, twice, read_before, sum_is_used_twice, added_to_itself, a_row_is_added),
    *(scaled_sum, of_other_dtype, no_sum_after),
]
CASES = [*JOINED, *APART]


class Net(torch.nn.Module):
    """A convolution, what is tried, and a convolution after it, which reads every row."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.first = spconv.SubMConv3d(4, 8, 3, padding=1, bias=False, indice_key="a")
        self.norm, self.second = torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8)
        self.other = torch.nn.Linear(8, 8)
        self.active = torch.nn.ReLU(inplace=True)
        self.last = spconv.SubMConv3d(8, 5, 3, padding=1, indice_key="a")

    def forward(self, coords, features):
        x = self.first(spconv.SparseConvTensor(features, coords, [12, 12, 12], 2))
        x = x.replace_feature(self.case(self, x.features))
        return self.last(x).features


def steps(net, seeds, channels=5):
    made = []
    for seed in seeds:
        coords = coords_of(seed, 40 + 10 * seed)
        net.zero_grad(set_to_none=True)
        y = net(coords, features_of(seed, coords))
        (y * features_of(9, y, channels)).sum().backward()
        made.append([y.detach(), *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())])
    return made


@pytest.fixture
def found(monkeypatch):
    """What was joined, and the tensors that norms were given with it."""
    seen = {"joined": [], "runs": []}
    watched, run = joining.Watched.joined, padding.batch_norm_of_rows
    monkeypatch.setattr(
        joining.Watched, "joined", lambda self, ends: seen["joined"].append(watched(self, ends)) or seen["joined"][-1]
    )

    def noted(*args):
        seen["runs"].append((args[-2] is not None, args[-1]))
        return run(*args)

    monkeypatch.setattr(padding, "batch_norm_of_rows", noted)
    return seen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_steps_equal_eager_ones_and_norms_take_what_only_they_feed(case, found):
    torch.manual_seed(0)
    net = Net(case).to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    got, want = steps(net, range(1, 6)), steps(twin, range(1, 6))
    assert replays(net) >= 3
    for a, b in zip(got, want):
        same(a, b)
    assert all(int(norm.num_batches_tracked) in (0, 5) for norm in (net.norm, net.second))
    norms = 2 if case is residual_of_two_norms else 1
    assert found["joined"][0] == JOINED.get(case, [None] * norms)
    wanted = [(one.has_residual, True) if one else (False, False) for one in found["joined"][0]]
    assert found["runs"][-norms:] == (sorted(wanted) if case is residual_of_two_norms else wanted)


@pytest.mark.parametrize("case", [plain, residual, both, in_place], ids=lambda case: case.__name__)
def test_steps_with_norms_in_evaluation_equal_eager_ones(case):
    """As in fine-tuning: gradients go through norms whose statistics stay."""
    torch.manual_seed(0)
    net = Net(case).to(DEVICE)
    steps(net, (3,))  # statistics that are not those of a new network
    net.norm.eval()
    twin = copy.deepcopy(net)
    nn.capture(net)
    for a, b in zip(steps(net, range(1, 6)), steps(twin, range(1, 6))):
        same(a, b)
    assert replays(net) >= 3


@pytest.fixture
def found_in_inference(monkeypatch):
    """What norms of inference were given: whether a residual, whether a ReLU."""
    runs, run = [], padding.evaluated_batch_norm

    def noted(*args):
        runs.append((args[-2] is not None, args[-1]))
        return run(*args)

    monkeypatch.setattr(padding, "evaluated_batch_norm", noted)
    return runs


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_inference_equals_the_eager_one_and_norms_take_what_only_they_feed(case, frozen, found_in_inference):
    torch.manual_seed(0)
    net = Net(case).to(DEVICE)
    steps(net, (3,))  # statistics that are not those of a new network
    net = net.requires_grad_(not frozen).eval()
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.inference_mode():
        for seed in range(1, 6):
            coords = coords_of(seed, 40 + 10 * seed)
            features = features_of(seed, coords)
            same([net(coords, features)], [twin(coords, features.clone())])
    assert replays(net) >= 3
    norms = 2 if case is residual_of_two_norms else 1
    joined = JOINED.get(case, [None] * norms)
    wanted = [(one.has_residual, True) if one else (False, False) for one in joined]
    assert found_in_inference[-norms:] == (sorted(wanted) if case is residual_of_two_norms else wanted)


def both_of(net, twin, seed):
    """What two modules give for equal scenes, each for its own tensors."""
    coords = coords_of(seed, 40 + 10 * seed)
    return [one(spconv.SparseConvTensor(features_of(seed, coords), coords, [12, 12, 12], 2)) for one in (net, twin)]


class Norms(torch.nn.Module):
    """A convolution and a norm."""

    def __init__(self):
        super().__init__()
        self.first = spconv.SubMConv3d(4, 8, 3, padding=1, bias=False, indice_key="a")
        self.norm = torch.nn.BatchNorm1d(8)


class Strict(Norms):
    """Fails where a gradient may be asked for."""

    def forward(self, x):
        assert not torch.is_grad_enabled()
        return relu(self.norm(self.first(x).features))


class TwoPaths(Norms):
    """Does more where a gradient may be asked for."""

    def forward(self, x):
        y = self.norm(self.first(x).features)
        return relu(y) if torch.is_grad_enabled() else relu(y) + y


class Again(Norms):
    """A norm that is used twice, once with a ReLU and once without."""

    def forward(self, x):
        y = self.norm(self.first(x).features)
        return relu(y) + self.norm(y)


@pytest.mark.parametrize("kind", [Strict, TwoPaths, Again])
def test_inference_is_right_where_a_run_with_gradients_tells_nothing(kind):
    torch.manual_seed(0)
    net = kind().to(DEVICE).eval()
    net.norm.running_mean.normal_()
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.inference_mode():
        for seed in range(1, 6):
            same(*([y] for y in both_of(net, twin, seed)))
    assert replays(net) >= 3


class Returned(Norms):
    """Returns what its ReLU reads, or a sum of that, too."""

    def __init__(self, is_sum):
        super().__init__()
        self.is_sum = is_sum

    def forward(self, x):
        x = self.first(x)
        y = self.norm(x.features) + x.features if self.is_sum else self.norm(x.features)
        return {"before": x.replace_feature(y), "after": relu(y)}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("is_sum", [False, True], ids=["norm", "sum"])
def test_what_a_call_returns_is_read_by_more_than_its_ReLU(is_sum, training):
    torch.manual_seed(0)
    net = Returned(is_sum).to(DEVICE).train(training)
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.set_grad_enabled(training):
        for seed in range(1, 6):
            made = []
            for one, found in zip((net, twin), both_of(net, twin, seed)):
                made.append([found["before"].features, found["after"]])
                if training:
                    made[-1] += torch.autograd.grad(made[-1][0].square().sum() + made[-1][1].sum(), one.parameters())
            same(*made)
    assert replays(net) >= 3, nn.explain(net)


class ReadByANorm(Norms):
    """What a ReLU reads is read by another norm, whose result gives no gradient."""

    def __init__(self, is_sum, is_unused):
        super().__init__()
        self.second = torch.nn.BatchNorm1d(8)
        self.is_sum, self.is_unused = is_sum, is_unused

    def forward(self, x):
        x = self.first(x).features
        y = self.norm(x) + x if self.is_sum else self.norm(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_unused):
            self.second(y)
        return relu(y)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("is_unused", [False, True], ids=["without a gradient", "unused"])
@pytest.mark.parametrize("is_sum", [False, True], ids=["norm", "sum"])
def test_a_norm_reads_what_another_gives_to_its_ReLU(is_sum, is_unused, training):
    torch.manual_seed(0)
    net = ReadByANorm(is_sum, is_unused).to(DEVICE).train(training)
    net.second.train()
    twin = copy.deepcopy(net)
    nn.capture(net)
    with torch.set_grad_enabled(training):
        for seed in range(1, 6):
            got, want = both_of(net, twin, seed)
            if training:
                got.sum().backward()
            same([got, *net.buffers()], [want, *twin.buffers()])
    assert replays(net) >= 3, nn.explain(net)


def joins(joined, *calls):
    """A run of one norm, then calls on what it gave."""
    run = joining.Joining(joined)
    y = run.norm(lambda other, is_activated: torch.ones(3, 2) * (1 + 2 * is_activated), torch.zeros(3, 2), 0)
    for call in calls:
        y = call(run, y)
    run.end()
    return y


def test_what_stands_for_a_norm_is_read_by_nobody():
    with_relu, with_sum = [joining.Joined(False)], [joining.Joined(True)]
    ask = lambda function, *more: lambda run, y: run.call(function, (y, *more), {})  # noqa: E731
    other = torch.ones(3, 2)
    assert joins(with_relu, ask(relu)).unique().tolist() == [3]
    assert joins(with_sum, ask(add, other), ask(relu)).unique().tolist() == [3]
    for joined, *calls in (
        (with_relu,),
        (with_relu, ask(torch.exp)),
        (with_relu, ask(add, other)),
        (with_sum, ask(relu)),
        (with_sum, ask(add, other)),
        (with_sum, ask(add, other), ask(add, other)),
        (with_sum, ask(add, other[:1]), ask(relu)),
        (with_sum, ask(add, other), lambda run, y: run.call(relu, (y,), {}) + run.call(add, (y, other), {})),
        (with_relu, lambda run, y: run.call(relu, (y,), {}) + run.call(add, (y, other), {})),
        ([*with_relu, None], lambda run, y: run.norm(None, y, 1)),
        ([*with_sum, None], ask(add, other), lambda run, y: run.norm(None, y, 1)),
        ([],),
        ([None, None],),
    ):
        with pytest.raises(joining.Changed, match="differs from call to call"):
            joins(joined, *calls)


@pytest.mark.parametrize("which", ["input", "residual"])
def test_what_a_norm_reads_must_not_change_before_its_ReLU(which):
    run, x, other = joining.Joining([joining.Joined(True)]), torch.zeros(3, 2), torch.ones(3, 2)
    y = run.call(add, (run.norm(lambda other, is_activated: torch.ones(3, 2), x, 0), other), {})
    (x if which == "input" else other).add_(1)
    with pytest.raises(joining.Changed, match="differs from call to call"):
        run.call(relu, (y,), {})


def test_what_stood_for_a_norm_goes_with_its_ReLU():
    run = joining.Joining([joining.Joined(True)])
    y = run.norm(lambda other, is_activated: torch.ones(3, 2), torch.zeros(3, 2), 0)
    y, stand_in = run.call(add, (y, torch.ones(3, 2)), {}), weakref.ref(y)
    run.call(relu, (y,), {})
    del y
    assert stand_in() is None, "each would keep as much memory as the features of its layer"


class Counter(torch.nn.Module):
    """Reads a counter within the region, as no norm of torch does."""

    def __init__(self):
        super().__init__()
        self.first = spconv.SubMConv3d(4, 8, 3, padding=1, bias=False, indice_key="a")
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, coords, features):
        x = self.first(spconv.SparseConvTensor(features, coords, [12, 12, 12], 2))
        y = self.norm(x.features)
        return y * self.norm.num_batches_tracked.to(y.dtype)


def test_batches_are_counted_before_somebody_reads_the_count():
    torch.manual_seed(0)
    net = Counter().to(DEVICE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for a, b in zip(steps(net, range(1, 6), 8), steps(twin, range(1, 6), 8)):
        same(a, b)
    assert replays(net) >= 2
