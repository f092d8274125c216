"""Weights packed and cast for a captured run, and where their gradients go."""

from __future__ import annotations

import pytest
import torch

from sparseconv.gpu.transposing import is_aligned, transpose
from sparseconv.nn.capturing.shared_memory import Gathered, SharedMemory
from sparseconv.nn.capturing.values.given import CannotCapture
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
@pytest.mark.parametrize("placed", [False, True])
def test_packed_weights_and_their_gradients_are_those_of_a_cast(layout, dtype, into, placed, captured):
    weight, view = parameter(layout, dtype=dtype)
    twin = weight.detach().clone().requires_grad_()
    taps, want = casting.packed_as(view, into), twin.permute(LAYOUTS[layout]).to(into).contiguous()
    assert taps.is_contiguous()
    assert same(taps, want)
    grad = torch.randn_like(taps)
    place = torch.full_like(weight, torch.nan)
    with casting.gradients_into({weight.data_ptr(): place} if placed else {}):
        (found,) = torch.autograd.grad(taps, weight, grad)
    assert torch.equal(found, torch.autograd.grad(want, twin, grad)[0])
    if taps is not view:
        assert (found.data_ptr() == place.data_ptr()) == placed
        assert found.is_contiguous()  # as the parameter, so that nobody copies it


def test_a_weight_that_two_layers_share_is_summed(captured):
    weight, view = parameter("spconv")
    place = torch.full_like(weight, torch.nan)
    first, second = (casting.packed_as(view, HALF) for _ in range(2))
    grads = [torch.randn_like(first) for _ in range(2)]
    with casting.gradients_into({weight.data_ptr(): place}):
        (found,) = torch.autograd.grad([first, second], weight, grads)
    want = sum(grad.float() for grad in grads).permute(2, 0, 1)
    assert torch.equal(found, want)


def test_a_place_of_another_size_or_dtype_is_not_written(captured):
    weight, view = parameter("spconv")
    for place in (weight.new_zeros(4), weight.detach().double() * 0):
        taps = casting.packed_as(view, HALF)
        with casting.gradients_into({weight.data_ptr(): place}):
            torch.autograd.grad(taps, weight, torch.ones_like(taps))
        assert not place.any()


def test_outside_of_a_captured_run_torch_packs():
    _, view = parameter("spconv")
    assert type(casting.packed_as(view, HALF).grad_fn).__name__ == "ToCopyBackward0"
    packed = view.detach().contiguous()
    assert casting.packed_as(packed, packed.dtype) is packed


def test_gradients_are_gathered_by_dtype():
    like = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 2).double(), torch.randn(6), torch.randn(4, 3).t()]
    found = [torch.randn_like(p) for p in like]
    found[1] = None
    gathered = Gathered(like, found, SharedMemory())
    gathered.fill(found)
    with gathered.at_once():
        assert set(casting._state.places) == {like[i].data_ptr() for i in (0, 2, 3)}  # the last is not contiguous
    reached = [[True, False, False, True, True], [False, True, True, False, True]]  # by parameters of two results
    first = gathered.taken(reached)
    assert [g is None for g in gathered.taken(reached[:1])] == [False, True, True, False, False]
    gathered.fill([None if g is None else -g for g in found])
    for one, want, again in zip(first, found, gathered.taken(reached)):
        assert (one is None) == (want is None)
        if want is not None:
            assert torch.equal(one, want)
            assert torch.equal(again, -want)
    for other in ([*found[:3], None, found[4]], [found[0].double(), *found[1:]]):
        with pytest.raises(CannotCapture, match="changes from call to call"):
            gathered.fill(other)


def test_parameters_over_the_same_memory_have_no_place():
    weight = torch.randn(4, 4)
    like = [weight, weight.view(4, 4), torch.randn(3)]
    with Gathered(like, like, SharedMemory()).at_once():
        assert set(casting._state.places) == {like[2].data_ptr()}
