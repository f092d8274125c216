"""A network's inference on new scenes, their maps built anew, captured once as a CUDA graph and replayed."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.nn.captured import Captured
from sparseconv.nn.results import Scene, rows_of
from sparseconv.tensor import SparseTensor


class CapturedInference(Captured):
    """What `nn.capture` makes with an example: a call for a scene; ``max_voxels`` is the most that it may have.

    The graph works on arrays of a fixed number of rows, of which a scene fills the first; everything that depends on
    the scene is decided on the device. `FixedGrid` says what a map may be made of; normalisation by batch item and
    pooling of whole items are not offered.

    A call runs on the current stream and gives new tensors, of the scene's own rows; calls on several streams must wait
    for one another, since they share the graph's memory. A scene that the host sees to be too large (rows, batch items,
    an ordinary grid's extent) runs without the graph, with a warning. One of which the device finds that a voxel lies
    outside of the extent or occurs twice, or that a coarser grid has no room for it, gives NaN (-1 in integers), and a
    later call or `check` raises the reason.

    The weights are the network's own: a replay reads them as they are, and folds norms into them within the graph. A
    call after other tensors took their place captures again first, which takes some tenths of a second.
    """

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
