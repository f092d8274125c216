"""Sparse tensors in arithmetic, under torch's own functions, and as an interpreter and a notebook show them."""

from __future__ import annotations

import base64
import copy
import pickle
import re
import zlib

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sparseconv as sc
from sparseconv.row_functions import ALONG, ELEMENTWISE, ELEMENTWISE_NAMES, LAST_AXIS_NAMES

COORDS = torch.tensor([[0, 1, 2, 0], [1, 0, 0, 5], [0, 4, -1, 3], [1, 2, 2, 2]])
GRID = sc.VoxelGrid(COORDS, batch_size=3)
EMPTY = sc.VoxelGrid(COORDS[:0], batch_size=2)


def tensor(grid: sc.VoxelGrid = GRID, channels: int = 3) -> sc.SparseTensor:
    gen = torch.Generator().manual_seed(7)
    return sc.SparseTensor(grid, torch.rand(len(grid), channels, generator=gen, dtype=torch.float64) + 0.5)


def rows(channels: int) -> torch.Tensor:
    return torch.linspace(0.3, 0.9, channels, dtype=torch.float64)


#: where torch keeps functions
HOMES = (torch, F, torch.Tensor, torch._C._nn)
#: a linear module of the tensors' dtype
EYE = torch.nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)

#: the same words for sparse tensors and for plain features
ARITHMETIC = {
    "a number": lambda x, y, v: 2 * x + 1 - x / 4 - (3 - x) + 1 / x + x**2 + 2**x,
    "a row of channels": lambda x, y, v: (x + v) * v - x / v + (v - x) + v / x + v**x,
    "a column of rows": lambda x, y, v: x * torch.full((len(x.coords) if hasattr(x, "coords") else len(x), 1), 2.0),
    "another": lambda x, y, v: x + y - x * y / (y**x) + -x,
    "a scalar tensor": lambda x, y, v: torch.tensor(2.0) * x,
    "one channel beside many": lambda x, y, v: x * v[:1],
    "relu": lambda x, y, v: torch.relu(x - 1),
    "gelu": lambda x, y, v: F.gelu(x),
    "softmax": lambda x, y, v: F.softmax(x, 1) + torch.softmax(x, dim=-1),
    "log_softmax": lambda x, y, v: F.log_softmax(x, dim=1),
    "normalize": lambda x, y, v: F.normalize(x),
    "glu": lambda x, y, v: F.glu(torch.cat([x, y], 1)),
    "cat": lambda x, y, v: torch.cat((x, y, x), dim=1),
    "where": lambda x, y, v: torch.where(v > 0.5, x, y),
    "maximum": lambda x, y, v: torch.maximum(x, y),
    "clamp": lambda x, y, v: torch.clamp(x, min=0.6, max=0.9),
    "lerp": lambda x, y, v: torch.lerp(x, y, 0.3),
    "linear": lambda x, y, v: F.linear(x, torch.outer(v, v), v),
    "matmul": lambda x, y, v: torch.matmul(x, torch.outer(v, v)),
    "layer_norm": lambda x, y, v: F.layer_norm(x, (len(v),)),
    "a module": lambda x, y, v: torch.nn.Softplus()(torch.nn.LeakyReLU()(x)),
    "a linear module": lambda x, y, v: (
        torch.nn.Linear(len(v), len(v), dtype=torch.float64).requires_grad_(False)(x) * 0
    ),
}


