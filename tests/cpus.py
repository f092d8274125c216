"""CPUs that the compiled engine is tested as generated for, whatever the machine has."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from sparseconv.backends.registry import backend
from sparseconv.llvm.compile import missing
from sparseconv.llvm.target import Target, binding

#: the CPU that processes of the tests are held to
HELD = "SPARSECONV_TESTS_CPU"


@dataclass(frozen=True)
class Cpu:
    """A target, and what a machine must have to run its kernels."""

    target: Target
    needs: tuple[str, ...]

    def runs_here(self) -> bool:
        features = binding().get_host_cpu_features()
        return all(features.get(need) for need in self.needs)


def _x86() -> dict[str, Cpu]:
    if platform.machine().lower() not in ("x86_64", "amd64") or missing() is not None:
        return {}
    v3 = ("avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe")
    v4 = (*v3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
    return {
        "sse": Cpu(Target("x86-64", "", register=16, registers=16), ()),
        "avx2": Cpu(Target("x86-64-v3", "", register=32, registers=16), v3),
        "avx512": Cpu(Target("x86-64-v4", "-prefer-256-bit", register=64, registers=32), v4),
    }


CPUS = _x86()


def hold(name: str) -> None:
    """Generate kernels for this CPU, here and in the ranks that tests start."""
    os.environ[HELD] = name
    backend("llvm_implicit_gemm").target = CPUS[name].target  # type: ignore[attr-defined]


def is_held(name: str) -> bool:
    """Whether kernels are still generated for this CPU."""
    return backend("llvm_implicit_gemm").target is CPUS[name].target  # type: ignore[attr-defined]
