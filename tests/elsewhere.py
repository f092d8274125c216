"""A second device on the CPU: tensors that do not meet those of the host but through ``to`` and ``copy_``."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class Elsewhere(torch.Tensor):
    """A tensor of that device, ``tensor.as_subclass(Elsewhere)``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor) and t.ndim]
        if name not in ("to", "copy_") and not all(isinstance(t, Elsewhere) for t in tensors):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} found at least two devices")
        return super().__torch_function__(func, types, args, kwargs)
