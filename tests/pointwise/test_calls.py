"""Calls: outputs given by keyword, errors, layouts of twins, autocast, torch.compile, transforms."""

from __future__ import annotations

import copy as copies

import pytest
import torch
import torch.nn.functional as F

import sparseconv.pointwise as pw
from sparseconv.pointwise import Epilogue, StridedBuffer, pointwise_dynamic
from sparseconv.pointwise.operations import arithmetic as arith
from tests.forked import printed
from tests.pointwise.cases import UNARY, Unary, assert_close

three = pointwise_dynamic(
    lambda x, y, a: (x, y),
    name="pair",
    is_tensor=[True, True, False],
    dtypes=[None, None, int],
    promotion_methods=[(0, 1, "DEFAULT"), (0, "DEFAULT")],
    reference=lambda x, y, a: (x + a * y, x - y[..., :1]),
)


def test_importing_the_room_and_running_twins_loads_no_triton():
    code = (
        "import sys, torch, sparseconv.pointwise as pw; pw.relu(torch.ones(2)); pw.batch_affine; "
        "x = torch.ones(2, requires_grad=True); pw.gelu(x).sum().backward(); "
        "sys.exit(any(m in sys.modules for m in ('triton', 'cupy')))"
    )
    printed("-c", code)


def test_the_room_names_what_it_has():
    assert set(pw.__all__) <= set(dir(pw))
    with pytest.raises(AttributeError, match="no attribute 'swish'"):
        pw.swish
    for name in pw.__all__:
        assert getattr(pw, name) is not None


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda x: three(x, x), TypeError, "takes 3 positional arguments, but got 2"),
        (lambda x: three(x, x, 1, 2), TypeError, "but got 4"),
        (lambda x: three(x, 2.0, 1), TypeError, "argument 1 is a tensor, but got float 2.0"),
        (lambda x: three(x, x, 0.5), TypeError, r"argument 2 is a number \(int\)"),
        (lambda x: three(x, x, x), TypeError, "argument 2 is a number"),
        (lambda x: three(x, x, 1, output=x), TypeError, "unknown keyword 'output'; it knows out0, out1"),
        (lambda x: three(x, x, 1, out=x), TypeError, "has 2 outputs: say out0="),
        (lambda x: three(x, x, 1, out2=x), TypeError, "unknown keyword 'out2'"),
        (lambda x: pw.relu(x, out=x.clone(), out0=x.clone()), TypeError, "the same output"),
        (lambda x: pw.relu(x, out=[1]), TypeError, "takes a tensor"),
        (lambda x: pw.relu(x, out=x[:1]), ValueError, r"out0= has shape \(1, 3\), but the result has shape \(2, 3\)"),
        (lambda x: pw.relu(x, out=torch.empty(2, 3, dtype=torch.int32)), TypeError, "cannot be cast"),
        (lambda x: pw.relu(x, out=torch.empty(2, 3, device="meta")), ValueError, "is on meta"),
        (lambda x: pw.relu(x, out=torch.empty(1, 3).expand(2, 3)), ValueError, "share one address"),
        (lambda x: pw.relu(x, out=torch.empty(4).as_strided((2, 3), (1, 1))), ValueError, "share one address"),
        (lambda x: three(x, x, 1, out0=(y := x.clone()), out1=y), ValueError, "given for two outputs"),
        (lambda x: three(x, torch.empty(4), 1), ValueError, "do not broadcast"),
        (lambda x: pw.add(x, torch.empty(2, 3, device="meta")), ValueError, "on one device"),
        (lambda x: pw.relu.instantiate(2)(x), TypeError, "out0="),
        (lambda x: pw.relu.instantiate(-1), ValueError, "rank of 0 or more"),
        (lambda x: pw.relu.instantiate(1)(x, out0=x), ValueError, "for rank 1"),
        (lambda x: pw.clamp(x), ValueError, "needs a bound"),
        (lambda x: pw.dropout(x, 1.5, seed=0), ValueError, "probability"),
        (lambda x: pw.dropout(x.int(), 0.5, seed=0), TypeError, "floating dtype"),
        (lambda x: pw.where(x, x, x), TypeError, "bool tensor"),
        (lambda x: pw.swiglu(x), ValueError, "halves the last axis"),
        (lambda x: pw.flip(x, [2]), ValueError, "out of range"),
        (lambda x: pw.flip(x, [0, -2]), ValueError, "named twice"),
        (lambda x: pw.batch_affine(x, torch.zeros(3, dtype=torch.int32), x), ValueError, "batch_index"),
        (lambda x: pw.batch_affine(x, torch.zeros(2), x), TypeError, "int32 or int64"),
        (lambda x: pw.batch_affine(x, torch.zeros(2, dtype=torch.int32), x[:, :2]), ValueError, "scale is"),
        (lambda x: pw.bias_activation(x, x, x, activation=pw.relu, order="between"), ValueError, "residual is"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_runs(call, kind, words):
    with pytest.raises(kind, match=words):
        call(torch.ones(2, 3))


def test_an_item_below_0_is_not_counted_from_the_end():
    """Its forward would take the last item, and its gradient would leave it out."""
    for item in (-1, 2):
        with pytest.raises(IndexError):
            pw.batch_affine(torch.ones(2, 1), torch.tensor([item, 0]), torch.ones(2, 1), torch.ones(2, 1))


def test_overlap_of_an_output_with_an_argument():
    x = torch.arange(6.0)
    with pytest.raises(ValueError, match="shares memory with argument 0"):
        pw.relu(x[:4], out=x[1:5])
    with pytest.raises(ValueError, match="shares memory with argument 0"):
        pw.relu(x.view(2, 3)[:1].expand(2, 3), out=x.view(2, 3))
    with pytest.raises(ValueError, match="shares memory"):
        arith.copy(StridedBuffer(x, strides=(-1,), offset=5), out=x)
    y = torch.arange(-6.0, 6.0)
    pw.relu(y[::2], out=y[1::2])  # neighbours that never meet
    assert torch.equal(y[1::2], y[::2].relu())
    pw.add(y[:6], y[6:], out=y[:6])


def test_outputs_by_keyword_are_written_and_returned():
    x = torch.randn(3, 4)
    for name in ("out", "out0"):
        out = torch.full((4, 3), float("nan")).t()
        assert pw.relu(x, **{name: out}) is out
        assert torch.equal(out, x.relu())
    assert torch.equal(pw.relu(x, out=None), x.relu())
    half = torch.empty(3, 4, dtype=torch.float16)
    assert torch.equal(pw.relu(x, out=half), x.relu().half())
    out1 = torch.empty(3, 4)
    first, second = three(x, x, 2, out1=out1)
    assert second is out1
    assert torch.equal(first, 3 * x)
    scaled = pw.mul(x, 2.0, out=x)
    assert scaled is x


def test_outputs_by_keyword_are_not_differentiable():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match="not differentiable"):
        pw.relu(x, out=torch.empty(3))
    with torch.no_grad():
        assert pw.relu(x, out=x) is x


