"""A training step on new scenes, their maps built anew, captured once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from sparseconv.geometry.ranges import IndexRange
from sparseconv.gpu.streams import current
from sparseconv.nn.captured import Captured
from sparseconv.nn.results import Scene, apart_in_memory, clear_where
from sparseconv.ops.comparing import largest_gap
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Float


class LossByRows(TorchFunctionMode):
    """Within it `cross_entropy` of rows of classes on a GPU sums the losses of the rows, with gradients by row.

    With a reduction, torch's kernel adds up all rows in a single block. The numbers are equal up to the order of sums.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        is_theirs = function is torch.nn.functional.cross_entropy and len(args) > 1
        by_rows = is_theirs and all(t.is_cuda for t in args[:2])
        return (cross_entropy_by_rows if by_rows else function)(*args, **(kwargs or {}))


def cross_entropy_by_rows(
    input: Float[torch.Tensor, "N C"],
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy`; of (N, C) and (N,), without weights and smoothing, row by row."""
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not is_plain or reduction == "none" or input.ndim != 2 or target.shape != input.shape[:1]:
        more = weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return torch.nn.functional.cross_entropy(input, target, *more)
    total = torch.nn.functional.cross_entropy(input, target, ignore_index=ignore_index, reduction="none").sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def capture_step(
    network: torch.nn.Module,
    loss: Callable[[Any, Any], Float[torch.Tensor, ""]],
    example: SparseTensor,
    targets: Any,
    *,
    ignore: float = -100,
    room: float = 1.25,
    max_voxels: int | None = None,
    extent: IndexRange | Sequence[int] | None = None,
) -> CapturedStep:
    """A training step, maps and gradients included, as one CUDA graph: ``step(scene, targets)`` gives the loss.

    The gradients of the network's parameters are then in ``p.grad``, written anew by every call into the same memory
    (clone what must outlive the next one); running statistics have moved. An optimizer's step stays outside, and its
    changes are seen by the next call. Modes, autocast, ``requires_grad`` and hooks are those of the moment of capture;
    hooks on gradients that accumulate, as of data parallelism, are not called. Random numbers are new in every call. To
    scale the loss, let ``loss`` return ``scaler.scale(...)``: the value is then the scaled one.

    A scene that does not fit on the device has the loss NaN and gradients of 0, and a later call raises; other words
    about scenes are those of `capture`.

    Args:
        loss: (the network's output, targets) -> a scalar. It must leave out rows whose target is ``ignore``, as
            torch's cross-entropy does: that is tried on the example.
        targets: of the example: a tensor, or a tuple, list or dict of tensors. Those with a row for each voxel get dead
            rows of ``ignore``, others keep their shape; None where the loss needs none.
        ignore: the target of rows that are no voxels.

    The other arguments and errors are those of `capture`; the network may be in training.

    >>> import sparseconv as sc
    >>> from sparseconv import nn
    >>> network = nn.UNet(4, 3, channels=(8, 16))
    >>> grid, _ = sc.voxelize(torch.rand(500, 3), voxel_size=0.1)
    >>> scene, labels = SparseTensor(grid, torch.randn(len(grid), 4)), torch.randint(0, 3, (len(grid),))
    >>> loss = lambda y, targets: torch.nn.functional.cross_entropy(y.features.float(), targets)
    >>> step = nn.capture_step(network, loss, scene, labels)
    >>> optimizer = torch.optim.SGD(network.parameters(), 0.1)
    >>> for _ in range(3):
    ...     value = step(scene, labels)
    ...     optimizer.step()
    >>> bool(value < 2)
    True
    """
    return CapturedStep(network, example, targets, ignore, room, max_voxels, extent, loss)


class CapturedStep(Captured):
    """What `capture_step` made: a call for a scene and its targets; ``max_voxels`` is the most that it may have."""

    def __init__(self, network: torch.nn.Module, *args: Any) -> None:
        *rest, self._loss = args
        if isinstance(network, torch.nn.Module):
            self._parameters = [p for p in network.parameters() if p.requires_grad]
        super().__init__(network, *rest)

    def __call__(self, scene: Scene, targets: Any = None) -> torch.Tensor:
        """A scene as `CapturedInference` takes it, targets like the example's -> the loss (), a new tensor."""
        coords, features, leaves = self._given(scene, targets)
        self._raise()
        if self._fits(scene, len(coords)):
            with self._turns.on(self._device):
                self._run(coords, features, *leaves)
                loss, grads = self._results
                loss = loss.clone()
        else:
            with self._as_captured():
                loss, grads = self._body(self._whole(scene), targets)
        for p, grad in zip(self._parameters, grads):
            if p.grad is not grad:
                p.grad = grad
        return loss

    def _body(self, scene: SparseTensor, targets: Any) -> Any:
        # on one thread, whose maps have streams of their own and which has one workspace of cuBLAS
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            with self._autocast():
                output = self.network(scene)
                with LossByRows():
                    loss = self._loss(output, targets)
                del output
            if scene.grid.fault is not None:  # no gradient goes through the NaN
                loss = torch.where(scene.grid.fault[0] != 0, float("nan"), loss)
            grads = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        streams = current()
        if streams is not None:
            streams.settle(grads)
        made = apart_in_memory(grads)
        if scene.grid.fault is not None:  # nor does one come of 0 times NaN, from rows that nobody wrote
            clear_where(made, scene.grid.fault != 0)
        return loss.detach(), made

    def _try_loss(self, output: Any, padded: Any, of_rows: Any, targets: Any) -> None:
        with_dead, without = self._loss(output, padded), self._loss(of_rows, targets)
        if not isinstance(without, torch.Tensor) or without.ndim:
            raise ValueError(f"the loss must be a scalar tensor; got {without!r}")
        off = largest_gap(with_dead, without)
        if off:
            raise ValueError(
                f"the loss counts rows that are no voxels: it is {float(with_dead):.4g} with them and "
                f"{float(without):.4g} without. Leave out rows whose target is `ignore`, as cross-entropy does"
            )
