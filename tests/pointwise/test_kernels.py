"""Generated kernels against torch and against twins: shapes, strides, dtypes, promotion, views, several outputs."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings

import sparseconv.pointwise as pw
from sparseconv.pointwise import Config, StridedBuffer, pointwise_dynamic
from sparseconv.pointwise.operations import arithmetic as arith
from sparseconv.pointwise.operations import batch, gated, seeded
from tests.backends.test_triton_ahead_of_time import PLAIN
from tests.forked import printed
from tests.pointwise.cases import DEVICE, TOLERANCE, UNARY, Unary, assert_close, by_kernel, needs_kernels
from tests.pointwise.test_layout import tensors

# Where a GPU quietly gives inf or nan, numpy, in the interpreter, warns.
pytestmark = [needs_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def filled(view: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of random values with the shape and strides of a view."""
    rows = [n if s else 1 for n, s in zip(view.shape, view.stride())]
    span = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride()))
    values = torch.randn(max(span, 1), generator=torch.Generator().manual_seed(seed)) * 2
    base = values.to(dtype) if dtype.is_floating_point else (values * 3).round().to(dtype)
    assert len(rows) == view.dim()
    return base.to(DEVICE).as_strided(view.shape, view.stride())


@pytest.mark.parametrize("case", UNARY, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_unary_operations_are_torchs(case: Unary, dtype):
    x = (torch.randn(5, 33, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3).to(DEVICE, dtype)
    x = x[:, ::2].permute(2, 0, 1)
    got = by_kernel(case.ours)(x, *case.numbers)
    assert_close(got, case.torch(x.cpu().double(), *case.numbers), dtype)  # on a GPU torch's constants can be fp32
    assert got.dtype == dtype
    judge = torch.neg(x)
    assert got.stride() == judge.stride()
    twin = case.ours(x.cpu(), *case.numbers)
    assert_close(twin, got, dtype)
    assert (twin.dtype, twin.stride()) == (got.dtype, got.stride())


@pytest.mark.parametrize("case", UNARY, ids=lambda case: case.name)
def test_special_values(case: Unary):
    x = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 3e37], device=DEVICE
    )
    assert_close(by_kernel(case.ours)(x, *case.numbers), case.torch(x.double(), *case.numbers), factor=4)


@pytest.mark.parametrize("case", [c for c in UNARY if c.name in ("relu", "sigmoid", "tanh", "clamp", "copy", "scale")])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
def test_integers_are_promoted_as_torch_promotes_them(case: Unary, dtype):
    x = torch.arange(-7, 8, device=DEVICE).to(dtype)
    judge = case.torch(x, *case.numbers)
    got = by_kernel(case.ours)(x, *case.numbers)
    assert got.dtype == judge.dtype
    assert_close(got, judge)


@FEW
@given(
    tensors(),
    st.sampled_from([torch.bool, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]),
    st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from(["add", "mul", "div", "where"]),
    st.sampled_from([1, 2]),
)
def test_binary_operations_over_shapes_strides_and_dtypes(views, first, second, name, tile_axes):
    if DEVICE == "cpu" and second is torch.bfloat16 and not first.is_floating_point:
        return  # the interpreter holds bfloat16 as bits and does not convert integers to it
    x, y = filled(views[0], first, 1), filled(views[1], second, 2)
    ours, judge = {
        "add": (arith.add_tensors, torch.add),
        "mul": (arith.multiply, torch.mul),
        "div": (arith.divide, torch.div),
        "where": (arith.select, lambda c, a, b: torch.where(c, a, b)),
    }[name]
    args = (x, y)
    if name == "where":
        args = (filled(views[0], torch.bool, 3), x, y)
    got = by_kernel(ours)(*args)
    exact = judge(*args)
    assert got.dtype == exact.dtype
    # torch's CPU kernels first copy an operand that they must convert; a copy of a broadcast view has strides of its
    # own, which then decide; on a card, as here, the view decides
    copied = DEVICE == "cpu" and any(t.dtype != exact.dtype and 0 in t.stride() for t in (x, y))
    assert copied or all(n == 1 or a == b for n, a, b in zip(got.shape, got.stride(), exact.stride()))
    if exact.dtype.is_floating_point:
        finite = exact.double().isfinite()
        assert_close(torch.where(finite, got, 0), torch.where(finite, exact, 0), factor=2)
    else:
        assert torch.equal(got, exact)
    plain = pointwise_dynamic(
        ours.scalar_function._given,
        is_tensor=list(ours.schema.is_tensor),
        promotion_methods=[(*rule.arguments, rule.kind) for rule in ours.schema.outputs],
        defaults=ours.defaults,
        config=Config(tile_axes=tile_axes, elements=16, columns=4),
        name=f"small_{name}",
    )
    assert torch.equal(by_kernel(plain)(*args).nan_to_num(7), got.nan_to_num(7))


