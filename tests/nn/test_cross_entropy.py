"""The cross-entropy of captured steps against torch's own."""

from __future__ import annotations

import pytest
import torch

from sparseconv.nn.fused import cross_entropy
from sparseconv.nn.fused.cross_entropy import FasterLoss
from tests.cases import error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F = torch.nn.functional


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cross_entropy, "_has_kernels", lambda device: True)


def both(logits, target, **options):
    """Loss and the logits' gradient by torch in fp64, and by the kernels."""
    found = []
    for x in (logits.double(), logits):
        x = x.detach().requires_grad_()
        if x.dtype == torch.float32:
            with FasterLoss():
                loss = F.cross_entropy(x, target, **options)
            assert type(loss.grad_fn).__name__ == "_CrossEntropyBackward"
        else:
            loss = F.cross_entropy(x, target, **options)
        found.append((loss.detach(), *torch.autograd.grad(3 * loss, x)))
    return found


@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (7, 3), (700, 20), (300, 33), (40, 256)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_that_of_torch(rows, classes, reduction):
    gen = torch.Generator().manual_seed(rows)
    logits = (10 * torch.randn(rows, classes, generator=gen)).to(DEVICE)
    target = torch.randint(0, classes, (rows,), generator=gen).to(DEVICE)
    target[rows // 2 + 1 :: 3] = -7
    want, got = both(logits, target, ignore_index=-7, reduction=reduction)
    for a, b in zip(got, want, strict=True):
        assert error(a, b.cpu()) < 1e-5
    assert bool((got[1][target == -7] == 0).all())


def test_no_row_with_a_loss_and_a_target_that_is_no_class():
    logits, target = torch.randn(5, 3, device=DEVICE), torch.full((5,), -100, device=DEVICE)
    want, got = both(logits, target)
    assert bool(got[0].isnan())
    assert bool(want[0].isnan())
    assert torch.equal(got[1], want[1].float())
    with FasterLoss():
        assert bool(F.cross_entropy(logits, target + 103).isnan())


def test_a_second_derivative_is_that_of_torch():
    logits, target = torch.randn(6, 4, device=DEVICE), torch.arange(6, device=DEVICE) % 4
    second = []
    for mode in (FasterLoss, torch.no_grad):
        x = logits.clone().requires_grad_()
        if mode is FasterLoss:
            with mode():
                loss = F.cross_entropy(x, target)
        else:
            loss = F.cross_entropy(x, target)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        second.append(torch.autograd.grad(grad.square().sum(), x)[0])
    assert torch.allclose(*second, atol=1e-6)


def test_what_the_kernels_do_not_serve_is_torch_s():
    logits, target = torch.randn(6, 4, device=DEVICE), torch.arange(6, device=DEVICE) % 4
    weight = torch.rand(4, device=DEVICE)
    options = [{"weight": weight}, {"reduction": "none"}, {"label_smoothing": 0.1}]
    cases = [(logits, target, option) for option in options]
    cases += [(logits.double(), target, {}), (logits.T[None], target[None], {}), (logits, logits.softmax(1), {})]
    for x, wanted, option in cases:
        with FasterLoss():
            got = F.cross_entropy(x, wanted, **option)
        assert torch.equal(got, F.cross_entropy(x, wanted, **option))
        with FasterLoss():
            assert torch.equal(torch.nn.CrossEntropyLoss(**option)(x, wanted), got)
