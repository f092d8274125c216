"""From LLVM's text to a function of this process: by llvmlite, without a compiler."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

from sparseconv.llvm import object_cache
from sparseconv.llvm.target import Target, binding, host

_lock = Lock()  # llvmlite's compiler is one for the process
_engines: list[Any] = []  # whose code lives as long as they do


@cache
def missing() -> str | None:
    """None where llvmlite is installed and knows this CPU, else what to do."""
    if find_spec("llvmlite") is None:
        return "llvmlite, which compiles its kernels, is not installed: pip install 'sparseconv[cpu]'"
    try:
        host()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"llvmlite is installed and cannot be used here: {error}"
    return None


def compiled(text: str, name: str, target: Target) -> int:
    """The address of a function of a module in LLVM's language, from disk where a process has compiled it before."""
    with _lock:
        key = _key(text, target)
        code = object_cache.load(key)
        if code is None:
            code = object_code(text, target)
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


def _key(text: str, target: Target) -> str:
    """All that an object depends on: the text, the CPU, the compiler, and how this file asks it."""
    import llvmlite

    version = ".".join(map(str, binding().llvm_version_info))
    triple = binding().get_default_triple()
    parts = (llvmlite.__version__, version, triple, target, hashlib.sha256(text.encode()).hexdigest())
    return repr(("speed 2, opt 3, no unrolling", *parts))
