"""What Triton keeps to itself: the C functions behind its launchers, and one of them for kernels of many signatures."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from triton.runtime import driver

#: arguments of the launcher that kernels share: those of the longest, and two that Triton adds
SHARED_ARGUMENTS = 56
#: what a launcher is called with that a C compiler made
BUILT_FORM = ("self", "gridX", "gridY", "gridZ", "stream", "function", "args")

SHARED = SimpleNamespace(constants={}, signature=dict.fromkeys(range(SHARED_ARGUMENTS), "i64"))


#: functions whose cache keys were worked out, by their identity, and kept so that no other gets it
_fixed: dict[int, Any] = {}


def fix_cache_key(function: Any) -> None:
    """Work out the cache key of a jitted function after those of all that it calls.

    Triton 3.6 leaves out of a key what a called function reads of its module, unless that function's key is known. So
    a key would depend on what was compiled before it, and a changed constant could find an old kernel.
    """
    inner: Any = getattr(function, "fn", None)
    code = getattr(inner, "__code__", None)
    if code is None or not hasattr(type(function), "cache_key") or id(function) in _fixed:
        return
    _fixed[id(function)] = function
    for name in code.co_names:
        fix_cache_key(inner.__globals__.get(name))
    function.cache_key  # noqa: B018


def with_shared_launcher(kernel: Any) -> Any:
    """The kernel, to be launched with SHARED_ARGUMENTS 64-bit numbers, of which the GPU reads those that it declares.

    Addresses and integers come first, then Triton's two addresses of scratch memory, then what is left over.
    """
    kernel = copy.copy(kernel)  # Triton launches its own by the signature that it was compiled for
    kernel.src = SHARED
    kernel.module = kernel.function = kernel._run = None
    return kernel


@cache
def builds_launchers() -> bool:
    """Whether this Triton has a C compiler make a launcher for each signature, which takes it half a second."""
    return tuple(inspect.signature(driver.active.launcher_cls.__call__).parameters) == BUILT_FORM


def entry_of(run: Any) -> tuple[Callable[..., None], tuple[bool, bool]] | None:
    """The C function behind a launcher of Triton that only adds memory for kernels which ask for some, and what it
    is told of cooperation and of overlap; None for kernels that ask, and for launchers of another form."""
    names = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if tuple(inspect.signature(type(run).__call__).parameters) != BUILT_FORM or not all(
        hasattr(run, name) for name in names
    ):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl)


def call_of(kernel: Any, run: Any) -> tuple[Callable[..., None], tuple]:
    """What launches a kernel, and what it is told between the stream and the kernel's own arguments."""
    at_once = entry_of(run)
    start, how = (run, ()) if at_once is None else (at_once[0], (*at_once[1], None, None))
    return start, (kernel.function, *how, kernel.packed_metadata, None, None, None)


def described(descriptor: Any, layout: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """What a tensor descriptor is encoded from: address, the driver's numbers for the dtype and the swizzle, bytes of a
    number, the box, shape and strides of the matrix; None for one of another form."""
    try:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    except ImportError:
        return None
    if layout is None or layout["fp4_padded"] or layout.get("is_im2col") or descriptor.padding != "zero":
        return None
    if getattr(descriptor, "round_f32_to_tf32", False):
        return None
    kind, size = TMA_DTYPE_DEVICE_TO_HOST[layout["elem_type"]], layout["elem_size"]
    sides = (list(map(int, part)) for part in (layout["block_size"], descriptor.shape, descriptor.strides))
    return descriptor.base.data_ptr(), kind, layout["swizzle"], size, *sides
