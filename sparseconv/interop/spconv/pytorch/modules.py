"""Containers, joins of tensors, and modules of features alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from sparseconv import transforms
from sparseconv.interop.arguments import first_rows, specialized
from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.functional import sparse_add_hash_based
from sparseconv.interop.spconv.pytorch.tracing import leaf, proxy_among, recorded
from sparseconv.nn.fused.evaluation import settled, tensors_of
from sparseconv.nn.fused.fusion import ACTIVATIONS, folded, hooked
from sparseconv.nn.fused.training import Layer, serves, trained
from sparseconv.nn.normalization import BatchNorm
from sparseconv.pointwise import Epilogue
from sparseconv.torch_private import BatchNormBase, exporting, surely

#: what norms and activations take
EITHER = "a SparseConvTensor or features"


class SparseModule(torch.nn.Module):
    """Modules that derive from it are given the whole `SparseConvTensor` by `SparseSequential`."""

    #: whether it is one of the convolutions
    is_convolution = False

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""


def of_ranks(base: type, name: str, does: str, arguments: str, defaults: Mapping[str, Any], **fixed: Any) -> list[Any]:
    """The classes ``{name}1d`` to ``{name}4d``, see `specialized`; ``does`` has {} for the axes."""
    ranks = {"one axis": 1, "two axes": 2, "three axes": 3, "four axes": 4}
    return [
        specialized(base, f"{name}{rank}d", does.format(words), arguments, defaults, ndim=rank, **fixed)
        for words, rank in ranks.items()
    ]


class SparseSequential(SparseModule):
    """Modules one after another; plain torch modules are applied to the features.

    Takes modules, one OrderedDict of them, or keywords. Empty tensors pass through every module, so that channels are
    those of the network; batch norms leave them as they are.

    >>> net = SparseSequential(torch.nn.Linear(4, 8), act=torch.nn.ReLU())
    >>> len(net), net[-1]
    (2, ReLU())
    """

    def __init__(self, *args: Any, **kwargs: torch.nn.Module) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], OrderedDict):
            named = dict(args[0])
        else:
            named = {str(i): module for i, module in enumerate(args)}
        for name, module in (*named.items(), *kwargs.items()):
            if name in self._modules:
                raise ValueError(f"two modules have the name {name!r}")
            self.add_module(name, module)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} modules")
        return list(self._modules.values())[index]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: torch.nn.Module, name: str | None = None) -> None:
        """Append a module."""
        name = str(len(self._modules)) if name is None else name
        if name in self._modules:
            raise KeyError(f"there is a module {name!r} already")
        self.add_module(name, module)

    def forward(self, input):  # no annotations: torch.fx cannot pickle a graph with one that is text
        modules = [module for module in self._modules.values() if module is not None]
        if isinstance(input, SparseConvTensor) or proxy_among(input) is None:
            return in_turn(input, modules)
        for whole, run in groupby(modules, is_spconv_module):
            together = tuple(run)
            if whole:
                for module in together:
                    input = module(input)
            else:
                input = in_turn(input, together)
        return input


def in_turn(input: Any, modules: Sequence[Any]) -> Any:
    """Modules one after another on a `SparseConvTensor`, plain ones on its features; on anything else, on that.

    Where `torch.fx` traces it is one node, since only the tensor itself tells whether it is sparse.
    """
    if not isinstance(input, SparseConvTensor) and (node := recorded(in_turn, (input, modules))) is not None:
        return node
    at, padded = 0, [*modules, None, None]
    while at < len(modules):
        module, following, third = padded[at : at + 3]
        input, taken = _first(module, following, third, input)
        at += taken
    return input


class _OnFeatures:
    """Runs the layer of torch behind it on the features of a `SparseConvTensor`, or on features."""

    def forward(self: Any, input: Any) -> Any:
        if isinstance(input, SparseConvTensor):
            return input.replace_feature(super().forward(input.features))  # type: ignore[misc]
        return super().forward(input) if isinstance(input, torch.Tensor) else leaf(self, input, takes=EITHER)  # type: ignore[misc]


class SparseBatchNorm(_OnFeatures, BatchNorm):
    """Batch norm over all voxels; takes a `SparseConvTensor` or features."""


class SparseSyncBatchNorm(_OnFeatures, torch.nn.SyncBatchNorm):
    """Batch norm over the voxels of all processes; takes a `SparseConvTensor` or features."""


class SparseReLU(_OnFeatures, torch.nn.ReLU):
    """ReLU; takes a `SparseConvTensor` or features."""


class SparseIdentity(torch.nn.Identity):
    """Returns its input."""


class ToDense(SparseModule):
    """A `SparseConvTensor` -> dense (B, C, *spatial)."""

    def forward(self, x: SparseConvTensor) -> torch.Tensor:
        return x.dense() if isinstance(x, SparseConvTensor) else leaf(self, x)


class RemoveDuplicate(SparseModule):
    """Keep the first row of each voxel; features of the others are left out."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        if not isinstance(x, SparseConvTensor):
            return leaf(self, x)
        rows, _ = first_rows(x.indices)
        return SparseConvTensor(x.features[rows], x.indices[rows], x.spatial_shape, x.batch_size, x.grid)


