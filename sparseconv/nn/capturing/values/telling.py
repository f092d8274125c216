"""What calls are told apart by of a value: its own value, or a tensor's form."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sparseconv.nn.capturing.region import kind_of
from sparseconv.nn.capturing.values.containers import is_container, is_seen, items_of, moves

#: stands for an entry that a dict has not
MISSING = object()
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
SIMPLE = (*PLAIN, np.generic, np.ndarray)
#: what is looked at elsewhere
ELSEWHERE = (torch.nn.Module, ModuleType)
#: what holds nothing that is looked at
ALONE = (torch.Tensor, *PLAIN)
#: bytes of an array, and items of a container, that calls are told apart by
MOST_BYTES, MOST_ITEMS = 2**12, 2**8
#: items in all that objects are looked into for, and how deep
MOST_HELD, DEEPEST = 2**11, 16


def form_of(leaf: Any, rows: int, device: torch.device) -> Any:
    """What calls are told apart by of an argument, of a scene of so many ``rows`` on a device; see `Given.forms`."""
    if not isinstance(leaf, torch.Tensor):
        return object() if is_container(leaf) else told(leaf, strict=True) if is_seen(leaf) else spelled(leaf)
    if leaf.device != device:
        cells = leaf.detach().reshape(-1) if leaf.device.type == "cpu" and leaf.nbytes <= MOST_BYTES else None
        return leaf.dtype, leaf.shape, object() if cells is None else spelled(cells.view(torch.uint8).numpy())
    wants = leaf.requires_grad and torch.is_grad_enabled()
    return leaf.ndim, leaf.shape[1:], leaf.shape[:1] == (rows,), leaf.numel() == 0, leaf.dtype, leaf.device, wants


def told(
    value: Any,
    is_left: Callable[[Any], bool] = lambda value: False,
    depth: int = 8,
    seen: dict[int, tuple[int, Any]] | None = None,
    strict: bool = False,
) -> Any:
    """What calls are told apart by of a value that the rest of a call may read, in whose graph it stays what it was.

    Of a tensor the form but for its rows: operations on it are errors. None where it is looked at elsewhere, as is a
    module, or ``is_left``, and for this library's objects. What holds itself, or is held twice, is told once.
    ``strict``: nothing is equal to a tensor, as within objects that no call gets a copy of.
    """
    if isinstance(value, torch.Tensor):
        form = object() if strict else (value.ndim, value.shape[1:], value.dtype, value.device)
        return None if kind_of(value) else form
    if isinstance(value, SIMPLE):
        return spelled(value)
    if value is MISSING:
        return value
    if is_left(value) or isinstance(value, ELSEWHERE) or type(value).__module__.startswith("sparseconv."):
        return None
    is_set = isinstance(value, (set, frozenset))
    if not (is_set or is_seen(value) or is_container(value)):
        return spelled(value)
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value  # which is kept, and with it the address
    items = list(value) if is_set else items_of(value)
    strict |= not (is_set or is_container(value) or callable(value))
    if not depth or len(items) > MOST_ITEMS or len(seen) > MOST_HELD:
        return object()
    if is_set:
        return type(value), frozenset(told(item, is_left, depth - 1, seen, strict) for item in items)
    return type(value), tuple((key, told(item, is_left, depth - 1, seen, strict)) for key, item in items)


def spelled(value: Any) -> Any:
    """What calls are told apart by; nothing is equal to what may change unseen."""
    if isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    if moves(value):
        return object()
    try:
        hash(value)
    except TypeError:
        return object()
    return type(value), value  # True is equal to 1 and to 1.0
