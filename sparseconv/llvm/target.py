"""The CPU for which kernels are compiled: this one, or one named to LLVM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Target:
    """A CPU as LLVM knows it, and the vector registers that kernels are written for.

    Attributes:
        cpu: LLVM's name of it, such as ``"x86-64-v3"``.
        features: what it has beside (or without) what its name says, such as ``"+fma,-avx512f"``; empty for nothing.
        register: bytes of a vector register.
        registers: how many of them there are, 16 or 32.

    Example:
        >>> Target("x86-64-v3", "", register=32, registers=16).lanes(8)
        4
    """

    cpu: str
    features: str
    register: int
    registers: int

    def lanes(self, size: int) -> int:
        """How many numbers of ``size`` bytes a register holds."""
        return self.register // size

    def machine(self) -> Any:
        """A target machine of llvmlite, which an engine takes over."""
        target = binding().Target.from_default_triple()
        return target.create_target_machine(cpu=self.cpu, features=self.features, opt=3, jit=True)


@cache
def host() -> Target:
    """The CPU that runs this process."""
    llvm = binding()
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        register, registers = 64, 32
    elif features.get("avx"):
        register, registers = 32, 16
    else:
        is_arm = llvm.get_default_triple().startswith(("aarch64", "arm64"))
        register, registers = 16, 32 if is_arm else 16
    wide = ",-prefer-256-bit" if register == 64 else ""
    return Target(llvm.get_host_cpu_name(), features.flatten() + wide, register, registers)


@cache
def binding() -> Any:
    """llvmlite's, ready for this architecture."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm
