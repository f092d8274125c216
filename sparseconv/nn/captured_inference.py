"""A network's inference on new scenes, their maps built anew, captured once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparseconv.geometry.ranges import IndexRange
from sparseconv.nn.captured import Captured
from sparseconv.nn.results import Scene, rows_of
from sparseconv.tensor import SparseTensor


def capture(
    network: torch.nn.Module,
    example: SparseTensor,
    *,
    room: float = 1.25,
    max_voxels: int | None = None,
    extent: IndexRange | Sequence[int] | None = None,
) -> CapturedInference:
    """A network's inference, maps included, as one CUDA graph: a call that costs the host next to nothing.

    The graph works on arrays of a fixed number of rows, of which a scene fills the first; everything that depends on
    the scene is decided on the device. `FixedGrid` says what a map may be made of; normalisation by batch item and
    pooling of whole items are not offered.

    A call runs on the current stream and gives new tensors, of the scene's own rows; calls on several streams must wait
    for one another, since they share the graph's memory. What does not fit:

    - a scene that the host sees to be too large (rows, batch items, an ordinary grid's extent) runs without the graph,
      as if nothing had been captured, with a warning;
    - a scene of which the device finds that a voxel lies outside of the extent or occurs twice, or that a coarser grid
      has no room for it, gives NaN (-1 in integers), and a later call or `check` raises the reason.

    The weights are the network's own: a replay reads them as they are, and folds norms into them within the graph. A
    call after other tensors took their place captures again first, which takes some tenths of a second. Without a GPU a
    call is the plain call of the network.

    Args:
        network: in ``eval()``; its output is a `SparseTensor` on the input's grid, a tensor whose rows are the voxels',
            a tensor of a size that no scene changes, or a tuple, list or dict of these.
        example: a scene as they will come, on the network's device; it gives dtype, batch size and typical sizes.
        room: rows of every grid over those that it has for the example, at least 1.
        max_voxels: voxels of the largest scene; default: those of the example times ``room``. Rounded up to 256.
        extent: the box that voxels lie in; default: the example's, grown by an eighth on each side.

    Raises:
        TypeError, ValueError: arguments that do not fit, a network in training, a result whose number of rows the host
            cannot know, or one that changes with the rows that are no voxels.
        RuntimeError: the example does not fit into ``extent``, or the network does what no graph can hold.

    >>> import sparseconv as sc
    >>> from sparseconv import nn
    >>> network = nn.UNet(4, 3, channels=(8, 16)).eval()
    >>> scans = [sc.voxelize(torch.rand(n, 3), voxel_size=0.1)[0] for n in (500, 450)]
    >>> fast = nn.capture(network, SparseTensor(scans[0], torch.randn(len(scans[0]), 4)))
    >>> fast(SparseTensor(scans[1], torch.randn(len(scans[1]), 4))).channels
    3
    >>> logits = fast((scans[1].coords, torch.randn(len(scans[1]), 4)))  # no grid, which would wait for the device
    >>> logits.shape == (len(scans[1]), 3)
    True
    """
    return CapturedInference(network, example, None, 0, room, max_voxels, extent)


class CapturedInference(Captured):
    """What `capture` made: a call for a scene; ``max_voxels`` is the most that it may have."""

    def __init__(self, network: torch.nn.Module, *args: Any) -> None:
        if isinstance(network, torch.nn.Module) and network.training:
            raise ValueError("the network is in training: call network.eval() before nn.capture, or use capture_step")
        super().__init__(network, *args)

    def __call__(self, scene: Scene) -> Any:
        """A `SparseTensor`, or (coords (N, 1+D) int32, features (N, C)) -> the network's result in new tensors.

        What would be a `SparseTensor` on the scene's grid is one, or its features where the scene came without a grid.
        """
        coords, features, _ = self._given(scene, None)
        self._raise()
        if not self._fits(scene, len(coords)):
            with self._as_captured():
                whole = self._whole(scene)
                return rows_of(self._body(whole, None), scene, len(coords), whole.grid)
        with self._turns.on(self._device):
            self._run(coords, features)
            return rows_of(self._results, scene, self.max_voxels, bad=self._bad)

    @torch.no_grad()
    def _body(self, scene: SparseTensor, targets: Any) -> Any:
        with self._autocast():
            return self.network(scene)
