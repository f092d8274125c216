"""Weights packed and cast for a captured run, and where their gradients go."""

from __future__ import annotations

import pytest
import torch

from sparseconv.gpu.transposing import is_aligned, transpose
from sparseconv.plan import weights as casting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def same(got, want):
    """Equal; the interpreter of kernels cuts numbers off to make them bfloat16."""
    if want.dtype == BRAIN and DEVICE == "cpu":
        return torch.allclose(got.float(), want.float(), rtol=2**-7, atol=0)
    return torch.equal(got, want)


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (64, 64), (1, 200), (65, 3), (130, 129), (16, 27 * 16), (0, 4), (4, 0)]
)
@pytest.mark.parametrize(("source", "into"), [(SINGLE, HALF), (HALF, SINGLE), (SINGLE, BRAIN), (SINGLE, SINGLE)])
def test_a_matrix_is_transposed_and_cast(rows, columns, source, into):
    matrix = torch.randn(rows, columns, device=DEVICE).to(source)
    made = transpose(matrix, torch.full((columns, rows), torch.nan, dtype=into, device=DEVICE))
    assert same(made, matrix.t().to(into))


def test_what_lies_at_no_multiple_of_16_bytes_is_told():
    memory = torch.zeros(12)
    assert is_aligned(memory, memory[4:])
    assert not is_aligned(memory, memory[1:])


@pytest.fixture
def captured(monkeypatch):
    """As in a run of a capture, whatever the device."""
    monkeypatch.setattr(casting, "current", lambda: object())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with torch.autograd.set_multithreading_enabled(False):
        yield


#: (C_out, K, C_in/G), as spconv keeps a weight; (K, C_in/G, C_out), as kernels read it; (C_out, C_in/G, K), as torch
LAYOUTS = {"spconv": (1, 2, 0), "own": (0, 1, 2), "torch": (2, 1, 0)}


def parameter(layout, shape=(27, 6, 8), dtype=SINGLE):
    """A parameter, and the view (K, C_in/G, C_out) of it."""
    axes = LAYOUTS[layout]
    kept = [shape[axes.index(at)] for at in range(3)]
    weight = torch.randn(kept, dtype=dtype, device=DEVICE).requires_grad_()
    view = weight.permute(axes)
    assert view.shape == shape
    return weight, view


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "into"), [(SINGLE, HALF), (SINGLE, BRAIN), (SINGLE, SINGLE), (DOUBLE, SINGLE)])
def test_packed_weights_and_their_gradients_are_those_of_a_cast(layout, dtype, into, captured):
    weight, view = parameter(layout, dtype=dtype)
    twin = weight.detach().clone().requires_grad_()
    taps, want = casting.packed_as(view, into), twin.permute(LAYOUTS[layout]).to(into).contiguous()
    assert taps.is_contiguous()
    assert same(taps, want)
    grad = torch.randn_like(taps)
    (found,) = torch.autograd.grad(taps, weight, grad)
    assert torch.equal(found, torch.autograd.grad(want, twin, grad)[0])
    if taps is not view:
        assert found.is_contiguous()  # as the parameter, so that nobody copies it


def test_outside_of_a_captured_run_torch_packs():
    _, view = parameter("spconv")
    assert type(casting.packed_as(view, HALF).grad_fn).__name__ == "ToCopyBackward0"
    packed = view.detach().contiguous()
    assert casting.packed_as(packed, packed.dtype) is packed