class RemoveGrid(SparseModule):
    """Drop the ``grid`` attribute."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        if not isinstance(x, SparseConvTensor):
            return leaf(self, x)
        x.grid = None
        return x


class Identity(torch.nn.Module):
    """Returns its input."""

    def forward(self, input: Any) -> Any:
        return input

    def input_spatial_size(self, out_size: Any) -> Any:
        return out_size


def _first(module: Any, following: Any, third: Any, input: Any) -> tuple[Any, int]:
    """The first of three modules applied to a tensor, and how many of them that took: some run as one."""
    if not isinstance(input, SparseConvTensor):
        return module(input), 1
    if is_spconv_module(module):
        joined = in_inference(module, following, third) if is_sparse_conv(module) and module.joins else None
        if joined is None:
            return module(input), 1
        return module.convolved(input, joined), 2 if joined.epilogue is None else 3
    if type(module) is torch.nn.BatchNorm1d and (y := norm_and_relu(module, following, input)) is not None:
        return input.replace_feature(y), 2
    if isinstance(module, BatchNormBase) and module.training and surely(input.features.shape[0] == 0):
        return input, 1
    return input.replace_feature(module(input.features)), 1


def is_spconv_module(module: torch.nn.Module | None) -> bool:
    """Whether a module takes the whole `SparseConvTensor`."""
    return isinstance(module, (SparseModule, SparseBatchNorm, SparseSyncBatchNorm, SparseReLU, SparseIdentity))


def is_sparse_conv(module: torch.nn.Module) -> bool:
    """Whether a module is one of the convolutions."""
    return isinstance(module, SparseModule) and module.is_convolution


def assign_name_for_sparse_modules(module: torch.nn.Module) -> None:
    """Tell every `SparseModule` its path in the network."""
    for path, child in module.named_modules():
        if isinstance(child, SparseModule):
            child._sparse_unique_name = path


# ---- neighboring modules that run as one


class Inference(NamedTuple):
    """What follows a convolution in inference: a batch norm by its running statistics, and an activation or None."""

    norm: torch.nn.BatchNorm1d
    epilogue: Epilogue | None

    def folded(
        self, features: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight (K, C_in/G, C) and bias (C,) with the norm in them, in the dtype that ``features`` will have."""
        kind, dtype = features.device.type, taps.dtype
        if torch.is_autocast_enabled(kind) and features.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        return folded(taps, bias, self.norm, dtype)


