"""Layers of features: activations, norms, linear layers, sums of tensors, dense arrays and sparse matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sparseconv.checks import INTEGERS, check_kind, check_values
from sparseconv.interop.arguments import integers
from sparseconv.interop.minkowski.common import CoordinateMapKey
from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager
from sparseconv.interop.minkowski.layers import MinkowskiModuleBase, check_input, given_manager
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor, TensorField, features_of, with_features
from sparseconv.ops.points import PointGroups
from sparseconv.products import sparse_scale, sparse_scale_infos


class MinkowskiNonlinearityBase(MinkowskiModuleBase):
    """A layer of torch, ``MODULE``, on the features of a sparse tensor or a field; its arguments are that layer's."""

    MODULE: type[nn.Module] = nn.Identity

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.MODULE(*args, **kwargs)

    def forward(self, input: SparseTensor | TensorField) -> SparseTensor | TensorField:
        return with_features(input, self.module)


def _of_torch(layer: type[nn.Module]) -> Any:
    """The class ``Minkowski{layer}``."""
    own = {"MODULE": layer, "__doc__": f"``torch.nn.{layer.__name__}`` on features.", "__module__": __name__}
    return type(f"Minkowski{layer.__name__}", (MinkowskiNonlinearityBase,), own)


MinkowskiELU, MinkowskiSELU, MinkowskiCELU = map(_of_torch, (nn.ELU, nn.SELU, nn.CELU))
MinkowskiReLU, MinkowskiReLU6, MinkowskiRReLU = map(_of_torch, (nn.ReLU, nn.ReLU6, nn.RReLU))
MinkowskiLeakyReLU, MinkowskiPReLU, MinkowskiGELU = map(_of_torch, (nn.LeakyReLU, nn.PReLU, nn.GELU))
MinkowskiSigmoid, MinkowskiSiLU, MinkowskiLogSigmoid = map(_of_torch, (nn.Sigmoid, nn.SiLU, nn.LogSigmoid))
MinkowskiHardsigmoid, MinkowskiHardswish = map(_of_torch, (nn.Hardsigmoid, nn.Hardswish))
MinkowskiHardshrink, MinkowskiHardtanh = map(_of_torch, (nn.Hardshrink, nn.Hardtanh))
MinkowskiTanh, MinkowskiTanhshrink, MinkowskiThreshold = map(_of_torch, (nn.Tanh, nn.Tanhshrink, nn.Threshold))
MinkowskiSoftplus, MinkowskiSoftshrink = map(_of_torch, (nn.Softplus, nn.Softshrink))
MinkowskiSoftsign, MinkowskiSoftmin = map(_of_torch, (nn.Softsign, nn.Softmin))
MinkowskiSoftmax, MinkowskiLogSoftmax = map(_of_torch, (nn.Softmax, nn.LogSoftmax))
MinkowskiDropout, MinkowskiAlphaDropout = map(_of_torch, (nn.Dropout, nn.AlphaDropout))
MinkowskiAdaptiveLogSoftmaxWithLoss = _of_torch(nn.AdaptiveLogSoftmaxWithLoss)


class MinkowskiSinusoidal(MinkowskiModuleBase):
    """``sin(x @ kernel + bias) * coef``, features (N, C_in) -> (N, C_out)."""

    def __init__(self, in_channel: int, out_channel: int) -> None:
        super().__init__()
        self.in_channel, self.out_channel = in_channel, out_channel
        self.kernel = nn.Parameter(torch.rand(in_channel, out_channel))
        self.bias = nn.Parameter(torch.rand(1, out_channel))
        self.coef = nn.Parameter(torch.rand(1, out_channel))

    def forward(self, input: SparseTensor | TensorField) -> SparseTensor | TensorField:
        return with_features(input, lambda x: torch.sin(x @ self.kernel + self.bias) * self.coef)


# ---- norms, with the norm of torch under ``bn``


