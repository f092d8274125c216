"""The backends there are, and which of them serves a request."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from sparseconv.backends.base import Backend, Request

#: in the order in which "auto" asks them; a backend is imported when it is first asked. What torch alone computes comes
#: last: it serves GPUs that the kernels are not compiled for, and halves before Ampere
BACKENDS = {
    "llvm_implicit_gemm": "sparseconv.backends.llvm_implicit_gemm.backend:LlvmImplicitGemm",
    "numpy_gather_scatter": "sparseconv.backends.gather_scatter:NumpyGatherScatter",
    "triton_implicit_gemm": "sparseconv.backends.triton_implicit_gemm.backend:TritonImplicitGemm",
    "cupy_gather_scatter": "sparseconv.backends.cupy_gather_scatter:CupyGatherScatter",
    "torch_gather_scatter": "sparseconv.backends.gather_scatter:TorchGatherScatter",
}


def check_backend(name: object) -> None:
    """Raise unless ``name`` is a backend's or "auto": TypeError for another kind, ValueError for another name."""
    if isinstance(name, str) and (name == "auto" or name in BACKENDS):
        return
    is_device = isinstance(name, str) and name.partition(":")[0] in ("cpu", "cuda", "gpu")
    advice = ". Where it computes is said by the device of the grid: grid.to(device), net.to(device)" * is_device
    raise (ValueError if isinstance(name, str) else TypeError)(
        f"no backend {name!r}; there are {', '.join(BACKENDS)}, and 'auto'{advice}"
    )


@cache
def backend(name: str) -> Backend:
    """The backend of that name. Raises ValueError, with the names there are, for another."""
    check_backend(name)
    module, attribute = BACKENDS[name].split(":")
    return getattr(import_module(module), attribute)()


def refusals(request: Request) -> dict[str, str | None]:
    """What each backend says to a request: None for yes, or its sentence."""
    return {name: backend(name).unsupported(request) for name in BACKENDS}


def choose(request: Request, name: str = "auto") -> Backend:
    """The first backend that can serve the request, or the named one.

    Raises ValueError with every backend's sentence where none can.
    """
    if name != "auto":
        sentence = backend(name).unsupported(request)
        if sentence is not None:
            raise ValueError(f"backend {name!r} was asked for by name, but {sentence}")
        return backend(name)
    said = []
    for candidate in BACKENDS:
        sentence = backend(candidate).unsupported(request)
        if sentence is None:
            return backend(candidate)
        said.append(f"\n  {candidate}: {sentence}")
    raise ValueError(
        f"no backend can convolve {request.c_in} -> {request.c_out} channels of {request.dtype} on {request.device}:"
        + "".join(said)
    )
