"""spconv's functions over tables of pairs, its hash table and activations, against layers and loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv.interop.spconv import constants
from sparseconv.interop.spconv.core import Activation
from sparseconv.interop.spconv.hash import HashTable
from sparseconv.interop.spconv.pytorch import conv, functional, ops, pool
from sparseconv.interop.spconv.pytorch.conv import SparseConvolution, SparseConvolutionBase
from sparseconv.interop.spconv.pytorch.modules import RemoveDuplicate
from tests import oracle
from tests.forked import printed
from tests.interop.scenes import scene

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [
    pytest.param([3, 3, 3], [1, 1, 1], [1, 1, 1], True, id="submanifold"),
    pytest.param([3, 3, 3], [2, 2, 2], [1, 1, 1], False, id="strided"),
    pytest.param([2, 1, 3], [2, 1, 1], [0, 0, 1], False, id="uneven"),
]


def given(device="cpu"):
    features, indices, shape, batch = scene()
    return features.double().to(device).requires_grad_(), indices.to(device), shape, batch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kernel", "stride", "padding", "subm"), SIZES)
def test_tables_are_the_layers_edges(kernel, stride, padding, subm, device):
    features, indices, shape, batch = given(device)
    size = (kernel, stride, padding, [1] * 3, [0] * 3, subm)
    gen = torch.Generator().manual_seed(1)
    filters = torch.randn(5, *kernel, features.shape[1], generator=gen, dtype=torch.float64).to(device).requires_grad_()
    bias = torch.randn(5, generator=gen, dtype=torch.float64).to(device).requires_grad_()
    outs, pairs, counts = ops.get_indice_pairs(indices, batch, shape, spconv.ConvAlgo.Native, *size)
    algo = spconv.ConvAlgo.MaskImplicitGemm
    same, numbers, forward, back, *masks = ops.get_indice_pairs_implicit_gemm(indices, batch, shape, algo, *size)
    assert torch.equal(same, outs)
    assert torch.equal(numbers, counts)
    assert masks == [[]] * 5
    taps = oracle.window_taps(kernel)
    edges = oracle.edges(indices.cpu().numpy(), outs.cpu().numpy(), taps, stride, padding)
    by_tap = filters.detach().cpu().flatten(1, -2).permute(1, 2, 0).numpy()
    wanted = oracle.convolve(
        features.detach().cpu().numpy(), by_tap, edges, len(outs), bias=bias.detach().cpu().numpy()
    )
    grad = torch.randn(len(outs), 5, generator=gen, dtype=torch.float64).to(device)
    run = functional.indice_subm_conv if subm else functional.indice_conv
    for y in (
        run(features, filters, pairs, counts, len(outs), spconv.ConvAlgo.Native, None, bias),
        functional.implicit_gemm(features, filters, forward, back, [], [], [], [], len(outs), bias=bias),
        ops.indice_conv(features, filters, pairs, counts, len(outs), subm=subm, bias=bias),
        ops.implicit_gemm(features, filters, forward, [], [], len(outs), bias=bias)[0],
    ):
        assert np.allclose(y.detach().cpu().numpy(), wanted, atol=1e-12)
        found = torch.autograd.grad(y, (features, filters, bias), grad)
        dx = oracle.input_grad(grad.cpu().numpy(), by_tap, edges, len(features))
        assert np.allclose(found[0].cpu().numpy(), dx, atol=1e-12)
        dw = oracle.weight_grad(features.detach().cpu().numpy(), grad.cpu().numpy(), edges, len(by_tap))
        assert np.allclose(found[1].cpu().flatten(1, -2).permute(1, 2, 0).numpy(), dw, atol=1e-12)
        assert torch.allclose(found[2], grad.sum(0))
    same = ops.indice_conv_backward(features, filters, grad, pairs, counts)
    assert torch.equal(same[0], found[0])
    inverse = functional.indice_inverse_conv(grad, filters.transpose(0, -1), pairs, counts, len(features), None)
    assert np.allclose(inverse.detach().cpu().numpy(), dx, atol=1e-12)
    if not subm:
        turned = functional.implicit_gemm(grad, filters.transpose(0, -1), back, None, [], [], [], [], len(features))
        assert torch.allclose(turned, inverse)
    relu = run(features, filters, pairs, counts, len(outs), None, None, bias, 0.0, 0.0, Activation.ReLU)
    assert np.allclose(relu.detach().cpu().numpy(), wanted.clip(0), atol=1e-12)


def test_derivatives_of_any_order():
    indices = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 2, 1]], dtype=torch.int32)
    outs, pairs, counts = ops.get_indice_pairs(
        indices, 1, [3, 3], spconv.ConvAlgo.Native, [3, 3], [2, 2], [1, 1], [1, 1], [0, 0]
    )
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, 3, 2, dtype=torch.float64, requires_grad=True)

    def run(x, w):
        return functional.indice_conv(x, w, pairs, counts, len(outs), None)

    assert torch.autograd.gradcheck(run, (x, w))
    assert torch.autograd.gradgradcheck(run, (x, w))


def test_empty_and_autocast():
    _, indices, shape, batch = given()
    none = indices[:0]
    outs, pairs, counts = ops.get_indice_pairs(
        none, batch, shape, spconv.ConvAlgo.Native, [3] * 3, [2] * 3, [1] * 3, [1] * 3, [0] * 3
    )
    filters = torch.ones(5, 3, 3, 3, 4)
    assert functional.indice_conv(torch.zeros(0, 4), filters, pairs, counts, len(outs)).shape == (0, 5)
    table = torch.tensor([[0, -1]] * 27, dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.implicit_gemm(torch.ones(1, 4), filters, table, None, [], [], [], [], 2)
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [[108.0] * 5, [0.0] * 5]


def test_activations_of_layers():
    features, indices, shape, batch = scene()
    x = spconv.SparseConvTensor(features, indices, shape, batch)
    kind = type("Activation", (), {"name": "LeakyReLU"})()  # as cumm's
    channels = features.shape[1]
    plain = spconv.SubMConv3d(channels, channels, 3)
    for act, function in (
        (Activation.ReLU, torch.relu),
        (Activation.Sigmoid, torch.sigmoid),
        (kind, lambda t: torch.nn.functional.leaky_relu(t, 0.3)),
        (Activation.None_, lambda t: t),
        (None, lambda t: t),
    ):
        layer = SparseConvolution(3, channels, channels, 3, subm=True, act_type=act, act_alpha=0.3)
        layer.load_state_dict(plain.state_dict())
        wanted = function(plain(x).features)
        assert torch.equal(layer(x).features, wanted)
        assert torch.equal(layer(x, x).features, function(wanted + features))
        norm = torch.nn.BatchNorm1d(channels).eval()
        norm.running_mean.fill_(0.5)
        with torch.no_grad():  # a norm after an activation is not folded into the layer before it
            after = spconv.SparseSequential(layer, norm).eval()(x).features
        assert torch.allclose(after, norm(wanted), atol=1e-6)
    assert isinstance(plain, SparseConvolutionBase)


@pytest.mark.parametrize("device", DEVICES)
def test_hash_table(device):
    table = HashTable(torch.device(device), torch.int64, torch.float32, 100)
    keys = torch.tensor([5, -3, 5, 2**40], device=device)
    table.insert(keys, torch.tensor([1.0, 2.0, 3.0, 4.0], device=device))
    values, missing = table.query(torch.tensor([2**40, 5, 7], device=device))
    assert (values.tolist(), missing.tolist()) == ([4.0, 3.0, 0.0], [False, False, True])
    failed = table.insert_exist_keys(keys[:1] + torch.tensor([0, 1], device=device), values[:2])
    assert failed.tolist() == [0, 1]
    table.insert(torch.tensor([9, -3], device=device))
    found, rows, count = table.items()
    assert (found.tolist(), rows.tolist(), count.item()) == ([-3, 5, 9, 2**40], [2.0, 4.0, 0.0, 4.0], 4)
    assert table.assign_arange_().item() == 4
    assert table.query(found)[0].tolist() == [0.0, 1.0, 2.0, 3.0]
    out = torch.full((1,), 9.0, device=device)
    assert table.query(found[:1], out)[0] is out
    with pytest.raises(ValueError, match="keys must be"):
        table.insert(torch.tensor([1], dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="values must be"):
        table.insert(keys, values)
    with pytest.raises(ValueError, match="keys are int32 or int64"):
        HashTable(torch.device(device), torch.float32, torch.int32)


def test_duplicates_are_left_out():
    indices = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 1, 1], [1, 0, 0]], dtype=torch.int32)
    features = torch.arange(4.0)[:, None].requires_grad_()
    y = RemoveDuplicate()(spconv.SparseConvTensor(features, indices, [2, 2], 2))
    assert y.indices.tolist() == indices[[0, 1, 3]].tolist()
    y.features.sum().backward()
    assert features.grad.flatten().tolist() == [1, 1, 0, 1]
    none = RemoveDuplicate()(spconv.SparseConvTensor(torch.zeros(0, 3), indices[:0], [2, 2], 2))
    assert none.features.shape == (0, 3)


def test_what_is_wrong_is_said():
    pairs = torch.zeros(2, 27, 1, dtype=torch.int32)
    counts, table = torch.ones(27, dtype=torch.int32), torch.zeros(27, 1, dtype=torch.int32)
    x, w = torch.ones(1, 4), torch.ones(5, 3, 3, 3, 4)
    for call, kind, words in (
        (lambda: functional.indice_conv(x, w, pairs[0], counts, 1), ValueError, "indice_pairs"),
        (lambda: functional.indice_conv(x, w, pairs, counts[1:], 1), ValueError, "indice_pair_num"),
        (lambda: functional.indice_conv(x, w, pairs + 1, counts, 1), ValueError, "from 0 to 0"),
        (lambda: functional.indice_conv(x, w[:, :2], pairs, counts, 1), ValueError, "27 taps"),
        (lambda: functional.indice_conv(x[:, :3], w, pairs, counts, 1), ValueError, "channels"),
        (lambda: functional.indice_conv(x.double(), w, pairs, counts, 1), TypeError, "cast one"),
        (lambda: functional.indice_conv(x[0], w, pairs, counts, 1), ValueError, "features"),
        (lambda: functional.indice_conv(x, w, pairs, counts, 1, act_type="ReLU"), TypeError, "act_type"),
        (lambda: functional.implicit_gemm(x, w, table - 2, None, 0, 0, 0, 0, 1), ValueError, "from -1 to 0"),
        (lambda: functional.implicit_gemm(x, w, table, None, 0, 0, 0, 0, 2), ValueError, "pair_fwd"),
        (lambda: ops.indice_conv_backward(x, w, torch.ones(1, 4), pairs, counts), ValueError, "out_bp"),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_two_pairs_of_one_output_at_one_tap_are_refused():
    """A table of neighbours holds one input a tap and an output: the first of two was left out without a word."""
    pairs = torch.tensor([[[0, 1, 2]], [[0, 0, 1]]], dtype=torch.int32)
    counts, x, w = torch.tensor([3], dtype=torch.int32), torch.eye(3), torch.eye(3).view(3, 1, 3)
    for call in (
        lambda: functional.indice_conv(x, w, pairs, counts, 2),
        lambda: functional.indice_inverse_conv(x, w, pairs.flip(0), counts, 2),
        lambda: functional.indice_maxpool(x, pairs, counts, 2),
        lambda: ops.indice_conv_backward(x, w, torch.ones(2, 3), pairs, counts),
    ):
        with pytest.raises(ValueError, match="an output once at each tap"):
            call()
    assert functional.indice_inverse_conv(x[:2], w, pairs, counts, 3).tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0]]


def test_modules_are_found_under_spconvs_names():
    code = """
