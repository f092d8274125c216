"""Tensors side by side, dense arrays, linear layers, and containers that add up or join their branches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparseconv.interop.arguments import whole
from sparseconv.interop.minkowski.nn.convolution import MinkowskiModuleBase
from sparseconv.interop.minkowski.nn.placement import check_input
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor, TensorField
from sparseconv.interop.minkowski.tensor import features_of, with_features
from sparseconv.kinds import check_kind, check_values


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
        in_features, out_features = whole([in_features, out_features], "in_features and out_features", 0)
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


def cat(*sparse_tensors: Any) -> Any:
    """Channels side by side; all at one set of coordinates."""
    return _of_all(sparse_tensors, lambda xs: torch.cat(list(xs), -1))


def _sum(*sparse_tensors: Any) -> Any:
    """The sum of features; all at one set of coordinates."""
    return _of_all(sparse_tensors, lambda xs: torch.stack(list(xs)).sum(0))


def mean(*sparse_tensors: Any) -> Any:
    """The mean of features; all at one set of coordinates."""
    return _of_all(sparse_tensors, lambda xs: torch.stack(list(xs)).mean(0))


def var(*sparse_tensors: Any) -> Any:
    """The biased variance of features; all at one set of coordinates."""
    return _of_all(sparse_tensors, lambda xs: torch.stack(list(xs)).var(0, unbiased=False))


class MinkowskiStackCat(torch.nn.Sequential):
    """Branches that take one input, their channels side by side."""

    def forward(self, x: Any) -> Any:
        return cat([module(x) for module in self])


class MinkowskiStackSum(torch.nn.Sequential):
    """Branches that take one input, added up."""

    def forward(self, x: Any) -> Any:
        return _sum([module(x) for module in self])


class MinkowskiStackMean(torch.nn.Sequential):
    """Branches that take one input, their mean."""

    def forward(self, x: Any) -> Any:
        return mean([module(x) for module in self])


class MinkowskiStackVar(torch.nn.Sequential):
    """Branches that take one input, their variance."""

    def forward(self, x: Any) -> Any:
        return var([module(x) for module in self])


# ---- dense arrays


def dense_coordinates(shape: Sequence[int]) -> torch.Tensor:
    """Every site of a dense array of shape (B, C, *spatial): (N, 1+D) int32, last axis fastest."""
    shape = whole(shape, "shape", 0)
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiToDenseTensor(MinkowskiModuleBase):
    """A sparse tensor -> dense (B, C, *spatial) of a shape; default: what holds every voxel."""

    def __init__(self, shape: torch.Size | None = None) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, input: SparseTensor) -> torch.Tensor:
        check_input(input, None)
        return input.dense(shape=self.shape)[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiToFeature(MinkowskiModuleBase):
    """A sparse tensor or a field -> its features (N, C)."""

    def forward(self, x: SparseTensor | TensorField) -> torch.Tensor:
        return features_of(x)
