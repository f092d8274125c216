"""Collation, quantisation, initialisation, and `import MinkowskiEngine`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparseconv.interop.minkowski as ME
from sparseconv.interop.minkowski.utils import gradcheck
from tests.forked import printed

U = ME.utils


def test_batched_coordinates():
    scenes = [np.array([[0.5, -0.5]]), np.array([[1.0, 2], [3, 4]])]
    assert U.batched_coordinates(scenes).tolist() == [[0, 0, -1], [1, 1, 2], [1, 3, 4]]
    real = U.batched_coordinates([torch.tensor(s) for s in scenes], dtype=torch.float32)
    assert real.dtype == torch.float32
    assert real[0].tolist() == [0, 0.5, -0.5]
    for wrong, error in (
        ([], TypeError),
        ([np.zeros(3)], ValueError),
        ([np.zeros((1, 2)), np.zeros((1, 3))], ValueError),
    ):
        with pytest.raises(error, match="coord"):
            U.batched_coordinates(wrong)
    with pytest.raises(ValueError, match="dtype"):
        U.batched_coordinates(scenes, dtype=torch.int64)


def test_collation():
    coords = [np.array([[1, 2]]), torch.tensor([[3, 4], [5, 6]])]
    feats = [np.ones((1, 2)), torch.zeros(2, 2, dtype=torch.float64)]
    labels = [np.array([7]), torch.tensor([8, 9])]
    c, f, y = U.sparse_collate(coords, feats, labels)
    assert c.tolist() == [[0, 1, 2], [1, 3, 4], [1, 5, 6]]
    assert f.shape == (3, 2)
    assert y.tolist() == [7, 8, 9]
    assert len(U.sparse_collate(coords, feats)) == 2
    assert U.sparse_collate(coords, feats, ["a", "b"])[2] == ["a", "b"]
    same = U.batch_sparse_collate(list(zip(coords, feats, labels)))
    assert all(torch.equal(a, b) for a, b in zip(same, (c, f, y)))
    assert len(U.batch_sparse_collate(list(zip(coords, feats)))) == 2
    whole = U.SparseCollation()(list(zip(coords, feats, labels)))
    assert torch.equal(whole[0], c)
    cut = U.SparseCollation(limit_numpoints=2)(list(zip(coords, feats, labels)))
    assert cut[0].tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="one row per point"):
        U.sparse_collate(coords, feats[:1])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_quantisation(kind):
    rng = np.random.default_rng(0)
    points = rng.normal(size=(400, 3))
    feats, labels = rng.normal(size=(400, 2)), rng.integers(0, 2, 400).astype(np.int32)
    given = points, feats, labels
    if kind == "torch":
        given = tuple(torch.from_numpy(a) for a in given)
    cells = np.floor(points / 0.5).astype(int)
    first, where = {}, []
    for row, cell in enumerate(map(tuple, cells)):
        first.setdefault(cell, row)
        where.append(list(first).index(cell))
    rows = list(first.values())
    mixed = [len({labels[i] for i in range(400) if where[i] == n}) > 1 for n in range(len(rows))]
    q, f, y, index, inverse = U.sparse_quantize(
        *given, ignore_label=-7, return_index=True, return_inverse=True, quantization_size=0.5
    )
    assert [tuple(c) for c in q.tolist()] == list(first)
    assert isinstance(f, type(given[1]))
    assert np.array_equal(np.asarray(f), feats[rows])
    assert np.asarray(y).tolist() == np.where(mixed, -7, labels[rows]).tolist()
    assert np.asarray(index).tolist() == rows
    assert np.asarray(inverse).tolist() == where
    alone = U.sparse_quantize(given[0], quantization_size=(0.5, 0.5, 0.5))
    assert isinstance(alone, torch.Tensor)
    assert alone.tolist() == q.tolist()
    index, inverse = U.sparse_quantize(given[0] / 0.5, return_index=True, return_maps_only=True, return_inverse=True)
    assert index.tolist() == rows
    assert inverse.tolist() == where


def test_arrays_are_divided_by_one_size_an_axis_as_numpy_does():
    """In fp64 by several sizes, in fp32 by one: 0.7 is in cell 6 or 7."""
    points = (np.arange(40) / 10).astype(np.float32)[:, None]
    for size in ([0.1], np.array([0.1]), 0.1):
        wanted = np.unique(np.floor(points / size).astype(int))
        assert np.array_equal(np.unique(U.sparse_quantize(points, quantization_size=size)), wanted), size


def test_arrays_that_run_backwards_are_taken():
    points, labels = np.array([[0, 1], [0, 1], [5, 5]]), np.array([3, 3, 4])
    cells, _, kept = U.sparse_quantize(points[::-1], points[::-1].astype(np.float32), labels[::-1])
    assert (cells.tolist(), kept.tolist()) == ([[5, 5], [0, 1]], [4, 3])


def test_quantisation_of_many_axes_and_wide_extents():
    wide = torch.tensor([[2**31 - 1, -(2**31), 2**31 - 1, 0], [-(2**31), 0, 0, 0], [-(2**31), 0, 0, 0]])
    cells, inverse = U.sparse_quantize(wide, return_index=True, return_inverse=True)[::2]
    assert inverse.tolist() == [0, 1, 1]
    assert cells.tolist() == wide[:2].tolist()
    assert U.sparse_quantize(torch.zeros(0, 3)).shape == (0, 3)
    unique, inverse = U.unique_coordinate_map(torch.IntTensor([[0, 0], [0, 0], [0, 1]]))
    assert unique.tolist() == [0, 2]
    assert inverse.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="return_inverse goes"):
        U.sparse_quantize(wide, return_inverse=True)
    with pytest.raises(ValueError, match="quantization_size"):
        U.sparse_quantize(wide, quantization_size=[1, 2])


def test_hashes():
    rows = np.stack(np.meshgrid(*[np.arange(-3, 5)] * 3), -1).reshape(-1, 3)
    assert len(np.unique(U.ravel_hash_vec(rows))) == len(rows)
    for row, hashed in zip(rows[:50].tolist(), U.fnv_hash_vec(rows).tolist()):
        wanted = 14695981039346656037
        for word in row:
            wanted = (wanted * 1099511628211) % 2**64 ^ (word % 2**64)
        assert hashed == wanted


def test_initialisation():
    torch.manual_seed(0)
    kernel = U.kaiming_normal_(torch.empty(27, 64, 128), mode="fan_out", nonlinearity="relu")
    assert float(kernel.std()) == pytest.approx((2 / (27 * 128)) ** 0.5, rel=0.02)
    matrix = U.kaiming_normal_(torch.empty(256, 512), nonlinearity="relu")
    assert float(matrix.std()) == pytest.approx((2 / 512) ** 0.5, rel=0.02)
    with pytest.raises(ValueError, match="mode"):
        U.kaiming_normal_(torch.empty(2, 2), mode="fan")


def test_gradcheck_of_functions():
    x = ME.SparseTensor(torch.rand(3, 2).double().requires_grad_(), torch.IntTensor([[0, 0], [0, 1], [1, 0]]))
    pool = ME.MinkowskiAvgPooling(3, 2, dimension=1)
    args = pool.pooling_mode, pool.kernel_generator, x.key, None, x.coordinate_manager
    assert gradcheck.gradcheck(ME.MinkowskiLocalPoolingFunction(), (x.F, *args))


def test_import_of_the_name():
    code = """
