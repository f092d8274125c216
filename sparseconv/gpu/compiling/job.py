"""What another process must know to compile a kernel, and the mark in Triton's cache that says that it did."""

from __future__ import annotations

import hashlib
import importlib
import io
import logging
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

#: the folder of the marks in Triton's cache, which names its folders by digests
MARKS = hashlib.sha256(b"sparseconv: kernels that were compiled").hexdigest()


class Target(NamedTuple):
    """The card that kernels are compiled for, as Triton's `GPUTarget` has it."""

    backend: str
    arch: Any
    warp_size: int


class Job(NamedTuple):
    """A kernel to compile: its mark, and what `load` reads."""

    mark: str
    data: bytes


def job_of(
    function: Any, types: Sequence[Any], constants: Sequence[Any], options: dict[str, Any], target: Target
) -> Job | None:
    """The job of a jitted function that modules have under its name; None for others, made at run time."""
    try:
        return Job(mark_of(function, types, constants, options, target), _dump((function, types, constants, options)))
    except (pickle.PicklingError, AttributeError, TypeError, ImportError) as error:
        logger.debug("%s is compiled in this process: %s", function, error)
        return None


def mark_of(
    function: Any, types: Sequence[Any], constants: Sequence[Any], options: dict[str, Any], target: Target
) -> str:
    """A name for the compiled kernel: of its source, of all that it is compiled for, and of Triton's version."""
    import triton

    for value in (function, *constants):
        settle(value)
    shown = [f"{value.__class__.__name__} {getattr(value, 'cache_key', value)}" for value in constants]
    told = (
        function.cache_key,
        [_spelled(kind) for kind in types],
        shown,
        sorted(options.items()),
        tuple(target),
        triton.__version__,
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _spelled(kind: Any) -> str:
    """A type of an argument; a descriptor by its own name of it."""
    mangle = getattr(kind, "__mangle__", None)
    if mangle is not None:
        return str(mangle())
    told = getattr(kind, "block_shape", None)
    return str(kind) if told is None else f"descriptor of {kind.base.dtype} {told} {kind.layout!r}"


def compile_job(data: bytes) -> Any:
    """Compile what a job describes, for the active driver's target."""
    return compile_kernel(*pickle.loads(data))


def compile_kernel(function: Any, types: Sequence[Any], constants: Sequence[Any], options: dict[str, Any]) -> Any:
    """Triton's compiled kernel: integers are taken for neither 1 nor multiples of 16."""
    for value in (function, *constants):
        settle(value)
    shown = [13 if kind is int else kind for kind in types]
    return function.warmup(*shown, *constants, grid=(1,), **options)


#: functions whose keys are known, by their identity, and kept so that no other gets it
_settled: dict[int, Any] = {}


def settle(function: Any) -> None:
    """Have Triton work out the key of a jitted function after those of all that it calls.

    Triton 3.6 leaves out of a key what a function called reads of its module, unless that one's key is known. So the
    key would depend on what was compiled before, and no other process would find the kernel.
    """
    inner: Any = getattr(function, "fn", None)
    code = getattr(inner, "__code__", None)
    if code is None or not hasattr(type(function), "cache_key") or id(function) in _settled:
        return
    _settled[id(function)] = function
    for name in code.co_names:
        settle(inner.__globals__.get(name))
    function.cache_key  # noqa: B018


def is_marked(mark: str) -> bool:
    """Whether Triton's cache has this kernel."""
    try:
        return _marks().get_file(mark) is not None
    except (OSError, RuntimeError):
        return False


def put_mark(mark: str) -> None:
    """Say that Triton's cache has this kernel; where it cannot be written, nothing."""
    try:
        _marks().put("", mark, binary=False)
    except (OSError, RuntimeError) as error:
        logger.debug("no mark for a compiled kernel: %s", error)


def _marks() -> Any:
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(MARKS)


class _Pickler(pickle.Pickler):
    """Writes a jitted function as the place where it is found."""

    def reducer_override(self, value: Any) -> Any:
        function = getattr(value, "fn", None)
        if function is None or not hasattr(value, "cache_key"):
            return NotImplemented
        place = (function.__module__, function.__qualname__)
        if find(*place) is not value:
            raise pickle.PicklingError(f"{place[0]}.{place[1]} is another function")
        return find, place


def find(module: str, name: str) -> Any:
    """What a module has under a name."""
    return getattr(importlib.import_module(module), name)


def _dump(value: Any) -> bytes:
    written = io.BytesIO()
    _Pickler(written).dump(value)
    return written.getvalue()
