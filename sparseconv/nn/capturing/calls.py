"""Calls of one kind: what tells kinds apart, what was seen of them, and their recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from sparseconv.nn.capturing.answer import Given
from sparseconv.nn.capturing.recording import Recording
from sparseconv.nn.capturing.region import Scene

#: places over those of the largest scene so far, at first
ROOM = 1.125

_trains = attrgetter("training")


def key_of(scene: Scene, given: Given, path: Any, modules: Sequence[torch.nn.Module]) -> Any:
    """What calls must have in common to be replays of one recording; ``path`` is None where a call makes its scene, of
    tensors with any number of rows."""
    kind = scene.features.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    grad = torch.is_grad_enabled()
    arguments = given.forms(None if path is None else len(scene.coords))
    return (
        tuple(map(_trains, modules)),
        *(grad, autocast, scene.batch_size, scene.coords.shape[1], scene.voxel_size, scene.origin),
        *(scene.features.dtype, scene.features.shape[1], scene.features.device),
        *(grad and scene.features.requires_grad, torch.backends.cuda.matmul.allow_tf32, arguments),
    )


class Calls:
    """Calls of one kind: modes, dtypes, batch size. What was seen of them, and their recording."""

    def __init__(self) -> None:
        self.calls = 0
        self.scenes: list[Scene] = []
        self.wanted: set[int] = set()
        self.recording: Recording | None = None
        self.is_alone = False  # another kind's gradient is awaited when this one is called: their memory is not shared
        self.room = ROOM
        self.captures = 0
        self.replays = 0
        self.refused: str | None = None

    def forget(self) -> None:
        """Let go of a recording that scenes did not outgrow."""
        if self.recording is not None:
            self.recording = None
            self.captures -= 1

    def lines(self) -> Iterator[str]:
        """What is captured of them, or why nothing is."""
        if self.recording is not None:
            sizes = self.recording.sizes
            what = "forward and backward" if self.recording.trains else "forward"
            yield (
                f"{what} in graphs for up to {sizes.rows:,} voxels within {sizes.extent}: {self.replays:,} replays, "
                f"captured {self.captures} times"
            )
        elif self.refused is not None:
            yield f"eager: {self.refused}"