@pytest.mark.parametrize("grid", [GRID, EMPTY], ids=["voxels", "empty"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_words_for_features_are_words_for_tensors(name, grid):
    """The same values, voxels and gradients as on the plain features."""
    call, v = ARITHMETIC[name], rows(3).requires_grad_()
    x, y = tensor(grid).requires_grad_(), (tensor(grid) * 0.7).detach().requires_grad_()
    leaves = (x.features, y.features, v)
    got, want = call(x, y, v), call(x.features, y.features, v)
    assert isinstance(got, sc.SparseTensor)
    assert got.grid is grid
    assert torch.equal(got.features, want)
    if want.requires_grad:
        grads = [torch.autograd.grad(f.square().sum(), leaves, allow_unused=True) for f in (got.features, want)]
        for a, b in zip(*grads):
            assert a is b is None or torch.equal(a, b)


def test_gradients_are_right():
    features, v = tensor().features.clone().requires_grad_(), rows(3).requires_grad_()

    def loss(f, v):
        x = sc.SparseTensor(GRID, f)
        return torch.cat([F.gelu(x * v), 1 / x], 1).features

    assert torch.autograd.gradcheck(loss, (features, v))
    assert torch.autograd.gradgradcheck(loss, (features, v))


def test_dropout_is_torchs():
    x = tensor()
    torch.manual_seed(3)
    got = F.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(got.features, F.dropout(x.features, 0.5))
    assert F.dropout(x, 0.5, training=False).features.equal(x.features)


def test_every_listed_function_is_one_of_torch():
    assert [
        n for n in (*ELEMENTWISE_NAMES, *LAST_AXIS_NAMES, *ALONG) if not any(hasattr(home, n) for home in HOMES)
    ] == []
    assert len(ELEMENTWISE_NAMES) == len(ELEMENTWISE.split())


@pytest.mark.parametrize("name", sorted({n for n in ELEMENTWISE_NAMES if not n.startswith("__")}))
def test_listed_functions_of_one_operand_leave_rows_alone(name):
    """A row's result is that of the row alone, whatever the other rows hold."""
    call = next(getattr(home, name) for home in HOMES if hasattr(home, name))
    x, random = tensor(), {"dropout", "alpha_dropout", "bernoulli", "rand_like", "randn_like", "rrelu"}
    if name in random | {"where"}:
        return
    try:
        whole = call(x.features)
    except (TypeError, RuntimeError):
        return  # it takes more operands
    assert torch.allclose(call(x).features, whole, equal_nan=True)
    assert torch.allclose(torch.cat([call(row) for row in x.features.split(1)]), whole, equal_nan=True)


REFUSED = {
    "sum": (lambda x: torch.sum(x), "GlobalSumPool"),
    "mean along channels": (lambda x: torch.mean(x, 1), "x.features"),
    "rows of two": (lambda x: torch.cat([x, x]), "VoxelGrid.cat joins scenes"),
    "softmax over rows": (lambda x: torch.softmax(x, 0), "along channels here"),
    "softmax without an axis": (lambda x: F.softmax(x), "dim is None"),
    "batch norm": (lambda x: torch.nn.BatchNorm1d(3)(x), "sparseconv.nn.BatchNorm"),
    "layer norm over rows": (lambda x: F.layer_norm(x, (4, 3)), "a shape of one axis; got (4, 3)"),
    "a module's norm over rows": (lambda x: torch.nn.RMSNorm((4, 3))(x), "a shape of one axis; got (4, 3)"),
    "a dense convolution": (lambda x: torch.nn.Conv3d(3, 3, 3)(x), "SubmanifoldConv"),
    "mixing rows": (lambda x: torch.matmul(torch.ones(4, 4), x), "first argument alone"),
    "sort": (lambda x: torch.sort(x), "with_features"),
    "equal": (lambda x: torch.equal(x.features, x), "call it on x.features"),
    "a loss": (lambda x: F.mse_loss(x, x), "pass x.features"),
    "a list": (lambda x: x + [1.0, 2.0, 3.0], "got a list"),
    "None": (lambda x: x * None, "got None"),
    "an array": (lambda x: np.ones(3) * x, "got a numpy.ndarray"),
    "a sparse layout": (lambda x: x + torch.ones(4, 3).to_sparse(), "to_dense"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_mix_rows_is_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(TypeError, match=re.escape(words)):
        call(tensor())


@pytest.mark.parametrize("shape", [(4,), (2, 3), (4, 2), (1, 4, 3), (8, 1)])
def test_operands_that_would_change_rows_are_refused(shape):
    for call in (lambda x, t: x + t, lambda x, t: t * x, lambda x, t: torch.minimum(x, t)):
        with pytest.raises(ValueError, match=r"an operand beside features \(4, 3\)"):
            call(tensor(), torch.ones(shape))
    with pytest.raises(ValueError, match="fit in 64 bits"):
        tensor() + 10**30
    with pytest.raises(ValueError, match="an operand beside"):
        tensor(sc.VoxelGrid(COORDS[:1]), 1) + torch.ones(5, 1)


def test_a_number_a_row_is_no_row_of_channels_of_one_channel():
    """Which torch would broadcast to (N, N)."""
    scores, kept = tensor(channels=1), torch.tensor([True, False, True, True])
    for call in (lambda: scores * kept, lambda: torch.where(kept, scores, 0.0), lambda: kept + scores):
        with pytest.raises(ValueError, match=r"an operand beside features \(4, 1\)"):
            call()
    assert (scores * kept[:, None]).features[:, 0].tolist() == (scores.features[:, 0] * kept).tolist()
    assert (scores * torch.ones(1, 3)).shape == (4, 3)


def test_another_number_of_items_is_refused():
    """Else a + b would have one batch size and b + a another, and pools of whole items other rows."""
    x, more = tensor(), tensor(sc.VoxelGrid(GRID.coords, GRID.batch_size + 2))
    for call in (lambda: x + more, lambda: more.cat(x), lambda: torch.maximum(x, more)):
        with pytest.raises(ValueError, match="different voxels"):
            call()
    with pytest.raises(ValueError, match="the plan starts from"):
        sc.nn.SubmanifoldConv(3, 2, 3, rank=GRID.rank)(more, plan=sc.ConvolutionPlan(GRID, 3))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
def test_many_scenes_of_narrow_coordinates(dtype):
    joined = sc.SparseTensor.from_list([torch.tensor([[1, 2]], dtype=dtype)] * 300, [torch.ones(1, 1)] * 300)
    assert joined.coords[:, 0].tolist() == list(range(300))


def test_other_voxels_are_refused_and_equal_ones_accepted():
    x, twin = tensor(), tensor(sc.VoxelGrid(COORDS.clone(), batch_size=3))
    other = tensor(sc.VoxelGrid(COORDS.flip(0), batch_size=3))
    assert (x + twin).grid is x.grid
    for call in (
        lambda: x + other,
        lambda: other * x,
        lambda: torch.maximum(x, other),
        lambda: torch.cat([x, other], 1),
    ):
        with pytest.raises(ValueError, match="live on different voxels"):
            call()


def test_voxels_of_other_sizes_do_not_meet():
    """Equal indices at two strides are other places; where nobody has said a size, indices are all there is."""
    x, other = (tensor(sc.VoxelGrid(COORDS.clone(), 3, voxel_size=size)) for size in (0.1, 0.2))
    for call in (lambda: x + other, lambda: x.cat(other), lambda: torch.maximum(x, other)):
        with pytest.raises(ValueError, match="differ in voxel_size"):
            call()
    assert (x + tensor()).grid is x.grid
    assert (x + tensor(sc.VoxelGrid(COORDS.clone(), 3, voxel_size=0.1 * 3 / 3))).grid is x.grid


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.float32], ids=str)
def test_positions_are_no_coordinates_of_scenes(dtype):
    """Numbers of 16 bits would be cut off to integers, and nobody would know."""
    with pytest.raises(TypeError, match=r"coords\[1\] must be integers"):
        sc.SparseTensor.from_list([torch.tensor([[1]]), torch.tensor([[0.9]]).to(dtype)], [torch.ones(1, 1)] * 2)


def test_a_threshold_keeps_the_voxels():
    x = tensor()
    assert torch.equal(torch.nn.Threshold(0.5, -1.0)(x).features, F.threshold(x.features, 0.5, -1.0))


def test_dtypes_devices_and_history():
    x = tensor()
    assert x.half().dtype == torch.float16
    assert x.bfloat16().float().dtype == torch.float32
    assert x.half().double().dtype == torch.float64
    assert x.to(torch.float16).dtype == torch.float16
    assert x.to("cpu", torch.float16).dtype == torch.float16
    assert x.to("cpu") is x.cpu() is x
    assert x.shape == (4, 3)
    assert x.coords is GRID.coords
    y = (x.requires_grad_() * 2).detach()
    assert x.requires_grad
    assert not y.requires_grad
    with pytest.raises(TypeError, match="dtype must be a dtype"):
        x.to("cpu", "cpu")
    for thing in (x, GRID, sc.ConvolutionPlan(GRID, 3), sc.ConvolutionPlan(GRID, 3).kernel_map):
        assert thing.cpu() is thing
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="stay on 'cpu'"):
                thing.cuda()


@pytest.mark.gpu
def test_things_move_to_a_card():
    x = tensor()
    for thing in (x, GRID, sc.ConvolutionPlan(GRID, 3)):
        assert getattr(thing.cuda(), "device", None) != torch.device("cpu")
    assert torch.equal((x.cuda() * 2 + torch.tensor(1.0)).cpu().features, x.features * 2 + 1)


def test_copies_and_pickles():
    for copied in (copy.copy(tensor()), copy.deepcopy(tensor()), pickle.loads(pickle.dumps(tensor()))):
        assert torch.equal(copied.features, tensor().features)
        assert torch.equal(copied.coords, COORDS)


def test_compiled_arithmetic_is_eager_arithmetic():
    def step(f, v):
        x = sc.SparseTensor(GRID, f)
        y = v * (2 * x) - x / v + x
        return torch.relu(torch.cat([F.gelu(y), 1 - y], 1)).features

    torch._dynamo.reset()
    f, v = tensor().features, rows(3)
    assert torch.allclose(torch.compile(step, fullgraph=True, backend="eager")(f, v), step(f, v))


# ---- shown


def test_what_an_interpreter_shows_is_one_line():
    x = tensor().requires_grad_()
    assert repr(x) == (
        "SparseTensor(3 channels, torch.float64, requires grad, on VoxelGrid(4 voxels, rank 3, batch 3, "
        "extent [0, 5) x [-1, 3) x [0, 6), voxel size 1, cpu))"
    )


def test_an_explanation_is_shown_as_it_is_printed():
    said = sc.ConvolutionPlan(GRID, 3).explain(torch.ones(4, 3), torch.ones(27, 3, 2))
    assert repr(said) == str(said)
    assert repr(said).splitlines()[1] == "  asked: 3 -> 2 channels, torch.float32, cpu"


def pixels(html: str) -> np.ndarray:
    """(height, width, 4) of the picture in a page, read without the code that wrote it."""
    data = base64.b64decode(re.search(r"base64,([^\"]+)", html)[1])
    width, height = (int.from_bytes(data[a : a + 4], "big") for a in (16, 20))
    start = data.index(b"IDAT") + 4
    raw = zlib.decompress(data[start : data.index(b"IEND") - 8])
    return np.frombuffer(raw, np.uint8).reshape(height, 1 + 4 * width)[:, 1:].reshape(height, width, 4)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_notebook_shows_a_picture(rank):
    grid = sc.VoxelGrid(COORDS[:, : 1 + rank] if rank < 4 else F.pad(COORDS, (0, 1)), duplicates="first")
    picture = pixels(grid._repr_html_())
    assert max(picture.shape) <= 240
    assert (picture[..., 3] == 255).any()
    assert "4 voxels" in grid._repr_html_() or rank < 3
    x = sc.SparseTensor(grid, torch.full((len(grid), 2), float("nan")))
    assert "2 channels" in x._repr_html_()
    assert pixels(x._repr_html_()).shape == picture.shape


def test_a_picture_shows_where_voxels_are():
    """Two voxels of a plane: the left lower one dark, the right upper one yellow."""
    grid = sc.VoxelGrid(torch.tensor([[0, 0, 0], [0, 1, 1]]))
    picture = pixels(grid._repr_html_())
    height, width, _ = picture.shape
    low, high = picture[3 * height // 4, width // 4], picture[height // 4, 3 * width // 4]
    assert low.tolist() == [68, 1, 84, 255]
    assert high.tolist() == [253, 231, 37, 255]
    assert picture[height // 4, width // 4, 3] == 0


def test_a_grid_without_voxels_is_shown_in_words():
    assert "<img" not in EMPTY._repr_html_()
    assert "0 voxels" in tensor(EMPTY)._repr_html_()
