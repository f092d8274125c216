"""Arguments in the order of spconv 2.3.8, its representations, and its pooling where that is asked for."""

from __future__ import annotations

import inspect

import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv.interop.spconv import constants
from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.interop.spconv.pytorch.conv import SparseConvolution
from sparseconv.interop.spconv.pytorch.pool import SparseAvgPool, SparseMaxPool
from tests.interop.scenes import scene

HEAD = "in_channels out_channels kernel_size"
SIZES = "stride=1 padding=0 dilation=1"
LAYER = f"{HEAD} {SIZES} groups=1 bias=True indice_key=None algo=None fp32_accum=None"
POOL = "padding=0 dilation=1 indice_key=None"
#: read from the wheel's source
SIGNATURES = {
    SparseConvolution: f"ndim {HEAD}=3 {SIZES} groups=1 bias=True subm=False output_padding=0 transposed=False "
    "inverse=False indice_key=None algo=None fp32_accum=None record_voxel_count=False act_type=None act_alpha=0 "
    "act_beta=0 large_kernel_fast_algo=False name=None",
    SparseMaxPool: f"ndim kernel_size=3 stride=1 {POOL} subm=False algo=None record_voxel_count=False name=None",
    SparseAvgPool: f"ndim kernel_size=3 stride=1 {POOL} subm=False algo=None record_voxel_count=False name=None",
    spconv.SparseConvTensor: "features indices spatial_shape batch_size grid=None voxel_num=None indice_dict=None "
    "benchmark=False permanent_thrust_allocator=False enable_timer=False force_algo=None",
    spconv.SparseGlobalMaxPool: "name=None",
    spconv.SparseGlobalAvgPool: "name=None",
    spconv.SparseBatchNorm: "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True",
}
for rank in (1, 2, 3, 4):
    for kind in ("SparseConv", "SparseConvTranspose"):
        SIGNATURES[getattr(spconv, f"{kind}{rank}d")] = (
            f"{LAYER} record_voxel_count=False large_kernel_fast_algo=False name=None"
        )
    SIGNATURES[getattr(spconv, f"SubMConv{rank}d")] = f"{LAYER} large_kernel_fast_algo=False name=None"
    SIGNATURES[getattr(spconv, f"SparseInverseConv{rank}d")] = (
        f"{HEAD} indice_key bias=True algo=None fp32_accum=None large_kernel_fast_algo=False name=None"
    )
    for kind in ("Max", "Avg"):
        SIGNATURES[getattr(spconv, f"Sparse{kind}Pool{rank}d")] = (
            f"kernel_size stride=None {POOL} algo=None record_voxel_count=False name=None"
        )


@pytest.mark.parametrize("kind", SIGNATURES, ids=lambda kind: kind.__name__)
def test_positional_arguments_are_in_spconvs_order(kind):
    wanted = SIGNATURES[kind].split()
    given = [
        p.name + ("" if p.default is p.empty else f"={p.default}")
        for p in inspect.signature(kind).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert given[: len(wanted)] == wanted


def test_representations_and_algorithms_read_as_spconvs():
    fast = "algo=ConvAlgo.MaskImplicitGemm"
    sizes = "kernel_size=[3, 3, 3], stride=[1, 1, 1], padding=[0, 0, 0], dilation=[1, 1, 1]"
    layer = spconv.SubMConv3d(4, 8, 3, bias=False)
    assert layer.extra_repr() == f"4, 8, {sizes}, output_padding=[0, 0, 0], bias=False, {fast}"
    two = "kernel_size=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1]"
    assert spconv.SparseMaxPool2d(2).extra_repr() == f"{two}, {fast}"
    assert spconv.SparseConv3d(4, 8, 5).algo == ConvAlgo.Native
    assert spconv.SparseConv3d(4, 8, 5, large_kernel_fast_algo=True).algo == ConvAlgo.MaskImplicitGemm
    assert spconv.SparseConv3d(4, 8, 3, algo=ConvAlgo.Native).algo == ConvAlgo.Native
    with pytest.raises(ValueError, match="act_type must be one of"):
        SparseConvolution(3, 4, 8, act_type=type("Activation", (), {"name": "GELU"})())
    with pytest.raises(TypeError, match="act_type"):
        SparseConvolution(3, 4, 8, act_type="ReLU")


def test_pooling_with_spconvs_numbers(monkeypatch):
    features, *rest = scene()
    features = (features - 1).requires_grad_()  # windows without a positive value

    def run(pool):
        y = pool(spconv.SparseConvTensor(features, *rest)).features
        (grad,) = torch.autograd.grad((y * torch.arange(y.numel()).view_as(y)).sum(), features)
        return y.detach(), grad

    pools = spconv.SparseMaxPool3d(2), spconv.SparseAvgPool3d(2)
    (largest, of_largest), (mean, of_mean) = map(run, pools)
    monkeypatch.setattr(constants, "POOL_AS_SPCONV", True)
    (clamped, of_clamped), (same, of_same) = map(run, pools)
    assert float(largest.min()) < 0
    assert torch.equal(clamped, largest.clamp(min=0))
    torch.testing.assert_close(same, mean)
    # each voxel lies in one window: its gradients differ by the square of the voxels there
    places = torch.cat([rest[0][:, :1], rest[0][:, 1:] // 2], 1)
    kept = (places[:, 1:] < torch.tensor(rest[1]) // 2).all(1)
    _, window, counts = torch.unique(places, dim=0, return_inverse=True, return_counts=True)
    torch.testing.assert_close(of_same[kept], of_mean[kept] * counts[window][kept, None] ** 2)
    assert bool((of_clamped == of_largest)[of_clamped != 0].all())
    assert int((of_clamped != 0).sum()) < int((of_largest != 0).sum())


def test_weights_of_one_tap_as_they_are_shaped(monkeypatch):
    """spconv reads the memory of (C_out, 1, 1, 1, C_in) as (C_in, C_out)."""
    features, *rest = scene()
    x = spconv.SparseConvTensor(features, *rest)
    layer = spconv.SubMConv3d(features.shape[1], 3, 1, bias=False)
    weight = layer.weight.detach().view(3, -1)
    assert torch.allclose(layer(x).features, features @ weight.reshape(-1, 3))
    monkeypatch.setattr(constants, "ONE_TAP_AS_SPCONV", False)
    assert torch.allclose(layer(x).features, features @ weight.t())
    wide = spconv.SubMConv3d(features.shape[1], 3, 3, bias=False)
    wide.weight.data.zero_()[:, 1, 1, 1] = weight
    assert torch.allclose(layer(x).features, wide(x).features, atol=1e-6)
