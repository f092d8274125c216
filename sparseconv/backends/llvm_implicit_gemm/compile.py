"""From LLVM's text to a function of this process: for the CPU that runs it, by llvmlite, without a compiler."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

_lock = Lock()  # llvmlite's compiler is one for the process
_engines: list[Any] = []  # whose code lives as long as they do


@cache
def missing() -> str | None:
    """None where llvmlite is installed and knows this CPU, else what to do."""
    if find_spec("llvmlite") is None:
        return "llvmlite, which compiles its kernels, is not installed: pip install 'sparseconv[cpu]'"
    try:
        lanes()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"llvmlite is installed and cannot be used here: {error}"
    return None


@cache
def lanes() -> tuple[int, int]:
    """(bytes of a vector register, how many there are) of this CPU."""
    features = binding().get_host_cpu_features()
    if features.get("avx512f"):
        return 64, 32
    if features.get("avx"):
        return 32, 16
    is_arm = binding().get_default_triple().startswith(("aarch64", "arm64"))
    return 16, 32 if is_arm else 16


def compiled(text: str, name: str) -> int:
    """The address of a function of a module in LLVM's language."""
    llvm = binding()
    with _lock:
        module = llvm.parse_assembly(text)
        module.verify()
        machine = _machine()
        # what is to be vectorised, unrolled and kept in registers is so as it is written
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
        _engines.append(engine)
        return engine.get_function_address(name)


@cache
def binding() -> Any:
    """llvmlite's, ready for this CPU."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _machine() -> Any:
    """A target machine, which an engine takes over."""
    llvm = binding()
    features = llvm.get_host_cpu_features().flatten()
    if lanes()[0] == 64:
        features += ",-prefer-256-bit"
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)