@pytest.mark.parametrize("rank", range(9))
def test_ranks_zero_to_eight(rank):
    shape = [2, 3, 1, 2, 3, 2, 1, 2][:rank]
    x = torch.randn(shape, device=DEVICE)
    y = torch.randn(shape[1:], device=DEVICE).flip(0) if rank > 1 else torch.randn((), device=DEVICE)
    backwards = list(range(y.dim()))[::-1]
    y = y.permute(backwards).contiguous().permute(backwards)
    assert torch.equal(by_kernel(arith.multiply)(x, y), x * y)
    out = torch.full(shape, float("nan"), device=DEVICE)
    expanded = y.expand(shape)
    assert arith.multiply.instantiate(rank)(x, expanded, out0=out) is out
    assert torch.equal(out, x * y)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_empty_tensors(shape):
    x = torch.empty(shape, device=DEVICE)
    got = by_kernel(arith.add_tensors)(x, torch.ones((), device=DEVICE))
    assert got.shape == x.shape
    assert pw.relu(x).shape == x.shape
    assert arith.copy.instantiate(len(shape))(x, out0=x.clone()).shape == x.shape


def test_negative_strides():
    x = torch.arange(24.0, device=DEVICE).view(4, 6)
    for dims in ([0], [1], [0, 1]):
        view = arith.reversed_view(x, dims)
        assert torch.equal(by_kernel(arith.copy)(view), x.flip(dims))
        assert torch.equal(arith.copy(view), x.flip(dims))
        assert torch.equal(
            by_kernel(arith.add_tensors)(x.t(), StridedBuffer(x, (6, 4), (-1, -6), 23)), x.t() + x.flip(0, 1).t()
        )
        assert torch.equal(pw.flip(x, dims), x.flip(dims))
    out = torch.full((4, 6), float("nan"), device=DEVICE)
    arith.copy.instantiate(2)(arith.reversed_view(x, [0]), out0=out)
    assert torch.equal(out, x.flip(0))
    by_kernel(arith.copy)(x, out0=arith.reversed_view(out, [1]))
    assert torch.equal(out, x.flip(1))
    arith.copy(x, out=arith.reversed_view(out, [0]))
    assert torch.equal(out, x.flip(0))


def polar(magnitude, angle):
    return magnitude * tl.cos(angle), magnitude * tl.sin(angle)


try:
    import triton.language as tl
except ImportError:  # the tests of this file are skipped
    tl = None


def test_several_outputs():
    function = pointwise_dynamic(
        polar,
        num_outputs=2,
        promotion_methods=[((0, 1), "INT_TO_FLOAT"), (0, 1, "DEFAULT")],
        reference=lambda r, a: (r * torch.cos(a), r * torch.sin(a)),
    )
    r, a = torch.rand(3, 1, device=DEVICE), torch.rand(4, device=DEVICE)
    real, imaginary = by_kernel(function)(r, a)
    assert_close(real, r * torch.cos(a))
    assert_close(imaginary, r * torch.sin(a))
    out1 = torch.full((4, 3), float("nan"), device=DEVICE).t()
    real, given = by_kernel(function)(r, a, out1=out1)
    assert given is out1
    assert_close(out1, imaginary)
    assert_close(function(r, a)[1], imaginary)


