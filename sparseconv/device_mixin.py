"""`cuda()` and `cpu()` of everything that has a `to(device)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Moved = TypeVar("Moved", bound="Movable")


class Movable:
    """What lives on one device and gives a copy of itself on another."""

    def to(self: Moved, device: Any) -> Moved:
        """This on another device; itself if it is there."""
        raise NotImplementedError

    def cuda(self: Moved, device: torch.device | int | str = "cuda") -> Moved:
        """This on a GPU, by default the current one; itself if it is there."""
        return self.to(device)

    def cpu(self: Moved) -> Moved:
        """This on the CPU; itself if it is there."""
        return self.to("cpu")