def test_a_function_without_a_twin_says_so_on_the_cpu(monkeypatch):
    bare = pointwise_dynamic(lambda x: x, name="bare", promotion_methods=[(0, "DEFAULT")])
    monkeypatch.setattr(type(bare.scalar_function), "interpreted", property(lambda self: False))
    with pytest.raises(TypeError, match="bare has no reference="):
        bare(torch.ones(2))
    with pytest.raises(ValueError, match="neither derivative= nor reference="):
        bare(torch.ones(2, requires_grad=True))


def test_a_twin_that_gives_the_wrong_number_of_outputs_is_an_error():
    wrong = pointwise_dynamic(lambda x: x, name="wrong", promotion_methods=[(0, "DEFAULT")], reference=lambda x: (x, x))
    with pytest.raises(ValueError, match="gave 2 outputs, but 1 are declared"):
        wrong(torch.ones(2))


def test_a_twin_that_returns_its_argument_or_a_smaller_result_gives_a_fresh_full_output():
    identity = pointwise_dynamic(lambda x: x, name="same", promotion_methods=[(0, "DEFAULT")], reference=lambda x: x)
    x = torch.randn(3, 2).t()
    y = identity(x)
    assert y.data_ptr() != x.data_ptr()
    assert torch.equal(x, y)
    assert y.stride() == x.stride()
    first, second = three(torch.randn(4, 1), torch.randn(3), 1)
    assert first.shape == second.shape == (4, 3)
    view = pointwise_dynamic(
        lambda x: x, name="view", promotion_methods=[(0, "DEFAULT")], reference=lambda x: x.view(x.shape)
    )
    z = torch.randn(3)
    assert view(z).data_ptr() != z.data_ptr()