import sparseconv.interop.minkowski as ours
ours.install()
import MinkowskiEngine as ME
import MinkowskiEngine.MinkowskiFunctional as MF
import MinkowskiEngine.MinkowskiOps as me
import MinkowskiEngineBackend._C as C
from MinkowskiEngine import MinkowskiReLU, SparseTensor
from MinkowskiEngine.MinkowskiPooling import MinkowskiAvgPooling
from MinkowskiEngine.modules.resnet_block import BasicBlock
from MinkowskiEngine.utils import sparse_quantize
from MinkowskiEngineBackend._C import CoordinateMapKey
from MinkowskiSparseTensor import SparseTensor as Bare
assert ME is ours and me.cat is ours.cat and Bare is SparseTensor and CoordinateMapKey is C.CoordinateMapKey
assert ME.MinkowskiUnion.__name__ == "MinkowskiUnion" and isinstance(ME.MinkowskiUnion, type)
ours.uninstall()
try:
    import MinkowskiEngine
except ModuleNotFoundError:
    print("gone")
"""
    assert printed("-c", code) == "gone\n"


def test_submodules_without_an_installation():
    import sparseconv.interop.minkowski.MinkowskiFunctional as MF
    import sparseconv.interop.minkowski.MinkowskiOps as me

    assert MF.relu.__name__ == "relu"
    assert me.cat is ME.cat
    from sparseconv.interop.minkowski import MinkowskiConvolution, MinkowskiPooling  # a layer, and a module

    assert issubclass(MinkowskiConvolution, ME.MinkowskiConvolutionBase)
    assert issubclass(ME.MinkowskiMaxPooling, MinkowskiPooling.MinkowskiPoolingBase)
    assert issubclass(ME.MinkowskiReLU, ME.MinkowskiNonlinearityBase)
    assert [name for name in ME.__all__ if not hasattr(ME, name)] == []


def test_summary_of_a_network(capsys):
    net = torch.nn.Sequential(
        ME.MinkowskiConvolution(3, 4, kernel_size=3, stride=2, dimension=2),
        ME.MinkowskiStackSum(torch.nn.Identity(), ME.MinkowskiBatchNorm(4)),
        ME.MinkowskiToFeature(),
        torch.nn.Linear(4, 5, bias=False),
    )
    net[3].weight.requires_grad_(False)
    coords = U.batched_coordinates([torch.tensor([[0, 0], [1, 1], [2, 2]])])
    x = ME.SparseTensor(torch.ones(3, 3), coords)
    assert U.summary(net, x) == (27 * 4 + 8 + 20, 27 * 4 + 8)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [
        "MinkowskiConvolution-1",
        "Identity-2",
        "BatchNorm1d-3",
        "MinkowskiBatchNorm-4",
        "MinkowskiToFeature-5",
        "Linear-6",
    ]
    assert lines[2].split()[-3:] == ["(2,", "4)", "108"]
    assert not any(module._forward_hooks for module in net.modules())
    with pytest.raises(TypeError, match="model must be"):
        U.summary("net", x)


def test_diagnostics_name_the_versions(capsys):
    ME.print_diagnostics()
    assert torch.__version__ in capsys.readouterr().out


def test_labels_of_one_column_are_those_of_their_points():
    """In the order of MinkowskiEngine's C++ code, which reads N numbers and returns (M,)."""
    coords = np.array([[1, 1, 1], [2, 2, 2], [1, 1, 1], [2, 2, 2]])
    for labels in (np.array([1, 2, 1, 3]), np.array([[1], [2], [1], [3]])):
        cells, made, index = U.sparse_quantize(coords, labels=labels, return_index=True)
        assert (cells.tolist(), made.tolist(), index.tolist()) == ([[1, 1, 1], [2, 2, 2]], [1, -100], [0, 1])
        given = torch.from_numpy(labels)
        assert U.sparse_quantize(torch.from_numpy(coords), labels=given)[1].tolist() == [1, -100]


