"""Negated views, the device meta, unsigned indices and factors of zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparseconv.products as sp
from sparseconv.products import autograd, operation
from tests.products.cases import PRODUCT_NAMES, inputs, random_case

CASE = random_case("small", 9, 5, 4, 3, seed=2)


def negated(*shape: int) -> torch.Tensor:
    """A real tensor whose memory holds the negative of its values."""
    return torch.randn(shape, dtype=torch.complex64).conj().imag


def test_kernels_get_no_negated_views():
    """They read memory as it lies: the dispatcher puts such views right on the way."""
    assert autograd.direct(torch.ones(2))
    assert not autograd.direct(torch.ones(2), negated(2))


def test_values_of_negated_views_reach_the_sums(monkeypatch):
    seen = []
    execute = operation.execute_scale
    monkeypatch.setattr(operation, "execute_scale", lambda x, terms: (seen.append(x.is_neg()), execute(x, terms))[1])
    infos = sp.sparse_scale_infos([0, 1, 3], [0, 0, 1], None, 2, 4)
    x, grad = negated(4, 3).requires_grad_(), negated(2, 3)
    z = sp.sparse_scale(x, *infos)
    assert torch.equal(z, torch.stack([x[0] + x[1], x[3]]))
    (found,) = torch.autograd.grad(z, x, grad)
    assert torch.equal(found, torch.stack([grad[0], grad[0], torch.zeros(3), grad[1]]))
    out = torch.zeros(2, 3, dtype=torch.complex64).conj().imag
    assert torch.equal(sp.sparse_scale(x.detach(), infos[0], out=out), z)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("name", PRODUCT_NAMES)
def test_shapes_on_the_device_meta(name):
    function, infos = getattr(sp, f"sparse_{name}"), CASE.infos(torch.float32)
    for shared in (False, True):
        x, y = inputs(name, CASE, shared, False, dtype=torch.float32)
        expected = function(x, y, *infos)
        given = [t.detach().to("meta").requires_grad_() for t in (x, y)]
        got = function(*given, *(info.to("meta") for info in infos))
        assert (got.shape, got.dtype, got.is_meta) == (expected.shape, expected.dtype, True)
        got.sum().backward()
        assert [t.grad.shape for t in given] == [x.shape, y.shape]


def test_the_shape_of_a_scale_on_the_device_meta():
    infos = [info.to("meta") for info in sp.sparse_scale_infos([0, 1], [0, 0], None, 1, 2)]
    x = torch.empty(5, 2, 3, device="meta", requires_grad=True)
    z = sp.sparse_scale(x, *infos)
    assert z.is_meta
    assert z.shape == (5, 1, 3)
    z.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int16])
def test_indices_of_any_integer_dtype(dtype):
    info = sp.sparse_scale_info(np.array([2, 0], dtype), np.array([0, 1], dtype), None, 2, 3)
    assert info.index.tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"entry 0 is 3"):
        sp.sparse_scale_info(np.array([3], dtype), np.array([0], dtype), None, 2, 3)


@pytest.mark.parametrize("channels", [1, 40])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_factor_of_zero_hides_no_infinity(batch, channels):
    """Zero times infinity is no number, however many items and channels decide how it is summed."""
    info = sp.sparse_product_info([0], [0], [0], [0.0], 1, 1, 1)
    x, y = torch.full((batch, 1, channels), float("inf")), torch.ones(1, channels, channels)
    assert sp.sparse_vecmat(x, y, info).isnan().all()
    y = torch.ones(batch, 1, channels)
    assert sp.sparse_outer(x, y, info, out_accumulated=True).isnan().all()