class MinkowskiBatchNorm(torch.nn.Module):
    """``torch.nn.BatchNorm1d`` over all voxels or points."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        (num_features,) = integers([num_features], "num_features", 1)
        self.bn: Any = torch.nn.BatchNorm1d(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: SparseTensor | TensorField) -> SparseTensor | TensorField:
        return with_features(input, self.bn)

    def __repr__(self) -> str:
        bn = self.bn
        return (
            f"{type(self).__name__}({bn.num_features}, eps={bn.eps}, momentum={bn.momentum}, affine={bn.affine}, "
            f"track_running_stats={bn.track_running_stats})"
        )


class MinkowskiSyncBatchNorm(MinkowskiBatchNorm):
    """``torch.nn.SyncBatchNorm`` over all voxels of all processes."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(num_features)
        rest: Any = (momentum, affine, track_running_stats, process_group)
        self.bn = torch.nn.SyncBatchNorm(num_features, eps, *rest)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """The module with every `MinkowskiBatchNorm` in it replaced; parameters and statistics are kept."""
        made = module
        if isinstance(module, MinkowskiBatchNorm) and not isinstance(module, MinkowskiSyncBatchNorm):
            made = MinkowskiSyncBatchNorm(1)
            made.bn = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module.bn, process_group)
            made.training = module.training
        for name, child in module.named_children():
            if made is module:
                made.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return made


def _normalized(features: torch.Tensor, key: CoordinateMapKey, manager: CoordinateManager, eps: float) -> torch.Tensor:
    """Features of each batch item and channel with mean 0 and variance 1, the biased one; in fp32 for halves."""
    items = manager.find(key).items
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    centred = features - items.spread(items.reduce(features, "mean"))
    variance = items.reduce(centred**2, "mean")
    return centred * items.spread((variance + eps).rsqrt())


class MinkowskiInstanceNormFunction:
    """The instance norm without weights, as a function; differentiable to any order."""

    @staticmethod
    def apply(
        in_feat: torch.Tensor,
        in_coords_key: CoordinateMapKey,
        glob_coords_key: CoordinateMapKey | None = None,
        coords_manager: CoordinateManager | None = None,
        gpooling_mode: Any = None,
    ) -> torch.Tensor:
        """Features (N, C) -> (N, C)."""
        return _normalized(in_feat, in_coords_key, given_manager(coords_manager), 1e-8).to(in_feat.dtype)


class MinkowskiInstanceNorm(MinkowskiModuleBase):
    """Each channel of each batch item with mean 0 and variance 1, then ``weight`` and ``bias`` (1, C)."""

    eps = 1e-8

    def __init__(self, num_features: int, dimension: int | None = None) -> None:
        super().__init__()
        (self.num_features,) = integers([num_features], "num_features", 1)
        self.weight = torch.nn.Parameter(torch.ones(1, self.num_features))
        self.bias = torch.nn.Parameter(torch.zeros(1, self.num_features))

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: SparseTensor) -> SparseTensor:
        check_input(input, None)
        normalized = _normalized(input.F, input.key, input.coordinate_manager, self.eps)
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        return input.like((normalized * self.weight + self.bias).to(dtype))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nchannels={self.num_features})"


class MinkowskiStableInstanceNorm(MinkowskiInstanceNorm):
    """`MinkowskiInstanceNorm` with a larger number under the root."""

    eps = 1e-6


# ---- linear layers, tensors side by side, and containers that add up or join their branches


class MinkowskiNetwork(torch.nn.Module, ABC):
    """The class of networks: keeps the number of axes as ``D``."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.D = D

    @abstractmethod
    def forward(self, x: Any) -> Any: ...


class MinkowskiLinear(torch.nn.Module):
    """``torch.nn.Linear`` on features, under ``linear``."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        in_features, out_features = integers([in_features, out_features], "in_features and out_features", 0)
        self.linear = torch.nn.Linear(in_features, out_features, bias=bias)

    def forward(self, input: SparseTensor | TensorField) -> SparseTensor | TensorField:
        return with_features(input, self.linear)

    def __repr__(self) -> str:
        linear = self.linear
        return (
            f"{type(self).__name__}(in_features={linear.in_features}, out_features={linear.out_features}, "
            f"bias={linear.bias is not None})"
        )


