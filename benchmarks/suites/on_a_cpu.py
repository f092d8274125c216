"""Code that asks for a CUDA GPU, on the CPU: devices are renamed, and questions about the GPU have an answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device


def _renamed(value: Any) -> Any:
    if isinstance(value, DEVICE):
        return DEVICE("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class _Kind(type):
    def __call__(cls, kind: Any, *index: int) -> Any:
        return DEVICE("cpu") if isinstance(kind, int) else DEVICE(_renamed(kind))

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, DEVICE)


class _Device(metaclass=_Kind):
    """In place of ``torch.device``: numbers and GPUs name the CPU."""


class OnTheCpu(TorchFunctionMode):
    """Every function of torch that is given a GPU takes the CPU in place of it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], "cpu", *args[2:])
        kwargs = {name: _renamed(value) for name, value in (kwargs or {}).items()}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return func(*map(_renamed, args), **kwargs)


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def rename_devices(suite: Path) -> None:
    """Sends all to the CPU from here on; files of the suite, and they alone, are told that there is a GPU."""

    def available() -> bool:
        return Path(sys._getframe(1).f_code.co_filename).is_relative_to(suite)

    begin = torch.autocast.__init__

    def autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        dtype = torch.float16 if dtype is None and device_type == "cuda" else dtype
        begin(self, _renamed(device_type), dtype, *args, **kwargs)

    kind: Any = torch.nn.Module
    move = kind.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        places = ["cpu" if isinstance(value, int) else _renamed(value) for value in args]
        moved: torch.nn.Module = move(self, *places, **kwargs)
        return moved

    cuda: Any = torch.cuda
    cuda.is_available = available
    cuda.Event, cuda.device = _Event, nullcontext
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated", "set_device"):
        setattr(cuda, name, lambda *_: None)
    for name in ("max_memory_allocated", "memory_allocated", "max_memory_reserved", "memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    cuda.get_device_name = lambda *_: "none"
    for name in ("FloatTensor", "DoubleTensor", "IntTensor", "LongTensor"):
        setattr(cuda, name, getattr(torch, name))
    vars(torch)["autocast"].__init__ = autocast
    vars(torch).update(device=_Device)
    kind.to = to
    OnTheCpu().__enter__()
