"""Integer convolutions: every backend against the oracle, bounds, ties, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import sparseconv as sc
from sparseconv.backends.integers import Rescale, check_bound, rescaled
from sparseconv.backends.llvm_implicit_gemm import backend as engine
from sparseconv.backends.registry import backend
from sparseconv.quantization import convolve
from tests import oracle
from tests.fuzz import integers as fuzz
from tests.quantization.integer_cases import hashes

BACKENDS = ("llvm_implicit_gemm", "numpy_gather_scatter", "triton_implicit_gemm")
I8, I32 = torch.int8, torch.int32


def bytes_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=I8)


def line(voxels: int = 4, **options) -> sc.ConvolutionPlan:
    coords = torch.stack([torch.zeros(voxels), torch.arange(voxels)], 1).int().to(home(options.get("backend")))
    return sc.ConvolutionPlan(sc.VoxelGrid(coords, 1), 3, **options)


def home(name: str | None) -> str:
    """The device of a backend: Triton's is the card where there is one."""
    return "cuda" if name == "triton_implicit_gemm" and torch.cuda.is_available() else "cpu"


def at_home(name: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(home(name)) for tensor in tensors]


@pytest.mark.parametrize("number", range(40))
def test_random_layers_are_the_oracles_bytes(number):
    assert fuzz.run(11, number) == ""


def test_a_difference_is_seen(monkeypatch):
    plain = oracle.integer_rescale
    monkeypatch.setattr(oracle, "integer_rescale", lambda *numbers: plain(*numbers) ^ 1)
    assert any(fuzz.run(11, number) for number in range(5))


@pytest.mark.parametrize("name", BACKENDS)
def test_ties_go_up(name):
    plan = line(5, backend=name)
    x = torch.tensor([[-3], [-1], [1], [3], [5]], dtype=I8)
    weight = torch.tensor([[[0]], [[1]], [[0]]], dtype=I8)
    x, weight, multiplier = at_home(name, x, weight, torch.tensor([1 << 19], dtype=I32))
    halves = Rescale(multiplier, 20)
    assert convolve(plan, x, weight, rescale=halves).flatten().tolist() == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("name", BACKENDS)
def test_the_largest_sums_that_are_allowed(name):
    """131,071 products of -128 and -128 are below 2^31; one more is refused."""
    channels = 131_071
    device = home(name)
    grid = sc.VoxelGrid(torch.zeros(1, 2, dtype=I32, device=device))
    plan = sc.ConvolutionPlan(grid, 1, backend=name)
    x = torch.full((1, channels), -128, dtype=I8, device=device)
    weight = torch.full((1, channels, 1), -128, dtype=I8, device=device)
    if name == "triton_implicit_gemm":
        x, weight, channels = x[:, :5000], weight[:, :5000], 5000  # the interpreter takes long
    assert convolve(plan, x, weight).tolist() == [[channels * 128 * 128]]
    numbers = Rescale(torch.tensor([2**31 - 1], dtype=I32, device=device), 62, 2**31 - 1)
    wanted = oracle.integer_rescale([[channels * 2**14]], [2**31 - 1], 62, torch.tensor([[127]]), 2**31 - 1)
    found = convolve(plan, x, weight, rescale=numbers, residual=torch.tensor([[127]], dtype=I8, device=device))
    assert found.tolist() == wanted.tolist()


def test_sums_past_32_bits_are_refused():
    check_bound(27, 4854)
    with pytest.raises(ValueError, match=r"27 taps of 4855 channels per group could sum up to .* past 2\^31 - 1"):
        check_bound(27, 4855)
    with pytest.raises(ValueError, match=r"past 2\^31 - 1"):
        convolve(line(), bytes_of(4, 1), bytes_of(3, 1, 1), torch.tensor([2**31 - 1], dtype=I32))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("voxels", [0, 1])
def test_few_voxels(name, voxels):
    plan = line(voxels, backend=name)
    weight, bias = bytes_of(3, 5, 7), torch.arange(7, dtype=I32)
    x, weight, bias = at_home(name, torch.zeros(voxels, 5, dtype=I8), weight, bias)
    assert convolve(plan, x, weight, bias).tolist() == bias.expand(voxels, 7).tolist()
    rescale = Rescale(torch.full((7,), 1 << 16, dtype=I32, device=x.device), 16)
    assert convolve(plan, x, weight, bias, rescale=rescale).tolist() == bias.expand(voxels, 7).tolist()


@pytest.mark.parametrize("name", BACKENDS)
def test_strides_do_not_matter(name):
    plan = line(6, backend=name)
    x, weight, residual = at_home(name, bytes_of(6, 8), bytes_of(3, 8, 8, seed=1), bytes_of(6, 8, seed=2))
    rescale = Rescale(torch.full((8,), 1 << 18, dtype=I32, device=x.device), 26, 1 << 25, low=0)
    want = convolve(plan, x, weight, rescale=rescale, residual=residual)
    turned = [t.mT.contiguous().mT for t in (x, weight, residual)]
    multiplier = rescale.multiplier.repeat_interleave(2)[::2]
    other = dataclasses.replace(rescale, multiplier=multiplier)
    assert torch.equal(convolve(plan, turned[0], turned[1], rescale=other, residual=turned[2]), want)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("slope", "low"), [(1 << 16, -127), (1 << 16, 0), (0, 0), (0, -127), (9_000, -127)])
