"""The cross-entropy of captured steps, which is summed by rows, against torch's own."""

from __future__ import annotations

import pytest
import torch

from sparseconv.nn.captured_step import LossByRows, cross_entropy_by_rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F = torch.nn.functional


def derivatives(function, logits, target, **options):
    x = logits.detach().requires_grad_()
    loss = function(x, target, **options)
    (grad,) = torch.autograd.grad(3 * loss, x, create_graph=True)
    return loss, grad, torch.autograd.grad(grad.square().sum(), x)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (7, 3), (700, 20), (40, 300)])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": -7}])
def test_equals_that_of_torch(device, rows, classes, options):
    gen = torch.Generator().manual_seed(rows)
    logits = (10 * torch.randn(rows, classes, generator=gen, dtype=torch.float64)).to(device)
    target = torch.randint(0, classes, (rows,), generator=gen).to(device)
    target[rows // 2 + 1 :: 3] = options.get("ignore_index", -100)
    got, want = (derivatives(f, logits, target, **options) for f in (cross_entropy_by_rows, F.cross_entropy))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    with LossByRows():
        assert torch.allclose(F.cross_entropy(logits, target, **options), want[0])


def test_no_row_with_a_loss_gives_nan_as_torch_does():
    logits, target = torch.randn(5, 3), torch.full((5,), -100)
    assert bool(cross_entropy_by_rows(logits, target).isnan())
    assert float(cross_entropy_by_rows(logits, target, reduction="sum")) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_other_arguments_are_those_of_torch(device):
    logits, target = torch.randn(6, 4, device=device), torch.arange(6, device=device) % 4
    options = [{"weight": torch.rand(4, device=device)}, {"reduction": "none"}, {"label_smoothing": 0.1}]
    cases = [(logits, target, option) for option in options]
    cases += [(logits.T[None], target[None], {}), (logits, logits.softmax(1), {})]
    for x, wanted, option in cases:
        want = F.cross_entropy(x, wanted, **option)
        assert torch.equal(cross_entropy_by_rows(x, wanted, **option), want)
        with LossByRows():
            assert torch.equal(torch.nn.CrossEntropyLoss(**option)(x, wanted), want)