def affine(x, slope, offset):
    return x * slope + offset


def test_numbers_keep_fp64_where_the_operation_is_fp64():
    function = pointwise_dynamic(
        affine, is_tensor=[True, False, False], dtypes=[None, float, float], promotion_methods=[(0, "DEFAULT")]
    )
    x = torch.randn(50, dtype=torch.float64, device=DEVICE)
    slope, offset = 1 / 3, 1e-12
    assert torch.equal(by_kernel(function)(x, slope, offset), x * slope + offset) or torch.allclose(
        by_kernel(function)(x, slope, offset), x * slope + offset, rtol=1e-15, atol=0
    )
    assert_close(by_kernel(function)(x.half(), slope, offset), x.half().float() * slope + offset, torch.float16)


def shifted(x, steps):
    return x + steps


def test_undeclared_numbers_keep_their_kind():
    function = pointwise_dynamic(shifted, is_tensor=[True, False], promotion_methods=[(0, 1, "DEFAULT")])
    x = torch.arange(4, device=DEVICE)
    large = 2**53 + 1
    assert torch.equal(by_kernel(function)(x, large), x + large)
    assert by_kernel(function)(x, 0.5).dtype is torch.float32
    if DEVICE == "cpu" and triton.__version__.startswith("3.7."):
        return  # whose interpreter keeps True in 32 bits and refuses that as one
    assert by_kernel(function)(x > 2, True).dtype is torch.bool
    assert len(function.instantiate(1)._kernels) == 3


def difference(x, y):
    return x == y


def test_comparisons_give_bools():
    function = pointwise_dynamic(difference, promotion_methods=[(0, 1, "ALWAYS_BOOL")])
    x, y = torch.arange(5, device=DEVICE), torch.tensor(3.0, device=DEVICE)
    assert torch.equal(by_kernel(function)(x, y), x == y)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("transposed", [False, True])
def test_gathered_arguments(index_dtype, transposed):
    x = torch.randn(37, 5, device=DEVICE)
    x = x.t().contiguous().t() if transposed else x
    item = torch.randint(0, 3, (37,), generator=torch.Generator().manual_seed(0)).to(DEVICE, index_dtype)
    scale, shift = torch.randn(3, 10, device=DEVICE)[:, ::2], torch.randn(3, 5, device=DEVICE)
    got = by_kernel(batch.affine)(x, item[:, None], scale, shift)
    assert_close(got, x * scale[item.long()] + shift[item.long()])
    assert_close(by_kernel(batch.batch_scale)(x, item[:, None], scale), x * scale[item.long()])
    assert_close(pw.batch_affine(x, item, scale, shift), got)


@pytest.mark.parametrize("strides", ["rows", "columns", "gaps"])
def test_dropout_depends_on_seed_and_position_alone(strides):
    x = torch.randn(40, 12, device=DEVICE)
    view = {"rows": x, "columns": x.t().contiguous().t(), "gaps": x.repeat_interleave(2, 1)[:, ::2]}[strides]
    for seed in (0, 7, 2**40 + 5, -3):
        got = by_kernel(seeded.seeded_dropout)(view, 0.3, seed)
        twin = seeded.seeded_dropout.twin([x.cpu(), 0.3, seed])[0]
        assert torch.equal(got.cpu(), twin)
    assert torch.equal(by_kernel(seeded.seeded_dropout)(view, 1.0, 1), torch.zeros_like(view))


def test_gradient_kernels_agree_with_their_twins():
    from sparseconv.pointwise.operations import activations

    x, g, h = (torch.randn(9, 4, dtype=torch.float64, device=DEVICE) * 2 for _ in range(3))
    for room in (activations, arith, gated):
        for function in vars(room).values():
            if not isinstance(function, pw.PointwiseDynamicFunction):
                continue
            given = iter((g, x, h))
            args = [next(given) if flag else 0.4 for flag in function.schema.is_tensor]
            got = by_kernel(function)(*args)
            assert_close(
                got, function.twin([a.cpu() if isinstance(a, torch.Tensor) else a for a in args])[0], factor=20
            )