from sparseconv.interop import spconv as ours
ours.install()
from spconv.pytorch.conv import SparseConvolutionBase
from spconv.pytorch.functional import implicit_gemm, indice_conv
from spconv.pytorch.hash import HashTable
from spconv.pytorch.spatial import RemoveDuplicate
import spconv.pytorch as spconv
import spconv.pytorch.hash as hashes
import spconv.pytorch.spatial as spatial
assert spconv.functional.indice_conv is indice_conv
assert hashes.HashTable is HashTable and spatial.RemoveDuplicate is RemoveDuplicate
ours.uninstall()
"""
    printed("-c", code)
    first = "import sparseconv.interop.spconv.pytorch.hash as h, sparseconv.interop.spconv.hash as g; assert h is g"
    printed("-c", first)


def test_names_of_spconv_1_say_where_they_are_now():
    from sparseconv.interop import spconv as top

    for name in ("SubMConv3d", "SparseConvTensor", "ops", "functional", "ToDense"):
        with pytest.raises(AttributeError, match=f"import spconv.pytorch as spconv` for spconv.{name}"):
            getattr(top, name)
        assert hasattr(spconv, name)
    with pytest.raises(AttributeError, match=r"no attribute 'SparksConv'$"):
        top.SparksConv


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("as_spconv", [False, True])
def test_pools_over_tables_are_the_layers(device, as_spconv, monkeypatch):
    monkeypatch.setattr(constants, "POOL_AS_SPCONV", as_spconv)
    features, indices, shape, batch = given(device)
    size = ([3] * 3, [2] * 3, [1] * 3, [1] * 3, [0] * 3)
    outs, pairs, counts = ops.get_indice_pairs(indices, batch, shape, spconv.ConvAlgo.Native, *size)
    algo = spconv.ConvAlgo.MaskImplicitGemm
    _, _, forward, back, *_ = ops.get_indice_pairs_implicit_gemm(indices, batch, shape, algo, *size)
    x = spconv.SparseConvTensor(features, indices, shape, batch)
    largest, mean = (pool(3, 2, 1)(x).features for pool in (spconv.SparseMaxPool3d, spconv.SparseAvgPool3d))
    grad = torch.randn(largest.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(device)
    of_max, of_mean = (torch.autograd.grad(y, features, grad)[0] for y in (largest, mean))
    for y, wanted, back_wanted in (
        (functional.indice_maxpool(features, pairs, counts, len(outs)), largest, of_max),
        (functional.indice_maxpool_implicit_gemm(features, forward, back, len(outs)), largest, of_max),
        (functional.indice_avgpool_implicit_gemm(features, forward, back, len(outs), True), mean, of_mean),
        (ops.indice_maxpool(features, pairs, counts, len(outs)), largest, of_max),
        (ops.indice_maxpool_implicit_gemm(features, forward, len(outs)), largest, of_max),
    ):
        assert torch.equal(y, wanted)
        torch.testing.assert_close(torch.autograd.grad(y, features, grad)[0], back_wanted)
    torch.testing.assert_close(ops.indice_maxpool_backward(features, largest, grad, pairs, counts), of_max)
    torch.testing.assert_close(ops.indice_maxpool_implicit_gemm_backward(features, largest, grad, back), of_max)
    same, seen = ops.indice_avgpool_implicit_gemm(features, forward, len(outs), True)
    assert torch.equal(same, mean)
    assert seen.tolist() == (forward >= 0).sum(0).tolist()
    assert len(ops.indice_avgpool_implicit_gemm(features, forward, len(outs), False)[1]) == 0
    torch.testing.assert_close(ops.indice_avgpool_implicit_gemm_backward(grad, back, seen), of_mean)


@pytest.mark.parametrize("as_spconv", [False, True])
def test_a_mean_of_halves_is_summed_in_fp32(as_spconv, monkeypatch):
    monkeypatch.setattr(constants, "POOL_AS_SPCONV", as_spconv)
    indices = torch.cartesian_prod(torch.arange(1), *[torch.arange(4)] * 3).int()
    features = torch.full((64, 1), 30000.0, dtype=torch.float16)
    size = ([2] * 3, [2] * 3, [0] * 3, [1] * 3, [0] * 3)
    algo = spconv.ConvAlgo.MaskImplicitGemm
    _, _, forward, back, *_ = ops.get_indice_pairs_implicit_gemm(indices, 1, [4] * 3, algo, *size)
    x = spconv.SparseConvTensor(features, indices, [4] * 3, 1)
    for y in (
        functional.indice_avgpool_implicit_gemm(features, forward, back, 8),
        spconv.SparseAvgPool3d(2)(x).features,
    ):
        assert y.dtype == torch.float16
        assert y.flatten().tolist() == [30000.0] * 8


def test_gradients_by_one_table():
    features, indices, shape, batch = given()
    algo = spconv.ConvAlgo.MaskImplicitGemm
    outs, _, forward, back, *_ = ops.get_indice_pairs_implicit_gemm(
        indices, batch, shape, algo, [3] * 3, [2] * 3, [1] * 3, [1] * 3, [0] * 3
    )
    filters = torch.randn(5, 3, 3, 3, features.shape[1], dtype=torch.float64, requires_grad=True)
    grad = torch.randn(len(outs), 5, dtype=torch.float64)
    y = functional.implicit_gemm(features, filters, forward, back, [], [], [], [], len(outs))
    wanted = torch.autograd.grad(y, (features, filters), grad)
    got = ops.implicit_gemm_backward(features, filters, grad, forward, back, [], [], [], [], None, [], 0, False)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def test_rows_of_batch_items_and_clamped_integers():
    coords = torch.tensor([[1, 0, 0], [0, 3, 3], [1, 2, 2]], dtype=torch.int32)
    rows, counts = ops.global_pool_rearrange(coords, 3)
    assert counts.tolist() == [1, 2, 0]
    assert [row[:count].tolist() for row, count in zip(rows, counts)] == [[1], [0, 2], []]
    numbers = torch.tensor([1, 5, 9], dtype=torch.int32)
    ops.maximum_value_int_(numbers, 6)
    assert numbers.tolist() == [6, 6, 9]
    table = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"out_bp must be \(3, 2\)"):
        ops.indice_maxpool_implicit_gemm_backward(torch.zeros(3, 2), None, torch.zeros(3, 1), table)


def test_sets_of_layers():
    layers = {spconv.SubMConv3d, spconv.SparseConv1d, spconv.SparseConvTranspose2d, spconv.SparseInverseConv4d}
    assert layers < conv.DEFAULT_SPARSE_CONV_TYPES
    assert len(conv.DEFAULT_SPARSE_CONV_TYPES) == 16
    assert {spconv.SparseMaxPool3d, spconv.SparseAvgPool1d, pool.SparseMaxPool} < pool.ALL_POOL_LAYERS
