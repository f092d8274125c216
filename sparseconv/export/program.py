"""From a network to a saved program, checked against the network before it is handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode

from sparseconv.checks import check_kind, check_tensor
from sparseconv.files import check_place, written_whole
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.ops.comparing import same
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import LEAST_TO_TRACE, check_version, pytree

if TYPE_CHECKING:
    from jaxtyping import Integer, Shaped


class _Program(torch.nn.Module):
    """A network of sparse tensors as one of plain tensors."""

    def __init__(self, net: torch.nn.Module, make: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.make = net, make

    def forward(self, coords: torch.Tensor, features: torch.Tensor) -> Any:
        x = self.make(coords, features)
        with _Norms():
            return plain(self.net(x), x)


class _Norms(TorchFunctionMode):
    """Batch norms of rows by the operator in which torch's function ends.

    The function itself asks first whether there are rows, which nobody knows while torch.export traces.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_normed if func is batch_norm else func)(*args, **(kwargs or {}))


def _normed(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm`, the same bits."""
    if training or x.ndim != 2:  # elsewhere it may choose another operator
        return batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    return torch.native_batch_norm(x, weight, bias, mean, var, False, momentum, eps)[0]


def export(
    net: torch.nn.Module,
    inputs: Sequence[Integer[torch.Tensor, "N 1+D"] | Shaped[torch.Tensor, "N C"]],
    path: str | Path | None = None,
    *,
    batch_size: int | None = None,
    make: Callable[[Integer[torch.Tensor, "N 1+D"], Shaped[torch.Tensor, "N C"]], Any] | None = None,
) -> torch.export.ExportedProgram:
    """A network as a program (coords, features) -> tensors that finds its own kernel maps.

    The program serves scenes of any number of voxels. It is an inference: norms use their running statistics. After
    ``import sparseconv``, ``torch.export.load(path).module()(coords, features)`` runs it in any process.

    Args:
        net: takes what ``make`` returns, by default a `SparseTensor`; in evaluation mode.
        inputs: an example, coords (N, 1+D) integers and features (N, C), with at least two voxels.
        path: a file to write, usually ``.pt2``; None for none.
        batch_size: of every scene that the program is given; default: that of the example.
        make: (coords, features) -> the input of ``net``, for networks of another library's tensors, such as
            ``lambda coords, features: SparseConvTensor(features, coords, [41, 1600, 1408], 1)``.

    Returns:
        The program. A sparse tensor on the input's voxels becomes its features, in the order of the input's rows. One
        on other voxels becomes (features, coords). Everything else stays as it is.

    Raises:
        ValueError: a network in training, tensors that do not fit, what cannot be exported, or a program whose results
            differ from the network's on the example, or a ``path`` where no file can be written. Nothing is written
            then.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(300, 3), voxel_size=0.1)
    >>> net = sc.nn.UNet(4, 5, channels=(8, 16)).eval()
    >>> program = export(net, (grid.coords, torch.randn(len(grid), 4)))
    >>> coords = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [0, 5, 5, 5]], dtype=torch.int32)
    >>> program.module()(coords, torch.randn(3, 4)).shape
    torch.Size([3, 5])
    """
    check_version("sparseconv.export.export", LEAST_TO_TRACE)
    coords, features = checked(net, inputs)
    if path is not None:
        check_place(path)
    items = batch_size if batch_size is not None else VoxelGrid(coords).batch_size
    if make is None:
        program = _Program(net, lambda c, f: SparseTensor(VoxelGrid(c, items), f))
    else:
        program = _Program(net, make)
    rows = torch.export.Dim.DYNAMIC
    with torch.no_grad():
        exported = torch.export.export(program, (coords, features), dynamic_shapes=({0: rows}, {0: rows}), strict=False)
        _compare(exported.module()(coords, features), program(coords, features))
    if path is not None:
        with written_whole(path) as part:
            torch.export.save(exported, part)
    return exported


def plain(results: Any, x: Any) -> Any:
    """What a network returned for ``x``, as a program returns it: tensors in the place of sparse tensors."""
    grid = grid_of(x)

    def of(leaf: Any) -> Any:
        own = grid_of(leaf)
        if own is None:
            return leaf
        return leaf.features if own is grid else (leaf.features, own.coords)

    return pytree.tree_map(of, results, is_leaf=lambda leaf: grid_of(leaf) is not None)


def grid_of(x: Any) -> VoxelGrid | None:
    """The voxels of a sparse tensor, of this library or of one whose names it has; None of anything else."""
    return x.grid if isinstance(x, SparseTensor) else getattr(x, "voxels", None)


def checked(net: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    check_kind("net", net, torch.nn.Module, "pass the network")
    if not isinstance(inputs, (tuple, list)) or len(inputs) != 2:
        raise ValueError("inputs must be an example of the program's inputs: (coords, features)")
    coords, features = inputs
    check_tensor("coords", coords)
    check_tensor("features", features)
    if features.ndim != 2 or coords.ndim != 2 or features.shape[0] != coords.shape[0] or coords.shape[0] < 2:
        raise ValueError(
            "the example needs coords (N, 1+D) and features (N, C) of at least two voxels; got "
            f"{tuple(coords.shape)} and {tuple(features.shape)}"
        )
    training = [name or type(net).__name__ for name, module in net.named_modules() if module.training]
    if training:
        raise ValueError(f"an exported program is an inference, but {training[0]} is in training: call net.eval()")
    return coords, features


def _compare(got: Any, want: Any) -> None:
    """Raise ValueError where two results differ in a bit, but for the kind of a NaN."""
    for number, (mine, theirs) in enumerate(zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)):
        if not same(mine, theirs):
            raise ValueError(f"the exported program differs from the network on the example, in result {number}")
