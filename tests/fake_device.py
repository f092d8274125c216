"""A device type of torch that is neither a CPU nor CUDA: tensors of "fake" lie in CPU memory that nobody can address.

Every operation of torch on it goes through one function, `_on_cpu`. What asks it for an address gets 0.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._pytree import tree_map

#: what was asked of the device, by name
asked: list[str] = []
#: dtypes that the device refuses, as MPS has no fp64
LACKING = (torch.float64, torch.complex128)
#: what torch would make itself, as views of memory that is not there, or by writing to an array that grows
OWN = (
    *("arange", "linspace"),
    *("expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "select", "slice", "split", "split_with_sizes"),
    *("unbind", "diagonal", "unfold", "view_as_real", "view_as_complex"),
)
_kept: list[Any] = []
#: what tensors hold, by the storage that autograd's copies of them share; a new storage at an old address has its own
_memory: dict[int, torch.Tensor] = {}


class Module:
    """What torch asks ``torch.fake`` for."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device(self, index: int) -> Any:
        return nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@cache
def set_up() -> torch.device:
    """The device, made known to torch. Skips the test where torch has no devices written in Python (before 2.9)."""
    import pytest

    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError:
        pytest.skip("this torch has no devices written in Python")
    _setup_privateuseone_for_python_backend("fake", backend_module=Module())
    every = torch.library.Library("_", "IMPL")
    every.fallback(_on_cpu, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _kept.append(every)
    own = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided", "_to_copy", "_copy_from", "_copy_from_and_resize"):
        own.impl(name, globals()[f"_{name.split('.')[0].strip('_')}"], "PrivateUse1")
    for name in OWN:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            schema = getattr(packet, overload)
            is_there = torch._C._dispatch_has_kernel(schema.name())
            if is_there and not schema.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
                own.impl(schema.name().removeprefix("aten::"), partial(_on_cpu, schema), "PrivateUse1")
    _kept.append(own)
    return torch.device("fake", 0)


def _wrapped(memory: torch.Tensor) -> torch.Tensor:
    if memory.dtype in LACKING:
        raise TypeError(f"the device fake has no {memory.dtype}")
    if 0 in memory.stride():  # torch believes all to be contiguous here, and would write to one number twice
        memory = memory.clone(memory_format=torch.contiguous_format)
    made = torch._C._acc.create_empty_tensor(tuple(memory.shape), memory.dtype)
    _memory[made.untyped_storage()._cdata] = memory
    return made


def _held(value: Any) -> Any:
    is_ours = isinstance(value, torch.Tensor) and value.device.type == "fake"
    return _memory[value.untyped_storage()._cdata] if is_ours else value


def _is_fake(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "fake"


def _on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    asked.append(str(op))
    places = {id(_held(t)): t for t in [*args, *kwargs.values()] if isinstance(t, torch.Tensor)}
    args, kwargs = tree_map(_held, (args, kwargs))
    args, kwargs = tree_map(lambda v: torch.device("cpu") if _is_fake(v) else v, (args, kwargs))
    if str(op) == "aten.view.default":
        op = torch.ops.aten.reshape.default
    found = op(*args, **kwargs)
    return tree_map(lambda t: places.get(id(t), _wrapped(t)) if isinstance(t, torch.Tensor) else t, found)


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return _wrapped(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return _wrapped(torch.empty(size, dtype=dtype))


def _to_copy(x, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    memory = _held(x).to(dtype or x.dtype, copy=True)
    return _wrapped(memory) if (device or x.device).type == "fake" else memory.to(device)


def _copy_from(x, into, non_blocking=False):
    _held(into).copy_(_held(x))
    return into


def _copy_from_and_resize(x, into):
    _held(into).resize_(x.shape).copy_(_held(x))
    return into
