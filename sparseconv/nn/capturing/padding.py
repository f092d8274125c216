"""Torch's own modules on rows of which only the first are voxels, and what no graph can hold."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sparseconv.nn.capturing.answer import CannotCapture
from sparseconv.nn.fused.training import batch_norm_of_rows
from sparseconv.torch_private import TorchDispatchMode

#: operations that wait for the device, or whose results have a size that only the device knows
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim")
HERE = str(Path(__file__).parents[2])


class LiveRows(TorchFunctionMode):
    """Within it, torch's batch norm leaves out the rows that are no voxels.

    Every grid of fixed size of one scene has a number of rows of its own, so rows tell whose they are.
    """

    def __init__(self, family: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._family = family

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.batch_norm:
            found = self._batch_norm(*args, **kwargs)
            if found is not None:
                return found
        return function(*args, **kwargs)

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor | None:
        count = self._family.get(input.shape[0]) if input.ndim == 2 and training else None
        if count is None:
            return None
        return batch_norm_of_rows(input, count, weight, bias, running_mean, running_var, momentum, eps)


class _Watching(TorchDispatchMode):
    """A mode that torch's compiler need not know of: else each call would import that, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Guard(_Watching):
    """Within it, an operation that no graph can hold raises `CannotCapture` and says where it is.

    Args:
        before: storages of tensors that were made before the region, by address: a replay would read old values.
        device: that of the scene.
    """

    def __init__(self, before: Mapping[int, str], device: torch.device) -> None:
        super().__init__()
        self._before, self._device = before, device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        there = [t for t in tensors if t.device == self._device]
        place = _place() if there else None
        if place is not None:
            if name in WAITS:
                raise CannotCapture(f"{name} waits for the device, {place}")
            for t in there:
                what = self._before.get(t.untyped_storage().data_ptr()) if t.numel() else None
                if what is not None:
                    raise CannotCapture(f"{name} reads {what} {tuple(t.shape)}, made before the region, {place}")
        found = function(*args, **kwargs)
        copied = place is not None and name in ("_to_copy", "copy_") and isinstance(found, torch.Tensor)
        if copied and found.device.type != self._device.type:
            raise CannotCapture(f"a tensor is copied to the host, {place}")
        return found


class Seen(_Watching):
    """Within it, the tensors that operations make are noted: those that come before a region."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.made += [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
        return found


def _place() -> str | None:
    """Where in the caller's files an operation is; None where this library asks for it, whose replays are its own."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name and not name.startswith("<"):
            if name.startswith(HERE):
                return None
            line = linecache.getline(name, frame.f_lineno).strip()
            return f"at {Path(name).name}:{frame.f_lineno}: {line}"
        frame = frame.f_back
    return None
