"""A convolution, its batch norm and its activation in a SparseSequential: one call in inference, the same result."""

import copy

import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv.plan.convolution import ConvolutionPlan
from tests.cases import TOLERANCE, error

ACTIVATIONS = [torch.nn.ReLU(), torch.nn.LeakyReLU(0.1), torch.nn.GELU(), torch.nn.Softsign(), None]


def scene(rows=120, channels=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    cells = torch.randperm(2 * 9 * 8 * 7, generator=generator)[:rows]
    indices = torch.stack([cells // 504, cells // 56 % 9, cells // 7 % 8, cells % 7], 1).int()
    return spconv.SparseConvTensor(torch.randn(rows, channels, generator=generator).to(dtype), indices, [9, 8, 7], 2)


def network(activation, dtype=torch.float32):
    torch.manual_seed(0)
    layers = [
        (spconv.SubMConv3d(8, 16, 3, indice_key="a"), 16),
        (spconv.SparseConv3d(16, 24, 3, stride=2, padding=1, bias=False, indice_key="b"), 24),
        (spconv.SparseInverseConv3d(24, 16, 3, indice_key="b"), 16),
        (spconv.SubMConv3d(16, 8, 1), 8),
        (spconv.SubMConv3d(8, 8, (3, 1, 3), groups=2), 8),
    ]
    modules = []
    for conv, channels in layers:
        norm = torch.nn.BatchNorm1d(channels)
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor.data.uniform_(0.5, 2)
        modules += [conv, norm] + ([] if activation is None else [copy.deepcopy(activation)])
    return spconv.SparseSequential(*modules).to(dtype).eval()


def apart(net, x):
    """Module after module, as it is written."""
    for module in net:
        x = module(x) if isinstance(module, spconv.SparseModule) else x.replace_feature(module(x.features))
    return x


@pytest.fixture
def calls(monkeypatch):
    """Whether each execution of a plan had an epilogue."""
    seen, execute = [], ConvolutionPlan.execute
    monkeypatch.setattr(
        ConvolutionPlan,
        "execute",
        lambda plan, *args, epilogue=None, **more: (
            seen.append(epilogue is not None) or execute(plan, *args, epilogue=epilogue, **more)
        ),
    )
    return seen


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_inference_is_what_the_modules_say(activation, dtype, calls):
    net, x = network(activation, dtype), scene(dtype=dtype)
    exact = apart(copy.deepcopy(net).double(), scene(dtype=torch.float64).replace_feature(x.features.double()))
    calls.clear()
    with torch.no_grad():
        y = net(x)
    assert calls == [isinstance(activation, (torch.nn.ReLU, torch.nn.LeakyReLU, torch.nn.GELU))] * 4
    assert torch.equal(y.indices, exact.indices)
    assert y.features.dtype == dtype
    assert error(y.features, exact.features.detach()) < 5 * TOLERANCE[dtype]  # five layers


def test_under_autocast(calls):
    net, x = network(torch.nn.ReLU()), scene()
    exact = apart(copy.deepcopy(net).double(), x.replace_feature(x.features.double())).features.detach()
    calls.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = net(x).features
    assert calls == [True] * 4
    assert y.dtype == torch.bfloat16
    assert error(y, exact) < 5 * TOLERANCE[torch.bfloat16]


def test_gradients_and_training_keep_the_modules(calls):
    net, x = network(torch.nn.ReLU()), scene()
    net(x).features.sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    with torch.no_grad():
        net.train()(x)
    assert calls == [False] * 8


def test_weights_and_statistics_are_read_at_every_call():
    net, x = network(torch.nn.ReLU()), scene()
    with torch.no_grad():
        before = net(x).features
        net[0].weight.data.mul_(2)
        net[1].running_var.numpy()[:] = 0.25
        after = net(x).features
        want = apart(net, x).features
    assert not torch.allclose(before, after)
    assert error(after, want.double()) < 5 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("at", [0, 1, 2], ids=["convolution", "norm", "activation"])
def test_whoever_hooks_in_between_sees_what_is_there(at):
    net, x = network(torch.nn.ReLU()), scene()
    seen = []
    net[at].register_forward_hook(lambda module, given, y: seen.append(y))
    with torch.no_grad():
        net(x)
    assert len(seen) == 1


def test_a_layer_with_a_forward_of_its_own_is_called():
    class Doubled(spconv.SubMConv3d):
        def forward(self, input):
            y = super().forward(input)
            return y.replace_feature(2 * y.features)

    net = spconv.SparseSequential(Doubled(8, 8, 3), torch.nn.BatchNorm1d(8), torch.nn.ReLU()).eval()
    x = scene()
    with torch.no_grad():
        assert error(net(x).features, apart(net, x).features.double()) < TOLERANCE[torch.float32]


def test_no_voxels():
    net = network(torch.nn.ReLU())
    x = spconv.SparseConvTensor(torch.zeros(0, 8), torch.zeros(0, 4, dtype=torch.int32), [9, 8, 7], 1)
    with torch.no_grad():
        assert net(x).features.shape == (0, 8)


def test_what_the_convolution_refuses_is_refused():
    net = network(torch.nn.ReLU())
    with torch.no_grad(), pytest.raises(ValueError, match="takes 8 channels"):
        net(scene(channels=6))


def test_a_copy_within_a_compiler_has_every_field():
    from sparseconv.interop.spconv.pytorch.core import FIELDS

    assert set(vars(scene())) == set(FIELDS)