def test_chains_are_one_kernel():
    from sparseconv.pointwise.operations import chain

    x, r = torch.randn(6, 4, device=DEVICE), torch.randn(6, 4, device=DEVICE)
    bias = torch.randn(4, device=DEVICE)
    slope = pw.Epilogue(pw.leaky_relu, (0.3,))
    leaky = torch.nn.functional.leaky_relu
    assert_close(by_kernel(chain(slope))(x, bias), leaky(x + bias, 0.3))
    assert_close(by_kernel(chain(slope, residual="before"))(x, bias, r), leaky(x + bias + r, 0.3))
    assert_close(by_kernel(chain(slope, residual="after"))(x, bias, r), leaky(x + bias, 0.3) + r)
    assert_close(by_kernel(chain(slope, bias=False, residual="after"))(x, r), leaky(x, 0.3) + r)


def test_a_given_output_is_written_through_its_own_strides_and_nowhere_else():
    memory = torch.full((8, 10), float("nan"), device=DEVICE)
    out = memory[1::2, 2:9:3]
    x = torch.randn(4, 3, device=DEVICE)
    assert by_kernel(arith.copy)(x, out=out) is out
    assert torch.equal(out, x)
    out.fill_(float("nan"))
    assert memory.isnan().all()


def test_in_place():
    x = torch.randn(7, 3, device=DEVICE)
    expected = x.relu()
    assert by_kernel(pw.relu)(x, out0=x) is x
    assert torch.equal(x, expected)
    y = torch.randn(3, 3, device=DEVICE)
    version = y._version
    expected = y + 2.0
    assert pw.add(y, 2.0, out=y) is y
    assert torch.equal(y, expected)
    assert y._version > version


@pytest.mark.slow
@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    x = torch.zeros(2**31 + 37, dtype=torch.int8, device="cuda")
    x[-1] = 3
    got = pw.add(x, 1)
    assert got[-1].item() == 4
    assert got.sum(dtype=torch.int64).item() == x.numel() + 3


def test_addresses_beyond_32_bits_are_computed_in_64():
    found = arith.copy.instantiate(1)
    x = torch.randn(4, device=DEVICE)
    from sparseconv.pointwise.kernel.launch import task_space

    space = task_space(arith.copy.schema, (x,), (x,), (4,), [(2**31,), (2**31,)], Config())
    launch = found.prepare(
        (x,),
        (x,),
        space,
        __import__("sparseconv.pointwise.metadata", fromlist=["m"]).dtypes_of(arith.copy.schema, (x,)),
    )
    assert str(launch.tail[3]) in ("int64", "i64")


def _compile_ahead(names: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"SPARSECONV_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    printed("-m", "tests.pointwise.compile_ahead", *names, folder=Path(__file__).parents[2], env=environment)


def test_kernels_compile_ahead_of_time(tmp_path):
    """What the interpreter lets pass and the compiler does not shows here."""
    _compile_ahead(["add", "select", "dropout", "batch_affine", "gelu"], tmp_path)


@pytest.mark.slow
def test_every_kernel_of_the_library_compiles_ahead_of_time(tmp_path):
    _compile_ahead([], tmp_path)


@pytest.mark.slow
def test_kernels_compile_for_other_cards(tmp_path):
    targets = ["80", "86", "89", "100", "120", *map(str, PLAIN)]
    _compile_ahead(["add", "select", "dropout", "batch_affine", "gelu", *targets], tmp_path)


def test_bools_have_no_difference():
    yes, number = torch.tensor([True, False], device=DEVICE), torch.tensor([1, 2], device=DEVICE)
    for x, y in ((yes, yes), (yes, number), (number, yes), (yes, 1), (number, True)):
        with pytest.raises(TypeError, match="bool tensors cannot be subtracted"):
            pw.sub(x, y)
        with pytest.raises(RuntimeError, match="Subtraction"):
            torch.sub(x, y)
    assert pw.add(yes, yes).tolist() == [True, False]