def test_dense_and_zero_dimensional_arguments():
    assert pw.add(torch.tensor(2.0), torch.tensor(3)).item() == 5.0
    assert pw.add(torch.ones(2, dtype=torch.float16), torch.tensor(3.0, dtype=torch.float64)).dtype is torch.float16
    assert pw.relu(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("case", UNARY, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_dtypes_are_torchs(case: Unary, dtype):
    x = torch.randn(4, 3).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert case.ours(x, *case.numbers).dtype == case.torch(x, *case.numbers).dtype


def test_autocast_to_a_dtype_of_ones_own():
    exact = pointwise_dynamic(
        lambda x: x, name="exact", promotion_methods=[(0, "DEFAULT")], reference=torch.exp, autocast=torch.float32
    )
    x = torch.randn(3).bfloat16()
    assert exact(x).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert exact(x).dtype is torch.float32
        assert torch.compile(exact, backend="eager", fullgraph=True)(x).dtype is torch.float32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_graph_break(backend):
    fused = pw.chain(Epilogue(pw.elu, (0.5,)))

    def network(x, bias, residual):
        y = pw.bias_activation(x, bias, residual, activation=pw.silu)
        y = fused(y, bias)
        y = pw.dropout(pw.mul(pw.gelu(y), 1.5), 0.2, seed=3)
        return pw.swiglu(pw.softplus(y, 1.5))

    args = [torch.randn(5, 4, requires_grad=True), torch.randn(4, requires_grad=True), torch.randn(5, 4)]
    compiled = torch.compile(network, backend=backend, fullgraph=True)
    plain, traced = network(*args), compiled(*args)
    assert_close(traced, plain)
    plain.square().sum().backward()
    expected = [a.grad.clone() for a in args[:2]]
    for a in args[:2]:
        a.grad = None
    traced.square().sum().backward()
    for a, grad in zip(args, expected):
        assert_close(a.grad, grad, factor=4)


def test_compiled_in_place():
    def step(x):
        pw.relu(x, out=x)
        return pw.add(x, 1.0)

    x = torch.randn(6)
    y = x.clone()
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(y))
    assert torch.equal(x, y)


def test_compiled_with_sizes_that_change():
    compiled = torch.compile(lambda x, y: pw.add(pw.relu(x), y), backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 9, 12):
        x, y = torch.randn(n, 3), torch.randn(3)
        assert torch.equal(compiled(x, y), x.relu() + y)


@pytest.mark.parametrize("name", ["relu", "gelu", "softplus", "add", "where", "pair", "dropout", "batch_affine"])
def test_opcheck(name):
    from sparseconv.pointwise.operations import batch, seeded

    x = torch.randn(4, 3, requires_grad=True)
    y = torch.randn(3, 4, requires_grad=True).t()
    table = torch.randn(2, 3, requires_grad=True)
    item = torch.tensor([[0], [1], [1], [0]], dtype=torch.int32)
    function, args = {
        "relu": (pw.relu, (x,)),
        "gelu": (pw.gelu, (y,)),
        "softplus": (pw.softplus, (x, 1.5, 20.0)),
        "add": (arith.add_tensors, (x, y, 1)),
        "where": (arith.select, (x > 0, x, y)),
        "pair": (three, (x, y, 2)),
        "dropout": (seeded.seeded_dropout, (x, 0.5, 3)),
        "batch_affine": (batch.affine, (x, item, table, table)),
    }[name]
    torch.library.opcheck(function.op, args)


def _same_as_a_loop(function, dims, *args):
    size = next(arg.shape[dim] for arg, dim in zip(args, dims) if dim is not None)
    items = [
        function(*(arg if dim is None else arg.select(dim, item) for arg, dim in zip(args, dims)))
        for item in range(size)
    ]
    found = torch.func.vmap(function, dims)(*args)
    several = isinstance(found, tuple)
    for one, many in zip(found if several else [found], zip(*items) if several else [items]):
        assert one.dtype == many[0].dtype
        assert_close(one, torch.stack(many))


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "softplus", "mish", "tanh"])
def test_batches_under_vmap(name):
    function, x = getattr(pw, name), torch.randn(4, 3, 5)

    def first(x):
        return torch.func.grad(lambda x: function(x).square().sum())(x)

    def second(x):
        return torch.func.grad(lambda x: first(x).square().sum())(x)

    for run in (function, first, second):
        for dim in (0, 2, -1):
            _same_as_a_loop(run, (dim,), x)
    assert torch.func.jacrev(function)(x).shape == x.shape * 2


def test_batches_of_some_arguments_under_vmap():
    x, y, z = torch.randn(4, 3, 5), torch.randn(5, 4), torch.randn(4, dtype=torch.float64)
    _same_as_a_loop(pw.add, (0, 1), x, y)
    _same_as_a_loop(pw.mul, (None, 2), x, y.reshape(1, 5, 4))
    _same_as_a_loop(pw.mul, (0, 0), x, z)  # a number of another dtype does not widen the vectors
    _same_as_a_loop(pw.mul, (0, 0), z.float(), z)
    _same_as_a_loop(pw.where, (0, None, 0), x > 0, x[1], x)
    _same_as_a_loop(lambda x: pw.dropout(x, 0.5, seed=7), (0,), x)
    _same_as_a_loop(lambda x: torch.func.vmap(pw.gelu)(x), (1,), x)
    _same_as_a_loop(lambda x, y: three(x, y, 2), (0, None), x, y[0, 0].expand(3, 5))


def test_under_a_function_transform():
    x = torch.randn(5)
    grad = torch.func.grad(lambda x: pw.silu(x).sum())(x)
    exact = torch.func.grad(lambda x: F.silu(x).sum())(x)
    assert_close(grad, exact)
    from torch._subclasses.fake_tensor import FakeTensorMode

    y = pw.add(torch.empty(4, 3, device="meta").t(), torch.empty(3, 1, device="meta", dtype=torch.float64))
    assert (y.shape, y.stride(), y.dtype, y.device.type) == ((3, 4), (1, 3), torch.float64, "meta")
    with FakeTensorMode():
        assert pw.relu(torch.empty(3, 4)).shape == (3, 4)


def test_parameters_and_copies():
    weight = torch.nn.Parameter(torch.randn(3))
    pw.relu(weight).sum().backward()
    assert torch.equal(weight.grad, (weight > 0).float())
    assert Epilogue(pw.relu) == copies.copy(Epilogue(pw.relu))
    assert "relu: 1 tensors" in repr(pw.relu)