def in_inference(conv: Any, norm: Any, activation: Any) -> Inference | None:
    """What of ``norm`` and ``activation`` a convolution takes into its own kernel; None where it may not.

    Gradients, training, hooks between the modules and replaced forwards keep them apart. An activation that has no
    kernel of its own (`ACTIVATIONS`) stays a module.
    """
    if (
        type(norm) is not torch.nn.BatchNorm1d
        or norm.training
        or tensors_of(norm)[2] is None
        or norm.num_features != conv.out_channels
        or torch.is_grad_enabled()
        or (torch.compiler.is_compiling() and not exporting())
        or transforms.active()
        or hooked(conv, norm)
        or "forward" in vars(conv)
        or "forward" in vars(norm)
    ):
        return None
    make = ACTIVATIONS.get(type(activation))
    alone = make is None or hooked(activation) or "forward" in vars(activation)
    return Inference(norm, None if alone or make is None else make(activation))


def norm_and_relu(norm: torch.nn.BatchNorm1d, relu: Any, input: SparseConvTensor) -> torch.Tensor | None:
    """Features after torch's batch norm and ReLU by one node of the gradient, in evaluation by one launch; None where
    it may not."""
    features = input.features
    if type(relu) is not torch.nn.ReLU or features.shape[1] != norm.num_features or hooked(norm, relu):
        return None
    if torch.compiler.is_compiling():
        return None
    weight, bias, mean, var, _ = tensors_of(norm)
    known = not (norm.training or mean is None or var is None)
    y = settled(features, weight, bias, mean, var, norm.eps, 0.0) if known else None
    if y is None and serves(features, norm, features.shape[0]):
        y = trained(features, [Layer(norm, 0.0, alive=input.voxels.count)])
    return y


# ---- several tensors, or several branches


class _Table(SparseModule):
    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        if isinstance(input, Sequence) and input and all(isinstance(x, SparseConvTensor) for x in input):
            return self.joined(input)
        return leaf(self, input, takes="a list of SparseConvTensors, at least one")

    def joined(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        """What becomes of the tensors."""
        raise NotImplementedError

    def input_spatial_size(self, out_size: Any) -> Any:
        return out_size


class JoinTable(_Table):
    """Channels of tensors at the same indices, side by side; they may differ in width."""

    def joined(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        _check_aligned(input, "JoinTable")
        return input[0].replace_feature(torch.cat([x.features for x in input], 1))


class AddTable(_Table):
    """The sum of tensors at the same indices."""

    def joined(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        _check_aligned(input, "AddTable")
        if len({x.features.shape[1] for x in input}) > 1:
            raise ValueError(f"AddTable takes tensors of one width; got {[tuple(x.features.shape) for x in input]}")
        total = input[0].features
        for x in input[1:]:
            total = total + x.features
        return input[0].replace_feature(total)


class AddTableMisaligned(_Table):
    """The sum of tensors at different indices, over the union of them; inverse convolutions past it find no key."""

    def joined(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        return sparse_add_hash_based(*input)


class ConcatTable(SparseModule):
    """The results of several modules on one input, as a list."""

    def forward(self, input: Any) -> list[Any]:
        return [module(input) for module in self._modules.values() if module is not None]

    def add(self, module: torch.nn.Module) -> ConcatTable:
        """Append a module; returns itself."""
        self.add_module(str(len(self._modules)), module)
        return self

    def input_spatial_size(self, out_size: Any) -> Any:
        first: Any = self._modules["0"]
        return first.input_spatial_size(out_size)


def _check_aligned(tensors: Sequence[SparseConvTensor], name: str) -> None:
    first = tensors[0]
    if any(x.features.ndim != 2 for x in tensors):
        raise ValueError(f"{name} takes features (N, C); got {[tuple(x.features.shape) for x in tensors]}")
    for other in tensors[1:]:
        if (
            other.spatial_shape != first.spatial_shape
            or other.batch_size != first.batch_size
            or surely(other.features.shape[0] != first.features.shape[0])
            or not first._is_at(other)
        ):
            raise ValueError(
                f"{name} takes tensors at the same indices; got {first.features.shape[0]} of them in "
                f"{first.spatial_shape} and {other.features.shape[0]} in {other.spatial_shape}: functional.sparse_add "
                "adds tensors at different ones"
            )
