"""From LLVM's text to a function of this process: by llvmlite, without a compiler."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

from sparseconv.llvm import object_cache
from sparseconv.llvm.function import Function
from sparseconv.llvm.target import Target, binding, host

_lock = Lock()  # llvmlite's compiler is one for the process
_engines: list[Any] = []  # whose code lives as long as they do


@cache
def missing() -> str | None:
    """None where llvmlite is installed and knows this CPU, else what to do."""
    if find_spec("llvmlite") is None:
        return "llvmlite, which compiles its kernels, is not installed: pip install llvmlite"
    try:
        host()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"llvmlite is installed and cannot be used here: {error}"
    return None


def compiled(kind: type[Function], given: tuple[Any, ...], name: str, target: Target, *sizes: Any) -> int:
    """The address of a function: ``name`` in the module that ``kind(*given).text(*sizes)`` writes in LLVM's language.

    It comes from disk where a process has compiled it before. Then no text is written: that takes longer than loading.
    """
    with _lock:
        key = _key(kind, given, target, *sizes)
        code = object_cache.load(key)
        if code is None:
            code = object_code(kind(*given).text(*sizes), target)
            object_cache.store(key, code)
        llvm = binding()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target.machine())
        engine.set_object_cache(None, lambda module: code)
        engine.finalize_object()
        _engines.append(engine)
        return engine.get_function_address(name)


def object_code(text: str, target: Target) -> bytes:
    """The object file of a module in LLVM's language, for a CPU that need not be this one."""
    llvm = binding()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = target.machine()
    # what is to be vectorised, unrolled and kept in registers is so as it is written
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


def _key(kind: type[Function], given: tuple[Any, ...], target: Target, *sizes: Any) -> str:
    """All that an object depends on: what its text is made of, the CPU, the compiler, and how this file asks it.

    A text is made of its classes' sources, the constants that their modules see, and arguments. Where there are no
    sources, the text itself counts.
    """
    import llvmlite

    version = ".".join(map(str, binding().llvm_version_info))
    triple = binding().get_default_triple()
    if None in kind.sources:
        made_of = kind(*given).text(*sizes)
    else:
        modules = [vars(sys.modules[base.__module__]) for base in kind.__mro__ if base is not object]
        seen = [{name: value for name, value in module.items() if _is_constant(name, value)} for module in modules]
        made_of = repr((kind.__qualname__, kind.sources, seen, given, sizes))
    parts = (llvmlite.__version__, version, triple, target, hashlib.sha256(made_of.encode()).hexdigest())
    return repr(("speed 2, opt 3, no unrolling", *parts))


def _is_constant(name: str, value: object) -> bool:
    return isinstance(value, (int, float, str, tuple, dict)) and not name.startswith("__")
