"""What a module evaluates to, after its weights were changed by any means, is what its weights now say."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.nn.fused import normalize
from sparseconv.nn.models import second
from sparseconv.plan import shared_plan
from tests.cases import TOLERANCE, error
from tests.nn.test_convolution import sparse
from tests.nn.test_ptv3 import M3, SMALL
from tests.ranks import START

NORMS = (nn.BatchNorm, nn.SyncBatchNorm, nn.GroupNorm, nn.InstanceNorm, nn.LayerNorm)


class Back(nn.SparseModule):
    """Down by a stride and back, every way."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv(4, 8, 2, stride=2), nn.BatchNorm(8)
        self.back, self.up = nn.InverseConv(8, 4, 2, stride=2), nn.ConvTranspose(8, 4, 2, stride=2)

    def forward(self, x):
        y = self.norm(self.down(x))
        return self.back(y, onto=x) + self.up(y, target=x)


class Foreign(torch.nn.Module):
    """A weight in torch's layout, by a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(6, 4, 3, 3, 3)), torch.nn.Parameter(torch.randn(6))

    def forward(self, x):
        plan = shared_plan(x.grid, 3)
        return x.with_features(plan.execute(x.features, self.weight, self.bias))


#: every module with parameters, in a net that takes 4 channels
NETS: dict[str, Callable[[], torch.nn.Module]] = {
    "convolution": lambda: nn.SubmanifoldConv(4, 8, 3, groups=2),
    "conv_norm_relu": lambda: nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.BatchNorm(8), nn.ReLU()),
    "conv_norm": lambda: nn.Sequential(nn.SubmanifoldConv(4, 8, 3, bias=False), nn.BatchNorm(8, affine=False)),
    "strides": Back,
    "within": lambda: second.ConvWithin(4, 8, 3, (6, 6, 6), stride=2, padding=1),
    "foreign_layout": Foreign,
    "norms": lambda: nn.Sequential(
        *(nn.BatchNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm(4, affine=True), nn.LayerNorm(4), nn.SyncBatchNorm(4))
    ),
    "features": lambda: nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Residual(nn.Linear(8, 8))),
    "conv_block": lambda: nn.ConvBlock(4, 8),
    "residual_block": lambda: nn.ResidualBlock(4, 8),
    "bottleneck": lambda: nn.Bottleneck(4, 8),
    "point_embedding": lambda: nn.PointEmbedding(4, 8),
    "positional_encoding": lambda: nn.ConditionalPositionalEncoding(4),
    "unet": lambda: nn.UNet(4, 3, channels=(8, 16)),
    "minkunet": lambda: nn.MinkUNet(4, 3, variant="14", planes=(4,) * 8, init_channels=4),
    "spunet": lambda: nn.SpUNet(4, 3, channels=(4,) * 8, layers=(1,) * 8, base_channels=4),
    "convnext": lambda: nn.ConvNeXtUNet(4, 3, channels=(4, 8), blocks=(1, 1), kernel_size=3),
    "resnet": lambda: nn.ResNet(4, 3, planes=(4, 4, 4, 4)),
    "second": lambda: nn.SecondEncoder(4, (41, 32, 32)),
    "ptv3": lambda: nn.PointTransformerV3(4, **SMALL),
    "ptv3_with_bias": lambda: nn.PointTransformerV3(4, **SMALL | {"enable_rpe": True, "enable_flash": False}),
    "ptv3_m2": lambda: nn.PointTransformerV3(4, **SMALL, variant="m2", layer_scale=0.5),
    "ptv3_m3": lambda: nn.PointTransformerV3(4, **SMALL | M3),
    "window_attention": lambda: nn.WindowAttention(4, 2, 4),
    "rotary_attention": lambda: nn.Sequential(nn.Linear(4, 6), nn.WindowAttention(6, 1, 4, rope=nn.RotaryPositions(6))),
    "voxel_resnet": lambda: nn.VoxelResBackBone8x(4, (41, 32, 32)),
}
#: names of `nn` that are no modules with parameters of their own
WITHOUT = {
    *("Add", "AvgPool", "Cat", "Dropout", "ELU", "FeatureModule", "GELU", "GlobalAvgPool", "GlobalMaxPool"),
    *("GlobalSumPool", "LeakyReLU", "MaxPool", "MaxUnpool", "Pointwise", "ReLU", "SiLU", "Sigmoid", "Softplus"),
    *("SparseModule", "SumPool", "Tanh", "ToDense", "Unpool"),
}


def tensors(net: torch.nn.Module) -> list[torch.Tensor]:
    return [t.detach() for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()]


def through_data(net):
    for t in (*net.parameters(), *net.buffers()):
        if t.is_floating_point():
            t.data.mul_(0.5).add_(0.1)


def through_numpy(net):
    for t in tensors(net):
        array = t.numpy()
        array *= 0.5
        array += 0.1


def in_place(net):
    with torch.no_grad():
        for t in (*net.parameters(), *net.buffers()):
            if t.is_floating_point():
                t.mul_(0.5).add_(0.1)


def by_foreach(net):
    torch._foreach_mul_(tensors(net), 0.5)
    torch._foreach_add_(tensors(net), 0.1)


def by_loading(net):
    state = {k: v * 0.5 + 0.1 if v.is_floating_point() else v for k, v in net.state_dict().items()}
    net.load_state_dict(state)


def by_assigning(net):
    state = {k: v * 0.5 + 0.1 if v.is_floating_point() else v for k, v in net.state_dict().items()}
    net.load_state_dict(state, assign=True)


def by_other_memory(net):
    for t in (*net.parameters(), *net.buffers()):
        if t.is_floating_point():
            t.data = t.data * 0.5 + 0.1


def as_inference_tensors(net):
    with torch.inference_mode():
        in_place(net)


WAYS = [through_data, through_numpy, in_place, by_foreach, by_loading, by_assigning, by_other_memory]
WAYS += [as_inference_tensors]


def features_of(result):
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [r.features if isinstance(r, sc.SparseTensor) else r for r in results]


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    net = NETS[name]().eval()
    for module in net.modules():
        if isinstance(module, NORMS) and getattr(module, "running_var", None) is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return net


@torch.no_grad()
def holds(net, x, change):
    """Whether a net that ran, was changed and runs again gives what its copy gives, and not what it gave."""

    def run(net):
        torch.manual_seed(0)  # Point Transformer V3 shuffles its curves at each pooling, in evaluation too
        return features_of(net(x))

    before = [t.clone() for t in run(net)]
    change(net)
    after, want = run(net), run(copy.deepcopy(net))
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True)), "the change is no change"
    for a, b in zip(after, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_every_module_with_parameters_is_here():
    seen = {type(m) for make in NETS.values() for m in make().modules()}
    modules = {
        n for n in nn.__all__ if isinstance(getattr(nn, n), type) and issubclass(getattr(nn, n), torch.nn.Module)
    }
    assert {n for n in modules if getattr(nn, n) not in seen} <= WITHOUT
    assert not any(t.numel() for n in ("ReLU", "MaxPool", "AvgPool") for t in getattr(nn, n)(2).parameters())


@pytest.mark.parametrize("change", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", NETS)
def test_weights_that_changed_are_seen(name, change):
    holds(made(name), sparse(), change)


def _write(nets):
    torch.set_num_threads(1)
    for net in nets:
        through_data(net)


def test_weights_that_another_process_writes_are_seen():
    names = "convolution", "conv_norm_relu", "foreign_layout", "within", "norms", "unet"  # as many as one message takes
    x, nets = sparse(), [made(name).share_memory() for name in names]
    with torch.no_grad():
        for net in nets:
            net(x)
    process = torch.multiprocessing.get_context(START).Process(target=_write, args=(nets,))
    process.start()
    process.join(500)
    assert process.exitcode == 0
    with torch.no_grad():
        for name, net in zip(names, nets, strict=True):
            assert not torch.equal(tensors(net)[0], tensors(made(name))[0]), "the other process wrote nothing"
            for a, b in zip(features_of(net(x)), features_of(copy.deepcopy(net)(x)), strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("out_first", [False, True], ids=["by tap", "output channels first"])
@pytest.mark.parametrize(
    ("dtype", "to"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize(("channels", "bias", "affine"), [(8, True, True), (20, False, True), (8, True, False)])
def test_one_launch_folds_as_torch_does(monkeypatch, dtype, to, channels, bias, affine, out_first):
    """Without a card, in Triton's interpreter."""
    pytest.importorskip("triton")
    from sparseconv.gpu.launcher import INTERPRETED
    from sparseconv.nn.fused.fusion import folded

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not INTERPRETED:
        pytest.skip("Triton was imported before its interpreter was asked for")
    conv, norm = nn.SubmanifoldConv(12, channels, 3, bias=bias).to(device, dtype), nn.BatchNorm(channels, affine=affine)
    for t in (*norm.parameters(), norm.running_mean, norm.running_var):
        t.data.uniform_(0.5, 2)
    norm = norm.to(device).eval()
    taps = conv.weight
    if out_first:  # a view of (C, K, C_in), as other libraries keep it
        taps = torch.nn.Parameter(conv.weight.permute(2, 0, 1).contiguous()).permute(1, 2, 0)
    with torch.no_grad():
        want = folded(taps, conv.bias, norm, to)
        calls = []
        monkeypatch.setattr(normalize, "on_kernels", lambda x: x.dtype in normalize.DTYPES)
        monkeypatch.setattr(
            normalize, "folded", lambda *given, run=normalize.folded: calls.append(given) or run(*given)
        )
        got = folded(taps, conv.bias, norm, to)
    assert len(calls) == 1
    for a, b in zip(got, want, strict=True):
        assert a.dtype == to
        assert a.shape == b.shape
        assert error(a, b.double().cpu()) < TOLERANCE[to]
