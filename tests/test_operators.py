"""The registered operators, called by anybody: what they check by themselves, and whose maps they run on."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
from sparseconv.autograd import edges_tensor
from tests.cases import Case, build, random_grid

REFUSED = (ValueError, TypeError, RuntimeError)
OPS = torch.ops.sparseconv


def setting():
    """A map with more outputs than inputs, and operands of the operators by name."""
    grid = random_grid(Case("any", voxels=40, extent=6))
    plan = sc.ConvolutionPlan(grid, 2, target="full", groups=2)
    edges, rows, taps = edges_tensor(plan.kernel_map), plan.kernel_map.num_out, plan.num_taps
    x, g, w, b = (torch.randn(*s) for s in ((len(grid), 8), (rows, 12), (taps, 4, 12), (12,)))
    convolution = dict(x=x, weight=w, bias=b, edges=edges, groups=2, adjoint=False, backend="auto")
    adjoint = convolution | dict(x=g, bias=None, adjoint=True)
    gradient = dict(x=x, grad=g, edges=edges, taps=taps, groups=2, backend="auto")
    return plan, {"convolution": convolution, "adjoint": adjoint, "weight_gradient": gradient}


def operator(name):
    return getattr(OPS, "convolution" if name == "adjoint" else name)


#: of each operator, arguments that fit nothing, made of those that fit
BAD = {
    "rows_short": ("x", lambda v: v[:5]),
    "rows_long": ("x", lambda v: torch.cat([v, v])),
    "flat": ("x", lambda v: v.flatten()),
    "channels": ("x", lambda v: v[:, :-1]),
    "double": ("x", torch.Tensor.double),
    "integers": ("x", torch.Tensor.long),
    "elsewhere": ("x", lambda v: v.to("meta")),
    "sparse": ("x", torch.Tensor.to_sparse),
    "weight_taps": ("weight", lambda v: v[:-1]),
    "weight_flat": ("weight", lambda v: v[0]),
    "weight_channels": ("weight", lambda v: v[:, :1]),
    "weight_half": ("weight", torch.Tensor.half),
    "bias_long": ("bias", lambda v: torch.ones(7)),
    "bias_double": ("bias", lambda v: torch.ones(12, dtype=torch.float64)),
    "grad_rows": ("grad", lambda v: v[:-1]),
    "grad_channels": ("grad", lambda v: v[:, :-1]),
    "grad_half": ("grad", torch.Tensor.half),
    "groups": ("groups", lambda v: 5),
    "no_groups": ("groups", lambda v: 0),
    "taps": ("taps", lambda v: v + 1),
    "map": ("edges", torch.empty_like),
    "copy_of_a_map": ("edges", torch.clone),
    "backend": ("backend", lambda v: "no such"),
}


@pytest.mark.parametrize("backend", ["auto", "numpy_gather_scatter", "llvm_implicit_gemm"])
@pytest.mark.parametrize("name", ["convolution", "adjoint", "weight_gradient"])
def test_an_operator_checks_its_operands(name, backend):
    _, operands = setting()
    fits = operands[name] | {"backend": backend}
    result = operator(name)(**fits)
    assert bool(result.isfinite().all())
    for what, (argument, spoil) in BAD.items():
        if fits.get(argument) is None and not (name == "adjoint" and argument == "bias"):
            continue
        if (name, what) == ("adjoint", "weight_channels"):
            continue  # the adjoint's result is then narrower
        given = fits | {argument: spoil(fits[argument])}
        for leaf in (False, True):
            tensors = {k: v.clone().requires_grad_(leaf and v.is_floating_point()) for k, v in given.items()
                       if isinstance(v, torch.Tensor)}  # fmt: skip
            with pytest.raises(REFUSED):
                print(what, operator(name)(**(given | tensors)))
    if name == "adjoint":
        with pytest.raises(ValueError, match="must be None for the adjoint"):
            operator(name)(**fits | {"bias": torch.ones(12)})


def test_a_compiled_program_checks_its_operands():
    _, operands = setting()
    given = operands["convolution"]
    x = given.pop("x")
    run = torch.compile(lambda x: OPS.convolution(x, **given), backend="aot_eager")
    assert run(x).shape == (given["edges"].shape[1], 12)
    with pytest.raises(REFUSED):
        run(x[:5])


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused_in_words(strict):
    plan = build(Case("any", voxels=40, extent=6, c_in=4, c_out=4))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(plan.num_taps, 4, 4))

        def forward(self, x):
            return plan.execute(x, self.weight)

    with pytest.raises(Exception, match=r"torch\.export cannot store a kernel map"):
        torch.export.export(Net(), (torch.ones(plan.num_in, 4),), strict=strict)