def _of_all(tensors: tuple, combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:
    """Tensors at one set of coordinates, given apart or as one list -> one of their combined features."""
    given = tensors[0] if len(tensors) == 1 else tensors
    if not isinstance(given, (tuple, list)) or len(given) < 2:
        raise ValueError(f"takes two tensors or more; got {given!r}")
    first = given[0]
    if not isinstance(first, (SparseTensor, TensorField)):
        raise TypeError(f"takes SparseTensors or TensorFields; got {type(first).__name__}")
    for other in given[1:]:
        if type(other) is not type(first):
            raise TypeError(f"takes tensors of one kind; got {type(first).__name__} and {type(other).__name__}")
        first._check_same(other)
    return first.like(combine([x.F for x in given]))


def _joining(name: str, does: str, combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> tuple[Any, Any]:
    """The function ``name`` of several tensors, and the class of containers whose branches it joins."""

    def joined(*sparse_tensors: Any) -> Any:
        return _of_all(sparse_tensors, combine)

    joined.__name__ = joined.__qualname__ = name
    joined.__doc__ = f"{does} of tensors that are all at one set of coordinates."

    def forward(self: Any, x: Any) -> Any:
        return joined([module(x) for module in self])

    own = {"forward": forward, "__doc__": f"Branches that take one input. {does}.", "__module__": __name__}
    return joined, type(f"MinkowskiStack{name.title()}", (torch.nn.Sequential,), own)


cat, MinkowskiStackCat = _joining("cat", "Channels side by side", lambda xs: torch.cat(list(xs), -1))
add, MinkowskiStackSum = _joining("sum", "The sum", lambda xs: torch.stack(list(xs)).sum(0))
mean, MinkowskiStackMean = _joining("mean", "The mean", lambda xs: torch.stack(list(xs)).mean(0))
var, MinkowskiStackVar = _joining("var", "The biased variance", lambda xs: torch.stack(list(xs)).var(0, unbiased=False))


# ---- dense arrays


def dense_coordinates(shape: Sequence[int]) -> torch.Tensor:
    """Every site of a dense array of shape (B, C, *spatial): (N, 1+D) int32, last axis fastest."""
    shape = integers(shape, "shape", 0)
    if len(shape) < 3:
        raise ValueError(f"shape must be (B, C, *spatial); got {tuple(shape)}")
    return torch.cartesian_prod(*(torch.arange(n) for n in (shape[0], *shape[2:]))).int()


def to_sparse(
    x: torch.Tensor,
    format: str | None = None,
    coordinates: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> SparseTensor:
    """The sites of a dense array where any channel is not 0.

    Args:
        x: (B, C, *spatial), or as ``format`` says.
        format: a letter an axis, ``B`` first, one ``C`` for the channels: ``"BCXX"``, ``"BXXC"``.
        coordinates: accepted, without effect.
        device: of the result; default that of x.
    """
    check_values("x", x, "(B, C, *spatial)")
    if format is not None:
        check_kind("format", format, str, "pass a letter an axis, as 'BCXX'")
    letters = "BC" + "X" * (x.ndim - 2) if format is None else format
    if len(letters) != x.ndim or letters[0] != "B" or letters.count("B") != 1 or letters.count("C") != 1:
        raise ValueError(f"format takes a letter an axis, 'B' first and one 'C', for {x.ndim} axes; got {letters!r}")
    last = x.movedim(letters.index("C"), -1)
    sites = (last != 0).any(-1).nonzero()
    return SparseTensor(last[tuple(sites.unbind(1))], sites, device=x.device if device is None else device)


def to_sparse_all(dense_tensor: torch.Tensor, coordinates: torch.Tensor | None = None) -> SparseTensor:
    """Every site of dense (B, C, *spatial), zeros too; ``coordinates`` are those of `dense_coordinates`."""
    check_values("dense_tensor", dense_tensor, "(B, C, *spatial)")
    if coordinates is None:
        coordinates = dense_coordinates(dense_tensor.shape)
    features = dense_tensor.movedim(1, -1).reshape(-1, dense_tensor.shape[1])
    return SparseTensor(features, coordinates, device=dense_tensor.device)


class MinkowskiToSparseTensor(MinkowskiModuleBase):
    """A field, or a dense array (B, C, *spatial) -> a sparse tensor.

    Args:
        remove_zeros: leave out sites where every channel is 0, unless there are ``coordinates``.
        coordinates: those of `dense_coordinates`, made once for arrays of one shape.
    """

    def __init__(self, remove_zeros: bool = True, coordinates: torch.Tensor | None = None) -> None:
        super().__init__()
        self.remove_zeros, self.coordinates = remove_zeros, coordinates

    def forward(self, input: TensorField | torch.Tensor) -> SparseTensor:
        if isinstance(input, TensorField):
            return input.sparse()
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"takes a TensorField or a dense tensor; got {type(input).__name__}")
        if self.remove_zeros and self.coordinates is None:
            return to_sparse(input)
        return to_sparse_all(input, self.coordinates)


class MinkowskiToDenseTensor(MinkowskiModuleBase):
    """A sparse tensor -> dense (B, C, *spatial) of a shape; default: what holds every voxel."""

    def __init__(self, shape: torch.Size | None = None) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, input: SparseTensor) -> torch.Tensor:
        check_input(input, None)
        return input.dense(shape=self.shape)[0]


class MinkowskiToFeature(MinkowskiModuleBase):
    """A sparse tensor or a field -> its features (N, C)."""

    def forward(self, x: SparseTensor | TensorField) -> torch.Tensor:
        return features_of(x)


# ---- products of a sparse matrix, given as triples, and a dense one


def spmm(
    rows: torch.Tensor,
    cols: torch.Tensor,
    vals: torch.Tensor,
    size: Sequence[int],
    mat: torch.Tensor,
    is_sorted: bool = False,
    cuda_spmm_alg: int = 1,
) -> torch.Tensor:
    """z[rows[t]] += vals[t] * mat[cols[t]]: mat (size[1], C) -> (size[0], C).

    Differentiable in ``mat``. ``is_sorted`` and ``cuda_spmm_alg`` have no effect; the result has the same bits in every
    run.

    >>> spmm(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), (1, 2), torch.eye(2)).tolist()
    [[1.0, 2.0]]
    """
    check_values("vals", vals, "(T,)")
    infos = sparse_scale_infos(_rows("cols", cols), _rows("rows", rows), vals, *_sizes(size, mat))
    return sparse_scale(mat, *infos).to(mat.dtype)


def _sizes(size: Sequence[int], mat: torch.Tensor) -> list[int]:
    """Rows and columns of a sparse matrix that ``mat`` can be multiplied with."""
    high, wide = integers(size, "size", 0)
    check_values("mat", mat, "(size[1], C)")
    if mat.ndim != 2 or len(mat) != wide:
        raise ValueError(f"mat must be ({wide}, C), a row for each column of the sparse matrix; got {tuple(mat.shape)}")
    return [high, wide]


def _rows(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Row numbers (T,) int64, of whole numbers in any dtype."""
    check_values(name, rows, "(T,) whole numbers")
    if rows.dtype not in INTEGERS and not rows.is_floating_point():
        raise TypeError(f"{name} must be whole numbers; got {rows.dtype}")
    whole = rows.long()
    if rows.is_floating_point() and not torch.equal(whole.to(rows.dtype), rows):
        raise ValueError(f"{name} must be whole numbers; some are not")
    return whole


class MinkowskiSPMMFunction:
    """`spmm` as a function."""

    @staticmethod
    def apply(
        rows: torch.Tensor,
        cols: torch.Tensor,
        vals: torch.Tensor,
        size: Sequence[int],
        mat: torch.Tensor,
        cuda_spmm_alg: int = 1,
    ) -> torch.Tensor:
        """Arguments and result of `spmm`."""
        return spmm(rows, cols, vals, size, mat)


class MinkowskiSPMMAverageFunction:
    """The mean of the rows of a matrix that go to one row."""

    @staticmethod
    def apply(
        rows: torch.Tensor, cols: torch.Tensor, size: Sequence[int], mat: torch.Tensor, cuda_spmm_alg: int = 1
    ) -> torch.Tensor:
        """z[r] = the mean of mat[cols[t]] over the t with rows[t] = r: (size[1], C) -> (size[0], C)."""
        return PointGroups(_rows("rows", rows), _sizes(size, mat)[0]).reduce(mat[_rows("cols", cols)], "mean")


__all__ = ["cat", "dense_coordinates", "mean", "spmm", "to_sparse", "to_sparse_all", "var"]
__all__ += [name for name in list(globals()) if name.startswith("Minkowski") and name != "MinkowskiModuleBase"]