def test_a_label_to_ignore_is_kept_by_labels_of_8_bits():
    """As SemanticKITTI's files have them; -100 is no number of uint8."""
    coords, labels = np.array([[1], [1], [2]]), np.array([4, 5, 6], np.uint8)
    assert U.sparse_quantize(coords, labels=labels)[1].tolist() == [-100, 6]
    assert U.sparse_quantize(torch.from_numpy(coords), labels=torch.from_numpy(labels))[1].tolist() == [-100, 6]
    assert U.sparse_quantize(coords, labels=labels, ignore_label=255)[1].tolist() == [255, 6]


def _of_wrong_rank():
    coords, feats, labels = torch.zeros(4, 3), torch.zeros(4, 2), torch.zeros(4, dtype=torch.int32)
    cells = coords.int()
    backend = ME.backend
    yield lambda: U.sparse_quantize(coords, labels=labels[:, None].expand(4, 2)), "labels must be"
    yield lambda: U.sparse_quantize(coords, labels=labels[0]), "one row per point"
    yield lambda: U.sparse_quantize(coords, features=feats[..., None]), "features must be"
    yield lambda: backend.quantize_th(cells[0]), "coords must be"
    yield lambda: backend.quantize_label_th(cells, labels[None], -1), "labels must be"
    yield lambda: backend.quantize_label_th(cells, labels[:3], -1), "labels must be"
    yield lambda: U.ravel_hash_vec(cells[0].numpy()), "arr must be"
    yield lambda: U.fnv_hash_vec(cells[0].numpy()), "arr must be"
    yield lambda: U.unique_coordinate_map(cells[0]), "coordinates must be"
    yield lambda: U.sparse_collate([coords, coords[:2]], [feats[:2], feats]), "4, 2 coordinates and 2, 4 features"
    yield lambda: U.sparse_collate([coords], [feats[0, 0]]), "one row per point"
    yield lambda: U.sparse_collate([coords] * 2, [feats, feats[:, :1]]), "feats must differ in rows alone"
    yield lambda: U.sparse_collate([coords], [feats], [labels[0]]), "labels must be"
    triples = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    yield lambda: ME.spmm(*triples, torch.ones(3), (2, 4), torch.ones(1, 4, 2)), "mat must be"
    yield lambda: ME.MinkowskiSPMMAverageFunction.apply(*triples, (2, 4), torch.ones(3, 2)), "mat must be"


@pytest.mark.parametrize("number", range(15))
def test_ranks_are_looked_at(number):
    call, words = list(_of_wrong_rank())[number]
    with pytest.raises(ValueError, match=words):
        call()