def test_threads_that_share_chunks_have_sums_of_their_own(monkeypatch, residual, slope, low):
    """Of more rows than a chunk has, in several blocks of columns, in memory that holds anything."""
    monkeypatch.setattr(engine, "_threads", lambda multiplications: 3)
    monkeypatch.setattr(engine, "CHUNK", 1 << 10)
    monkeypatch.setattr(engine, "empty", lambda shape, dtype: torch.full(shape, 99, dtype=dtype))
    generator = torch.Generator().manual_seed(3)
    cells = torch.randperm(12**3, generator=generator)[:700]
    grid = sc.VoxelGrid(torch.stack([cells * 0, cells // 144, cells // 12 % 12, cells % 12], 1).int())
    x, weight = bytes_of(700, 12).abs(), bytes_of(27, 6, 42, seed=1)
    other = bytes_of(700, 42, seed=2) if residual else None
    bias = torch.randint(-(2**14), 2**14, (42,), generator=generator, dtype=I32)
    multiplier = torch.randint(2**25, 2**31, (42,), generator=generator).int()
    for shift in (24, 40, 62):
        rescale = Rescale(multiplier >> max(0, 40 - shift), shift, 2**shift // 3 % 2**31, slope, low)
        got, want = (
            convolve(
                sc.ConvolutionPlan(grid, 3, groups=2, backend=name), x, weight, bias, rescale=rescale, residual=other
            )
            for name in BACKENDS[:2]
        )
        assert torch.equal(got, want)


@pytest.mark.parametrize("slope", [0, 1, 6554, 65536])
def test_every_int8_value_is_rescaled_as_the_oracle_says(slope):
    x = torch.arange(-127, 128, dtype=I8)[:, None]
    low = 0 if slope == 0 else -127
    for multiplier, shift in ((1 << 21, 21), (1_234_567, 21), (4_000_000, 22), (3, 16), ((1 << 22) - 1, 16)):
        want = oracle.integer_rescale(x.numpy(), [multiplier], shift, slope=slope, low=low)
        assert rescaled([x], [multiplier], shift, slope, low).tolist() == want.tolist()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(4, 2)}, TypeError, "takes x in torch.int8; got torch.float32"),
        ({"weight": torch.zeros(3, 2, 3)}, TypeError, "takes weight in torch.int8"),
        ({"bias": torch.zeros(3)}, TypeError, "takes bias in torch.int32"),
        ({"bias": torch.zeros(2, dtype=I32)}, ValueError, r"need a bias \(3,\)"),
        ({"x": bytes_of(4, 3)}, ValueError, "do not take 3 channels"),
        ({"x": bytes_of(3, 2)}, ValueError, r"need x \(4, C_in\)"),
        ({"residual": torch.zeros(4, 3)}, TypeError, "takes residual in torch.int8"),
        ({"residual": bytes_of(4, 2)}, ValueError, r"a residual is \(4, 3\)"),
        ({"residual": bytes_of(4, 3), "rescale": None}, ValueError, "needs a rescale"),
        ({"rescale": Rescale(torch.ones(3), 20)}, TypeError, "a multiplier is int32"),
        ({"rescale": Rescale(torch.ones(2, dtype=I32), 20)}, ValueError, "need 3 multipliers"),
        ({"rescale": Rescale(torch.ones(3, dtype=I32), 15)}, ValueError, "a shift is 16 to 62 bits; got 15"),
        ({"rescale": Rescale(torch.ones(3, dtype=I32), 63)}, ValueError, "a shift is 16 to 62 bits; got 63"),
        ({"rescale": Rescale(torch.ones(3, dtype=I32), 20, 2**31)}, ValueError, "a residual's multiplier"),
        ({"rescale": Rescale(torch.ones(3, dtype=I32), 20, slope=-1)}, ValueError, "a slope is 0 to 65536"),
    ],
)
def test_wrong_operands_are_refused_before_anything_runs(change, error, words, monkeypatch):
    for name in BACKENDS:
        monkeypatch.setattr(type(backend(name)), "integers", lambda *a: pytest.fail("launched"))
    given = {"x": bytes_of(4, 2), "weight": bytes_of(3, 2, 3), "bias": None, "residual": None}
    given["rescale"] = Rescale(torch.ones(3, dtype=I32), 20)
    given |= change
    with pytest.raises(error, match=words):
        convolve(line(), given.pop("x"), given.pop("weight"), given.pop("bias"), **given)


def test_who_has_no_integers_says_so():
    with pytest.raises(ValueError, match="cupy_gather_scatter"):
        convolve(line(backend="cupy_gather_scatter"), bytes_of(4, 2), bytes_of(3, 2, 3))
    with pytest.raises(TypeError, match="floating"):
        line().execute(bytes_of(4, 2), bytes_of(3, 2, 3))


HASHES = json.loads(Path(__file__).with_name("integer_hashes.json").read_text())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_integer_layers_have_the_committed_hashes(device):
    assert dict(hashes(torch.device(device))) == HASHES


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_places_of_one_number_have_any_stride(name, sign):
    plan = line(1, backend=name)
    x = torch.full((3, 8), sign, dtype=I8, device=home(name)).as_strided((1, 8), (3, 1))
    weight = torch.arange(3 * 8 * 2, dtype=I8, device=home(name)).as_strided((3, 8, 1), (16, 2, 1))
    want = sign * weight[1].int().sum(0, keepdim=True)
    assert convolve(plan, x, weight).tolist() == want.tolist()
    assert convolve(plan, x, weight.mT.contiguous().mT).tolist() == want.tolist()
